//! The arguments that a publish takes.

use std::sync::Arc;

use serde::Serialize;

use super::EventBuilder;
use crate::error::Result;
use crate::event::Event;

/// A value that can be published: an [`Event`], a builder, a pair of type and serialisable value, or a
/// value whose type derives `everbus::Event`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be published",
    label = "this is not an event",
    note = "add `#[derive(everbus::Event)]` and `#[event(type = \"domain.entity.action\")]` to the type",
    note = "or publish a pair of event type and value: `(\"domain.entity.action\", value)`"
)]
pub trait IntoEvent {
    /// Builds the event, or returns what is wrong with it.
    fn into_event(self) -> Result<Event>;

    /// The Rust type of the payload, as [`std::any::type_name`] gives it, if that type stands for an event
    /// type.
    ///
    /// A publish need not check the payload against the schema of that same type.
    fn rust_type(&self) -> Option<&'static str> {
        None
    }
}

impl IntoEvent for Event {
    fn into_event(self) -> Result<Event> {
        Ok(self)
    }
}

impl IntoEvent for EventBuilder {
    fn into_event(self) -> Result<Event> {
        self.build()
    }
}

impl<S: Into<Arc<str>>, T: Serialize> IntoEvent for (S, T) {
    fn into_event(self) -> Result<Event> {
        Event::builder(self.0).json(&self.1).build()
    }
}
