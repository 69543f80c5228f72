//! The inbox: which events a group has handled, so that no event has its effect twice.
//!
//! A settlement writes the record ([`Settlement::inbox`](crate::Settlement::inbox)), in the same step as
//! the ack if the engine can, and never before the effect: if the record came first, a crash between the
//! two would lose the effect.

use std::sync::Arc;

use crate::broker::BoxFuture;
use crate::error::Result;
use crate::group::GroupName;
use crate::log::Recorded;
use crate::time::Timestamp;

/// Records which events each group has handled, by the tenant and the id of the event.
pub trait Inbox: Send + Sync + 'static {
    /// Which of these events the group has handled; one answer per event, in order.
    fn handled(
        &self,
        group: GroupName,
        events: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<Vec<bool>>>;

    /// Removes records from before this time, in small steps, and records of removed groups. Returns how
    /// many. A record should outlive every copy of its event that may still be delivered.
    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>>;
}
