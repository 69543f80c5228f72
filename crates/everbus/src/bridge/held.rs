//! The leases of events that a bridge has fetched and not settled.

use std::collections::HashMap;

use everbus_core::{Delivery, Lease, Position};
use parking_lot::Mutex;

#[derive(Default)]
pub(super) struct Held(Mutex<HashMap<Position, One>>);

struct One {
    lease: Lease,
    /// Whether the event may be at the target.
    sent: bool,
}

impl Held {
    pub(super) fn add(&self, batch: &[Delivery]) {
        let leases = batch.iter().map(|delivery| &delivery.lease);
        let ones = leases.map(|lease| {
            let (lease, sent) = (lease.clone(), false);
            (lease.position(), One { lease, sent })
        });
        self.0.lock().extend(ones);
    }

    /// Notes that events are on their way to the target.
    pub(super) fn sending(&self, batch: &[Delivery]) {
        let mut held = self.0.lock();
        for delivery in batch {
            if let Some(one) = held.get_mut(&delivery.lease.position()) {
                one.sent = true;
            }
        }
    }

    /// Removes a lease. The lease of a later delivery of the same event stays.
    pub(super) fn remove(&self, lease: &Lease) {
        let mut held = self.0.lock();
        let known = held.get(&lease.position());
        if known.is_some_and(|one| one.lease == *lease) {
            held.remove(&lease.position());
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    pub(super) fn leases(&self) -> Vec<Lease> {
        let held = self.0.lock();
        held.values().map(|one| one.lease.clone()).collect()
    }

    /// The leases, each with whether its event may be at the target.
    pub(super) fn all(&self) -> Vec<(Lease, bool)> {
        let held = self.0.lock();
        held.values()
            .map(|one| (one.lease.clone(), one.sent))
            .collect()
    }
}
