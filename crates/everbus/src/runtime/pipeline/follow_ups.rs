//! What a handler emits: ids that a second run repeats, and what is inherited from the cause.

use std::borrow::Cow;
use std::sync::Arc;

use everbus_core::{Effect, Error, Event, EventId, GroupName, Inherited, Recorded};

use crate::ambient;
use crate::handler::message::Message;
use crate::handler::outcome::Outcome;
use crate::handler::{BoxError, HandlerError, HandlerOutcome, MOST_EVENTS};
use crate::runtime::bus::Shared;

/// The events of an effect are counted from here, since how many the handler returned beside it may
/// differ from run to run.
const EFFECT_INDEX: u32 = 1 << 24;

/// The events of a failed attempt are counted from here, apart for each attempt.
const FAILURE_INDEX: u32 = 1 << 31;
const ATTEMPT_SHIFT: u32 = MOST_EVENTS.ilog2();

fn cause_of(message: &Message) -> Cause<'_> {
    (message.record(), message.group(), message.handler_name())
}

/// Everything the handler wants published: what it staged, then what it returned.
pub(super) fn complete(
    shared: &Arc<Shared>,
    message: &Message,
    staged: Vec<Event>,
    outcome: Outcome,
) -> HandlerOutcome {
    let inherited = ambient::emitted_by(message.record(), shared.options.source.as_ref());
    let mut events = staged;
    events.extend(outcome.events);
    let events = adopt(cause_of(message), &inherited, 0, events);
    check(&events, |event| shared.check_event(event, None))?;
    let effect = outcome.effect.map(|effect| {
        let (shared, message) = (shared.clone(), message.clone());
        Effect::new(effect.engine(), move |transaction| {
            let events = effect.run(transaction)?;
            let events = adopt(cause_of(&message), &inherited, EFFECT_INDEX, events);
            check(&events, |event| shared.check_unsplit(event))?;
            Ok::<_, BoxError>(events)
        })
    });
    Ok(Outcome { events, effect })
}

/// The outcome with the large parts of its events in the object store. If that fails another try may
/// well succeed.
pub(super) async fn offload(shared: &Shared, outcome: Outcome) -> HandlerOutcome {
    if outcome.events.is_empty() {
        return Ok(outcome);
    }
    let events = shared.offload(outcome.events).await?;
    Ok(Outcome { events, ..outcome })
}

/// Whether they may be published. Another run would come up with the same.
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

/// A failed attempt whose events are to be published with what becomes of it.
pub(crate) struct FailedAttempt<'a> {
    pub(crate) record: &'a Arc<Recorded>,
    pub(crate) group: &'a GroupName,
    pub(crate) handler: &'a str,
    pub(crate) attempt: u32,
    /// Attempts are counted afresh.
    pub(crate) retried: bool,
}

impl FailedAttempt<'_> {
    /// The events that go with the failure, under ids of this attempt. One that may not be published is left
    /// out, and the failure says so.
    pub(crate) fn take_events(&self, shared: &Shared, error: &mut HandlerError) -> Vec<Event> {
        if error.events().is_empty() {
            return Vec::new();
        }
        let from = ambient::emitted_by(self.record, shared.options.source.as_ref());
        // An event that is handled anew after its death has attempts of the same numbers.
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

type Cause<'a> = (&'a Arc<Recorded>, &'a GroupName, &'a str);

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
