//! The declared streams of the section `streams`, and the names that other sections use for them.

use everbus_core::{Pattern, Result, Stream, Streams};

use super::limits;
use super::problems::Place;
use super::retention::age;
use super::section::{Field, Reader, Section};
use super::yaml::Value;

pub(super) const DECLARE_KEYS: &[&str] = &[
    "types", "max_age", "maxlen", "on_full", "wait", "dialect", "shards", "copies",
];

/// More patterns for one stream are refused as a mistake.
const MOST_PATTERNS: usize = 100;
const MOST_SHARDS: u64 = 10_000;

const PRESETS: &[(&str, ())] = &[("omni", ())];

/// The dialects of `everbus-dialects`, by name.
const DIALECTS: &[(&str, &str)] = &[
    ("native", "native"),
    ("cloudevents", "cloudevents"),
    ("omni", "omni"),
    ("workflow", "workflow"),
    ("outbox", "outbox"),
    ("framework", "framework"),
];

/// The table: the streams of the preset and the declared ones; a single stream with all types if there are
/// none. A stream that conflicts with an earlier one is a problem at its line.
pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>) -> Streams {
    let preset = reader.choice(section.get("preset"), PRESETS);
    let mut table = preset.map(|()| Streams::omni());
    let mut accepted: Vec<Stream> = table.iter().flatten().cloned().collect();
    let declare = section.get("declare");
    for field in reader.names(declare, "names of streams to what they cover") {
        let place = field.key_place;
        let path = field.path.clone();
        let Some(stream) = declared(reader, field) else {
            continue;
        };
        match Streams::new(accepted.iter().cloned().chain([stream.clone()])) {
            Ok(wider) => {
                table = Some(wider);
                accepted.push(stream);
            }
            Err(error) => refuse(reader, place, &path, &error),
        }
    }
    table.unwrap_or_default()
}

fn declared(reader: &mut Reader<'_>, field: Field<'_>) -> Option<Stream> {
    let (name, place, path) = (field.key, field.key_place, field.path.clone());
    let section = reader.section(Some(field), DECLARE_KEYS)?;
    let types = types(reader, name, &section);
    let max_age = age(reader, section.get("max_age")).flatten();
    let limit = limits::declared(reader, &section);
    let dialect = reader.choice(section.get("dialect"), DIALECTS);
    let shards = reader.whole(section.get("shards"), 1..=MOST_SHARDS, "shards");
    let copies = reader.whole(section.get("copies"), 1..=MOST_SHARDS, "copies");
    let stream = match Stream::new(name, types?) {
        Ok(stream) => stream,
        Err(error) => {
            refuse(reader, place, &path, &error);
            return None;
        }
    };
    let small = |count: Option<u64>| count.and_then(|count| u32::try_from(count).ok());
    let mut stream = stream;
    stream.max_age = max_age;
    stream.limit = limit;
    stream.dialect = dialect.map(Into::into);
    stream.shards = small(shards);
    stream.copies = small(copies);
    Some(stream)
}

/// The patterns: a list, or a single one. By default a stream that is named like a type covers that type.
fn types(reader: &mut Reader<'_>, name: &str, section: &Section<'_>) -> Option<Vec<String>> {
    let Some(field) = section.get("types") else {
        if name.contains([':', '.']) {
            return Some(vec![name.to_owned()]);
        }
        let what = format!("{} is missing", section.path_of("types"));
        let hint = "a stream needs the event types it covers: types: [order.>, cart.*]";
        reader.problems.add(section.place, what, hint);
        return None;
    };
    let items = match &field.node.value {
        Value::Scalar { .. } => vec![field],
        _ => reader.list(Some(field), MOST_PATTERNS, "patterns"),
    };
    let mut patterns = Vec::with_capacity(items.len());
    let mut whole = true;
    for item in items {
        let Some(text) = reader.text(Some(item), "a pattern such as order.>") else {
            whole = false;
            continue;
        };
        // A channel name is read as its dotted form, which is a pattern as well.
        match Stream::new("s", [&text.value]) {
            Ok(_) => patterns.push(text.value),
            Err(error) => {
                let hint = error.hint_text().unwrap_or_default().to_owned();
                reader.refuse(&text, "which is not a pattern", hint);
                whole = false;
            }
        }
    }
    whole.then_some(patterns)
}

fn refuse(reader: &mut Reader<'_>, place: Place, path: &str, error: &everbus_core::Error) {
    let what = format!("{path}: {}", error.message());
    let hint = error.hint_text().unwrap_or_default();
    reader.problems.add(place, what, hint);
}

/// The meaning of a key in another section: a declared stream, or a pattern that a declared stream covers.
pub(super) fn types_of(streams: &Streams, name: &str) -> Result<Pattern> {
    match streams.named(name).filter(|_| streams.is_declared()) {
        Some(stream) => Ok(stream.types().clone()),
        None => {
            let pattern = Pattern::new(name)?;
            streams.reaches(&pattern)?;
            Ok(pattern)
        }
    }
}
