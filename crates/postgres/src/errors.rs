//! Errors of the server and of the connection, mapped to codes of the bus.

use std::fmt;

use everbus_core::{Code, Error};
use tokio_postgres::error::SqlState;

/// An error of the server as a cause. The server's details are left out: they may contain the values of a row, payloads
/// included.
pub(crate) struct Refused(pub(crate) tokio_postgres::Error);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_db_error() {
            Some(db) => write!(f, "{} ({})", db.message(), db.code().code()),
            None => self.0.fmt(f),
        }
    }
}

impl fmt::Debug for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Refused {}

/// Whether the connection has to be replaced: its server became a replica or read-only, or a migration outdated its
/// prepared statements.
pub(crate) fn is_outdated(error: &tokio_postgres::Error) -> bool {
    let states = [
        &SqlState::READ_ONLY_SQL_TRANSACTION,
        &SqlState::FEATURE_NOT_SUPPORTED,
    ];
    error.code().is_some_and(|state| states.contains(&state))
}

/// Maps an error. `doing` says which step failed. The error says that nothing was done; a caller that does not know
/// adds `with_unknown_outcome`.
pub(crate) fn from_pg(doing: &str, error: tokio_postgres::Error) -> Error {
    let Some(db) = error.as_db_error() else {
        return from_client(doing, error);
    };
    let (code, hint) = classify(db.code());
    let mut message = format!("{doing}: {}", db.message());
    if let Some(constraint) = db.constraint().filter(|_| code == Code::Internal) {
        message = format!("{message} ({constraint})");
    }
    let error = Error::new(code, message).caused_by(Refused(error));
    if hint.is_empty() {
        error
    } else {
        error.hint(hint)
    }
}

/// The code and the hint for an SQLSTATE.
fn classify(state: &SqlState) -> (Code, &'static str) {
    match *state {
        SqlState::T_R_SERIALIZATION_FAILURE
        | SqlState::T_R_DEADLOCK_DETECTED
        | SqlState::UNIQUE_VIOLATION
        | SqlState::LOCK_NOT_AVAILABLE => (Code::Busy, "repeat it: another transaction was first"),
        SqlState::INVALID_PASSWORD | SqlState::INVALID_AUTHORIZATION_SPECIFICATION => (
            Code::InvalidUrl,
            "check the user and the password in the URL, and pg_hba.conf on the server",
        ),
        SqlState::INVALID_CATALOG_NAME => (
            Code::InvalidUrl,
            "create the database first, or correct its name at the end of the URL",
        ),
        SqlState::INSUFFICIENT_PRIVILEGE => (
            Code::ReadOnly,
            "the user needs CREATE on the database once, then all rights on the schema of Everbus",
        ),
        SqlState::READ_ONLY_SQL_TRANSACTION | SqlState::FEATURE_NOT_SUPPORTED => (
            Code::Unavailable,
            "the server has become a read replica or read-only: the bus looks for the primary among the hosts of \
             its URL",
        ),
        SqlState::TOO_MANY_CONNECTIONS => (
            Code::Unavailable,
            "raise max_connections on the server, lower pool_size in the URL, or use a pooler",
        ),
        SqlState::INVALID_SQL_STATEMENT_NAME | SqlState::DUPLICATE_PSTATEMENT => (
            Code::InvalidUrl,
            "a pooler gave the connection to another server process: add pooler=transaction to the URL",
        ),
        SqlState::DISK_FULL => (
            Code::DiskFull,
            "free some space on the server; nothing that was acknowledged is lost",
        ),
        SqlState::OUT_OF_MEMORY => (Code::OutOfResources, "the server has run out of memory"),
        SqlState::DATA_CORRUPTED | SqlState::INDEX_CORRUPTED => (
            Code::Corrupt,
            "look at the log of the server; restore a backup if its data is damaged",
        ),
        SqlState::UNDEFINED_TABLE | SqlState::INVALID_SCHEMA_NAME => (
            Code::NotEverbus,
            "its tables were removed while the engine was open; open it again to make them",
        ),
        SqlState::ADMIN_SHUTDOWN
        | SqlState::CRASH_SHUTDOWN
        | SqlState::CANNOT_CONNECT_NOW
        | SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT
        | SqlState::QUERY_CANCELED => (Code::Unavailable, UNAVAILABLE),
        _ if state.code().starts_with("08") || state.code().starts_with("57") => {
            (Code::Unavailable, UNAVAILABLE)
        }
        _ if state.code().starts_with("53") => (
            Code::OutOfResources,
            "the server has run out of a resource; look at its log",
        ),
        _ if state.code().starts_with("58") => (
            Code::Unavailable,
            "the server could not read or write a file; look at its log",
        ),
        _ => (Code::Internal, "this is a bug in Everbus; please report it"),
    }
}

const UNAVAILABLE: &str =
    "the server is restarting or cannot be reached; the same call may succeed later";

/// The connection failed, or a value could not be converted.
fn from_client(doing: &str, error: tokio_postgres::Error) -> Error {
    let cause = std::error::Error::source(&error).map(ToString::to_string);
    let text = error.to_string();
    // Recognised by the text, because the client library has no kind for this error.
    if cause.as_deref() == Some("database does not allow writes") {
        let what = format!("{doing}: the server is a read replica or takes no writes");
        return Error::new(Code::ReadOnly, what)
            .hint("name the primary in the URL; several hosts are separated by commas")
            .caused_by(error);
    }
    let conversion =
        text.starts_with("error serializing") || text.starts_with("error deserializing");
    let message = match cause {
        Some(cause) => format!("{doing}: {text}: {cause}"),
        None => format!("{doing}: {text}"),
    };
    if conversion {
        return Error::new(Code::Internal, message).caused_by(error);
    }
    Error::new(Code::Unavailable, message)
        .hint(UNAVAILABLE)
        .caused_by(error)
}

/// The server did not answer in time.
pub(crate) fn too_slow(doing: &str, patience: std::time::Duration) -> Error {
    Error::new(
        Code::Unavailable,
        format!("{doing}: the server did not answer within {patience:?}"),
    )
    .hint(UNAVAILABLE)
}

/// Whether the error is a conflict with another transaction, so that the same transaction may be tried again at once.
pub(crate) fn is_conflict(error: &Error) -> bool {
    error.code() == Code::Busy
}

/// A stored value that Everbus would not write.
pub(crate) fn damaged(what: impl std::fmt::Display) -> Error {
    Error::new(Code::Corrupt, format!("{what}"))
        .hint("`everbus check` lists all damaged events; restore a backup to have them back")
}
