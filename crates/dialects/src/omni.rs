//! *omni*: `type, payload, id, timestamp, source, traceId`, and `replayOf` on replayed events.

use everbus_core::{Event, Result};

use crate::dialect::Dialect;
use crate::draft::{self, Draft};
use crate::fields::Fields;
use crate::time::{self, Digits};
use crate::{Beside, only_version_1};

const REPLAY_OF: &str = "replay_of";

pub(crate) fn read(fields: &Fields<'_>, beside: &Beside<'_>) -> Result<Draft> {
    let source = fields.required("source")?;
    let mut draft = Draft::new(&fields.required("id")?, Some(source), beside);
    draft.event_type = draft::required_type(fields, "type", beside)?;
    draft.occurred_at = Some(time::required(fields, "timestamp")?);
    draft.set_trace_id(fields.filled("traceId")?);
    if let Some(original) = fields.filled("replayOf")? {
        draft.attributes.metadata.insert(REPLAY_OF.into(), original);
    }
    Ok(draft)
}

pub(crate) fn write<'a>(event: &'a Event, fields: &mut Fields<'a>) -> Result<()> {
    only_version_1(event, Dialect::Omni)?;
    fields.push_text("type", event.event_type());
    fields.push_text("id", &event.display_id());
    let at = time::spelled(event.occurred_at(), Digits::Milliseconds);
    fields.push_text("timestamp", &at);
    fields.push_text("source", draft::source(event));
    fields.push_text_if("traceId", draft::trace_id(event));
    let original = event.metadata().get(REPLAY_OF);
    fields.push_text_if("replayOf", original.map(String::as_str));
    Ok(())
}
