//! Embeds a JSON Schema in a larger document and adjusts its references.
//!
//! AsyncAPI's own schemas use draft 7. A schema without newer keywords is embedded as draft 7; others keep
//! their draft, which is named beside them.

use serde_json::{Map, Value, json};

/// Keywords with schemas by name.
const NAMED: [&str; 6] = [
    "properties",
    "patternProperties",
    "definitions",
    "$defs",
    "dependentSchemas",
    "dependencies",
];
/// Keywords that contain data, in which nothing is a reference.
const DATA: [&str; 5] = ["enum", "const", "default", "examples", "example"];
/// Keywords that draft 7 does not have, or defines differently.
const NEWER: [&str; 10] = [
    "prefixItems",
    "unevaluatedItems",
    "unevaluatedProperties",
    "dependentRequired",
    "dependentSchemas",
    "minContains",
    "maxContains",
    "$anchor",
    "$dynamicRef",
    "$recursiveRef",
];
/// Keywords that mean the same beside a `$ref` in every draft; draft 7 ignores all others there.
const BESIDE_REF: [&str; 8] = [
    "$ref",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "$comment",
];

/// The schema as embedded at `at`, a reference such as `#/components/schemas/order`.
///
/// References by pointer are adjusted. References by anchor are left alone.
pub(super) fn embed(schema: &Value, at: &str) -> Value {
    let Value::Object(schema) = schema else {
        return match schema {
            Value::Bool(false) => json!({ "not": {} }),
            _ => json!({}),
        };
    };
    let mut schema = schema.clone();
    let declared = schema.remove("$schema");
    let id = schema.remove("$id");
    let draft = draft(declared.as_ref().and_then(Value::as_str), &schema);
    let place = Place {
        root: match draft {
            Some(_) => format!("{at}/schema"),
            None => at.to_owned(),
        },
        id: id.as_ref().and_then(Value::as_str).unwrap_or_default(),
    };
    place.walk_object(&mut schema);
    match draft {
        Some(draft) => json!({
            "schemaFormat": format!("application/schema+json;version={draft}"),
            "schema": schema,
        }),
        None => schema.into(),
    }
}

/// The draft to name; `None` if the schema means the same in draft 7.
fn draft(declared: Option<&str>, schema: &Map<String, Value>) -> Option<&'static str> {
    let declared = declared.unwrap_or("2020-12");
    let newer = |name| says_newer(schema).then_some(name);
    match declared {
        uri if uri.contains("draft-07") => None,
        uri if uri.contains("draft-06") => Some("draft-06"),
        uri if uri.contains("draft-04") => Some("draft-04"),
        uri if uri.contains("2019-09") => newer("draft-2019-09"),
        _ => newer("draft-2020-12"),
    }
}

fn says_newer(schema: &Map<String, Value>) -> bool {
    let refers = schema.contains_key("$ref");
    schema.keys().any(|name| {
        NEWER.contains(&name.as_str()) || (refers && !BESIDE_REF.contains(&name.as_str()))
    }) || inner(schema).any(says_newer)
}

/// The schemas directly inside a schema.
fn inner(schema: &Map<String, Value>) -> impl Iterator<Item = &Map<String, Value>> {
    schema
        .iter()
        .filter(|(name, _)| !DATA.contains(&name.as_str()))
        .flat_map(|(name, value)| match value {
            Value::Array(items) => items.iter().collect::<Vec<_>>(),
            Value::Object(named) if NAMED.contains(&name.as_str()) => named.values().collect(),
            other => vec![other],
        })
        .filter_map(Value::as_object)
}

/// The place of an embedded schema.
struct Place<'a> {
    root: String,
    id: &'a str,
}

impl Place<'_> {
    fn walk(&self, schema: &mut Value) {
        match schema {
            Value::Object(schema) => self.walk_object(schema),
            Value::Array(schemas) => schemas.iter_mut().for_each(|schema| self.walk(schema)),
            _ => {}
        }
    }

    fn walk_object(&self, schema: &mut Map<String, Value>) {
        for (name, value) in schema {
            match value {
                Value::String(target) if name == "$ref" => self.lead_here(target),
                _ if DATA.contains(&name.as_str()) => {}
                Value::Object(named) if NAMED.contains(&name.as_str()) => {
                    named.values_mut().for_each(|schema| self.walk(schema));
                }
                _ => self.walk(value),
            }
        }
    }

    fn lead_here(&self, target: &mut String) {
        let own = target.strip_prefix(self.id).unwrap_or(target);
        if own == "#" || own.starts_with("#/") {
            *target = format!("{}{}", self.root, &own[1..]);
        }
    }
}
