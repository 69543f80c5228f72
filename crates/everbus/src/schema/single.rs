//! One compiled schema.

use std::fmt;
use std::sync::Arc;

use everbus_core::{Code, Error, Result};
use jsonschema::Validator;
use jsonschema::error::{ValidationError, ValidationErrorKind};
use serde_json::Value;

use super::effort;
use super::violation::{self, printable};

/// A compiled JSON Schema. Cloning is cheap, and it can be used from many threads.
///
/// ```
/// use everbus::{Code, Schema};
/// use serde_json::json;
///
/// let schema = Schema::new("an order", &json!({
///     "type": "object",
///     "properties": { "total": { "type": "integer", "minimum": 0 } },
/// }))?;
/// assert!(schema.check(br#"{ "total": 5 }"#).is_ok());
/// let error = schema.check(br#"{ "total": -5 }"#).unwrap_err();
/// assert_eq!(error.code(), Code::ValidationError);
/// assert!(error.message().contains("at /total: "));
/// # Ok::<(), everbus::Error>(())
/// ```
#[derive(Clone)]
pub struct Schema(Arc<Compiled>);

struct Compiled {
    name: String,
    json: Value,
    validator: Validator,
    /// Deeper documents are refused without an explanation.
    deepest: Option<usize>,
}

/// Whether `format` is checked.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Formats {
    /// As the draft of the schema says: up to draft 7 it is checked, later it is only an annotation.
    AsDrafted,
    /// It is only an annotation.
    Annotated,
}

impl Schema {
    /// Compiles a schema; `name` is its name in messages. JSON that is not a schema, or refers to something
    /// outside itself, is [`Code::InvalidSchema`].
    pub fn new(name: impl Into<String>, json: &Value) -> Result<Self> {
        Self::compile(name.into(), json, Formats::AsDrafted)
    }

    pub(super) fn compile(name: String, json: &Value, formats: Formats) -> Result<Self> {
        let mut options = jsonschema::options().offline();
        if formats == Formats::Annotated {
            options = options.should_validate_formats(false);
        }
        let validator = options.build(json).map_err(|e| invalid(&name, &e))?;
        Ok(Self(Arc::new(Compiled {
            name,
            json: json.clone(),
            validator,
            deepest: effort::deepest(json),
        })))
    }

    /// The name in messages.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The original JSON of the schema.
    pub fn json(&self) -> &Value {
        &self.0.json
    }

    /// Checks a payload. A violation is [`Code::ValidationError`]; the message says where in the document
    /// and what is required there. It contains names but no values of the payload.
    pub fn check(&self, payload: &[u8]) -> Result<()> {
        let document: Value = serde_json::from_slice(payload).map_err(|e| {
            let what = format!("the payload of {} is not JSON: {e}", self.name());
            Error::new(Code::ValidationError, what)
        })?;
        let validator = &self.0.validator;
        // The plain check is much cheaper than the reasons, which are rarely needed.
        if validator.is_valid(&document) {
            return Ok(());
        }
        let reasons = match self.0.deepest {
            Some(deepest) if effort::depth(&document) > deepest => {
                "it is nested too deeply to say where".to_owned()
            }
            _ => violation::list(validator, &document),
        };
        let what = format!("the payload does not match {}: {reasons}", self.name());
        Err(Error::new(Code::ValidationError, what)
            .hint("correct the payload, or give the changed event a new version"))
    }
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Schema({})", self.name())
    }
}

fn invalid(name: &str, error: &ValidationError<'_>) -> Error {
    if let ValidationErrorKind::Referencing(reference) = error.kind() {
        let reference = printable(&reference.to_string());
        let what = format!("the schema of {name} refers to what it does not contain: {reference}");
        return Error::new(Code::InvalidSchema, what)
            .hint("put the referenced schemas into $defs; nothing is fetched");
    }
    let what = format!(
        "the schema of {name} is no JSON Schema: {}",
        violation::place_and_reason(error)
    );
    Error::new(Code::InvalidSchema, what)
}
