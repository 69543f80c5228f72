//! The HTTP API, a file per topic.

pub(crate) mod dead_letters;
pub(crate) mod events;
pub(crate) mod groups;
mod health;
pub(crate) mod jobs;
mod login;
pub(crate) mod publish;
pub(crate) mod pull;
pub(crate) mod replays;
pub(crate) mod schedules;
mod shapes;
pub(crate) mod system;
pub(crate) mod tasks;
mod tokens;
mod webhooks;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;

use crate::guard::MOST_ADDED;
use crate::routes::Route;

/// The initial size of a response buffer, in bytes: the usual response to a publish fits.
const SMALL: usize = 256;
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Every route of the API.
pub(crate) fn routes() -> Vec<Route> {
    let mut routes = Vec::new();
    routes.extend(publish::routes());
    routes.extend(events::routes());
    routes.extend(dead_letters::routes());
    routes.extend(groups::routes());
    routes.extend(pull::routes());
    routes.extend(webhooks::routes());
    routes.extend(replays::routes());
    routes.extend(tasks::routes());
    routes.extend(jobs::routes());
    routes.extend(schedules::routes());
    routes.extend(system::routes());
    routes.extend(health::routes());
    routes.extend(login::routes());
    routes.extend(tokens::routes());
    routes
}

/// A JSON response.
pub(crate) struct Answer<T>(pub(crate) T);

impl<T: Serialize> IntoResponse for Answer<T> {
    fn into_response(self) -> Response {
        let mut body = Vec::with_capacity(SMALL);
        match serde_json::to_writer(&mut body, &self.0) {
            Ok(()) => {
                let mut response = Response::new(body.into());
                let headers = response.headers_mut();
                // Room for all headers of the response avoids a second allocation.
                headers.reserve(MOST_ADDED + 2);
                headers.insert(header::CONTENT_TYPE, JSON);
                response
            }
            Err(error) => {
                tracing::error!(target: "everbus::http", %error, "an answer could not be written");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }
}

/// The response to a request that creates something under an address: `201` with the address, or `200` if an earlier
/// request has created it.
pub(crate) struct Creation<T> {
    pub(crate) new: bool,
    pub(crate) address: String,
    pub(crate) answer: T,
}

impl<T: Serialize> IntoResponse for Creation<T> {
    fn into_response(self) -> Response {
        let mut response = Answer(self.answer).into_response();
        // The address is percent-encoded, so it is a valid header.
        if let (true, Ok(address)) = (self.new, HeaderValue::try_from(self.address)) {
            *response.status_mut() = StatusCode::CREATED;
            response.headers_mut().insert(header::LOCATION, address);
        }
        response
    }
}

/// Percent-encodes a text for a query, or for one segment of a path: everything except letters, digits and `-._~`.
pub(crate) fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                encoded.push(char::from(byte));
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}
