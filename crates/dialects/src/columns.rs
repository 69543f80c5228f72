//! The columns of a row of `event_outbox`, whichever program wrote it.
//!
//! A row that Everbus wrote has everything in `payload` and `attributes`. A row of another program has the
//! envelope of the specification in `payload`, or the payload itself.

use everbus_core::{Attributes, Code, Error, Event, EventId, Result, Timestamp, TraceContext};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::{Beside, Dialect, decode_beside, envelope};

/// The metadata entry for a trace id that is not a W3C one.
const TRACE_ID: &str = "trace_id";

/// The columns of a row. Empty texts in optional columns count as missing.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    /// The column `event_id`.
    pub event_id: String,
    /// The column `event_type`.
    pub event_type: String,
    /// The column `correlation_id`.
    pub correlation_id: Option<String>,
    /// The column `trace_id`.
    pub trace_id: Option<String>,
    /// The column `ordering_key`.
    pub ordering_key: Option<String>,
    /// The column `attributes`: present in rows that Everbus wrote.
    pub attributes: Option<String>,
}

/// The error of a payload that cannot be read.
pub fn unreadable(what: &dyn std::fmt::Display) -> Error {
    Error::new(
        Code::InvalidPayloadError,
        format!("the column payload cannot be read: {what}"),
    )
    .hint("it holds JSON: the envelope of the event, or its payload")
}

/// The fields that make an object an envelope.
#[derive(Deserialize)]
struct Signs<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    event_id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    payload: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    occurred_at: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    correlation_id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    everbus_id: Option<&'a RawValue>,
}

/// Any value, also `null`.
fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

/// The event with the UUID that the view `dead_letter_events` showed for it. The foreign id alone does not
/// determine that UUID, since the source belongs to it.
fn known_as(event: &Event, id: EventId) -> Result<Event> {
    let mut attributes = event.attributes().cloned().unwrap_or_default();
    attributes.metadata.remove("outbox:everbus_id");
    Event::builder(event.type_arc().clone())
        .id(id)
        .version(event.version())
        .occurred_at(event.occurred_at())
        .payload(event.payload().clone())
        .attributes(attributes)
        .build()
}

/// The tenant of a row: the tenant of its event. A row that Everbus wrote has the tenant in its `id` too, which
/// helps if the event cannot be read.
pub fn tenant(event: &Result<Event>, id: &str, has_attributes: bool) -> Option<String> {
    match event {
        Ok(event) => event.tenant().map(str::to_owned),
        Err(_) if has_attributes => id.split_once('@').map(|(_, tenant)| tenant.to_owned()),
        Err(_) => None,
    }
}

impl Columns {
    /// The event of the row. `created_at` reads the column of that name, which a raw payload needs.
    pub fn event(
        &self,
        payload: &str,
        created_at: impl FnOnce() -> Result<Timestamp>,
    ) -> Result<Event> {
        if let Some(attributes) = &self.attributes {
            return envelope::read(&self.event_type, payload, attributes);
        }
        // Only an object: an array would be read by position.
        if !payload.trim_start().starts_with('{') {
            return self.raw(payload, created_at()?);
        }
        match serde_json::from_str(payload) {
            Ok(Signs {
                event_id: Some(_),
                payload: Some(_),
                occurred_at: Some(_),
                correlation_id,
                everbus_id,
            }) => {
                let said = correlation_id.map(RawValue::get);
                let given = said.is_some_and(|json| !matches!(json, "\"\"" | "null"));
                let event = self.enveloped(payload, given)?;
                let id = everbus_id.and_then(|json| serde_json::from_str(json.get()).ok());
                match id {
                    Some(id) => known_as(&event, id),
                    None => Ok(event),
                }
            }
            Ok(_) => self.raw(payload, created_at()?),
            // It is not JSON, or has one of these fields twice.
            Err(e) => Err(unreadable(&e)),
        }
    }

    fn enveloped(&self, document: &str, has_correlation: bool) -> Result<Event> {
        let beside = Beside {
            event_type: Some(&self.event_type),
            ..Beside::default()
        };
        let event = decode_beside(document.as_bytes(), Dialect::Outbox, &beside)?;
        let columns = (!has_correlation && self.correlation_id.is_some())
            || self.trace_id.is_some()
            || self.ordering_key.is_some();
        if !columns {
            return Ok(event);
        }
        let mut attributes = event.attributes().cloned().unwrap_or_default();
        if !has_correlation {
            let own = attributes.correlation_id.take();
            attributes.correlation_id = self.correlation_id.clone().or(own);
        }
        self.add_columns(event.id(), &mut attributes);
        Event::builder(event.type_arc().clone())
            .id(event.id())
            .version(event.version())
            .occurred_at(event.occurred_at())
            .payload(event.payload().clone())
            .attributes(attributes)
            .build()
    }

    fn raw(&self, payload: &str, created_at: Timestamp) -> Result<Event> {
        let id = EventId::from_foreign("", &self.event_id);
        let mut attributes = Attributes {
            correlation_id: self.correlation_id.clone(),
            foreign_id: (id.to_string() != self.event_id).then(|| self.event_id.clone()),
            ..Attributes::default()
        };
        self.add_columns(id, &mut attributes);
        Event::builder(self.event_type.as_str())
            .id(id)
            .occurred_at(created_at)
            .payload(payload.to_owned())
            .attributes(attributes)
            .build()
    }

    fn add_columns(&self, id: EventId, attributes: &mut Attributes) {
        if attributes.key.is_none() {
            attributes.key = self.ordering_key.clone();
        }
        let Some(text) = &self.trace_id else { return };
        // Without its own span it gets one made of the event's id, as in the dialects.
        let span = id.as_bytes().iter().skip(8);
        let span = span.fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
        let lower = text.to_ascii_lowercase();
        let parent = format!("00-{lower}-{:016x}-01", span.max(1));
        match TraceContext::parse(&parent, None).or_else(|_| TraceContext::parse(text, None)) {
            Ok(trace) => attributes.trace = Some(trace),
            Err(_) => {
                attributes.metadata.insert(TRACE_ID.into(), text.clone());
            }
        }
    }
}
