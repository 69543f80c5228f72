//! Converts errors of an object store and of its files to Everbus errors.

use std::error::Error as StdError;
use std::io::ErrorKind::{QuotaExceeded, StorageFull};

use everbus_core::{Code, Error};

pub(super) fn failed(what: String, error: impl StdError + Send + Sync + 'static) -> Error {
    let first: &(dyn StdError + 'static) = &error;
    let full = std::iter::successors(Some(first), |cause| (*cause).source())
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|io| matches!(io.kind(), StorageFull | QuotaExceeded));
    let (code, hint) = match full {
        true => (
            Code::DiskFull,
            "make room where the objects are; nothing was published",
        ),
        false => (
            Code::ObjectStoreError,
            "see that the object store can be reached, read and written",
        ),
    };
    Error::new(code, what).caused_by(error).hint(hint)
}
