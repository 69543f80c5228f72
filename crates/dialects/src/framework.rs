//! *framework*: `event_id, event_type, event_version, timestamp, source, correlation_id, trace_id,
//! payload`.

use everbus_core::{Event, Result};

use crate::Beside;
use crate::draft::{self, Draft};
use crate::fields::{Fields, quoted};
use crate::time::{self, Digits};

pub(crate) fn read(fields: &Fields<'_>, beside: &Beside<'_>) -> Result<Draft> {
    let source = fields.required("source")?;
    let id = fields.required("event_id")?;
    let mut draft = Draft::new(&id, Some(source), beside);
    draft.event_type = draft::required_type(fields, "event_type", beside)?;
    draft.version = fields.version("event_version")?;
    draft.occurred_at = Some(time::read_utc(fields, "timestamp")?);
    let correlation = fields.text("correlation_id")?;
    let correlation = correlation.ok_or_else(|| fields.missing("correlation_id"))?;
    draft.attributes.correlation_id = Some(if correlation.is_empty() {
        id
    } else {
        correlation
    });
    draft.set_trace_id(fields.filled("trace_id")?);
    Ok(draft)
}

pub(crate) fn write<'a>(event: &'a Event, fields: &mut Fields<'a>) {
    fields.push_text("event_id", &event.display_id());
    fields.push_text("event_type", event.event_type());
    fields.push("event_version", event.version().to_string());
    let at = time::spelled(event.occurred_at(), Digits::NoneOrSix);
    fields.push_text("timestamp", &at);
    fields.push_text("source", draft::source(event));
    fields.push_text("correlation_id", &draft::correlation_id(event));
    let trace_id = draft::trace_id(event).map_or_else(|| "null".to_owned(), quoted);
    fields.push("trace_id", trace_id);
}
