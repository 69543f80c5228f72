//! The native envelope: the fields of an event in the JSON of Everbus itself. The command line prints it, and it
//! is the native dialect.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Serialize;

use crate::event::{Attributes, Entity, Event, Overflow, TraceContext};
use crate::id::EventId;
use crate::time::Timestamp;

/// The value of a field of the envelope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum EnvelopeValue<'a> {
    /// The id of the event.
    Id(EventId),
    /// The version of its schema.
    Version(u32),
    /// A text.
    Text(Cow<'a, str>),
    /// A point in time.
    Time(Timestamp),
    /// The thing the event is about.
    Entity(&'a Entity),
    /// The trace of its publisher.
    Trace(&'a TraceContext),
    /// Free key-value pairs.
    Metadata(&'a BTreeMap<String, String>),
    /// Where the large part of its payload is.
    Overflow(&'a Overflow),
}

/// The fields of the native envelope that an event has, in the order in which they are written. The payload comes
/// after them.
///
/// ```
/// use everbus_core::{Event, envelope};
/// let event = Event::builder("orders.order.placed").tenant("acme").build()?;
/// let names: Vec<&str> = envelope(&event).map(|(name, _)| name).collect();
/// assert_eq!(names, ["id", "type", "version", "occurred_at", "correlation_id", "tenant"]);
/// # Ok::<(), everbus_core::Error>(())
/// ```
pub fn envelope(event: &Event) -> impl Iterator<Item = (&'static str, EnvelopeValue<'_>)> {
    use EnvelopeValue as Value;
    let a = event.attributes().unwrap_or(Attributes::NONE);
    let metadata = Some(&a.metadata).filter(|metadata| !metadata.is_empty());
    let fields = [
        ("id", Some(Value::Id(event.id()))),
        ("type", Some(text(event.event_type()))),
        ("version", Some(Value::Version(event.version()))),
        ("occurred_at", Some(Value::Time(event.occurred_at()))),
        ("correlation_id", Some(Value::Text(event.correlation_id()))),
        ("foreign_id", a.foreign_id.as_deref().map(text)),
        ("source", a.source.as_deref().map(text)),
        ("app", a.app.as_deref().map(text)),
        ("tenant", a.tenant.as_deref().map(text)),
        ("key", a.key.as_deref().map(text)),
        ("causation_id", a.causation_id.as_deref().map(text)),
        ("content_type", a.content_type.as_deref().map(text)),
        ("entity", a.entity.as_ref().map(Value::Entity)),
        ("trace", a.trace.as_ref().map(Value::Trace)),
        ("metadata", metadata.map(Value::Metadata)),
        ("expires_at", a.expires_at.map(Value::Time)),
        ("not_before", a.not_before.map(Value::Time)),
        ("address", a.address.as_deref().map(text)),
        ("overflow", a.overflow.as_deref().map(Value::Overflow)),
    ];
    let fields = fields.into_iter();
    fields.filter_map(|(name, value)| Some((name, value?)))
}

fn text(text: &str) -> EnvelopeValue<'_> {
    EnvelopeValue::Text(Cow::Borrowed(text))
}
