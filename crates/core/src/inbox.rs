//! The inbox: which events a group has handled, so that none has its effect twice.
//!
//! A record is written by a settlement ([`Settlement::inbox`](crate::Settlement::inbox)), in the same
//! step as the ack where the engine can, and never before the effect: an event whose record was there
//! first would be discarded after a crash although nothing came of it.

use std::sync::Arc;

use crate::broker::BoxFuture;
use crate::error::Result;
use crate::group::GroupName;
use crate::log::Recorded;
use crate::time::Timestamp;

/// Remembers what each group has handled, by the tenant and the id of the event.
pub trait Inbox: Send + Sync + 'static {
    /// Which of these events the group has handled; one answer per event, in order.
    fn handled(
        &self,
        group: GroupName,
        events: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<Vec<bool>>>;

    /// Forgets what was handled before this time, in small steps, and what removed groups handled.
    /// Returns how many records went. A record should outlive every copy of its event that may still
    /// come.
    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>>;
}
