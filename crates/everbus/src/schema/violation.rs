//! Describes a schema violation in one sentence: where, and what is required there.

use jsonschema::Validator;
use jsonschema::error::{ValidationError, ValidationErrorKind};
use serde_json::Value;

/// At most this many violations are listed: a reader fixes the first ones first.
const MAX_LISTED: usize = 3;
/// Names come from the payload and enumerations from the schema; neither may flood a log.
const MAX_CHARS: usize = 200;

/// The first few violations.
pub(super) fn list(validator: &Validator, document: &Value) -> String {
    let mut text = String::new();
    for (index, error) in validator.iter_errors(document).enumerate() {
        if index == MAX_LISTED {
            text.push_str("; and more");
            break;
        }
        if index > 0 {
            text.push_str("; ");
        }
        text.push_str(&place_and_reason(&error));
    }
    text
}

/// `at /lines/0/total: value is not of type "integer"`.
pub(super) fn place_and_reason(error: &ValidationError<'_>) -> String {
    let error = innermost(error);
    let reason = printable(&error.masked().to_string());
    match error.instance_path().as_str() {
        "" => format!("at the root: {reason}"),
        pointer => format!("at {}: {reason}", printable(pointer)),
    }
}

/// "None of the alternatives fits" does not help if one alternative was clearly meant: an optional field is
/// "this or null", an enum is "one of these". Finds the mistake inside that alternative, if it can be
/// identified.
fn innermost<'e, 'a>(error: &'e ValidationError<'a>) -> &'e ValidationError<'a> {
    let (ValidationErrorKind::AnyOf { context } | ValidationErrorKind::OneOfNotValid { context }) =
        error.kind()
    else {
        return error;
    };
    let here = depth(error);
    let mut meant: Vec<(usize, &ValidationError<'static>)> = context
        .iter()
        .filter(|branch| !branch.iter().any(|e| is_another_kind(e, here)))
        .filter_map(|branch| branch.iter().map(|e| (depth(e), e)).max_by_key(|(d, _)| *d))
        .collect();
    meant.sort_by_key(|(depth, _)| std::cmp::Reverse(*depth));
    match meant.as_slice() {
        [(_, only)] => innermost(only),
        [(deepest, best), (next, _), ..] if deepest > next => innermost(best),
        _ => error,
    }
}

/// Whether the alternative was not meant at all: the value has another type, or another tag.
fn is_another_kind(error: &ValidationError<'_>, here: usize) -> bool {
    match error.kind() {
        ValidationErrorKind::Type { .. } => depth(error) == here,
        ValidationErrorKind::Constant { .. } | ValidationErrorKind::Enum { .. } => {
            depth(error) <= here + 1
        }
        _ => false,
    }
}

fn depth(error: &ValidationError<'_>) -> usize {
    let pointer = error.instance_path().as_str();
    pointer.bytes().filter(|byte| *byte == b'/').count()
}

/// Cut to a limited length, with escapes for characters that act on a terminal or hide text.
pub(super) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len().min(MAX_CHARS));
    for (index, c) in text.chars().enumerate() {
        if index == MAX_CHARS {
            shown.push('…');
            break;
        }
        match c {
            '"' | '\'' | '\\' => shown.push(c),
            _ => shown.extend(c.escape_debug()),
        }
    }
    shown
}
