//! The leases of what a bridge has fetched and not settled.

use std::collections::HashMap;

use everbus_core::{Delivery, Lease, Position};
use parking_lot::Mutex;

#[derive(Default)]
pub(super) struct Held(Mutex<HashMap<Position, Lease>>);

impl Held {
    pub(super) fn add(&self, batch: &[Delivery]) {
        let leases = batch.iter().map(|delivery| &delivery.lease);
        self.0
            .lock()
            .extend(leases.map(|lease| (lease.position(), lease.clone())));
    }

    /// Forgets a lease. That of a later delivery of the same event stays.
    pub(super) fn remove(&self, lease: &Lease) {
        let mut held = self.0.lock();
        if held.get(&lease.position()) == Some(lease) {
            held.remove(&lease.position());
        }
    }

    pub(super) fn leases(&self) -> Vec<Lease> {
        self.0.lock().values().cloned().collect()
    }
}
