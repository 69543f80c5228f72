//! Makes an event whole before it leaves the log another way than through a group.

use std::sync::Arc;

use everbus_core::{Code, Recorded, Result};

use crate::runtime::bus::Shared;

/// The event with everything that belongs to it. This is the one place where what was stored beside an
/// event is brought back for functions and copies, one event at a time; handlers get theirs in the
/// pipeline.
///
/// The inner error is about this event alone, and the others go on.
pub(super) async fn whole(
    shared: &Shared,
    record: &Arc<Recorded>,
) -> Result<Result<Arc<Recorded>>> {
    match shared.whole(record).await {
        Err(error) if error.code() != Code::ObjectStoreError => Err(error),
        whole => Ok(whole),
    }
}
