//! The counts of a bridge.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use everbus_core::Error;
use parking_lot::Mutex;
use serde::Serialize;

/// What a bridge has done since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BridgeStats {
    /// Events that the target stored.
    pub moved: u64,
    /// Events that the target had already.
    pub duplicates: u64,
    /// Events that were not carried because they came from the target.
    pub returned: u64,
    /// Events that the target refused; they are dead letters of the bridge's group.
    pub refused: u64,
    /// Verdicts that came too late: these events come again, and the target knows them.
    pub late: u64,
    /// Events of the source that are not settled, at the last look; `None` before the first one.
    pub lag: Option<u64>,
    /// Whether the bridge waits because an end is away.
    pub waiting: bool,
    /// The last error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) moved: AtomicU64,
    pub(super) duplicates: AtomicU64,
    pub(super) returned: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) late: AtomicU64,
    pub(super) lag: AtomicU64,
    pub(super) looked: AtomicBool,
    pub(super) waiting: AtomicBool,
    last_error: Mutex<Option<String>>,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn went_wrong(&self, error: &Error) {
        *self.last_error.lock() = Some(error.to_string());
    }

    pub(super) fn snapshot(&self) -> BridgeStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let looked = self.looked.load(Ordering::Relaxed);
        BridgeStats {
            moved: get(&self.moved),
            duplicates: get(&self.duplicates),
            returned: get(&self.returned),
            refused: get(&self.refused),
            late: get(&self.late),
            lag: looked.then(|| get(&self.lag)),
            waiting: self.waiting.load(Ordering::Relaxed),
            last_error: self.last_error.lock().clone(),
        }
    }
}
