//! Building events, and what is refused.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::IgnoredAny;

use crate::clock::{Clock, SystemClock};
use crate::error::{Code, Error, Result};
use crate::event::{Attributes, Entity, Event, TraceContext, is_json};
use crate::id::EventId;
use crate::time::Timestamp;

/// A type has at most this many characters.
pub const MAX_TYPE_CHARS: usize = 255;
/// Every single attribute (source, key, a metadata value …) has at most this many bytes.
pub const MAX_ATTRIBUTE_BYTES: usize = 16 * 1024;
/// All attributes of one event together have at most this many bytes.
pub const MAX_ATTRIBUTES_BYTES: usize = 256 * 1024;
/// More is a mistake of units.
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
    attributes: Option<Box<Attributes>>,
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

    /// Brings an id of one's own: publishing the same id again stores nothing.
    pub fn id(mut self, id: impl Into<EventId>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Brings a foreign id that need not be a UUID; it is kept and shown again. Call it after
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
                Code::InvalidPayload,
                format!("the payload is not JSON-serialisable: {e}"),
            )
            .hint("maps need string keys and numbers must be finite")
        });
        self.known_json = true;
        self
    }

    /// The payload as bytes, kept as they are. They must be JSON unless a content type says otherwise.
    pub fn payload(mut self, bytes: impl Into<Bytes>) -> Self {
        self.payload = Ok(bytes.into());
        self.known_json = false;
        self
    }

    /// What the payload is, if not JSON.
    pub fn content_type(mut self, content_type: impl Into<String>) -> Self {
        self.attributes_mut().content_type = Some(content_type.into());
        self
    }

    /// The schema version of the payload (1 unless said otherwise).
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// When it happened (now unless said otherwise).
    pub fn occurred_at(mut self, at: Timestamp) -> Self {
        self.occurred_at = Some(at);
        self
    }

    /// Who emitted it.
    pub fn source(mut self, source: impl Into<String>) -> Self {
        self.attributes_mut().source = Some(source.into());
        self
    }

    /// The application it belongs to.
    pub fn app(mut self, app: impl Into<String>) -> Self {
        self.attributes_mut().app = Some(app.into());
        self
    }

    /// For whom it was emitted.
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

    /// Everything an event may carry beside its type and payload, at once.
    pub fn attributes(mut self, attributes: Attributes) -> Self {
        self.attributes = Some(Box::new(attributes));
        self
    }

    /// When it may be forgotten, however long others are kept. Nothing that a group still owes work on
    /// is ever removed.
    pub fn expires_at(mut self, at: Timestamp) -> Self {
        self.attributes_mut().expires_at = Some(at);
        self
    }

    /// For how long after it happened it is wanted: as [`expires_at`](Self::expires_at), which it
    /// replaces.
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

    /// The event, or what is wrong with it.
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
                .hint("it is more than nothing and at most a hundred years"));
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
        self.attributes.get_or_insert_default()
    }
}

/// Whatever can be published: an [`Event`], a builder, a pair of type and serialisable value, or a
/// value whose type derives `everbus::Event`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be published",
    label = "this is not an event",
    note = "add `#[derive(everbus::Event)]` and `#[event(type = \"domain.entity.action\")]` to the type",
    note = "or publish a pair of event type and value: `(\"domain.entity.action\", value)`"
)]
pub trait IntoEvent {
    /// The event, or what is wrong with it.
    fn into_event(self) -> Result<Event>;

    /// The Rust type that the payload is serialised from, as [`std::any::type_name`] gives it, if
    /// that type stands for an event type.
    ///
    /// A publish need not check such a payload against the schema of that very type.
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

/// Checks a type: 1–255 printable characters without `*` and `>`.
pub fn validate_type(name: &str) -> Result<()> {
    let bad = |what: String| {
        Err(Error::new(Code::InvalidType, what).hint(
            "a type is 1 to 255 printable characters without * and >, for example order.placed",
        ))
    };
    if name.is_empty() {
        return bad("the event type is empty".into());
    }
    // Bytes bound characters from above, so the common case needs no counting.
    if name.len() > MAX_TYPE_CHARS && name.chars().count() > MAX_TYPE_CHARS {
        return bad(format!(
            "the event type has more than {MAX_TYPE_CHARS} characters"
        ));
    }
    match name
        .chars()
        .find(|c| matches!(c, '*' | '>') || is_unprintable(*c))
    {
        Some(c) => bad(format!("the event type {name:?} contains {c:?}")),
        None => Ok(()),
    }
}

/// Control characters, line and paragraph separators, and the invisible characters that reorder or
/// hide text.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

fn validate_json(payload: &[u8]) -> Result<()> {
    serde_json::from_slice::<IgnoredAny>(payload)
        .map(drop)
        .map_err(|e| {
            Error::new(
                Code::InvalidPayload,
                format!("the payload is not JSON: {e}"),
            )
            .hint("quote strings, or set a content type for payloads that are not JSON")
        })
}

fn validate_attributes(attributes: &Attributes) -> Result<()> {
    let Attributes {
        source,
        app,
        tenant,
        entity,
        key,
        correlation_id,
        causation_id,
        trace,
        metadata,
        content_type,
        foreign_id,
        expires_at: _,
        overflow,
    } = attributes;
    if overflow.is_some() {
        return Err(Error::new(
            Code::InvalidAttribute,
            "where the payload overflows to is not for a publisher to say",
        )
        .hint("publish the whole payload; the bus moves what is too large"));
    }
    let mut total = 0;
    let mut check = |name: &str, value: &str| {
        total += value.len();
        if value.len() > MAX_ATTRIBUTE_BYTES || total > MAX_ATTRIBUTES_BYTES {
            let what = format!("{name} makes the attributes of the event too long");
            return Err(Error::new(Code::InvalidAttribute, what).hint(format!(
                "one attribute may have {MAX_ATTRIBUTE_BYTES} bytes, all together \
                 {MAX_ATTRIBUTES_BYTES}; put large values into the payload"
            )));
        }
        Ok(())
    };
    let single = [
        ("source", source),
        ("app", app),
        ("tenant", tenant),
        ("key", key),
        ("correlation_id", correlation_id),
        ("causation_id", causation_id),
        ("content_type", content_type),
        ("the id", foreign_id),
    ];
    for (name, value) in single {
        if let Some(value) = value {
            check(name, value)?;
            if value.is_empty() {
                return Err(
                    Error::new(Code::InvalidAttribute, format!("{name} is empty"))
                        .hint("leave it out instead"),
                );
            }
        }
    }
    if let Some(entity) = entity {
        check("entity", &entity.kind)?;
        check("entity", &entity.id)?;
    }
    if let Some(trace) = trace {
        check("traceparent", &trace.traceparent)?;
        check(
            "tracestate",
            trace.tracestate.as_deref().unwrap_or_default(),
        )?;
    }
    for (name, value) in metadata {
        check("metadata", name)?;
        check("metadata", value)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn code(builder: EventBuilder) -> Code {
        builder.build().unwrap_err().code()
    }

    // conformance: issue-4/ttl: an event may say for how long after it happened it is wanted
    #[test]
    fn a_time_to_live_counts_from_when_it_happened() {
        let at: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let day = Duration::from_secs(24 * 3600);
        let event = Event::builder("a").ttl(day).occurred_at(at);
        let expires = event.build().unwrap().attributes().unwrap().expires_at;
        assert_eq!(expires, Some(at.plus(day)));
        for wrong in [Duration::ZERO, Duration::MAX] {
            assert_eq!(code(Event::builder("a").ttl(wrong)), Code::InvalidAttribute);
        }
    }

    // conformance: issue-2/odd-types: spaces and undotted names are legal
    #[test]
    fn odd_but_legal_types_are_taken() {
        for name in [
            "a",
            "Task Processing Started",
            "TelemetryWindowClosed",
            "größe.geändert",
            "a..b",
        ] {
            assert_eq!(Event::builder(name).build().unwrap().event_type(), name);
        }
        assert!(Event::builder("ä".repeat(255)).build().is_ok());
    }

    // conformance: issue-2/builder-validates: illegal types are refused with a hint
    #[test]
    fn illegal_types_are_refused_with_a_hint() {
        for name in [
            "",
            "a.*",
            "a>",
            "a\nb",
            "a\u{0}",
            "a\u{202e}b",
            &"x".repeat(256),
            &"ä".repeat(256),
        ] {
            let e = Event::builder(name).build().unwrap_err();
            assert_eq!(e.code(), Code::InvalidType, "{name:?}");
            assert!(e.hint_text().is_some());
        }
    }

    // conformance: embedded/payload-json: the payload is kept as the bytes given and must be JSON
    #[test]
    fn payload_bytes_are_kept_and_must_be_json_unless_said_otherwise() {
        let spaced = Event::builder("t")
            .payload(&b"{ \"b\" : 1.0e2,\"a\":2 }"[..])
            .build()
            .unwrap();
        assert_eq!(&spaced.payload()[..], b"{ \"b\" : 1.0e2,\"a\":2 }");
        for bad in ["", "{", "nope", "{\"a\":1}x", "NaN"] {
            assert_eq!(
                code(Event::builder("t").payload(bad)),
                Code::InvalidPayload,
                "{bad}"
            );
        }
        let binary = Event::builder("t")
            .payload(vec![0xff, 0])
            .content_type("application/octet-stream");
        assert!(!binary.build().unwrap().is_json());
        let vendor = Event::builder("t")
            .payload("{")
            .content_type("application/cloudevents+json");
        assert_eq!(code(vendor), Code::InvalidPayload);
    }

    // conformance: embedded/invalid-payload: what is not JSON-serialisable is refused
    #[test]
    fn a_value_that_cannot_be_json_is_an_invalid_payload() {
        let map = std::collections::HashMap::from([(vec![1u8], 1)]);
        assert_eq!(code(Event::builder("t").json(&map)), Code::InvalidPayload);
        let e = ("t", map).into_event().unwrap_err();
        assert!(e.to_string().contains("InvalidPayloadError"));
    }

    #[test]
    fn the_key_defaults_to_the_entity_and_the_correlation_to_the_id() {
        let e = Event::builder("t")
            .entity("TASK", "req-123")
            .build()
            .unwrap();
        assert_eq!(e.ordering_key().unwrap(), "TASK#req-123");
        assert_eq!(e.correlation_id(), e.id().to_string());
        let e = Event::builder("t")
            .entity("TASK", "1")
            .key("k")
            .correlation_id("c")
            .build()
            .unwrap();
        assert_eq!(
            (e.ordering_key().unwrap(), e.correlation_id()),
            ("k".into(), "c".into())
        );
    }

    #[test]
    fn foreign_ids_are_kept_beside_the_uuid() {
        let e = Event::builder("t")
            .source("shop")
            .foreign_id("test-1")
            .build()
            .unwrap();
        assert_eq!(e.display_id(), "test-1");
        assert_eq!(e.id(), EventId::from_foreign("shop", "test-1"));
        let uuid = EventId::new();
        let e = Event::builder("t")
            .foreign_id(uuid.to_string())
            .build()
            .unwrap();
        assert_eq!((e.id(), e.attributes()), (uuid, None));
    }

    #[test]
    fn the_same_body_ignores_what_a_second_try_gives_anew() {
        let id = EventId::new();
        let make = || {
            Event::builder("t")
                .id(id)
                .json(&json!({"a": 1}))
                .meta("k", "v")
        };
        let first = make().build().unwrap();
        let again = make()
            .correlation_id("other")
            .occurred_at(Timestamp::EPOCH)
            .build()
            .unwrap();
        assert!(first.same_body(&again));
        for other in [
            make().json(&json!({"a": 2})),
            make().version(2),
            make().meta("k", "w"),
            make().tenant("x"),
            make().key("x"),
            make().content_type("text/plain"),
        ] {
            assert!(!first.same_body(&other.build().unwrap()));
        }
    }

    #[test]
    fn attributes_are_bounded_and_not_empty() {
        assert_eq!(code(Event::builder("t").tenant("")), Code::InvalidAttribute);
        assert_eq!(
            code(Event::builder("t").meta("k", "x".repeat(MAX_ATTRIBUTE_BYTES + 1))),
            Code::InvalidAttribute
        );
        let mut many = Event::builder("t");
        for i in 0..20 {
            many = many.meta(format!("{i}"), "x".repeat(MAX_ATTRIBUTE_BYTES));
        }
        assert_eq!(code(many), Code::InvalidAttribute);
        assert_eq!(code(Event::builder("t").version(0)), Code::InvalidAttribute);
    }
}
