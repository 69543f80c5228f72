//! What is committed of a partition, and the state of its events.

use std::collections::HashMap;
use std::time::Instant;

use everbus_core::{Progress, Shard, Timestamp};

use super::{
    AFTER_REFUSAL, Board, Counts, Load, MOST_BYTES, MOST_FRESH, Part, Partition, Snapshot, State,
    later,
};
use crate::offset_metadata::{Entry, Last, Saved};

impl Board {
    /// What must be committed. With `lazy`, also progress that may wait.
    pub(crate) fn snapshots(&mut self, lazy: bool, now: Instant) -> Vec<Snapshot> {
        let mut all = Vec::new();
        for (slot, part) in &mut self.parts {
            if part.refused_until.is_some_and(|until| until > now) {
                continue;
            }
            if part.version > part.committed || lazy && part.lazy {
                part.lazy = false;
                all.push(part.snapshot(*slot));
            }
        }
        all
    }

    pub(crate) fn is_dirty(&self) -> bool {
        self.parts
            .values()
            .any(|part| part.version > part.committed)
    }

    /// Records that a commit was acknowledged.
    pub(crate) fn committed(&mut self, slot: u32, version: u64) {
        if let Some(part) = self.parts.get_mut(&slot) {
            part.committed = part.committed.max(version);
            part.refused_until = None;
        }
    }

    /// Records that a commit failed.
    pub(crate) fn not_committed(&mut self, slot: u32) {
        if let Some(part) = self.parts.get_mut(&slot) {
            part.lazy = true;
        }
    }

    /// Records that the server refuses commits of this partition. For a while, the others are committed without it.
    pub(crate) fn refuse_commits(&mut self, slot: u32, now: Instant) {
        self.not_committed(slot);
        if let Some(part) = self.parts.get_mut(&slot) {
            part.refused_until = Some(later(now, AFTER_REFUSAL));
        }
    }

    /// Whether a version is durable; `None` if it is not and the partition was revoked.
    pub(crate) fn is_committed(&self, slot: u32, version: u64) -> Option<bool> {
        match self.parts.get(&slot) {
            Some(part) => Some(part.committed >= version),
            None => {
                let committed = self.closed.get(&slot);
                committed
                    .is_some_and(|committed| *committed >= version)
                    .then_some(true)
            }
        }
    }

    pub(crate) fn version(&self, slot: u32) -> u64 {
        self.parts.get(&slot).map_or(0, |part| part.version)
    }

    /// The load of each partition, and how many of its events have not begun.
    ///
    /// Each partition is full on its own: events that no consumer takes do not stop other partitions.
    pub(crate) fn loads(&self) -> impl Iterator<Item = (Partition, Load, usize)> {
        self.parts.values().map(|part| {
            let partition = (part.topic.name.clone(), part.partition);
            (partition, part.load(), part.fresh())
        })
    }

    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// The state of the events of each partition.
    pub(crate) fn counts(&self) -> HashMap<Shard, Counts> {
        let count = |(slot, part): (&u32, &Part)| {
            let mut counts = Counts {
                dead: part.dead,
                dropped: part.dropped,
                position: part.position,
                reached: part.position,
                ..Counts::default()
            };
            for (place, row) in &part.rows {
                let id = (*slot, *place);
                let begun = row.attempts > 0 || *place <= part.begun;
                match row.state {
                    State::Held { .. } => counts.in_flight += 1,
                    State::Waiting(_) => counts.waiting += 1,
                    _ if self.aside.contains_key(&id) => {
                        counts.waiting += 1;
                        counts.unhandled += 1;
                    }
                    _ if begun => counts.waiting += 1,
                    _ => {
                        counts.reached = counts.reached.min(place - 1);
                        counts.fresh.push(row.record.clone());
                        continue;
                    }
                }
                counts.open.push(row.record.clone());
            }
            (part.shard, counts)
        };
        self.parts.iter().map(count).collect()
    }
}

impl Part {
    /// The number of events that have not begun. [`MOST_OPEN`](super::MOST_OPEN) limits the others.
    fn fresh(&self) -> usize {
        self.rows.len().saturating_sub(self.open)
    }

    fn load(&self) -> Load {
        let fresh = self.fresh();
        if fresh > MOST_FRESH || self.bytes > MOST_BYTES {
            return Load::Full;
        }
        match fresh > MOST_FRESH / 2 || self.bytes > MOST_BYTES / 2 {
            true => Load::Some,
            false => Load::Light,
        }
    }

    pub(super) fn snapshot(&self, slot: u32) -> Snapshot {
        let mut saved = Saved {
            progress: up_to(&self.progress, self.begun),
            begun: self.begun,
            entries: self.inherited.clone(),
            dead: self.dead,
            born: self.born,
        };
        let now = (Instant::now(), wall());
        for (place, row) in self.rows.range(..=self.begun) {
            let due = match row.state {
                State::Waiting(due) => Some(now.1.plus(due.saturating_duration_since(now.0))),
                _ => None,
            };
            let entry = Entry {
                attempts: row.attempts,
                last: row.last,
                alone: row.alone && row.last == Last::Running,
                due,
                lost: row.lost,
            };
            if entry != Entry::BEGUN {
                saved.entries.insert(*place, entry);
            }
        }
        Snapshot {
            slot,
            topic: self.topic.clone(),
            partition: self.partition,
            offset: i64::try_from(self.progress.floor()).unwrap_or(i64::MAX),
            metadata: saved.encode(),
            version: self.version,
        }
    }
}

/// The progress up to `place`, the last event that has begun. Beyond it, only records are done that the group does
/// not want. To save them could need as many ranges as records were fetched, so they are skipped again instead. Up to
/// `place`, the ranges are separated by unfinished events, and the number of those is limited.
fn up_to(progress: &Progress, place: u64) -> Progress {
    let mut kept = Progress::new(progress.floor());
    let mut open = None;
    for (first, last) in progress.unfinished(place) {
        if let Some(end) = open {
            kept.complete_range(end + 1, first - 1);
        }
        open = Some(last);
    }
    if let Some(end) = open.filter(|end| *end < place) {
        kept.complete_range(end + 1, place);
    }
    kept
}

/// The system time, because other processes on other machines read the due times in the metadata.
fn wall() -> Timestamp {
    use everbus_core::Clock as _;
    everbus_core::SystemClock.now()
}
