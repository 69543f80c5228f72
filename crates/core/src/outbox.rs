//! The outbox: events that were committed with the data they are about, on their way to a broker.
//!
//! The user writes events into `event_outbox` in a transaction of its own database. A *relay* takes
//! them from there, publishes them to any broker and marks them. Only one relay at a time holds the
//! lease of an outbox; others stand by. What was published and not yet marked when a relay died is
//! published again, and the id of the event absorbs it.

use std::time::Duration;

use serde::Serialize;

use crate::broker::BoxFuture;
use crate::error::Result;
use crate::event::Event;
use crate::time::Timestamp;

/// The right to relay an outbox until it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayLease {
    /// Who holds it.
    pub holder: String,
    /// Changes each time the lease goes to another holder.
    pub token: u64,
}

/// A row of the outbox on its way.
#[derive(Clone, Debug)]
pub struct OutboxRow {
    /// The row, as its store numbers it.
    pub row: i64,
    /// The text in the column `id`.
    pub id: String,
    /// The event, or why its payload cannot be read.
    pub event: Result<Event>,
    /// The text in the column `event_id`.
    pub event_id: String,
    /// The text in the column `event_type`.
    pub event_type: String,
    /// Attempts that were rejected so far.
    pub attempts: u32,
    /// The ordering key of the event.
    pub key: Option<String>,
}

/// What became of a row.
#[derive(Clone, Debug)]
pub enum RowOutcome {
    /// The broker has it.
    Sent,
    /// The broker or the row itself is to blame; tried again after this long. Rows of its key wait.
    Rejected {
        /// What was said.
        error: String,
        /// How long to wait.
        after: Duration,
    },
    /// Rejected for the last time: `failed`, with a dead letter.
    Failed {
        /// What was said.
        error: String,
    },
}

/// What a relay got.
#[derive(Debug, Default)]
pub struct Claimed {
    /// The rows, oldest first.
    pub rows: Vec<OutboxRow>,
    /// When the next row that waits may be tried, if none is ready now.
    pub next_due: Option<Timestamp>,
}

/// How an outbox stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OutboxStatus {
    /// Rows that wait to be relayed.
    pub pending: u64,
    /// Rows that were rejected at least once and wait for another attempt.
    pub retrying: u64,
    /// Rows that failed for good, or whose event became a dead letter.
    pub failed: u64,
    /// Rows the broker has.
    pub sent: u64,
    /// When the oldest row that waits was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_pending_at: Option<Timestamp>,
    /// What went wrong last with a row that waits or failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Who relays, if somebody holds the lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
}

/// A database with an outbox in it.
pub trait OutboxSource: Send + Sync + 'static {
    /// What to call it, for people.
    fn name(&self) -> String;

    /// Takes the lease, or keeps it: nothing while another relay holds it.
    fn acquire(&self, holder: String, lease: Duration)
    -> BoxFuture<'_, Result<Option<RelayLease>>>;

    /// Up to `limit` rows that are ready, oldest first, none whose key has an earlier row that waits.
    /// [`Code::LeaseLost`](crate::Code::LeaseLost) without the lease.
    fn claim(&self, lease: RelayLease, limit: usize) -> BoxFuture<'_, Result<Claimed>>;

    /// Says what became of rows, in one step. `LeaseLost` without the lease: then nothing is changed.
    fn settle(
        &self,
        lease: RelayLease,
        outcomes: Vec<(OutboxRow, RowOutcome)>,
    ) -> BoxFuture<'_, Result<()>>;

    /// Gives the lease back.
    fn release(&self, lease: RelayLease) -> BoxFuture<'_, Result<()>>;

    /// Waits until there may be something new, or for this long.
    fn wait(&self, at_most: Duration) -> BoxFuture<'_, ()>;

    /// How the outbox stands.
    fn status(&self) -> BoxFuture<'_, Result<OutboxStatus>>;
}
