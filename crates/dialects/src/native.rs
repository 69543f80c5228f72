//! The JSON of Everbus itself: the field names that the command line prints.
//!
//! It carries every field of an event. The fields of an engine (`seq`, `received_at`) are kept like unknown
//! fields.

use std::collections::BTreeMap;

use everbus_core::{
    Code, Entity, EnvelopeValue, Error, Event, EventId, GroupName, Result, TraceContext, envelope,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::dialect::Dialect;
use crate::draft::{self, Draft};
use crate::fields::Fields;
use crate::{Beside, spelling, time};

pub(crate) fn read(fields: &Fields<'_>, beside: &Beside<'_>) -> Result<Draft> {
    let id = fields.required("id")?;
    let mut draft = Draft::new(&id, fields.filled("source")?, beside);
    if let Some(foreign) = fields.filled("foreign_id")? {
        let known: EventId = id.parse().map_err(|_| {
            fields.error(
                Code::InvalidId,
                "id",
                "beside a foreign_id there must be a UUID",
            )
        })?;
        let other = |uuid: EventId| uuid != known && uuid.to_string() == foreign;
        if foreign.parse().is_ok_and(other) {
            let what = "it is a UUID, but not that of the event";
            return Err(fields.error(Code::InvalidId, "foreign_id", what));
        }
        draft.attributes.foreign_id = (foreign != known.to_string()).then_some(foreign);
    }
    draft.event_type = draft::required_type(fields, "type", beside)?;
    draft.version = fields.version("version")?;
    draft.occurred_at = time::read(fields, "occurred_at")?;
    let a = &mut draft.attributes;
    let texts = [
        ("app", &mut a.app),
        ("tenant", &mut a.tenant),
        ("key", &mut a.key),
        ("correlation_id", &mut a.correlation_id),
        ("causation_id", &mut a.causation_id),
        ("content_type", &mut a.content_type),
    ];
    for (name, value) in texts {
        *value = fields.filled(name)?;
    }
    // It is written for every event; the event's own id means the same as none.
    let own = draft.id.to_string();
    a.correlation_id = a.correlation_id.take().filter(|id| *id != own);
    a.entity = object::<Entity>(fields, "entity")?;
    a.trace = object::<TraceContext>(fields, "trace")?;
    a.address = match fields.text("address")? {
        // Empty for the unnamed group.
        Some(group) => {
            let group: GroupName = group
                .parse()
                .map_err(|e: Error| fields.bad("address", e.message()))?;
            Some(group.as_str().to_owned())
        }
        None => None,
    };
    a.expires_at = time::read(fields, "expires_at")?;
    a.not_before = time::read(fields, "not_before")?;
    a.metadata = object(fields, "metadata")?.unwrap_or_default();
    let reserved = |key: &&String| spelling::field(Dialect::Native, key).is_some();
    if let Some(key) = a.metadata.keys().find(reserved) {
        let what = format!("{key:?} is reserved for fields that Everbus does not know");
        return Err(fields.bad("metadata", &what));
    }
    Ok(draft)
}

pub(crate) fn write<'a>(event: &'a Event, fields: &mut Fields<'a>) {
    for (name, value) in envelope(event) {
        match value {
            EnvelopeValue::Metadata(metadata) => {
                let own = |key: &str| spelling::field(Dialect::Native, key).is_none();
                let own: BTreeMap<_, _> = metadata.iter().filter(|(key, _)| own(key)).collect();
                if !own.is_empty() {
                    push(fields, name, &own);
                }
            }
            // It is of use only beside the log of this event.
            EnvelopeValue::Overflow(_) => {}
            value => push(fields, name, &value),
        }
    }
}

fn object<T: DeserializeOwned>(fields: &Fields<'_>, name: &str) -> Result<Option<T>> {
    match fields.some(name) {
        None => Ok(None),
        Some(json) => serde_json::from_str(json)
            .map(Some)
            .map_err(|e| fields.bad(name, &e.to_string())),
    }
}

fn push(fields: &mut Fields<'_>, name: &'static str, value: &impl Serialize) {
    // Texts, numbers and maps of texts: serialising them cannot fail.
    if let Ok(json) = serde_json::to_string(value) {
        fields.push(name, json);
    }
}
