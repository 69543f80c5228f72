//! CloudEvents over HTTP: attributes as `ce-` headers and the payload as body, or the whole event as
//! a JSON body.

use bytes::Bytes;
use everbus_core::{Code, Error, Event, Result};

use crate::body::{self, Body};
use crate::dialect::Dialect;
use crate::fields::{Fields, quoted};
use crate::{Beside, format, spelling};

/// Headers of a message: names in lower case, values as sent.
pub type Headers = Vec<(String, String)>;

const CE: Dialect = Dialect::CloudEvents;
const PREFIX: &str = "ce-";
const CONTENT_TYPE: &str = "content-type";
const JSON: &str = "application/json";
const BYTES: &str = "application/octet-stream";

/// Writes an event as headers and body: CloudEvents in binary mode.
///
/// ```
/// use everbus_core::Event;
/// use everbus_dialects::cloudevents::{from_http, to_http};
///
/// let event = Event::builder("order.placed").source("/shop").tenant("größer & co").build()?;
/// let (headers, body) = to_http(&event)?;
/// assert!(headers.contains(&("ce-type".into(), "order.placed".into())));
/// assert!(headers.contains(&("ce-tenant".into(), "gr%C3%B6%C3%9Fer%20&%20co".into())));
/// assert_eq!(&body[..], b"null");
/// assert_eq!(from_http(&headers, &body)?.tenant(), Some("größer & co"));
/// # Ok::<(), everbus_core::Error>(())
/// ```
pub fn to_http(event: &Event) -> Result<(Headers, Bytes)> {
    let fields = spelling::apply(event, format::write(event, CE)?)?;
    let mut headers = Headers::new();
    for (name, json) in fields.iter().filter(|(name, _)| *name != "datacontenttype") {
        let value = match serde_json::from_str::<String>(json) {
            Ok(text) => encoded(&text),
            // A null field is not set; numbers and booleans are written as in JSON.
            Err(_) if json == "null" => continue,
            Err(_) => json.to_owned(),
        };
        headers.push((format!("{PREFIX}{name}"), value));
    }
    let content_type = event.attributes().and_then(|a| a.content_type.as_deref());
    let absent = body::is_absent(event, CE);
    let left_out = spelling::mark(event, CE, "datacontenttype") == Some(spelling::ABSENT)
        && content_type.is_none_or(|kind| kind == BYTES);
    let content_type = match content_type {
        _ if left_out => None,
        None if absent => None,
        kind => Some(kind.unwrap_or(JSON)),
    };
    if let Some(kind) = content_type {
        if kind.bytes().any(|b| !matches!(b, b' '..=b'~')) {
            let what = format!("the content type {kind:?} cannot be a header");
            return Err(Error::new(Code::InvalidAttribute, what)
                .hint("a content type is printable ASCII, for example text/plain; charset=utf-8"));
        }
        headers.push((CONTENT_TYPE.to_owned(), kind.to_owned()));
    }
    let body = (!absent).then(|| event.payload().clone());
    Ok((headers, body.unwrap_or_default()))
}

/// Reads an event from headers and body: in structured mode if the content type says so, else in binary
/// mode. Headers without the prefix `ce-` belong to the transport and are not kept.
pub fn from_http(headers: &[(String, String)], body: &[u8]) -> Result<Event> {
    let content_type = content_type(headers)?;
    if let Some(kind) = &content_type {
        let essence = kind.split(';').next().unwrap_or_default().trim();
        match essence.to_ascii_lowercase().as_str() {
            "application/cloudevents" | "application/cloudevents+json" => {
                return crate::decode(body, CE);
            }
            other if other.starts_with("application/cloudevents") => {
                let what = format!("{essence:?} is a form of CloudEvents that cannot be read");
                return Err(Error::new(Code::Unsupported, what)
                    .hint("send application/cloudevents+json, one event each, or binary mode"));
            }
            _ => {}
        }
    }
    let mut fields = attributes(headers)?;
    // Without a content type the body may be anything.
    let anything = content_type.is_none() && !body.is_empty() && body::raw(body).is_none();
    let kind = content_type.as_deref().or(anything.then_some(BYTES));
    if let Some(kind) = kind {
        fields.push_text("datacontenttype", kind);
    }
    let beside = Beside::default();
    let draft = format::read(&fields, &beside)?;
    let body = match (body, &content_type) {
        (b"", _) => Body::absent(CE, kind),
        (_, Some(_)) => Body::usual(body),
        (_, None) => Body::usual(body).marked("datacontenttype", spelling::ABSENT),
    };
    crate::event(&fields, draft, body, &beside)
}

/// The `ce-` headers as the fields of a document.
fn attributes(headers: &[(String, String)]) -> Result<Fields<'static>> {
    let mut fields = Fields::new(CE);
    for (header, value) in headers {
        let header = header.to_ascii_lowercase();
        let Some(name) = header.strip_prefix(PREFIX) else {
            continue;
        };
        if matches!(name, "datacontenttype" | "data" | "data_base64") {
            return Err(fields.bad(name, "this must not be a header of its own"));
        }
        if fields.get(name).is_some() {
            return Err(fields.bad(name, "the header stands there twice"));
        }
        let text = decoded(value).map_err(|what| fields.bad(name, what))?;
        let text = quoted(&text);
        fields.push(name.to_owned(), text);
    }
    Ok(fields)
}

fn content_type(headers: &[(String, String)]) -> Result<Option<String>> {
    let mut found = headers
        .iter()
        .filter(|(name, _)| name.eq_ignore_ascii_case(CONTENT_TYPE))
        .map(|(_, value)| value.trim().to_owned());
    match (found.next(), found.next()) {
        (Some(_), Some(_)) => Err(Error::new(
            Code::InvalidAttribute,
            "cloudevents message: the header content-type stands there twice",
        )),
        (kind, _) => Ok(kind.filter(|kind| !kind.is_empty())),
    }
}

/// A header value: everything but printable ASCII, space, quote and percent as `%XX`.
fn encoded(text: &str) -> String {
    let mut value = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'!'..=b'~' if !matches!(byte, b'"' | b'%') => value.push(char::from(byte)),
            _ => value.push_str(&format!("%{byte:02X}")),
        }
    }
    value
}

/// The text of a header value: quotes removed, then `%XX` decoded once.
fn decoded(value: &str) -> Result<String, &'static str> {
    let mut plain = Vec::with_capacity(value.len());
    let mut bytes = value.trim().bytes();
    let mut inside = false;
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => inside = !inside,
            b'\\' if inside => plain.push(bytes.next().ok_or("a quote is not closed")?),
            _ => plain.push(byte),
        }
    }
    if inside {
        return Err("a quote is not closed");
    }
    let mut text = Vec::with_capacity(plain.len());
    let mut plain = plain.into_iter();
    while let Some(byte) = plain.next() {
        if byte != b'%' {
            text.push(byte);
            continue;
        }
        let mut digit = || char::from(plain.next()?).to_digit(16);
        let (Some(high), Some(low)) = (digit(), digit()) else {
            return Err("a % is followed by two hex digits");
        };
        text.extend(u8::try_from(high << 4 | low));
    }
    String::from_utf8(text).map_err(|_| "it is not UTF-8")
}
