//! Schemas in a build without the feature `schema`: none can be made.

use everbus_core::{Code, Error, Result};
use serde_json::Value;

/// A compiled JSON Schema. This build has none: see the feature `schema`.
#[derive(Clone, Debug)]
pub enum Schema {}

/// Whether `format` is checked.
#[derive(Clone, Copy)]
pub(super) enum Formats {
    AsDrafted,
    Annotated,
}

impl Schema {
    /// `Unsupported`: this build checks no schemas.
    pub fn new(name: impl Into<String>, _: &Value) -> Result<Self> {
        let what = format!(
            "the schema of {} cannot be checked in this build",
            name.into()
        );
        Err(Error::new(Code::Unsupported, what)
            .hint("build with the feature `schema` of the crate everbus"))
    }

    pub(super) fn compile(name: String, json: &Value, _: Formats) -> Result<Self> {
        Self::new(name, json)
    }

    /// The name in messages.
    pub fn name(&self) -> &str {
        match *self {}
    }

    /// The original JSON of the schema.
    pub fn json(&self) -> &Value {
        match *self {}
    }

    /// Checks a payload.
    pub fn check(&self, _: &[u8]) -> Result<()> {
        match *self {}
    }
}
