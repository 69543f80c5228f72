//! The payload inside a document: as JSON, as text, as encoded bytes, or absent.

use bytes::Bytes;
use data_encoding::{BASE64, Encoding, HEXLOWER};
use everbus_core::{Code, Error, Event, Result};
use serde_json::value::RawValue;

use crate::dialect::Dialect;
use crate::fields::{Fields, quoted};
use crate::spelling;

/// The fields in which a dialect keeps the payload.
#[derive(Debug)]
pub(crate) struct Place {
    /// The field for JSON.
    value: &'static str,
    /// The field for text that is not JSON.
    text: Option<&'static str>,
    /// The field for bytes, and their encoding.
    bytes: Option<(&'static str, &'static Encoding)>,
    /// Whether the payload must be a JSON object.
    object: bool,
}

const fn json_only(value: &'static str, object: bool) -> Place {
    Place {
        value,
        text: None,
        bytes: None,
        object,
    }
}

static NATIVE: Place = Place {
    value: "payload",
    text: Some("payload_text"),
    bytes: Some(("payload_hex", &HEXLOWER)),
    object: false,
};
static CLOUD_EVENTS: Place = Place {
    value: "data",
    text: Some("data"),
    bytes: Some(("data_base64", &BASE64)),
    object: false,
};
static ANY_JSON: Place = json_only("payload", false);
static FRAMEWORK: Place = json_only("payload", true);
static WORKFLOW: Place = json_only("properties", true);

impl Place {
    pub(crate) fn of(dialect: Dialect) -> &'static Place {
        match dialect {
            Dialect::Native => &NATIVE,
            Dialect::CloudEvents => &CLOUD_EVENTS,
            Dialect::Omni | Dialect::Outbox => &ANY_JSON,
            Dialect::Framework => &FRAMEWORK,
            Dialect::Workflow => &WORKFLOW,
        }
    }

    /// Whether a field belongs to the payload. `null` in the field for bytes does not count.
    pub(crate) fn holds(&self, name: &str, json: &str) -> bool {
        let bytes = self.bytes.map(|(name, _)| name);
        name == self.value || ((Some(name) == self.text || Some(name) == bytes) && json != "null")
    }
}

/// The form of the payload in the document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Value,
    Text,
    Bytes,
    Absent,
}

impl Form {
    /// The mark in the metadata, if the form is not the usual one.
    fn mark(self) -> &'static str {
        match self {
            Form::Value => "json",
            Form::Text => "text",
            Form::Bytes => "bytes",
            Form::Absent => spelling::ABSENT,
        }
    }

    /// The form in which a payload is written by default.
    fn usual(dialect: Dialect, kind: Option<&str>, payload: &[u8], json: Option<&str>) -> Self {
        let text = std::str::from_utf8(payload).is_ok();
        match (json, dialect) {
            // The native document keeps every byte, including the spaces around a JSON value.
            (Some(json), Dialect::Native) if json.len() != payload.len() => Form::Text,
            (Some(_), _) if declares_json(kind) => Form::Value,
            _ if declares_json(kind) || !text => Form::Bytes,
            _ => Form::Text,
        }
    }

    /// The form that the metadata asks for, if it still fits the payload.
    fn of(event: &Event, dialect: Dialect, json: Option<&str>) -> Self {
        let payload = event.payload();
        let place = Place::of(dialect);
        let mark = spelling::mark(event, dialect, place.value);
        let forms: &[Form] = match place {
            Place { bytes: None, .. } => &[],
            // If text and JSON share a field, only the content type tells them apart.
            Place { value, text, .. } if *text == Some(*value) => &[Form::Bytes, Form::Absent],
            _ => &[Form::Value, Form::Text, Form::Bytes, Form::Absent],
        };
        match forms.iter().find(|form| Some(form.mark()) == mark) {
            Some(Form::Value) if json.is_some() => Form::Value,
            Some(Form::Text) if std::str::from_utf8(payload).is_ok() => Form::Text,
            Some(Form::Bytes) => Form::Bytes,
            Some(Form::Absent) if is_absent(event, dialect) => Form::Absent,
            _ => Form::usual(dialect, content_type(event), payload, json),
        }
    }
}

/// A payload that was read, and the marks to keep if its form was unusual.
#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) payload: Bytes,
    /// Fields and their marks in the metadata.
    pub(crate) marks: Vec<(&'static str, &'static str)>,
}

impl Body {
    fn new(dialect: Dialect, content_type: Option<&str>, payload: Bytes, form: Form) -> Self {
        // A JSON value where JSON is expected is the common case; it was parsed already.
        let usual = (form == Form::Value && declares_json(content_type))
            || form == Form::usual(dialect, content_type, &payload, raw(&payload));
        let body = Self {
            payload,
            marks: Vec::new(),
        };
        if usual {
            body
        } else {
            body.marked(Place::of(dialect).value, form.mark())
        }
    }

    /// A payload without a document.
    pub(crate) fn usual(payload: &[u8]) -> Self {
        Self {
            payload: Bytes::copy_from_slice(payload),
            marks: Vec::new(),
        }
    }

    pub(crate) fn marked(mut self, field: &'static str, mark: &'static str) -> Self {
        self.marks.push((field, mark));
        self
    }

    /// A document without a payload.
    pub(crate) fn absent(dialect: Dialect, content_type: Option<&str>) -> Self {
        let payload = Bytes::from_static(nothing(content_type));
        Self::new(dialect, content_type, payload, Form::Absent)
    }
}

/// Whether the event came without a payload.
pub(crate) fn is_absent(event: &Event, dialect: Dialect) -> bool {
    spelling::mark(event, dialect, Place::of(dialect).value) == Some(spelling::ABSENT)
        && event.payload()[..] == *nothing(content_type(event))
}

/// Reads the payload from a document.
pub(crate) fn read(fields: &Fields<'_>, content_type: Option<&str>) -> Result<Body> {
    let dialect = fields.dialect();
    let place = Place::of(dialect);
    let json = fields.get(place.value);
    let bytes = place.bytes;
    let bytes = bytes.and_then(|(name, encoding)| Some((name, encoding, fields.some(name)?)));
    let text = place.text.filter(|name| *name != place.value);
    let text = text.and_then(|name| Some((name, fields.some(name)?)));

    let (payload, form) = match (json, text, bytes) {
        (Some(json), None, None) => {
            if place.text == Some(place.value) && !declares_json(content_type) {
                (string(fields, place.value, json)?.into(), Form::Text)
            } else {
                (Bytes::copy_from_slice(json.as_bytes()), Form::Value)
            }
        }
        (None, Some((name, json)), None) => (string(fields, name, json)?.into(), Form::Text),
        (None, None, Some((name, encoding, json))) => {
            let text = string(fields, name, json)?;
            let bytes = encoding.decode(text.as_bytes());
            let bytes =
                bytes.map_err(|e| fields.error(Code::InvalidPayloadError, name, &e.to_string()))?;
            (bytes.into(), Form::Bytes)
        }
        (None, None, None) if place.bytes.is_none() => return Err(fields.missing(place.value)),
        (None, None, None) => return Ok(Body::absent(dialect, content_type)),
        _ => {
            let what = "the payload stands in the document twice, in two forms";
            return Err(fields.error(Code::InvalidPayloadError, place.value, what));
        }
    };
    if place.object && !payload.starts_with(b"{") {
        let what = "an object is expected here";
        return Err(fields.error(Code::InvalidPayloadError, place.value, what));
    }
    Ok(Body::new(dialect, content_type, payload, form))
}

/// Writes the payload into a document.
pub(crate) fn write<'a>(event: &'a Event, fields: &mut Fields<'a>) -> Result<()> {
    let dialect = fields.dialect();
    let place = Place::of(dialect);
    if let Some(reference) = event.overflow() {
        let properties = match dialect {
            Dialect::Workflow => crate::workflow::with_reference(event, reference),
            _ => None,
        };
        let properties = properties.ok_or_else(|| not_whole(event, dialect))?;
        fields.set(place.value, properties);
        return Ok(());
    }
    let json = raw(event.payload());
    match (Form::of(event, dialect, json), place.text, place.bytes) {
        (Form::Value, ..) => {
            let json = json.unwrap_or("null");
            if place.object && !json.starts_with('{') {
                return Err(refused(event, dialect, "a JSON object"));
            }
            fields.set(place.value, json);
        }
        (Form::Text, Some(name), _) => {
            let text = String::from_utf8_lossy(event.payload());
            fields.set(name, quoted(&text));
        }
        (Form::Bytes, _, Some((name, encoding))) => {
            let text = encoding.encode(event.payload());
            fields.set(name, quoted(&text));
        }
        (Form::Absent, _, Some(_)) => {}
        _ => return Err(refused(event, dialect, "JSON")),
    }
    Ok(())
}

/// Whether a content type means JSON; a missing one means JSON too.
pub(crate) fn declares_json(content_type: Option<&str>) -> bool {
    content_type.is_none_or(|content_type| {
        let essence = content_type.split(';').next().unwrap_or_default().trim();
        let essence = essence.to_ascii_lowercase();
        essence.ends_with("/json") || essence.ends_with("+json")
    })
}

/// The payload of an event that came without one.
fn nothing(content_type: Option<&str>) -> &'static [u8] {
    if declares_json(content_type) {
        b"null"
    } else {
        b""
    }
}

/// The payload as JSON, if it is JSON.
pub(crate) fn raw(payload: &[u8]) -> Option<&str> {
    serde_json::from_slice::<&RawValue>(payload)
        .ok()
        .map(RawValue::get)
}

fn content_type(event: &Event) -> Option<&str> {
    event.attributes()?.content_type.as_deref()
}

fn string(fields: &Fields<'_>, name: &str, json: &str) -> Result<String> {
    serde_json::from_str(json)
        .map_err(|_| fields.error(Code::InvalidPayloadError, name, "a text is expected here"))
}

fn not_whole(event: &Event, dialect: Dialect) -> Error {
    let id = event.display_id();
    Error::new(
        Code::Unsupported,
        format!(
            "a part of the payload of {id:?} is in an object store, which {dialect} cannot say"
        ),
    )
    .hint("write the whole event: Bus::whole gives it")
}

fn refused(event: &Event, dialect: Dialect, wanted: &str) -> Error {
    let id = event.display_id();
    Error::new(
        Code::Unsupported,
        format!("a payload in the {dialect} dialect is {wanted}, and that of {id:?} is not"),
    )
    .hint("choose the dialect native or cloudevents for this stream")
}
