//! Sessions of the dashboard: a person enters a token once and gets a cookie. Scripts cannot read the cookie, and no
//! other site can send it.

use std::sync::Arc;
use std::time::Duration;

use data_encoding::BASE64URL_NOPAD;
use everbus::{Code, Error, Result};
use http::{HeaderMap, HeaderValue, header};

use super::TokenInfo;
use super::tokens::{BUCKET, hash};
use crate::state::AppState;

const COOKIE: &str = "everbus_session";
/// The lifetime of a session.
const LASTS: Duration = Duration::from_secs(12 * 3600);

/// Begins a session for a token. Returns the cookie; `None` if the token is not valid.
pub(crate) async fn begin(state: &AppState, secret: &str) -> Result<Option<HeaderValue>> {
    if state.tokens().find(secret).await?.is_none() {
        return Ok(None);
    }
    let mut random = [0_u8; 32];
    getrandom::fill(&mut random)
        .map_err(|e| Error::new(Code::OutOfResources, format!("no random bytes: {e}")))?;
    let id = BASE64URL_NOPAD.encode(&random);
    let kv = state.bus().kv(BUCKET)?;
    kv.put(key(&id), hash(secret)).ttl(LASTS).await?;
    Ok(Some(cookie(state, &id, LASTS)))
}

/// Ends the session of a request. Returns the cookie that removes it.
pub(crate) async fn end(state: &AppState, headers: &HeaderMap) -> Result<HeaderValue> {
    if let Some(id) = id(headers) {
        state.bus().kv(BUCKET)?.delete(key(id)).await?;
    }
    Ok(cookie(state, "", Duration::ZERO))
}

/// The token that began the session of a request, if it is still valid.
pub(crate) async fn token_of(
    state: &AppState,
    headers: &HeaderMap,
) -> Result<Option<Arc<TokenInfo>>> {
    let Some(id) = id(headers) else {
        return Ok(None);
    };
    let Some(entry) = state.bus().kv(BUCKET)?.get(key(id)).await? else {
        return Ok(None);
    };
    let hash = std::str::from_utf8(&entry.value).unwrap_or_default();
    state.tokens().find_hash(hash).await
}

/// The key of a session in the store. It has only a hash of the session id, so that a copy of the store gives no
/// access.
fn key(id: &str) -> String {
    format!("session/{}", hash(id))
}

fn id(headers: &HeaderMap) -> Option<&str> {
    let all = headers.get_all(header::COOKIE).into_iter();
    let mut pairs = all
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(';'));
    let id = pairs.find_map(|pair| {
        let (name, value) = pair.trim().split_once('=')?;
        (name == COOKIE).then_some(value)
    })?;
    (id.len() == 43).then_some(id)
}

fn cookie(state: &AppState, id: &str, lasts: Duration) -> HeaderValue {
    let secure = if state.options().tls.is_some() {
        "; Secure"
    } else {
        ""
    };
    let seconds = lasts.as_secs();
    let text =
        format!("{COOKIE}={id}; Path=/; HttpOnly; SameSite=Strict; Max-Age={seconds}{secure}");
    // The text has only letters, digits and known punctuation, so this cannot fail.
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static(""))
}
