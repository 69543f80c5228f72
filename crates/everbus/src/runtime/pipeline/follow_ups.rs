//! The events that a handler emits. An event without an id gets a derived id, which a second run derives again;
//! every event inherits from its cause.

use std::borrow::Cow;
use std::sync::Arc;

use everbus_core::{Error, Event, EventId, GroupName, Inherited, Recorded};

use crate::ambient;
use crate::handler::message::Message;
use crate::handler::outcome::Outcome;
use crate::handler::{HandlerError, HandlerOutcome, MOST_EVENTS};
use crate::runtime::bus::Shared;

/// The first index of events that an effect publishes. Separate from the returned events, because their number
/// may differ from run to run.
const EFFECT_INDEX: u32 = 1 << 24;

/// The first index of events of a failed attempt.
const FAILURE_INDEX: u32 = 1 << 31;
/// Each attempt has this many bits for the indexes of its events.
const ATTEMPT_SHIFT: u32 = MOST_EVENTS.ilog2();

/// Puts the events that the handler published while it ran before the events that it returned, gives them ids,
/// and checks them. An event that may not be published fails the attempt for good.
pub(super) fn complete(
    shared: &Shared,
    message: &Message,
    staged: Vec<Event>,
    outcome: Outcome,
) -> HandlerOutcome {
    let inherited = ambient::emitted_by(message.record(), shared.options.source.as_ref());
    let mut events = staged;
    events.extend(outcome.events);
    let cause = (message.record(), message.group(), message.handler_name());
    let events = adopt(cause, &inherited, 0, events);
    check(&events, |event| shared.check_event(event, None))?;
    Ok(Outcome { events, ..outcome })
}

/// Gives ids to the events that the effects of a handler publish, and checks them.
pub(super) fn of_effects(
    shared: &Shared,
    cause: Cause<'_>,
    inherited: &Inherited,
    events: Vec<Event>,
) -> Result<Vec<Event>, HandlerError> {
    let events = adopt(cause, inherited, EFFECT_INDEX, events);
    check(&events, |event| shared.check_unsplit(event))?;
    Ok(events)
}

/// Moves the large parts of the events to the object store. If this fails, the attempt fails and may be
/// retried.
pub(super) async fn offload(shared: &Shared, outcome: Outcome) -> HandlerOutcome {
    if outcome.events.is_empty() {
        return Ok(outcome);
    }
    let events = shared.offload(outcome.events).await?;
    Ok(Outcome { events, ..outcome })
}

/// Checks whether the events may be published. The error is permanent: another run would emit the same events.
fn check(
    events: &[Event],
    checked: impl Fn(&Event) -> Result<(), Error>,
) -> Result<(), HandlerError> {
    events.iter().try_for_each(|event| {
        checked(event).map_err(|error| {
            HandlerError::permanent(format!("an event it publishes was refused: {error}"))
        })
    })
}

/// A failed attempt whose events are published together with its verdict.
pub(crate) struct FailedAttempt<'a> {
    pub(crate) record: &'a Arc<Recorded>,
    pub(crate) group: &'a GroupName,
    pub(crate) handler: &'a str,
    pub(crate) attempt: u32,
    /// Whether the event was retried from the dead letters: its attempts are then counted from one again.
    pub(crate) retried: bool,
}

impl FailedAttempt<'_> {
    /// Takes the events that are published with the failure out of the error, and gives them ids of this
    /// attempt. An event that may not be published is left out, and the text of the failure says so.
    pub(crate) fn take_events(&self, shared: &Shared, error: &mut HandlerError) -> Vec<Event> {
        if error.events().is_empty() {
            return Vec::new();
        }
        let from = ambient::emitted_by(self.record, shared.options.source.as_ref());
        // The attempts of a retried dead letter have the same numbers as before, so the ids need the time too.
        let handler = if self.retried {
            let now = shared.options.clock.now().as_micros();
            Cow::Owned(format!("{}\0{now}", self.handler))
        } else {
            Cow::Borrowed(self.handler)
        };
        let first = FAILURE_INDEX | (self.attempt << ATTEMPT_SHIFT);
        let cause = (self.record, self.group, &*handler);
        let mut events = adopt(cause, &from, first, error.take_events());
        events.retain(|event| match shared.check_unsplit(event) {
            Ok(()) => true,
            Err(refused) => {
                error.not_published(&refused);
                false
            }
        });
        events
    }
}

/// The event that was handled, the group, and the name of the handler.
type Cause<'a> = (&'a Arc<Recorded>, &'a GroupName, &'a str);

/// Derives an id for each event without one, by its index from `first` on, and lets all inherit from the cause.
fn adopt(cause: Cause<'_>, from: &Inherited, first: u32, events: Vec<Event>) -> Vec<Event> {
    let (record, group, handler) = cause;
    let adopt = |(index, event): (u32, Event)| {
        event
            .or_id(|| {
                EventId::derived(
                    record.event.id(),
                    record.received_at,
                    group.as_str(),
                    handler,
                    index,
                )
            })
            .inheriting(from.clone())
    };
    (first..).zip(events).map(adopt).collect()
}
