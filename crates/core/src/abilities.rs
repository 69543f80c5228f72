//! Optional abilities of engines, for engines with random access to their log or with knowledge of every
//! group: one small trait for each ability.
//!
//! An [`Engine`](crate::Engine) has a field for each ability. If an ability is missing, the runtime works without
//! it where possible, and otherwise returns [`Code::Unsupported`](crate::Code::Unsupported).

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::broker::BoxFuture;
use crate::error::Result;
use crate::group::GroupName;
use crate::id::EventId;
use crate::log::{GroupState, Recorded};
use crate::pattern::Pattern;
use crate::position::Position;

/// Knows when every group has settled an event.
pub trait Settled: Send + Sync + 'static {
    /// Waits until every group with this event pending has settled it for good.
    fn settled(
        &self,
        position: Position,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<SettledOutcome>>;
}

/// How an event ended in all groups together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettledOutcome {
    /// The groups in which the event became a dead letter.
    pub dead_lettered: Vec<GroupName>,
}

/// Finds events by id, and returns the state of an event in each group.
pub trait Lookup: Send + Sync + 'static {
    /// The events with this id: one per tenant that used it.
    fn find(&self, id: EventId) -> BoxFuture<'_, Result<Vec<Arc<Recorded>>>>;

    /// The state of an event in every group; [`Code::NotFound`](crate::Code::NotFound) if there is no such
    /// event.
    fn states(&self, position: Position) -> BoxFuture<'_, Result<Vec<GroupState>>>;
}

/// Redelivers events of the log to a group, beside its normal work: the cursor of the group does not move. If an engine
/// cannot do this, the runtime appends a copy that is addressed to the group.
pub trait Redeliver: Send + Sync + 'static {
    /// Queues these events for the group; one answer per position, in order, once durable. The deliveries are marked
    /// [`Delivery::retried`](crate::Delivery::retried) and begin with a fresh set of attempts; in an
    /// ordered group they are ordered among the events of their key. The subscriptions of the group need
    /// not match. [`Code::GroupNotFound`](crate::Code::GroupNotFound) if there is no such group.
    fn redeliver(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>>;

    /// What [`redeliver`](Self::redeliver) would return now, without doing it.
    fn redeliverable(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>>;
}

/// The result of a redelivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Redelivery {
    /// The event waits for the group.
    Queued,
    /// The group has not finished the event: it is after the group's cursor, in flight, waiting, or an open dead
    /// letter. Nothing changes.
    Owed,
    /// The event does not exist any more.
    Gone,
}

/// Counts the pending events of a stream, and can drop the oldest ones.
pub trait Depth: Send + Sync + 'static {
    /// The number of matching events that are pending in the group with the most of them, counted up to
    /// `limit`. Zero if no group is subscribed.
    fn depth(&self, stream: Pattern, limit: u64) -> BoxFuture<'_, Result<u64>>;

    /// Skips, in every group, the oldest matching events that are not in flight, until at most `keep` are pending.
    /// Each is recorded as skipped with the reason [`DROPPED`]. Returns how many events were skipped in at least one
    /// group.
    fn drop_oldest(&self, stream: Pattern, keep: u64) -> BoxFuture<'_, Result<u64>>;
}

/// Why a group skipped an event that [`Depth::drop_oldest`] dropped.
pub const DROPPED: &str = "dropped: the stream was full";
