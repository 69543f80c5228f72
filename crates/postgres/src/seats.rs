//! The consumers of this engine, and what they hold.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use everbus_core::{ConsumeOptions, Delivery, Lease, Pattern, Result, Window};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::settle::parts;

/// Every consumer of this engine.
#[derive(Default)]
pub(crate) struct Seats(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    next: u64,
    seats: HashMap<u64, Seat>,
    /// Events that were handed out and not settled: the consumer that holds each, and the end of its lease.
    held: HashMap<Key, (u64, i64), BuildHasherDefault<Mixed>>,
    /// How many of them each claim has, by token.
    claims: HashMap<i64, usize, BuildHasherDefault<Mixed>>,
    /// While this is set, only the named suspect may be handed out.
    isolating: Option<(i64, u64)>,
}

/// Group, token and position of a lease.
type Key = (i64, i64, u64);

/// Hashes tokens and keys, which happens several times for each event. Tokens are random, so a client cannot choose
/// keys that collide.
#[derive(Default)]
struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(26) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_i64(&mut self, number: i64) {
        self.write_u64(number.cast_unsigned());
    }
}

struct Seat {
    group: i64,
    handled: Vec<Pattern>,
    prefetch: usize,
    window: Window,
    held: usize,
    /// The consumer asked for events and had no room.
    starved: bool,
    /// Events settled since the last update of the window. `step` and `look`: how long the last settlement and the last
    /// look for events took.
    settled: usize,
    step: Duration,
    look: Duration,
}

fn key_of(lease: &Lease) -> Key {
    let (group, token) = parts(lease);
    (group, token, lease.position().place())
}

impl Inner {
    /// Forgets that an event is held. Returns the consumer that held it.
    fn release(&mut self, key: Key) -> Option<&mut Seat> {
        if self.isolating == Some((key.0, key.2)) {
            self.isolating = None;
        }
        let (seat, _) = self.held.remove(&key)?;
        if let Entry::Occupied(mut left) = self.claims.entry(key.1) {
            *left.get_mut() -= 1;
            if *left.get() == 0 {
                left.remove();
            }
        }
        let seat = self.seats.get_mut(&seat)?;
        seat.held = seat.held.saturating_sub(1);
        seat.settled += 1;
        Some(seat)
    }
}

impl Seats {
    pub(crate) fn add(&self, group: i64, options: &ConsumeOptions) -> u64 {
        let mut inner = self.0.lock();
        inner.next += 1;
        let id = inner.next;
        let seat = Seat {
            group,
            handled: options.handled.clone(),
            prefetch: options.prefetch,
            window: Window::new(options.concurrency),
            held: 0,
            starved: false,
            settled: 0,
            step: Duration::ZERO,
            look: Duration::ZERO,
        };
        inner.seats.insert(id, seat);
        id
    }

    /// Removes a consumer. Its events stay held.
    pub(crate) fn remove(&self, id: u64) {
        let mut inner = self.0.lock();
        inner.seats.remove(&id);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().seats.is_empty()
    }

    pub(crate) fn set_handled(&self, id: u64, handled: Vec<Pattern>) {
        if let Some(seat) = self.0.lock().seats.get_mut(&id) {
            seat.handled = handled;
        }
    }

    pub(crate) fn set_prefetch(&self, id: u64, prefetch: usize) {
        if let Some(seat) = self.0.lock().seats.get_mut(&id) {
            seat.prefetch = prefetch;
        }
    }

    pub(crate) fn handled(&self, id: u64) -> Vec<Pattern> {
        let inner = self.0.lock();
        inner
            .seats
            .get(&id)
            .map(|seat| seat.handled.clone())
            .unwrap_or_default()
    }

    /// Whether a consumer of a group, a paused one too, handles a type.
    pub(crate) fn is_handled(&self, group: i64, event_type: &str) -> bool {
        let inner = self.0.lock();
        let mut seats = inner.seats.values().filter(|seat| seat.group == group);
        seats.any(|seat| seat.handled.iter().any(|p| p.matches(event_type)))
    }

    /// How many more events a consumer may get. Leases that have ended do not count.
    pub(crate) fn room(&self, id: u64, now: i64) -> usize {
        let mut inner = self.0.lock();
        let ended = inner.held.iter().filter(|(_, (_, until))| *until <= now);
        let ended: Vec<Key> = ended.map(|(key, _)| *key).collect();
        for key in ended {
            inner.release(key);
        }
        let Some(seat) = inner.seats.get_mut(&id) else {
            return 0;
        };
        if seat.settled > 0 {
            let step = seat.step + seat.look;
            seat.window.settled(seat.settled, Instant::now(), step);
            seat.settled = 0;
        }
        let most = seat.window.size().min(seat.prefetch);
        let room = most.saturating_sub(seat.held);
        seat.starved = room == 0;
        room
    }

    /// When the first lease of a consumer ends.
    pub(crate) fn next_end(&self, id: u64) -> Option<i64> {
        let inner = self.0.lock();
        let own = inner.held.values().filter(|(seat, _)| *seat == id);
        own.map(|(_, until)| *until).min()
    }

    /// Whether a consumer gets no more events before something is settled.
    pub(crate) fn wait_for_settlements(&self) -> bool {
        let inner = self.0.lock();
        inner.isolating.is_some() || inner.seats.values().any(|seat| seat.starved)
    }

    pub(crate) fn took(&self, id: u64, deliveries: &[Delivery], until: i64) {
        let mut inner = self.0.lock();
        for delivery in deliveries {
            let key = key_of(&delivery.lease);
            if inner.held.insert(key, (id, until)).is_none() {
                *inner.claims.entry(key.1).or_default() += 1;
            }
        }
        if let Some(seat) = inner.seats.get_mut(&id) {
            if seat.held == 0 && seat.settled == 0 && !deliveries.is_empty() {
                seat.window.began(Instant::now());
            }
            seat.held += deliveries.len();
        }
    }

    /// Notes how long a look for events took.
    pub(crate) fn looked(&self, id: u64, took: Duration) {
        if let Some(seat) = self.0.lock().seats.get_mut(&id) {
            seat.look = took;
        }
    }

    /// Notes the answers to settlements that took `step` together.
    pub(crate) fn settled<'s>(
        &self,
        answers: impl Iterator<Item = (&'s Lease, &'s Result<()>)>,
        step: Duration,
    ) {
        let mut inner = self.0.lock();
        for (lease, answer) in answers {
            let over = match answer {
                Ok(()) => true,
                Err(e) => e.code() == everbus_core::Code::LeaseLost,
            };
            if over && let Some(seat) = inner.release(key_of(lease)) {
                seat.step = step;
            }
        }
    }

    /// Notes that a lease was extended, or lost.
    pub(crate) fn extended(&self, lease: &Lease, until: Option<i64>) {
        let key = key_of(lease);
        let mut inner = self.0.lock();
        match until {
            None => _ = inner.release(key),
            Some(until) => {
                if let Some(held) = inner.held.get_mut(&key) {
                    held.1 = until;
                }
            }
        }
    }

    /// How many events of a claim are held.
    pub(crate) fn held_of(&self, token: i64) -> usize {
        self.0.lock().claims.get(&token).copied().unwrap_or(0)
    }

    /// How many events this engine has in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.0.lock().held.len()
    }

    /// The suspect that must run alone, if there is one.
    pub(crate) fn isolating(&self) -> Option<(i64, u64)> {
        self.0.lock().isolating
    }

    pub(crate) fn isolate(&self, event: Option<(i64, u64)>) {
        self.0.lock().isolating = event;
    }

    /// Whether the isolated event is held, or a consumer of its group could take it.
    pub(crate) fn is_attended(&self, (group, seq): (i64, u64)) -> bool {
        let inner = self.0.lock();
        let held = inner.held.keys().any(|key| (key.0, key.2) == (group, seq));
        held || inner
            .seats
            .values()
            .any(|seat| seat.group == group && seat.prefetch > 0)
    }

    /// Whether an event is held by this engine.
    pub(crate) fn holds(&self, (group, seq): (i64, u64)) -> bool {
        let inner = self.0.lock();
        inner.held.keys().any(|key| (key.0, key.2) == (group, seq))
    }
}

/// Counts the consumers that are giving events back.
#[derive(Clone, Default)]
pub(crate) struct Returning(Arc<(AtomicUsize, Notify)>);

impl Returning {
    pub(crate) fn begin(&self) -> ReturnGuard {
        self.0.0.fetch_add(1, Ordering::AcqRel);
        ReturnGuard(self.clone())
    }

    /// Waits until everything is back.
    pub(crate) async fn done(&self) {
        loop {
            let changed = self.0.1.notified();
            if self.0.0.load(Ordering::Acquire) == 0 {
                return;
            }
            changed.await;
        }
    }
}

/// A consumer is giving events back as long as this lives.
pub(crate) struct ReturnGuard(Returning);

impl Drop for ReturnGuard {
    fn drop(&mut self) {
        self.0.0.0.fetch_sub(1, Ordering::AcqRel);
        self.0.0.1.notify_waiters();
    }
}
