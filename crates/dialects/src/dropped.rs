//! What a dialect cannot represent.

use everbus_core::{Attributes, Event, Result, TraceContext};

use crate::body::Place;
use crate::dialect::Dialect;
use crate::fields::same_json;
use crate::{Beside, document, format, spelling};

/// The fields of the event that a reader of the document would not get, by name.
///
/// It is computed by reading the document, so it is always current. `span` means that the trace is kept but
/// not the span, `id` that the foreign id is kept but not the UUID made from it and the source,
/// `metadata.x` one entry.
///
/// ```
/// use everbus_core::Event;
/// use everbus_dialects::{Dialect, dropped};
///
/// let event = Event::builder("order.placed").payload("{}").tenant("acme").key("42").build()?;
/// assert_eq!(dropped(&event, Dialect::Framework)?, ["tenant", "key"]);
/// assert!(dropped(&event, Dialect::CloudEvents)?.is_empty());
/// # Ok::<(), everbus_core::Error>(())
/// ```
pub fn dropped(event: &Event, dialect: Dialect) -> Result<Vec<String>> {
    let fields = document(event, dialect)?;
    let back = format::read(&fields, &Beside::default())?;
    let nothing = Attributes::default();
    let (had, has) = (event.attributes().unwrap_or(&nothing), &back.attributes);
    let mut names = Vec::new();
    let mut check = |name: &str, kept: bool| {
        if !kept {
            names.push(name.to_owned());
        }
    };
    check("id", back.id == event.id());
    check("type", back.event_type.is_some());
    let time = back.occurred_at.unwrap_or(event.occurred_at());
    check("occurred_at", time == event.occurred_at());
    check("source", had.source.is_none() || had.source == has.source);
    check("app", had.app.is_none() || had.app == has.app);
    check("tenant", had.tenant.is_none() || had.tenant == has.tenant);
    check("entity", had.entity.is_none() || had.entity == has.entity);
    check("key", had.key.is_none() || had.key == has.key);
    let correlation = had.correlation_id.is_none() || had.correlation_id == has.correlation_id;
    check("correlation_id", correlation);
    let causation = had.causation_id.is_none() || had.causation_id == has.causation_id;
    check("causation_id", causation);
    let trace_id = |a: &Attributes| {
        let trace = a.trace.as_ref().and_then(TraceContext::trace_id);
        trace.map(str::to_owned)
    };
    match &had.trace {
        Some(_) if trace_id(has) != trace_id(had) => check("trace", false),
        trace => check("span", trace.is_none() || *trace == has.trace),
    }
    let expiry = had.expires_at.is_none() || had.expires_at == has.expires_at;
    check("expires_at", expiry);
    let delay = had.not_before.is_none() || had.not_before == has.not_before;
    check("not_before", delay);
    let address = had.address.is_none() || had.address == has.address;
    check("address", address);
    let kinds = (event.content_type(), has.content_type.as_deref());
    check(
        "content_type",
        kinds.0 == kinds.1.unwrap_or("application/json"),
    );
    for (key, value) in &had.metadata {
        let kept = match spelling::field(dialect, key) {
            None => has.metadata.get(key).is_some_and(|v| same_json(v, value)),
            Some(field) if Place::of(dialect).holds(field, value) => true,
            Some(field) => fields.get(field).unwrap_or(spelling::ABSENT) == value,
        };
        check(&format!("metadata.{key}"), kept);
    }
    Ok(names)
}
