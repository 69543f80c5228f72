//! Detects a change of the configuration without storing any of it: a hash for each section, computed from
//! the text of the file without comments, without the values of variables and without possible secrets.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

use super::redact::redacted;
use super::yaml::{Node, Value};

/// Keys whose values are never hashed.
const SECRET: &[&str] = &[
    "password",
    "secret",
    "token",
    "credential",
    "creds",
    "key_file",
    "slack",
];

/// The fingerprint of a configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    /// The path, if it was a file.
    pub(crate) file: Option<String>,
    /// A hash for each top-level key.
    pub(crate) sections: BTreeMap<String, String>,
}

impl Fingerprint {
    pub(super) fn of(file: &str, root: &Node) -> Self {
        let Value::Map(entries) = &root.value else {
            return Self::default();
        };
        let sections = entries.iter().map(|(key, node)| {
            let mut text = String::new();
            write(&mut text, node, false);
            (key.text.clone(), hashed(&text))
        });
        Self {
            file: Some(file.to_owned()),
            sections: sections.collect(),
        }
    }

    /// One hash of the whole file.
    pub(crate) fn hash(&self) -> String {
        let mut text = String::new();
        for (name, hash) in &self.sections {
            let _ = write!(text, "{name:?}={hash};");
        }
        hashed(&text)
    }
}

/// Writes a value in a canonical form; the order of keys does not matter.
fn write(text: &mut String, node: &Node, secret: bool) {
    match &node.value {
        Value::Scalar { .. } if secret => text.push_str("***"),
        Value::Scalar { text: value, plain } => {
            let _ = write!(text, "{}{:?}", u8::from(*plain), redacted(value));
        }
        Value::List(items) => {
            text.push('[');
            for item in items {
                write(text, item, secret);
                text.push(',');
            }
            text.push(']');
        }
        Value::Map(entries) => {
            let mut entries: Vec<_> = entries.iter().collect();
            entries.sort_by(|(one, _), (other, _)| one.text.cmp(&other.text));
            text.push('{');
            for (key, value) in entries {
                let name = key.text.to_lowercase();
                let secret = secret
                    || SECRET.iter().any(|word| name.contains(word))
                    // The address of an alert; the webhook of a consumer is a mapping.
                    || (name.ends_with("webhook") && matches!(value.value, Value::Scalar { .. }));
                let _ = write!(text, "{:?}:", key.text);
                write(text, value, secret);
                text.push(',');
            }
            text.push('}');
        }
    }
}

/// The first half of a SHA-256, in hex.
fn hashed(text: &str) -> String {
    let digest = Sha256::digest(text);
    digest.iter().take(16).fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
