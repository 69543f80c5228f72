//! The sweeper of the outbox: from time to time the relay removes some old rows.

use std::time::Duration;

use everbus_core::{OutboxKeep, RelayLease};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::relay::Relay;

/// How often the sweeper looks for old rows, once none are left.
const EVERY: Duration = Duration::from_secs(60);

/// When to look for old rows, and how old they must be.
#[derive(Debug, Default)]
pub(super) struct Sweeper {
    pub(super) keep: OutboxKeep,
    /// When the last old row was removed.
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
    /// Removes some old rows, if it is time.
    pub(super) async fn sweep(&self, lease: &RelayLease) {
        if !self.sweeper.is_due() {
            return;
        }
        match self.source.forget(lease.clone(), self.sweeper.keep).await {
            Ok(gone) => {
                self.counters.lock().removed += gone.rows;
                if gone.more {
                    return;
                }
            }
            // Not urgent. If the outbox cannot be reached, the next pass reports it.
            Err(error) => {
                tracing::warn!(target: "everbus::outbox", outbox = self.source.name(), %error, "old rows could not be removed");
            }
        }
        self.sweeper.done();
    }
}
