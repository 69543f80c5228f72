//! What some engines can do beside moving events, because they have random access to their log or know
//! how every group stands: one small trait for each ability.
//!
//! An [`Engine`](crate::Engine) holds those it has. Where one is missing, the runtime does without the
//! engine's help if it can, and answers [`Code::Unsupported`](crate::Code::Unsupported) if it cannot.

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

/// Knows when every group is done with an event.
pub trait Settled: Send + Sync + 'static {
    /// Waits until every group that owes work on this event has settled it for good.
    fn settled(
        &self,
        position: Position,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<SettledOutcome>>;
}

/// How an event was settled, all groups together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettledOutcome {
    /// The groups in which it became a dead letter.
    pub dead_lettered: Vec<GroupName>,
}

/// Finds events by what names them, and says how each group stands with one.
pub trait Lookup: Send + Sync + 'static {
    /// The events with this id: one per tenant that used it.
    fn find(&self, id: EventId) -> BoxFuture<'_, Result<Vec<Arc<Recorded>>>>;

    /// How an event stands in every group; [`Code::NotFound`](crate::Code::NotFound) without one.
    fn states(&self, position: Position) -> BoxFuture<'_, Result<Vec<GroupState>>>;
}

/// Hands events of the log to a group once more, beside whatever it does: its position does not move.
/// Where an engine cannot, the runtime appends an event that is addressed to the group.
pub trait Redeliver: Send + Sync + 'static {
    /// One answer per position, in order, once durable. Such deliveries are marked
    /// [`Delivery::retried`](crate::Delivery::retried) and begin with a fresh set of attempts; in an
    /// ordered group they take their place among those of their key. It does not matter whether a
    /// subscription of the group matches. [`Code::GroupNotFound`](crate::Code::GroupNotFound) without
    /// the group.
    fn redeliver(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>>;

    /// What [`redeliver`](Self::redeliver) would answer now, with nothing done.
    fn redeliverable(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>>;
}

/// What became of an event that was to be delivered once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Redelivery {
    /// It waits for the group.
    Queued,
    /// The group is not done with it: it lies beyond its position, is in flight or waits, or it is an
    /// open dead letter. It is left as it is.
    Owed,
    /// There is no such event any more.
    Gone,
}

/// Counts what waits in a stream, and can drop the oldest of it.
pub trait Depth: Send + Sync + 'static {
    /// How many events that match are still owed by the group that owes most of them, counted up to
    /// `limit`. Zero if no group wants any.
    fn depth(&self, stream: Pattern, limit: u64) -> BoxFuture<'_, Result<u64>>;

    /// Skips, in every group, the oldest matching events that wait, until at most `keep` are owed;
    /// what is in flight is left alone. Each is recorded as skipped with the reason [`DROPPED`].
    /// Returns how many events were skipped in at least one group.
    fn drop_oldest(&self, stream: Pattern, keep: u64) -> BoxFuture<'_, Result<u64>>;
}

/// Why an event was skipped that [`Depth::drop_oldest`] dropped.
pub const DROPPED: &str = "dropped: the stream was full";
