//! The outbox: events that were committed with the data they are about, on their way to a broker.
//!
//! The user writes events into `event_outbox` in a transaction of its own database. A *relay* takes
//! them from there, publishes them to any broker and marks them. Only one relay at a time holds the
//! lease of an outbox; others stand by. What was published and not yet marked when a relay died is
//! published again, and the id of the event absorbs it.

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

/// A row that was rejected so often is given up.
pub const OUTBOX_ATTEMPTS: u32 = 5;
/// The name under which rows that were given up stand among the dead letters.
pub const OUTBOX_GROUP: &str = "outbox";
/// No lease lasts longer. One that seems to was written before a clock went back, and counts as over.
pub const LONGEST_RELAY_LEASE: Duration = Duration::from_secs(60);

/// How long a row waits that was rejected, so many attempts included: rule 8. `None` after the last.
pub fn outbox_delay(attempts: u32) -> Option<Duration> {
    let policy = RetryPolicy::default().max_retries(OUTBOX_ATTEMPTS - 1);
    policy.after_failure(attempts, 0.0)
}

/// The right to relay an outbox until it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayLease {
    /// Who holds it.
    pub holder: String,
    /// Changes each time the lease goes to another holder.
    pub token: u64,
    /// Rows up to this one were there when the lease came to this holder: another relay may have
    /// published them without living to mark them.
    pub since: i64,
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
    /// The tenant of the event, as far as it can be told where the event cannot be read.
    pub tenant: Option<String>,
    /// How often the row was changed since it was written. Settling goes by it.
    pub revision: i64,
    /// When somebody last wanted it sent: when it was written, or made to wait again. The last moment
    /// that the text allows; none if it is no time.
    pub wanted_at: Option<Timestamp>,
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

impl OutboxRow {
    /// The id of the event, also where the event cannot be read.
    pub fn uuid(&self) -> EventId {
        let event = self.event.as_ref();
        event.map_or_else(|_| EventId::from_foreign("", &self.event_id), Event::id)
    }

    /// The event that tells of a row that was given up: `system.dead_letter`, under an id made of the
    /// event and the time, so that a row which is retried and fails again is told of again. None for
    /// an event of the system itself.
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

/// What a relay got.
#[derive(Debug, Default)]
pub struct Claimed {
    /// The rows, oldest first.
    pub rows: Vec<OutboxRow>,
    /// Whether there may be more rows beyond these.
    pub more: bool,
    /// When the next row that waits may be tried, if some wait.
    pub next_due: Option<Timestamp>,
}

/// A row that failed, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FailedRow {
    /// The text in the column `id`.
    pub id: String,
    /// The text in the column `event_id`.
    pub event_id: String,
    /// The text in the column `event_type`.
    pub event_type: String,
    /// Attempts that were rejected. None if the broker took it and its event became a dead letter later.
    pub attempts: u32,
    /// The text in the column `created_at`.
    pub created_at: String,
    /// What went wrong last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Every rejection, oldest first, if the relay gave it up; those before an earlier retry included.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<Failure>,
}

/// How long an outbox keeps what is over. What waits is always kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutboxKeep {
    /// Rows, after they were sent; `None` is for ever.
    pub sent: Option<Duration>,
    /// Dead letters of the outbox and their rows, after their death; `None` is for ever.
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

/// What an outbox has removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// Rows.
    pub rows: u64,
    /// Dead letters of the outbox.
    pub dead_letters: u64,
    /// Whether there may be more to remove.
    pub more: bool,
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

    /// Up to `limit` rows that are ready, oldest first, beyond the row `after` (0: all of them); none
    /// whose key has an earlier row that waits. It only looks: rows come again until they are settled.
    fn claim(&self, after: i64, limit: usize) -> BoxFuture<'_, Result<Claimed>>;

    /// Says what became of rows. [`Code::LeaseLost`](crate::Code::LeaseLost) without the lease: from
    /// then on nothing is changed. Rows that no longer wait stay as they are, and so do rows that somebody
    /// changed after they were claimed: what was said was said about another event.
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

    /// Rows that failed, newest first.
    fn failed(&self, limit: usize) -> BoxFuture<'_, Result<Vec<FailedRow>>>;

    /// Makes failed rows wait again, with a fresh set of attempts: those with one of these texts in `id` or
    /// `event_id`, or all of them. Returns how many.
    fn retry(&self, ids: Option<Vec<String>>) -> BoxFuture<'_, Result<u64>>;

    /// How many dead letters of its own the outbox has: events that a relay gave up on and that nobody
    /// has retried. No group knows them.
    fn dead_letters(&self) -> BoxFuture<'_, Result<u64>>;

    /// Whether one of them is of this event, by the text that somebody typed or by its id: then the text
    /// that [`retry`](Self::retry) knows it by.
    fn find_dead_letter(&self, text: String, id: EventId) -> BoxFuture<'_, Result<Option<String>>>;

    /// Removes what is older than it is to be kept: in small steps, and for a moment only, so that it is
    /// to be called again while there is more. Nothing without the lease, and nothing in the file of an
    /// engine, whose own retention does that.
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
