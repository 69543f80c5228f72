//! The envelope of the *outbox* specification, and the attributes that it cannot carry. The serialisation is
//! written by hand for speed, because it runs in the user's transaction.
//!
//! The document is the one that [`encode`](crate::encode) writes, byte for byte; a test compares the two.

use std::borrow::Cow;
use std::fmt::Write as _;

use bytes::Bytes;
use data_encoding::BASE64;
use everbus_core::{Attributes, Code, Error, Event, EventId, Result, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::Dialect;

/// The metadata entry that holds the station.
const STATION: &str = "station_id";
/// Metadata with this prefix keeps how a document was spelled.
const SPELLING: &str = "outbox:";

/// The content of the columns `payload` and `attributes`.
#[derive(Clone, Debug)]
pub struct Written {
    /// The envelope.
    pub payload: String,
    /// The attributes that the envelope cannot carry, as JSON; `{}` if there are none.
    pub attributes: Cow<'static, str>,
}

/// The attributes that the envelope cannot carry.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Rest<'a> {
    /// The UUID of an event with a foreign id.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<EventId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attributes: Option<Cow<'a, Attributes>>,
    /// The form of the payload in the envelope, if it is not JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    form: Option<Form>,
    /// The whitespace before and after it.
    #[serde(skip_serializing_if = "Option::is_none")]
    blanks: Option<(Cow<'a, str>, Cow<'a, str>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Form {
    /// A text that is the payload.
    Text,
    /// A text that is the payload in Base64.
    Base64,
}

/// Writes an event without loss.
pub fn write(event: &Event) -> Result<Written> {
    let mut rest = Rest::default();
    let payload = event.payload();
    let json = if declares_json(event) {
        serde_json::from_slice::<&RawValue>(payload).ok()
    } else {
        None
    };
    let mut text = String::with_capacity(payload.len() + 256);
    match json {
        Some(json) => {
            let json = json.get();
            if json.len() != payload.len() {
                rest.blanks = blanks(payload, json);
            }
            if spelled_otherwise(event)
                && let Ok(document) = crate::encode(event, Dialect::Outbox)
                && let Ok(document) = String::from_utf8(document)
            {
                text = document;
            } else {
                head(&mut text, event);
                text.push_str(json);
                text.push('}');
            }
        }
        None => {
            head(&mut text, event);
            match std::str::from_utf8(payload) {
                Ok(payload) => {
                    rest.form = Some(Form::Text);
                    push_quoted(&mut text, payload);
                }
                Err(_) => {
                    rest.form = Some(Form::Base64);
                    push_quoted(&mut text, &BASE64.encode(payload));
                }
            }
            text.push('}');
        }
    }
    if let Some(attributes) = event.attributes() {
        rest.id = attributes.foreign_id.is_some().then(|| event.id());
        rest.attributes = Some(Cow::Borrowed(attributes));
    }
    let plain = rest.attributes.is_none() && rest.form.is_none() && rest.blanks.is_none();
    let attributes = if plain {
        // Marks the row as written by Everbus, with nothing missing.
        Cow::Borrowed("{}")
    } else {
        Cow::Owned(serde_json::to_string(&rest).map_err(|e| {
            Error::new(
                Code::InvalidAttribute,
                format!("the attributes cannot be stored: {e}"),
            )
        })?)
    };
    Ok(Written {
        payload: text,
        attributes,
    })
}

/// Writes everything before the payload.
fn head(text: &mut String, event: &Event) {
    let id = event.display_id();
    text.push_str("{\"event_id\":");
    push_quoted(text, &id);
    text.push_str(",\"occurred_at\":\"");
    push_time(text, event.occurred_at());
    text.push_str("\",\"correlation_id\":");
    let attributes = event.attributes();
    let correlation = attributes.and_then(|a| a.correlation_id.as_deref());
    push_quoted(text, correlation.unwrap_or(&id));
    text.push_str(",\"tenant_id\":");
    push_quoted(text, event.tenant().unwrap_or_default());
    text.push_str(",\"station_id\":");
    let station = attributes.and_then(|a| a.metadata.get(STATION));
    push_quoted(text, station.map(String::as_str).unwrap_or_default());
    let _ = write!(text, ",\"schema_version\":{},\"payload\":", event.version());
}

/// Writes a time with as many digits as it has.
fn push_time(text: &mut String, at: Timestamp) {
    let start = text.len();
    let _ = write!(text, "{at}");
    if text.ends_with('Z') && text[start..].contains('.') {
        text.pop();
        let kept = text.trim_end_matches('0').trim_end_matches('.').len();
        text.truncate(kept);
        text.push('Z');
    }
}

/// A text as JSON. Most need no escapes.
fn push_quoted(text: &mut String, value: &str) {
    if value.bytes().any(|b| b < 0x20 || b == b'"' || b == b'\\') {
        text.push_str(&serde_json::Value::from(value).to_string());
    } else {
        text.push('"');
        text.push_str(value);
        text.push('"');
    }
}

fn spelled_otherwise(event: &Event) -> bool {
    let mut keys = event.metadata().keys();
    keys.any(|key| key.starts_with(SPELLING))
}

fn declares_json(event: &Event) -> bool {
    let essence = event.content_type().split(';').next().unwrap_or_default();
    let essence = essence.trim().to_ascii_lowercase();
    essence.ends_with("/json") || essence.ends_with("+json")
}

fn blanks(payload: &[u8], json: &str) -> Option<(Cow<'static, str>, Cow<'static, str>)> {
    let text = std::str::from_utf8(payload).ok()?;
    let (before, after) = text.split_once(json)?;
    Some((before.to_owned().into(), after.to_owned().into()))
}

#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow)]
    event_id: Cow<'a, str>,
    #[serde(borrow)]
    occurred_at: Cow<'a, str>,
    #[serde(borrow, default)]
    correlation_id: Cow<'a, str>,
    #[serde(borrow, default)]
    tenant_id: Cow<'a, str>,
    #[serde(borrow, default)]
    station_id: Cow<'a, str>,
    schema_version: u32,
    #[serde(borrow)]
    payload: &'a RawValue,
}

/// Reads an event that [`write`] wrote. If the envelope was changed since, the change counts.
pub(crate) fn read(event_type: &str, payload: &str, attributes: &str) -> Result<Event> {
    let bad = |column: &str, e: &dyn std::fmt::Display| {
        Error::new(
            Code::InvalidPayloadError,
            format!("the column {column} cannot be read: {e}"),
        )
        .hint("it was changed after it was written; correct it, or write the event anew")
    };
    let envelope: Envelope<'_> = serde_json::from_str(payload).map_err(|e| bad("payload", &e))?;
    let rest: Rest<'_> = if attributes == "{}" {
        Rest::default()
    } else {
        serde_json::from_str(attributes).map_err(|e| bad("attributes", &e))?
    };
    let mut attributes = rest.attributes.map(|a| Box::new(a.into_owned()));
    adopt(&mut attributes, &envelope);
    let id = match rest.id {
        Some(id) => id,
        None => {
            let source = attributes.as_deref().and_then(|a| a.source.as_deref());
            EventId::from_foreign(source.unwrap_or_default(), &envelope.event_id)
        }
    };
    let json = envelope.payload.get();
    let body = match (rest.form, rest.blanks) {
        (None, None) => Bytes::copy_from_slice(json.as_bytes()),
        (None, Some((before, after))) => Bytes::from(format!("{before}{json}{after}")),
        (Some(form), _) => {
            let text: String = serde_json::from_str(json).map_err(|e| bad("payload", &e))?;
            match form {
                Form::Text => Bytes::from(text),
                Form::Base64 => BASE64
                    .decode(text.as_bytes())
                    .map_err(|e| bad("payload", &e))?
                    .into(),
            }
        }
    };
    let mut builder = Event::builder(event_type)
        .id(id)
        .version(envelope.schema_version)
        .occurred_at(envelope.occurred_at.parse()?)
        .payload(body);
    if let Some(attributes) = attributes {
        builder = builder.attributes(*attributes);
    }
    builder.build()
}

/// Takes over the envelope's values.
fn adopt(attributes: &mut Option<Box<Attributes>>, envelope: &Envelope<'_>) {
    let said = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let own = attributes.as_deref();
    let tenant = own.and_then(|a| a.tenant.as_deref()).unwrap_or_default();
    if tenant != envelope.tenant_id {
        attributes.get_or_insert_default().tenant = said(&envelope.tenant_id);
    }
    let own = attributes.as_deref();
    let correlation = own.and_then(|a| a.correlation_id.as_deref());
    if correlation.unwrap_or(&envelope.event_id) != envelope.correlation_id {
        attributes.get_or_insert_default().correlation_id = said(&envelope.correlation_id);
    }
    let own = attributes.as_deref();
    let station = own.and_then(|a| a.metadata.get(STATION));
    if station.map(String::as_str).unwrap_or_default() != envelope.station_id {
        let metadata = &mut attributes.get_or_insert_default().metadata;
        match said(&envelope.station_id) {
            Some(station) => metadata.insert(STATION.to_owned(), station),
            None => metadata.remove(STATION),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use everbus_core::TraceContext;

    fn full() -> Event {
        Event::builder("orders.order.placed")
            .version(3)
            .occurred_at("2026-03-01T12:00:00.5Z".parse().unwrap())
            .payload("{ \"a\": [1, 2.50e+1], \"s\": \"\\u00e9 \\\"x\\\"\" }")
            .source("shop")
            .app("web \"front\"")
            .tenant("acme\\co")
            .entity("ORDER", "7")
            .key("k")
            .correlation_id("request-1")
            .causation_id("c")
            .trace(
                TraceContext::parse(
                    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                    Some("a=b"),
                )
                .unwrap(),
            )
            .meta("station_id", "s-7")
            .meta("channel", "web")
            .expires_at("2027-01-01T00:00:00Z".parse().unwrap())
            .build()
            .unwrap()
    }

    fn samples() -> Vec<Event> {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let build = |b: everbus_core::EventBuilder| b.build().unwrap();
        vec![
            full(),
            build(Event::builder("a.b").occurred_at(at("2026-03-01T12:00:00Z"))),
            build(
                Event::builder("a.b")
                    .payload("1")
                    .occurred_at(at("2026-03-01T12:00:00.123456Z")),
            ),
            build(
                Event::builder("a.b")
                    .payload("\"text\"")
                    .occurred_at(at("2026-03-01T12:00:00.1Z")),
            ),
            build(
                Event::builder("a.b")
                    .source("x")
                    .foreign_id("test-1")
                    .payload("[]"),
            ),
            build(Event::builder("a.b").foreign_id("test-2").payload("true")),
            build(
                Event::builder("a.b")
                    .payload("{}")
                    .content_type("application/vnd.x+json"),
            ),
            build(Event::builder("a b").payload("{}").tenant("é\u{7f}ü")),
        ]
    }

    // conformance: memory/outbox-envelope: the column payload holds the envelope of the specification, the very document of the dialect
    #[test]
    fn the_envelope_is_the_document_of_the_dialect() {
        for event in samples() {
            let written = write(&event).unwrap();
            match crate::encode(&event, Dialect::Outbox) {
                Ok(document) => assert_eq!(written.payload.as_bytes(), document, "{event:?}"),
                Err(e) => assert!(event.tenant().is_some_and(|t| t.contains('\u{7f}')), "{e}"),
            }
        }
    }

    #[test]
    fn a_document_that_was_spelled_otherwise_stays_so() {
        let document = br#"{"event_id":"e-1","occurred_at":"2026-03-01T13:00:00+01:00","correlation_id":"c","tenant_id":"t","station_id":"s","schema_version":1,"payload":{},"extra":[1]}"#;
        let beside = crate::Beside {
            event_type: Some("x.y"),
            ..crate::Beside::default()
        };
        let event = crate::decode_beside(document, Dialect::Outbox, &beside).unwrap();
        let written = write(&event).unwrap();
        let same: serde_json::Value = serde_json::from_str(&written.payload).unwrap();
        assert_eq!(
            same,
            serde_json::from_slice::<serde_json::Value>(document).unwrap()
        );
        assert_eq!(
            read("x.y", &written.payload, &written.attributes).unwrap(),
            event
        );
    }

    // conformance: memory/outbox-nothing-lost: nothing of an event is lost in the outbox, whatever its payload is
    #[test]
    fn every_event_comes_back_as_it_was() {
        let odd = [
            Event::builder("a.b").payload(" \n{\"a\":1}\t").build(),
            Event::builder("a.b")
                .payload("plain \"text\"")
                .content_type("text/plain")
                .build(),
            Event::builder("a.b")
                .payload("12")
                .content_type("text/plain")
                .build(),
            Event::builder("a.b")
                .payload(vec![0_u8, 255, 10])
                .content_type("image/png")
                .build(),
            Event::builder("a.b")
                .payload(Vec::new())
                .content_type("image/png")
                .build(),
            Event::builder("a.b")
                .id(EventId::new())
                .foreign_id("x")
                .id(EventId::new())
                .payload("1")
                .build(),
        ];
        for event in samples().into_iter().chain(odd.map(Result::unwrap)) {
            let written = write(&event).unwrap();
            let back = read(event.event_type(), &written.payload, &written.attributes).unwrap();
            assert_eq!(back, event);
            assert!(serde_json::from_str::<serde_json::Value>(&written.payload).is_ok());
        }
    }

    #[test]
    fn what_was_corrected_in_the_envelope_counts() {
        let written = write(&full()).unwrap();
        let payload = written
            .payload
            .replace("\"request-1\"", "\"request-2\"")
            .replace("\"s-7\"", "\"\"")
            .replace("2.50e+1", "9");
        let back = read("orders.order.placed", &payload, &written.attributes).unwrap();
        assert_eq!(back.correlation_id(), "request-2");
        assert!(!back.metadata().contains_key(STATION));
        assert_eq!(back.tenant(), Some("acme\\co"));
        assert!(
            std::str::from_utf8(back.payload())
                .unwrap()
                .contains("[1, 9]")
        );
        let error = read("orders.order.placed", "{\"event_id\":", &written.attributes).unwrap_err();
        assert_eq!(error.code(), Code::InvalidPayloadError);
    }
}
