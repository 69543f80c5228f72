//! An event as a message, in the dialect of its stream.
//!
//! In the native dialect the body is the payload as it is. In any other dialect it is a document of that dialect,
//! so that a service without Everbus reads and writes the same subjects. The headers carry what a document
//! has no place for:
//!
//! | header | what |
//! |---|---|
//! | `Nats-Msg-Id` | the id, by which the server recognises a repetition; with `@` and the tenant, if there is one |
//! | `Everbus` | version, time of the event, time of receipt, both in microseconds |
//! | `Everbus-Type` | the type, where the subject does not say it |
//! | `Everbus-Attributes` | the attributes as JSON |

use std::time::Duration;

use async_nats::{HeaderMap, HeaderValue};
use bytes::Bytes;
use everbus_core::{Attributes, Code, Error, Event, EventId, Result, Timestamp};
use everbus_dialects::{Beside, Dialect, decode_beside, encode};

use crate::names::{self, Naming};

pub(crate) const MESSAGE_ID: &str = "Nats-Msg-Id";
const MARK: &str = "Everbus";
const TYPE: &str = "Everbus-Type";
const ATTRIBUTES: &str = "Everbus-Attributes";

/// A message that is ready to be sent.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) subject: String,
    pub(crate) headers: HeaderMap,
    pub(crate) payload: Bytes,
}

impl Written {
    /// About how much the server counts against its largest message.
    pub(crate) fn size(&self) -> usize {
        let headers = self.headers.iter();
        let headers = headers.map(|(name, values)| {
            let values = values.iter().map(|value| value.as_str().len());
            values
                .map(|length| name.to_string().len() + length + 4)
                .sum::<usize>()
        });
        headers.sum::<usize>() + self.payload.len() + 16
    }
}

/// The id by which the server recognises a repetition. It contains the tenant, because ids are unique only within
/// one.
pub(crate) fn message_id(event: &Event) -> String {
    match event.tenant() {
        None => event.id().to_string(),
        Some(tenant) => format!("{}@{}", event.id(), names::encoded(tenant)),
    }
}

/// The message of an event.
pub(crate) fn write(
    event: &Event,
    dialect: Dialect,
    naming: Naming,
    received_at: Timestamp,
) -> Result<Written> {
    let subject = names::subject(naming, event.event_type());
    let mut headers = HeaderMap::new();
    headers.insert(MESSAGE_ID, message_id(event));
    let occurred = event.occurred_at().as_micros();
    let mark = format!("{} {occurred} {}", event.version(), received_at.as_micros());
    headers.insert(MARK, mark);
    if names::event_type(naming, &subject) != event.event_type() {
        let value = serde_json::to_string(event.event_type()).map_err(|e| unwritable(&e))?;
        headers.insert(TYPE, value);
    }
    if let Some(attributes) = event.attributes() {
        let value = serde_json::to_string(attributes).map_err(|e| unwritable(&e))?;
        headers.insert(ATTRIBUTES, value);
    }
    let payload = match dialect {
        Dialect::Native => event.payload().clone(),
        dialect => encode(event, dialect)?.into(),
    };
    Ok(Written {
        subject,
        headers,
        payload,
    })
}

fn unwritable(error: &serde_json::Error) -> Error {
    Error::new(
        Code::Internal,
        format!("an event cannot be written: {error}"),
    )
}

/// A message as it was read: the event, and why it is not one of this stream's dialect, if it is not.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) event: Event,
    pub(crate) received_at: Timestamp,
    pub(crate) foreign: Option<String>,
}

/// What is known of a message beside its content.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Around<'a> {
    pub(crate) stream: &'a str,
    pub(crate) subject: &'a str,
    pub(crate) seq: u64,
    pub(crate) time: Timestamp,
    pub(crate) dialect: Dialect,
    pub(crate) naming: Naming,
}

/// Reads a message. It never fails: a message that is not of the dialect is an event with the raw bytes.
pub(crate) fn read(around: Around<'_>, headers: Option<&HeaderMap>, payload: &Bytes) -> Read {
    let header = |name: &str| headers.and_then(|h| h.get(name)).map(HeaderValue::as_str);
    let subject_type = names::event_type(around.naming, around.subject);
    let own = header(MARK).and_then(mark);
    if let Some((version, occurred_at, received_at)) = own {
        let id = header(MESSAGE_ID).and_then(|id| id.split('@').next()?.parse::<EventId>().ok());
        let event_type = match header(TYPE) {
            None => Some(subject_type.clone()),
            Some(json) => serde_json::from_str(json).ok(),
        };
        let attributes = match header(ATTRIBUTES) {
            None => Some(None),
            Some(json) => serde_json::from_str::<Attributes>(json)
                .ok()
                .map(|a| Some(Box::new(a))),
        };
        let body = match around.dialect {
            Dialect::Native => Some(payload.clone()),
            dialect => decode_beside(
                payload,
                dialect,
                &beside(dialect, &subject_type, around.time),
            )
            .ok()
            .map(|event| event.payload().clone()),
        };
        if let (Some(id), Some(event_type), Some(attributes), Some(body)) =
            (id, event_type, attributes, body)
        {
            let event = Event::from_stored(
                id,
                event_type.into(),
                version,
                occurred_at,
                body,
                attributes,
            );
            return Read {
                event,
                received_at,
                foreign: None,
            };
        }
    }
    of_others(around, header(MESSAGE_ID), subject_type, payload)
}

fn beside(dialect: Dialect, subject_type: &str, time: Timestamp) -> Beside<'_> {
    Beside {
        event_type: (dialect == Dialect::Outbox).then_some(subject_type),
        source: None,
        time: Some(time),
    }
}

/// A message that another program sent.
fn of_others(
    around: Around<'_>,
    message_id: Option<&str>,
    subject_type: String,
    payload: &Bytes,
) -> Read {
    let read = match around.dialect {
        Dialect::Native => {
            let id = foreign_id(around, message_id);
            Event::builder(subject_type.clone())
                .id(id)
                .occurred_at(around.time)
                .payload(payload.clone())
                .build()
        }
        dialect => decode_beside(
            payload,
            dialect,
            &beside(dialect, &subject_type, around.time),
        ),
    };
    let (event, foreign) = match read {
        Ok(event) => (event, None),
        Err(error) => {
            let (dialect, subject) = (around.dialect, around.subject);
            let why = format!("a message on {subject} is not of the dialect {dialect}: {error}");
            (raw(around, message_id, subject_type, payload), Some(why))
        }
    };
    Read {
        event,
        received_at: around.time,
        foreign,
    }
}

/// The event id of a message that names none: made from its message id, or else from its stream, sequence and time.
/// The time is needed because a stream that is removed and created again begins at sequence 1.
fn foreign_id(around: Around<'_>, message_id: Option<&str>) -> EventId {
    let place = || {
        let Around {
            stream, seq, time, ..
        } = around;
        format!("{stream}:{seq}:{}", time.as_micros())
    };
    let name = message_id.map_or_else(place, str::to_owned);
    EventId::from_foreign(around.stream, &name)
}

/// The raw bytes as an event.
fn raw(
    around: Around<'_>,
    message_id: Option<&str>,
    subject_type: String,
    payload: &Bytes,
) -> Event {
    let id = foreign_id(around, message_id);
    let attributes = Attributes {
        content_type: Some("application/octet-stream".to_owned()),
        source: Some(format!("nats:{}", around.stream)),
        ..Attributes::default()
    };
    let attributes = Some(Box::new(attributes));
    Event::from_stored(
        id,
        subject_type.into(),
        1,
        around.time,
        payload.clone(),
        attributes,
    )
}

/// Clocks of publishers that differ from the server's by more are not trusted.
pub(crate) const SKEW: Duration = Duration::from_secs(5);

/// The time of receipt where a time decides: the stamp of the publisher, or the server's time if the two differ by
/// more than [`SKEW`].
pub(crate) fn deciding_time(stamp: Timestamp, stored: Timestamp) -> Timestamp {
    let apart = stored.since(stamp).max(stamp.since(stored));
    if apart > SKEW { stored } else { stamp }
}

/// Version, time of the event, time of receipt.
fn mark(text: &str) -> Option<(u32, Timestamp, Timestamp)> {
    let mut parts = text.split(' ');
    let version = parts.next()?.parse().ok()?;
    let occurred = parts.next()?.parse().ok()?;
    let received = parts.next()?.parse().ok()?;
    let time = Timestamp::from_micros;
    Some((version, time(occurred), time(received)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around(dialect: Dialect, subject: &str) -> Around<'_> {
        Around {
            stream: "ORDERS",
            subject,
            seq: 7,
            time: Timestamp::from_micros(5),
            dialect,
            naming: Naming::Declared,
        }
    }

    // conformance: contract/nats-dialects: an event comes back whole in every dialect, with what its document has no place for
    #[test]
    fn an_event_reads_back_in_every_dialect() {
        let event = Event::builder("orders:order-placed")
            .json(&serde_json::json!({"n": 1}))
            .tenant("mandant größe")
            .meta("k", "größe")
            .key("key")
            .build()
            .unwrap();
        let now = Timestamp::from_micros(1_700_000_000_000_001);
        for dialect in Dialect::ALL {
            let Ok(written) = write(&event, *dialect, Naming::Declared, now) else {
                // The document has fields that this event lacks.
                assert_eq!(*dialect, Dialect::Workflow);
                continue;
            };
            let around = around(*dialect, &written.subject);
            let back = read(around, Some(&written.headers), &written.payload);
            assert_eq!(back.event, event, "{dialect}");
            assert_eq!((back.received_at, back.foreign), (now, None));
        }
    }

    // conformance: contract/nats-foreign-read: a document that another program wrote is read by its dialect; what is no document keeps its bytes and says why
    #[test]
    fn messages_of_others_are_read() {
        let document = Bytes::from_static(
            br#"{"type":"message.received","payload":{"a":1},"id":"x-1","timestamp":"2026-01-01T00:00:00Z","source":"s"}"#,
        );
        let read_ = read(around(Dialect::Omni, "message.received"), None, &document);
        assert_eq!(read_.foreign, None);
        assert_eq!(read_.event.event_type(), "message.received");
        assert_eq!(&read_.event.payload()[..], br#"{"a":1}"#);
        let garbage = Bytes::from_static(b"\xff\x00 no document");
        for dialect in [Dialect::Omni, Dialect::Native, Dialect::CloudEvents] {
            let read_ = read(around(dialect, "message.received"), None, &garbage);
            assert!(read_.foreign.unwrap().contains("message.received"));
            assert_eq!(read_.event.payload(), &garbage);
            let again = read(around(dialect, "message.received"), None, &garbage);
            assert_eq!(read_.event.id(), again.event.id(), "always the same id");
            let mut later = around(dialect, "message.received");
            later.time = Timestamp::from_micros(6);
            let later = read(later, None, &garbage);
            assert_ne!(
                read_.event.id(),
                later.event.id(),
                "in another stream of the name"
            );
        }
        let plain = Bytes::from_static(b"{\"a\":1}");
        let read_ = read(around(Dialect::Native, "message.received"), None, &plain);
        assert_eq!(read_.foreign, None);
    }
}
