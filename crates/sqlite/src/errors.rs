//! What a SQLite error means to a user of the bus.

use everbus_core::{Class, Code, Error};
use rusqlite::ErrorCode;

/// `SQLITE_IOERR_SHMSIZE`.
const IOERR_SHMSIZE: i32 = 10 | (19 << 8);

/// Turns an error of SQLite into ours. `doing` says what was under way.
pub(crate) fn from_sqlite(doing: &str, error: rusqlite::Error) -> Error {
    let code = error.sqlite_error_code();
    // Growing the index of the write-ahead log found no room.
    let no_room = error
        .sqlite_error()
        .is_some_and(|e| e.extended_code == IOERR_SHMSIZE);
    let message = format!("{doing}: {error}");
    let (code, hint) = match code {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => (
            Code::Busy,
            "another program holds the file; close it, or raise the busy timeout",
        ),
        _ if no_room => (
            Code::DiskFull,
            "free some space; nothing that was acknowledged is lost",
        ),
        Some(ErrorCode::DiskFull) => (
            Code::DiskFull,
            "free some space; nothing that was acknowledged is lost",
        ),
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => (
            Code::ReadOnly,
            "make the file and its directory writable for this user",
        ),
        Some(ErrorCode::CannotOpen) => (
            Code::ReadOnly,
            "check that the directory exists, and that this user may write to it and to the file",
        ),
        Some(ErrorCode::NotADatabase) => (
            Code::NotEverbus,
            "name an Everbus file; if this was one, its beginning is damaged: restore a backup",
        ),
        Some(ErrorCode::DatabaseCorrupt) => (
            Code::Corrupt,
            "restore a backup with `everbus restore`; keep the damaged file for recovery",
        ),
        Some(ErrorCode::SystemIoFailure) => (
            Code::StorageFailed,
            "look at the disk and the system log, then open the file again; a publish may be \
             repeated with the same id",
        ),
        _ => (Code::Internal, "this is a bug in Everbus; please report it"),
    };
    Error::of_file(code, message).hint(hint).caused_by(error)
}

/// Whether another connection holds what was asked for.
pub(crate) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
    )
}

/// Whether the engine must stop serving after this error.
pub(crate) fn is_fatal(error: &Error) -> bool {
    error.class() == Class::Final && error.code() != Code::Shutdown
}
