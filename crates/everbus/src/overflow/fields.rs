//! Splits a payload: finds the values of the large fields of a JSON object without copying them, so that the object
//! is made of slices of the payload.

use std::collections::HashMap;

use bytes::{Bytes, BytesMut};
use everbus_core::{Event, OverflowPart};
use serde_json::value::RawValue;

use super::NULL;

/// The fields that move to the object.
const FIELDS: [&str; 4] = ["output", "outputs", "input", "claudeOutput"];

/// A split payload: the part that stays in the event, and the part for the object.
#[derive(Debug)]
pub(super) struct Split {
    /// The payload with `null` in place of each moved value.
    pub(super) rest: Bytes,
    /// The moved parts, and their places.
    pub(super) parts: Vec<OverflowPart>,
    /// The object: a JSON object of the moved fields, whose values are slices of the payload.
    pub(super) chunks: Vec<Bytes>,
}

impl Split {
    /// Moves the whole payload.
    pub(super) fn whole(event: &Event) -> Self {
        Self {
            rest: NULL,
            parts: Vec::new(),
            chunks: vec![event.payload().clone()],
        }
    }

    /// Splits the payload of an event, if it is a JSON object with some of these fields. Of a repeated field the
    /// last one moves.
    pub(super) fn of(event: &Event) -> Option<Self> {
        let payload = event.payload();
        // Asked first: the error for another type would quote the whole payload.
        let is_object = event.is_json() && payload.trim_ascii_start().starts_with(b"{");
        if !is_object {
            return None;
        }
        let fields: HashMap<String, &RawValue> = serde_json::from_slice(payload).ok()?;
        // A value that is not longer than `null` stays.
        let is_long = |value: &&RawValue| value.get().len() > NULL.len();
        let large = |field: &&str| fields.get(*field).is_some_and(is_long);
        let mut moved: Vec<&str> = FIELDS.into_iter().filter(large).collect();
        if moved.is_empty() {
            return None;
        }
        moved.sort_by_key(|field| fields[*field].get().as_ptr());
        let mut rest = BytesMut::new();
        let (mut parts, mut chunks) = (Vec::new(), Vec::new());
        let (mut done, mut from) = (0, 0);
        for field in moved {
            let value = payload.slice_ref(fields[field].get().as_bytes());
            let start = value.as_ptr().addr() - payload.as_ptr().addr();
            rest.extend_from_slice(&payload[done..start]);
            done = start + value.len();
            let opening = if parts.is_empty() { '{' } else { ',' };
            let name = format!("{opening}\"{field}\":");
            from += name.len();
            parts.push(OverflowPart {
                field: field.to_owned(),
                at: rest.len() as u64,
                from: from as u64,
                len: value.len() as u64,
            });
            from += value.len();
            rest.extend_from_slice(&NULL);
            chunks.extend([name.into(), value]);
        }
        rest.extend_from_slice(&payload[done..]);
        chunks.push(Bytes::from_static(b"}"));
        Some(Self {
            rest: rest.freeze(),
            parts,
            chunks,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(payload: &str) -> Option<Split> {
        let event = Event::builder("t").payload(payload.to_owned());
        Split::of(&event.build().unwrap())
    }

    fn object(split: &Split) -> String {
        let bytes: Vec<u8> = split.chunks.concat();
        String::from_utf8(bytes).unwrap()
    }

    // conformance: workflow/overflow-fields: the large fields outputs, input and claudeOutput move to the object, the others stay
    #[test]
    fn the_large_fields_move_and_the_others_stay() {
        let payload = r#" { "requestId" : "r", "outputs" : [1,{"a":"]}"}] ,"in\u0070ut":"x\"}y", "output":-1.5e3 } "#;
        let split = split(payload).unwrap();
        let rest = r#" { "requestId" : "r", "outputs" : null ,"in\u0070ut":null, "output":null } "#;
        assert_eq!(split.rest, rest);
        let moved = r#"{"outputs":[1,{"a":"]}"}],"input":"x\"}y","output":-1.5e3}"#;
        assert_eq!(object(&split), moved);
        let fields: Vec<&str> = split.parts.iter().map(|p| p.field.as_str()).collect();
        assert_eq!(fields, ["outputs", "input", "output"]);
        for part in &split.parts {
            let at = part.at as usize;
            assert_eq!(&rest[at..at + 4], "null");
        }
        let first = &split.parts[0];
        let (from, len) = (first.from as usize, first.len as usize);
        assert_eq!(&moved[from..from + len], r#"[1,{"a":"]}"}]"#);
    }

    #[test]
    fn of_repeated_fields_the_last_moves_and_short_ones_stay() {
        let twice = split(r#"{"input":"12345","input":"67890","claudeOutput":true}"#).unwrap();
        assert_eq!(
            twice.rest,
            r#"{"input":"12345","input":null,"claudeOutput":true}"#
        );
        assert_eq!(object(&twice), r#"{"input":"67890"}"#);
        for nothing in [
            "{}",
            "[]",
            "\"output\"",
            "17",
            "null",
            r#"{"Output":"12345","inputs":"12345"}"#,
            r#"{"a":{"output":"12345"}}"#,
            r#"{"output":null}"#,
        ] {
            assert!(split(nothing).is_none(), "{nothing}");
        }
        let deep = format!(r#"{{"output":{}1{}}}"#, "[".repeat(100), "]".repeat(100));
        assert_eq!(split(&deep).unwrap().rest, r#"{"output":null}"#);
    }
}
