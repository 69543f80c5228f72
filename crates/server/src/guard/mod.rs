//! The code around every request: the request id, the checks of `Host` and `Origin`, the common response headers, and
//! problem documents for requests that the router refuses.

pub(crate) mod rate;

use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::time::Instant;

use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use everbus::{EventId, TraceContext};
use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use tower::Service as _;

use crate::auth::Caller;
use crate::dashboard::error_page;
use crate::problem::{self, Problem};
use crate::state::AppState;
use crate::timer::ConnectionTimer;

/// The address of the client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) SocketAddr);

impl Peer {
    /// The key for the rate limit of requests without a valid token.
    pub(crate) fn unnamed(self) -> String {
        format!("address {}", self.0.ip())
    }
}

/// The connection of a request. Every request of a server has it in its extensions.
#[derive(Clone)]
pub(crate) struct Connection {
    pub(crate) peer: Peer,
    pub(crate) timer: ConnectionTimer,
    /// The caller of this request, once the check of its route has found it.
    pub(crate) caller: Option<Caller>,
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longer request ids are ignored: the id is copied into every event and log line.
const LONGEST_ID: usize = 128;

/// `finish` adds at most this many headers to a response.
pub(crate) const MOST_ADDED: usize = 9;

const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Allows scripts, styles and images only from the server itself, and no frames. Pages have no inline script or style.
const CSP: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                   font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; \
                   frame-ancestors 'none'; manifest-src 'self'";

// A `HeaderValue` checks each byte when it is made, so these are made at compile time.
/// The headers that every response has.
const FIXED: [(HeaderName, HeaderValue); 5] = [
    (
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(CSP),
    ),
    (
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    ),
    (header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
    (
        header::REFERRER_POLICY,
        HeaderValue::from_static("no-referrer"),
    ),
    (RESOURCE_POLICY, HeaderValue::from_static("same-origin")),
];
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// The context that a client gave with a request. The request has it in its extensions, if there is any.
#[derive(Clone)]
pub(crate) struct Context {
    /// The request id of the client, which becomes the correlation id of published events. Without it each event has
    /// its own correlation id.
    pub(crate) correlation_id: Option<Box<str>>,
    pub(crate) trace: Option<TraceContext>,
}

/// Serves a request: checks it, runs the router, and completes the response.
pub(crate) async fn around(state: &AppState, mut router: Router, mut request: Request) -> Response {
    let given = request_id(request.headers());
    let id = given.as_deref().map_or_else(made_id, visible);
    let trace = trace(request.headers());
    if given.is_some() || trace.is_some() {
        request.extensions_mut().insert(Context {
            correlation_id: given.map(String::into_boxed_str),
            trace,
        });
    }
    let seen = Seen::of(&request);
    let is_person = is_person(&request);
    let origin = allowed_origin(state, request.headers());
    let is_open = state.is_open().await;
    let admitted = is_open.map_err(Problem::from);
    let admitted = admitted.and_then(|is_open| admit(state, is_open, &request));
    let response = match (admitted, &origin) {
        (Err(problem), _) => problem.into_response(),
        (Ok(()), Some(origin)) if is_preflight(&request) => preflight(origin),
        (Ok(()), _) => {
            let served = AssertUnwindSafe(router.call(request)).catch_unwind();
            served
                .await
                .map_or_else(|_| seen.panicked(), |Ok(response)| response)
        }
    };
    let mut response = as_problem(response, is_person);
    if is_person && let Some(problem) = response.extensions_mut().remove::<Problem>() {
        show_page(&mut response, &problem);
    }
    seen.log(response.status(), &id);
    finish(response.headers_mut(), id, origin);
    response
}

/// The parts of a request that are logged.
struct Seen {
    method: Method,
    uri: Uri,
    /// The start of the request; `None` if requests are not logged.
    began: Option<Instant>,
}

impl Seen {
    fn of(request: &Request) -> Self {
        let is_logged = tracing::enabled!(target: "everbus::http", tracing::Level::DEBUG);
        Self {
            method: request.method().clone(),
            uri: request.uri().clone(),
            began: is_logged.then(Instant::now),
        }
    }

    fn log(&self, status: StatusCode, id: &HeaderValue) {
        let Some(began) = self.began else { return };
        tracing::debug!(
            target: "everbus::http",
            method = %self.method,
            path = %self.uri.path(),
            status = status.as_u16(),
            duration_ms = began.elapsed().as_secs_f64() * 1000.0,
            request_id = %id.to_str().unwrap_or_default(),
            "request"
        );
    }

    /// The response after a panic in a handler.
    fn panicked(&self) -> Response {
        let path = self.uri.path();
        tracing::error!(target: "everbus::http", %path, "a request handler panicked");
        let what = "the request met a bug; the server goes on";
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal", what).into_response()
    }
}

/// A new id for a request without one.
fn made_id() -> HeaderValue {
    let mut buffer = [0; 36];
    let id = EventId::new().as_uuid();
    visible(id.hyphenated().encode_lower(&mut buffer))
}

/// Makes a header value from a text of visible ASCII characters.
fn visible(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("-"))
}

/// Refuses requests that a page of another site may have sent.
fn admit(state: &AppState, is_open: bool, request: &Request) -> Result<(), Problem> {
    let headers = request.headers();
    if is_open && !is_known_host(state, headers) {
        let what = "the server does not answer under this host name";
        return Err(
            Problem::new(StatusCode::MISDIRECTED_REQUEST, "UnknownHost", what)
                .hint("use 127.0.0.1 or localhost, or name the host in server.hosts"),
        );
    }
    let upgrades = headers.contains_key(header::UPGRADE);
    if request.method().is_safe() && !upgrades {
        return Ok(());
    }
    check_origin(state, headers)
}

/// Refuses a request from a page of another site. Programs other than browsers send no `Origin`.
pub(crate) fn check_origin(state: &AppState, headers: &HeaderMap) -> Result<(), Problem> {
    let foreign = || {
        Problem::forbidden("the request comes from a page of another site")
            .hint("name its origin in server.origins to allow it")
    };
    if allowed_origin(state, headers).is_some() {
        return Ok(());
    }
    if let Some(origin) = headers.get(header::ORIGIN) {
        let origin = origin.to_str().unwrap_or_default();
        let host = origin.split_once("://").map(|(_, host)| host);
        return match (host, host_of(headers)) {
            (Some(origin), Some(host)) if origin.eq_ignore_ascii_case(host) => Ok(()),
            _ => Err(foreign()),
        };
    }
    match headers.get(FETCH_SITE).map(HeaderValue::as_bytes) {
        Some(b"cross-site" | b"same-site") => Err(foreign()),
        _ => Ok(()),
    }
}

fn host_of(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::HOST)?.to_str().ok()
}

fn is_known_host(state: &AppState, headers: &HeaderMap) -> bool {
    let Some(host) = host_of(headers) else {
        return false;
    };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let known = ["localhost", "127.0.0.1", "[::1]"];
    known.iter().any(|known| name.eq_ignore_ascii_case(known))
        || state
            .options()
            .hosts
            .iter()
            .any(|known| name.eq_ignore_ascii_case(known) || host.eq_ignore_ascii_case(known))
}

/// The origin of a request, if `server.origins` allows it.
fn allowed_origin(state: &AppState, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let allowed = &state.options().origins;
    let is_allowed = allowed
        .iter()
        .any(|allowed| allowed.as_bytes() == origin.as_bytes());
    is_allowed.then(|| origin.clone())
}

fn is_preflight(request: &Request) -> bool {
    request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

fn preflight(origin: &HeaderValue) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    let methods = HeaderValue::from_static("GET, POST, PUT, DELETE");
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    let names = HeaderValue::from_static(
        "authorization, content-type, content-encoding, x-request-id, traceparent, tracestate, \
         last-event-id, ce-id, ce-source, ce-specversion, ce-type, ce-time, ce-subject, ce-dataschema",
    );
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names);
    headers.insert(
        header::ACCESS_CONTROL_MAX_AGE,
        HeaderValue::from_static("600"),
    );
    response
}

/// Adds the headers that every response has.
fn finish(headers: &mut HeaderMap, id: HeaderValue, origin: Option<HeaderValue>) {
    headers.reserve(MOST_ADDED);
    headers.insert(REQUEST_ID, id);
    for (name, value) in FIXED {
        headers.insert(name, value);
    }
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("Origin"));
        headers.remove(RESOURCE_POLICY);
    }
    if !headers.contains_key(header::CACHE_CONTROL) {
        headers.insert(header::CACHE_CONTROL, NO_STORE);
    }
}

/// Turns a plain text error of the router (no such path, no such method, a path that is not UTF-8) into a problem
/// document.
fn as_problem(response: Response, is_person: bool) -> Response {
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE);
    let is_plain = kind.is_none_or(|kind| kind.as_bytes().starts_with(b"text/plain"));
    if !(status.is_client_error() || status.is_server_error()) || !is_plain {
        return response;
    }
    let (code, what) = match status {
        StatusCode::NOT_FOUND => ("NotFound", "there is nothing under this path"),
        StatusCode::METHOD_NOT_ALLOWED => ("MethodNotAllowed", "the path has no such method"),
        StatusCode::UPGRADE_REQUIRED => ("UpgradeRequired", "this path is for WebSockets"),
        status if status.is_client_error() => ("InvalidRequest", "the request cannot be read"),
        _ => ("Internal", "the request failed"),
    };
    let allow = response.headers().get(header::ALLOW).cloned();
    let mut problem = Problem::new(status, code, what);
    if status == StatusCode::NOT_FOUND && !is_person {
        problem = problem.hint("/openapi.json lists every path");
    }
    if let Some(allowed) = allow.as_ref().and_then(|allow| allow.to_str().ok()) {
        problem = problem.hint(format!("the path has {allowed}"));
    }
    let mut response = problem.into_response();
    debug_assert_eq!(
        response.headers()[header::CONTENT_TYPE],
        problem::CONTENT_TYPE
    );
    if let Some(allow) = allow {
        response.headers_mut().insert(header::ALLOW, allow);
    }
    response
}

/// Whether a person waits for the response: a browser asks for a page that is not of the API.
fn is_person(request: &Request) -> bool {
    let accepted = request.headers().get(header::ACCEPT);
    let accepted = accepted.and_then(|accepted| accepted.to_str().ok());
    request.method() == Method::GET
        && !request.uri().path().starts_with("/v1/")
        && accepted.is_some_and(|accepted| accepted.contains("text/html"))
}

/// Replaces a problem document by a page. The status and the other headers stay.
fn show_page(response: &mut Response, problem: &Problem) {
    *response.body_mut() = error_page(problem).into();
    let html = HeaderValue::from_static("text/html; charset=utf-8");
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, html);
    headers.remove(header::CONTENT_LENGTH);
}

/// The request id of the client, if it is valid: 1 to 128 visible ASCII characters.
fn request_id(headers: &HeaderMap) -> Option<String> {
    let given = headers.get(REQUEST_ID)?.to_str().ok()?;
    let usable = (1..=LONGEST_ID).contains(&given.len()) && !given.contains([' ', '\t']);
    usable.then(|| given.to_owned())
}

/// The trace that a request belongs to.
pub(crate) fn trace(headers: &HeaderMap) -> Option<TraceContext> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    TraceContext::parse(text(TRACEPARENT)?, text(TRACESTATE)).ok()
}
