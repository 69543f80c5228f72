//! What a handler emits: ids that a second run repeats, and what is inherited from the cause.

use everbus_core::{Effect, Event, EventId};

use crate::ambient;
use crate::bus::Shared;
use crate::handler::{BoxError, HandlerError, HandlerOutcome};
use crate::message::Message;
use crate::outcome::Outcome;

/// The events of an effect are counted from here, since how many the handler returned beside it may
/// differ from run to run.
const EFFECT_INDEX: u32 = 1 << 24;

/// Everything the handler wants published: what it staged, then what it returned.
pub(super) fn complete(shared: &Shared, message: &Message, outcome: Outcome) -> HandlerOutcome {
    let mut events = message.take_follow_ups();
    if events.is_empty() && outcome.events.is_empty() && outcome.effect.is_none() {
        return Ok(outcome);
    }
    events.extend(outcome.events);
    let events = adopt(message, 0, events);
    for event in &events {
        shared.check_event(event, None).map_err(|error| {
            HandlerError::permanent(format!("an event it publishes was refused: {error}"))
        })?;
    }
    let effect = outcome.effect.map(|effect| {
        let message = message.clone();
        Effect::new(effect.engine(), move |transaction| {
            let events = effect.run(transaction)?;
            Ok::<_, BoxError>(adopt(&message, EFFECT_INDEX, events))
        })
    });
    Ok(Outcome { events, effect })
}

fn adopt(message: &Message, first: u32, events: Vec<Event>) -> Vec<Event> {
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
            .inheriting(ambient::caused_by(record))
    };
    (first..).zip(events).map(adopt).collect()
}
