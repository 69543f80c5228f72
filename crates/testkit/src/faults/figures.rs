//! What a campaign did and found.

use std::fmt;
use std::time::Duration;

/// The figures of a campaign.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// The seed that repeats the order of the faults.
    pub seed: u64,
    /// Events whose publish was acknowledged.
    pub acknowledged: usize,
    /// Publishes that failed and were repeated.
    pub repeated: u64,
    /// Those of them with an unknown outcome.
    pub unknown: u64,
    /// Events that a group handled, by group and event.
    pub handled: usize,
    /// Repetitions among the handled ones.
    pub duplicates: u64,
    /// Events that a group gave up on.
    pub dead_letters: usize,
    /// Verdicts that came after the end of their lease and were refused.
    pub late_verdicts: u64,
    /// Kills of the server.
    pub server_kills: usize,
    /// Kills of workers.
    pub worker_kills: usize,
    /// Cut connections.
    pub cuts: u64,
    /// Pauses of the server.
    pub pauses: usize,
    /// Workers stopped past their leases.
    pub stops: usize,
    /// How long it took.
    pub took: Duration,
    /// Acknowledged events that a group neither handled nor gave up on.
    pub lost: Vec<String>,
    /// Whatever else was wrong.
    pub problems: Vec<String>,
}

impl Figures {
    /// Panics if anything was lost or wrong.
    pub fn assert_clean(&self) {
        let few = |all: &[String]| all.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
        assert!(
            self.lost.is_empty() && self.problems.is_empty(),
            "{self}\n{}\n{}",
            few(&self.problems),
            few(&self.lost)
        );
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "EVERBUS_SEED={}: {} acknowledged ({} publishes repeated, {} of unknown outcome), {} handled \
             ({} twice), {} dead letters, {} late verdicts; {} server kills, {} worker kills, {} cuts, \
             {} pauses, {} stops; {} lost, {} problems, {:.1} s",
            self.seed,
            self.acknowledged,
            self.repeated,
            self.unknown,
            self.handled,
            self.duplicates,
            self.dead_letters,
            self.late_verdicts,
            self.server_kills,
            self.worker_kills,
            self.cuts,
            self.pauses,
            self.stops,
            self.lost.len(),
            self.problems.len(),
            self.took.as_secs_f64()
        )
    }
}
