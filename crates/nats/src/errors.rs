//! Errors of the server and of the client, mapped to codes.

use async_nats::{ConnectError, ConnectErrorKind};
use everbus_core::{Code, Error};
use serde::Deserialize;

/// An error in an answer of JetStream.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ApiError {
    #[serde(default)]
    code: u16,
    #[serde(default)]
    pub(crate) err_code: u64,
    #[serde(default)]
    pub(crate) description: String,
}

/// The codes of JetStream errors that are handled individually.
pub(crate) mod number {
    pub(crate) const CONSUMER_NOT_CREATED: u64 = 10012;
    pub(crate) const CONSUMER_NOT_FOUND: u64 = 10014;
    pub(crate) const NO_MESSAGE: u64 = 10037;
    pub(crate) const STREAM_NOT_FOUND: u64 = 10059;
    pub(crate) const SUBJECTS_OVERLAP: u64 = 10065;
    pub(crate) const STREAM_NAME_IN_USE: u64 = 10058;
    pub(crate) const WRONG_LAST_MESSAGE_ID: u64 = 10070;
    pub(crate) const WRONG_LAST_SEQUENCE: u64 = 10071;
    pub(crate) const WRONG_LAST_SEQUENCE_2: u64 = 10164;
    pub(crate) const FILTER_NOT_SUBSET: u64 = 10093;
    pub(crate) const FILTERS_OVERLAP: u64 = 10138;
    pub(crate) const BATCH_HAS_DUPLICATE: u64 = 10201;
}

impl ApiError {
    /// The error that the caller sees. `what` says what failed.
    pub(crate) fn into_error(self, what: &str) -> Error {
        let text = format!("{what}: {} ({})", self.description, self.err_code);
        let new = |code: Code, hint: &str| Error::new(code, text.clone()).hint(hint);
        match self.err_code {
            10039 | 10076 => no_jetstream(),
            10047 | 10077 | 10028 | 10023 => new(
                Code::DiskFull,
                "the server has no room left: raise its limits for JetStream, or let streams keep less",
            ),
            10054 => new(
                Code::PayloadTooLarge,
                "raise max_msg_size of the stream, or let large payloads overflow to an object store",
            ),
            number::SUBJECTS_OVERLAP => new(
                Code::InvalidSetting,
                "another stream of this server has some of these subjects: use it under its name, change the \
                 patterns, or separate buses by a path in the URL (nats://host/space)",
            ),
            10074 | 10005 => new(
                Code::InvalidSetting,
                "the server cannot keep this many copies: declare fewer, or start more servers",
            ),
            number::STREAM_NOT_FOUND => new(
                Code::Unavailable,
                "the stream was removed from the server; open the bus again to create it",
            ),
            // 10158: another message with the same id is being stored.
            10008 | 10009 | 10075 | 10158 | 10202 | 10176 => new(
                Code::Unavailable,
                "the server is busy or elects a leader: the same request may succeed later",
            ),
            _ if self.code >= 500 => Error::new(Code::Unavailable, text),
            _ => Error::new(Code::InvalidSetting, text),
        }
    }
}

/// The server, or this account on it, has no JetStream.
pub(crate) fn no_jetstream() -> Error {
    Error::new(
        Code::Unsupported,
        "the NATS server has no JetStream, which stores events",
    )
    .hint("start it with -js or a jetstream block, and enable it for the account")
}

/// An answer that cannot be read.
pub(crate) fn unreadable(what: &str, error: &serde_json::Error) -> Error {
    let text = format!("{what}: the answer of the server cannot be read: {error}");
    Error::new(Code::Unavailable, text).with_unknown_outcome()
}

/// The connection could not be made.
pub(crate) fn not_connected(servers: &str, error: &ConnectError) -> Error {
    let new = |code: Code, what: String, hint: &str| {
        Error::new(code, what)
            .hint(hint)
            .caused_by(std::io::Error::other(error.to_string()))
    };
    match error.kind() {
        ConnectErrorKind::AuthorizationViolation => new(
            Code::InvalidSetting,
            format!("{servers} refuses these credentials"),
            "check user and password, the token or the credentials file: in the URL, or broker.user, \
             broker.password, broker.token, broker.creds",
        ),
        ConnectErrorKind::Authentication => new(
            Code::InvalidSetting,
            format!("{servers}: the credentials cannot be used: {error}"),
            "broker.creds is the path of a .creds file, or the seed of an nkey",
        ),
        ConnectErrorKind::ServerParse => new(
            Code::InvalidUrl,
            format!("{servers} is not the address of a server: {error}"),
            "write it as nats://host:4222",
        ),
        ConnectErrorKind::Tls => new(
            Code::InvalidSetting,
            format!("{servers}: no TLS connection: {error}"),
            "use tls:// only with a server that has TLS; broker.tls.ca names its root certificate",
        ),
        _ => new(
            Code::Unavailable,
            format!("{servers} cannot be reached: {error}"),
            "is the server running, and is the address right?",
        ),
    }
}
