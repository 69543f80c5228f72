//! The limits in the section `streams`: how many events may be pending in a stream, and what happens when
//! it is full.

use std::collections::BTreeMap;
use std::time::Duration;

use everbus_core::{MAX_TYPE_CHARS, OnFull, StreamLimit, Streams};

use super::section::{Field, Reader, Section};
use crate::admission::Limits;
use crate::streams::canonical;

pub(super) const KEYS: &[&str] = &[
    "preset",
    "declare",
    "default_maxlen",
    "overrides",
    "on_full",
    "wait",
];
pub(super) const OVERRIDE_KEYS: &[&str] = &["maxlen", "on_full", "wait"];

/// A larger limit is refused as a mistake.
const LARGEST: u64 = 1_000_000_000_000;

const ON_FULL: &[(&str, OnFull)] = &[
    ("wait", OnFull::Wait),
    ("reject", OnFull::Reject),
    ("drop_oldest", OnFull::DropOldest),
];

/// The settings of a limit; the number may come from the default.
#[derive(Clone, Copy)]
struct Said {
    max_len: Option<u64>,
    on_full: OnFull,
    wait: Option<Duration>,
}

impl Said {
    fn limit(self) -> Option<StreamLimit> {
        let limit = StreamLimit::new(self.max_len?).on_full(self.on_full);
        Some(self.wait.map_or(limit, |wait| limit.wait(wait)))
    }
}

const NOTHING: Said = Said {
    max_len: None,
    on_full: OnFull::Wait,
    wait: None,
};

/// The limit of a declared stream, if it has one.
pub(super) fn declared(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<StreamLimit> {
    let limit = said(reader, section, "maxlen", NOTHING).limit();
    let unused = ["on_full", "wait"].iter().find_map(|key| section.get(key));
    if let Some(field) = unused.filter(|_| section.get("maxlen").is_none()) {
        let what = format!("{} without a maxlen", field.path);
        let hint = "without one the stream is never full: add maxlen";
        reader.problems.add(field.key_place, what, hint);
    }
    limit
}

/// The names in the result are canonical; with declared streams they are among those.
pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>, streams: &Streams) -> Limits {
    let default = said(reader, section, "default_maxlen", NOTHING);
    let has_default = section.get("default_maxlen").is_some();
    let mut limits = Limits::new();
    limits.default = default.limit();
    let overrides = section.get("overrides");
    let mut seen = Names::default();
    for field in reader.names(overrides, "names of streams to their limits") {
        let Some(name) = seen.add(reader, &field) else {
            continue;
        };
        if field.node.is_null() {
            let hint = "write maxlen under it, or leave it out";
            let what = format!("{} says nothing", field.path);
            reader.problems.add(field.key_place, what, hint);
            continue;
        }
        if streams.is_declared() && streams.named(&name).is_none() {
            let error = streams.select(&name).err();
            let hint = error.as_ref().and_then(|e| e.hint_text());
            let what = format!("{} is no declared stream", field.path);
            reader
                .problems
                .add(field.key_place, what, hint.unwrap_or_default());
            continue;
        }
        let own = streams.named(&name).filter(|_| streams.is_declared());
        if name.starts_with("system.") || own.is_some_and(|s| s.covers("system.dead_letter")) {
            let what = format!("{} is of the system's own events", field.path);
            let hint = "they are never limited: remove it";
            reader.problems.add(field.key_place, what, hint);
        }
        let path = field.path.clone();
        let Some(section) = reader.section(Some(field), OVERRIDE_KEYS) else {
            continue;
        };
        match said(reader, &section, "maxlen", default).limit() {
            Some(limit) => limits = limits.stream(name, limit),
            // An invalid value was reported already.
            None if has_default || section.get("maxlen").is_some() => {}
            None => {
                let what = format!("{path} has no maxlen, and there is no default_maxlen");
                let hint = "without one the stream is never full: add maxlen";
                reader.problems.add(section.place, what, hint);
            }
        }
    }
    limits
}

fn said(reader: &mut Reader<'_>, section: &Section<'_>, max_len: &str, default: Said) -> Said {
    let max_len = reader.whole(section.get(max_len), 1..=LARGEST, "events");
    let on_full = reader.choice(section.get("on_full"), ON_FULL);
    let wait = reader.duration(section.get("wait"));
    Said {
        max_len: max_len.or(default.max_len),
        on_full: on_full.unwrap_or(default.on_full),
        wait: wait.or(default.wait),
    }
}

/// Stream names used as keys: each stream once, in any spelling.
#[derive(Default)]
pub(super) struct Names(BTreeMap<String, usize>);

impl Names {
    /// The canonical name of a key, unless it is invalid or a duplicate.
    pub(super) fn add(&mut self, reader: &mut Reader<'_>, field: &Field<'_>) -> Option<String> {
        if let Err((what, hint)) = check_name(field.key) {
            let what = format!("{}: {what}", field.path);
            reader.problems.add(field.key_place, what, hint);
            return None;
        }
        let name = canonical(field.key);
        match self.0.get(&name) {
            Some(line) => {
                let what = format!("{} is the stream that line {line} names too", field.path);
                let hint = "`domain:event-type` and `domain.event.type` name the same stream: \
                            remove one of them";
                reader.problems.add(field.key_place, what, hint);
                None
            }
            None => {
                self.0.insert(name.clone(), field.key_place.line);
                Some(name)
            }
        }
    }
}

/// Whether this can be the name of one stream.
fn check_name(name: &str) -> Result<(), (&'static str, &'static str)> {
    let hint =
        "a stream is named like the events in it: orders:order-placed or orders.order.placed";
    if name.is_empty() {
        return Err(("the name is empty", hint));
    }
    if name.chars().count() > MAX_TYPE_CHARS {
        return Err(("the name has more than 255 characters", hint));
    }
    if name.chars().any(char::is_control) {
        return Err(("the name has a control character", hint));
    }
    if name.contains(['*', '>']) {
        return Err(("a limit belongs to one stream, and this is a pattern", hint));
    }
    Ok(())
}
