//! Reading bodies and queries within their limits.

use std::io::Read as _;

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use bytes::Bytes;
use everbus_core::suggest::nearest;
use http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use crate::options::Limits;
use crate::problem::Problem;
use crate::state::AppState;

/// The body of a request, decompressed, and its content type.
pub(crate) struct Received {
    pub(crate) headers: HeaderMap,
    pub(crate) bytes: Bytes,
}

impl Received {
    /// The content type without parameters, in lower case.
    pub(crate) fn essence(&self) -> String {
        essence(&self.headers)
    }
}

/// The content type without parameters, in lower case.
pub(crate) fn essence(headers: &HeaderMap) -> String {
    let kind = headers.get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default();
    essence.trim().to_ascii_lowercase()
}

impl FromRequest<AppState> for Received {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        let bytes = read(body, &parts.headers, &state.options().limits).await?;
        Ok(Self {
            headers: parts.headers,
            bytes,
        })
    }
}

/// A JSON body. An empty one is an empty object.
pub(crate) struct Input<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<AppState> for Input<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, Problem> {
        let received = Received::from_request(request, state).await?;
        if received.bytes.is_empty() {
            return from_json(b"{}").map(Self);
        }
        match received.essence().as_str() {
            "application/json" => from_json(&received.bytes).map(Self),
            other => Err(unsupported(other, "application/json")),
        }
    }
}

/// The parameters of the query. Unknown ones are refused: a misspelt filter would match everything.
pub(crate) struct Params<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut http::request::Parts, _: &S) -> Result<Self, Problem> {
        let query = Query::try_from_uri(&parts.uri).map_err(|e| {
            let text = e.body_text();
            let what = text
                .split_once(": ")
                .map_or(text.as_str(), |(_, what)| what);
            Problem::bad_request(format!("the query cannot be read: {what}"))
        })?;
        let Query(value) = query;
        Ok(Self(value))
    }
}

/// Reads JSON; the error says where.
pub(crate) fn from_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(bytes)
        .map_err(|e| Problem::bad_request(format!("the body cannot be read: {e}")))
}

/// The refusal of a content type.
pub(crate) fn unsupported(given: &str, wanted: &str) -> Problem {
    let what = if given.is_empty() {
        "the body has no content type".to_owned()
    } else {
        format!("a body of type {given:?}")
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

async fn read(body: Body, headers: &HeaderMap, limits: &Limits) -> Result<Bytes, Problem> {
    let length = headers.get(header::CONTENT_LENGTH);
    let length: Option<usize> = length.and_then(|l| l.to_str().ok()?.parse().ok());
    if length.is_some_and(|length| length > limits.body) {
        return Err(too_large(limits.body));
    }
    let collected = Limited::new(body, limits.body).collect();
    let collected = tokio::time::timeout(limits.body_timeout, collected).await;
    let bytes = match collected {
        Ok(Ok(collected)) => collected.to_bytes(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(too_large(limits.body)),
        Ok(Err(_)) => return Err(Problem::bad_request("the body ended early")),
        Err(_) => {
            let what = "the body did not arrive in time";
            return Err(Problem::new(
                StatusCode::REQUEST_TIMEOUT,
                "BodyTimeout",
                what,
            ));
        }
    };
    let encoding = headers.get(header::CONTENT_ENCODING);
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

/// Decompresses up to a limit: a few kilobytes of gzip may hold gigabytes.
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
