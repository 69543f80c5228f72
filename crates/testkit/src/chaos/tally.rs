//! The result of a campaign, as one line.

use std::fmt;

use super::checker::Report;

/// The figures of a campaign.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Processes killed at a random moment.
    pub kills: u64,
    /// Processes that died at a named place.
    pub failpoint_kills: u64,
    /// Processes stopped past their leases, and continued.
    pub stops: u64,
    /// Power losses.
    pub outages: u64,
    /// Processes that ended in order.
    pub orderly: u64,
    /// Events whose publish was acknowledged.
    pub events: u64,
    /// Acknowledged events that were lost.
    pub lost: u64,
    /// How often a group finished an event that it had finished before.
    pub duplicates: u64,
    /// Acknowledgements received after the power cut began; they do not count.
    pub last_words: u64,
    /// How many of the events acknowledged after the cut are not in the log.
    pub unheard: u64,
    /// How many of the kills were of a relay.
    pub relay_kills: u64,
    /// How many of the kills were of a process that splits large events.
    pub overflow_kills: u64,
    /// How many of the kills were of a retention job.
    pub retention_kills: u64,
    /// Rows that were committed to an outbox and relayed.
    pub relayed: u64,
    /// How often the object of an event was checked.
    pub objects: u64,
    /// Acknowledged events that retention removed.
    pub removed: u64,
    /// Objects without events that were collected at the end of a file.
    pub collected: u64,
    /// How often the checker compared a file with the ledger.
    pub checks: u64,
    /// Problems found, the first of each file.
    pub problems: Vec<String>,
}

/// At most this many problems of one check are shown.
const SHOWN: usize = 20;

impl Tally {
    /// All kills, those at named places included.
    pub fn all_kills(&self) -> u64 {
        self.kills + self.failpoint_kills
    }

    /// How often a process was killed or stopped during its work.
    pub fn interruptions(&self) -> u64 {
        self.all_kills() + self.stops + self.outages
    }

    /// Whether nothing was lost and no other problem was found.
    pub fn is_clean(&self) -> bool {
        self.lost == 0 && self.problems.is_empty()
    }

    /// Adds the result of a check. Duplicates are not summed up: each check counts them from the beginning of
    /// the file.
    pub(crate) fn take(&mut self, report: Report) {
        self.checks += 1;
        self.lost += report.lost.len() as u64;
        self.duplicates = report.duplicates;
        (self.relayed, self.removed) = (report.relayed, report.removed);
        self.objects += report.objects;
        let found = report.lost.len() + report.faults.len();
        let lost = report.lost.into_iter().map(|what| format!("LOST {what}"));
        let all = lost.chain(report.faults);
        self.problems.extend(all.take(SHOWN));
        if found > SHOWN {
            self.problems.push(format!("and {} more", found - SHOWN));
        }
    }

    /// Adds the figures of another part of the campaign.
    pub fn add(&mut self, other: Tally) {
        self.kills += other.kills;
        self.failpoint_kills += other.failpoint_kills;
        self.stops += other.stops;
        self.outages += other.outages;
        self.orderly += other.orderly;
        self.events += other.events;
        self.lost += other.lost;
        self.duplicates += other.duplicates;
        self.last_words += other.last_words;
        self.unheard += other.unheard;
        self.relay_kills += other.relay_kills;
        self.overflow_kills += other.overflow_kills;
        self.retention_kills += other.retention_kills;
        self.relayed += other.relayed;
        self.objects += other.objects;
        self.removed += other.removed;
        self.collected += other.collected;
        self.checks += other.checks;
        self.problems.extend(other.problems);
    }

    /// The line that ends a campaign.
    pub fn line(&self, seed: u64) -> String {
        format!("chaos: {self} seed={seed}")
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "kills={} failpoint_kills={} stops={} outages={} events={} lost={} duplicates={}",
            self.kills,
            self.failpoint_kills,
            self.stops,
            self.outages,
            self.events,
            self.lost,
            self.duplicates
        )
    }
}
