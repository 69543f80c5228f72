//! Reads bodies and queries, within limits.

use std::borrow::Cow;
use std::io::Read as _;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, HttpBody as _};
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use bytes::{Bytes, BytesMut};
use everbus_core::suggest::nearest;
use futures_util::StreamExt as _;
use http::request::Parts;
use http::{HeaderMap, StatusCode, header};
use serde::de::{Deserialize, DeserializeOwned};

use crate::guard::Connection;
use crate::options::Limits;
use crate::problem::Problem;
use crate::state::AppState;
use crate::timer::ConnectionTimer;

/// How many bytes of a too large body are read and dropped, at most.
const DISCARDED: usize = 32 << 20;
/// How long a too large body is read and dropped, at most.
const DISCARDING: Duration = Duration::from_secs(2);

/// The content type without parameters, in lower case.
pub(crate) fn essence(headers: &HeaderMap) -> Cow<'_, str> {
    let kind = headers.get(header::CONTENT_TYPE);
    if kind.is_some_and(|kind| kind == "application/json") {
        return Cow::Borrowed("application/json");
    }
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    match essence.bytes().any(|b| b.is_ascii_uppercase()) {
        true => Cow::Owned(essence.to_ascii_lowercase()),
        false => Cow::Borrowed(essence),
    }
}

/// A JSON body. An empty one is an empty object.
pub(crate) struct Input<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<AppState> for Input<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        let bytes = read(body, &parts, &state.options().limits).await?;
        if bytes.is_empty() {
            return from_json(b"{}").map(Self);
        }
        match &*essence(&parts.headers) {
            "application/json" => from_json(&bytes).map(Self),
            other => Err(unsupported(other, "application/json")),
        }
    }
}

/// A small JSON body, for routes that need no token.
pub(crate) struct SmallInput<T>(pub(crate) T);

/// The largest small body, in bytes.
const SMALL: usize = 4096;

impl<T: DeserializeOwned> FromRequest<AppState> for SmallInput<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        let limits = Limits {
            body: SMALL,
            decoded_body: SMALL,
            ..state.options().limits.clone()
        };
        let bytes = read(body, &parts, &limits).await?;
        match &*essence(&parts.headers) {
            "application/json" => from_json(&bytes).map(Self),
            other => Err(unsupported(other, "application/json")),
        }
    }
}

/// The query parameters. Types that refuse unknown parameters are used: a misspelt filter would otherwise match
/// everything.
pub(crate) struct Params<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut http::request::Parts, _: &S) -> Result<Self, Problem> {
        let query = Query::try_from_uri(&parts.uri).map_err(|e| {
            let text = e.body_text();
            let what = text
                .split_once(": ")
                .map_or(text.as_str(), |(_, what)| what);
            unreadable("query", what)
        })?;
        let Query(value) = query;
        Ok(Self(value))
    }
}

/// Parses JSON. The error names the line and column.
pub(crate) fn from_json<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Problem> {
    serde_json::from_slice(bytes).map_err(|e| unreadable("body", &e.to_string()))
}

/// The problem of a query or body with a field that cannot be read. The error is that of the parser.
fn unreadable(which: &str, error: &str) -> Problem {
    let error = error.replace("InvalidSetting: ", "");
    let error = error.replace("invalid digit found in string", "not a whole number");
    let problem = Problem::bad_request(format!("the {which} cannot be read: {error}"));
    match error.contains("is not a time") {
        true => problem.hint("a time is written 2026-01-31T12:00:00Z"),
        false => problem,
    }
}

/// The error for a content type that is not supported.
pub(crate) fn unsupported(given: &str, wanted: &str) -> Problem {
    let what = if given.is_empty() {
        "the body has no content type".to_owned()
    } else {
        format!("the server does not read a body of type {given:?} here")
    };
    let near = nearest(given, wanted.split(", "));
    let hint = near.map_or(format!("send {wanted}"), |near| format!("send {near}"));
    Problem::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "UnsupportedMediaType",
        what,
    )
    .hint(hint)
}

/// Reads a body, and decompresses it if it is gzip.
pub(crate) async fn read(body: Body, request: &Parts, limits: &Limits) -> Result<Bytes, Problem> {
    let timer = timer_of(request, limits);
    let bytes = as_sent(body, &timer, limits).await?;
    let encoding = request.headers.get(header::CONTENT_ENCODING);
    match encoding.map(http::HeaderValue::as_bytes) {
        None | Some(b"" | b"identity") => Ok(bytes),
        Some(b"gzip" | b"x-gzip") => gunzip(bytes, limits.decoded_body).await,
        Some(_) => Err(Problem::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "UnsupportedEncoding",
            "the body has an encoding that the server cannot read",
        )
        .hint("send gzip, or no Content-Encoding")),
    }
}

/// The timer of the connection of a request.
pub(crate) fn timer_of(request: &Parts, limits: &Limits) -> ConnectionTimer {
    let connection = request.extensions.get::<Connection>();
    connection.map_or_else(
        || ConnectionTimer::new(limits.body_timeout),
        |connection| connection.timer.clone(),
    )
}

async fn as_sent(body: Body, timer: &ConnectionTimer, limits: &Limits) -> Result<Bytes, Problem> {
    let length = body.size_hint().exact();
    let length = length.map(|length| usize::try_from(length).unwrap_or(usize::MAX));
    let mut stream = body.into_data_stream();
    if length.is_some_and(|length| length > limits.body) {
        discard(stream).await;
        return Err(too_large(limits.body));
    }
    let mut bytes = BytesMut::new();
    let deadline = tokio::time::Instant::now() + limits.body_timeout;
    loop {
        match timer.before(deadline, stream.next()).await {
            Some(None) => break,
            Some(Some(Ok(data))) if bytes.len() + data.len() > limits.body => {
                discard(stream).await;
                return Err(too_large(limits.body));
            }
            // A small body arrives in one piece: it is not copied.
            Some(Some(Ok(data))) if Some(data.len()) == length => return Ok(data),
            Some(Some(Ok(data))) => {
                if bytes.is_empty() {
                    bytes.reserve(length.unwrap_or(0));
                }
                bytes.extend_from_slice(&data);
                if Some(bytes.len()) == length {
                    break;
                }
            }
            Some(Some(Err(_))) => return Err(Problem::bad_request("the body ended early")),
            None => {
                let what = "the body did not arrive in time";
                let status = StatusCode::REQUEST_TIMEOUT;
                return Err(Problem::new(status, "BodyTimeout", what));
            }
        }
    }
    Ok(bytes.freeze())
}

/// Reads and drops more of the body for a moment. If a connection is closed with unread data, it is reset, and the
/// client does not see the response.
async fn discard(mut stream: BodyDataStream) {
    let reading = async {
        let mut left = DISCARDED;
        while let Some(Ok(data)) = stream.next().await {
            left = left.saturating_sub(data.len());
            if left == 0 {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(DISCARDING, reading).await;
}

/// Decompresses up to a limit: a few kilobytes of gzip may expand to gigabytes.
async fn gunzip(bytes: Bytes, limit: usize) -> Result<Bytes, Problem> {
    let unzipped = tokio::task::spawn_blocking(move || {
        let mut plain = Vec::new();
        let most = limit as u64 + 1;
        let decoder = flate2::read::MultiGzDecoder::new(&bytes[..]);
        decoder.take(most).read_to_end(&mut plain).map(|_| plain)
    });
    match unzipped.await {
        Ok(Ok(plain)) if plain.len() > limit => Err(too_large(limit)),
        Ok(Ok(plain)) => Ok(plain.into()),
        Ok(Err(_)) => Err(Problem::bad_request("the body is not gzip")),
        Err(_) => Err(Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "Internal",
            "the body could not be decompressed",
        )),
    }
}

fn too_large(limit: usize) -> Problem {
    let what = format!("the body has more than {limit} bytes");
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "BodyTooLarge", what)
        .hint("send several smaller requests, or raise server.max_body")
}
