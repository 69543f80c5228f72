//! The key-value store: state that belongs to a program and not to an event, such as sessions, locks and settings.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;

use crate::broker::BoxFuture;
use crate::error::{Code, Error, Result};

/// The expected revision of a key that must not exist.
pub const ABSENT: u64 = 0;

/// The longest bucket name and key, in characters.
const LONGEST: usize = 255;

/// A value under a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvEntry {
    /// The key.
    pub key: String,
    /// The value, byte for byte.
    pub value: Bytes,
    /// The revision of the value. Revisions grow with every change in the bucket, and are never used again.
    pub revision: u64,
}

impl KvEntry {
    /// An entry.
    pub fn new(key: impl Into<String>, value: impl Into<Bytes>, revision: u64) -> Self {
        Self {
            key: key.into(),
            value: value.into(),
            revision,
        }
    }
}

/// A change of a key, as a watcher gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvChange {
    /// The key.
    pub key: String,
    /// The value of the key now; `None` if it was deleted or has expired.
    pub value: Option<Bytes>,
    /// The revision of the value. If it was deleted or has expired: the revision that the watcher returned last.
    pub revision: u64,
}

impl KvChange {
    /// A change.
    pub fn new(key: impl Into<String>, value: Option<Bytes>, revision: u64) -> Self {
        Self {
            key: key.into(),
            value,
            revision,
        }
    }
}

/// The conditions of a put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvPut {
    /// The revision that the key must have. [`ABSENT`]: the key must not exist. `None`: no condition.
    pub expected: Option<u64>,
    /// After what time the value expires. `None`: it stays until it is replaced or deleted.
    pub ttl: Option<Duration>,
}

/// Keeps values by key, in buckets. A bucket need not be created: the first put into it is enough.
///
/// Engines check names with [`check_kv_names`].
pub trait KeyValue: Send + Sync + 'static {
    /// The value of a key; `None` if the key does not exist or its value has expired.
    fn get(&self, bucket: String, key: String) -> BoxFuture<'_, Result<Option<KvEntry>>>;

    /// Puts a value and returns its revision, once durable. Fails with [`Code::RevisionConflict`], and changes nothing,
    /// if the key does not have the expected revision.
    fn put(
        &self,
        bucket: String,
        key: String,
        value: Bytes,
        put: KvPut,
    ) -> BoxFuture<'_, Result<u64>>;

    /// Deletes a key, and returns whether it existed. Fails with [`Code::RevisionConflict`], and changes nothing, if the
    /// key does not have the expected revision.
    fn delete(
        &self,
        bucket: String,
        key: String,
        expected: Option<u64>,
    ) -> BoxFuture<'_, Result<bool>>;

    /// Watches a bucket: yields first every existing value, then the changes. If a key changes several times in quick
    /// succession, only the last change is sure to be returned.
    fn watch(&self, bucket: String) -> BoxFuture<'_, Result<Box<dyn KvWatch>>>;
}

/// The changes of a bucket, one after another.
pub trait KvWatch: Send {
    /// Waits for the next change.
    ///
    /// Cancel safe: if the future is dropped before it is done, the next call returns the same change.
    fn next(&mut self) -> BoxFuture<'_, Result<KvChange>>;
}

/// Finds the changes of a bucket for a watcher: compares its values with those of the last comparison. For engines that
/// read the bucket again after each change.
#[derive(Debug, Default)]
pub struct KvSeen {
    revisions: BTreeMap<String, u64>,
    last: u64,
    changes: VecDeque<KvChange>,
}

impl KvSeen {
    /// The highest revision that was seen. Values up to it need not be read again.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Compares the last known values with the current ones: key, value and revision. An engine that reads all values at
    /// one moment may leave out those with a revision up to [`last`](Self::last); others give every value.
    pub fn compare(&mut self, now: impl IntoIterator<Item = (String, Option<Bytes>, u64)>) {
        let mut there = BTreeSet::new();
        let mut changed = Vec::new();
        for (key, value, revision) in now {
            if self.revisions.get(&key) != Some(&revision) {
                // The value had expired, and is there again because the clock was set back. It was not read again, and
                // for the watcher it stays gone.
                let Some(value) = value else { continue };
                self.revisions.insert(key.clone(), revision);
                changed.push(KvChange::new(key.clone(), Some(value), revision));
            }
            there.insert(key);
        }
        let changes = &mut self.changes;
        self.revisions.retain(|key, revision| {
            let is_there = there.contains(key);
            if !is_there {
                changes.push_back(KvChange::new(key.clone(), None, *revision));
            }
            is_there
        });
        changed.sort_by_key(|change| change.revision);
        if let Some(change) = changed.last() {
            self.last = self.last.max(change.revision);
        }
        changes.extend(changed);
    }

    /// Takes the next change that was found, if there is one.
    pub fn take(&mut self) -> Option<KvChange> {
        self.changes.pop_front()
    }
}

/// Refuses names that some engine cannot carry: a bucket has letters, digits, `-` and `_`; a key has in
/// addition `.`, `/` and `=`, and does not begin or end with a dot.
pub fn check_kv_names(bucket: &str, key: Option<&str>) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let length = |name: &str| (1..=LONGEST).contains(&name.len());
    if !length(bucket) || !bucket.chars().all(plain) {
        return Err(refused("bucket", bucket, "letters, digits, - and _"));
    }
    let of_key = |c: char| plain(c) || matches!(c, '.' | '/' | '=');
    match key {
        Some(key) if !length(key) || !key.chars().all(of_key) => {}
        Some(key) if key.starts_with('.') || key.ends_with('.') || key.contains("..") => {}
        _ => return Ok(()),
    }
    let key = key.unwrap_or_default();
    let what = "letters, digits, - _ . / and =, with dots only inside";
    Err(refused("key", key, what))
}

fn refused(what: &str, name: &str, allowed: &str) -> Error {
    Error::new(
        Code::InvalidAttribute,
        format!("{name:?} is not the name of a {what}"),
    )
    .hint(format!("1 to {LONGEST} {allowed}"))
}

/// The error of a put or delete whose key has another revision.
pub fn revision_conflict(key: &str, expected: u64, found: Option<u64>) -> Error {
    let found = match found {
        Some(revision) => format!("it has revision {revision}"),
        None => "it is not there".to_owned(),
    };
    let wanted = match expected {
        ABSENT => "was to be absent".to_owned(),
        revision => format!("should have revision {revision}"),
    };
    Error::new(
        Code::RevisionConflict,
        format!("{key:?} {wanted}, but {found}"),
    )
    .hint("get the key again, and decide by its current value")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watcher_sees_what_differs() {
        let at = |key: &str, revision| (key.to_owned(), Some(Bytes::from("v")), revision);
        let mut seen = KvSeen::default();
        let told = |seen: &mut KvSeen| {
            let changes = std::iter::from_fn(|| seen.take());
            let told = changes.map(|c| (c.key, c.value.is_some(), c.revision));
            told.collect::<Vec<_>>()
        };
        seen.compare([at("b", 2), at("a", 3)]);
        assert_eq!(
            told(&mut seen),
            [("b".into(), true, 2), ("a".into(), true, 3)]
        );
        seen.compare([at("b", 2), at("a", 3)]);
        assert_eq!(told(&mut seen), []);
        assert_eq!(seen.last(), 3);
        seen.compare([at("b", 4)]);
        assert_eq!(
            told(&mut seen),
            [("a".into(), false, 3), ("b".into(), true, 4)]
        );
        seen.compare([at("a", 5), at("b", 4)]);
        assert_eq!(told(&mut seen), [("a".into(), true, 5)]);
    }

    // conformance: contract/kv-clock: A value that is there again after the clock was set back is not reported as deleted a second time.
    #[test]
    fn a_value_that_comes_back_with_the_clock_is_not_deleted_twice() {
        let mut seen = KvSeen::default();
        let value = || Some(Bytes::from("v"));
        seen.compare([("a".into(), value(), 1), ("b".into(), value(), 2)]);
        while seen.take().is_some() {}
        // Expired.
        seen.compare([("b".into(), None, 2)]);
        assert_eq!(seen.take(), Some(KvChange::new("a", None, 1)));
        // There again. The engine reads values only after the last revision.
        seen.compare([("a".into(), None, 1), ("b".into(), None, 2)]);
        seen.compare([("b".into(), None, 2)]);
        assert_eq!(seen.take(), None);
        seen.compare([("a".into(), value(), 3), ("b".into(), None, 2)]);
        assert_eq!(seen.take(), Some(KvChange::new("a", value(), 3)));
    }

    #[test]
    fn a_change_that_is_read_after_a_newer_one_is_reported() {
        let mut seen = KvSeen::default();
        let at = |key: &str, revision| (key.to_owned(), Some(Bytes::from("v")), revision);
        let change = |key, revision| Some(KvChange::new(key, Some(Bytes::from("v")), revision));
        seen.compare([at("a", 1), at("b", 2)]);
        assert_eq!(seen.take(), change("a", 1));
        assert_eq!(seen.take(), change("b", 2));
        // `a` changed before `b`, and was read before its change.
        seen.compare([at("a", 1), at("b", 4)]);
        assert_eq!(seen.take(), change("b", 4));
        seen.compare([at("a", 3), at("b", 4)]);
        assert_eq!(seen.take(), change("a", 3));
        assert_eq!(seen.take(), None);
    }

    #[test]
    fn names_that_some_engine_cannot_carry_are_refused() {
        for key in ["a", "user.42", "a/b=c_d-e", &"x".repeat(255)] {
            check_kv_names("sessions", Some(key)).unwrap();
        }
        let long = "x".repeat(256);
        for key in ["", ".a", "a.", "a..b", "a b", "a*", "a>", "ä", &long] {
            let error = check_kv_names("sessions", Some(key)).unwrap_err();
            assert_eq!(error.code(), Code::InvalidAttribute, "{key:?}");
        }
        for bucket in ["", "a.b", "a b", "a/b", &long] {
            assert!(check_kv_names(bucket, None).is_err(), "{bucket:?}");
        }
    }
}
