//! An event as the fields of an entry, in the dialect of its stream.
//!
//! | field | what |
//! |---|---|
//! | `eb` | id, version, time of the event in microseconds, dialect unless native: it marks an entry of Everbus |
//! | `t` | the type, where it is not the dotted one of the stream |
//! | `a` | the attributes as JSON |
//! | `k` | the ordering key, for groups ordered by key |
//! | `to` | the group that the event is addressed to |
//! | `p` | the payload, in the native dialect |
//! | `__data__` | in another dialect: the document, in the envelope of FastStream |
//!
//! The time of receipt is that of the entry's id. An entry of another program is read as FastStream wrote it
//! (JSON or binary envelope), or as plain fields.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use everbus_core::{Attributes, Code, Error, Event, EventId, Result, Shard, Timestamp};
use everbus_dialects::{Beside, Dialect, decode_beside, encode};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::keys::{EntryId, Space};

const MARK: &str = "eb";
const TYPE: &str = "t";
const ATTRIBUTES: &str = "a";
const KEY: &str = "k";
const ADDRESS: &str = "to";
const PAYLOAD: &str = "p";
/// The one field of a message of FastStream.
const DATA: &str = "__data__";
/// How many attempts a service of the framework made before it sent the message again.
const RETRIES: &str = "x-retry-count";
/// Metadata of a foreign event whose document names a type of another stream.
const NAMED_TYPE: &str = "event_type";
/// The first bytes of FastStream's binary envelope.
const BINARY: &[u8] = b"\x89BIN\r\n\x1a\n";

/// The fields of an entry, name and value in turn.
pub(crate) type Fields = Vec<Bytes>;

fn unwritable(error: &serde_json::Error) -> Error {
    let what = format!("an event cannot be written: {error}");
    Error::new(Code::Internal, what)
}

/// The fields of an event.
pub(crate) fn write(event: &Event, dialect: Dialect, dotted: &str) -> Result<Fields> {
    let mut fields = Fields::with_capacity(8);
    let mut field = |name: &'static str, value: Bytes| {
        fields.push(Bytes::from_static(name.as_bytes()));
        fields.push(value);
    };
    let occurred = event.occurred_at().as_micros();
    let mut mark = format!("{} {} {occurred}", event.id(), event.version());
    // The dialect of the stream may be another one by the time the entry is read.
    if dialect != Dialect::Native {
        mark.push(' ');
        mark.push_str(dialect.as_str());
    }
    field(MARK, mark.into());
    if event.event_type() != dotted {
        field(TYPE, Bytes::copy_from_slice(event.event_type().as_bytes()));
    }
    if let Some(attributes) = event.attributes() {
        let json = serde_json::to_vec(attributes).map_err(|e| unwritable(&e))?;
        field(ATTRIBUTES, json.into());
    }
    if let Some(key) = event.ordering_key() {
        field(KEY, key.into_owned().into());
    }
    if let Some(group) = event.attributes().and_then(|a| a.address.as_ref()) {
        field(ADDRESS, Bytes::copy_from_slice(group.as_bytes()));
    }
    match dialect {
        Dialect::Native => field(PAYLOAD, event.payload().clone()),
        dialect => field(DATA, envelope(event, &encode(event, dialect)?)?),
    }
    Ok(fields)
}

/// Wraps a document in the envelope that every version of FastStream reads.
fn envelope(event: &Event, document: &[u8]) -> Result<Bytes> {
    let document = std::str::from_utf8(document)
        .map_err(|_| Error::new(Code::Unsupported, "the document is not text"))?;
    let envelope = serde_json::json!({
        "data": document,
        "headers": {
            "correlation_id": event.correlation_id(),
            "content-type": "application/json",
            "message_id": event.display_id(),
        },
    });
    let json = serde_json::to_vec(&envelope).map_err(|e| unwritable(&e))?;
    Ok(json.into())
}

/// The name under which the server remembers an id. Ids are unique within a tenant.
pub(crate) fn id_name(event: &Event) -> String {
    match event.tenant() {
        None => event.id().to_string(),
        Some(tenant) => format!("{}@{tenant}", event.id()),
    }
}

/// The digest of the body of an event: equal for events that are equal by [`Event::same_body`].
pub(crate) fn digest(event: &Event) -> String {
    let mut sum = Sha256::new();
    let mut add = |part: &[u8]| {
        sum.update((part.len() as u64).to_be_bytes());
        sum.update(part);
    };
    add(event.event_type().as_bytes());
    add(&event.version().to_be_bytes());
    add(event.content_type().as_bytes());
    match event.attributes() {
        None => add(NO_ATTRIBUTES.as_bytes()),
        Some(attributes) => add(same_attributes(attributes).as_bytes()),
    }
    // A payload that was moved to an object is the same payload.
    match event.overflow() {
        Some(moved) => add(moved.payload_sha256.as_bytes()),
        None => add(hex(&Sha256::digest(event.payload())).as_bytes()),
    }
    hex(&sum.finalize()[..16])
}

/// [`same_attributes`] of an event without attributes.
const NO_ATTRIBUTES: &str = "[null,null,null,null,{},null]";

/// The attributes that belong to the body of an event, as JSON.
fn same_attributes(attributes: &Attributes) -> String {
    serde_json::json!([
        attributes.tenant,
        attributes.app,
        attributes.entity,
        attributes.key,
        attributes.metadata,
        attributes.address,
    ])
    .to_string()
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: [char; 16] = [
        '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f',
    ];
    let digit = |half: u8| DIGITS[usize::from(half & 15)];
    let pairs = bytes.iter().flat_map(|byte| [byte >> 4, *byte]);
    let mut text = String::with_capacity(bytes.len() * 2);
    text.extend(pairs.map(digit));
    text
}

/// An entry as it was read. `foreign` has the reason if the entry is not in the dialect of its stream.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) event: Event,
    pub(crate) received_at: Timestamp,
    pub(crate) foreign: Option<String>,
    /// Attempts that other programs made.
    pub(crate) retries: u32,
}

/// A stream that entries are read from: what all of them have in common.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) key: Arc<str>,
    /// The dotted type.
    dotted: Arc<str>,
    pub(crate) shard: Shard,
    dialect: Dialect,
}

impl Source {
    pub(crate) fn new(space: &Space, key: &str, dialect: Dialect) -> Result<Self> {
        Ok(Self {
            key: key.into(),
            dotted: space.types(key).swap_remove(0).into(),
            shard: space.shard(key)?,
            dialect,
        })
    }
}

/// What is known of an entry beside its fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Around<'a> {
    pub(crate) space: &'a Space,
    pub(crate) source: &'a Source,
    pub(crate) id: EntryId,
}

/// Reads an entry. It never fails: an entry in an unknown format becomes an event with the raw bytes.
pub(crate) fn read(around: Around<'_>, fields: &[Bytes]) -> Read {
    let field = |name: &str| {
        let mut pairs = fields.chunks_exact(2);
        pairs.find(|pair| pair[0] == name).map(|pair| &pair[1])
    };
    if let Some(event) = field(MARK).and_then(|mark| own(around, mark, field)) {
        return Read {
            event,
            received_at: around.id.time(),
            foreign: None,
            retries: 0,
        };
    }
    of_others(around, fields, field(DATA))
}

fn own<'a>(
    around: Around<'_>,
    mark: &Bytes,
    field: impl Fn(&str) -> Option<&'a Bytes>,
) -> Option<Event> {
    let mut parts = std::str::from_utf8(mark).ok()?.split(' ');
    let id: EventId = parts.next()?.parse().ok()?;
    let version: u32 = parts.next()?.parse().ok()?;
    let occurred_at = Timestamp::from_micros(parts.next()?.parse().ok()?);
    let dialect = match parts.next() {
        Some(name) => name.parse().ok()?,
        None => around.source.dialect,
    };
    let event_type: Arc<str> = match field(TYPE) {
        Some(name) => std::str::from_utf8(name).ok()?.into(),
        None => around.source.dotted.clone(),
    };
    let attributes = match field(ATTRIBUTES) {
        Some(json) => Some(Box::new(serde_json::from_slice::<Attributes>(json).ok()?)),
        None => None,
    };
    let payload = match field(PAYLOAD) {
        Some(payload) => payload.clone(),
        None => {
            let (document, _) = unwrap(field(DATA)?);
            let beside = beside(dialect, &event_type, around.id.time());
            let event = decode_beside(&document, dialect, &beside).ok()?;
            event.payload().clone()
        }
    };
    Some(Event::from_stored(
        id,
        event_type,
        version,
        occurred_at,
        payload,
        attributes,
    ))
}

fn beside(dialect: Dialect, event_type: &str, time: Timestamp) -> Beside<'_> {
    Beside {
        event_type: (dialect == Dialect::Outbox).then_some(event_type),
        source: None,
        time: Some(time),
    }
}

/// The body and the headers of a message of FastStream.
fn unwrap(data: &Bytes) -> (Bytes, HashMap<String, String>) {
    if let Some(message) = unwrap_binary(data) {
        return message;
    }
    #[derive(serde::Deserialize)]
    struct Envelope {
        data: String,
        #[serde(default)]
        headers: Map<String, Value>,
    }
    match serde_json::from_slice::<Envelope>(data) {
        Ok(envelope) => {
            let text = |value: Value| match value {
                Value::String(text) => text,
                other => other.to_string(),
            };
            let headers = envelope.headers.into_iter();
            let headers = headers.map(|(name, value)| (name, text(value)));
            (envelope.data.into(), headers.collect())
        }
        Err(_) => (data.clone(), HashMap::new()),
    }
}

/// The binary envelope: mark, version 1, where headers and data begin, the headers with their lengths, the data.
fn unwrap_binary(data: &Bytes) -> Option<(Bytes, HashMap<String, String>)> {
    let rest = data.strip_prefix(BINARY)?;
    let short = |at: usize| Some(u16::from_be_bytes(data.get(at..at + 2)?.try_into().ok()?));
    let long = |at: usize| Some(u32::from_be_bytes(data.get(at..at + 4)?.try_into().ok()?));
    let first = data.len() - rest.len();
    if short(first)? != 1 {
        return None;
    }
    let mut at = usize::try_from(long(first + 2)?).ok()?;
    let start = usize::try_from(long(first + 6)?).ok()?;
    let mut headers = HashMap::new();
    let count = short(at)?;
    at += 2;
    let text = |at: &mut usize| {
        let length = usize::from(short(*at)?);
        let bytes = data.get(*at + 2..*at + 2 + length)?;
        *at += 2 + length;
        Some(String::from_utf8_lossy(bytes).into_owned())
    };
    for _ in 0..count {
        let name = text(&mut at)?;
        headers.insert(name, text(&mut at)?);
    }
    (start <= data.len()).then(|| (data.slice(start..), headers))
}

/// Fields without an envelope as a JSON object; `payload` may be JSON itself.
fn object(fields: &[Bytes]) -> Bytes {
    let mut object = Map::new();
    for pair in fields.chunks_exact(2) {
        let name = String::from_utf8_lossy(&pair[0]).into_owned();
        let text = String::from_utf8_lossy(&pair[1]);
        let value = match serde_json::from_str::<Value>(&text) {
            Ok(value) if name == "payload" || value.is_number() => value,
            _ => Value::String(text.into_owned()),
        };
        object.insert(name, value);
    }
    Value::Object(object).to_string().into()
}

/// An entry that another program wrote.
fn of_others(around: Around<'_>, fields: &[Bytes], data: Option<&Bytes>) -> Read {
    let (body, headers) = match data {
        Some(data) => unwrap(data),
        None => (object(fields), HashMap::new()),
    };
    let Source {
        key,
        dotted,
        dialect,
        ..
    } = around.source;
    let time = around.id.time();
    let foreign_id = || {
        let place = format!("{key}:{}", around.id);
        let known = headers.get("message_id");
        EventId::from_foreign(key, known.unwrap_or(&place))
    };
    let by_dialect = |dialect: Dialect| {
        let beside = beside(dialect, dotted, time);
        decode_beside(&body, dialect, &beside).map(|event| in_stream(around, event))
    };
    let read = match *dialect {
        // Services of the framework write framework documents to native streams too.
        Dialect::Native => by_dialect(Dialect::Framework).or_else(|_| {
            Event::builder(&**dotted)
                .id(foreign_id())
                .occurred_at(time)
                .payload(body.clone())
                .build()
        }),
        dialect => by_dialect(dialect),
    };
    let (event, foreign) = match read {
        Ok(event) => (event, None),
        Err(error) => {
            let why = format!("an entry of {key} is not of the dialect {dialect}: {error}");
            let attributes = Attributes {
                content_type: Some("application/octet-stream".to_owned()),
                source: Some(format!("redis:{key}")),
                ..Attributes::default()
            };
            let attributes = Some(Box::new(attributes));
            let raw = Event::from_stored(foreign_id(), dotted.clone(), 1, time, body, attributes);
            (raw, Some(why))
        }
    };
    let retries = headers.get(RETRIES).and_then(|count| count.parse().ok());
    Read {
        event,
        received_at: time,
        foreign,
        retries: retries.unwrap_or(0),
    }
}

/// Gives an event the type of the stream that it is in: an event with a type of another stream would be skipped by
/// every group.
fn in_stream(around: Around<'_>, event: Event) -> Event {
    let Source { key, dotted, .. } = around.source;
    if around.space.stream(event.event_type()) == **key {
        return event;
    }
    let mut attributes = event.attributes().cloned().unwrap_or_default();
    let named = event.event_type().to_owned();
    attributes.metadata.insert(NAMED_TYPE.to_owned(), named);
    let attributes = Some(Box::new(attributes));
    let (id, version, at) = (event.id(), event.version(), event.occurred_at());
    Event::from_stored(
        id,
        dotted.clone(),
        version,
        at,
        event.payload().clone(),
        attributes,
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Reads an entry of `orders:order-placed`.
    fn read(space: &Space, dialect: Dialect, fields: &[Bytes]) -> Read {
        let source = Source::new(space, "orders:order-placed", dialect).unwrap();
        let id = EntryId {
            ms: 1_700_000_000_000,
            seq: 3,
        };
        let around = Around {
            space,
            source: &source,
            id,
        };
        super::read(around, fields)
    }

    fn entry(fields: &[(&str, &[u8])]) -> Fields {
        let flat = fields.iter().flat_map(|(name, value)| {
            [
                Bytes::copy_from_slice(name.as_bytes()),
                Bytes::copy_from_slice(value),
            ]
        });
        flat.collect()
    }

    // conformance: contract/redis-dialects: an event comes back whole in every dialect, with what its document has no place for
    #[test]
    fn an_event_reads_back_in_every_dialect() {
        let space = Space::new("");
        for event_type in ["orders:order-placed", "orders.order.placed"] {
            let event = Event::builder(event_type)
                .json(&json!({"n": 1}))
                .tenant("mandant größe")
                .meta("k", "größe")
                .key("key")
                .build()
                .unwrap();
            for dialect in Dialect::ALL {
                let Ok(fields) = write(&event, *dialect, "orders.order.placed") else {
                    // The document has fields that this event lacks.
                    assert_eq!(*dialect, Dialect::Workflow);
                    continue;
                };
                let back = read(&space, *dialect, &fields);
                assert_eq!(back.event, event, "{dialect}");
                assert_eq!(back.foreign, None);
                assert_eq!(back.received_at.as_micros(), 1_700_000_000_000_000);
            }
        }
    }

    fn document(event_type: &str) -> String {
        json!({
            "event_id": "e-1", "event_type": event_type, "event_version": 2,
            "timestamp": "2026-03-01T12:00:00Z", "source": "order-service", "correlation_id": "c",
            "trace_id": null, "payload": {"order": 1},
        })
        .to_string()
    }

    // conformance: framework/framework-faststream: messages of FastStream are read in the JSON and in the binary format, and its retry count is honoured
    #[test]
    fn both_formats_of_faststream_are_read() {
        let space = Space::new("");
        let document = document("orders.order.placed");
        let json = json!({"data": document, "headers": {"x-retry-count": "2"}}).to_string();
        let mut binary = BINARY.to_vec();
        let header = |text: &str| {
            let mut bytes = u16::try_from(text.len()).unwrap().to_be_bytes().to_vec();
            bytes.extend(text.as_bytes());
            bytes
        };
        let headers = [header("x-retry-count"), header("2")].concat();
        let start = u32::try_from(binary.len() + 10).unwrap();
        binary.extend(1u16.to_be_bytes());
        binary.extend(start.to_be_bytes());
        binary.extend((start + 2 + u32::try_from(headers.len()).unwrap()).to_be_bytes());
        binary.extend(1u16.to_be_bytes());
        binary.extend(headers);
        binary.extend(document.as_bytes());
        for data in [json.as_bytes(), &binary] {
            for dialect in [Dialect::Framework, Dialect::Native] {
                let read = read(&space, dialect, &entry(&[(DATA, data)]));
                assert_eq!(read.foreign, None);
                assert_eq!(read.retries, 2);
                assert_eq!(read.event.display_id(), "e-1");
                assert_eq!(read.event.event_type(), "orders.order.placed");
                assert_eq!(&read.event.payload()[..], br#"{"order":1}"#);
            }
        }
    }

    // conformance: contract/redis-foreign-read: an entry of another program is read by the dialect of its stream; what is no document keeps its bytes and says why
    #[test]
    fn entries_of_others_are_read() {
        let space = Space::new("");
        let odd = document("OrderPlaced");
        let data = json!({"data": odd}).to_string();
        let odd = read(
            &space,
            Dialect::Framework,
            &entry(&[(DATA, data.as_bytes())]),
        );
        assert_eq!(
            odd.event.event_type(),
            "orders.order.placed",
            "the type of its stream"
        );
        assert_eq!(odd.event.metadata()["event_type"], "OrderPlaced");
        let garbage: &[u8] = b"\xff\x00 no document";
        let fields = entry(&[(DATA, garbage)]);
        let first = read(&space, Dialect::Framework, &fields);
        assert!(first.foreign.unwrap().contains("framework"));
        assert_eq!(&first.event.payload()[..], garbage);
        let again = read(&space, Dialect::Framework, &fields);
        assert_eq!(first.event.id(), again.event.id(), "always the same id");
        let cut = [BINARY, b"\x00\x01\x00"].concat();
        assert!(
            read(&space, Dialect::Framework, &entry(&[(DATA, &cut)]))
                .foreign
                .is_some()
        );
        let plain = entry(&[("order", b"42"), ("name", b"x")]);
        let plain = read(&space, Dialect::Native, &plain);
        assert_eq!(plain.foreign, None);
        assert_eq!(
            plain.event.json::<Value>().unwrap(),
            json!({"order": 42, "name": "x"})
        );
    }

    #[test]
    fn no_attributes_have_the_digest_of_empty_ones() {
        assert_eq!(same_attributes(&Attributes::default()), NO_ATTRIBUTES);
        assert_eq!(hex(&[0, 0x9a, 0xff]), "009aff");
    }

    #[test]
    fn a_digest_is_that_of_the_body() {
        let build = |payload: &'static str| Event::builder("a.b").payload(payload).source("one");
        let one = build("1").build().unwrap();
        let same = build("1")
            .source("two")
            .correlation_id("c")
            .build()
            .unwrap();
        assert_eq!(digest(&one), digest(&same));
        let others = [
            build("2").build().unwrap(),
            build("1").key("k").build().unwrap(),
            build("1").tenant("t").build().unwrap(),
            build("1").meta("m", "1").build().unwrap(),
            build("1").version(2).build().unwrap(),
            one.clone().addressed_to(&"g".parse().unwrap()),
        ];
        for other in others {
            assert_ne!(digest(&one), digest(&other));
        }
    }
}
