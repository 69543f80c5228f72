//! The return value of a handler: nothing, events to publish, or work for the transaction of its ack.

use std::sync::Arc;

use everbus_core::{Effect, Event, EventBuilder, IntoEvent, TypedEvent};
use serde::Serialize;

use crate::handler::{BoxError, HandlerError, HandlerOutcome};

/// The result of a run that did not fail: events to publish in the same step as the ack, and perhaps an
/// effect for its transaction. The default is "handled, nothing more".
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub(crate) events: Vec<Event>,
    /// They run one after another.
    pub(crate) effects: Vec<Effect>,
}

impl Outcome {
    /// The events that will be published with the ack.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Adds an event to be published with the ack.
    pub fn publish(mut self, event: impl IntoEvent) -> Result<Self, HandlerError> {
        self.events.push(event.into_event()?);
        Ok(self)
    }

    /// Whether there are no events and no effect.
    pub(crate) fn is_plain(&self) -> bool {
        self.events.is_empty() && self.effects.is_empty()
    }

    /// The outcome with an effect for one engine's transaction.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    pub(crate) fn of_effect(effect: Effect) -> Self {
        Self {
            events: Vec::new(),
            effects: vec![effect],
        }
    }
}

/// The events of what an effect returned: it runs in a transaction, so it has no effects of its own.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn events_only(returned: impl IntoOutcome) -> Result<Vec<Event>, BoxError> {
    let outcome = returned.into_outcome().map_err(BoxError::from)?;
    if outcome.effects.is_empty() {
        return Ok(outcome.events);
    }
    let what = "a transaction inside a transaction: return events or nothing";
    Err(HandlerError::permanent(what).into())
}

/// An event type that a handler may publish.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Emitted {
    /// The event type.
    pub event_type: &'static str,
    /// The version of its payload.
    pub version: u32,
    /// Its Rust type.
    pub rust_type: &'static str,
    /// Its schema, if its Rust type has one.
    pub schema: Option<serde_json::Value>,
}

/// What the type of a handler's result declares.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Returns {
    /// The types it publishes.
    pub emits: Vec<Emitted>,
    /// The engine whose transaction it needs.
    pub transaction: Option<&'static str>,
}

/// The return types of handlers.
///
/// - `()`: handled.
/// - An event that derives `Event`, an [`Event`], a builder, a pair of type and value; a `Vec`, an array
///   or an `Option` of those: handled, and these are published **in the same step as the ack** where the
///   engine can ([`atomic_follow_ups`](everbus_core::Capabilities::atomic_follow_ups)).
/// - [`sqlite::in_transaction`](crate::sqlite::in_transaction): handled exactly once.
/// - A `Result` of any of these with any error type: an error is retried by the policy, unless it is
///   [`permanent`](crate::permanent), [`retry_after`](crate::retry_after) or [`skip`](crate::skip).
#[diagnostic::on_unimplemented(
    message = "a handler cannot return `{Self}`",
    label = "not something a handler may return",
    note = "return (), an event that derives everbus::Event, a Vec or Option of events, or a Result of those"
)]
pub trait IntoOutcome {
    /// Converts the return value.
    fn into_outcome(self) -> HandlerOutcome;

    /// Declares the event types and the transaction.
    fn returns(returns: &mut Returns) {
        let _ = returns;
    }
}

impl IntoOutcome for () {
    fn into_outcome(self) -> HandlerOutcome {
        Ok(Outcome::default())
    }
}

impl IntoOutcome for Outcome {
    fn into_outcome(self) -> HandlerOutcome {
        Ok(self)
    }
}

impl IntoOutcome for Event {
    fn into_outcome(self) -> HandlerOutcome {
        emit(self)
    }
}

impl IntoOutcome for EventBuilder {
    fn into_outcome(self) -> HandlerOutcome {
        emit(self)
    }
}

impl<S: Into<Arc<str>>, T: Serialize> IntoOutcome for (S, T) {
    fn into_outcome(self) -> HandlerOutcome {
        emit(self)
    }
}

impl<R: IntoOutcome> IntoOutcome for Option<R> {
    fn into_outcome(self) -> HandlerOutcome {
        self.map_or_else(|| Ok(Outcome::default()), IntoOutcome::into_outcome)
    }

    fn returns(returns: &mut Returns) {
        R::returns(returns);
    }
}

impl<R: IntoOutcome> IntoOutcome for Vec<R> {
    fn into_outcome(self) -> HandlerOutcome {
        all(self)
    }

    fn returns(returns: &mut Returns) {
        R::returns(returns);
    }
}

impl<R: IntoOutcome, const N: usize> IntoOutcome for [R; N] {
    fn into_outcome(self) -> HandlerOutcome {
        all(self)
    }

    fn returns(returns: &mut Returns) {
        R::returns(returns);
    }
}

impl<R: IntoOutcome, E: Into<BoxError>> IntoOutcome for Result<R, E> {
    fn into_outcome(self) -> HandlerOutcome {
        match self {
            Ok(value) => value.into_outcome(),
            Err(error) => Err(HandlerError::from_box(&*error.into())),
        }
    }

    fn returns(returns: &mut Returns) {
        R::returns(returns);
    }
}

fn all<R: IntoOutcome>(parts: impl IntoIterator<Item = R>) -> HandlerOutcome {
    let mut outcome = Outcome::default();
    for part in parts {
        let part = part.into_outcome()?;
        outcome.events.extend(part.events);
        outcome.effects.extend(part.effects);
    }
    Ok(outcome)
}

/// One event to publish. An event that cannot be built is a failure like any other.
pub fn emit(event: impl IntoEvent) -> HandlerOutcome {
    Ok(Outcome {
        events: vec![event.into_event()?],
        effects: Vec::new(),
    })
}

/// Declares that events of this type may be published.
pub fn emits<T: TypedEvent>(returns: &mut Returns) {
    returns.emits.push(Emitted {
        event_type: T::TYPE,
        version: T::VERSION,
        rust_type: std::any::type_name::<T>(),
        schema: T::schema(),
    });
}
