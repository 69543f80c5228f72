//! Outcomes: what is kept of an event that failed before a group finished it. An event that succeeds at its
//! first attempt has no outcome.

use everbus_core::{DeadLetter, Death, Ended, Failure, Ran, Timestamp, all_failures, given_up};

use crate::groups::Group;

/// The attempts, the failures and the end of an event that failed in a group before it was finished.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// How many attempts began, including the last one.
    attempts: u32,
    failures: Vec<Failure>,
    pub(crate) ended: Ended,
}

impl Group {
    /// Settles a row for good as handled or skipped. Returns whether the row existed. Keeps the failures of an
    /// event that failed in this run, or that was a dead letter `before`.
    pub(crate) fn end(
        &mut self,
        position: u64,
        before: bool,
        ran: Option<Box<Ran>>,
        now: Timestamp,
    ) -> bool {
        let Some(row) = self.finish(position) else {
            return false;
        };
        if !row.failures.is_empty() || before {
            self.keep(position, (row.attempts, row.failures), ran, now);
        }
        true
    }

    /// Skips an event that failed for good in an ephemeral group, and keeps its failures.
    pub(crate) fn give_up(&mut self, position: u64, death: Death, now: Timestamp) {
        self.skip(position, &given_up(death.failures.last()));
        self.keep(position, (death.attempts, death.failures), None, now);
    }

    fn keep(
        &mut self,
        position: u64,
        (attempts, failures): (u32, Vec<Failure>),
        ran: Option<Box<Ran>>,
        now: Timestamp,
    ) {
        let mut outcome = Outcome {
            attempts,
            failures,
            ended: Ended {
                at: now,
                ran: ran.map(|ran| *ran).unwrap_or_default(),
            },
        };
        // The outcome of a replayed event has the attempts and failures of all runs.
        if let Some(before) = self.outcomes.remove(&position) {
            outcome.attempts += before.attempts;
            outcome.failures = all_failures(before.failures, outcome.failures);
        }
        self.outcomes.insert(position, outcome);
    }
}

/// All attempts and failures of a finished event: those of its retried dead letter, and those of its outcome.
pub(crate) fn all(dead: Option<&DeadLetter>, outcome: Option<&Outcome>) -> (u32, Vec<Failure>) {
    let letters = dead.map_or(&[][..], |letter| &letter.failures);
    let kept = outcome.map_or(&[][..], |outcome| &outcome.failures);
    let mut failures = all_failures(letters.to_vec(), kept.iter().cloned());
    failures.sort_by_key(|failure| failure.at);
    let attempts = dead.map_or(0, |letter| letter.attempts);
    (
        attempts + outcome.map_or(0, |outcome| outcome.attempts),
        failures,
    )
}
