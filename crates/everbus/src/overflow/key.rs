//! The keys of objects: `events/{entity id}/{event id}-payload.json`.
//!
//! Any entity id becomes one segment of letters, digits, `-`, `_` and dots; all other bytes are
//! percent-encoded, so an id cannot leave its folder. Events without an entity use the folder `~`, which no
//! id is encoded to. In a place that belongs to another log, the name includes the log that made it:
//! `{event id}-{log}-payload.json`.

use everbus_core::{Event, EventId};

/// A file name has at most 255 bytes on most file systems, and an S3 key at most 1024.
const LONGEST_SEGMENT: usize = 180;
/// The folder of events without an entity.
const NOTHING: &str = "~";
/// The folder of all objects.
pub(super) const FOLDER: &str = "events";
const ENDING: &str = "-payload.json";

/// How many digits of a log's id are in a key. No other suffix has this length.
const MARK: usize = 12;

/// The key of an event's object.
pub(super) fn of(event: &Event) -> String {
    let entity = event.attributes().and_then(|a| a.entity.as_ref());
    let entity = entity.map_or(NOTHING.to_owned(), |entity| segment(&entity.id));
    format!("{FOLDER}/{entity}/{}{ENDING}", event.id())
}

/// Another key for the same event.
pub(super) fn suffixed(key: &str, suffix: &str) -> String {
    let stem = key.strip_suffix(ENDING).unwrap_or(key);
    format!("{stem}-{suffix}{ENDING}")
}

/// The digits that make a key unique: a random UUID.
const UNIQUE: usize = 32;

/// Whether the key was made for one put and is never used again.
pub(super) fn is_unique(key: &str) -> bool {
    parts(key).is_some_and(|(_, suffix)| {
        let last = suffix.rsplit('-').next().unwrap_or_default();
        last.len() == UNIQUE && last.bytes().all(|b| b.is_ascii_hexdigit())
    })
}

/// The event of an object, if a bus made its key.
pub(super) fn event_of(key: &str) -> Option<EventId> {
    parts(key).map(|(id, _)| id)
}

/// The mark of the log that made the key, if it has one; `None` if no bus made it.
pub(super) fn maker(key: &str) -> Option<Option<&str>> {
    let (_, suffix) = parts(key)?;
    let first = suffix.split('-').nth(1).unwrap_or_default();
    let is_mark = first.len() == MARK && first.bytes().all(|b| b.is_ascii_hexdigit());
    Some(is_mark.then_some(first))
}

/// A UUID, perhaps followed by suffixes.
fn parts(key: &str) -> Option<(EventId, &str)> {
    let (_, name) = key.rsplit_once('/')?;
    let stem = name.strip_suffix(ENDING)?;
    let (id, suffix) = (stem.get(..36)?, &stem[36..]);
    let ours = suffix.is_empty() || suffix.starts_with('-');
    Some((id.parse().ok().filter(|_| ours)?, suffix))
}

/// One segment of a key, never empty, `.` or `..`.
fn segment(id: &str) -> String {
    let mut encoded = String::with_capacity(id.len());
    let dots = id.bytes().all(|b| b == b'.');
    for byte in id.bytes() {
        match byte {
            b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'-' | b'_' => encoded.push(byte.into()),
            b'.' if !dots => encoded.push('.'),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    if encoded.is_empty() {
        // An empty id is different from a missing one.
        return format!("{NOTHING}empty");
    }
    if encoded.len() > LONGEST_SEGMENT {
        use sha2::Digest as _;
        let hash = super::hex(&sha2::Sha256::digest(id.as_bytes()));
        return format!("{NOTHING}{hash}");
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(entity: &str) -> String {
        let event = Event::builder("t").entity("TASK", entity).build().unwrap();
        let key = of(&event);
        let parts: Vec<&str> = key.split('/').collect();
        assert_eq!(parts.len(), 3, "{key}");
        assert_eq!(parts[0], "events");
        assert_eq!(parts[2], format!("{}-payload.json", event.id()));
        assert_eq!(event_of(&key), Some(event.id()));
        assert_eq!(event_of(&suffixed(&key, "0a1b")), Some(event.id()));
        let unique = uuid::Uuid::new_v4().simple().to_string();
        assert!(is_unique(&suffixed(&key, &unique)));
        assert!(!is_unique(&key) && !is_unique(&suffixed(&key, "0a1b2c3d4e5f")));
        let mark = "0123456789ab";
        assert_eq!(maker(&key), Some(None));
        assert_eq!(maker(&suffixed(&key, &"a".repeat(16))), Some(None));
        let marked = suffixed(&key, mark);
        assert_eq!(maker(&marked), Some(Some(mark)));
        assert_eq!(maker(&suffixed(&marked, &"a".repeat(16))), Some(Some(mark)));
        assert!(parts[1].len() < 200, "{}", parts[1]);
        parts[1].to_owned()
    }

    // conformance: workflow/overflow-key: the object is events/{request id}/{event id}-payload.json
    // conformance: memory/overflow-key: keys are made by us; a path, a dot, a NUL or a percent sign in an entity id cannot leave its folder, and different ids have different folders
    #[test]
    fn nothing_in_an_entity_id_leaves_its_folder() {
        for (id, wanted) in [
            ("req-123", "req-123"),
            ("..", "%2E%2E"),
            (".", "%2E"),
            ("a.b", "a.b"),
            ("../../etc/passwd", "..%2F..%2Fetc%2Fpasswd"),
            ("a/b", "a%2Fb"),
            ("a\\b", "a%5Cb"),
            ("a\0b", "a%00b"),
            ("a%2Fb", "a%252Fb"),
            ("~", "%7E"),
            ("~empty", "%7Eempty"),
            ("", "~empty"),
            ("größe", "gr%C3%B6%C3%9Fe"),
            ("x#1", "x%231"),
        ] {
            assert_eq!(folder(id), wanted, "{id:?}");
        }
        assert_eq!(
            of(&Event::builder("t").build().unwrap()).split('/').nth(1),
            Some("~")
        );
        let long: Vec<String> = ["a", "ä", "/", "%", "."]
            .iter()
            .flat_map(|c| [folder(&c.repeat(5000)), folder(&c.repeat(5001))])
            .collect();
        let distinct: std::collections::BTreeSet<&String> = long.iter().collect();
        assert_eq!(distinct.len(), long.len());
    }

    #[test]
    fn keys_of_others_are_not_taken_for_ours() {
        for key in [
            "",
            "events",
            "events/x/readme.txt",
            "events/x/-payload.json",
            "events/x/not-a-uuid-of-thirty-six-characters-payload.json",
            "events/x/0190b0a0-0000-7000-8000-000000000001x-payload.json",
        ] {
            assert_eq!(event_of(key), None, "{key}");
            assert_eq!(maker(key), None, "{key}");
        }
    }
}
