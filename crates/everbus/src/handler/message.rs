//! The argument of a handler: the event, and the state of this delivery.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use everbus_core::{
    Code, Delivery, Error, Event, Failure, GroupName, IntoEvent, Lease, Position, Recorded,
    Timestamp,
};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

use crate::ambient;
use crate::environment::Environment;
use crate::environment::LONGEST;
use crate::environment::watch::{Activity, DeliveryWatch};
use crate::handler::Registered;
use crate::payloads::StoreStage;

/// One delivery of an event to a handler. It derefs to the [`Event`]; clones are the same delivery.
///
/// ```
/// use everbus::{HandlerResult, Message};
///
/// async fn greet(m: Message) -> HandlerResult {
///     let name: String = m.json()?; // of the event
///     if m.attempt() > 1 {
///         eprintln!("{name}, once more; last time: {}", m.failures()[0].error);
///     }
///     Ok(())
/// }
/// ```
#[derive(Clone)]
pub struct Message {
    inner: Arc<Inner>,
}

struct Inner {
    /// `None` when a test calls the handler directly.
    environment: Option<Arc<Environment>>,
    record: Arc<Recorded>,
    group: GroupName,
    handler: Arc<Registered>,
    failures: Vec<Failure>,
    attempt: u32,
    retried: bool,
    deadline: Mutex<Instant>,
    /// `None` once the attempt has ended.
    follow_ups: Mutex<Option<Vec<Event>>>,
    lease: Lease,
    /// Set when the handler first asks about its lease or reports progress.
    watch: OnceLock<Arc<DeliveryWatch>>,
}

impl Message {
    pub(crate) fn new(
        environment: Option<&Arc<Environment>>,
        delivery: &Delivery,
        group: &GroupName,
        handler: &Arc<Registered>,
        started: Instant,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                environment: environment.cloned(),
                record: delivery.record.clone(),
                group: group.clone(),
                handler: handler.clone(),
                // Almost every delivery has no failures; then this allocates nothing.
                failures: delivery.failures.clone(),
                attempt: delivery.attempt,
                retried: delivery.retried,
                deadline: Mutex::new(started + handler.timeout),
                follow_ups: Mutex::new(Some(Vec::new())),
                lease: delivery.lease.clone(),
                watch: OnceLock::new(),
            }),
        }
    }

    /// As [`new`](Self::new), in the memory of an earlier message if it has no other holder. If the earlier
    /// handler has kept the message, that one stays unchanged.
    pub(crate) fn reusing(
        earlier: Option<Self>,
        environment: &Arc<Environment>,
        delivery: &Delivery,
        group: &GroupName,
        handler: &Arc<Registered>,
        started: Instant,
    ) -> Self {
        let Some(mut message) = earlier else {
            return Self::new(Some(environment), delivery, group, handler, started);
        };
        let Some(inner) = Arc::get_mut(&mut message.inner) else {
            return Self::new(Some(environment), delivery, group, handler, started);
        };
        // Every field by name, so that none keeps an old value by mistake.
        let Inner {
            environment: of_bus,
            record,
            group: of_group,
            handler: by,
            failures,
            attempt,
            retried,
            deadline,
            follow_ups,
            lease,
            watch,
        } = inner;
        // All workers share these reference counts, so they are not changed if the message has the right value already.
        if !of_bus
            .as_ref()
            .is_some_and(|bus| Arc::ptr_eq(bus, environment))
        {
            *of_bus = Some(environment.clone());
        }
        if of_group != group {
            *of_group = group.clone();
        }
        if !Arc::ptr_eq(by, handler) {
            *by = handler.clone();
        }
        *record = delivery.record.clone();
        if !(failures.is_empty() && delivery.failures.is_empty()) {
            failures.clone_from(&delivery.failures);
        }
        *attempt = delivery.attempt;
        *retried = delivery.retried;
        *deadline.get_mut() = started + handler.timeout;
        *follow_ups.get_mut() = Some(Vec::new());
        lease.clone_from(&delivery.lease);
        drop(watch.take());
        message
    }

    /// The complete event.
    pub fn event(&self) -> &Event {
        &self.inner.record.event
    }

    /// Which attempt this is, from 1. It was counted before the handler was called.
    pub fn attempt(&self) -> u32 {
        self.inner.attempt
    }

    /// Whether the event was retried from the dead letters or is replayed into this group. The attempts are then counted
    /// from 1 again.
    pub fn was_retried(&self) -> bool {
        self.inner.retried
    }

    /// After how many attempts this handler's policy gives up.
    pub fn max_attempts(&self) -> u32 {
        self.inner.handler.retry.max_attempts()
    }

    /// The group that the handler belongs to.
    pub fn group(&self) -> &GroupName {
        &self.inner.group
    }

    /// The name of the handler.
    pub fn handler_name(&self) -> &str {
        &self.inner.handler.name
    }

    /// The position of the event: its shard and its sequence number there.
    pub fn position(&self) -> Position {
        self.inner.record.position
    }

    /// The sequence number in its shard; on an engine with a single log this is the whole position.
    pub fn seq(&self) -> u64 {
        self.inner.record.position.place()
    }

    /// When the bus received the event.
    pub fn received_at(&self) -> Timestamp {
        self.inner.record.received_at
    }

    /// The failed attempts so far, in order.
    pub fn failures(&self) -> &[Failure] {
        &self.inner.failures
    }

    /// When this attempt times out.
    pub fn deadline(&self) -> Instant {
        *self.inner.deadline.lock()
    }

    /// Sets the time limit of this attempt to `by` from now: for work that takes longer than planned. The
    /// lease is extended meanwhile.
    pub fn extend(&self, by: Duration) {
        *self.inner.deadline.lock() = Instant::now() + by.min(LONGEST);
    }

    /// Adds an event that is published in the same step as the ack of this one if this attempt succeeds,
    /// and not at all otherwise. Refused after the attempt has ended.
    pub fn publish(&self, event: impl IntoEvent) -> Result<(), Error> {
        // The ambient values (correlation, trace) may be gone when the attempt ends.
        let event = ambient::inherit(event.into_event()?, None)?;
        let mut follow_ups = self.inner.follow_ups.lock();
        let Some(follow_ups) = follow_ups.as_mut() else {
            return Err(Error::new(
                Code::LeaseLost,
                "the attempt has ended; nothing can be published with its ack any more",
            )
            .hint("publish it through the bus"));
        };
        if follow_ups.len() >= MOST_FOLLOW_UPS {
            let what = format!("one handler publishes more than {MOST_FOLLOW_UPS} events at once");
            return Err(Error::new(Code::InvalidSetting, what)
                .hint("publish them through the bus, in batches"));
        }
        follow_ups.push(event);
        Ok(())
    }

    /// Stores a stage of this event for debugging; see
    /// [`Context::store_payload`](crate::Context::store_payload).
    pub fn store_payload<T: Serialize + ?Sized>(&self, stage: &str, value: &T) -> StoreStage {
        StoreStage::of(
            self.inner.environment.clone(),
            self.event().into(),
            stage,
            value,
        )
    }

    pub(crate) fn record(&self) -> &Arc<Recorded> {
        &self.inner.record
    }

    pub(crate) fn handler(&self) -> &Registered {
        &self.inner.handler
    }

    pub(crate) fn environment(&self) -> Option<&Arc<Environment>> {
        self.inner.environment.as_ref()
    }

    /// The lease state that the handler can watch, and its progress reports.
    pub(crate) fn watch(&self) -> &Arc<DeliveryWatch> {
        self.inner.watch.get_or_init(|| {
            let watch = Arc::new(DeliveryWatch::new(
                self.event().id(),
                self.group().clone(),
                self.handler_name().to_owned(),
                self.attempt(),
                self.inner.lease.clone(),
            ));
            if let Some(environment) = self.environment() {
                environment.watches.add(&watch);
            }
            watch
        })
    }

    /// The last progress report of the handler.
    pub(crate) fn activity(&self) -> Option<Activity> {
        self.inner.watch.get()?.activity()
    }

    /// The current time of the bus's clock.
    pub(crate) fn now(&self) -> Timestamp {
        self.environment()
            .map_or(self.received_at(), |environment| environment.clock.now())
    }

    /// Ends the attempt and returns the events that it staged.
    pub(crate) fn take_follow_ups(&self) -> Vec<Event> {
        if let (Some(watch), Some(environment)) = (self.inner.watch.get(), self.environment()) {
            environment.watches.remove(watch);
        }
        self.inner.follow_ups.lock().take().unwrap_or_default()
    }
}

/// A settlement holds all follow-up events in memory.
const MOST_FOLLOW_UPS: usize = 10_000;

impl Deref for Message {
    type Target = Event;

    fn deref(&self) -> &Event {
        self.event()
    }
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Message")
            .field("event", self.event())
            .field("group", self.group())
            .field("attempt", &self.attempt())
            .finish_non_exhaustive()
    }
}
