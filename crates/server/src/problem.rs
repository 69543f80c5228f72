//! Errors over HTTP: problem documents (RFC 9457) with the stable codes of Everbus.

use axum::response::{IntoResponse, Response};
use everbus::{Code, Error};
use http::{HeaderValue, StatusCode, header};
use schemars::JsonSchema;
use serde::Serialize;

/// The content type of a problem document.
pub(crate) const CONTENT_TYPE: &str = "application/problem+json";

/// An error of a request, as `application/problem+json`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Problem(Box<Document>);

#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "Problem")]
struct Document {
    /// A URI for the kind of problem.
    #[serde(rename = "type")]
    kind: String,
    /// The kind of problem, in a few words.
    title: String,
    /// The HTTP status.
    status: u16,
    /// What happened in this request.
    detail: String,
    /// The stable code.
    code: String,
    /// What to do about the problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
    /// Whether the request may have taken effect. Repeat it with the same event ids.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    outcome_unknown: bool,
    /// The index of the first refused event of a batch, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    /// How many events of a stream of lines are stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    published: Option<u64>,
    #[serde(skip)]
    retry_after: Option<u32>,
    #[serde(skip)]
    challenge: bool,
}

impl Problem {
    /// A problem with this status and code. The code is in CamelCase, such as `UnsupportedMediaType`.
    pub fn new(status: StatusCode, code: &str, detail: impl Into<String>) -> Self {
        Self(Box::new(Document {
            kind: format!("urn:everbus:error:{code}"),
            title: title(code),
            status: status.as_u16(),
            detail: detail.into(),
            code: code.to_owned(),
            hint: None,
            outcome_unknown: false,
            index: None,
            published: None,
            retry_after: None,
            challenge: false,
        }))
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Sets the index of the refused event of a batch, from 0.
    #[must_use]
    pub fn at(mut self, index: usize) -> Self {
        self.0.index = Some(index);
        self
    }

    /// Sets how many events of a stream of lines are stored.
    #[must_use]
    pub fn published(mut self, events: u64) -> Self {
        self.0.published = Some(events);
        self
    }

    /// Adds `Retry-After`, in seconds.
    #[must_use]
    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.0.retry_after = Some(seconds);
        self
    }

    /// The problem of a request without a valid token.
    pub fn unauthenticated(detail: impl Into<String>) -> Self {
        let mut problem = Self::new(StatusCode::UNAUTHORIZED, "Unauthenticated", detail)
            .hint("send Authorization: Bearer TOKEN; `everbus token create` makes one");
        problem.0.challenge = true;
        problem
    }

    /// The problem of a request that the caller may not make.
    pub fn forbidden(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "Forbidden", detail)
    }

    /// The problem of a request for something that does not exist.
    pub fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", detail)
    }

    /// The problem of an invalid request.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "InvalidRequest", detail)
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// The stable code.
    pub fn code(&self) -> &str {
        &self.0.code
    }

    /// What to do about the problem.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// What happened.
    pub fn detail(&self) -> &str {
        &self.0.detail
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let status = status_of(error.code());
        let mut problem = Self::new(status, error.code().as_str(), error.message());
        problem.0.hint = error.hint_text().map(for_http);
        problem.0.outcome_unknown = error.outcome_unknown();
        if matches!(
            status,
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS
        ) {
            problem.0.retry_after = Some(1);
        }
        if status.is_server_error() {
            tracing::warn!(target: "everbus::http", %error, "a request failed");
        }
        problem
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        // The document has only texts, numbers and booleans: serialising it cannot fail.
        let body = serde_json::to_vec(&self).unwrap_or_default();
        let kind = HeaderValue::from_static(CONTENT_TYPE);
        let mut response = (self.status(), [(header::CONTENT_TYPE, kind)], body).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.0.retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.0.challenge {
            let bearer = HeaderValue::from_static("Bearer realm=\"everbus\"");
            headers.insert(header::WWW_AUTHENTICATE, bearer);
        }
        // For a person the document becomes a page (`guard::around`).
        response.extensions_mut().insert(self);
        response
    }
}

/// Hints of the library that name commands or options, by a part of them, and what a client of HTTP does instead.
const HINTS: [(&str, &str); 6] = [
    (
        "`everbus task list`",
        "GET /v1/tasks lists them; ?tenant= chooses the tenant",
    ),
    (
        "`everbus job list`",
        "GET /v1/jobs lists them; ?tenant= chooses the tenant",
    ),
    ("`everbus token list`", "GET /v1/tokens lists them"),
    (
        "--completed",
        "\"completed\": true runs it again all the same",
    ),
    (
        "--prefix-ids",
        "choose other ids, or \"prefixIds\": true to put the id of the job before them",
    ),
    (
        "`everbus job add`",
        "choose another id for the job, or add tasks to it with POST /v1/jobs/{id}/tasks",
    ),
];

fn for_http(hint: &str) -> String {
    let known = HINTS.iter().find(|(part, _)| hint.contains(part));
    known.map_or(hint, |known| known.1).to_owned()
}

/// The title of a code: `IdReused` becomes `Id reused`.
fn title(code: &str) -> String {
    let mut title = String::with_capacity(code.len() + 4);
    for (n, c) in code.chars().enumerate() {
        if n > 0 && c.is_uppercase() {
            title.push(' ');
            title.extend(c.to_lowercase());
        } else {
            title.push(c);
        }
    }
    title
}

/// The HTTP status of an error code.
pub(crate) fn status_of(code: Code) -> StatusCode {
    match code {
        Code::InvalidPayloadError
        | Code::InvalidType
        | Code::InvalidId
        | Code::InvalidAttribute
        | Code::InvalidPattern
        | Code::InvalidCursor
        | Code::InvalidSetting
        | Code::InvalidUrl
        | Code::InvalidConfig
        | Code::InvalidSchema => StatusCode::BAD_REQUEST,
        Code::PayloadTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Code::ValidationError
        | Code::UnknownVersion
        | Code::UpcastConflict
        | Code::NoStream
        | Code::InvalidJob => StatusCode::UNPROCESSABLE_ENTITY,
        Code::NotFound | Code::GroupNotFound | Code::SubscriptionNotFound => StatusCode::NOT_FOUND,
        Code::IdReused
        | Code::RevisionConflict
        | Code::GroupConflict
        | Code::TaskConflict
        | Code::LeaseLost => StatusCode::CONFLICT,
        Code::Backpressure => StatusCode::TOO_MANY_REQUESTS,
        Code::Unsupported => StatusCode::NOT_IMPLEMENTED,
        Code::Timeout => StatusCode::GATEWAY_TIMEOUT,
        Code::DiskFull => StatusCode::INSUFFICIENT_STORAGE,
        Code::EventBusShutdownError
        | Code::Unavailable
        | Code::Busy
        | Code::OutOfResources
        | Code::ReadOnly
        | Code::StorageFailed
        | Code::FileGone
        | Code::ObjectStoreError => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
