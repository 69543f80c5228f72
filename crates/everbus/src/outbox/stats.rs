//! The counts of a relay.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::Serialize;

/// The counts of a relay since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RelayStats {
    /// Rows that the broker has acknowledged, duplicates included.
    pub sent: u64,
    /// Of these, events that the broker had already.
    pub duplicates: u64,
    /// Of these, rows that retried a dead letter.
    pub retried: u64,
    /// Attempts that were rejected.
    pub rejected: u64,
    /// Rows that were rejected for the last time.
    pub failed: u64,
    /// Old rows that were removed: sent long ago, or given up long ago.
    pub removed: u64,
    /// How often the broker or the outbox could not be reached.
    pub outages: u64,
    /// Whether this relay holds the lease of the outbox; otherwise it stands by, or has ended.
    pub relaying: bool,
    /// Whether it waits for the end of an outage of the broker or the outbox.
    pub waiting: bool,
    /// The last error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// The counters behind [`RelayStats`].
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) sent: AtomicU64,
    pub(super) duplicates: AtomicU64,
    pub(super) retried: AtomicU64,
    pub(super) rejected: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) removed: AtomicU64,
    pub(super) outages: AtomicU64,
    pub(super) relaying: AtomicBool,
    pub(super) waiting: AtomicBool,
    last_error: Mutex<Option<String>>,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn went_wrong(&self, error: &impl std::fmt::Display) {
        *self.last_error.lock() = Some(error.to_string());
    }

    pub(super) fn snapshot(&self) -> RelayStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RelayStats {
            sent: count(&self.sent),
            duplicates: count(&self.duplicates),
            retried: count(&self.retried),
            rejected: count(&self.rejected),
            failed: count(&self.failed),
            removed: count(&self.removed),
            outages: count(&self.outages),
            relaying: self.relaying.load(Ordering::Relaxed),
            waiting: self.waiting.load(Ordering::Relaxed),
            last_error: self.last_error.lock().clone(),
        }
    }
}
