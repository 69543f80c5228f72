//! The deliveries that this process holds under a lease.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use everbus_core::{Failure, Lease, Recorded};
use parking_lot::Mutex;

use crate::consumer::Inner;
use crate::groups::Group;

/// A delivery under a lease.
pub(crate) struct Hold {
    pub(crate) group: Arc<Group>,
    /// The consumer that got the delivery. It may be closed by now.
    pub(crate) consumer: Weak<Inner>,
    pub(crate) number: u64,
    /// The stream.
    pub(crate) key: Arc<str>,
    /// The event on the server: id and stream.
    pub(crate) member: Arc<str>,
    /// The token of the delivery, and the tag of its claim.
    pub(crate) proof: Arc<str>,
    pub(crate) record: Arc<Recorded>,
    pub(crate) attempt: u32,
    pub(crate) failures: Vec<Failure>,
    /// Whether the event was retried from the dead letters, or redelivered.
    pub(crate) again: bool,
}

/// All deliveries of this process, each under a number that only this process uses.
#[derive(Default)]
pub(crate) struct Held {
    inner: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    /// Each delivery with the end of its lease.
    holds: HashMap<u64, (Arc<Hold>, Instant)>,
    counts: HashMap<u64, usize>,
}

impl Inside {
    fn remove(&mut self, token: u64) -> Option<Arc<Hold>> {
        let (hold, _) = self.holds.remove(&token)?;
        if let Some(count) = self.counts.get_mut(&hold.number) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&hold.number);
            }
        }
        Some(hold)
    }
}

fn token(lease: &Lease) -> u64 {
    lease.words()[1]
}

impl Held {
    pub(crate) fn hold(&self, token: u64, hold: Hold, until: Instant) {
        let mut inside = self.inner.lock();
        *inside.counts.entry(hold.number).or_default() += 1;
        inside.holds.insert(token, (Arc::new(hold), until));
    }

    /// The delivery of a lease, unless it was settled. Only the server decides whether the lease has ended.
    pub(crate) fn find(&self, lease: &Lease) -> Option<Arc<Hold>> {
        let inside = self.inner.lock();
        let (hold, _) = inside.holds.get(&token(lease))?;
        let same = hold.group.number == lease.words()[0] && lease.text() == Some(&hold.member);
        same.then(|| hold.clone())
    }

    pub(crate) fn extend(&self, lease: &Lease, by: Duration) {
        if let Some((_, until)) = self.inner.lock().holds.get_mut(&token(lease)) {
            *until = Instant::now() + by;
        }
    }

    /// Removes deliveries that are settled or lost. Tells each consumer once how many of its deliveries ended, so that
    /// it can claim new events.
    pub(crate) fn free<'a>(&self, leases: impl IntoIterator<Item = &'a Lease>) {
        let mut freed: Vec<(Arc<Hold>, usize)> = Vec::new();
        let mut inside = self.inner.lock();
        for lease in leases {
            let Some(hold) = inside.remove(token(lease)) else {
                continue;
            };
            let known = freed.iter_mut().find(|(one, _)| one.number == hold.number);
            match known {
                Some((_, count)) => *count += 1,
                None => freed.push((hold, 1)),
            }
        }
        drop(inside);
        for (hold, count) in freed {
            if let Some(consumer) = hold.consumer.upgrade() {
                consumer.settled(count);
            }
        }
    }

    /// Counts the deliveries that a consumer holds. If there are at least `room`, first removes those whose lease has
    /// ended, and also returns when the next lease ends.
    pub(crate) fn count(&self, consumer: u64, room: usize) -> (usize, Option<Instant>) {
        let mut inside = self.inner.lock();
        let count = inside.counts.get(&consumer).copied().unwrap_or_default();
        if count < room {
            return (count, None);
        }
        let now = Instant::now();
        let ended = inside.holds.iter().filter(|(_, (_, until))| *until <= now);
        let ended: Vec<u64> = ended.map(|(token, _)| *token).collect();
        for token in ended {
            inside.remove(token);
        }
        let own = inside.holds.values();
        let own = own.filter(|(hold, _)| hold.number == consumer);
        let next = own.map(|(_, until)| *until).min();
        let count = inside.counts.get(&consumer).copied().unwrap_or_default();
        (count, next)
    }

    /// Removes the deliveries of a group that was removed.
    pub(crate) fn forget_group(&self, group: u64) {
        let mut inside = self.inner.lock();
        let gone = inside
            .holds
            .iter()
            .filter(|(_, (hold, _))| hold.group.number == group);
        let gone: Vec<u64> = gone.map(|(token, _)| *token).collect();
        for token in gone {
            inside.remove(token);
        }
    }
}
