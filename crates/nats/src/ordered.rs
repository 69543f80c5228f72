//! Order by key: the next event of a key is handed out once the one before it is finished.
//!
//! The server delivers the messages of an ordered group to one process at a time (a *pinned* client). That process
//! keeps the order: a message whose key is in use is parked here, under its lease.
//!
//! A process that takes over a group hands out no event with a key until it holds every unsettled event itself. By
//! then, the events of the other process are acked, or were delivered to this process.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use everbus_core::Shard;

use crate::reader::Item;

/// The state of an ordered group in this process.
#[derive(Default)]
pub(crate) struct Keys {
    by_key: HashMap<(Shard, String), BTreeMap<u64, Seen>>,
    parked: BTreeMap<(String, u64), Item>,
    /// How many readers of the group there are.
    readers: usize,
    /// The streams whose messages this process gets. The server pins a process for each stream separately.
    pins: HashMap<Shard, Pin>,
}

struct Pin {
    /// The pin id that the server gave to this process.
    id: String,
    /// Another process may still have events: nothing with a key is handed out.
    shut: bool,
}

struct Seen {
    /// Handed out, and neither settled nor given back.
    out: bool,
    /// After this time the event is forgotten here, because another process may have it.
    forget: Instant,
}

impl Keys {
    pub(crate) fn join(&mut self) {
        self.readers += 1;
    }

    /// A reader ends. The last one gets everything that is parked, to give it back.
    pub(crate) fn leave(&mut self) -> Vec<Item> {
        self.readers = self.readers.saturating_sub(1);
        if self.readers > 0 {
            return Vec::new();
        }
        self.pins.clear();
        self.by_key.clear();
        std::mem::take(&mut self.parked).into_values().collect()
    }

    pub(crate) fn pin(&self, shard: Shard) -> Option<String> {
        self.pins.get(&shard).map(|pin| pin.id.clone())
    }

    /// The server sends the messages of a stream here from now on. True if it did not before.
    pub(crate) fn pinned(&mut self, shard: Shard, id: &str) -> bool {
        if self.pins.get(&shard).is_some_and(|pin| pin.id == id) {
            return false;
        }
        let id = id.to_owned();
        self.pins.insert(shard, Pin { id, shut: true });
        true
    }

    /// The server sends the messages of a stream to another process now. That process also gets the parked messages
    /// once their leases end.
    pub(crate) fn unpinned(&mut self, shard: Shard) {
        self.pins.remove(&shard);
        self.by_key.retain(|(of, _), _| *of != shard);
        self.parked
            .retain(|_, item| item.record.position.shard() != shard);
    }

    /// Whether any stream is shut.
    pub(crate) fn any_shut(&self) -> bool {
        self.pins.values().any(|pin| pin.shut)
    }

    pub(crate) fn is_shut(&self, shard: Shard) -> bool {
        self.pins.get(&shard).is_some_and(|pin| pin.shut)
    }

    pub(crate) fn open(&mut self, shard: Shard) {
        if let Some(pin) = self.pins.get_mut(&shard) {
            pin.shut = false;
        }
    }

    /// Takes a message that has arrived. Returns it if it may be handed out; otherwise parks it.
    pub(crate) fn arrive(&mut self, item: Item) -> Option<Item> {
        let Some(key) = item.key() else {
            return Some(item);
        };
        let seq = item.seq();
        let shut = self.is_shut(key.0);
        let forget = Instant::now() + 2 * item.lease;
        let of_key = self.by_key.entry(key).or_default();
        let seen = of_key.entry(seq).or_insert(Seen { out: false, forget });
        seen.forget = seen.forget.max(forget);
        if !shut && is_next(of_key, seq) {
            if let Some(seen) = of_key.get_mut(&seq) {
                seen.out = true;
            }
            self.parked.remove(&item.place());
            return Some(item);
        }
        self.parked.insert(item.place(), item);
        None
    }

    /// Takes the parked messages that may be handed out now.
    pub(crate) fn ready(&mut self) -> Vec<Item> {
        let now = Instant::now();
        for of_key in self.by_key.values_mut() {
            of_key.retain(|_, seen| seen.forget > now);
        }
        self.by_key.retain(|_, of_key| !of_key.is_empty());
        let places: Vec<(String, u64)> = self.parked.keys().cloned().collect();
        let mut ready = Vec::new();
        for place in places {
            let Some(item) = self.parked.remove(&place) else {
                continue;
            };
            ready.extend(self.arrive(item));
        }
        ready
    }

    /// Keeps all parked messages for longer. The caller extends their leases through the returned reply subjects.
    pub(crate) fn keep(&mut self, by: Duration) -> Vec<std::sync::Arc<str>> {
        let forget = Instant::now() + 2 * by;
        let mut replies = Vec::new();
        for item in self.parked.values_mut() {
            item.came = Instant::now();
            replies.push(item.reply.clone());
            if let Some(key) = item.key()
                && let Some(seen) = self
                    .by_key
                    .get_mut(&key)
                    .and_then(|k| k.get_mut(&item.seq()))
            {
                seen.forget = forget;
            }
        }
        replies
    }

    pub(crate) fn parked(&self) -> usize {
        self.parked.len()
    }

    /// How many messages of a stream are parked.
    pub(crate) fn parked_of(&self, shard: Shard) -> usize {
        let of = |item: &&Item| item.record.position.shard() == shard;
        self.parked.values().filter(of).count()
    }

    /// An event of a key is finished.
    pub(crate) fn finish(&mut self, key: &(Shard, String), seq: u64) {
        if let Some(of_key) = self.by_key.get_mut(key) {
            of_key.remove(&seq);
            if of_key.is_empty() {
                self.by_key.remove(key);
            }
        }
    }

    /// An event of a key was given back, and is due again after this long. It stays the first of its key.
    pub(crate) fn give_back(&mut self, key: &(Shard, String), seq: u64, after: Duration) {
        let seen = self.by_key.get_mut(key).and_then(|k| k.get_mut(&seq));
        if let Some(seen) = seen {
            seen.out = false;
            seen.forget = Instant::now() + after + Duration::from_secs(60);
        }
    }

    /// The lease of an event was extended.
    pub(crate) fn extend(&mut self, key: &(Shard, String), seq: u64, by: Duration) {
        let seen = self.by_key.get_mut(key).and_then(|k| k.get_mut(&seq));
        if let Some(seen) = seen {
            seen.forget = Instant::now() + 2 * by;
        }
    }
}

/// Whether this is the first of its key, and no other one is being handled.
fn is_next(of_key: &BTreeMap<u64, Seen>, seq: u64) -> bool {
    let first = of_key.keys().next() == Some(&seq);
    first && !of_key.iter().any(|(other, seen)| *other != seq && seen.out)
}
