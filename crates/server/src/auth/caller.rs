//! The caller of a request, and the names of the groups of tenants.

use std::sync::Arc;

use everbus::{Code, Error, GroupName, Result};
use http::{HeaderMap, header};

use super::session;
use super::{Scope, TokenInfo};
use crate::guard::Peer;
use crate::problem::Problem;
use crate::state::AppState;

/// The first character in the names of groups that belong to a tenant: `@acme/billing`.
const TENANT_MARK: char = '@';

/// The caller of a request: a token, a session that was begun with a token, or anyone while the server is open.
#[derive(Clone, Debug)]
pub struct Caller {
    token: Option<Arc<TokenInfo>>,
    peer: Option<Peer>,
    via_session: bool,
}

impl Caller {
    /// Finds the caller of a request.
    pub(crate) async fn of(
        state: &AppState,
        headers: &HeaderMap,
        peer: Option<Peer>,
    ) -> Result<Self, Problem> {
        let tokens = state.tokens();
        if let Some(secret) = bearer(headers)? {
            let token = tokens.find(secret).await?;
            let token = token.ok_or_else(|| {
                Problem::unauthenticated("the token is unknown, revoked or has expired")
            })?;
            return Ok(Self::with(token, peer, false));
        }
        if let Some(token) = session::token_of(state, headers).await? {
            return Ok(Self::with(token, peer, true));
        }
        if state.is_open().await? {
            return Ok(Self {
                token: None,
                peer,
                via_session: false,
            });
        }
        Err(Problem::unauthenticated("there is no token"))
    }

    pub(crate) fn with(token: Arc<TokenInfo>, peer: Option<Peer>, via_session: bool) -> Self {
        Self {
            token: Some(token),
            peer,
            via_session,
        }
    }

    /// Whether the caller is still allowed: its token is valid, or the server is still open. True if the store cannot
    /// be read.
    pub(crate) async fn is_valid(&self, state: &AppState) -> bool {
        let valid = match &self.token {
            Some(token) => state.tokens().is_valid(token).await,
            None => state.is_open().await,
        };
        valid.unwrap_or(true)
    }

    /// Whether the caller has a scope.
    pub fn may(&self, scope: Scope) -> bool {
        let allows = |token: &Arc<TokenInfo>| {
            token.scopes.contains(&scope) || token.scopes.contains(&Scope::Admin)
        };
        self.token.as_ref().is_none_or(allows)
    }

    /// The only tenant that the caller can access; `None`: all tenants. Every query is filtered by it.
    pub fn tenant(&self) -> Option<&str> {
        self.token.as_ref()?.tenant.as_deref()
    }

    /// Whether the caller may see an event of this tenant.
    pub fn sees(&self, tenant: Option<&str>) -> bool {
        self.tenant().is_none_or(|own| tenant == Some(own))
    }

    /// The tenant to filter by: the tenant of the caller, or for a caller of all tenants the requested tenant. A caller
    /// with a tenant may not request another one.
    pub fn tenant_filter(&self, asked: Option<String>) -> Result<Option<String>, Problem> {
        match (self.tenant(), asked) {
            (Some(own), Some(asked)) if own != asked => {
                Err(Problem::forbidden("the token belongs to another tenant"))
            }
            (Some(own), _) => Ok(Some(own.to_owned())),
            (None, asked) => Ok(asked),
        }
    }

    /// The name in the audit trail: `token:NAME`, `session:NAME`, or `http` on an open server.
    pub fn actor(&self) -> String {
        match &self.token {
            Some(token) if self.via_session => format!("session:{}", token.name),
            Some(token) => format!("token:{}", token.name),
            None => "http".to_owned(),
        }
    }

    /// The token, unless the server is open.
    pub fn token(&self) -> Option<&TokenInfo> {
        self.token.as_deref()
    }

    /// The key for the rate limit: the id of the token, or the address while the server is open.
    pub(crate) fn identity(&self) -> String {
        match (&self.token, self.peer) {
            (Some(token), _) => token.id.clone(),
            (None, Some(peer)) => peer.0.ip().to_string(),
            (None, None) => String::new(),
        }
    }

    /// The stored name of a group of the caller. It contains the tenant, so that two tenants may use the same name.
    pub fn group(&self, name: &str) -> Result<GroupName> {
        match self.tenant() {
            Some(tenant) => tenant_group(tenant, name),
            None => name.parse(),
        }
    }

    /// The name of a group for the caller. `None` if the caller has a tenant and the group does not belong to it.
    pub fn group_shown(&self, group: &GroupName) -> Option<String> {
        match self.tenant() {
            Some(tenant) => group
                .as_str()
                .strip_prefix(&prefix(tenant))
                .map(str::to_owned),
            None => Some(group.to_string()),
        }
    }

    /// The name of a group in the details of an event that the caller may see. `None` for groups of other tenants;
    /// groups that serve every tenant are shown.
    pub fn group_beside_event(&self, group: &GroupName) -> Option<String> {
        match self.group_shown(group) {
            Some(name) => Some(name),
            None if group.as_str().starts_with(TENANT_MARK) => None,
            None => Some(group.to_string()),
        }
    }
}

/// The stored name of a tenant's group.
pub(crate) fn tenant_group(tenant: &str, name: &str) -> Result<GroupName> {
    GroupName::new(&format!("{}{name}", prefix(tenant)))
}

/// The tenant of a group, from its stored name; `None` for a group that serves every tenant.
pub(crate) fn tenant_of_group(group: &GroupName) -> Option<String> {
    let rest = group.as_str().strip_prefix(TENANT_MARK)?;
    let (tenant, _) = rest.split_once('/')?;
    Some(tenant.replace("%2F", "/").replace("%25", "%"))
}

/// Refuses names that begin with `@` from callers without a tenant: such names belong to tenants.
pub(crate) fn check_new_group(caller: &Caller, name: &str) -> Result<()> {
    if caller.tenant().is_none() && name.starts_with(TENANT_MARK) {
        let what = format!("{name:?}: names that begin with @ belong to tenants");
        return Err(Error::new(Code::InvalidSetting, what).hint("choose another name"));
    }
    Ok(())
}

/// The prefix `@acme/`. `/` and `%` in the tenant are escaped: otherwise the tenant `a/b` could be taken for the tenant
/// `a` with a group `b…`.
fn prefix(tenant: &str) -> String {
    let tenant = tenant.replace('%', "%25").replace('/', "%2F");
    format!("{TENANT_MARK}{tenant}/")
}

/// The prefix of the WebSocket subprotocol that carries the token of a browser: scripts cannot set other headers.
const SUBPROTOCOL: &str = "everbus.token.";

/// The token of a request.
fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let Some(value) = headers.get(header::AUTHORIZATION) else {
        let offered = headers.get(header::SEC_WEBSOCKET_PROTOCOL);
        let Some(offered) = offered.and_then(|value| value.to_str().ok()) else {
            return Ok(None);
        };
        let mut offered = offered.split(',').map(str::trim);
        return Ok(offered.find_map(|name| name.strip_prefix(SUBPROTOCOL)));
    };
    let text = value.to_str().unwrap_or_default();
    let token = text
        .split_once(' ')
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, token)| token.trim());
    token
        .map(Some)
        .ok_or_else(|| Problem::unauthenticated("Authorization is not a bearer token"))
}
