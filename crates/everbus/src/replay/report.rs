//! The report of a replay, and its progress.

use std::time::Duration;

use everbus_core::{Cursor, EventId, GroupName, Position, Recorded};
use serde::Serialize;

/// The result of a replay. A resumed run counts from its beginning.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ReplayReport {
    /// Events that reached the target: handled by the function or the fresh group, waiting in the live
    /// group, published as copies.
    pub processed: u64,
    /// Events that were selected and left out; [`skips`](Self::skips) says why.
    pub skipped: u64,
    /// Events that failed: errors of the function, dead letters of the fresh group, copies that were
    /// refused.
    pub errors: u64,
    /// Why events were skipped.
    pub skips: ReplaySkips,
    /// The first errors with their texts; errors of an earlier part of a resumed run are only counted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<ReplayFailure>,
    /// Where a resumed run would continue; `None` if the run is complete.
    pub next: Option<Cursor>,
    /// The fresh group, if it was kept for its dead letters or because the run was stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept_group: Option<GroupName>,
    /// How long this part of the run took.
    #[serde(rename = "elapsed_ms", serialize_with = "as_millis")]
    pub elapsed: Duration,
}

impl ReplayReport {
    /// Whether all selected events were processed.
    pub fn is_complete(&self) -> bool {
        self.next.is_none()
    }

    /// Counts a failed event, and keeps its error text if fewer than `most` are kept.
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
    /// The filter returned false.
    pub filtered: u64,
    /// No pattern of the group, or no handler of the fresh group, matches.
    pub unwanted: u64,
    /// They were still pending in the group, which handles them anyway.
    pub owed: u64,
    /// The group's inbox has them as handled: they wait for the group, and its idempotent handlers will not
    /// run.
    pub absorbed: u64,
    /// They were removed from the log meanwhile.
    pub gone: u64,
    /// They are copies of an earlier replay.
    pub copies: u64,
    /// They were corrected: one of their dead letters was replaced by an event with another payload, for
    /// the target group or, in a replay as copies, for any group.
    pub replaced: u64,
    /// They are corrections for another group than the target or, in a replay as copies, for a single
    /// group.
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
    /// Its position.
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

/// The progress of a replay.
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
    /// Everything up to here is processed.
    pub position: u64,
    /// Where the selection ends.
    pub upto: u64,
}

fn as_millis<S: serde::Serializer>(d: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}
