//! What this process holds: deliveries under a lease, and notes about events that wait.
//!
//! The server knows neither failures nor attempts: it counts every delivery. So a process remembers the failures of
//! the events that it gave back, and which deliveries were no attempts. A store beside the broker keeps failures when
//! the process ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{Failure, Lease, Recorded, Shard};
use parking_lot::Mutex;

use crate::groups::Group;
use crate::streams::StreamHandle;

/// An event in a group: the shard, the number of the group in this process, the sequence.
pub(crate) type Key = (Shard, u64, u64);

/// A delivery under a lease.
#[derive(Clone)]
pub(crate) struct Hold {
    /// Differs for every delivery.
    pub(crate) token: u64,
    pub(crate) consumer: u64,
    pub(crate) until: Instant,
    pub(crate) lease: Duration,
    pub(crate) record: Arc<Recorded>,
    pub(crate) attempt: u32,
    pub(crate) failures: Vec<Failure>,
    pub(crate) group: Arc<Group>,
    pub(crate) stream: Arc<StreamHandle>,
    /// The subject to which the verdict is sent.
    pub(crate) reply: Arc<str>,
}

/// What is remembered of an event that was given back.
#[derive(Clone, Default)]
pub(crate) struct Note {
    pub(crate) failures: Vec<Failure>,
    /// Deliveries that were no attempts.
    pub(crate) uncounted: u32,
    /// The event waits until this time.
    pub(crate) due: Option<Instant>,
    /// Since when this process has found no handler for it.
    pub(crate) unhandled: Option<Instant>,
    /// The latest change. Old notes are removed, because another process may have finished the event.
    changed: Option<Instant>,
}

/// Notes are swept when there are this many.
const MANY: usize = 10_000;
const OLD: Duration = Duration::from_secs(6 * 3600);

#[derive(Default)]
pub(crate) struct Held {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    holds: HashMap<Key, Hold>,
    counts: HashMap<u64, usize>,
    notes: HashMap<Key, Note>,
    sweep_at: usize,
}

impl Inner {
    fn drop_hold(&mut self, key: &Key) -> Option<Hold> {
        let hold = self.holds.remove(key)?;
        if let Some(count) = self.counts.get_mut(&hold.consumer) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.counts.remove(&hold.consumer);
            }
        }
        Some(hold)
    }
}

fn key_of(lease: &Lease) -> Key {
    let position = lease.position();
    (position.shard(), lease.words()[0], position.place())
}

impl Held {
    /// Records a delivery that is handed out.
    pub(crate) fn hold(&self, key: Key, hold: Hold) {
        let mut inner = self.inner.lock();
        inner.drop_hold(&key);
        *inner.counts.entry(hold.consumer).or_default() += 1;
        if let Some(note) = inner.notes.get_mut(&key) {
            (note.due, note.unhandled) = (None, None);
        }
        inner.holds.insert(key, hold);
    }

    /// The delivery of a lease that has not ended and was not settled.
    pub(crate) fn find(&self, lease: &Lease) -> Option<Hold> {
        let inner = self.inner.lock();
        let hold = inner.holds.get(&key_of(lease))?;
        (hold.token == lease.words()[1] && hold.until > Instant::now()).then(|| hold.clone())
    }

    /// Records that the lease was extended.
    pub(crate) fn extend(&self, lease: &Lease) {
        let mut inner = self.inner.lock();
        if let Some(hold) = inner.holds.get_mut(&key_of(lease))
            && hold.token == lease.words()[1]
        {
            hold.until = Instant::now() + hold.lease;
        }
    }

    /// Removes a delivery that was settled.
    pub(crate) fn free(&self, lease: &Lease) {
        let mut inner = self.inner.lock();
        let key = key_of(lease);
        let same = |hold: &Hold| hold.token == lease.words()[1];
        if inner.holds.get(&key).is_some_and(same) {
            inner.drop_hold(&key);
        }
    }

    /// How many deliveries a consumer holds. Leases that ended count until the next [`Self::sweep`].
    pub(crate) fn count(&self, consumer: u64) -> usize {
        let inner = self.inner.lock();
        inner.counts.get(&consumer).copied().unwrap_or_default()
    }

    /// Forgets leases that ended. Returns when the next lease of this consumer ends.
    pub(crate) fn sweep(&self, consumer: u64) -> Option<Instant> {
        let mut inner = self.inner.lock();
        let now = Instant::now();
        let ended: Vec<Key> = inner
            .holds
            .iter()
            .filter(|(_, hold)| hold.until <= now)
            .map(|(key, _)| *key)
            .collect();
        for key in &ended {
            inner.drop_hold(key);
        }
        let own = inner
            .holds
            .values()
            .filter(|hold| hold.consumer == consumer);
        own.map(|hold| hold.until).min()
    }

    /// What is remembered of an event.
    pub(crate) fn note(&self, key: &Key) -> Option<Note> {
        self.inner.lock().notes.get(key).cloned()
    }

    /// Changes what is remembered of an event.
    pub(crate) fn with_note<T>(&self, key: Key, change: impl FnOnce(&mut Note) -> T) -> T {
        let mut inner = self.inner.lock();
        if inner.notes.len() >= inner.sweep_at.max(MANY) {
            let now = Instant::now();
            let fresh = |note: &Note| note.changed.is_some_and(|at| now < at + OLD);
            inner.notes.retain(|_, note| fresh(note));
            inner.sweep_at = inner.notes.len() * 2;
        }
        let note = inner.notes.entry(key).or_default();
        note.changed = Some(Instant::now());
        change(note)
    }

    /// Forgets an event that is finished.
    pub(crate) fn forget(&self, key: &Key) {
        self.inner.lock().notes.remove(key);
    }

    /// Forgets a group that was removed.
    pub(crate) fn forget_group(&self, group: u64) {
        let mut inner = self.inner.lock();
        inner.notes.retain(|(_, of, _), _| *of != group);
        let gone = inner.holds.keys().filter(|(_, of, _)| *of == group);
        let gone: Vec<Key> = gone.copied().collect();
        for key in &gone {
            inner.drop_hold(key);
        }
    }

    /// How many unsettled events of a group and stream this process holds, or gave back with a delay that still runs.
    pub(crate) fn of_group(&self, shard: Shard, group: u64) -> usize {
        let now = Instant::now();
        let inner = self.inner.lock();
        let held = inner.holds.iter();
        let held = held.filter(|(key, hold)| key.0 == shard && key.1 == group && hold.until > now);
        let waits = |(key, note): &(&Key, &Note)| {
            key.0 == shard && key.1 == group && note.due.is_some_and(|due| due > now)
        };
        held.count() + inner.notes.iter().filter(waits).count()
    }

    /// How many events of a group and stream this process gave back with a delay that still runs: all of them, and
    /// those without a handler.
    pub(crate) fn waiting(&self, shard: Shard, group: u64) -> (u64, u64) {
        let now = Instant::now();
        let inner = self.inner.lock();
        let waits = |(key, note): &(&Key, &Note)| {
            key.0 == shard && key.1 == group && note.due.is_some_and(|due| due > now)
        };
        let all = inner.notes.iter().filter(waits);
        all.fold((0, 0), |(all, unhandled), (_, note)| {
            (all + 1, unhandled + u64::from(note.unhandled.is_some()))
        })
    }
}
