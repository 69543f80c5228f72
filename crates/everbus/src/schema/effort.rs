//! Limits the work of explaining why a document does not match its schema.
//!
//! The check itself is always quick. The explanation is not: for `oneOf` and `anyOf` it says for every
//! alternative why it did not match. If several alternatives refer back to the same choice, as in an
//! expression made of expressions, the number of reasons multiplies with every level of the document. A
//! publisher could keep a processor busy for hours.

use std::collections::BTreeSet;

use serde_json::Value;

/// About this many reasons are examined at most.
const MAX_REASONS: usize = 10_000;

/// The largest depth of a document whose violations are explained; `None` if depth does not matter.
pub(super) fn deepest(schema: &Value) -> Option<usize> {
    let widest = widest_choice(schema, schema, "");
    let levels = |widest| usize::try_from(MAX_REASONS.ilog(widest)).unwrap_or(usize::MAX);
    (widest > 1).then(|| levels(widest))
}

/// How many levels a document has.
pub(super) fn depth(document: &Value) -> usize {
    let inside = match document {
        Value::Array(items) => items.iter().map(depth).max(),
        Value::Object(fields) => fields.values().map(depth).max(),
        _ => return 0,
    };
    1 + inside.unwrap_or(0)
}

/// The largest number of alternatives of one choice that refer back to it, in this part of the schema.
fn widest_choice(schema: &Value, part: &Value, pointer: &str) -> usize {
    match part {
        Value::Array(items) => items
            .iter()
            .enumerate()
            .map(|(index, item)| widest_choice(schema, item, &format!("{pointer}/{index}")))
            .max()
            .unwrap_or(0),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| {
                let step = name.replace('~', "~0").replace('/', "~1");
                let inside = widest_choice(schema, value, &format!("{pointer}/{step}"));
                match (name.as_str(), value) {
                    ("anyOf" | "oneOf", Value::Array(alternatives)) => {
                        let back = |part: &&Value| leads_back(schema, part, pointer);
                        inside.max(alternatives.iter().filter(back).count())
                    }
                    _ => inside,
                }
            })
            .max()
            .unwrap_or(0),
        _ => 0,
    }
}

/// Whether the references of an alternative lead, directly or indirectly, back to `choice`.
fn leads_back(schema: &Value, alternative: &Value, choice: &str) -> bool {
    let mut targets = BTreeSet::new();
    let mut parts = vec![alternative];
    while let Some(part) = parts.pop() {
        let mut found = Vec::new();
        references(part, &mut found);
        for target in found {
            // A reference that is no plain pointer may mean anything: the whole schema is the safe
            // assumption.
            let pointer = target.strip_prefix('#').unwrap_or_default();
            let (pointer, part) = match schema.pointer(pointer) {
                Some(part) => (pointer, part),
                None => ("", schema),
            };
            if targets.insert(pointer) {
                parts.push(part);
            }
        }
    }
    targets.iter().any(|target| {
        let rest = choice.strip_prefix(target);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    })
}

fn references<'a>(part: &'a Value, found: &mut Vec<&'a str>) {
    match part {
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        Value::Object(fields) => {
            for (name, value) in fields {
                match (name.as_str(), value) {
                    ("$ref" | "$dynamicRef" | "$recursiveRef", Value::String(target)) => {
                        found.push(target);
                    }
                    _ => references(value, found),
                }
            }
        }
        _ => {}
    }
}
