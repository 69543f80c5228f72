//! How events move: the verbs every engine implements.
//!
//! ```text
//!              append                   fetch                 settle: ack | skip | retry | dead | release
//!  publisher ──────────▶  [Broker]  ──────────▶  [Consumer]  ──────────────────────────────▶  [Broker]
//! ```
//!
//! The table in `docs/architecture.md` says how each verb maps to SQLite, PostgreSQL, NATS JetStream,
//! Redis Streams, Kafka and SQS.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::effect::Effect;
use crate::error::{Code, Error, Result};
use crate::event::Event;
use crate::failure::{Failure, Ran};
use crate::group::{GroupInfo, GroupName, GroupSpec, SubscriptionInfo};
use crate::id::EventId;
use crate::log::Recorded;
use crate::pattern::Pattern;
use crate::time::Timestamp;

/// A boxed future, so that engines can be trait objects.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Moves events from publishers to consumer groups and keeps what is not settled.
///
/// What every engine guarantees, and the conformance suite checks:
///
/// - An append that returned `Ok` is as durable as [`Capabilities::durability`] says.
/// - An event stays owed to every group declared before it was appended until the group settled it.
/// - An attempt is counted durably before the delivery is handed out.
/// - A settlement applies only while its lease is held ([`Code::LeaseLost`](crate::Code::LeaseLost)
///   otherwise), where [`Capabilities::fencing`] says so.
/// - No future here loses anything when it is dropped.
pub trait Broker: Send + Sync + 'static {
    /// What this engine really offers.
    fn capabilities(&self) -> Capabilities;

    /// Creates a group if it does not exist and adds subscriptions to it; durable on return.
    /// Declaring again is harmless and returns the same subscription ids.
    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>>;

    /// Removes one subscription from its group. The group and what it owes stay.
    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>>;

    /// Deletes a group with its position, deliveries and dead letters.
    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>>;

    /// Appends events; one answer per event, in order, once they are durable.
    ///
    /// An event whose id is known with the same body gets its first answer again
    /// ([`Appended::duplicate`]); with another body it is [`Code::IdReused`](crate::Code::IdReused).
    /// With [`Capabilities::atomic_batch`] either all events of the batch are stored or none, and the
    /// first error answers for all.
    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>>;

    /// Begins to consume a group. Several consumers of one group compete, also across processes.
    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>>;

    /// Says what became of deliveries; one answer per settlement, in order, once durable.
    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>>;

    /// Lengthens leases: each ends `by` from now. One answer per lease, in order.
    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>>;

    /// How every group stands.
    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>>;

    /// Waits until every group that owes work on this position has settled it for good.
    /// [`Code::Unsupported`](crate::Code::Unsupported) where the engine cannot know.
    fn settled(&self, position: u64, timeout: Duration) -> BoxFuture<'_, Result<SettledOutcome>>;

    /// How many events that match are still owed by the group that owes most of them, counted up to
    /// `limit`. Zero if no group wants any. [`Code::Unsupported`] where the engine cannot know.
    fn depth(&self, stream: Pattern, limit: u64) -> BoxFuture<'_, Result<u64>> {
        let _ = (stream, limit);
        Box::pin(std::future::ready(Err(unsupported(
            self.capabilities().engine,
            "counting what waits in a stream",
        ))))
    }

    /// Skips, in every group, the oldest matching events that wait, until at most `keep` are owed;
    /// what is in flight is left alone. Each is recorded as skipped with the reason
    /// [`DROPPED`]. Returns how many events were skipped in at least one group.
    fn drop_oldest(&self, stream: Pattern, keep: u64) -> BoxFuture<'_, Result<u64>> {
        let _ = (stream, keep);
        Box::pin(std::future::ready(Err(unsupported(
            self.capabilities().engine,
            "dropping the oldest events of a stream",
        ))))
    }

    /// Hands events to a group once more, beside whatever it does: its position does not move. One
    /// answer per position, in order, once durable. Such deliveries are marked
    /// [`Delivery::retried`] and begin with a fresh set of attempts; in an ordered group they take
    /// their place among those of their key. It does not matter whether a subscription of the group
    /// matches. [`Code::GroupNotFound`] without the group, [`Code::Unsupported`] where the engine
    /// cannot do it.
    fn redeliver(
        &self,
        group: GroupName,
        positions: Vec<u64>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        let _ = (group, positions);
        Box::pin(std::future::ready(Err(unsupported(
            self.capabilities().engine,
            "delivering events to a group once more",
        ))))
    }

    /// What [`redeliver`](Self::redeliver) would answer now, with nothing done.
    fn redeliverable(
        &self,
        group: GroupName,
        positions: Vec<u64>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        let _ = (group, positions);
        Box::pin(std::future::ready(Err(unsupported(
            self.capabilities().engine,
            "telling what could be delivered once more",
        ))))
    }

    /// Stops the engine after what is under way; later calls fail. Closing twice is harmless.
    fn close(&self) -> BoxFuture<'_, Result<()>>;
}

/// Why an event was skipped that [`Broker::drop_oldest`] dropped.
pub const DROPPED: &str = "dropped: the stream was full";

fn unsupported(engine: &str, what: &str) -> Error {
    Error::new(
        Code::Unsupported,
        format!("the {engine} engine does not offer {what}"),
    )
}

/// Hands out the deliveries of one group to this process.
pub trait Consumer: Send {
    /// Waits for deliveries and returns between 1 and `max` of them, oldest first.
    ///
    /// Dropping the future loses nothing: what was claimed meanwhile comes with the next call.
    /// After the engine is closed it returns [`Code::Shutdown`](crate::Code::Shutdown).
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>>;

    /// Replaces the patterns this process has handlers for.
    fn set_handled(&mut self, handled: Vec<Pattern>);

    /// Gives back what was claimed and not fetched. Deliveries already fetched stay valid.
    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>>;
}

/// How a process consumes a group.
#[derive(Clone, Debug)]
pub struct ConsumeOptions {
    /// At most this many deliveries are claimed and not settled by this consumer.
    pub prefetch: usize,
    /// How long a lease lasts unless it is extended.
    pub lease: Duration,
    /// What this process has handlers for. Events of the group that match none of these are left
    /// to other processes.
    pub handled: Vec<Pattern>,
    /// An event that no process has had a handler for is dead-lettered after this long.
    pub no_handler_after: Duration,
}

impl Default for ConsumeOptions {
    fn default() -> Self {
        Self {
            prefetch: 1024,
            lease: Duration::from_secs(40),
            handled: Vec::new(),
            no_handler_after: Duration::from_secs(24 * 3600),
        }
    }
}

/// The answer to an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// The id of the event.
    pub id: EventId,
    /// Its place in the log.
    pub position: u64,
    /// When the engine received it.
    pub received_at: Timestamp,
    /// Whether it was there already.
    pub duplicate: bool,
}

/// An event handed to a group under a lease.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// The event and where it is in the log.
    pub record: Arc<Recorded>,
    /// Which attempt this is, from 1. Higher than the last failure's attempt by one, unless a
    /// release came between.
    pub attempt: u32,
    /// The failed attempts so far, in order.
    pub failures: Vec<Failure>,
    /// Somebody has put it back from the dead letters, or replays it, and so wants it handled, however
    /// old it is.
    pub retried: bool,
    /// The right to settle it.
    pub lease: Lease,
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

/// The right to settle one delivery until it ends. What the fields mean is the engine's business.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    /// The position of the event.
    pub position: u64,
    /// What was claimed: a claim, a row, a partition.
    pub slot: u64,
    /// Changes each time the event is handed out, so that a late settlement cannot pass.
    pub token: u64,
    /// A handle for engines whose leases are text.
    pub handle: Option<Arc<str>>,
}

/// What became of a delivery.
#[derive(Clone, Debug, PartialEq)]
pub struct Settlement {
    /// The lease of the delivery.
    pub lease: Lease,
    /// What became of it.
    pub verdict: Verdict,
    /// Events to append in the same step as the verdict, where the engine can do both at once
    /// ([`Capabilities::atomic_follow_ups`]); before it otherwise.
    pub follow_ups: Vec<Event>,
    /// With [`Verdict::Ack`]: writes the event into the group's inbox in the same step. If it is
    /// there already, the event is acked and neither the effect nor the follow-ups happen again.
    pub inbox: bool,
    /// With [`Verdict::Ack`]: runs inside the same transaction. If it fails, nothing of the settlement
    /// is applied, the answer is [`Code::EffectFailed`] with its error as the cause, and the lease is
    /// still held. [`Code::Unsupported`] where [`Capabilities::transaction`] is another engine's.
    pub effect: Option<Effect>,
    /// With [`Verdict::Ack`] and [`Verdict::Skip`] of an event that had failed before: the attempt that
    /// ended it, to be kept with the failures. An engine keeps nothing of an event that never failed.
    pub ran: Option<Box<Ran>>,
}

impl Settlement {
    /// A settlement with nothing but a verdict.
    pub fn new(lease: Lease, verdict: Verdict) -> Self {
        Self {
            lease,
            verdict,
            follow_ups: Vec::new(),
            inbox: false,
            effect: None,
            ran: None,
        }
    }
}

/// The verdict on a delivery.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Handled.
    Ack,
    /// Not handled, on purpose, for a reason that is recorded.
    Skip {
        /// Why.
        reason: String,
    },
    /// Failed; to be tried again.
    Retry {
        /// How long to wait.
        after: Duration,
        /// What went wrong.
        failure: Failure,
    },
    /// Failed for good: moved to the dead letters in the same step.
    Dead {
        /// What went wrong last; `None` if the failures already recorded say it.
        failure: Option<Failure>,
    },
    /// Given back without an attempt: shutdown, no handler here, an open circuit breaker.
    Release {
        /// Not to be handed out again before this long.
        after: Duration,
    },
}

/// How a position was settled, all groups together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettledOutcome {
    /// The groups in which it became a dead letter.
    pub dead_lettered: Vec<GroupName>,
}

/// How safe an acknowledged event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Gone with the process.
    Memory,
    /// Survives the process; a power loss may take the last moments.
    Process,
    /// On the disk before the publish returns: survives power loss.
    PowerLoss,
    /// On several machines.
    Replicated,
}

/// How long a repeated id is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Deduplication {
    /// Not at all: the consumer's inbox must.
    None,
    /// For this long.
    Window(Duration),
    /// As long as the event is kept.
    WhileRetained,
}

/// In which order a group gets its events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OrderScope {
    /// In the order of the log.
    Log,
    /// In order for each key.
    Key,
}

/// What an engine really offers; nothing pretends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Capabilities {
    /// The engine's name.
    pub engine: &'static str,
    /// How safe an acknowledged event is.
    pub durability: Durability,
    /// A batch is stored as a whole or not at all.
    pub atomic_batch: bool,
    /// Verdict and follow-up events are one step.
    pub atomic_follow_ups: bool,
    /// Dead-lettering and ack are one step.
    pub atomic_dead_letter: bool,
    /// The engine itself waits before a retry; otherwise the runtime holds the event.
    pub native_delay: bool,
    /// A settlement with a lease that was lost is refused.
    pub fencing: bool,
    /// Attempts are exact; otherwise deliveries are counted, and a crash may count one more.
    pub exact_attempts: bool,
    /// How long a repeated id is recognised.
    pub deduplication: Deduplication,
    /// In which order a group gets its events.
    pub order: OrderScope,
    /// `settled` can be answered.
    pub settled: bool,
    /// The engine in whose transactions an [`Effect`] runs, if it runs any.
    pub transaction: Option<&'static str>,
}

impl Capabilities {
    /// Those of an engine that offers everything, to be narrowed with struct update by engines in
    /// their own words.
    pub fn full(engine: &'static str, durability: Durability) -> Self {
        Self {
            engine,
            durability,
            atomic_batch: true,
            atomic_follow_ups: true,
            atomic_dead_letter: true,
            native_delay: true,
            fencing: true,
            exact_attempts: true,
            deduplication: Deduplication::WhileRetained,
            order: OrderScope::Log,
            settled: true,
            transaction: None,
        }
    }
}
