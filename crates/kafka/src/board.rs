//! The events of a group that this process has: fetched, handed out, waiting. It does no I/O.
//!
//! Each assignment of a partition to this process has a *slot*: a number that is never used again, also not for the
//! same partition. So rows of an assignment that ended cannot be found.
//!
//! This file has the board, its lists, and how they change with time. `partitions` has assignments and arrivals,
//! `seats` the consumers; `hand_out`, `settle` and `commit` have what their names say.

mod commit;
mod hand_out;
mod partitions;
mod seats;
mod settle;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{Failure, FailureKind, Progress, Recorded, Shard, Timestamp};

use crate::offset_metadata::{Entry, Last};
use crate::topics::Topic;
pub(crate) use partitions::Arrived;
use seats::Seat;

/// An event: the slot of its partition, and its place there.
pub(crate) type RowId = (u32, u64);

/// An event that is claimed: id, token, and the version of the partition that contains the attempt.
pub(crate) type Claimed = (RowId, u64, u64);

/// The ready events of a partition, each with its turn and its place. They are sorted by the order in which they are handed
/// out: first `(false, turn)`, the events that have begun before; then `(true, place)`, the fresh ones.
type Ready = BTreeMap<(bool, u64), (u64, u64)>;

/// The most unfinished events of a partition that have begun: the metadata has room for them.
const MOST_OPEN: usize = 400;
/// After this many attempts, an event that may have killed its process runs alone.
const ALONE: u32 = 3;
/// The most revoked partitions that are remembered.
const MOST_CLOSED: usize = 1000;
/// The length of a lease or wait that is too long for the clock.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// How many ready events a claim looks at.
const LOOKED_AT: usize = 10_000;
/// A partition with more fresh events than this is full.
const MOST_FRESH: usize = 2_000;
/// A partition whose payloads are larger than this together is full as well.
const MOST_BYTES: usize = 32 << 20;
/// A partition whose commit was refused is committed again after this long.
const AFTER_REFUSAL: Duration = Duration::from_secs(1);

/// The events of one group.
pub(crate) struct Board {
    ordered: bool,
    /// The offset of the group's first creation, which is committed with its progress.
    born: i64,
    parts: BTreeMap<u32, Part>,
    next_slot: u32,
    turns: u64,
    /// Events that may be handed out, by slot.
    ready: BTreeMap<u32, Ready>,
    due: BTreeSet<(Instant, RowId)>,
    leases: BTreeSet<(Instant, RowId)>,
    /// Events that no consumer here has a handler for, and since when.
    aside: BTreeMap<RowId, Instant>,
    /// Events that must run alone and are ready.
    dangers: BTreeSet<RowId>,
    /// In an ordered group: the unfinished events of each key.
    keys: HashMap<(u32, Arc<str>), BTreeSet<u64>>,
    seats: BTreeMap<u64, Seat>,
    held: usize,
    held_suspects: usize,
    held_alone: usize,
    /// Settlements that were applied and not answered, by token: the slot and the version that contain them.
    doubts: HashMap<u64, (u32, u64)>,
    /// The last committed version of slots that were closed, for settlements that still wait for their commit.
    closed: BTreeMap<u32, u64>,
}

/// A partition.
pub(crate) struct Part {
    pub(crate) topic: Arc<Topic>,
    pub(crate) partition: i32,
    pub(crate) shard: Shard,
    progress: Progress,
    /// The highest place that was handed out.
    begun: u64,
    /// The highest place that was fetched.
    position: u64,
    rows: BTreeMap<u64, Row>,
    /// The size of the rows' payloads.
    bytes: usize,
    /// About how many rows up to `begun` there are.
    open: usize,
    inherited: BTreeMap<u64, Entry>,
    dead: u64,
    /// Places that the server removed before this process fetched them.
    dropped: u64,
    born: i64,
    /// Grows with every change that must be durable.
    version: u64,
    committed: u64,
    /// Something changed that need not be durable at once.
    lazy: bool,
    /// The server refused a commit. There is no other commit before this time.
    refused_until: Option<Instant>,
}

/// An event that is not finished.
struct Row {
    record: Arc<Recorded>,
    /// Attempts begun.
    attempts: u32,
    failures: Vec<Failure>,
    last: Last,
    state: State,
    key: Option<Arc<str>>,
    foreign: Option<String>,
    /// It was in flight when a process died.
    suspect: bool,
    alone: bool,
    /// The attempts whose outcome is not known; see [`Entry`].
    lost: u32,
}

impl Row {
    /// Records that the outcome of the current attempt is not known.
    fn lose(&mut self) {
        self.last = Last::Lost;
        self.lost |= bit(self.attempts);
    }

    /// The delivery. The reason why a record cannot be read is one of its failures.
    fn held(&self, topic: Arc<Topic>, wall: Timestamp) -> Held {
        let why = self.foreign.clone();
        let why = why.map(|why| Failure::new(self.attempts, wall, FailureKind::Corrupt, why));
        Held {
            record: self.record.clone(),
            attempt: self.attempts,
            failures: self.failures.iter().cloned().chain(why).collect(),
            topic,
        }
    }
}

/// The bit of an attempt. Attempts after the thirty-second have no bit, and count as failed.
fn bit(attempt: u32) -> u32 {
    attempt
        .checked_sub(1)
        .and_then(|shift| 1_u32.checked_shl(shift))
        .unwrap_or(0)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// With its key in [`Board::ready`].
    Ready(bool, u64),
    /// Behind an earlier event of its key, or set aside.
    Blocked,
    Waiting(Instant),
    /// Claimed; with the end of its lease once it was handed out.
    Held {
        token: u64,
        seat: u64,
        until: Option<Instant>,
    },
}

/// The delivery of a lease.
pub(crate) struct Held {
    pub(crate) record: Arc<Recorded>,
    pub(crate) attempt: u32,
    pub(crate) failures: Vec<Failure>,
    pub(crate) topic: Arc<Topic>,
}

/// What a settlement does to an event.
pub(crate) enum Change {
    Finished { dead: bool },
    Failed { after: Duration, failure: Failure },
    Released { after: Duration },
}

/// What is to be committed of one partition.
pub(crate) struct Snapshot {
    pub(crate) slot: u32,
    pub(crate) topic: Arc<Topic>,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) metadata: String,
    pub(crate) version: u64,
}

/// The name of a topic, and a partition of it.
pub(crate) type Partition = (String, i32);

/// How much of a partition was fetched and not handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// Little: a paused partition is resumed.
    Light,
    /// Between the two limits: a paused partition stays paused.
    Some,
    /// Too much: the partition is paused if it stays so.
    Full,
}

/// The state of the events of a partition.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) in_flight: u64,
    pub(crate) waiting: u64,
    pub(crate) unhandled: u64,
    pub(crate) dead: u64,
    pub(crate) dropped: u64,
    /// Everything up to here was handed out or skipped.
    pub(crate) reached: u64,
    /// The highest place that was fetched.
    pub(crate) position: u64,
    /// Events that were fetched and not handed out.
    pub(crate) fresh: Vec<Arc<Recorded>>,
    /// Events that were handed out and are not settled.
    pub(crate) open: Vec<Arc<Recorded>>,
}

impl Board {
    pub(crate) fn new(ordered: bool, born: i64) -> Self {
        Self {
            ordered,
            born,
            parts: BTreeMap::new(),
            next_slot: 1,
            turns: 0,
            ready: BTreeMap::new(),
            due: BTreeSet::new(),
            leases: BTreeSet::new(),
            aside: BTreeMap::new(),
            dangers: BTreeSet::new(),
            keys: HashMap::new(),
            seats: BTreeMap::new(),
            held: 0,
            held_suspects: 0,
            held_alone: 0,
            doubts: HashMap::new(),
            closed: BTreeMap::new(),
        }
    }

    /// Takes an event out of all lists.
    fn forget(&mut self, id: RowId) -> Option<Row> {
        let part = self.parts.get_mut(&id.0)?;
        let row = part.rows.remove(&id.1)?;
        part.bytes -= row.record.event.payload().len();
        if id.1 <= part.begun {
            part.open = part.open.saturating_sub(1);
        }
        self.unlist(id, &row);
        if let Some(key) = &row.key {
            let key = (id.0, key.clone());
            if let Some(rows) = self.keys.get_mut(&key) {
                rows.remove(&id.1);
                if rows.is_empty() {
                    self.keys.remove(&key);
                }
            }
        }
        Some(row)
    }

    /// Takes an event out of the list of its state.
    fn unlist(&mut self, id: RowId, row: &Row) {
        self.aside.remove(&id);
        self.dangers.remove(&id);
        match row.state {
            State::Ready(fresh, number) => self.not_ready(id.0, (fresh, number)),
            State::Blocked => {}
            State::Waiting(due) => _ = self.due.remove(&(due, id)),
            State::Held { seat, until, .. } => {
                if let Some(until) = until {
                    self.leases.remove(&(until, id));
                }
                self.held -= 1;
                self.held_suspects -= usize::from(row.suspect);
                self.held_alone -= usize::from(row.alone);
                if let Some(seat) = self.seats.get_mut(&seat) {
                    seat.held -= 1;
                }
            }
        }
    }

    fn row(&self, id: RowId) -> Option<&Row> {
        self.parts.get(&id.0)?.rows.get(&id.1)
    }

    fn row_mut(&mut self, id: RowId) -> Option<&mut Row> {
        self.parts.get_mut(&id.0)?.rows.get_mut(&id.1)
    }

    fn set_waiting(&mut self, id: RowId, due: Instant) {
        if let Some(row) = self.row_mut(id) {
            row.state = State::Waiting(due);
            self.due.insert((due, id));
        }
    }

    /// Lists an event as ready, unless an earlier one of its key is unfinished.
    fn set_ready(&mut self, id: RowId) {
        let key = self.row(id).and_then(|row| row.key.clone());
        let free = key.is_none_or(|key| {
            let rows = self.keys.get(&(id.0, key));
            rows.is_none_or(|rows| rows.first() == Some(&id.1))
        });
        let turn = self.turns;
        self.turns += 1;
        let begun = self.parts.get(&id.0).map_or(0, |part| part.begun);
        let Some(row) = self.row_mut(id) else {
            return;
        };
        if !free {
            row.state = State::Blocked;
            return;
        }
        let fresh = row.attempts == 0 && row.last == Last::None && id.1 > begun;
        let key = (fresh, if fresh { id.1 } else { turn });
        row.state = State::Ready(key.0, key.1);
        let danger = row.suspect && row.attempts >= ALONE;
        self.ready
            .entry(id.0)
            .or_default()
            .insert(key, (turn, id.1));
        if danger {
            self.dangers.insert(id);
        }
    }

    /// Takes an event out of [`Board::ready`].
    fn not_ready(&mut self, slot: u32, key: (bool, u64)) {
        if let Some(ready) = self.ready.get_mut(&slot) {
            ready.remove(&key);
            if ready.is_empty() {
                self.ready.remove(&slot);
            }
        }
    }

    /// Makes the next event of a key ready.
    fn wake_key(&mut self, slot: u32, key: &Arc<str>) {
        let rows = self.keys.get(&(slot, key.clone()));
        let Some(&first) = rows.and_then(BTreeSet::first) else {
            return;
        };
        let id = (slot, first);
        if self.row(id).is_some_and(|row| row.state == State::Blocked)
            && !self.aside.contains_key(&id)
        {
            self.set_ready(id);
        }
    }

    /// Ends leases and waits that are over.
    pub(crate) fn tick(&mut self, now: Instant, wall: Timestamp) {
        while let Some(&(until, id)) = self.leases.first()
            && until <= now
        {
            if let Some(row) = self.row_mut(id) {
                let text = "the lease ended before the event was settled";
                let failure = Failure::new(row.attempts, wall, FailureKind::Crash, text);
                row.failures.push(failure);
                row.lose();
            }
            self.put_back(id, None, now);
        }
        self.give_back_ahead(now);
        while let Some(&(due, id)) = self.due.first()
            && due <= now
        {
            self.due.pop_first();
            self.set_ready(id);
        }
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(crate) fn next_tick(&self) -> Option<Instant> {
        let due = self.due.first().map(|(at, _)| *at);
        let lease = self.leases.first().map(|(at, _)| *at);
        let ahead = self.seats.values().filter_map(Seat::ahead_until).min();
        [due, lease, ahead].into_iter().flatten().min()
    }
}

/// A moment after another one. A duration that is too long for the clock is cut.
fn later(now: Instant, by: Duration) -> Instant {
    now.checked_add(by).unwrap_or_else(|| now + FAR)
}

/// The outcome of the last attempt, after a later attempt was taken back.
fn before(attempts: u32) -> Last {
    match attempts {
        0 => Last::None,
        _ => Last::Failed,
    }
}
