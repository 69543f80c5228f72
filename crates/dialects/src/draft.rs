//! The envelope of a document, before the event is built.

use everbus_core::{
    Attributes, Event, EventBuilder, EventId, GroupName, Result, Timestamp, TraceContext,
};

use crate::dialect::Dialect;
use crate::fields::Fields;
use crate::{Beside, located};

/// The metadata key of a trace id that is not a W3C one.
const TRACE_ID: &str = "trace_id";

/// The envelope of an event from one document; the payload is read separately.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Draft {
    pub(crate) id: EventId,
    pub(crate) event_type: Option<String>,
    pub(crate) version: u32,
    pub(crate) occurred_at: Option<Timestamp>,
    pub(crate) attributes: Attributes,
}

impl Draft {
    /// A draft from the fields that every document has. The source is part of the identity of a foreign id.
    pub(crate) fn new(id: &str, source: Option<String>, beside: &Beside<'_>) -> Self {
        let source = source.or_else(|| beside.source.map(str::to_owned));
        let uuid = EventId::from_foreign(source.as_deref().unwrap_or_default(), id);
        Self {
            id: uuid,
            event_type: None,
            version: 1,
            occurred_at: None,
            attributes: Attributes {
                source,
                foreign_id: (uuid.to_string() != id).then(|| id.to_owned()),
                ..Attributes::default()
            },
        }
    }

    /// Sets the trace id of a document. The span id is made from the event's id, so that the same document
    /// always gives the same event. The trace counts as sampled: senders leave out the ids of traces that
    /// are not recorded.
    pub(crate) fn set_trace_id(&mut self, trace_id: Option<String>) {
        let Some(text) = trace_id else { return };
        let span = self.id.as_bytes().iter().skip(8);
        let span = span.fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
        let lower = text.to_ascii_lowercase();
        match TraceContext::parse(&format!("00-{lower}-{:016x}-01", span.max(1)), None) {
            Ok(trace) => self.attributes.trace = Some(trace),
            Err(_) => {
                self.attributes.metadata.insert(TRACE_ID.into(), text);
            }
        }
    }

    /// Begins the event. The payload is set later.
    pub(crate) fn into_builder(
        self,
        dialect: Dialect,
        beside: &Beside<'_>,
    ) -> Result<EventBuilder> {
        let Some(event_type) = self.event_type else {
            return Err(located(dialect, &Beside::no_type()));
        };
        let a = self.attributes;
        let mut builder = Event::builder(event_type).version(self.version);
        if let Some(at) = self.occurred_at.or(beside.time) {
            builder = builder.occurred_at(at);
        }
        macro_rules! take {
            ($($name:ident),*) => {
                $(if let Some(value) = a.$name {
                    builder = builder.$name(value);
                })*
            };
        }
        // The source comes before the foreign id, which depends on it.
        take!(
            source,
            foreign_id,
            app,
            tenant,
            key,
            correlation_id,
            causation_id,
            trace,
            content_type,
            expires_at
        );
        if let Some(entity) = a.entity {
            builder = builder.entity(entity.kind, entity.id);
        }
        if let Some(at) = a.not_before {
            builder = builder.at(at);
        }
        if let Some(group) = a.address {
            builder = builder.addressed_to(&group.parse::<GroupName>()?);
        }
        for (name, value) in a.metadata {
            builder = builder.meta(name, value);
        }
        Ok(builder.id(self.id))
    }
}

/// The trace id of an event: that of its trace, else the one in the metadata.
pub(crate) fn trace_id(event: &Event) -> Option<&str> {
    let trace = event.attributes().and_then(|a| a.trace.as_ref());
    trace
        .and_then(TraceContext::trace_id)
        .or_else(|| event.metadata().get(TRACE_ID).map(String::as_str))
}

/// The source of the event, for envelopes that require one.
pub(crate) fn source(event: &Event) -> &str {
    let a = event.attributes();
    a.and_then(|a| a.source.as_deref().or(a.app.as_deref()))
        .unwrap_or("everbus")
}

/// The correlation id: the given one, else the id that the event is shown by.
pub(crate) fn correlation_id(event: &Event) -> String {
    match event.attributes().and_then(|a| a.correlation_id.clone()) {
        Some(id) => id,
        None => event.display_id().into_owned(),
    }
}

/// The type of a document, which must equal the type beside it.
pub(crate) fn read_type(
    fields: &Fields<'_>,
    name: &str,
    beside: &Beside<'_>,
) -> Result<Option<String>> {
    let own = match fields.some(name) {
        Some(_) => Some(fields.required(name)?),
        None => None,
    };
    match (own, beside.event_type) {
        (Some(own), Some(given)) if own != given => {
            let what = format!("it says {own:?}, but the type beside the document is {given:?}");
            Err(fields.error(everbus_core::Code::InvalidType, name, &what))
        }
        (Some(own), _) => {
            let checked = everbus_core::builder::validate_type(&own);
            checked.map_err(|e| located(fields.dialect(), &e))?;
            Ok(Some(own))
        }
        (None, given) => Ok(given.map(str::to_owned)),
    }
}

/// The type of a document that must contain it.
pub(crate) fn required_type(
    fields: &Fields<'_>,
    name: &str,
    beside: &Beside<'_>,
) -> Result<Option<String>> {
    match fields.some(name) {
        Some(_) => read_type(fields, name, beside),
        None => Err(fields.missing(name)),
    }
}
