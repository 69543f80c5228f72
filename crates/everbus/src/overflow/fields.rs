//! Splits a payload: finds the values of the large fields of a JSON object without parsing their content,
//! so that both parts are slices of the same bytes.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use everbus_core::{Event, OverflowPart};

/// The fields that move to the object.
const FIELDS: [&str; 4] = ["output", "outputs", "input", "claudeOutput"];
/// Replaces a value that moved. Values that are not longer stay.
const NULL: &[u8] = b"null";

/// A split payload: the part that stays in the event, and the part for the object.
#[derive(Debug)]
pub(super) struct Split {
    /// The payload with `null` in place of each moved value.
    pub(super) rest: Bytes,
    /// The moved parts, and their places.
    pub(super) parts: Vec<OverflowPart>,
    /// The object: a JSON object of the moved fields, as slices of the payload.
    pub(super) chunks: Vec<Bytes>,
}

impl Split {
    /// Splits the payload of an event, if it is a JSON object with some of these fields.
    pub(super) fn of(event: &Event) -> Option<Self> {
        let payload = event.payload();
        let moved = event.is_json().then(|| large_fields(payload)).flatten()?;
        if moved.is_empty() {
            return None;
        }
        let mut split = Split {
            rest: Bytes::new(),
            parts: Vec::with_capacity(moved.len()),
            chunks: Vec::with_capacity(moved.len() * 4 + 1),
        };
        let kept: usize = moved.iter().map(|m| m.value.len() - NULL.len()).sum();
        let mut rest = BytesMut::with_capacity(payload.len() - kept);
        let (mut done, mut from) = (0, 0);
        for field in moved {
            rest.extend_from_slice(&payload[done..field.value.start]);
            let opening = if split.parts.is_empty() { "{" } else { "," };
            let key = payload.slice(field.key);
            from += opening.len() + key.len() + 1;
            let len = field.value.len();
            split.parts.push(OverflowPart {
                field: field.name,
                at: rest.len() as u64,
                from: from as u64,
                len: len as u64,
            });
            from += len;
            rest.extend_from_slice(NULL);
            done = field.value.end;
            let opening = Bytes::from_static(opening.as_bytes());
            let colon = Bytes::from_static(b":");
            let value = payload.slice(field.value);
            split.chunks.extend([opening, key, colon, value]);
        }
        rest.extend_from_slice(&payload[done..]);
        split.chunks.push(Bytes::from_static(b"}"));
        split.rest = rest.freeze();
        Some(split)
    }
}

/// A field that moves: its key with the quotes, and its value.
struct Field {
    name: String,
    key: Range<usize>,
    value: Range<usize>,
}

/// The large fields of a JSON object, in order, repeated ones too; `None` if it is not a JSON object.
fn large_fields(json: &[u8]) -> Option<Vec<Field>> {
    let mut scan = Scan { json, at: 0 };
    let mut found = Vec::new();
    scan.space();
    scan.expect(b'{')?;
    scan.space();
    if scan.peek()? == b'}' {
        return Some(found);
    }
    loop {
        scan.space();
        let key = scan.string()?;
        scan.space();
        scan.expect(b':')?;
        scan.space();
        let value = scan.value()?;
        if value.len() > NULL.len()
            && let Some(name) = large(&json[key.clone()])
        {
            let name = name.to_owned();
            found.push(Field { name, key, value });
        }
        scan.space();
        match scan.next()? {
            b',' => {}
            b'}' => break,
            _ => return None,
        }
    }
    scan.space();
    (scan.at == json.len()).then_some(found)
}

/// Which of the fields this key is; escapes in the key are resolved.
fn large(key: &[u8]) -> Option<&'static str> {
    let name = |text: &[u8]| FIELDS.into_iter().find(|field| field.as_bytes() == text);
    if key.contains(&b'\\') {
        let unescaped: String = serde_json::from_slice(key).ok()?;
        return name(unescaped.as_bytes());
    }
    name(key.get(1..key.len() - 1)?)
}

/// Scans JSON that was checked when the event was built. Invalid JSON ends the scan.
struct Scan<'a> {
    json: &'a [u8],
    at: usize,
}

impl Scan<'_> {
    fn peek(&self) -> Option<u8> {
        self.json.get(self.at).copied()
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        (self.next()? == byte).then_some(())
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    /// A string with its quotes.
    fn string(&mut self) -> Option<Range<usize>> {
        let start = self.at;
        self.expect(b'"')?;
        loop {
            match self.next()? {
                b'\\' => self.at += 1,
                b'"' => return Some(start..self.at),
                _ => {}
            }
        }
    }

    /// A value of any kind. Depth is counted without recursion, so the stack cannot overflow.
    fn value(&mut self) -> Option<Range<usize>> {
        let start = self.at;
        match self.peek()? {
            b'"' => {
                self.string()?;
            }
            b'{' | b'[' => {
                let mut depth = 0usize;
                loop {
                    match self.peek()? {
                        b'"' => {
                            self.string()?;
                            continue;
                        }
                        b'{' | b'[' => depth += 1,
                        b'}' | b']' => depth -= 1,
                        _ => {}
                    }
                    self.at += 1;
                    if depth == 0 {
                        break;
                    }
                }
            }
            _ => {
                while let Some(byte) = self.peek() {
                    if matches!(byte, b',' | b'}' | b']' | b' ' | b'\t' | b'\n' | b'\r') {
                        break;
                    }
                    self.at += 1;
                }
                if self.at == start {
                    return None;
                }
            }
        }
        Some(start..self.at)
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
        let moved = r#"{"outputs":[1,{"a":"]}"}],"in\u0070ut":"x\"}y","output":-1.5e3}"#;
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

    #[test]
    fn what_is_not_json_after_all_is_not_split() {
        for bad in [
            r#"{"output":"#,
            r#"{"output":"12345"#,
            r#"{"output":[1,2"#,
            r#"{"output":}"#,
            r#"{"output":"12345"}x"#,
            r#"{"output":"12345\"#,
            r#"{"output""12345"}"#,
            r#"{"output":]]]]]}"#,
            r#"{output:"12345"}"#,
            "{",
            "",
        ] {
            assert!(
                large_fields(bad.as_bytes()).is_none_or(|found| found.is_empty()),
                "{bad}"
            );
        }
    }
}
