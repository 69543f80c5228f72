//! The section `streams`: how many events may wait in a stream, and what happens when it is full.

use std::collections::BTreeMap;
use std::time::Duration;

use everbus_core::MAX_TYPE_CHARS;

use super::section::{Field, Reader, Section};
use crate::streams::canonical;

pub(super) const KEYS: &[&str] = &["default_maxlen", "overrides", "on_full", "wait"];
pub(super) const OVERRIDE_KEYS: &[&str] = &["maxlen", "on_full", "wait"];

/// More events than this in one stream are a mistake.
const LARGEST: u64 = 1_000_000_000_000;

/// How long streams may become.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Streams {
    /// The limit of streams that have none of their own (`default_maxlen`, `on_full`, `wait`).
    pub default: StreamLimit,
    /// The limits of single streams (`overrides`) by canonical name, with what they leave out taken
    /// from the default.
    pub overrides: BTreeMap<String, StreamLimit>,
}

/// How many events may wait in a stream, and what a publish does when it is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamLimit {
    /// At most this many events are still owed to any one group; no limit if none.
    pub max_len: Option<u64>,
    /// What happens to the event that would be one too many.
    pub on_full: OnFull,
    /// How long `wait` waits for room (5 s).
    pub wait: Duration,
}

impl Default for StreamLimit {
    fn default() -> Self {
        Self {
            max_len: None,
            on_full: OnFull::Wait,
            wait: Duration::from_secs(5),
        }
    }
}

/// What a publish to a full stream does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnFull {
    /// It waits for room, and then fails with `Backpressure`.
    #[default]
    Wait,
    /// It fails with `Backpressure` at once.
    Reject,
    /// It goes through, and the oldest event that waits is given up. That is recorded and counted.
    DropOldest,
}

const ON_FULL: &[(&str, OnFull)] = &[
    ("wait", OnFull::Wait),
    ("reject", OnFull::Reject),
    ("drop_oldest", OnFull::DropOldest),
];

impl Streams {
    /// The limit of the stream an event type belongs to, however its name is written.
    pub fn limit(&self, event_type: &str) -> StreamLimit {
        let named = self.overrides.get(&canonical(event_type));
        named.copied().unwrap_or(self.default)
    }
}

pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>) -> Streams {
    let mut streams = Streams {
        default: limit(reader, section, "default_maxlen", StreamLimit::default()),
        overrides: BTreeMap::new(),
    };
    let has_default = section.get("default_maxlen").is_some();
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
        let path = field.path.clone();
        if let Some(section) = reader.section(Some(field), OVERRIDE_KEYS) {
            let limit = limit(reader, &section, "maxlen", streams.default);
            if limit.max_len.is_none() && section.get("maxlen").is_none() && !has_default {
                let what = format!("{path} has no maxlen, and there is no default_maxlen");
                let hint = "without one the stream is never full: add maxlen";
                reader.problems.add(section.place, what, hint);
            }
            streams.overrides.insert(name, limit);
        }
    }
    streams
}

fn limit(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    max_len: &str,
    default: StreamLimit,
) -> StreamLimit {
    let max_len = reader.whole(section.get(max_len), 1..=LARGEST, "events");
    StreamLimit {
        max_len: max_len.or(default.max_len),
        on_full: reader
            .choice(section.get("on_full"), ON_FULL)
            .unwrap_or(default.on_full),
        wait: reader.duration(section.get("wait")).unwrap_or(default.wait),
    }
}

/// Names of streams used as keys: each stream once, however it is written.
#[derive(Default)]
pub(super) struct Names(BTreeMap<String, usize>);

impl Names {
    /// The canonical name of a key, unless it is no name or was there before.
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
