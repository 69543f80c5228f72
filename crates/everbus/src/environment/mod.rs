//! The part of a bus that a delivery can reach: the engine, the clock, the watched deliveries, the
//! shutdown.
//!
//! Messages and payload stages hold only this, so that they do not depend on the bus.

pub(crate) mod watch;

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Clock, Engine};

use watch::Watches;

/// A longer duration is probably a mistake of units.
pub(crate) const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// The part of a bus that deliveries can reach.
pub(crate) struct Environment {
    pub(crate) engine: Engine,
    pub(crate) clock: Arc<dyn Clock>,
    /// The deliveries whose handlers watch their leases.
    pub(crate) watches: Watches,
    /// Becomes true when the shutdown begins.
    ending: tokio::sync::watch::Sender<bool>,
}

impl Environment {
    pub(crate) fn new(engine: Engine, clock: Arc<dyn Clock>) -> Self {
        Self {
            engine,
            clock,
            watches: Watches::default(),
            ending: tokio::sync::watch::Sender::new(false),
        }
    }

    /// Waits until the shutdown begins.
    pub(crate) async fn shutdown_begun(&self) {
        let mut ending = self.ending.subscribe();
        // The sender is in `self`, so the wait ends only with the shutdown.
        let _ = ending.wait_for(|ending| *ending).await;
    }

    pub(crate) fn begin_shutdown(&self) {
        self.ending.send_replace(true);
    }
}
