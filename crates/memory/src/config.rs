//! The options of the engine.

use std::sync::Arc;

use everbus_core::{Clock, SystemClock};

/// The options of the engine.
#[derive(Clone, Debug)]
pub struct Options {
    /// The clock for due times, leases and ages.
    pub clock: Arc<dyn Clock>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
        }
    }
}
