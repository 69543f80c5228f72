//! Partitions are assigned and taken away, and their records arrive.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use everbus_core::{Failure, FailureKind, Progress, Shard, Timestamp};

use super::{Board, MOST_CLOSED, Part, Row, Snapshot, State, before, bit, later};
use crate::offset_metadata::{Entry, Last, Saved};
use crate::topics::Topic;
use crate::wire::Read;

/// What [`Board::arrive`] did with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrived {
    Expected,
    /// This many places before the record are missing.
    Gap(u64),
    /// The topic was created again: places begin anew.
    Anew,
}

impl Board {
    /// Opens a partition that was assigned. `saved` is what the group committed last. Without it, the group begins at
    /// `start`.
    pub(crate) fn open_part(
        &mut self,
        topic: Arc<Topic>,
        partition: i32,
        start: u64,
        saved: Option<Saved>,
    ) {
        let shard = topic.shard(partition);
        self.close_shard(shard);
        let mut saved = saved.unwrap_or_else(|| Saved::new(start));
        saved.born = self.born;
        let slot = self.next_slot;
        self.next_slot += 1;
        let part = Part {
            shard,
            topic,
            partition,
            position: saved.progress.floor(),
            begun: saved.begun,
            progress: saved.progress,
            rows: BTreeMap::new(),
            bytes: 0,
            open: 0,
            inherited: saved.entries,
            dead: saved.dead,
            dropped: 0,
            born: saved.born,
            version: 0,
            committed: 0,
            lazy: false,
            refused_until: None,
        };
        self.parts.insert(slot, part);
    }

    /// Notes that the server removed places before they were fetched.
    pub(crate) fn note_dropped(&mut self, slot: u32, places: u64) {
        if let Some(part) = self.parts.get_mut(&slot) {
            part.dropped += places;
        }
    }

    pub(crate) fn slot(&self, shard: Shard) -> Option<u32> {
        let found = self.parts.iter().find(|(_, part)| part.shard == shard);
        found.map(|(slot, _)| *slot)
    }

    /// Closes a partition that was revoked, and ends its attempts. Returns what to commit last, if anything changed.
    pub(crate) fn close_shard(&mut self, shard: Shard) -> Option<Snapshot> {
        let slot = self.slot(shard)?;
        let part = self.parts.get_mut(&slot)?;
        let mut changed = part.version > part.committed || part.lazy;
        for row in part.rows.values_mut() {
            if let State::Held { until, .. } = row.state {
                changed = true;
                if until.is_none() {
                    // It was never handed out.
                    row.attempts -= 1;
                    row.last = before(row.attempts);
                } else {
                    row.lose();
                }
            }
        }
        let places: Vec<u64> = part.rows.keys().copied().collect();
        let snapshot = changed.then(|| part.snapshot(slot));
        let committed = part.committed;
        for place in places {
            self.forget((slot, place));
        }
        self.parts.remove(&slot);
        self.set_closed(slot, committed);
        snapshot
    }

    /// Records the last committed version of a closed slot.
    pub(crate) fn set_closed(&mut self, slot: u32, version: u64) {
        self.closed.insert(slot, version);
        while self.closed.len() > MOST_CLOSED {
            self.closed.pop_first();
        }
    }

    /// Takes a record that was fetched. `wanted`: a subscription of the group matches it.
    pub(crate) fn arrive(
        &mut self,
        slot: u32,
        read: Read,
        wanted: bool,
        now: (Instant, Timestamp),
    ) -> Arrived {
        let place = read.record.position.place();
        let Some(part) = self.parts.get_mut(&slot) else {
            return Arrived::Expected;
        };
        let mut arrived = Arrived::Expected;
        if place <= part.position {
            // Offsets only rise: the topic was removed and created again.
            let places: Vec<u64> = part.rows.keys().copied().collect();
            for place in places {
                self.forget((slot, place));
            }
            let Some(part) = self.parts.get_mut(&slot) else {
                return Arrived::Expected;
            };
            part.progress = Progress::new(place - 1);
            (part.position, part.begun, part.open) = (place - 1, 0, 0);
            part.inherited.clear();
            part.touch();
            arrived = Arrived::Anew;
        }
        let Some(part) = self.parts.get_mut(&slot) else {
            return arrived;
        };
        if place > part.position + 1 {
            let gap = place - part.position - 1;
            part.progress.complete_range(part.position + 1, place - 1);
            part.lazy = true;
            arrived = Arrived::Gap(gap);
        }
        part.position = place;
        let entry = part.entry(place);
        part.inherited.remove(&place);
        if part.progress.is_done(place) {
            return arrived;
        }
        let owed = entry.is_some_and(|entry| entry.attempts > 0);
        if !wanted && !owed {
            part.progress.complete(place);
            part.lazy = true;
            return arrived;
        }
        self.insert(slot, read, entry, now);
        arrived
    }

    fn insert(&mut self, slot: u32, read: Read, entry: Option<Entry>, now: (Instant, Timestamp)) {
        let Read {
            record, foreign, ..
        } = read;
        let place = record.position.place();
        let key = match self.ordered {
            true => record.event.ordering_key().map(|key| Arc::from(&*key)),
            false => None,
        };
        let mut row = Row {
            record: Arc::new(record),
            attempts: 0,
            failures: Vec::new(),
            last: Last::None,
            state: State::Blocked,
            key,
            foreign,
            suspect: false,
            alone: false,
            lost: 0,
        };
        let mut due = None;
        if let Some(entry) = entry {
            row.attempts = entry.attempts;
            row.last = entry.last;
            row.lost = entry.lost;
            if entry.last == Last::Running {
                row.suspect = true;
                row.lose();
            }
            row.failures = inherited_failures(&entry, row.lost, now.1);
            due = entry.due.filter(|due| *due > now.1);
        }
        let due = due.map(|due| later(now.0, due.since(now.1)));
        if let Some(key) = &row.key {
            let rows = self.keys.entry((slot, key.clone())).or_default();
            rows.insert(place);
        }
        if let Some(part) = self.parts.get_mut(&slot) {
            part.open += usize::from(place <= part.begun);
            part.bytes += row.record.event.payload().len();
            part.rows.insert(place, row);
        }
        match due {
            Some(due) => self.set_waiting((slot, place), due),
            None => self.set_ready((slot, place)),
        }
    }
}

impl Part {
    pub(super) fn touch(&mut self) {
        self.version += 1;
    }

    pub(super) fn entry(&self, place: u64) -> Option<Entry> {
        let known = self.inherited.get(&place).copied();
        known.or_else(|| (place <= self.begun).then_some(Entry::BEGUN))
    }
}

/// The failures of attempts that another process made. Their texts are not in the metadata.
fn inherited_failures(entry: &Entry, lost: u32, now: Timestamp) -> Vec<Failure> {
    let failure = |attempt: u32| {
        let last = attempt == entry.attempts;
        let (kind, text) = match lost & bit(attempt) {
            0 => (FailureKind::Error, "it failed in a process that has ended"),
            _ => (
                FailureKind::Crash,
                "the process that ran it ended, or lost its partition or its lease",
            ),
        };
        let mut failure = Failure::new(attempt, now, kind, text);
        failure.alone = last && entry.alone && entry.last == Last::Running;
        failure
    };
    // Makes up no more failures than a dead letter shows.
    let first = entry.attempts.saturating_sub(99).max(1);
    (first..=entry.attempts).map(failure).collect()
}
