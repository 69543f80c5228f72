//! The keys of objects: `events/{entity id}/{event id}-{log}-{random}-payload.json`.
//!
//! No key is used twice, so even a late deletion of an object can never delete a newer one. The key names the log that
//! put the object. Any entity id becomes one segment of letters, digits, `-`, `_` and dots; all other bytes are
//! percent-encoded, so an id cannot leave its folder. Events without an entity use the folder `~`, which no id is
//! encoded to.

use everbus_core::{Event, EventId, LogId};
use sha2::Digest as _;

/// A file name has at most 255 bytes on most file systems, and an S3 key at most 1024.
const LONGEST_SEGMENT: usize = 180;
/// The folder of events without an entity.
const NOTHING: &str = "~";
/// The folder of all objects.
pub(super) const FOLDER: &str = "events";
const ENDING: &str = "-payload.json";

/// A new key for the object of an event. The log is missing where the engine has no id.
pub(super) fn new(event: &Event, log: Option<LogId>) -> String {
    let entity = event.attributes().and_then(|a| a.entity.as_ref());
    let entity = entity.map_or(NOTHING.to_owned(), |entity| segment(&entity.id));
    let log = log.map_or(String::new(), |log| format!("-{}", log.short()));
    let random = uuid::Uuid::new_v4().simple();
    format!("{FOLDER}/{entity}/{}{log}-{random}{ENDING}", event.id())
}

/// The event of an object and the log that put it, by the first digits of its id; empty if the key does not
/// tell. `None` if this is not the key of an event's object.
pub(super) fn made_by(key: &str) -> Option<(EventId, &str)> {
    let (_, name) = key.rsplit_once('/')?;
    let (id, rest) = name.strip_suffix(ENDING)?.split_at_checked(36)?;
    let parts = rest.strip_prefix('-').or(rest.is_empty().then_some(""))?;
    let log = parts.split_once('-').map_or("", |(log, _)| log);
    Some((id.parse().ok()?, log))
}

/// One segment of a key, never empty, `.` or `..`.
fn segment(id: &str) -> String {
    let dots = id.bytes().all(|b| b == b'.');
    let encode = |byte: u8| match byte {
        b'.' if dots => "%2E".to_owned(),
        b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'-' | b'_' | b'.' => char::from(byte).into(),
        byte => format!("%{byte:02X}"),
    };
    let encoded: String = id.bytes().map(encode).collect();
    match encoded.len() {
        // An empty id is different from a missing one.
        0 => format!("{NOTHING}empty"),
        1..=LONGEST_SEGMENT => encoded,
        _ => format!("{NOTHING}{}", super::hex(&sha2::Sha256::digest(id))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(entity: &str) -> String {
        let event = Event::builder("t").entity("TASK", entity).build().unwrap();
        let log = LogId::new();
        let key = new(&event, Some(log));
        assert_ne!(key, new(&event, Some(log)), "no key is made twice");
        let parts: Vec<&str> = key.split('/').collect();
        assert_eq!(parts.len(), 3, "{key}");
        assert_eq!(parts[0], "events");
        assert!(parts[2].starts_with(&event.id().to_string()), "{key}");
        assert_eq!(made_by(&key), Some((event.id(), log.short().as_str())));
        let unknown = new(&event, None);
        assert_eq!(made_by(&unknown), Some((event.id(), "")));
        assert!(parts[1].len() < 200, "{}", parts[1]);
        parts[1].to_owned()
    }

    // conformance: workflow/overflow-key: the object is events/{request id}/{event id}-{log}-{random}-payload.json
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
            new(&Event::builder("t").build().unwrap(), None)
                .split('/')
                .nth(1),
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
            assert_eq!(made_by(key), None, "{key}");
        }
    }
}
