//! The section `retention`: what is kept, and for how long.

use std::time::Duration;

use everbus_core::{Code, Retention, StreamAge, Streams};

use super::duration::{self, AGES};
use super::section::{Field, Reader, Section};
use super::streams::types_of;

pub(super) const KEYS: &[&str] = &[
    "preset",
    "max_age",
    "max_len",
    "streams",
    "payloads",
    "dead_letters",
    "audit",
    "outbox",
];

#[derive(Clone, Copy)]
enum Preset {
    Standard,
    Omni,
    None,
}

const PRESETS: &[(&str, Preset)] = &[
    ("standard", Preset::Standard),
    ("omni", Preset::Omni),
    ("none", Preset::None),
];

/// The ages of a preset, with the ages of the file over them.
pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>, table: &Streams) -> Retention {
    let preset = reader.choice(section.get("preset"), PRESETS);
    let mut retention = match preset.unwrap_or(Preset::Standard) {
        Preset::Standard => Retention::standard(),
        Preset::Omni => Retention::omni(),
        Preset::None => Retention::default(),
    };
    let mut said = |key: &str, place: &mut Option<Duration>| {
        if let Some(age) = age(reader, section.get(key)) {
            *place = age;
        }
    };
    said("max_age", &mut retention.max_age);
    said("payloads", &mut retention.payloads);
    said("dead_letters", &mut retention.dead_letters);
    said("audit", &mut retention.audit);
    said("outbox", &mut retention.outbox);
    let most = reader.whole(section.get("max_len"), 1..=u64::MAX >> 1, "events");
    retention.max_len = most.or(retention.max_len);
    let mut streams = Vec::new();
    for field in reader.names(section.get("streams"), "patterns of event types to ages") {
        let types = match types_of(table, field.key) {
            Ok(types) => types,
            Err(error) => {
                let what = format!("{}: {}", field.path, error.message());
                let hint = match error.code() {
                    Code::NoStream => error.hint_text().unwrap_or_default(),
                    _ => "write patterns as subscriptions have them: message.>, order.placed",
                };
                reader.problems.add(field.key_place, what, hint);
                continue;
            }
        };
        if let Some(max_age) = age(reader, Some(field)) {
            streams.push(StreamAge { types, max_age });
        }
    }
    // The ages of the file come first; the first match counts.
    streams.append(&mut retention.streams);
    retention.streams = streams;
    retention
}

/// An age, or `never`, which is `Some(None)`.
pub(super) fn age(reader: &mut Reader<'_>, field: Option<Field<'_>>) -> Option<Option<Duration>> {
    let text = reader.text(field, "an age such as 30d, or never")?;
    if text.value.trim() == "never" {
        return Some(None);
    }
    match duration::parse_age(text.value.trim()) {
        Ok(age) => Some(Some(age)),
        Err((what, _)) => {
            reader.refuse(&text, what, AGES);
            None
        }
    }
}
