//! The caller of a request.

use std::sync::Arc;

use everbus::{Code, Error, GroupName, Result};
use http::{HeaderMap, header};

use super::session;
use super::{Scope, TokenInfo};
use crate::guard::Peer;
use crate::problem::Problem;
use crate::state::AppState;

/// Begins the names of groups that belong to a tenant: `@acme/billing`.
const TENANT_MARK: char = '@';

/// The caller of a request: a token, the session that a token began, or anyone while the server is open.
#[derive(Clone, Debug)]
pub struct Caller {
    token: Option<Arc<TokenInfo>>,
    peer: Option<Peer>,
    via_session: bool,
}

impl Caller {
    /// Finds out who sent a request.
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

    /// Whether a caller of a moment ago would still be let in. A store that cannot be read changes nothing.
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

    /// The only tenant that the caller reaches; `None`: all of them. Every query is filtered by it.
    pub fn tenant(&self) -> Option<&str> {
        self.token.as_ref()?.tenant.as_deref()
    }

    /// Whether the caller may see an event of this tenant.
    pub fn sees(&self, tenant: Option<&str>) -> bool {
        self.tenant().is_none_or(|own| tenant == Some(own))
    }

    /// The tenant to filter by: the caller's own, or the one that a caller of all tenants asked for. Another
    /// tenant than the caller's own is refused.
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

    /// Whom a rate limit counts: the token, or the address while the server is open.
    pub(crate) fn identity(&self) -> String {
        match (&self.token, self.peer) {
            (Some(token), _) => token.id.clone(),
            (None, Some(peer)) => peer.0.ip().to_string(),
            (None, None) => String::new(),
        }
    }

    /// The group that the caller means by a name. Groups of a tenant have the tenant in their stored name, so that
    /// two tenants may use the same name.
    pub fn group(&self, name: &str) -> Result<GroupName> {
        match self.tenant() {
            Some(tenant) => tenant_group(tenant, name),
            None => name.parse(),
        }
    }

    /// The name that the caller knows a group by; `None` if it is the group of another tenant, or of no tenant.
    pub fn group_shown(&self, group: &GroupName) -> Option<String> {
        match self.tenant() {
            Some(tenant) => group
                .as_str()
                .strip_prefix(&prefix(tenant))
                .map(str::to_owned),
            None => Some(group.to_string()),
        }
    }

    /// The name of a group beside an event that the caller may see: its own groups by their names, groups that
    /// serve every tenant by theirs, groups of other tenants not at all.
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

/// Whose events a group gets, from its stored name: `Some(tenant)` for the group of a tenant.
pub(crate) fn tenant_of_group(group: &GroupName) -> Option<String> {
    let rest = group.as_str().strip_prefix(TENANT_MARK)?;
    let (tenant, _) = rest.split_once('/')?;
    Some(tenant.replace("%2F", "/").replace("%25", "%"))
}

/// Refuses names that only groups of tenants have.
pub(crate) fn check_new_group(caller: &Caller, name: &str) -> Result<()> {
    if caller.tenant().is_none() && name.starts_with(TENANT_MARK) {
        let what = format!("{name:?}: names that begin with @ belong to tenants");
        return Err(Error::new(Code::InvalidSetting, what).hint("choose another name"));
    }
    Ok(())
}

/// `@acme/`, with `/` and `%` of the tenant escaped: `a/b` must not be mistaken for a group `b…` of `a`.
fn prefix(tenant: &str) -> String {
    let tenant = tenant.replace('%', "%25").replace('/', "%2F");
    format!("{TENANT_MARK}{tenant}/")
}

/// Begins the subprotocol in which a WebSocket of a browser carries its token: scripts cannot set other headers.
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
