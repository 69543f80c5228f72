//! The live state of a server: the end of the log, the figures, and the number of listeners.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::Bus;

use crate::figures::Figures;
use crate::metrics::Metrics;
use crate::ws::follow::Hub;

/// The state that the WebSocket, server-sent events, the dashboard and the metrics share.
pub(crate) struct LiveState {
    hub: Arc<Hub>,
    figures: Figures,
    listeners: Arc<AtomicUsize>,
}

impl LiveState {
    pub(crate) fn new(bus: &Bus) -> Self {
        Self {
            hub: Hub::new(bus.clone()),
            figures: Figures::new(bus.clone(), Metrics::install()),
            listeners: Arc::default(),
        }
    }

    pub(crate) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    pub(crate) fn figures(&self) -> &Figures {
        &self.figures
    }

    /// The number of connected listeners: clients of the WebSocket and of server-sent events.
    pub(crate) fn listeners(&self) -> usize {
        self.listeners.load(Ordering::Relaxed)
    }

    /// Waits until every listener has left, at most for `patience`.
    pub(crate) async fn until_left(&self, patience: Duration) {
        let left = async {
            while self.listeners() > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = tokio::time::timeout(patience, left).await;
    }

    /// Takes one of `most` places for listeners; `None` if all are taken. Dropping the place frees it.
    pub(crate) fn connect(&self, most: usize) -> Option<Place> {
        let taken = self.listeners.fetch_add(1, Ordering::Relaxed);
        let place = Place(self.listeners.clone());
        (taken < most).then_some(place)
    }
}

/// The place of one listener.
pub(crate) struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
