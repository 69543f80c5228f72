//! Building events.
//!
//! `check` has the checks, `into_event` the conversions from other values.

mod check;
mod into_event;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;

pub use self::check::{MAX_ATTRIBUTE_BYTES, MAX_ATTRIBUTES_BYTES, MAX_TYPE_CHARS, validate_type};
use self::check::{validate_attributes, validate_json};
pub use self::into_event::IntoEvent;
use crate::clock::{Clock, SystemClock};
use crate::error::{Code, Error, Result};
use crate::event::{Attributes, Entity, Event, TraceContext, is_json};
use crate::group::GroupName;
use crate::id::EventId;
use crate::time::Timestamp;

/// A longer time to live is probably a mistake of units.
const LONGEST_TTL: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// Builds an [`Event`]; mistakes are reported by [`build`](EventBuilder::build).
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it is built or published"]
pub struct EventBuilder {
    id: Option<EventId>,
    event_type: Arc<str>,
    version: u32,
    occurred_at: Option<Timestamp>,
    payload: Result<Bytes>,
    known_json: bool,
    attributes: Option<Arc<Attributes>>,
    ttl: Option<Duration>,
}

impl EventBuilder {
    pub(crate) fn new(event_type: Arc<str>) -> Self {
        Self {
            id: None,
            event_type,
            version: 1,
            occurred_at: None,
            payload: Ok(Bytes::from_static(b"null")),
            known_json: true,
            attributes: None,
            ttl: None,
        }
    }

    /// Sets the id instead of a generated one: publishing the same id again stores nothing.
    pub fn id(mut self, id: impl Into<EventId>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Sets a foreign id that need not be a UUID; it is kept and shown again. Call it after
    /// [`source`](Self::source), which is part of the identity.
    pub fn foreign_id(mut self, id: impl Into<String>) -> Self {
        let id = id.into();
        let attributes = self.attributes_mut();
        let uuid = EventId::from_foreign(attributes.source.as_deref().unwrap_or_default(), &id);
        if uuid.to_string() != id {
            attributes.foreign_id = Some(id);
        }
        self.id = Some(uuid);
        self
    }

    /// The payload, serialised as JSON.
    pub fn json<T: Serialize + ?Sized>(mut self, value: &T) -> Self {
        self.payload = serde_json::to_vec(value).map(Bytes::from).map_err(|e| {
            Error::new(
                Code::InvalidPayloadError,
                format!("the payload is not JSON-serialisable: {e}"),
            )
            .hint("maps need string keys and numbers must be finite")
        });
        self.known_json = true;
        self
    }

    /// The payload as bytes, kept unchanged. They must be JSON unless a content type is set.
    pub fn payload(mut self, bytes: impl Into<Bytes>) -> Self {
        self.payload = Ok(bytes.into());
        self.known_json = false;
        self
    }

    /// The content type of the payload, if not JSON.
    pub fn content_type(mut self, content_type: impl Into<String>) -> Self {
        self.attributes_mut().content_type = Some(content_type.into());
        self
    }

    /// The schema version of the payload (default 1).
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// When it happened (default: now).
    pub fn occurred_at(mut self, at: Timestamp) -> Self {
        self.occurred_at = Some(at);
        self
    }

    /// The source: the service that emits it.
    pub fn source(mut self, source: impl Into<String>) -> Self {
        self.attributes_mut().source = Some(source.into());
        self
    }

    /// The application it belongs to.
    pub fn app(mut self, app: impl Into<String>) -> Self {
        self.attributes_mut().app = Some(app.into());
        self
    }

    /// The tenant.
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.attributes_mut().tenant = Some(tenant.into());
        self
    }

    /// The thing it is about.
    pub fn entity(mut self, kind: impl Into<String>, id: impl Into<String>) -> Self {
        self.attributes_mut().entity = Some(Entity {
            kind: kind.into(),
            id: id.into(),
        });
        self
    }

    /// The ordering key.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.attributes_mut().key = Some(key.into());
        self
    }

    /// The correlation id.
    pub fn correlation_id(mut self, id: impl Into<String>) -> Self {
        self.attributes_mut().correlation_id = Some(id.into());
        self
    }

    /// The event that caused this one.
    pub fn causation_id(mut self, id: impl Into<String>) -> Self {
        self.attributes_mut().causation_id = Some(id.into());
        self
    }

    /// The trace it belongs to.
    pub fn trace(mut self, trace: TraceContext) -> Self {
        self.attributes_mut().trace = Some(trace);
        self
    }

    /// Sets all attributes at once.
    pub fn attributes(mut self, attributes: Attributes) -> Self {
        self.attributes = Some(Arc::new(attributes));
        self
    }

    /// Addresses the event to one group: all others skip it. The group's patterns must still match it.
    pub fn addressed_to(mut self, group: &GroupName) -> Self {
        self.attributes_mut().address = Some(group.as_str().to_owned());
        self
    }

    /// When it may be removed, whatever the retention of other events. An event that is pending in a group
    /// is never removed.
    pub fn expires_at(mut self, at: Timestamp) -> Self {
        self.attributes_mut().expires_at = Some(at);
        self
    }

    /// Delivers it to no group before this time. It is stored at once; a time in the past means no delay.
    /// In an ordered group the later events of its key wait with it.
    pub fn at(mut self, at: Timestamp) -> Self {
        self.attributes_mut().not_before = Some(at);
        self
    }

    /// Delivers it to no group before this delay has passed; see [`at`](Self::at).
    pub fn after(self, delay: Duration) -> Self {
        self.at(SystemClock.now().plus(delay))
    }

    /// How long it is kept after it happened: sets [`expires_at`](Self::expires_at).
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Adds one metadata entry.
    pub fn meta(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.attributes_mut()
            .metadata
            .insert(key.into(), value.into());
        self
    }

    /// Builds the event, or returns what is wrong with it.
    pub fn build(mut self) -> Result<Event> {
        validate_type(&self.event_type)?;
        if self.version == 0 {
            return Err(Error::new(
                Code::InvalidAttribute,
                "the version of an event is 1 or more",
            ));
        }
        let occurred_at = self.occurred_at.unwrap_or_else(|| SystemClock.now());
        if let Some(ttl) = self.ttl {
            if ttl.is_zero() || ttl > LONGEST_TTL {
                return Err(Error::new(
                    Code::InvalidAttribute,
                    format!("a time to live of {ttl:?}"),
                )
                .hint("the time is more than zero and at most a hundred years"));
            }
            self.attributes_mut().expires_at = Some(occurred_at.plus(ttl));
        }
        let attributes = self.attributes.filter(|a| **a != Attributes::default());
        let mut json = true;
        if let Some(attributes) = &attributes {
            validate_attributes(attributes)?;
            json = attributes.content_type.as_deref().is_none_or(is_json);
        }
        let payload = self.payload?;
        if json && !self.known_json {
            validate_json(&payload)?;
        }
        let made_id = self.id.is_none();
        Ok(Event::from_stored(
            self.id.unwrap_or_default(),
            self.event_type,
            self.version,
            occurred_at,
            payload,
            attributes,
        )
        .with_made_id(made_id))
    }

    fn attributes_mut(&mut self) -> &mut Attributes {
        Arc::make_mut(self.attributes.get_or_insert_default())
    }
}
