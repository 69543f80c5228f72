//! Converts errors of an object store to Everbus errors.

use everbus_core::{Code, Error};
use object_store::Error as StoreError;

pub(super) fn failed(what: String, error: StoreError) -> Error {
    let full = std::iter::successors(
        Some(&error as &(dyn std::error::Error + 'static)),
        |cause| cause.source(),
    )
    .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
    .any(|io| is_full(io.kind()));
    new_error(what, full, error)
}

pub(super) fn from_io(what: String, error: std::io::Error) -> Error {
    let full = is_full(error.kind());
    new_error(what, full, error)
}

fn is_full(kind: std::io::ErrorKind) -> bool {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(kind, StorageFull | QuotaExceeded)
}

fn new_error(
    what: String,
    full: bool,
    cause: impl std::error::Error + Send + Sync + 'static,
) -> Error {
    if full {
        return Error::new(Code::DiskFull, what)
            .caused_by(cause)
            .hint("make room where the objects are; nothing was published");
    }
    Error::new(Code::ObjectStoreError, what)
        .caused_by(cause)
        .hint("see that the object store can be reached, read and written")
}
