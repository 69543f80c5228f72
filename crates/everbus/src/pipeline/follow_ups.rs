//! What a handler emits: ids that a second run repeats, and what is inherited from the cause.

use std::sync::Arc;

use everbus_core::{Effect, Error, Event, EventId, Inherited};

use crate::ambient;
use crate::bus::Shared;
use crate::handler::{BoxError, HandlerError, HandlerOutcome};
use crate::message::Message;
use crate::outcome::Outcome;

/// The events of an effect are counted from here, since how many the handler returned beside it may
/// differ from run to run.
const EFFECT_INDEX: u32 = 1 << 24;

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
    let events = adopt(message, &inherited, 0, events);
    check(&events, |event| shared.check_event(event, None))?;
    let effect = outcome.effect.map(|effect| {
        let (shared, message) = (shared.clone(), message.clone());
        Effect::new(effect.engine(), move |transaction| {
            let events = effect.run(transaction)?;
            let events = adopt(&message, &inherited, EFFECT_INDEX, events);
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

fn adopt(message: &Message, from: &Inherited, first: u32, events: Vec<Event>) -> Vec<Event> {
    let record = message.record();
    let adopt = |(index, event): (u32, Event)| {
        event
            .or_id(|| {
                EventId::derived(
                    record.event.id(),
                    record.received_at,
                    message.group().as_str(),
                    message.handler_name(),
                    index,
                )
            })
            .inheriting(from.clone())
    };
    (first..).zip(events).map(adopt).collect()
}
