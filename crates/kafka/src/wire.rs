//! An event as a record, in the dialect of its topic.
//!
//! In the native dialect the value is the payload as it is. In any other dialect it is a document of that dialect, so
//! that a service without Everbus reads and writes the same topics. The key of the record is the ordering key.
//! Headers carry what a document has no place for:
//!
//! | header | what |
//! |---|---|
//! | `everbus` | version, time of the event, time of receipt, both in microseconds |
//! | `everbus-id`, `everbus-type` | id and type |
//! | `everbus-attributes` | the attributes as JSON |
//! | `traceparent`, `tracestate` | the trace, for services without Everbus |

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use everbus_core::{
    Attributes, Code, Error, Event, EventId, Position, Recorded, Result, Timestamp,
};
use everbus_dialects::{Beside, Dialect, decode_beside, encode};
use rdkafka::message::{BorrowedMessage, Header, Headers as _, Message as _, OwnedHeaders};

use crate::topics::Topic;

const MARK: &str = "everbus";
const ID: &str = "everbus-id";
const TYPE: &str = "everbus-type";
const ATTRIBUTES: &str = "everbus-attributes";
const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";

/// A record that is ready to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    pub(crate) key: Option<String>,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) payload: Bytes,
    pub(crate) received_at: Timestamp,
}

impl Written {
    /// About how much the server counts against its largest record.
    pub(crate) fn size(&self) -> usize {
        let headers = self.headers.iter();
        let headers: usize = headers
            .map(|(name, value)| name.len() + value.len() + 8)
            .sum();
        headers + self.key.as_ref().map_or(0, String::len) + self.payload.len() + 100
    }

    pub(crate) fn native_headers(&self) -> OwnedHeaders {
        let mut all = OwnedHeaders::new_with_capacity(self.headers.len());
        for (key, value) in &self.headers {
            let value = Some(value.as_str());
            all = all.insert(Header { key, value });
        }
        all
    }
}

/// The record of an event.
pub(crate) fn write(event: &Event, dialect: Dialect, received_at: Timestamp) -> Result<Written> {
    let unwritable = |error: serde_json::Error| {
        Error::new(
            Code::Internal,
            format!("an event cannot be written: {error}"),
        )
    };
    let occurred = event.occurred_at().as_micros();
    let mark = format!("{} {occurred} {}", event.version(), received_at.as_micros());
    let mut headers = vec![
        (MARK, mark),
        (ID, event.id().to_string()),
        (TYPE, event.event_type().to_owned()),
    ];
    if let Some(attributes) = event.attributes() {
        let value = serde_json::to_string(attributes).map_err(unwritable)?;
        headers.push((ATTRIBUTES, value));
        if let Some(trace) = &attributes.trace {
            headers.push((TRACEPARENT, trace.traceparent.clone()));
            if let Some(state) = &trace.tracestate {
                headers.push((TRACESTATE, state.clone()));
            }
        }
    }
    let payload = match dialect {
        Dialect::Native => event.payload().clone(),
        dialect => encode(event, dialect)?.into(),
    };
    Ok(Written {
        key: event.ordering_key().map(std::borrow::Cow::into_owned),
        headers,
        payload,
        received_at,
    })
}

/// A record as it was read: the event, and why it is not one of its topic's dialect, if it is not.
#[derive(Clone, Debug)]
pub(crate) struct Read {
    pub(crate) record: Recorded,
    pub(crate) foreign: Option<String>,
    /// The record names no type. The name of its topic is the type of the event.
    pub(crate) untyped: bool,
}

impl Read {
    /// For a record that no subscription matches: whether all groups that read the topic get it, to dead-letter it.
    /// They do if another program wrote the record, and it names no type or cannot be read: then no subscription can
    /// match it.
    pub(crate) fn is_for_all(&mut self, topic: &Topic) -> bool {
        if self.untyped && self.foreign.is_none() {
            let why = format!(
                "a record of {} names no type, and no subscription is for the name of the topic",
                topic.name
            );
            self.foreign = Some(why);
        }
        self.foreign.is_some()
    }
}

/// What a record has beside its value.
#[derive(Clone, Copy, Default)]
struct Found<'a> {
    mark: Option<(u32, Timestamp, Timestamp)>,
    id: Option<&'a str>,
    event_type: Option<&'a str>,
    attributes: Option<&'a str>,
}

/// Reads a record. It never fails: a record that is not of the dialect becomes an event with the raw bytes. `before` is
/// the type of the record before, whose text is shared if this one has the same type.
pub(crate) fn read(
    topic: &Topic,
    message: &BorrowedMessage<'_>,
    before: Option<&Arc<str>>,
) -> Read {
    // The client panics at a header whose name is not UTF-8; such a record is of another program.
    let found = catch_unwind(AssertUnwindSafe(|| found(message))).unwrap_or_default();
    let place = u64::try_from(message.offset()).unwrap_or(0) + 1;
    let partition = message.partition();
    let time = message.timestamp().to_millis().unwrap_or(0);
    let around = Around {
        topic,
        position: Position::new(topic.shard(partition), place),
        time: Timestamp::from_micros(time.max(0).saturating_mul(1000)),
        before,
    };
    let payload = Bytes::copy_from_slice(message.payload().unwrap_or_default());
    around.read(found, payload)
}

fn found<'a>(message: &'a BorrowedMessage<'_>) -> Found<'a> {
    let mut found = Found::default();
    let Some(headers) = message.headers() else {
        return found;
    };
    for header in headers.iter() {
        let Some(text) = header
            .value
            .and_then(|value| std::str::from_utf8(value).ok())
        else {
            continue;
        };
        match header.key {
            MARK => found.mark = mark(text),
            ID => found.id = Some(text),
            TYPE => found.event_type = Some(text),
            ATTRIBUTES => found.attributes = Some(text),
            _ => {}
        }
    }
    found
}

/// The place of a record.
struct Around<'a> {
    topic: &'a Topic,
    position: Position,
    time: Timestamp,
    /// The type of the record before.
    before: Option<&'a Arc<str>>,
}

impl Around<'_> {
    fn read(&self, found: Found<'_>, payload: Bytes) -> Read {
        let mut payload = payload;
        match self.own(&found, &mut payload) {
            Some(record) => Read {
                record,
                foreign: None,
                untyped: false,
            },
            None => self.of_others(found.event_type, &payload),
        }
    }

    /// A record that Everbus wrote. It takes the payload; if there is no such record, the payload stays.
    fn own(&self, found: &Found<'_>, payload: &mut Bytes) -> Option<Recorded> {
        let (version, occurred_at, received_at) = found.mark?;
        let id = found.id?.parse::<EventId>().ok()?;
        let event_type = found.event_type?;
        let attributes = match &found.attributes {
            None => None,
            Some(json) => Some(Box::new(serde_json::from_str::<Attributes>(json).ok()?)),
        };
        let body = match self.topic.dialect {
            // A copy of the handle would allocate memory.
            Dialect::Native => std::mem::take(payload),
            dialect => {
                let beside = self.beside(event_type);
                decode_beside(payload, dialect, &beside)
                    .ok()?
                    .payload()
                    .clone()
            }
        };
        let before = self.before.filter(|before| ***before == *event_type);
        let event = Event::from_stored(
            id,
            before.map_or_else(|| event_type.into(), Arc::clone),
            version,
            occurred_at,
            body,
            attributes,
        );
        Some(Recorded::new(event, self.position, received_at))
    }

    fn beside<'a>(&self, event_type: &'a str) -> Beside<'a> {
        Beside {
            event_type: (self.topic.dialect == Dialect::Outbox).then_some(event_type),
            source: None,
            time: Some(self.time),
        }
    }

    /// A record of another program.
    fn of_others(&self, event_type: Option<&str>, payload: &Bytes) -> Read {
        // A document names its type itself.
        let untyped = event_type.is_none() && self.topic.dialect == Dialect::Native;
        let event_type = event_type.map_or_else(|| self.topic.short.clone(), str::to_owned);
        let id = EventId::from_foreign(&self.topic.name, &self.position.to_string());
        let read = match self.topic.dialect {
            Dialect::Native => Event::builder(event_type.clone())
                .id(id)
                .occurred_at(self.time)
                .payload(payload.clone())
                .build(),
            dialect => decode_beside(payload, dialect, &self.beside(&event_type)),
        };
        let (event, foreign) = match read {
            Ok(event) => (event, None),
            Err(error) => {
                let (topic, dialect) = (&self.topic.name, self.topic.dialect);
                let why = format!("a record of {topic} is not of the dialect {dialect}: {error}");
                let attributes = Attributes {
                    content_type: Some("application/octet-stream".to_owned()),
                    source: Some(format!("kafka:{topic}")),
                    ..Attributes::default()
                };
                let (event_type, attributes) = (event_type.into(), Some(Box::new(attributes)));
                let event =
                    Event::from_stored(id, event_type, 1, self.time, payload.clone(), attributes);
                (event, Some(why))
            }
        };
        Read {
            record: Recorded::new(event, self.position, self.time),
            foreign,
            untyped,
        }
    }
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

    fn found(written: &Written) -> Found<'_> {
        let header = |wanted: &str| {
            let mut headers = written.headers.iter();
            headers
                .find(|(name, _)| *name == wanted)
                .map(|(_, value)| value.as_str())
        };
        Found {
            mark: header(MARK).and_then(mark),
            id: header(ID),
            event_type: header(TYPE),
            attributes: header(ATTRIBUTES),
        }
    }

    fn around(topic: &Topic) -> Around<'_> {
        Around {
            topic,
            position: Position::new(topic.shard(0), 7),
            time: Timestamp::from_micros(5000),
            before: None,
        }
    }

    // conformance: contract/kafka-dialects: an event comes back whole in every dialect, with what its document has no place for
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
            let Ok(written) = write(&event, *dialect, now) else {
                // The document has fields that this event lacks.
                assert_eq!(*dialect, Dialect::Workflow);
                continue;
            };
            assert_eq!(written.key.as_deref(), Some("key"));
            let topic = Topic::for_tests("orders", *dialect);
            let back = around(&topic).read(found(&written), written.payload.clone());
            assert_eq!(back.record.event, event, "{dialect}");
            assert_eq!((back.record.received_at, back.foreign), (now, None));
        }
    }

    // conformance: contract/kafka-trace: the trace of an event is in the headers that other programs read
    #[test]
    fn headers_carry_the_trace() {
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let trace = everbus_core::TraceContext::parse(parent, Some("k=v")).unwrap();
        let event = Event::builder("a.b").trace(trace).build().unwrap();
        let written = write(&event, Dialect::Native, Timestamp::EPOCH).unwrap();
        for wanted in [(TRACEPARENT, parent), (TRACESTATE, "k=v")] {
            let mut headers = written.headers.iter();
            assert!(headers.any(|(name, value)| (*name, &value[..]) == wanted));
        }
    }

    // conformance: contract/kafka-foreign-read: a record of another program is read by its topic's dialect; what is no document keeps its bytes and says why
    #[test]
    fn records_of_others_are_read() {
        let document = Bytes::from_static(
            br#"{"type":"message.received","payload":{"a":1},"id":"x-1","timestamp":"2026-01-01T00:00:00Z","source":"s"}"#,
        );
        let topic = Topic::for_tests("message", Dialect::Omni);
        let read = around(&topic).read(Found::default(), document);
        assert_eq!(read.foreign, None);
        assert_eq!(read.record.event.event_type(), "message.received");
        assert_eq!(&read.record.event.payload()[..], br#"{"a":1}"#);
        let garbage = Bytes::from_static(b"\xff\x00 no document");
        for dialect in [Dialect::Omni, Dialect::Native, Dialect::CloudEvents] {
            let topic = Topic::for_tests("message", dialect);
            let read = around(&topic).read(Found::default(), garbage.clone());
            assert!(read.foreign.unwrap().contains("message"));
            assert_eq!(read.record.event.payload(), &garbage);
            let again = around(&topic).read(Found::default(), garbage.clone());
            assert_eq!(
                read.record.event.id(),
                again.record.event.id(),
                "always the same id"
            );
        }
    }
}
