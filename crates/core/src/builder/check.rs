//! The checks of an event: its type, its payload, its attributes.

use serde::de::IgnoredAny;

use crate::error::{Code, Error, Result};
use crate::event::Attributes;

/// A type has at most this many characters.
pub const MAX_TYPE_CHARS: usize = 255;
/// Every single attribute (source, key, a metadata value …) has at most this many bytes.
pub const MAX_ATTRIBUTE_BYTES: usize = 16 * 1024;
/// All attributes of one event together have at most this many bytes.
pub const MAX_ATTRIBUTES_BYTES: usize = 256 * 1024;

/// Checks a type: 1–255 printable characters without `*` and `>`.
pub fn validate_type(name: &str) -> Result<()> {
    let bad = |what: String| {
        Err(Error::new(Code::InvalidType, what).hint(
            "a type is 1 to 255 printable characters without * and >, for example order.placed",
        ))
    };
    if name.is_empty() {
        return bad("the event type is empty".into());
    }
    // The number of bytes is at least the number of characters, so the common case needs no counting.
    if name.len() > MAX_TYPE_CHARS && name.chars().count() > MAX_TYPE_CHARS {
        return bad(format!(
            "the event type has more than {MAX_TYPE_CHARS} characters"
        ));
    }
    match name
        .chars()
        .find(|c| matches!(c, '*' | '>') || is_unprintable(*c))
    {
        Some(c) => bad(format!("the event type {name:?} contains {c:?}")),
        None => Ok(()),
    }
}

/// Control characters, line and paragraph separators, and the invisible characters that reorder or
/// hide text.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

pub(super) fn validate_json(payload: &[u8]) -> Result<()> {
    serde_json::from_slice::<IgnoredAny>(payload)
        .map(drop)
        .map_err(|e| {
            Error::new(
                Code::InvalidPayloadError,
                format!("the payload is not JSON: {e}"),
            )
            .hint("quote strings, or set a content type for payloads that are not JSON")
        })
}

pub(super) fn validate_attributes(attributes: &Attributes) -> Result<()> {
    if attributes.overflow.is_some() {
        return Err(Error::new(
            Code::InvalidAttribute,
            "a publisher cannot set where a payload overflows to",
        )
        .hint("publish the whole payload; the bus moves what is too large"));
    }
    let mut total = 0;
    for (name, value) in attributes.texts() {
        total += value.len();
        if value.len() > MAX_ATTRIBUTE_BYTES || total > MAX_ATTRIBUTES_BYTES {
            let what = format!("{name} makes the attributes of the event too long");
            return Err(Error::new(Code::InvalidAttribute, what).hint(format!(
                "one attribute may have {MAX_ATTRIBUTE_BYTES} bytes, all together \
                 {MAX_ATTRIBUTES_BYTES}; put large values into the payload"
            )));
        }
        // The address of the unnamed group is empty.
        let may_be_empty = ["address", "entity", "traceparent", "tracestate", "metadata"];
        if value.is_empty() && !may_be_empty.contains(&name) {
            let what = format!("{name} is empty");
            return Err(Error::new(Code::InvalidAttribute, what).hint("leave it out instead"));
        }
    }
    Ok(())
}
