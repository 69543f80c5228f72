//! What a replay did, and how far it is.

use std::time::Duration;

use everbus_core::{Cursor, EventId, GroupName, Position, Recorded};
use serde::Serialize;

/// What a replay did. A run that was resumed counts from its beginning.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ReplayReport {
    /// Events that reached the target: handled by the function or the fresh group, waiting for the live
    /// group, published as copies.
    pub processed: u64,
    /// Events that were selected and left out; [`skips`](Self::skips) says why.
    pub skipped: u64,
    /// Events that failed: errors of the function, dead letters of the fresh group, copies that were
    /// refused.
    pub errors: u64,
    /// Why events were skipped.
    pub skips: ReplaySkips,
    /// The first errors with their texts; those of an earlier part of a resumed run are only counted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<ReplayFailure>,
    /// Where the run would go on; nothing if it is complete.
    pub next: Option<Cursor>,
    /// The fresh group, if it was kept for its dead letters or because the run was stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept_group: Option<GroupName>,
    /// How long this part of the run took.
    #[serde(rename = "elapsed_ms", serialize_with = "as_millis")]
    pub elapsed: Duration,
}

impl ReplayReport {
    /// Whether everything that was selected had its turn.
    pub fn is_complete(&self) -> bool {
        self.next.is_none()
    }

    /// Counts an event that failed, and keeps why if there are not `most` of them already.
    pub(super) fn failed(&mut self, record: &Recorded, error: impl Into<String>, most: usize) {
        self.errors += 1;
        if self.failures.len() < most {
            self.failures.push(ReplayFailure::new(record, error));
        }
    }
}

/// Why events were skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ReplaySkips {
    /// The filter said no.
    pub filtered: u64,
    /// No pattern of the group, or no handler of the fresh group, matches.
    pub unwanted: u64,
    /// The group was not done with them and will have them as it is.
    pub owed: u64,
    /// The group's inbox has them as handled: they wait for the group, and its idempotent handlers will
    /// not run.
    pub absorbed: u64,
    /// They left the log meanwhile.
    pub gone: u64,
    /// They are copies of an earlier replay.
    pub copies: u64,
    /// They were corrected: a dead letter of theirs was sent with another payload, to the group that is
    /// asked for, or, for copies, to any.
    pub replaced: u64,
    /// They are such corrections, and were sent to another group than the one that is asked for, or, for
    /// copies, to one alone.
    pub corrections: u64,
}

impl ReplaySkips {
    pub(super) fn total(&self) -> u64 {
        let Self {
            filtered,
            unwanted,
            owed,
            absorbed,
            gone,
            copies,
            replaced,
            corrections,
        } = self;
        filtered + unwanted + owed + absorbed + gone + copies + replaced + corrections
    }
}

/// One event that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ReplayFailure {
    /// The event.
    pub id: EventId,
    /// Where it is.
    pub position: Position,
    /// What went wrong.
    pub error: String,
}

impl ReplayFailure {
    pub(super) fn new(record: &Recorded, error: impl Into<String>) -> Self {
        Self {
            id: record.event.id(),
            position: record.position,
            error: error.into(),
        }
    }
}

/// How far a replay is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ReplayProgress {
    /// Events that reached the target.
    pub processed: u64,
    /// Events that were left out.
    pub skipped: u64,
    /// Events that failed.
    pub errors: u64,
    /// Where the selection begins. This and the next two numbers are for progress bars; with a single
    /// log they are positions.
    pub from: u64,
    /// Everything up to here had its turn.
    pub position: u64,
    /// Where the selection ends.
    pub upto: u64,
}

fn as_millis<S: serde::Serializer>(d: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}
