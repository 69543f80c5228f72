//! Whose fault an error is: the row's, which is an attempt; the broker's, which is none; or nobody can say.
//!
//! What nobody can say is found out by trying: see `publish`.

use everbus_core::{Code, Error};

/// Whose fault it is that a row was not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    /// The row's: its event is wrong, and will be tomorrow.
    Row,
    /// Its stream has no room: others may go on.
    Full,
    /// The broker cannot be reached, or cannot take anything. Never an attempt.
    Broker,
    /// It could be either.
    Unclear,
}

pub(super) fn blame(error: &Error) -> Blame {
    match error.code() {
        Code::InvalidPayload
        | Code::PayloadTooLarge
        | Code::InvalidType
        | Code::InvalidId
        | Code::InvalidAttribute
        | Code::IdReused
        | Code::SchemaViolation
        | Code::InvalidSchema
        | Code::UnknownVersion
        | Code::Unsupported
        | Code::InvalidSetting
        | Code::NotFound => Blame::Row,
        Code::Backpressure => Blame::Full,
        Code::Shutdown
        | Code::Timeout
        | Code::Busy
        | Code::DiskFull
        | Code::ReadOnly
        | Code::NotAFile
        | Code::NoSuchFile
        | Code::Corrupt
        | Code::NotEverbus
        | Code::NewerSchema
        | Code::NetworkFileSystem
        | Code::SqliteTooOld
        | Code::NotDurable
        | Code::ObjectStore
        | Code::StorageFailed
        | Code::InvalidUrl
        | Code::InvalidConfig => Blame::Broker,
        _ => Blame::Unclear,
    }
}
