//! The section `overflow`: when and where the large parts of events go to an object store.

use super::limits::Names;
use super::section::{Field, Reader, Section};
use crate::overflow::Overflow;

pub(super) const KEYS: &[&str] = &[
    "enabled",
    "url",
    "also_read",
    "threshold",
    "limit",
    "streams",
];

/// A reference needs some bytes itself, and SQLite stores no larger row.
const BYTES: std::ops::RangeInclusive<u64> = 1024..=512 * 1024 * 1024;

/// Reading one object may check every place.
const PLACES: usize = 16;

pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>) -> Overflow {
    let mut overflow = Overflow::default();
    if let Some(enabled) = reader.boolean(section.get("enabled")) {
        overflow.enabled = enabled;
    }
    overflow.url = url(reader, section.get("url"));
    for field in reader.list(
        section.get("also_read"),
        PLACES,
        "directories or s3://bucket/prefix",
    ) {
        overflow.also_read.extend(url(reader, Some(field)));
    }
    let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    if let Some(threshold) = reader.whole(section.get("threshold"), BYTES, "bytes") {
        overflow.threshold = bytes(threshold);
    }
    if let Some(limit) = reader.whole(section.get("limit"), BYTES, "bytes") {
        overflow.limit = bytes(limit);
    }
    let mut seen = Names::default();
    for field in reader.names(section.get("streams"), "names of streams to bytes") {
        let name = seen.add(reader, &field);
        let threshold = reader.whole(Some(field), BYTES, "bytes");
        if let (Some(name), Some(threshold)) = (name, threshold) {
            overflow.streams.insert(name, bytes(threshold));
        }
    }
    overflow
}

/// The URL of a place.
fn url(reader: &mut Reader<'_>, field: Option<Field<'_>>) -> Option<String> {
    let wanted = "a directory, or s3://bucket/prefix";
    let url = reader.text(field, wanted)?;
    let to = Overflow::to(url.value.as_str());
    match to.validate() {
        Ok(()) => to.url,
        Err(error) => {
            let what = format!("{}: {}", url.path, error.message());
            let hint = error.hint_text().unwrap_or(wanted).to_owned();
            reader.problems.add(url.place, what, hint);
            None
        }
    }
}
