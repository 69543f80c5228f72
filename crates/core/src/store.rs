//! The writing side of a store: what the runtime tells it about events that a broker beside it moves.
//!
//! An engine that moves and remembers at once (SQLite, PostgreSQL) writes its memory by itself, in the
//! step that moves. Where the broker cannot remember, the runtime writes to a store, before the broker
//! learns of the outcome: a crash in between repeats the write, and every method here takes a repetition
//! for the same thing.
//!
//! Each method that is given a record brings the event along. If the store has not seen the event yet, it
//! [ingests](Store::ingest) it first.

use std::sync::Arc;

use crate::broker::BoxFuture;
use crate::dead_letters::DeadLetterKey;
use crate::error::Result;
use crate::failure::Failure;
use crate::group::GroupName;
use crate::log::Recorded;
use crate::payloads::EventKey;
use crate::position::Position;
use crate::time::Timestamp;

/// A store that can be written to. Groups are known by name; one that the store does not know yet is
/// added, wants nothing, and so never keeps events from being removed.
pub trait Store: Send + Sync + 'static {
    /// Copies events into the store's own log, with the time at which their broker received them. An event
    /// that is there already stays as it is. Returns where each is in the store.
    fn ingest(&self, records: Vec<Arc<Recorded>>) -> BoxFuture<'_, Result<Vec<Position>>>;

    /// Remembers a failed attempt. Attempts are numbered: the same number again replaces the first record.
    fn record_failure(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        failure: Failure,
    ) -> BoxFuture<'_, Result<()>>;

    /// The failed attempts of events that a group is not done with, in order; one answer per event.
    fn failures(
        &self,
        group: GroupName,
        events: Vec<EventKey>,
    ) -> BoxFuture<'_, Result<Vec<Vec<Failure>>>>;

    /// Remembers that a group has handled an event, in its inbox. What is on record of failed attempts is
    /// kept with the event and no longer belongs to the next attempt.
    fn record_handled(
        &self,
        group: GroupName,
        records: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<()>>;

    /// Remembers that a group has passed an event by on purpose.
    fn record_skip(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        reason: String,
    ) -> BoxFuture<'_, Result<()>>;

    /// Puts a dead letter: opens it, or opens it again if it had been retried. The same death told twice is
    /// one death: attempts add up only if `died_at` differs.
    fn bury(&self, letter: Burial) -> BoxFuture<'_, Result<()>>;

    /// Notes that dead letters were sent back to their group through the broker: they are no longer open.
    fn mark_retried(&self, letters: Vec<DeadLetterKey>, at: Timestamp)
    -> BoxFuture<'_, Result<()>>;
}

/// A dead letter that a store is to keep.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Burial {
    /// The event.
    pub record: Arc<Recorded>,
    /// The group that gave up on it.
    pub group: GroupName,
    /// The attempts since it was published, or since it was last sent back.
    pub attempts: u32,
    /// Their failures, in order.
    pub failures: Vec<Failure>,
    /// When it died.
    pub died_at: Timestamp,
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
        }
    }
}
