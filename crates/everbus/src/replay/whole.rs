//! Completes an event before a replay gives it to a function or copies it.

use std::sync::Arc;

use everbus_core::{Code, Recorded, Result};

use crate::runtime::bus::Shared;

/// The complete event. Functions and copies get the part in the object store here, one event at a time;
/// handlers get it in the pipeline.
///
/// The inner error is about this event alone; the run continues.
pub(super) async fn whole(
    shared: &Shared,
    record: &Arc<Recorded>,
) -> Result<Result<Arc<Recorded>>> {
    match shared.whole(record).await {
        Err(error) if error.code() != Code::ObjectStoreError => Err(error),
        whole => Ok(whole),
    }
}
