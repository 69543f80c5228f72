//! The events of the narrow engine have ids of their own: the memory engine would recognise the publisher's
//! id, and this engine must not.

use std::sync::Arc;

use everbus_core::{Event, EventId, Position, Recorded, Result};

/// The metadata with the id that the publisher gave.
const ID: &str = "narrow.id";

/// The event as it is stored.
pub(super) fn wrap(event: &Event) -> Result<Event> {
    let mut attributes = event.attributes().cloned().unwrap_or_default();
    let own = event.id().to_string();
    attributes.metadata.insert(ID.to_owned(), own);
    Ok(Event::from_stored(
        EventId::new(),
        event.type_arc().clone(),
        event.version(),
        event.occurred_at(),
        event.payload().clone(),
        Some(Box::new(attributes)),
    ))
}

/// Whether an event was published through the narrow engine.
pub(super) fn is_wrapped(stored: &Recorded) -> bool {
    stored.event.metadata().contains_key(ID)
}

/// The event as it was published, at its position in the narrow engine.
pub(super) fn unwrap(stored: &Recorded, position: Position) -> Arc<Recorded> {
    let event = &stored.event;
    let mut attributes = event.attributes().cloned().unwrap_or_default();
    let own = attributes.metadata.remove(ID);
    let id = own.and_then(|id| id.parse().ok()).unwrap_or(event.id());
    let plain = attributes == *everbus_core::Attributes::NONE;
    let event = Event::from_stored(
        id,
        event.type_arc().clone(),
        event.version(),
        event.occurred_at(),
        event.payload().clone(),
        (!plain).then(|| Box::new(attributes)),
    );
    Arc::new(Recorded::new(event, position, stored.received_at))
}
