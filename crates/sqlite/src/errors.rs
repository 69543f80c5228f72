//! Maps SQLite and I/O errors to error codes of the bus.

use everbus_core::{Class, Code, Error};
use rusqlite::ErrorCode;

/// `SQLITE_IOERR_SHMSIZE`.
const IOERR_SHMSIZE: i32 = 10 | (19 << 8);

const NO_RESOURCES: &str =
    "raise the limit of open files (ulimit -n) or of memory, or close what is not needed";

/// The code for an operating system error while writing a file or directory.
pub(crate) fn io_code(error: &std::io::Error) -> Code {
    if is_exhausted(error) {
        return Code::OutOfResources;
    }
    match error.kind() {
        std::io::ErrorKind::StorageFull => Code::DiskFull,
        _ => Code::ReadOnly,
    }
}

/// Whether file descriptors or memory ran out.
fn is_exhausted(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM))
}

/// Whether file descriptors have nearly run out. SQLite only says that it could not open a file, not why; it
/// needs up to three descriptors.
fn out_of_descriptors() -> bool {
    let opened: std::io::Result<Vec<_>> =
        (0..3).map(|_| std::fs::File::open("/dev/null")).collect();
    opened.is_err_and(|e| is_exhausted(&e))
}

/// Maps a SQLite error. `doing` says which step failed.
pub(crate) fn from_sqlite(doing: &str, error: rusqlite::Error) -> Error {
    let code = error.sqlite_error_code();
    // There was no room to grow the index of the write-ahead log.
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
        Some(ErrorCode::OutOfMemory) => (Code::OutOfResources, NO_RESOURCES),
        Some(ErrorCode::CannotOpen) if out_of_descriptors() => (Code::OutOfResources, NO_RESOURCES),
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
            // SQLite returns the same error if the disk could not read for a moment.
            "run `everbus check`: if it finds nothing, the disk failed to read for a moment, so look at the \
             system log and open the file again; otherwise keep the damaged file and restore a backup",
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

/// Whether another connection holds the lock.
pub(crate) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
    )
}

/// Whether the engine must stop serving after this error.
pub(crate) fn is_fatal(error: &Error) -> bool {
    error.class() == Class::Final && error.code() != Code::EventBusShutdownError
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sqlite(code: i32) -> rusqlite::Error {
        rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None)
    }

    // conformance: contract/out-of-resources: a lack of memory or of descriptors is told as such, and is passing
    #[test]
    fn a_lack_of_memory_is_no_bug() {
        let error = from_sqlite("reading", sqlite(7));
        assert_eq!(error.code(), Code::OutOfResources);
        assert_eq!(error.class(), Class::Passing);
        for (number, code) in [
            (24, Code::OutOfResources),
            (23, Code::OutOfResources),
            (12, Code::OutOfResources),
            (28, Code::DiskFull),
            (30, Code::ReadOnly),
            (13, Code::ReadOnly),
        ] {
            let error = std::io::Error::from_raw_os_error(number);
            assert_eq!(io_code(&error), code, "{error}");
        }
        // This test process has descriptors left.
        assert_eq!(from_sqlite("opening", sqlite(14)).code(), Code::ReadOnly);
    }
}
