//! What a delivery can reach of its bus: the engine, the clock, the deliveries that are watched, the shutdown.
//!
//! Messages and payload stages hold this part alone, so that they need not know the bus.

pub(crate) mod watch;

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Clock, Engine};

use watch::Watches;

/// Longer durations are a mistake of units.
pub(crate) const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// The part of a bus that deliveries reach.
pub(crate) struct Environment {
    pub(crate) engine: Engine,
    pub(crate) clock: Arc<dyn Clock>,
    /// The deliveries whose handlers want to know about their leases.
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
        // The sender is here, so there is no other end to this.
        let _ = ending.wait_for(|ending| *ending).await;
    }

    pub(crate) fn begin_shutdown(&self) {
        self.ending.send_replace(true);
    }
}
