//! A table with a limited size: all keys after the limit share one entry.

use parking_lot::{RwLock, RwLockReadGuard};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, OnceLock};

pub(super) struct Bounded<K, V> {
    limit: usize,
    entries: RwLock<HashMap<K, Arc<V>>>,
    /// Set once the limit is reached.
    other: OnceLock<Arc<V>>,
}

impl<K: Hash + Eq + Clone, V> Bounded<K, V> {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            entries: RwLock::default(),
            other: OnceLock::new(),
        }
    }

    /// The entry of the key, made if there is room; otherwise the shared one.
    pub(super) fn entry(
        &self,
        key: K,
        make: impl FnOnce() -> V,
        other: impl FnOnce() -> V,
    ) -> Arc<V> {
        let full = {
            let entries = self.read();
            if let Some(found) = entries.get(&key) {
                return found.clone();
            }
            entries.len() >= self.limit
        };
        if !full {
            let mut entries = self.entries.write();
            if let Some(found) = entries.get(&key) {
                return found.clone();
            }
            if entries.len() < self.limit {
                let made = Arc::new(make());
                entries.insert(key, made.clone());
                return made;
            }
        }
        self.other.get_or_init(|| Arc::new(other())).clone()
    }

    /// Every entry; the shared one has no key. The lock is free again when this returns.
    pub(super) fn all(&self) -> Vec<(Option<K>, Arc<V>)> {
        let entries = self.read();
        let keyed = entries.iter();
        let shared = self.other.get().map(|other| (None, other.clone()));
        keyed
            .map(|(key, value)| (Some(key.clone()), value.clone()))
            .chain(shared)
            .collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<K, Arc<V>>> {
        self.entries.read()
    }
}
