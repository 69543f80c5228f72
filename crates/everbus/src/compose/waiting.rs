//! Events that wait in this process because the broker has no delay: their leases are extended until they
//! are due, and then they are handed out again.
//!
//! The consumer's prefetch limits their number, because the broker counts them as in flight.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus_core::{Delivery, Lease, Timestamp};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

/// The waiting events of one consumer.
#[derive(Default)]
pub(super) struct Waiting {
    events: Mutex<Vec<(Timestamp, Delivery)>>,
    /// Whether the consumer has closed. An event that is added after that would never be handed out.
    closed: AtomicBool,
    /// Notified when an event is added.
    pub(super) changed: Notify,
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, Vec<(Timestamp, Delivery)>> {
        self.events.lock()
    }

    /// Keeps a delivery until it is due. Returns `false`, and does not keep it, if the consumer has closed.
    pub(super) fn add(&self, due: Timestamp, delivery: Delivery) -> bool {
        let mut events = self.lock();
        if self.closed.load(Ordering::Acquire) {
            return false;
        }
        events.push((due, delivery));
        drop(events);
        self.changed.notify_waiters();
        true
    }

    /// Takes up to `max` due deliveries, the longest due first.
    pub(super) fn take_due(&self, now: Timestamp, max: usize) -> Vec<Delivery> {
        let mut events = self.lock();
        events.sort_by_key(|(due, _)| *due);
        let due = events.iter().take_while(|(due, _)| *due <= now).count();
        events
            .drain(..due.min(max))
            .map(|(_, delivery)| delivery)
            .collect()
    }

    /// When the next waiting event is due.
    pub(super) fn next_due(&self) -> Option<Timestamp> {
        self.lock().iter().map(|(due, _)| *due).min()
    }

    /// How long until the last waiting event is due.
    pub(super) fn longest(&self, now: Timestamp) -> Duration {
        let last = self.lock().iter().map(|(due, _)| *due).max();
        last.map_or(Duration::ZERO, |due| due.since(now))
    }

    /// The leases of all waiting events.
    pub(super) fn leases(&self) -> Vec<Lease> {
        self.lock().iter().map(|(_, d)| d.lease.clone()).collect()
    }

    /// Forgets an event whose lease was lost: the broker delivers it again.
    pub(super) fn forget(&self, lease: &Lease) {
        self.lock().retain(|(_, d)| d.lease != *lease);
    }

    /// Takes all waiting events and accepts no more: the consumer closes.
    pub(super) fn take_all(&self) -> Vec<Delivery> {
        let mut events = self.lock();
        self.closed.store(true, Ordering::Release);
        let events = std::mem::take(&mut *events);
        events.into_iter().map(|(_, delivery)| delivery).collect()
    }
}
