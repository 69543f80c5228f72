//! A document as a flat list of fields, each with its JSON as text: numbers, spaces and nested values keep
//! their spelling.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use everbus_core::builder::MAX_ATTRIBUTE_BYTES;
use everbus_core::{Code, Error, Result};
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::dialect::Dialect;

/// The largest number of fields in a document. More could not be kept with the event anyway.
const MAX_FIELDS: usize = 4096;

/// The fields of one document.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    dialect: Dialect,
    entries: Vec<(Cow<'a, str>, Cow<'a, str>)>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            entries: Vec::with_capacity(16),
        }
    }

    /// Parses a JSON object. A repeated name is refused: two readers could see two documents.
    pub(crate) fn parse(document: &'a [u8], dialect: Dialect) -> Result<Self> {
        let broken = |e: &dyn fmt::Display| {
            let what = format!("the {dialect} document cannot be read: {e}");
            Error::new(Code::InvalidPayloadError, what)
                .hint("a document is one JSON object in UTF-8")
        };
        let text = std::str::from_utf8(document).map_err(|e| broken(&e))?;
        let mut json = serde_json::Deserializer::from_str(text);
        let entries = json.deserialize_map(Entries).map_err(|e| broken(&e))?;
        json.end().map_err(|e| broken(&e))?;
        Ok(Self { dialect, entries })
    }

    /// The document: one JSON object without spaces between its fields.
    pub(crate) fn render(&self) -> Vec<u8> {
        let size = self.entries.iter().map(|(n, v)| n.len() + v.len() + 4);
        let mut text = String::with_capacity(size.sum::<usize>() + 2);
        for (name, value) in &self.entries {
            text.push(if text.is_empty() { '{' } else { ',' });
            text.push_str(&quoted(name));
            text.push(':');
            text.push_str(value);
        }
        text.push_str(if text.is_empty() { "{}" } else { "}" });
        text.into_bytes()
    }

    pub(crate) fn dialect(&self) -> Dialect {
        self.dialect
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries
            .iter()
            .map(|(name, value)| (name.as_ref(), value.as_ref()))
    }

    /// The JSON of a field.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(n, _)| *n == name).map(|(_, v)| v)
    }

    /// The JSON of a field, unless it is `null`.
    pub(crate) fn some(&self, name: &str) -> Option<&str> {
        self.get(name).filter(|value| *value != "null")
    }

    /// Appends a field that is not present yet.
    pub(crate) fn push(&mut self, name: impl Into<Cow<'a, str>>, json: impl Into<Cow<'a, str>>) {
        self.entries.push((name.into(), json.into()));
    }

    /// Appends a text field that is not present yet.
    pub(crate) fn push_text(&mut self, name: impl Into<Cow<'a, str>>, text: &str) {
        self.push(name, quoted(text));
    }

    pub(crate) fn push_text_if(&mut self, name: &'static str, text: Option<&str>) {
        if let Some(text) = text {
            self.push_text(name, text);
        }
    }

    /// Replaces a field, or appends it.
    pub(crate) fn set(&mut self, name: impl Into<Cow<'a, str>>, json: impl Into<Cow<'a, str>>) {
        let name = name.into();
        match self.entries.iter_mut().find(|(n, _)| *n == name) {
            Some(entry) => entry.1 = json.into(),
            None => self.push(name, json),
        }
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.entries.retain(|(n, _)| n != name);
    }

    /// A text, if the field is present and not `null`.
    pub(crate) fn text(&self, name: &str) -> Result<Option<String>> {
        let Some(json) = self.some(name) else {
            return Ok(None);
        };
        let Ok(text) = serde_json::from_str::<String>(json) else {
            return Err(self.bad(name, "a text is expected here"));
        };
        self.check_text(name, &text)?;
        Ok(Some(text))
    }

    /// A text that is not empty; an empty one counts as missing.
    pub(crate) fn filled(&self, name: &str) -> Result<Option<String>> {
        Ok(self.text(name)?.filter(|text| !text.is_empty()))
    }

    /// A text that must be present and not empty.
    pub(crate) fn required(&self, name: &str) -> Result<String> {
        match self.text(name)? {
            Some(text) if !text.is_empty() => Ok(text),
            Some(_) => Err(self.bad(name, "it is empty")),
            None => Err(self.missing(name)),
        }
    }

    /// A whole number, not negative.
    pub(crate) fn whole(&self, name: &str) -> Result<Option<u64>> {
        let Some(json) = self.some(name) else {
            return Ok(None);
        };
        match json.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(self.bad(
                name,
                "a whole number is expected here, written without a point",
            )),
        }
    }

    /// The version of a payload; 1 if it is missing.
    pub(crate) fn version(&self, name: &str) -> Result<u32> {
        match self.whole(name)? {
            None => Ok(1),
            Some(number) => match u32::try_from(number) {
                Ok(version) if version > 0 => Ok(version),
                _ => Err(self.bad(name, "a version is a number from 1 to 4294967295")),
            },
        }
    }

    /// Refuses values that are too long for an attribute.
    pub(crate) fn check_size(&self, name: &str, value: &str) -> Result<()> {
        if value.len() <= MAX_ATTRIBUTE_BYTES {
            return Ok(());
        }
        let what = format!("it has more than {MAX_ATTRIBUTE_BYTES} bytes");
        Err(self
            .bad(name, &what)
            .hint("large values belong in the payload"))
    }

    /// Refuses texts that are not valid attributes.
    pub(crate) fn check_text(&self, name: &str, text: &str) -> Result<()> {
        self.check_size(name, text)?;
        // The native dialect accepts what the builder accepts.
        match text.chars().find(|c| c.is_control()) {
            Some(c) if self.dialect != Dialect::Native => {
                let what = format!("the control character {c:?} is not allowed here");
                Err(self.bad(name, &what))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn missing(&self, name: &str) -> Error {
        self.bad(name, "it is missing")
    }

    pub(crate) fn bad(&self, name: &str, what: &str) -> Error {
        self.error(Code::InvalidAttribute, name, what)
    }

    /// An error that names the field of the document.
    pub(crate) fn error(&self, code: Code, name: &str, what: &str) -> Error {
        let dialect = self.dialect;
        let name: String = name.chars().take(64).collect();
        Error::new(code, format!("{dialect} document, field {name:?}: {what}"))
    }
}

/// A text as JSON.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Whether two pieces of JSON certainly have the same value.
pub(crate) fn same_json(a: &str, b: &str) -> bool {
    let text = |json: &str| -> Option<String> {
        json.starts_with('"')
            .then(|| serde_json::from_str(json).ok())
            .flatten()
    };
    let object = |json: &str| -> Option<serde_json::Value> {
        json.starts_with('{')
            .then(|| serde_json::from_str(json).ok())
            .flatten()
    };
    a == b
        || matches!((text(a), text(b)), (Some(a), Some(b)) if a == b)
        || compact(a) == compact(b)
        || matches!((object(a), object(b)), (Some(a), Some(b)) if a == b)
}

/// The same JSON without spaces and line ends between its parts.
pub(crate) fn compact(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    let (mut inside, mut escaped) = (false, false);
    for c in json.chars() {
        if inside {
            inside = escaped || c != '"';
            escaped = !escaped && c == '\\';
        } else if c == '"' {
            inside = true;
        } else if matches!(c, ' ' | '\t' | '\r' | '\n') {
            continue;
        }
        text.push(c);
    }
    text
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Vec<(Cow<'de, str>, Cow<'de, str>)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let refuse = |what: String| Err(serde::de::Error::custom(what));
        let mut names = BTreeSet::new();
        let mut entries = Vec::new();
        while let Some((name, value)) = map.next_entry::<String, &'de RawValue>()? {
            if name.chars().any(char::is_control) {
                return refuse(format!(
                    "the field {name:?} has a control character in its name"
                ));
            }
            if entries.len() == MAX_FIELDS {
                return refuse(format!("there are more than {MAX_FIELDS} fields"));
            }
            if !names.insert(name.clone()) {
                return refuse(format!("the field {name:?} stands there twice"));
            }
            entries.push((Cow::Owned(name), Cow::Borrowed(value.get())));
        }
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compacting_leaves_strings_alone() {
        let json = "{ \"a b\" : [1 ,\n\t2.50e+1], \"q\\\" \\\\\" : \" x \" }";
        assert_eq!(
            compact(json),
            "{\"a b\":[1,2.50e+1],\"q\\\" \\\\\":\" x \"}"
        );
    }

    #[test]
    fn a_field_that_stands_twice_is_refused_by_name() {
        let e = Fields::parse(br#"{"id":"a","\u0069d":"b"}"#, Dialect::Omni).unwrap_err();
        assert_eq!(e.code(), Code::InvalidPayloadError);
        assert!(e.message().contains("\"id\" stands there twice"), "{e}");
    }

    #[test]
    fn an_empty_document_is_rendered_as_one() {
        assert_eq!(Fields::new(Dialect::Omni).render(), b"{}");
    }
}
