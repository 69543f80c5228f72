//! CloudEvents 1.0: the JSON format here, HTTP in both modes through [`to_http`] and [`from_http`].
//!
//! Fields of Everbus that the standard does not have are written as extensions, under the documented names
//! if there are any: `correlationid`, `causationid`, `partitionkey`, `traceparent`, `tracestate`; else
//! `tenant`, `app`, `entitytype`, `entityid`, `schemaversion`, `replayof`. Every other extension is
//! metadata, and metadata with a valid name is written as an extension.

mod http;

use std::collections::BTreeMap;

use everbus_core::{Attributes, Code, Entity, Event, Result, TraceContext};

use crate::Beside;
use crate::draft::{self, Draft};
use crate::fields::Fields;
use crate::time::{self, Digits};

pub use self::http::{Headers, from_http, to_http};

/// The attributes that are not extensions.
const CORE: &[&str] = &[
    "specversion",
    "id",
    "source",
    "type",
    "time",
    "subject",
    "dataschema",
    "datacontenttype",
    "data",
    "data_base64",
];

/// The extensions that map to a field of an event. They are never metadata: metadata with such a name would
/// be read back as that field.
const ADOPTED: &[&str] = &[
    "tenant",
    "app",
    "partitionkey",
    "correlationid",
    "causationid",
    "entitytype",
    "entityid",
    "traceparent",
    "tracestate",
    VERSION,
    REPLAY_OF.0,
];
const VERSION: &str = "schemaversion";
const REPLAY_OF: (&str, &str) = ("replayof", "replay_of");
/// Optional attributes of the standard that are metadata here.
const METADATA: &[&str] = &["subject", "dataschema"];

pub(crate) fn read(fields: &Fields<'_>, beside: &Beside<'_>) -> Result<Draft> {
    let specversion = fields.required("specversion")?;
    if specversion != "1.0" {
        let what = format!("{specversion:?} is not a version that can be read; it must be \"1.0\"");
        return Err(fields.error(Code::Unsupported, "specversion", &what));
    }
    let source = fields.required("source")?;
    let mut draft = Draft::new(&fields.required("id")?, Some(source), beside);
    draft.event_type = draft::required_type(fields, "type", beside)?;
    draft.occurred_at = time::read(fields, "time")?;
    let mut extensions = BTreeMap::new();
    for (name, json) in fields.iter().filter(|(name, _)| !CORE.contains(name)) {
        if let Some(text) = extension(fields, name, json)? {
            extensions.insert(name.to_owned(), text);
        }
    }
    let version = match extensions.get(VERSION) {
        // In headers it is a text.
        Some(text) => text.parse().ok(),
        None => fields.some(VERSION).and_then(|json| json.parse().ok()),
    };
    draft.version = version.filter(|version| *version > 0).unwrap_or(1);
    adopt(&mut draft.attributes, extensions);
    let a = &mut draft.attributes;
    a.content_type = fields.filled("datacontenttype")?;
    for name in METADATA {
        if let Some(text) = fields.filled(name)? {
            a.metadata.insert((*name).to_owned(), text);
        }
    }
    Ok(draft)
}

pub(crate) fn write<'a>(event: &'a Event, fields: &mut Fields<'a>) {
    fields.push_text("specversion", "1.0");
    fields.push_text("id", &event.display_id());
    fields.push_text("source", draft::source(event));
    fields.push_text("type", event.event_type());
    let at = time::spelled(event.occurred_at(), Digits::Shortest);
    fields.push_text("time", &at);
    if event.version() != 1 {
        fields.push(VERSION, event.version().to_string());
    }
    let Some(a) = event.attributes() else { return };
    fields.push_text_if("datacontenttype", a.content_type.as_deref());
    fields.push_text_if("tenant", a.tenant.as_deref());
    fields.push_text_if("app", a.app.as_deref());
    fields.push_text_if("partitionkey", a.key.as_deref());
    fields.push_text_if("correlationid", a.correlation_id.as_deref());
    fields.push_text_if("causationid", a.causation_id.as_deref());
    if let Some(entity) = a.entity.as_ref().filter(|e| is_filled(e)) {
        fields.push_text("entitytype", &entity.kind);
        fields.push_text("entityid", &entity.id);
    }
    if let Some(trace) = &a.trace {
        fields.push_text("traceparent", &trace.traceparent);
        fields.push_text_if("tracestate", trace.tracestate.as_deref());
    }
    for (key, value) in &a.metadata {
        let name = match key.as_str() {
            key if key == REPLAY_OF.1 => REPLAY_OF.0,
            key if METADATA.contains(&key) => key,
            key if is_name(key) && !CORE.contains(&key) && !ADOPTED.contains(&key) => key,
            _ => continue,
        };
        if !value.contains(char::is_control) {
            fields.push_text(name, value);
        }
    }
}

/// The value of an extension, if it is a text. Other values are kept in their original spelling.
fn extension(fields: &Fields<'_>, name: &str, json: &str) -> Result<Option<String>> {
    if !is_name(name) {
        let what = "names of CloudEvents attributes are lower-case letters and digits";
        return Err(fields.bad(name, what));
    }
    match json {
        "null" | "true" | "false" => Ok(None),
        _ if json.starts_with('"') => fields.text(name),
        _ if json.parse::<i32>().is_ok() => Ok(None),
        _ => {
            let what = "an extension is a text, true, false or a whole number of 32 bits";
            Err(fields.bad(name, what))
        }
    }
}

/// Maps the extensions to fields of the event. An extension that does not fit its field is kept by the
/// spelling.
fn adopt(a: &mut Attributes, mut extensions: BTreeMap<String, String>) {
    let mut take = |name: &str| extensions.remove(name).filter(|text| !text.is_empty());
    a.tenant = take("tenant");
    a.app = take("app");
    a.key = take("partitionkey");
    a.correlation_id = take("correlationid");
    a.causation_id = take("causationid");
    if let (Some(kind), Some(id)) = (take("entitytype"), take("entityid")) {
        a.entity = Some(Entity { kind, id });
    }
    if let Some(parent) = take("traceparent") {
        let state = take("tracestate");
        a.trace = TraceContext::parse(&parent, state.as_deref()).ok();
    }
    if let Some(original) = take(REPLAY_OF.0) {
        a.metadata.insert(REPLAY_OF.1.to_owned(), original);
    }
    extensions.retain(|name, _| !ADOPTED.contains(&name.as_str()));
    a.metadata.append(&mut extensions);
}

fn is_filled(entity: &Entity) -> bool {
    !entity.kind.is_empty() && !entity.id.is_empty()
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}
