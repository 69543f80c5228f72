//! What a handler is given: the event, and where this delivery of it stands.

use std::ops::Deref;
use std::sync::Arc;

use everbus_core::{Delivery, Event, Failure, GroupName, Recorded, Timestamp};

/// One delivery of an event to a handler. It derefs to the [`Event`].
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
#[derive(Clone, Debug)]
pub struct Message {
    record: Arc<Recorded>,
    group: GroupName,
    // Almost every delivery has none.
    failures: Option<Arc<[Failure]>>,
    attempt: u32,
    max_attempts: u32,
}

impl Message {
    pub(crate) fn new(delivery: &Delivery, group: &GroupName, max_attempts: u32) -> Self {
        let failures = &delivery.failures;
        Self {
            record: delivery.record.clone(),
            group: group.clone(),
            failures: (!failures.is_empty()).then(|| failures.as_slice().into()),
            attempt: delivery.attempt,
            max_attempts,
        }
    }

    /// The event, as it was published.
    pub fn event(&self) -> &Event {
        &self.record.event
    }

    /// Which attempt this is, from 1. It was counted before the handler was called.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// After how many attempts this handler's policy gives up.
    pub fn max_attempts(&self) -> u32 {
        self.max_attempts
    }

    /// The group on whose behalf the handler runs.
    pub fn group(&self) -> &GroupName {
        &self.group
    }

    /// The place of the event in the log.
    pub fn seq(&self) -> u64 {
        self.record.position
    }

    /// When the bus received the event.
    pub fn received_at(&self) -> Timestamp {
        self.record.received_at
    }

    /// The failed attempts so far, in order.
    pub fn failures(&self) -> &[Failure] {
        self.failures.as_deref().unwrap_or_default()
    }
}

impl Deref for Message {
    type Target = Event;

    fn deref(&self) -> &Event {
        &self.record.event
    }
}
