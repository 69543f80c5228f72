//! The event: an id, a dotted type, a payload as unchanged bytes, and optional attributes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use crate::builder::EventBuilder;
use crate::error::{Code, Error, Result};
use crate::group::GroupName;
use crate::id::EventId;
use crate::time::Timestamp;

const JSON: &str = "application/json";

/// Something that happened.
///
/// An event never changes. Build one with [`Event::builder`], or publish a pair of type and value
/// and let the bus build it.
///
/// ```
/// use everbus_core::Event;
/// let event = Event::builder("order.placed")
///     .json(&serde_json::json!({ "order": 42, "total": 99.5 }))
///     .key("42")
///     .meta("channel", "web")
///     .build()?;
/// assert_eq!(event.event_type(), "order.placed");
/// assert_eq!(event.correlation_id(), event.id().to_string());
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Event {
    id: EventId,
    event_type: Arc<str>,
    version: u32,
    occurred_at: Timestamp,
    payload: Bytes,
    // Most events have no attributes: one pointer instead of four hundred bytes. Shared, because an event is cloned on
    // its way from a handler to the log.
    attributes: Option<Arc<Attributes>>,
    // Whether the id was generated and not given by the publisher. Not stored.
    made_id: bool,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
            && self.event_type == other.event_type
            && self.version == other.version
            && self.occurred_at == other.occurred_at
            && self.payload == other.payload
            && self.attributes == other.attributes
    }
}

impl Eq for Event {}

/// Values that an event inherits from its context when it is published, if it does not set them itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inherited {
    /// The correlation id.
    pub correlation_id: Option<String>,
    /// The event being handled.
    pub causation_id: Option<String>,
    /// The trace.
    pub trace: Option<TraceContext>,
    /// The service that emits it.
    pub source: Option<String>,
}

/// The optional attributes of an event, besides its type and payload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Attributes {
    /// The service that emitted the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// The application it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub app: Option<String>,
    /// The tenant. Ids are unique per tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The thing it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entity: Option<Entity>,
    /// Ordered groups handle events with the same key in order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Links everything that one request caused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correlation_id: Option<String>,
    /// The event whose handling caused this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub causation_id: Option<String>,
    /// The W3C trace context of the publisher.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<TraceContext>,
    /// Free key-value pairs.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// The content type of the payload, if not `application/json`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// The original id of the event, if it was not a UUID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub foreign_id: Option<String>,
    /// When it may be removed, whatever the retention of other events; never while it is pending in a
    /// group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// No group gets the event before this time. It is in the log at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Timestamp>,
    /// The only group that gets the event, as stored: empty for the unnamed group. All other groups skip the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Where the large part of the payload is, if it is in an object store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overflow: Option<Box<Overflow>>,
    /// The bridges that brought the event from log to log, first to last: each by the id of its subscription
    /// in the log that it read. A bridge carries no event back into a log that the event came from.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bridged: Vec<EventId>,
}

impl Attributes {
    /// The attributes of an event without any.
    pub const NONE: &'static Self = &Self {
        source: None,
        app: None,
        tenant: None,
        entity: None,
        key: None,
        correlation_id: None,
        causation_id: None,
        trace: None,
        metadata: BTreeMap::new(),
        content_type: None,
        foreign_id: None,
        expires_at: None,
        not_before: None,
        address: None,
        overflow: None,
        bridged: Vec::new(),
    };

    /// Every text of the attributes, with the name of its attribute. Includes the keys of the metadata.
    pub fn texts(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let entity = self.entity.as_ref();
        let trace = self.trace.as_ref();
        let singles = [
            ("source", self.source.as_deref()),
            ("app", self.app.as_deref()),
            ("tenant", self.tenant.as_deref()),
            ("key", self.key.as_deref()),
            ("correlation_id", self.correlation_id.as_deref()),
            ("causation_id", self.causation_id.as_deref()),
            ("content_type", self.content_type.as_deref()),
            ("the id", self.foreign_id.as_deref()),
            ("address", self.address.as_deref()),
            ("entity", entity.map(|entity| entity.kind.as_str())),
            ("entity", entity.map(|entity| entity.id.as_str())),
            ("traceparent", trace.map(|trace| trace.traceparent.as_str())),
            ("tracestate", trace.and_then(|t| t.tracestate.as_deref())),
        ];
        let singles = singles.into_iter();
        let singles = singles.filter_map(|(name, text)| text.map(|text| (name, text)));
        let pairs = self.metadata.iter();
        singles.chain(pairs.flat_map(|(key, value)| [("metadata", &**key), ("metadata", &**value)]))
    }
}

/// Where the large part of a payload is, and how to restore the payload: in the payload of the event, each
/// `null` at a known place stands for a part of the object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overflow {
    /// The bucket or directory, by its name in the configuration.
    pub bucket: String,
    /// The key of the object in it.
    pub key: String,
    /// The length of the object in bytes.
    pub size: u64,
    /// The SHA-256 of the object, in hex.
    pub sha256: String,
    /// The length of the complete payload in bytes.
    pub payload_size: u64,
    /// The SHA-256 of the complete payload, in hex. It identifies a repeated publish, even if different
    /// parts were moved.
    pub payload_sha256: String,
    /// The moved parts, in the order of the payload. Empty: the object is the whole payload, and the event
    /// carries `null`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<OverflowPart>,
}

/// One part of a payload in an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverflowPart {
    /// The field it is the value of.
    pub field: String,
    /// The offset of its `null` in the payload of the event.
    pub at: u64,
    /// Its offset in the object.
    pub from: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// The thing an event is about: `TASK` and `req-123`, shown as `TASK#req-123`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Entity {
    /// The kind of thing.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its id.
    pub id: String,
}

impl fmt::Display for Entity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.kind, self.id)
    }
}

/// W3C trace context.
///
/// ```
/// use everbus_core::TraceContext;
/// let trace = TraceContext::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", None)?;
/// assert_eq!(trace.trace_id(), Some("0af7651916cd43dd8448eb211c80319c"));
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceContext {
    /// The `traceparent` header.
    pub traceparent: String,
    /// The `tracestate` header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracestate: Option<String>,
}

impl TraceContext {
    /// Parses the two headers of a request: `00-<32 hex digits>-<16 hex digits>-<2 hex digits>`, neither id
    /// all zeroes. Higher versions are parsed like version 00, as the standard requires.
    pub fn parse(traceparent: &str, tracestate: Option<&str>) -> Result<Self> {
        let trace = Self {
            traceparent: traceparent.trim().to_owned(),
            tracestate: tracestate.map(str::to_owned),
        };
        match trace.trace_id() {
            Some(_) => Ok(trace),
            None => Err(Error::new(
                Code::InvalidAttribute,
                format!("{traceparent:?} is not a traceparent"),
            )
            .hint("00, the trace id, the parent id and the flags in hex, joined by -")),
        }
    }

    /// The trace id, if the header is well formed.
    pub fn trace_id(&self) -> Option<&str> {
        let mut parts = self.traceparent.split('-');
        let (version, trace, parent, flags) =
            (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let hex = |text: &str, digits: usize| {
            text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        let given = |text: &str| text.bytes().any(|b| b != b'0');
        let whole = version != "00" || parts.next().is_none();
        (hex(version, 2)
            && version != "ff"
            && hex(trace, 32)
            && hex(parent, 16)
            && hex(flags, 2)
            && given(trace)
            && given(parent)
            && whole)
            .then_some(trace)
    }
}

/// The metadata key of [`Event::idempotency_key`].
pub const IDEMPOTENCY_KEY: &str = "idempotency_key";

impl Event {
    /// Whether a group may get the event; see [`GroupName::receives`].
    pub fn is_for(&self, group: &GroupName) -> bool {
        group.receives(self.attributes().and_then(|a| a.address.as_deref()))
    }

    /// Addresses the event to one group: all others skip it.
    #[must_use]
    pub fn addressed_to(mut self, group: &GroupName) -> Self {
        self.attributes_mut().address = Some(group.as_str().to_owned());
        self
    }

    /// Notes that a bridge carries the event; see [`Attributes::bridged`].
    #[must_use]
    pub fn bridged_by(mut self, bridge: EventId) -> Self {
        self.attributes_mut().bridged.push(bridge);
        self
    }

    /// Begins an event of this type.
    pub fn builder(event_type: impl Into<Arc<str>>) -> EventBuilder {
        EventBuilder::new(event_type.into())
    }

    /// Builds an event from stored data. Nothing is validated.
    pub fn from_stored(
        id: EventId,
        event_type: Arc<str>,
        version: u32,
        occurred_at: Timestamp,
        payload: Bytes,
        attributes: Option<impl Into<Arc<Attributes>>>,
    ) -> Self {
        Self {
            id,
            event_type,
            version,
            occurred_at,
            payload,
            attributes: attributes.map(Into::into),
            made_id: false,
        }
    }

    fn attributes_mut(&mut self) -> &mut Attributes {
        Arc::make_mut(self.attributes.get_or_insert_default())
    }

    pub(crate) fn with_made_id(mut self, made: bool) -> Self {
        self.made_id = made;
        self
    }

    /// Whether the id was generated by the builder and not given by the publisher. Always false for stored
    /// events.
    pub fn has_made_id(&self) -> bool {
        self.made_id
    }

    /// Replaces a generated id; a given id is kept.
    #[must_use]
    pub fn or_id(mut self, id: impl FnOnce() -> EventId) -> Self {
        if self.made_id {
            self.id = id();
        }
        self
    }

    /// Adds inherited values that the event does not set itself.
    #[must_use]
    pub fn inheriting(mut self, from: Inherited) -> Self {
        if from == Inherited::default() {
            return self;
        }
        let own = self.attributes_mut();
        own.correlation_id = own.correlation_id.take().or(from.correlation_id);
        own.causation_id = own.causation_id.take().or(from.causation_id);
        own.trace = own.trace.take().or(from.trace);
        own.source = own.source.take().or(from.source);
        self
    }

    /// Replaces the payload by a smaller one; the large part is in an object. The caller makes the object durable
    /// before it appends the event.
    #[must_use]
    pub fn with_overflow(mut self, payload: Bytes, overflow: Overflow) -> Self {
        self.payload = payload;
        self.attributes_mut().overflow = Some(Box::new(overflow));
        self
    }

    /// The event with its complete payload and without a reference to an object.
    #[must_use]
    pub fn made_whole(mut self, payload: Bytes) -> Self {
        self.payload = payload;
        if let Some(attributes) = &mut self.attributes {
            Arc::make_mut(attributes).overflow = None;
            if **attributes == Attributes::default() {
                self.attributes = None;
            }
        }
        self
    }

    /// Where the large part of the payload is, if it is in an object.
    pub fn overflow(&self) -> Option<&Overflow> {
        self.attributes()?.overflow.as_deref()
    }

    /// The identity and idempotency key.
    pub fn id(&self) -> EventId {
        self.id
    }

    /// The dotted type, `domain.entity.action`.
    pub fn event_type(&self) -> &str {
        &self.event_type
    }

    /// The type, shared.
    pub fn type_arc(&self) -> &Arc<str> {
        &self.event_type
    }

    /// The schema version of the payload.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// When it happened, as the publisher stated.
    pub fn occurred_at(&self) -> Timestamp {
        self.occurred_at
    }

    /// The payload, exactly as published; if the event has an [overflow](Self::overflow), only the part
    /// that is in the log.
    pub fn payload(&self) -> &Bytes {
        &self.payload
    }

    /// Decodes the payload as JSON into any type.
    pub fn json<'a, T: Deserialize<'a>>(&'a self) -> Result<T> {
        serde_json::from_slice(&self.payload).map_err(|e| {
            Error::new(
                Code::InvalidPayloadError,
                format!(
                    "the payload of {} {} cannot be read: {e}",
                    self.event_type, self.id
                ),
            )
        })
    }

    /// The optional attributes, if there are any.
    pub fn attributes(&self) -> Option<&Attributes> {
        self.attributes.as_deref()
    }

    /// The content type of the payload; JSON by default.
    pub fn content_type(&self) -> &str {
        self.attributes()
            .and_then(|a| a.content_type.as_deref())
            .unwrap_or(JSON)
    }

    /// Whether the payload is JSON.
    pub fn is_json(&self) -> bool {
        is_json(self.content_type())
    }

    /// The tenant.
    pub fn tenant(&self) -> Option<&str> {
        self.attributes()?.tenant.as_deref()
    }

    /// The ordering key: the one given, else the entity.
    pub fn ordering_key(&self) -> Option<Cow<'_, str>> {
        let attributes = self.attributes()?;
        match (&attributes.key, &attributes.entity) {
            (Some(key), _) => Some(Cow::Borrowed(key)),
            (None, Some(entity)) => Some(Cow::Owned(entity.to_string())),
            (None, None) => None,
        }
    }

    /// The correlation id: the one given, else the event's own id.
    pub fn correlation_id(&self) -> Cow<'_, str> {
        match self.attributes().and_then(|a| a.correlation_id.as_deref()) {
            Some(id) => Cow::Borrowed(id),
            None => Cow::Owned(self.id.to_string()),
        }
    }

    /// The metadata, empty if there is none.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.attributes().unwrap_or(Attributes::NONE).metadata
    }

    /// The id to show: the foreign id of the event, else the UUID.
    pub fn display_id(&self) -> Cow<'_, str> {
        match self.attributes().and_then(|a| a.foreign_id.as_deref()) {
            Some(id) => Cow::Borrowed(id),
            None => Cow::Owned(self.id.to_string()),
        }
    }

    /// The key with which a handler makes sure that an effect of this event happens once. It is the same in every
    /// attempt, for a correction (`dlq edit`) and for a copy (`replay`), although these have different ids.
    ///
    /// It is the metadata [`IDEMPOTENCY_KEY`], which corrections and copies inherit and a publisher may
    /// set, or else the id.
    pub fn idempotency_key(&self) -> Cow<'_, str> {
        match self.metadata().get(IDEMPOTENCY_KEY) {
            Some(key) => Cow::Borrowed(key),
            None => Cow::Owned(self.id.to_string()),
        }
    }

    /// Whether publishing `other` under the same id is a repetition of the same publish.
    ///
    /// The content must be equal: type, version, payload, content type, tenant, app, entity, key, metadata and address.
    /// Values that may differ in a repetition are ignored: the times, the source, correlation, causation and trace, and
    /// whether a bridge brought it.
    pub fn same_body(&self, other: &Event) -> bool {
        let (a, b) = (
            self.attributes().unwrap_or(Attributes::NONE),
            other.attributes().unwrap_or(Attributes::NONE),
        );
        self.event_type == other.event_type
            && self.version == other.version
            && self.content_type() == other.content_type()
            && a.tenant == b.tenant
            && a.app == b.app
            && a.entity == b.entity
            && a.key == b.key
            && a.metadata == b.metadata
            && a.address == b.address
            && self.same_payload(other)
    }

    /// Whether both have the same complete payload, however much of it is in an object.
    fn same_payload(&self, other: &Event) -> bool {
        match (self.overflow(), other.overflow()) {
            (None, None) => self.payload == other.payload,
            (Some(moved), None) => moved.is_of(&other.payload),
            (None, Some(moved)) => moved.is_of(&self.payload),
            (Some(one), Some(two)) => {
                one.payload_size == two.payload_size && one.payload_sha256 == two.payload_sha256
            }
        }
    }
}

impl Overflow {
    /// Whether this is the complete payload.
    fn is_of(&self, payload: &[u8]) -> bool {
        self.payload_size == payload.len() as u64
            && self.payload_sha256 == crate::log::hex(&sha2::Sha256::digest(payload))
    }
}

pub(crate) fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case(JSON) || essence.to_ascii_lowercase().ends_with("+json")
}
