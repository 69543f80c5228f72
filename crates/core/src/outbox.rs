//! The outbox: events committed with the data they are about, until a relay publishes them.
//!
//! A service writes events into `event_outbox` in a transaction of its database. A *relay* reads them,
//! publishes them to any broker and marks them. Only one relay at a time holds the lease of an outbox;
//! others stand by. A row that was published and not yet marked when a relay died is published again, and
//! the broker recognises the event id.

use std::time::Duration;

use serde::Serialize;

use crate::broker::BoxFuture;
use crate::dead_letters::DEAD_LETTER_EVENT;
use crate::error::Result;
use crate::event::Event;
use crate::failure::Failure;
use crate::id::EventId;
use crate::maintenance::Retention;
use crate::retry::RetryPolicy;
use crate::time::Timestamp;

/// A row that was rejected this often fails for good.
pub const OUTBOX_ATTEMPTS: u32 = 5;
/// The group name of failed rows among the dead letters.
pub const OUTBOX_GROUP: &str = "outbox";
/// The longest lease. A lease that seems longer was written before a clock was set back, and counts as
/// expired.
pub const LONGEST_RELAY_LEASE: Duration = Duration::from_secs(60);

/// The delay of a rejected row after this many attempts: rule 8. `None` after the last.
pub fn outbox_delay(attempts: u32) -> Option<Duration> {
    let policy = RetryPolicy::default().max_retries(OUTBOX_ATTEMPTS - 1);
    policy.after_failure(attempts, 0.0)
}

/// The right to relay an outbox, until it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayLease {
    /// The holder.
    pub holder: String,
    /// A fencing token: changes each time the lease goes to another holder.
    pub token: u64,
    /// The last row that existed when this holder got the lease. Another relay may have published rows up to this one
    /// without marking them.
    pub since: i64,
}

/// A row of the outbox.
#[derive(Clone, Debug)]
pub struct OutboxRow {
    /// The row number in its store.
    pub row: i64,
    /// The text in the column `id`.
    pub id: String,
    /// The event, or why its payload cannot be decoded.
    pub event: Result<Event>,
    /// The text in the column `event_id`.
    pub event_id: String,
    /// The text in the column `event_type`.
    pub event_type: String,
    /// Rejected attempts so far.
    pub attempts: u32,
    /// The ordering key of the event.
    pub key: Option<String>,
    /// The tenant of the event, as far as it is known if the event cannot be decoded.
    pub tenant: Option<String>,
    /// How often the row was changed since it was written. A settlement applies only to this revision.
    pub revision: i64,
    /// When the row was last requested to be sent: when it was written, or set to wait again. The latest
    /// time that the text allows; `None` if it is not a time.
    pub wanted_at: Option<Timestamp>,
}

/// The outcome of a row.
#[derive(Clone, Debug)]
pub enum RowOutcome {
    /// The broker has accepted it.
    Sent,
    /// The broker or the bus rejects it; tried again after this long. Later rows of its key wait.
    Rejected {
        /// The error.
        error: String,
        /// The delay.
        after: Duration,
    },
    /// Rejected for the last time: `failed`, with a dead letter.
    Failed {
        /// The error.
        error: String,
    },
}

impl OutboxRow {
    /// The id of the event, also if the event cannot be decoded.
    pub fn uuid(&self) -> EventId {
        let event = self.event.as_ref();
        event.map_or_else(|_| EventId::from_foreign("", &self.event_id), Event::id)
    }

    /// The event that announces a failed row: `system.dead_letter`, with an id made from the event and the
    /// time, so that a row that is retried and fails again is announced again. `None` for an event of the
    /// system itself.
    pub fn dead_letter_notice(&self, error: &str, attempts: u32, at: Timestamp) -> Option<Event> {
        if self.event_type.starts_with("system.") {
            return None;
        }
        let event = self.event.as_ref().ok();
        let cause = self.uuid();
        let moment = format!("{DEAD_LETTER_EVENT} {at}");
        let id = EventId::derived(cause, at, OUTBOX_GROUP, &moment, attempts);
        let correlation = event.map_or_else(
            || self.event_id.clone(),
            |event| event.correlation_id().into_owned(),
        );
        let mut notice = Event::builder(DEAD_LETTER_EVENT)
            .id(id)
            .occurred_at(at)
            .source("everbus")
            .json(&serde_json::json!({
                "eventId": self.event_id,
                "eventType": self.event_type,
                "error": error,
                "group": OUTBOX_GROUP,
                "attempts": attempts,
            }))
            .causation_id(cause.to_string());
        if !correlation.is_empty() {
            notice = notice.correlation_id(correlation);
        }
        if let Some(tenant) = &self.tenant {
            notice = notice.tenant(tenant.as_str());
        }
        notice.build().ok()
    }
}

/// The result of a claim.
#[derive(Debug, Default)]
pub struct Claimed {
    /// The rows, oldest first.
    pub rows: Vec<OutboxRow>,
    /// Whether there may be more rows after these.
    pub more: bool,
    /// When the next waiting row is due, if some wait.
    pub next_due: Option<Timestamp>,
}

/// A failed row, for display.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FailedRow {
    /// The text in the column `id`.
    pub id: String,
    /// The text in the column `event_id`.
    pub event_id: String,
    /// The text in the column `event_type`.
    pub event_type: String,
    /// Rejected attempts. Zero if the broker accepted it and its event became a dead letter later.
    pub attempts: u32,
    /// The text in the column `created_at`.
    pub created_at: String,
    /// The last error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Every rejection, oldest first, if the relay gave the row up; including those before an earlier
    /// retry.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<Failure>,
}

/// How long an outbox keeps finished rows. Waiting rows are always kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutboxKeep {
    /// Rows, after they were sent; `None`: for ever.
    pub sent: Option<Duration>,
    /// Dead letters of the outbox and their rows, after the final failure; `None`: for ever.
    pub dead_letters: Option<Duration>,
}

impl Default for OutboxKeep {
    /// As the standard retention: 7 days, and 30.
    fn default() -> Self {
        let standard = Retention::standard();
        Self {
            sent: standard.outbox,
            dead_letters: standard.dead_letters,
        }
    }
}

/// The result of removing old rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// Rows.
    pub rows: u64,
    /// Dead letters of the outbox.
    pub dead_letters: u64,
    /// Whether there may be more to remove.
    pub more: bool,
}

/// The state of an outbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OutboxStatus {
    /// Rows that wait to be relayed.
    pub pending: u64,
    /// Rows that were rejected at least once and wait for another attempt.
    pub retrying: u64,
    /// Rows that failed for good, or whose event became a dead letter.
    pub failed: u64,
    /// Rows that the broker has accepted.
    pub sent: u64,
    /// When the oldest waiting row was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_pending_at: Option<Timestamp>,
    /// The last error of a waiting or failed row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// The relay that holds the lease, if one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
}

/// A database with an outbox in it.
pub trait OutboxSource: Send + Sync + 'static {
    /// Its name, for messages.
    fn name(&self) -> String;

    /// Takes or renews the lease; `None` while another relay holds it.
    fn acquire(&self, holder: String, lease: Duration)
    -> BoxFuture<'_, Result<Option<RelayLease>>>;

    /// Up to `limit` ready rows, oldest first, after the row `after` (0: all of them); without rows whose
    /// key has an earlier waiting row. It only reads: rows are returned again until they are settled.
    fn claim(&self, after: i64, limit: usize) -> BoxFuture<'_, Result<Claimed>>;

    /// Records the outcomes of rows. Fails with [`Code::LeaseLost`](crate::Code::LeaseLost), and changes no further row,
    /// if the relay does not hold the lease. Rows that no longer wait are not changed. Rows that were changed after
    /// they were claimed are not changed either, because the outcome is about the earlier content.
    fn settle(
        &self,
        lease: RelayLease,
        outcomes: Vec<(OutboxRow, RowOutcome)>,
    ) -> BoxFuture<'_, Result<()>>;

    /// Releases the lease.
    fn release(&self, lease: RelayLease) -> BoxFuture<'_, Result<()>>;

    /// Waits until there may be new rows, or for this long.
    fn wait(&self, at_most: Duration) -> BoxFuture<'_, ()>;

    /// The state of the outbox.
    fn status(&self) -> BoxFuture<'_, Result<OutboxStatus>>;

    /// Rows that failed, newest first.
    fn failed(&self, limit: usize) -> BoxFuture<'_, Result<Vec<FailedRow>>>;

    /// Sets failed rows to wait again, with a fresh set of attempts: those with one of these texts in `id`
    /// or `event_id`, or all of them. Returns how many.
    fn retry(&self, ids: Option<Vec<String>>) -> BoxFuture<'_, Result<u64>>;

    /// The number of dead letters of the outbox itself: events that a relay gave up on and that were not
    /// retried. They belong to no group.
    fn dead_letters(&self) -> BoxFuture<'_, Result<u64>>;

    /// Finds a dead letter of the outbox by the text that a user typed or by the event id. Returns the text
    /// that [`retry`](Self::retry) takes.
    fn find_dead_letter(&self, text: String, id: EventId) -> BoxFuture<'_, Result<Option<String>>>;

    /// Removes rows that are older than `keep`: in small steps and for a short time, so call it again while
    /// there is more. Does nothing without the lease, and nothing in the file of an engine, which has its
    /// own retention.
    fn forget(&self, lease: RelayLease, keep: OutboxKeep) -> BoxFuture<'_, Result<Forgotten>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: memory/outbox-attempts: a rejected row waits 1, 2, 4 and 8 seconds; the fifth rejection is the last
    #[test]
    fn a_rejected_row_waits_by_rule_8_and_is_given_up_after_five_attempts() {
        let waits: Vec<Option<u64>> = (1..=6)
            .map(|attempts| outbox_delay(attempts).map(|d| d.as_secs()))
            .collect();
        assert_eq!(
            waits,
            [Some(1), Some(2), Some(4), Some(8), None, None],
            "attempts 1 to 6"
        );
    }

    #[test]
    fn a_row_that_was_given_up_is_told_of_each_time() {
        let row = |event_type: &str| OutboxRow {
            row: 1,
            id: "r".into(),
            event: Err(crate::Error::shutdown()),
            event_id: "order-1".into(),
            event_type: event_type.into(),
            attempts: 4,
            key: None,
            tenant: Some("acme".into()),
            revision: 0,
            wanted_at: None,
        };
        let tell = |at| {
            let told = row("order.placed").dead_letter_notice("no", 5, at);
            told.unwrap()
        };
        let told = tell(Timestamp::EPOCH);
        assert_eq!(told.id(), tell(Timestamp::EPOCH).id());
        let later = tell(Timestamp::from_micros(9));
        assert_ne!(told.id(), later.id(), "it was retried and failed again");
        assert_eq!(told.event_type(), DEAD_LETTER_EVENT);
        let body: serde_json::Value = told.json().unwrap();
        assert_eq!(body["eventId"], "order-1");
        assert_eq!(body["eventType"], "order.placed");
        assert_eq!(body["error"], "no");
        assert_eq!(told.tenant(), Some("acme"));
        let own = row("system.dead_letter").dead_letter_notice("no", 5, Timestamp::EPOCH);
        assert!(own.is_none());
    }
}
