//! *outbox*: `event_id, occurred_at, correlation_id, tenant_id, station_id, schema_version, payload`.
//!
//! The envelope has no type: the type is beside it, in the column `event_type`. A document with a field of
//! that name can be read without the column.

use everbus_core::{Event, Result};

use crate::Beside;
use crate::draft::{self, Draft};
use crate::fields::Fields;
use crate::time::{self, Digits};

/// The metadata entry that holds the station.
const STATION: &str = "station_id";

pub(crate) fn read(fields: &Fields<'_>, beside: &Beside<'_>) -> Result<Draft> {
    let id = fields.required("event_id")?;
    let mut draft = Draft::new(&id, None, beside);
    draft.event_type = draft::read_type(fields, "event_type", beside)?;
    draft.version = fields.version("schema_version")?;
    draft.occurred_at = Some(time::required(fields, "occurred_at")?);
    let a = &mut draft.attributes;
    a.correlation_id = Some(fields.filled("correlation_id")?.unwrap_or(id));
    a.tenant = fields.filled("tenant_id")?;
    if let Some(station) = fields.filled(STATION)? {
        a.metadata.insert(STATION.into(), station);
    }
    Ok(draft)
}

/// Writes all fields; a missing tenant or station is written as empty, as Go does.
pub(crate) fn write<'a>(event: &'a Event, fields: &mut Fields<'a>) {
    fields.push_text("event_id", &event.display_id());
    let at = time::spelled(event.occurred_at(), Digits::Shortest);
    fields.push_text("occurred_at", &at);
    fields.push_text("correlation_id", &draft::correlation_id(event));
    fields.push_text("tenant_id", event.tenant().unwrap_or_default());
    let station = event.metadata().get(STATION);
    fields.push_text(STATION, station.map(String::as_str).unwrap_or_default());
    fields.push("schema_version", event.version().to_string());
}
