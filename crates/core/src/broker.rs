//! The broker: the operations that move events, which every engine implements.
//!
//! ```text
//!              append                   fetch                 settle: ack | skip | retry | dead | release
//!  publisher ──────────▶  [Broker]  ──────────▶  [Consumer]  ──────────────────────────────▶  [Broker]
//! ```
//!
//! Every engine implements all operations here. Operations that need random access or knowledge of all
//! groups are small separate traits in [`abilities`](crate::abilities), which an engine may lack. The table
//! in `docs/architecture.md` says how each operation maps to SQLite, PostgreSQL, NATS JetStream, Redis
//! Streams, Kafka and SQS.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::durability::Durability;
use crate::effect::Effect;
use crate::error::Result;
use crate::event::Event;
use crate::failure::{Failure, Ran};
use crate::group::{GroupInfo, GroupName, GroupSpec, SubscriptionInfo};
use crate::id::EventId;
use crate::log::Recorded;
use crate::pattern::Pattern;
use crate::position::Position;
use crate::stream::Streams;
use crate::time::Timestamp;

/// A boxed future, so that engines can be trait objects.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Moves events from publishers to consumer groups and keeps them until they are settled.
///
/// Every engine guarantees the following, and the conformance suite checks it:
///
/// - An append that returned `Ok` is as durable as [`Capabilities::durability`] says.
/// - An event stays pending in every group declared before it was appended until the group settled it.
/// - An attempt is counted durably before the delivery is handed out.
/// - A settlement applies only while its lease is held ([`Code::LeaseLost`](crate::Code::LeaseLost)
///   otherwise), where [`Capabilities::fencing`] says so.
/// - Every future is cancel safe: dropping it loses no event.
pub trait Broker: Send + Sync + 'static {
    /// The capabilities of this engine.
    fn capabilities(&self) -> Capabilities;

    /// Creates or updates the streams as declared: with their limits, shards and copies, and the dialect of their
    /// events on the wire. Durable on return; declaring again is harmless and applies changes. The runtime calls
    /// this before any other operation of a bus.
    ///
    /// The default does nothing. It is for an engine with one log, where streams are only a table above the log.
    fn declare_streams(&self, streams: Streams) -> BoxFuture<'_, Result<()>> {
        drop(streams);
        Box::pin(std::future::ready(Ok(())))
    }

    /// Creates a group if it does not exist and adds subscriptions to it; durable on return. Declaring
    /// again is harmless and returns the same subscription ids. Returns every subscription of the group:
    /// those declared now in their order, then the others by name.
    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>>;

    /// Removes one subscription from its group. The group and its pending events stay, with one exception:
    /// events that wait because no process has a handler for them, and that no other subscription of the
    /// group matches, are skipped with the reason [`UNSUBSCRIBED`](crate::UNSUBSCRIBED).
    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>>;

    /// Deletes a group with its cursor, deliveries and dead letters.
    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>>;

    /// Appends events; one answer per event, in order, once they are durable.
    ///
    /// An event that is stored already, with the same id and body, gets its first answer again
    /// ([`Appended::duplicate`]). If the stored event has another body, the answer is
    /// [`Code::IdReused`](crate::Code::IdReused). With
    /// [`Capabilities::atomic_batch`] either all events of the batch are stored or none, and the first
    /// error is the answer for all.
    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>>;

    /// Begins to consume a group. Several consumers of one group compete, also across processes.
    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>>;

    /// Settles deliveries; one answer per settlement, in order, once durable.
    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>>;

    /// Extends leases: each ends `by` from now. One answer per lease, in order.
    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>>;

    /// The state of every group.
    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>>;

    /// Checks that the server answers; fails with [`Code::Unavailable`](crate::Code::Unavailable) if it does not. This
    /// may take as long as any other call.
    ///
    /// The default succeeds. It is for an engine without a server.
    fn ping(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Stops the engine after the running calls; later calls fail. Closing twice is harmless.
    fn close(&self) -> BoxFuture<'_, Result<()>>;
}

/// Delivers the events of one group to this process.
pub trait Consumer: Send {
    /// Waits for deliveries and returns between 1 and `max` of them, oldest first.
    ///
    /// Cancel safe: if the future is dropped, the next call returns the events that were claimed meanwhile. After the
    /// engine is closed, fails with [`Code::EventBusShutdownError`](crate::Code::EventBusShutdownError).
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>>;

    /// Replaces the patterns that this process has handlers for. The consumer stays in its group.
    fn set_handled(&mut self, handled: Vec<Pattern>);

    /// Stops claiming without leaving the group: until [`resume`](Self::resume), `fetch` waits. Releases events that
    /// were claimed and not fetched, without counting an attempt. Fetched deliveries stay valid.
    fn pause(&mut self) -> BoxFuture<'_, Result<()>>;

    /// Claims again, with at most `prefetch` deliveries claimed and not settled. Also changes the prefetch of a
    /// consumer that is not paused; deliveries beyond the new number stay valid. Zero pauses the consumer.
    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>>;

    /// Releases events that were claimed and not fetched, and leaves the group. Fetched deliveries stay valid.
    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>>;
}

/// How a process consumes a group.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConsumeOptions {
    /// At most this many deliveries of this consumer are claimed and not settled.
    pub prefetch: usize,
    /// How many deliveries this consumer runs at once. An engine with exact attempts lets about this many unsettled
    /// deliveries begin, and more only while they are settled quickly ([`Window`]). The other claimed events have
    /// not begun, and count no attempt after a crash. `None`: every claimed event may begin.
    ///
    /// [`Window`]: crate::Window
    pub concurrency: Option<usize>,
    /// How long a lease lasts unless it is extended.
    pub lease: Duration,
    /// The patterns that this process has handlers for. Events of the group that match none of these are
    /// left to other processes.
    pub handled: Vec<Pattern>,
    /// An event without a handler in any process is dead-lettered after this long.
    pub no_handler_after: Duration,
    /// For a layer that writes dead letters itself: an event without a handler in any process is handed out after
    /// this long, with a failure of kind [`NoHandler`](crate::FailureKind::NoHandler). An engine that cannot do this
    /// keeps the event.
    pub hand_out_unhandled: Option<Duration>,
    /// Whether first deliveries come in the order of receipt over all shards, if the engine has one clock for all of
    /// them. For bridges: events of one key may have several types, and so be in several shards.
    pub merged: bool,
}

impl Default for ConsumeOptions {
    fn default() -> Self {
        Self {
            prefetch: 1024,
            concurrency: None,
            lease: Duration::from_secs(40),
            handled: Vec::new(),
            no_handler_after: Duration::from_secs(24 * 3600),
            hand_out_unhandled: None,
            merged: false,
        }
    }
}

impl ConsumeOptions {
    /// The defaults, for a process that has handlers for these patterns.
    pub fn new(handled: Vec<Pattern>) -> Self {
        Self {
            handled,
            ..Self::default()
        }
    }

    /// Sets how many deliveries may be claimed and not settled.
    #[must_use]
    pub fn prefetch(mut self, prefetch: usize) -> Self {
        self.prefetch = prefetch;
        self
    }

    /// Sets how many deliveries run at once.
    #[must_use]
    pub fn concurrency(mut self, concurrency: usize) -> Self {
        self.concurrency = Some(concurrency);
        self
    }

    /// Sets how long a lease lasts unless it is extended.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets how long an event may wait for a process with a handler for it.
    #[must_use]
    pub fn no_handler_after(mut self, after: Duration) -> Self {
        self.no_handler_after = after;
        self
    }

    /// Asks for the order of receipt over all shards.
    #[must_use]
    pub fn merged(mut self, merged: bool) -> Self {
        self.merged = merged;
        self
    }
}

/// The answer to an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Appended {
    /// The id of the event.
    pub id: EventId,
    /// Its position.
    pub position: Position,
    /// When the engine received it.
    pub received_at: Timestamp,
    /// Whether the event was stored before, by an earlier append.
    pub duplicate: bool,
}

impl Appended {
    /// The answer for a new event.
    pub const fn new(id: EventId, position: Position, received_at: Timestamp) -> Self {
        Self {
            id,
            position,
            received_at,
            duplicate: false,
        }
    }

    /// Marks the answer as that of a duplicate: it repeats the answer to the first append.
    #[must_use]
    pub const fn as_duplicate(mut self) -> Self {
        self.duplicate = true;
        self
    }
}

/// An event delivered to a group under a lease.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Delivery {
    /// The event and its position in the log.
    pub record: Arc<Recorded>,
    /// The attempt number, from 1.
    pub attempt: u32,
    /// The failed attempts so far, in order.
    pub failures: Vec<Failure>,
    /// Whether the event was retried from the dead letters or is replayed. If so, it must be handled however old it
    /// is.
    pub retried: bool,
    /// The right to settle the delivery.
    pub lease: Lease,
    /// How long the lease had lasted when the delivery was handed out.
    pub held_for: Duration,
}

impl Delivery {
    /// The first attempt at an event.
    pub fn new(record: Arc<Recorded>, lease: Lease) -> Self {
        Self {
            record,
            attempt: 1,
            failures: Vec::new(),
            retried: false,
            lease,
            held_for: Duration::ZERO,
        }
    }

    /// Sets the attempt number and the failed attempts before it.
    #[must_use]
    pub fn after(mut self, attempt: u32, failures: Vec<Failure>) -> Self {
        self.attempt = attempt;
        self.failures = failures;
        self
    }

    /// Sets whether the event was retried from the dead letters or is replayed.
    #[must_use]
    pub fn retried(mut self, retried: bool) -> Self {
        self.retried = retried;
        self
    }

    /// Sets how long the lease has lasted.
    #[must_use]
    pub fn held_for(mut self, held_for: Duration) -> Self {
        self.held_for = held_for;
        self
    }
}

/// The right to settle one delivery, until the lease ends. Only the engine that made the lease knows its content.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    position: Position,
    words: [u64; 2],
    text: Option<Arc<str>>,
}

impl Lease {
    /// For engines: a lease on the event at this position. The two numbers belong to the engine: what was
    /// claimed, and a fencing token that changes with each delivery.
    pub const fn new(position: Position, words: [u64; 2]) -> Self {
        Self {
            position,
            words,
            text: None,
        }
    }

    /// For engines: adds a text handle, such as a reply subject or a receipt.
    #[must_use]
    pub fn with_text(mut self, text: Arc<str>) -> Self {
        self.text = Some(text);
        self
    }

    /// The position of the event.
    pub const fn position(&self) -> Position {
        self.position
    }

    /// For the engine that made it: its two numbers.
    pub const fn words(&self) -> [u64; 2] {
        self.words
    }

    /// For the engine that made it: its text.
    pub fn text(&self) -> Option<&Arc<str>> {
        self.text.as_ref()
    }
}

/// The settlement of a delivery.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Settlement {
    /// The lease of the delivery.
    pub lease: Lease,
    /// Its verdict.
    pub verdict: Verdict,
    /// Events to append in the same step as the verdict, if the engine can do both at once
    /// ([`Capabilities::atomic_follow_ups`]); before the verdict otherwise.
    pub follow_ups: Vec<Event>,
    /// Whether an [`Verdict::Ack`] writes the event into the group's inbox in the same step. If the inbox has the event
    /// already, the event is acked, and neither the effect nor the follow-ups happen again.
    pub inbox: bool,
    /// With [`Verdict::Ack`]: an effect that runs inside the same transaction. If the effect fails, nothing of the
    /// settlement is applied, the answer is [`Code::EffectFailed`](crate::Code::EffectFailed) with the error of the
    /// effect as the cause, and the lease is still held. [`Code::Unsupported`](crate::Code::Unsupported) if
    /// [`Capabilities::transaction`] names another engine.
    pub effect: Option<Effect>,
    /// With [`Verdict::Ack`] and [`Verdict::Skip`] of an event that had failed before: the final attempt,
    /// to be kept with the failures. An engine keeps nothing for an event that never failed.
    pub ran: Option<Box<Ran>>,
}

impl Settlement {
    /// A settlement with only a verdict.
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
    /// Skipped on purpose; the reason is recorded.
    Skip {
        /// Why.
        reason: String,
    },
    /// Failed; to be retried.
    Retry {
        /// The delay.
        after: Duration,
        /// What went wrong.
        failure: Failure,
    },
    /// Failed for good: moved to the dead letters in the same step.
    Dead {
        /// The last failure; `None` if the recorded failures are enough.
        failure: Option<Failure>,
    },
    /// Released without counting an attempt: a shutdown, no handler in this process, an open circuit breaker.
    Release {
        /// The event is not delivered again before this time has passed.
        after: Duration,
    },
}

/// How long a repeated id is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Deduplication {
    /// Not at all: the inbox of the consumer must recognise the repetition.
    None,
    /// For this long.
    Window(Duration),
    /// As long as the event is kept.
    WhileRetained,
}

/// The order in which a group gets its events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OrderScope {
    /// In the order of the log.
    Log,
    /// In order for each key.
    Key,
}

/// The real capabilities of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Capabilities {
    /// The engine's name.
    pub engine: &'static str,
    /// The durability of an acknowledged event.
    pub durability: Durability,
    /// Whether a batch is stored as a whole or not at all.
    pub atomic_batch: bool,
    /// Whether the verdict and its follow-up events are one step.
    pub atomic_follow_ups: bool,
    /// Whether the dead letter and the ack are one step.
    pub atomic_dead_letter: bool,
    /// Whether the engine itself waits before a retry. If not, the runtime holds the event.
    pub native_delay: bool,
    /// Whether a settlement with a lost lease is refused (fencing token).
    pub fencing: bool,
    /// Whether attempts are exact. If not, deliveries are counted, and a crash may count one more.
    pub exact_attempts: bool,
    /// How long a repeated id is recognised.
    pub deduplication: Deduplication,
    /// The order in which a group gets its events.
    pub order: OrderScope,
    /// Whether the server removes events by their age, also events that a group has not received. The lag of such a
    /// stream says at which age ([`StreamLag::max_age`](crate::StreamLag::max_age)).
    pub drops_by_age: bool,
    /// The engine in whose transactions an [`Effect`] runs; `None` if effects are not supported.
    pub transaction: Option<&'static str>,
}

impl Capabilities {
    /// The capabilities of an engine with only the required operations. Add what the engine offers in addition.
    ///
    /// ```
    /// use std::time::Duration;
    /// use everbus_core::{Capabilities, Deduplication, Durability};
    /// let nats = Capabilities::new("nats", Durability::Process)
    ///     .native_delay(true)
    ///     .deduplication(Deduplication::Window(Duration::from_secs(120)));
    /// assert!(!nats.fencing);
    /// ```
    pub const fn new(engine: &'static str, durability: Durability) -> Self {
        Self {
            engine,
            durability,
            atomic_batch: false,
            atomic_follow_ups: false,
            atomic_dead_letter: false,
            native_delay: false,
            fencing: false,
            exact_attempts: false,
            deduplication: Deduplication::None,
            order: OrderScope::Key,
            drops_by_age: false,
            transaction: None,
        }
    }

    /// The capabilities of an engine that offers everything except transactions with other data.
    pub const fn full(engine: &'static str, durability: Durability) -> Self {
        Self::new(engine, durability)
            .atomic_batch(true)
            .atomic_follow_ups(true)
            .atomic_dead_letter(true)
            .native_delay(true)
            .fencing(true)
            .exact_attempts(true)
            .deduplication(Deduplication::WhileRetained)
            .order(OrderScope::Log)
    }
}

macro_rules! setters {
    ($($name:ident: $type:ty,)*) => {
        impl Capabilities {
            $(
                #[doc = concat!("Sets [`", stringify!($name), "`](Self#structfield.", stringify!($name), ").")]
                #[must_use]
                pub const fn $name(mut self, $name: $type) -> Self {
                    self.$name = $name;
                    self
                }
            )*
        }
    };
}

setters! {
    atomic_batch: bool,
    atomic_follow_ups: bool,
    atomic_dead_letter: bool,
    native_delay: bool,
    fencing: bool,
    exact_attempts: bool,
    deduplication: Deduplication,
    order: OrderScope,
    drops_by_age: bool,
    transaction: Option<&'static str>,
}
