//! What is over goes: now and then, and a little at a time, the relay removes old rows from the outbox.

use std::time::Duration;

use everbus_core::{OutboxKeep, RelayLease};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::relay::Relay;
use super::stats::Counters;

/// How often old rows are looked for, once there are none left.
const EVERY: Duration = Duration::from_secs(60);

/// When to look for old rows, and what is old.
#[derive(Debug, Default)]
pub(super) struct Sweeper {
    pub(super) keep: OutboxKeep,
    /// When all that was old was gone.
    last: Mutex<Option<Instant>>,
}

impl Sweeper {
    fn is_due(&self) -> bool {
        let last = self.last.lock();
        last.is_none_or(|last| last.elapsed() >= EVERY)
    }

    fn done(&self) {
        *self.last.lock() = Some(Instant::now());
    }
}

impl Relay {
    /// Removes some of what is old, if it is time for that.
    pub(super) async fn sweep(&self, lease: &RelayLease) {
        if !self.sweeper.is_due() {
            return;
        }
        match self.source.forget(lease.clone(), self.sweeper.keep).await {
            Ok(gone) => {
                Counters::add(&self.counters.removed, gone.rows);
                if gone.more {
                    return;
                }
            }
            // Nothing waits for it. If the outbox cannot be reached, the next pass will tell.
            Err(error) => {
                tracing::warn!(target: "everbus::outbox", outbox = self.source.name(), %error, "old rows could not be removed");
            }
        }
        self.sweeper.done();
    }
}
