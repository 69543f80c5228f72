//! What the tests share.

use everbus_core::{Code, Event};
use everbus_dialects::{Beside, Dialect, decode, decode_beside, encode};
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::BTreeMap;

pub(crate) fn value(document: &[u8]) -> Value {
    serde_json::from_slice(document).unwrap()
}

/// JSON whose numbers are the digits that were written, however large.
#[derive(Debug, PartialEq)]
pub(crate) enum Exact {
    Text(String),
    Other(String),
    List(Vec<Exact>),
    Object(BTreeMap<String, Exact>),
}

pub(crate) fn exact(json: &[u8]) -> Exact {
    let raw: &RawValue = serde_json::from_slice(json).unwrap();
    let json = raw.get();
    let inner = |raw: &RawValue| exact(raw.get().as_bytes());
    match json.as_bytes()[0] {
        b'"' => Exact::Text(serde_json::from_str(json).unwrap()),
        b'[' => {
            let list: Vec<&RawValue> = serde_json::from_str(json).unwrap();
            Exact::List(list.into_iter().map(inner).collect())
        }
        b'{' => {
            let fields: BTreeMap<String, &RawValue> = serde_json::from_str(json).unwrap();
            Exact::Object(
                fields
                    .into_iter()
                    .map(|(name, raw)| (name, inner(raw)))
                    .collect(),
            )
        }
        _ => Exact::Other(json.to_owned()),
    }
}

/// Reads a document, asserts that it is written again with the same value, and gives the event.
#[track_caller]
pub(crate) fn round(document: &str, dialect: Dialect) -> Event {
    round_beside(document, dialect, &Beside::default())
}

#[track_caller]
pub(crate) fn round_beside(document: &str, dialect: Dialect, beside: &Beside<'_>) -> Event {
    let event = decode_beside(document.as_bytes(), dialect, beside).unwrap();
    let again = encode(&event, dialect).unwrap();
    assert_eq!(exact(&again), exact(document.as_bytes()));
    event
}

/// The document with one field set, or taken out.
pub(crate) fn with(document: &str, field: &str, json: Option<&str>) -> String {
    let mut value: Value = serde_json::from_str(document).unwrap();
    let fields = value.as_object_mut().unwrap();
    match json {
        Some(json) => {
            let json = serde_json::from_str(json).unwrap();
            fields.insert(field.to_owned(), json);
        }
        None => {
            fields.remove(field).expect("the field is there");
        }
    }
    value.to_string()
}

/// Asserts that a document is refused with this code, and that the message names this place.
#[track_caller]
pub(crate) fn refused(document: &str, dialect: Dialect, code: Code, place: &str) {
    let e = decode(document.as_bytes(), dialect).expect_err(document);
    assert_eq!(e.code(), code, "{e}: {document}");
    assert!(e.message().contains(place), "{e} does not name {place}");
    assert!(e.message().contains(dialect.as_str()), "{e}");
}
