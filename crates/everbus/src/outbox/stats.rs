//! The counts of a relay.

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

impl RelayStats {
    pub(super) fn went_wrong(&mut self, error: &impl std::fmt::Display) {
        self.last_error = Some(error.to_string());
    }
}
