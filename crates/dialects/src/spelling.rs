//! The original spelling of a document, if it cannot be derived from the event.
//!
//! Reading a document and writing it again must give the same document. What the event itself cannot
//! represent is kept in its metadata, under `{dialect}:{field}`: the JSON of an unknown field or of a field
//! that would be written differently; the mark [`ABSENT`] for a field that would be written but was
//! missing.

use everbus_core::{Code, Error, Event, Result};
use serde::de::IgnoredAny;

use crate::Beside;
use crate::body::Place;
use crate::dialect::Dialect;
use crate::fields::{Fields, compact, same_json};
use crate::format;

/// The mark of a field that is not in the document.
pub(crate) const ABSENT: &str = "";

/// The metadata key that keeps the spelling of a field.
pub(crate) fn key(dialect: Dialect, field: &str) -> String {
    format!("{dialect}:{field}")
}

/// The field that a metadata key keeps the spelling of.
pub(crate) fn field(dialect: Dialect, key: &str) -> Option<&str> {
    key.strip_prefix(dialect.as_str())?.strip_prefix(':')
}

/// The mark of a field in the metadata.
pub(crate) fn mark<'a>(event: &'a Event, dialect: Dialect, field: &str) -> Option<&'a str> {
    event
        .metadata()
        .get(&key(dialect, field))
        .map(String::as_str)
}

/// The marks that turn `usual` into `document` again.
pub(crate) fn difference(
    document: &Fields<'_>,
    usual: &Fields<'_>,
) -> Result<Vec<(String, String)>> {
    let dialect = document.dialect();
    let place = Place::of(dialect);
    let mut kept = Vec::new();
    for (name, json) in document.iter() {
        let written = usual.get(name).is_some_and(|usual| same_json(usual, json));
        if written || place.holds(name, json) {
            continue;
        }
        let (key, json) = (key(dialect, name), compact(json));
        document.check_size(name, &key)?;
        document.check_size(name, &json)?;
        kept.push((key, json));
    }
    for (name, _) in usual
        .iter()
        .filter(|(name, _)| document.get(name).is_none())
    {
        kept.push((key(dialect, name), ABSENT.to_owned()));
    }
    Ok(kept)
}

/// The document in its original spelling. A spelling that contradicts the event is left out: for example, a
/// copy has its own time.
pub(crate) fn apply<'a>(event: &'a Event, usual: Fields<'a>) -> Result<Fields<'a>> {
    let dialect = usual.dialect();
    let place = Place::of(dialect);
    let mut kept = Vec::new();
    for (key, json) in event.metadata() {
        let Some(name) = field(dialect, key).filter(|name| !place.holds(name, json)) else {
            continue;
        };
        if json != ABSENT && serde_json::from_str::<IgnoredAny>(json).is_err() {
            let what = format!("the metadata {key:?} is not JSON, so it cannot be a field");
            return Err(Error::new(Code::InvalidAttribute, what).hint(format!(
                "metadata beginning with {dialect}: is reserved for such fields"
            )));
        }
        kept.push((name, json.as_str()));
    }
    // The written document must be readable again.
    let beside = Beside {
        event_type: Some(event.event_type()),
        ..Beside::default()
    };
    let meant = format::read(&usual, &beside)?;
    if kept.is_empty() {
        return Ok(usual);
    }
    let agrees = |fields: &Fields<'_>| match format::read(fields, &beside) {
        Ok(mut draft) => {
            // A document without a time got the current one.
            draft.occurred_at = draft.occurred_at.or(meant.occurred_at);
            draft == meant
        }
        Err(_) => false,
    };
    let all = patched(usual.clone(), &kept);
    if agrees(&all) {
        return Ok(all);
    }
    let still = |spelling: &&(&'a str, &'a str)| agrees(&patched(usual.clone(), &[**spelling]));
    let kept: Vec<_> = kept.iter().filter(still).copied().collect();
    let some = patched(usual.clone(), &kept);
    Ok(if agrees(&some) { some } else { usual })
}

fn patched<'a>(mut fields: Fields<'a>, kept: &[(&'a str, &'a str)]) -> Fields<'a> {
    // Metadata names are unique, so only the usual fields need a search.
    let usual: Vec<String> = fields.iter().map(|(name, _)| name.to_owned()).collect();
    for (name, json) in kept {
        match (usual.iter().any(|usual| usual == name), *json) {
            (_, ABSENT) => fields.remove(name),
            (true, json) => fields.set(*name, json),
            (false, json) => fields.push(*name, json),
        }
    }
    fields
}
