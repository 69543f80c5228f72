//! Documents as input and output of a bus: publishing a document, and writing a stored event with the
//! fields that the log added.

use everbus_core::{Event, IntoEvent, Recorded, Result};

use crate::dialect::Dialect;
use crate::fields::quoted;
use crate::{Beside, decode_beside, document};

/// A document of a dialect. It can be published directly:
///
/// ```
/// use everbus_core::IntoEvent;
/// use everbus_dialects::Dialect;
///
/// let document = br#"{"type":"message.received","payload":{"text":"hello"},"id":"m-1",
///     "timestamp":"2026-01-03T15:22:19.640Z","source":"whatsapp"}"#;
/// let event = Dialect::Omni.document(document).into_event()?; // what `bus.publish` does
/// assert_eq!(event.display_id(), "m-1");
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use = "a document is only read once it is published"]
pub struct Document<'a> {
    dialect: Dialect,
    bytes: &'a [u8],
    beside: Beside<'a>,
}

impl Dialect {
    /// A document in this dialect, to be published. It is decoded, and refused if invalid, when it is
    /// published.
    pub fn document(self, bytes: &[u8]) -> Document<'_> {
        Document {
            dialect: self,
            bytes,
            beside: Beside::default(),
        }
    }
}

impl<'a> Document<'a> {
    /// The type beside the document: *outbox* envelopes have no type field. In other dialects it must equal
    /// the type of the document.
    pub fn of_type(mut self, event_type: &'a str) -> Self {
        self.beside.event_type = Some(event_type);
        self
    }

    /// The source, for dialects without a source field. It is part of the identity of an id that is not a
    /// UUID.
    pub fn from_source(mut self, source: &'a str) -> Self {
        self.beside.source = Some(source);
        self
    }
}

impl IntoEvent for Document<'_> {
    fn into_event(self) -> Result<Event> {
        decode_beside(self.bytes, self.dialect, &self.beside)
    }
}

/// Writes a stored event as a document, with the fields that the log added if the dialect has them:
/// `receivedAt` of *workflow*, in milliseconds, and `seq` and `received_at` of the native dialect.
/// Otherwise as [`encode`](crate::encode).
pub fn encode_stored(record: &Recorded, dialect: Dialect) -> Result<Vec<u8>> {
    let mut fields = document(&record.event, dialect)?;
    match dialect {
        Dialect::Workflow => {
            let millis = record.received_at.as_micros().div_euclid(1000);
            fields.set("receivedAt", millis.to_string());
        }
        Dialect::Native => {
            // A number or a text: this cannot fail.
            let seq = serde_json::to_string(&record.position).unwrap_or_default();
            fields.set("seq", seq);
            fields.set("received_at", quoted(&record.received_at.to_string()));
        }
        _ => {}
    }
    Ok(fields.render())
}
