//! The write operations of a store beside a broker: the runtime records events and outcomes there.
//!
//! An engine with a broker and a history (SQLite, PostgreSQL) writes both in one step. If the broker has no
//! history, the runtime writes to a store before the broker gets the outcome. After a crash in between, the
//! write is repeated; repeating any method here has no further effect.
//!
//! Each method that takes a record also gets the event. If the store does not have the event yet, it
//! [ingests](Store::ingest) it first.

use std::sync::Arc;
use std::time::Duration;

use crate::broker::BoxFuture;
use crate::dead_letters::{DeadLetterKey, Death, MAX_FAILURES, all_failures};
use crate::error::Result;
use crate::failure::{Failure, FailureKind};
use crate::group::GroupName;
use crate::id::EventId;
use crate::log::Recorded;
use crate::payloads::{EventKey, StoredStage};
use crate::position::Position;
use crate::time::Timestamp;

/// A store that can be written to. Groups are identified by name. An unknown group is added without
/// subscriptions, so it never keeps events from being removed.
pub trait Store: Send + Sync + 'static {
    /// Copies events into the store's log, with the time at which their broker received them. The time is
    /// raised to that of the previous event in the store, or lowered to the store's current time, if it is
    /// outside of these. If the tenant has used the id already, the stored event stays unchanged, whatever
    /// its body: this is never [`Code::IdReused`](crate::Code::IdReused). Returns the position of each
    /// event in the store.
    fn ingest(&self, records: Vec<Arc<Recorded>>) -> BoxFuture<'_, Result<Vec<Position>>>;

    /// Stores a payload stage of an event. If the event has not been ingested yet, the stage waits for it, and is
    /// removed after [`EARLY_STAGES`] if the event never comes.
    fn store_stage(&self, event: EventKey, stage: StoredStage) -> BoxFuture<'_, Result<()>>;

    /// Records a failed attempt. Attempts are numbered: the same number again replaces the first record.
    fn record_failure(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        failure: Failure,
    ) -> BoxFuture<'_, Result<()>>;

    /// The failed attempts of events that a group has not finished, in order; one answer per event.
    fn failures(
        &self,
        group: GroupName,
        events: Vec<EventKey>,
    ) -> BoxFuture<'_, Result<Vec<Vec<Failure>>>>;

    /// Records in the inbox that a group has handled an event. Recorded failures are kept with the event
    /// and no longer belong to the next attempt.
    fn record_handled(
        &self,
        group: GroupName,
        records: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<()>>;

    /// Records that a group has skipped an event.
    fn record_skip(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        reason: String,
    ) -> BoxFuture<'_, Result<()>>;

    /// Stores a dead letter: opens it, or opens it again if it had been retried. Storing the same final
    /// failure twice counts once ([`Burial::with_earlier`]). No `system.dead_letter` is appended here: the
    /// runtime publishes it through the broker.
    fn bury(&self, letter: Burial) -> BoxFuture<'_, Result<()>>;

    /// Marks dead letters as retried through the broker: they are no longer open. A dead letter that does
    /// not exist, is not open, or has failed again since is not changed.
    fn mark_retried(&self, letters: Vec<SentBack>, at: Timestamp) -> BoxFuture<'_, Result<()>>;

    /// Like [`mark_retried`](Self::mark_retried), for a dead letter that was replaced by a corrected event. The dead
    /// letter then names that event.
    fn mark_replaced(
        &self,
        letter: SentBack,
        by: EventId,
        at: Timestamp,
    ) -> BoxFuture<'_, Result<()>>;
}

/// A dead letter that was retried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentBack {
    /// The dead letter, by its position in the store.
    pub letter: DeadLetterKey,
    /// The final failure that it was retried for. The retried event may have failed again already, and that
    /// dead letter must stay open.
    pub died_at: Timestamp,
}

/// A dead letter to store.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Burial {
    /// The event.
    pub record: Arc<Recorded>,
    /// The group that gave up on it.
    pub group: GroupName,
    /// The attempts begun since it was published, or since its last retry. If the last failure [was no
    /// attempt](crate::FailureKind::is_attempt), the store counts one less.
    pub attempts: u32,
    /// Their failures, in order.
    pub failures: Vec<Failure>,
    /// The time of the final failure.
    pub died_at: Timestamp,
    /// Whether a retry from the dead letters failed. If so, these are new attempts, even if the store does not know of
    /// the retry yet.
    pub sent_back: bool,
}

impl Burial {
    /// A dead letter of a group.
    pub fn new(
        record: Arc<Recorded>,
        group: GroupName,
        attempts: u32,
        failures: Vec<Failure>,
        died_at: Timestamp,
    ) -> Self {
        Self {
            record,
            group,
            attempts,
            failures,
            died_at,
            sent_back: false,
        }
    }

    /// Marks it as failed again after a retry.
    #[must_use]
    pub fn of_sent_back(mut self) -> Self {
        self.sent_back = true;
        self
    }

    /// For stores: the attempts and failures of the dead letter after this final failure.
    ///
    /// They are added to those from before the retry. If the letter was not retried, or has the same time
    /// of failure, this is a repetition of the same record, and nothing is added twice.
    pub fn with_earlier(&self, earlier: Option<EarlierDeath>) -> Death {
        let was_none = self.failures.last().is_some_and(|f| !f.kind.is_attempt());
        let mut death = Death {
            attempts: self.attempts.saturating_sub(u32::from(was_none)),
            failures: all_failures(Vec::new(), self.failures.iter().cloned()),
            died_at: self.died_at,
        };
        match earlier {
            Some(earlier) if earlier.open || earlier.died_at == self.died_at => {
                death.failures.retain(|f| !earlier.failures.contains(f));
                // An event that waited for a handler was not handed out.
                let was_one =
                    |f: &&Failure| f.kind.is_attempt() && f.kind != FailureKind::NoHandler;
                let more = death.failures.iter().filter(was_one).count();
                let more = u32::try_from(more).unwrap_or(u32::MAX);
                death.attempts = match self.sent_back {
                    true => more,
                    false => death.attempts.saturating_sub(earlier.attempts),
                };
                death.after(earlier.attempts, earlier.failures)
            }
            Some(earlier) => death.after(earlier.attempts, earlier.failures),
            None => death,
        }
    }
}

/// The earlier record of the same dead letter.
#[derive(Clone, Debug)]
pub struct EarlierDeath {
    /// All attempts.
    pub attempts: u32,
    /// All failures.
    pub failures: Vec<Failure>,
    /// The time of its last final failure.
    pub died_at: Timestamp,
    /// Whether the dead letter is open: not retried since its last final failure.
    pub open: bool,
}

/// For stores: the failed attempts of an event in a group, those of earlier runs first. A run ends when the
/// group finishes the event; a retry begins the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptFailures {
    /// The failures, in order.
    pub all: Vec<Failure>,
    /// How many of them belong to earlier runs.
    pub past: usize,
}

impl KeptFailures {
    /// Adds a failure to the current run; the same attempt again replaces its record.
    pub fn record(&mut self, failure: Failure) {
        let current = self.all.split_off(self.past.min(self.all.len()));
        let others = current.into_iter().filter(|f| f.attempt != failure.attempt);
        let mut current: Vec<Failure> = others.collect();
        current.push(failure);
        current.sort_by_key(|failure| failure.attempt);
        self.all.append(&mut current);
        let over = self.all.len().saturating_sub(MAX_FAILURES);
        self.all.drain(..over);
        self.past = self.past.saturating_sub(over);
    }

    /// The failures of the current run.
    pub fn current(&self) -> &[Failure] {
        &self.all[self.past.min(self.all.len())..]
    }

    /// Ends the current run; its failures are kept.
    pub fn end(&mut self) {
        self.past = self.all.len();
    }

    /// Removes the failures of the current run, because the dead letter keeps them.
    pub fn forget_current(&mut self) {
        self.all.truncate(self.past);
    }
}

/// How long a payload stage waits for its event.
pub const EARLY_STAGES: Duration = Duration::from_secs(14 * 24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Event;

    fn failure(attempt: u32, at: i64) -> Failure {
        let at = Timestamp::from_micros(at);
        Failure::new(attempt, at, FailureKind::Error, format!("{attempt}"))
    }

    fn burial(attempts: u32, failures: Vec<Failure>, died_at: i64) -> Burial {
        let event = Event::builder("a.b").payload("{}").build().unwrap();
        let record = Recorded::new(event, Position::seq(1), Timestamp::EPOCH);
        let died_at = Timestamp::from_micros(died_at);
        let group = GroupName::unnamed();
        Burial::new(Arc::new(record), group, attempts, failures, died_at)
    }

    // conformance: contract/store-burial-adds: A death after a retry adds up; the same run told again does not.
    #[test]
    fn only_a_death_after_a_retry_adds_up() {
        let first = burial(2, vec![failure(1, 1), failure(2, 2)], 2);
        let Death {
            attempts, failures, ..
        } = first.with_earlier(None);
        assert_eq!((attempts, failures.len()), (2, 2));
        let earlier = |open| EarlierDeath {
            attempts: 2,
            failures: first.failures.clone(),
            died_at: first.died_at,
            open,
        };
        // Repeated, at once or after the retry.
        for open in [true, false] {
            let Death {
                attempts, failures, ..
            } = first.with_earlier(Some(earlier(open)));
            assert_eq!((attempts, &failures), (2, &first.failures));
        }
        // Delivered again because the broker did not get the verdict.
        let mut again = first.failures.clone();
        again.push(failure(3, 9));
        let Death {
            attempts, failures, ..
        } = burial(3, again.clone(), 9).with_earlier(Some(earlier(true)));
        assert_eq!((attempts, failures), (3, again));
        // Failed again before the store knew of the retry.
        let early = burial(1, vec![failure(1, 9)], 9).of_sent_back();
        let Death {
            attempts, failures, ..
        } = early.with_earlier(Some(earlier(true)));
        assert_eq!((attempts, failures.len()), (3, 3));
        // No process had a handler for it any more. That is no attempt.
        let none = Failure::new(1, Timestamp::from_micros(9), FailureKind::NoHandler, "x");
        let unhandled = burial(1, vec![none], 9).of_sent_back();
        let Death {
            attempts, failures, ..
        } = unhandled.with_earlier(Some(earlier(true)));
        assert_eq!((attempts, failures.len()), (2, 3));
        // Failed again after a retry.
        let next = burial(1, vec![failure(1, 9)], 9);
        let Death {
            attempts, failures, ..
        } = next.with_earlier(Some(earlier(false)));
        assert_eq!((attempts, failures.len()), (3, 3));
    }

    #[test]
    fn a_failure_that_was_no_attempt_is_not_counted() {
        let at = Timestamp::from_micros(1);
        let rejected = Failure::new(1, at, FailureKind::Rejected, "open");
        assert_eq!(burial(1, vec![rejected], 1).with_earlier(None).attempts, 0);
    }

    // conformance: contract/store-failures-numbered: Failures come back in the order of their attempts, each once; those of a run that is over stay and belong to no next attempt.
    #[test]
    fn failures_are_in_order_and_belong_to_one_run() {
        let mut kept = KeptFailures::default();
        for (attempt, at) in [(2, 5), (1, 1), (2, 6)] {
            kept.record(failure(attempt, at));
        }
        assert_eq!(kept.current(), [failure(1, 1), failure(2, 6)]);
        kept.end();
        assert!(kept.current().is_empty());
        kept.record(failure(1, 9));
        assert_eq!(kept.current(), [failure(1, 9)]);
        assert_eq!(kept.all.len(), 3);
        kept.forget_current();
        assert_eq!(kept.all.len(), 2);
        for attempt in 1..=300 {
            kept.record(failure(attempt, 10));
        }
        assert_eq!((kept.all.len(), kept.past), (MAX_FAILURES, 0));
    }
}
