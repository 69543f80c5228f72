//! How much work it may be to say why a document does not fit.
//!
//! Whether it fits is always quick. The reasons are not: of "one of these" they tell for every
//! alternative why it was not the one, and if several alternatives lead back to the same choice, as
//! in an expression made of expressions, they multiply with every level of the document. Whoever may
//! publish could keep a processor busy for hours.

use std::collections::BTreeSet;

use serde_json::Value;

/// About as many reasons are looked at.
const MAX_REASONS: usize = 10_000;

/// How deep a document may be for its reasons to be looked for; none if that does not matter.
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

/// The most alternatives of one choice that lead back to it, in this part of the schema.
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

/// Whether the references of an alternative lead, over any number of others, to what holds `choice`.
fn leads_back(schema: &Value, alternative: &Value, choice: &str) -> bool {
    let mut targets = BTreeSet::new();
    let mut parts = vec![alternative];
    while let Some(part) = parts.pop() {
        let mut found = Vec::new();
        references(part, &mut found);
        for target in found {
            // What is no plain pointer may be anything: the whole schema is on the safe side.
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
