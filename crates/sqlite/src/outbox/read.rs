//! Reading rows of the outbox, whichever program wrote them.
//!
//! A row that Everbus wrote has everything in `payload` and `attributes`. A row of another program has the
//! envelope of the specification in `payload`, or the payload itself.

use everbus_core::{Attributes, Code, Error, Event, EventId, OutboxRow, Result, TraceContext};
use everbus_dialects::{Beside, Dialect, decode_beside};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, Row};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::{envelope, times};

/// The columns that [`row`] expects, in its order.
pub(super) const COLUMNS: &str = "row, id, event_id, event_type, payload, attempts, created_at, correlation_id, trace_id, attributes, ordering_key, revision, wanted_at";

/// The metadata entry for a trace id that is not a W3C one.
const TRACE_ID: &str = "trace_id";

/// Reads a row. An unreadable event is an error of that row alone.
pub(super) fn row(conn: &Connection, row: &Row<'_>) -> rusqlite::Result<OutboxRow> {
    let found = Found {
        event_id: text(row, 2)?.unwrap_or_default(),
        event_type: text(row, 3)?.unwrap_or_default(),
        created_at: text(row, 6)?.unwrap_or_default(),
        correlation_id: text(row, 7)?.filter(|t| !t.is_empty()),
        trace_id: text(row, 8)?.filter(|t| !t.is_empty()),
        ordering_key: text(row, 10)?.filter(|t| !t.is_empty()),
    };
    let payload = row.get_ref(4)?;
    let attributes = row.get_ref(9)?;
    let event = match payload.as_bytes_or_null() {
        Ok(Some(bytes)) => match std::str::from_utf8(bytes) {
            Ok(payload) => match attributes {
                ValueRef::Text(attributes) => {
                    let attributes = String::from_utf8_lossy(attributes);
                    envelope::read(&found.event_type, payload, &attributes)
                }
                _ => found.event(conn, payload),
            },
            Err(e) => Err(unreadable(&e)),
        },
        _ => Err(unreadable(&"it is a number")),
    };
    let attempts: i64 = row.get(5)?;
    let id = text(row, 1)?.unwrap_or_default();
    let tenant = match &event {
        Ok(event) => event.tenant().map(str::to_owned),
        // A row that Everbus wrote has the tenant in its id too.
        Err(_) if matches!(attributes, ValueRef::Text(_)) => {
            id.split_once('@').map(|(_, tenant)| tenant.to_owned())
        }
        Err(_) => None,
    };
    let again = text(row, 12)?;
    let wanted_at = times::latest(conn, again.as_deref().unwrap_or(&found.created_at));
    Ok(OutboxRow {
        row: row.get(0)?,
        id,
        event,
        attempts: u32::try_from(attempts).unwrap_or(0),
        key: found.ordering_key,
        tenant,
        revision: row.get(11)?,
        wanted_at,
        event_id: found.event_id,
        event_type: found.event_type,
    })
}

/// A column as text, whatever type SQLite stored.
fn text(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<String>> {
    Ok(match row.get_ref(column)? {
        ValueRef::Null => None,
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => {
            Some(String::from_utf8_lossy(bytes).into_owned())
        }
        ValueRef::Integer(number) => Some(number.to_string()),
        ValueRef::Real(number) => Some(number.to_string()),
    })
}

fn unreadable(what: &dyn std::fmt::Display) -> Error {
    Error::new(
        Code::InvalidPayloadError,
        format!("the column payload cannot be read: {what}"),
    )
    .hint("it holds JSON: the envelope of the event, or its payload")
}

/// What a row of another program has beside the payload.
struct Found {
    event_id: String,
    event_type: String,
    created_at: String,
    correlation_id: Option<String>,
    trace_id: Option<String>,
    ordering_key: Option<String>,
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

impl Found {
    fn event(&self, conn: &Connection, payload: &str) -> Result<Event> {
        // Only an object: an array would be read by position.
        if !payload.trim_start().starts_with('{') {
            return self.raw(conn, payload);
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
            Ok(_) => self.raw(conn, payload),
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

    fn raw(&self, conn: &Connection, payload: &str) -> Result<Event> {
        let id = EventId::from_foreign("", &self.event_id);
        let mut attributes = Attributes {
            correlation_id: self.correlation_id.clone(),
            foreign_id: (id.to_string() != self.event_id).then(|| self.event_id.clone()),
            ..Attributes::default()
        };
        self.add_columns(id, &mut attributes);
        Event::builder(self.event_type.as_str())
            .id(id)
            .occurred_at(times::read(conn, &self.created_at)?)
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
