//! Tokens: random secrets of 256 bits, with scopes and a tenant. The store has only the SHA-256 of a secret.
//!
//! All tokens are one value in the store, so that a change is one compare-and-set. Every server that shares the store
//! keeps a copy of the value, and renews it every second.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use data_encoding::{BASE64URL_NOPAD, HEXLOWER};
use everbus::{Bus, Clock as _, Code, Error, Kv, Result, SystemClock, Timestamp};
use parking_lot::{Mutex, RwLock};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Scope;

/// The key-value bucket of the server.
pub(crate) const BUCKET: &str = "everbus-server";
const KEY: &str = "tokens";
/// The prefix of every token, so that scanners for leaked secrets recognise it.
const PREFIX: &str = "evb_";
/// For an unknown token the server reads the store again, but not more often than this.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// How often a change is retried when other processes change the list at the same time.
const TRIES: usize = 20;
/// More tokens are refused as a mistake.
const MOST: usize = 10_000;

/// A request for a new token.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenRequest {
    /// A name for people: who uses it.
    pub name: String,
    /// What it allows.
    pub scopes: Vec<Scope>,
    /// The only tenant that the token can access; all tenants if it is left out.
    #[serde(default)]
    pub tenant: Option<String>,
    /// When the token expires.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    pub expires_at: Option<Timestamp>,
}

impl TokenRequest {
    /// Refuses a name, a tenant or scopes that a token cannot have.
    pub fn check(&self) -> Result<()> {
        check(self)
    }
}

/// A token without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TokenInfo {
    /// The id, for lists and for revoking the token.
    pub id: String,
    /// A name for people.
    pub name: String,
    /// What it allows.
    pub scopes: Vec<Scope>,
    /// The only tenant that the token can access.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// When it was made.
    #[schemars(with = "String")]
    pub created_at: Timestamp,
    /// When the token expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub expires_at: Option<Timestamp>,
}

/// A new token with its secret, which is shown only here.
#[derive(Clone, Serialize, JsonSchema)]
pub struct NewToken {
    /// The secret: `Authorization: Bearer …`.
    pub token: String,
    /// The other fields.
    #[serde(flatten)]
    pub info: TokenInfo,
}

impl std::fmt::Debug for NewToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewToken")
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

/// A token as the store keeps it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Stored {
    id: String,
    /// The SHA-256 of the secret, in hex.
    hash: String,
    name: String,
    scopes: Vec<Scope>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tenant: Option<String>,
    created_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expires_at: Option<Timestamp>,
}

impl Stored {
    fn info(&self) -> TokenInfo {
        TokenInfo {
            id: self.id.clone(),
            name: self.name.clone(),
            scopes: self.scopes.clone(),
            tenant: self.tenant.clone(),
            created_at: self.created_at,
            expires_at: self.expires_at,
        }
    }
}

/// The tokens of the store.
pub struct Tokens {
    kv: Result<Kv>,
    known: RwLock<Option<Arc<Known>>>,
    looked: Mutex<Option<Instant>>,
}

/// The tokens by the hash of their secrets. An attacker cannot choose the hash of a guess, so the time of a lookup
/// reveals nothing about a secret.
#[derive(Default)]
struct Known {
    by_hash: HashMap<String, Arc<TokenInfo>>,
    ids: HashSet<String>,
    /// Whether the list exists in the store, even if it is empty.
    used: bool,
}

impl Tokens {
    /// The tokens in the store of a bus.
    pub fn new(bus: &Bus) -> Self {
        Self {
            kv: bus.kv(BUCKET),
            known: RwLock::default(),
            looked: Mutex::default(),
        }
    }

    fn kv(&self) -> Result<&Kv> {
        self.kv.as_ref().map_err(Clone::clone)
    }

    /// Creates a token. Its secret is returned and not stored.
    pub async fn create(&self, request: TokenRequest) -> Result<NewToken> {
        check(&request)?;
        let mut secret = [0_u8; 32];
        let mut id = [0_u8; 6];
        for bytes in [&mut secret[..], &mut id[..]] {
            getrandom::fill(bytes)
                .map_err(|e| Error::new(Code::OutOfResources, format!("no random bytes: {e}")))?;
        }
        let token = format!("{PREFIX}{}", BASE64URL_NOPAD.encode(&secret));
        let mut scopes = request.scopes;
        scopes.sort_unstable();
        scopes.dedup();
        let stored = Stored {
            id: HEXLOWER.encode(&id),
            hash: hash(&token),
            name: request.name,
            scopes,
            tenant: request.tenant,
            created_at: SystemClock.now(),
            expires_at: request.expires_at,
        };
        let info = stored.info();
        self.change(|all| {
            if all.len() >= MOST {
                let what = format!("there are {MOST} tokens already");
                return Err(Error::new(Code::InvalidSetting, what).hint("revoke unused ones"));
            }
            all.push(stored.clone());
            Ok(())
        })
        .await?;
        Ok(NewToken { token, info })
    }

    /// Every token, without secrets, oldest first.
    pub async fn list(&self) -> Result<Vec<TokenInfo>> {
        let (all, _) = self.read().await?;
        Ok(all.iter().map(Stored::info).collect())
    }

    /// Revokes a token by its id. This server refuses it at once, the others after about a second.
    pub async fn revoke(&self, id: &str) -> Result<TokenInfo> {
        let mut revoked = None;
        self.change(|all| {
            let at = all.iter().position(|token| token.id == id);
            let at = at.ok_or_else(|| {
                Error::new(Code::NotFound, format!("there is no token {id:?}"))
                    .hint("`everbus token list` shows their ids")
            })?;
            revoked = Some(all.remove(at).info());
            Ok(())
        })
        .await?;
        revoked.ok_or_else(|| Error::new(Code::Internal, "the token was not removed"))
    }

    /// Whether there is any token.
    pub async fn exist(&self) -> Result<bool> {
        let known = self.known_if_any().await?;
        Ok(known.is_some_and(|known| !known.by_hash.is_empty()))
    }

    /// Whether a token was ever created, even if it was revoked since. Until then a loopback server is open.
    pub async fn are_used(&self) -> Result<bool> {
        // Every request calls this, so it must be quick: the copy nearly always exists.
        if let Some(known) = &*self.known.read() {
            return Ok(known.used);
        }
        let known = self.known_if_any().await?;
        Ok(known.is_some_and(|known| known.used))
    }

    /// The tokens; `None` if the engine cannot store tokens.
    async fn known_if_any(&self) -> Result<Option<Arc<Known>>> {
        match self.known().await {
            Err(error) if error.code() == Code::Unsupported => Ok(None),
            known => known.map(Some),
        }
    }

    /// Deletes the empty list of tokens: a loopback server is open again. Fails if there are tokens.
    pub async fn reset(&self) -> Result<()> {
        let (all, _) = self.read().await?;
        if !all.is_empty() {
            let what = match all.len() {
                1 => "there is still a token".to_owned(),
                many => format!("there are still {many} tokens"),
            };
            return Err(Error::new(Code::InvalidSetting, what)
                .hint("revoke it first: everbus token list, everbus token revoke ID"));
        }
        self.kv()?.delete(KEY).await?;
        self.renew().await.map(drop)
    }

    /// Whether a token is still valid: not revoked, and not expired.
    pub(crate) async fn is_valid(&self, token: &TokenInfo) -> Result<bool> {
        let known = self.known().await?;
        let ended = token.expires_at.is_some_and(|end| end <= SystemClock.now());
        Ok(!ended && known.ids.contains(&token.id))
    }

    /// The token with this secret, if it is valid now.
    pub(crate) async fn find(&self, secret: &str) -> Result<Option<Arc<TokenInfo>>> {
        if !secret.starts_with(PREFIX) || secret.len() > 128 {
            return Ok(None);
        }
        self.find_hash(&hash(secret)).await
    }

    /// The token whose secret has this hash, if it is valid now. Sessions store the hash.
    pub(crate) async fn find_hash(&self, hash: &str) -> Result<Option<Arc<TokenInfo>>> {
        let mut found = self.known().await?.by_hash.get(hash).cloned();
        if found.is_none() && self.may_look_again() {
            found = self.renew().await?.by_hash.get(hash).cloned();
        }
        let now = SystemClock.now();
        Ok(found.filter(|token| token.expires_at.is_none_or(|end| end > now)))
    }

    fn may_look_again(&self) -> bool {
        let mut looked = self.looked.lock();
        let due = looked.is_none_or(|at| at.elapsed() >= LOOK_AGAIN);
        if due {
            *looked = Some(Instant::now());
        }
        due
    }

    async fn known(&self) -> Result<Arc<Known>> {
        let known = self.known.read().clone();
        match known {
            Some(known) => Ok(known),
            None => self.renew().await,
        }
    }

    /// Reads the store again.
    async fn renew(&self) -> Result<Arc<Known>> {
        let (all, revision) = self.read().await?;
        let by_hash = all.iter().map(|t| (t.hash.clone(), Arc::new(t.info())));
        let known = Arc::new(Known {
            by_hash: by_hash.collect(),
            ids: all.iter().map(|t| t.id.clone()).collect(),
            used: revision != everbus_core::ABSENT,
        });
        *self.known.write() = Some(known.clone());
        Ok(known)
    }

    /// Renews the copy of this process every second, until the future is dropped. So a token that another process
    /// revokes is refused here after about a second.
    pub(crate) async fn follow(&self) {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            // The error is ignored: the copy stays as it is, and the next round tries again.
            let _ = self.renew().await;
        }
    }

    async fn read(&self) -> Result<(Vec<Stored>, u64)> {
        let found = self.kv()?.get_json(KEY).await?;
        Ok(found.unwrap_or((Vec::new(), everbus_core::ABSENT)))
    }

    /// Changes the list by compare-and-set.
    async fn change(&self, mut change: impl FnMut(&mut Vec<Stored>) -> Result<()>) -> Result<()> {
        let mut tries = 0;
        loop {
            let (mut all, revision) = self.read().await?;
            change(&mut all)?;
            let put = self.kv()?.put_json(KEY, &all).expected(revision).await;
            match put {
                Err(error) if error.code() == Code::RevisionConflict && tries < TRIES => tries += 1,
                put => {
                    put?;
                    self.renew().await?;
                    return Ok(());
                }
            }
        }
    }
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens").finish_non_exhaustive()
    }
}

/// The SHA-256 of a secret, in hex.
pub(crate) fn hash(secret: &str) -> String {
    HEXLOWER.encode(&Sha256::digest(secret.as_bytes()))
}

fn check(request: &TokenRequest) -> Result<()> {
    let bad = |what: &str, hint: &str| {
        Err(Error::new(Code::InvalidSetting, what.to_owned()).hint(hint.to_owned()))
    };
    let readable = |text: &str, most: usize| {
        (1..=most).contains(&text.chars().count()) && !text.chars().any(char::is_control)
    };
    if !readable(&request.name, 100) {
        return bad(
            "the name of a token has 1 to 100 printable characters",
            "name it after who uses it, such as billing-service",
        );
    }
    if request.scopes.is_empty() {
        return bad(
            "the token has no scope",
            "give one or more of publish, consume, read, operate, admin",
        );
    }
    match &request.tenant {
        Some(tenant) if !readable(tenant, 64) => bad(
            "the tenant of a token has 1 to 64 printable characters",
            "leave it out for a token of all tenants",
        ),
        _ => Ok(()),
    }
}
