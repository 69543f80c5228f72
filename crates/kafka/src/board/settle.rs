//! Settling: leases, and what verdicts do to events.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{Position, Recorded, Shard, Timestamp};

use super::{Board, Change, Held, RowId, State, before, later};
use crate::offset_metadata::Last;

impl Board {
    /// The delivery of a lease that is held.
    pub(crate) fn find(
        &self,
        shard: Shard,
        place: u64,
        token: u64,
        now: Instant,
        wall: Timestamp,
    ) -> Option<(RowId, Held)> {
        let slot = self.slot(shard)?;
        let part = self.parts.get(&slot)?;
        let row = part.rows.get(&place)?;
        match row.state {
            State::Held {
                token: known,
                until: Some(until),
                ..
            } if known == token && until > now => {}
            _ => return None,
        }
        Some(((slot, place), row.held(part.topic.clone(), wall)))
    }

    /// Extends a held lease.
    pub(crate) fn extend(&mut self, id: RowId, by: Duration, now: Instant) {
        if let Some(row) = self.row_mut(id)
            && let State::Held {
                until: Some(until), ..
            } = &mut row.state
        {
            let end = later(now, by);
            let before = std::mem::replace(until, end);
            self.leases.remove(&(before, id));
            self.leases.insert((end, id));
        }
    }

    /// Applies a settlement. Returns the version of the partition that contains it; `None` if the lease is lost.
    pub(crate) fn settle(
        &mut self,
        id: RowId,
        token: u64,
        change: Change,
        now: Instant,
    ) -> Option<u64> {
        let row = self.row_mut(id)?;
        let State::Held {
            token: known,
            seat,
            until: Some(until),
        } = row.state
        else {
            return None;
        };
        if known != token || until <= now {
            return None;
        }
        if let Some(seat) = self.seats.get_mut(&seat) {
            seat.settled += 1;
        }
        match change {
            Change::Finished { dead } => {
                if let Some(part) = self.parts.get_mut(&id.0) {
                    part.dead += u64::from(dead);
                }
                self.finish(id);
            }
            Change::Failed { after, failure } => {
                let row = self.row_mut(id)?;
                row.failures.push(failure);
                row.last = Last::Failed;
                // The attempt ended with a failure, so it did not kill its process.
                if std::mem::take(&mut row.suspect) {
                    self.held_suspects -= 1;
                }
                self.put_back(id, Some(later(now, after)), now);
            }
            Change::Released { after } => {
                let row = self.row_mut(id)?;
                row.attempts -= 1;
                row.last = before(row.attempts);
                self.put_back(id, Some(later(now, after)), now);
            }
        }
        let part = self.parts.get_mut(&id.0)?;
        part.touch();
        Some(part.version)
    }

    /// Finishes the event of a lease. Returns the slot and the version that contain that; `None` if the lease is lost.
    pub(crate) fn acked(&mut self, at: Position, token: u64, now: Instant) -> Option<(u32, u64)> {
        let slot = self.slot(at.shard())?;
        let change = Change::Finished { dead: false };
        let version = self.settle((slot, at.place()), token, change, now)?;
        Some((slot, version))
    }

    /// Records a settlement that was applied and not answered.
    pub(crate) fn doubt(&mut self, token: u64, at: (u32, u64)) {
        let parts = &self.parts;
        self.doubts.retain(|_, (slot, _)| parts.contains_key(slot));
        self.doubts.insert(token, at);
    }

    /// Takes the slot and version of a settlement that was applied and not answered. The caller answers it now.
    pub(crate) fn doubted(&mut self, token: u64) -> Option<(u32, u64)> {
        self.doubts.remove(&token)
    }

    /// An event that is held, and its attempt.
    pub(crate) fn held_record(&self, id: RowId) -> Option<(Arc<Recorded>, u32)> {
        let row = self.row(id)?;
        Some((row.record.clone(), row.attempts))
    }

    pub(super) fn finish(&mut self, id: RowId) {
        let Some(row) = self.forget(id) else {
            return;
        };
        if let Some(part) = self.parts.get_mut(&id.0) {
            part.progress.complete(id.1);
            part.lazy = true;
        }
        if let Some(key) = &row.key {
            self.wake_key(id.0, key);
        }
    }

    /// Puts back an event that was held: it waits until `due`, or is ready.
    pub(super) fn put_back(&mut self, id: RowId, due: Option<Instant>, now: Instant) {
        let Some(part) = self.parts.get_mut(&id.0) else {
            return;
        };
        part.touch();
        let Some(row) = part.rows.get_mut(&id.1) else {
            return;
        };
        let (held, suspect, alone) = (row.state, row.suspect, row.alone);
        row.alone = false;
        row.state = State::Blocked;
        if let State::Held { seat, until, .. } = held {
            if let Some(until) = until {
                self.leases.remove(&(until, id));
            }
            self.held -= 1;
            self.held_suspects -= usize::from(suspect);
            self.held_alone -= usize::from(alone);
            if let Some(seat) = self.seats.get_mut(&seat) {
                seat.held -= 1;
            }
        }
        match due.filter(|due| *due > now) {
            Some(due) => self.set_waiting(id, due),
            None => self.set_ready(id),
        }
    }
}
