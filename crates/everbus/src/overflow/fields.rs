//! Splits a payload: finds the values of the large fields of a JSON object without copying them, so that the object
//! is made of slices of the payload.

use bytes::{Bytes, BytesMut};
use everbus_core::{Event, OverflowPart};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
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

    /// Splits the payload of an event, if it is a JSON object with some of these fields.
    pub(super) fn of(event: &Event) -> Option<Self> {
        let payload = event.payload();
        // Asked first: the error for another type would quote the whole payload.
        let is_object = event.is_json() && payload.trim_ascii_start().starts_with(b"{");
        if !is_object {
            return None;
        }
        let Fields(moved) = serde_json::from_slice(payload).ok()?;
        if moved.is_empty() {
            return None;
        }
        let mut rest = BytesMut::new();
        let (mut parts, mut chunks) = (Vec::new(), Vec::new());
        let (mut done, mut from) = (0, 0);
        for (field, value) in moved {
            let value = payload.slice_ref(value.get().as_bytes());
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

/// The large fields of a JSON object, in order, repeated ones too. Values that are not longer than `null`
/// stay.
struct Fields<'a>(Vec<(&'static str, &'a RawValue)>);

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut found = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, &RawValue>()? {
                    let large = FIELDS.into_iter().find(|field| *field == key);
                    let large = large.filter(|_| value.get().len() > NULL.len());
                    found.extend(large.map(|field| (field, value)));
                }
                Ok(Fields(found))
            }
        }
        from.deserialize_map(Object)
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
    fn repeated_fields_all_move_and_short_ones_stay() {
        let twice = split(r#"{"input":"12345","input":"67890","claudeOutput":true}"#).unwrap();
        assert_eq!(
            twice.rest,
            r#"{"input":null,"input":null,"claudeOutput":true}"#
        );
        assert_eq!(object(&twice), r#"{"input":"12345","input":"67890"}"#);
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
