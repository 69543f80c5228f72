//! Wire formats: one event inside, several dialects outside. Pure functions, no I/O.
//!
//! [`encode`] writes an event as a JSON document of a [`Dialect`], [`decode`] reads one. Reading a document
//! and writing it again gives the same document: ids, times and versions keep their spelling, unknown
//! fields are kept. What the event itself cannot represent is in its metadata, under `{dialect}:{field}`.
//!
//! In the other direction a field may be lost: [`dropped`] names what a dialect cannot represent.
//!
//! ```
//! use everbus_core::Event;
//! use everbus_dialects::{Dialect, decode, encode};
//!
//! let document = br#"{"event_id":"test-1","event_type":"orders.order.placed","event_version":1,
//!     "timestamp":"2026-03-01T12:00:00Z","source":"test","correlation_id":"corr-1",
//!     "trace_id":null,"payload":{"order_id":"ord-123"}}"#;
//! let event = decode(document, Dialect::Framework)?;
//! assert_eq!(event.event_type(), "orders.order.placed");
//! assert_eq!(event.display_id(), "test-1");
//! assert_eq!(&event.payload()[..], br#"{"order_id":"ord-123"}"#);
//!
//! let same: serde_json::Value = serde_json::from_slice(&encode(&event, Dialect::Framework)?)?;
//! assert_eq!(same, serde_json::from_slice::<serde_json::Value>(document)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod body;
pub mod cloudevents;
pub mod columns;
mod dialect;
mod document;
mod draft;
mod dropped;
pub mod envelope;
mod fields;
mod format;
mod framework;
mod native;
mod omni;
mod outbox;
mod spelling;
mod time;
pub mod workflow;

use everbus_core::{Code, Error, Event, Result, Timestamp};

pub use crate::dialect::Dialect;
pub use crate::document::{Document, encode_stored};
pub use crate::dropped::dropped;

use crate::body::Body;
use crate::draft::Draft;
use crate::fields::Fields;

/// Data beside a document: the column of a row, the subject of a message, the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beside<'a> {
    /// The type. *outbox* envelopes have no type field; in other dialects it must equal that of the
    /// document.
    pub event_type: Option<&'a str>,
    /// The source, for documents without one. It is part of the identity of an id that is not a UUID.
    pub source: Option<&'a str>,
    /// The time of an event whose document has none; by default now.
    pub time: Option<Timestamp>,
}

impl Beside<'_> {
    fn no_type() -> Error {
        Error::new(
            Code::InvalidType,
            "it says nothing about the type of the event",
        )
        .hint("the type of an outbox envelope stands beside it: pass it to decode_beside")
    }
}

/// Writes an event as a document of a dialect.
///
/// It is [`Code::Unsupported`] if a reader would misunderstand the document: a payload that is not JSON in
/// a dialect with only JSON, a version other than 1 in a dialect without versions. Other fields that the
/// dialect does not have are left out; [`dropped`] names them.
pub fn encode(event: &Event, dialect: Dialect) -> Result<Vec<u8>> {
    Ok(document(event, dialect)?.render())
}

/// Reads a document of a dialect. The caller limits its size.
///
/// An invalid document is an error that names the field, never a panic and never a guess.
pub fn decode(document: &[u8], dialect: Dialect) -> Result<Event> {
    decode_beside(document, dialect, &Beside::default())
}

/// Reads a document of a dialect together with the data beside it.
///
/// ```
/// use everbus_dialects::{Beside, Dialect, decode_beside};
///
/// let envelope = br#"{"event_id":"e-1","occurred_at":"2026-03-01T12:00:00Z","tenant_id":"t",
///     "station_id":"s-7","payload":{"window":15}}"#;
/// let row = Beside { event_type: Some("TelemetryWindowClosed"), ..Beside::default() };
/// let event = decode_beside(envelope, Dialect::Outbox, &row)?;
/// assert_eq!(event.event_type(), "TelemetryWindowClosed");
/// assert_eq!(event.metadata()["station_id"], "s-7");
/// assert_eq!(event.correlation_id(), "e-1");
/// # Ok::<(), everbus_core::Error>(())
/// ```
pub fn decode_beside(document: &[u8], dialect: Dialect, beside: &Beside<'_>) -> Result<Event> {
    let fields = Fields::parse(document, dialect)?;
    let draft = format::read(&fields, beside)?;
    let body = body::read(&fields, draft.attributes.content_type.as_deref())?;
    event(&fields, draft, body, beside)
}

/// The document of an event, payload included.
fn document(event: &Event, dialect: Dialect) -> Result<Fields<'_>> {
    let mut fields = spelling::apply(event, format::write(event, dialect)?)?;
    body::write(event, &mut fields)?;
    Ok(fields)
}

/// The event of a document, with what is needed to write the document again.
fn event(fields: &Fields<'_>, draft: Draft, body: Body, beside: &Beside<'_>) -> Result<Event> {
    let dialect = fields.dialect();
    let mut builder = draft.into_builder(dialect, beside)?;
    let plain = builder.clone().build().map_err(|e| located(dialect, &e))?;
    let usual = format::write(&plain, dialect)?;
    for (key, json) in spelling::difference(fields, &usual)? {
        builder = builder.meta(key, json);
    }
    for (field, mark) in body.marks {
        builder = builder.meta(spelling::key(dialect, field), mark);
    }
    let event = builder.payload(body.payload).build();
    event.map_err(|e| located(dialect, &e))
}

/// The same error, with the document in its message.
fn located(dialect: Dialect, error: &Error) -> Error {
    let what = format!("{dialect} document: {}", error.message());
    match error.hint_text() {
        Some(hint) => Error::new(error.code(), what).hint(hint),
        None => Error::new(error.code(), what),
    }
}

/// Refuses versions that a dialect cannot represent: a reader would take them for version 1.
fn only_version_1(event: &Event, dialect: Dialect) -> Result<()> {
    if event.version() == 1 {
        return Ok(());
    }
    let (id, version) = (event.display_id(), event.version());
    let what = format!("the {dialect} dialect has no place for the version {version} of {id:?}");
    Err(Error::new(Code::Unsupported, what)
        .hint("publish the new version as a new type, or choose another dialect"))
}
