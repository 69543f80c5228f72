//! *workflow*: `entityId, entityType, tenantId, eventType, timestamp, context, properties` and the keys
//! of the table, computed by the sender.
//!
//! `timestamp` is in milliseconds. `ttl` is in seconds: when the table may remove the event. The id of the
//! event is only in `SK`, the app only in the keys of the indexes, so the keys are read as well; a document
//! whose keys contradict its fields is refused.

mod keys;
mod moved;
mod properties;
mod query;

use everbus_core::{Code, Entity, Error, Event, Result, Timestamp};

use crate::dialect::Dialect;
use crate::draft::{self, Draft};
use crate::fields::{Fields, compact};
use crate::{Beside, only_version_1};

pub use self::keys::{KEY_NAMES, Keys};
pub use self::moved::{MOVED, completed, moved};
pub(crate) use self::properties::with_reference;
pub use self::properties::{Overflow, Properties, seconds};
pub use self::query::TableQuery;

/// The metadata key of the context, as JSON.
const CONTEXT: &str = "context";
/// When the table may remove the event.
const TTL: &str = "ttl";

pub(crate) fn read(fields: &Fields<'_>, beside: &Beside<'_>) -> Result<Draft> {
    let tenant = fields.required("tenantId")?;
    let event_type = draft::required_type(fields, "eventType", beside)?;
    let millis = fields.whole("timestamp")?;
    let millis = millis.ok_or_else(|| fields.missing("timestamp"))?;
    let at = i64::try_from(millis)
        .ok()
        .and_then(|ms| ms.checked_mul(1000));
    let at = at.filter(|micros| Timestamp::from_micros(*micros).as_micros() == *micros);
    let Some(at) = at.map(Timestamp::from_micros) else {
        let what = "it is not a time in milliseconds since 1970";
        return Err(fields.bad("timestamp", what));
    };

    let sk = fields.required("SK")?;
    let Some(id) = sk
        .strip_prefix(&format!("TIMESTAMP#{millis}#EVENT#"))
        .filter(|id| !id.is_empty())
    else {
        let what = format!("it should be \"TIMESTAMP#{millis}#EVENT#\" and the id of the event");
        return Err(fields.bad("SK", &what));
    };
    let mut draft = Draft::new(id, None, beside);
    draft.event_type = event_type;
    draft.occurred_at = Some(at);
    let a = &mut draft.attributes;
    a.entity = match (fields.filled("entityType")?, fields.filled("entityId")?) {
        (Some(kind), Some(id)) => Some(Entity { kind, id }),
        (None, None) => None,
        (Some(_), None) => return Err(fields.missing("entityId")),
        (None, Some(_)) => return Err(fields.missing("entityType")),
    };
    if let Some(key) = fields.text("GSI2PK")? {
        let app = key.strip_prefix("APP#").filter(|app| !app.is_empty());
        let app = app.ok_or_else(|| fields.bad("GSI2PK", "it should be \"APP#\" and the app"))?;
        a.app = Some(app.to_owned());
    }
    if let Some(json) = fields.some(CONTEXT) {
        if !json.starts_with('{') {
            return Err(fields.bad(CONTEXT, "an object is expected here"));
        }
        let json = compact(json);
        fields.check_size(CONTEXT, &json)?;
        a.metadata.insert(CONTEXT.to_owned(), json);
    }
    if let Some(seconds) = fields.whole(TTL)? {
        let micros = i64::try_from(seconds)
            .ok()
            .and_then(|s| s.checked_mul(1_000_000));
        let at = micros.filter(|micros| Timestamp::from_micros(*micros).as_micros() == *micros);
        let Some(at) = at else {
            let what = "it is not a time in seconds since 1970";
            return Err(fields.bad(TTL, what));
        };
        a.expires_at = Some(Timestamp::from_micros(at));
    }
    if fields.get("properties").is_some_and(moved::says_so) {
        a.metadata.insert(MOVED.to_owned(), moved::BY.to_owned());
    }
    a.tenant = Some(tenant);
    check_keys(fields, &draft, millis, id)?;
    Ok(draft)
}

pub(crate) fn write<'a>(event: &'a Event, fields: &mut Fields<'a>) -> Result<()> {
    only_version_1(event, Dialect::Workflow)?;
    let keys = Keys::of(event)?;
    for (name, value) in keys.iter() {
        fields.push_text(name, value);
    }
    let a = event.attributes();
    if let Some(entity) = a.and_then(|a| a.entity.as_ref()) {
        fields.push_text("entityId", &entity.id);
        fields.push_text("entityType", &entity.kind);
    }
    fields.push_text("tenantId", event.tenant().unwrap_or_default());
    fields.push_text("eventType", event.event_type());
    fields.push("timestamp", keys.millis().to_string());
    let expires = a.and_then(|a| a.expires_at).map(Timestamp::as_micros);
    if let Some(micros) = expires.filter(|micros| *micros >= 0) {
        // Whole seconds; rounded up, so never earlier than the event's expiry.
        let seconds = micros / 1_000_000 + i64::from(micros % 1_000_000 > 0);
        fields.push(TTL, seconds.to_string());
    }
    // Metadata with this name may have another meaning.
    let context = event.metadata().get(CONTEXT).map(String::as_str);
    if let Some(json) = context.filter(|json| is_object(json)) {
        fields.push(CONTEXT, json);
    }
    Ok(())
}

fn check_keys(fields: &Fields<'_>, draft: &Draft, millis: u64, id: &str) -> Result<()> {
    let a = &draft.attributes;
    let keys = Keys::new(
        a.tenant.as_deref().unwrap_or_default(),
        a.app.as_deref(),
        a.entity.as_ref(),
        draft.event_type.as_deref().unwrap_or_default(),
        millis,
        id,
    );
    let keys = keys.map_err(|e| crate::located(Dialect::Workflow, &e))?;
    for name in KEY_NAMES {
        match (fields.text(name)?, keys.get(name)) {
            (None, None) => {}
            (Some(found), Some(right)) if found == right => {}
            (None, Some(right)) => {
                let what = format!("it is missing; it should be {right:?}");
                return Err(fields.bad(name, &what).hint(COMPUTED));
            }
            (Some(found), Some(right)) => {
                let what = format!("it is {found:?}, but should be {right:?}");
                return Err(fields.bad(name, &what).hint(COMPUTED));
            }
            (Some(_), None) => {
                let what = "it should not be there: the event has no such entity or app";
                return Err(fields.bad(name, what).hint(COMPUTED));
            }
        }
    }
    Ok(())
}

const COMPUTED: &str = "the sender computes all keys from tenant, app, entity, type, time and id";

fn is_object(json: &str) -> bool {
    json.starts_with('{') && crate::body::raw(json.as_bytes()).is_some()
}

fn refused(what: String) -> Error {
    Error::new(Code::Unsupported, what).hint("choose another dialect for this stream")
}
