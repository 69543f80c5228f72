//! Handing out: which events a consumer gets, and when.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::{Duration, Instant};

use everbus_core::Timestamp;

use super::{Board, Claimed, Held, LOOKED_AT, MOST_OPEN, RowId, Seat, State, before, later};
use crate::offset_metadata::Last;

impl Board {
    /// Claims up to `max` events for a consumer. They are handed out by [`deliver`](Self::deliver), once
    /// their attempts are durable. `step` is how long a commit takes.
    pub(crate) fn claim(
        &mut self,
        seat: u64,
        max: usize,
        now: Instant,
        step: Duration,
        token: impl Fn() -> u64,
    ) -> Vec<Claimed> {
        let claimed = self.pick(seat, max, now, step, token);
        let versions = claimed.into_iter();
        let versions = versions.map(|(id, token)| (id, token, self.version(id.0)));
        versions.collect()
    }

    /// Claims up to `max` events that the consumer will ask for soon, and keeps them behind `rest`, which it has claimed
    /// before. Returns whether there are new ones. All of them are given back if it does not ask for half a lease.
    pub(crate) fn claim_ahead(
        &mut self,
        seat: u64,
        rest: Vec<Claimed>,
        max: usize,
        now: Instant,
        step: Duration,
        token: impl Fn() -> u64,
    ) -> bool {
        let new = self.claim(seat, max, now, step, token);
        let any = !new.is_empty();
        let mut ahead = rest;
        ahead.extend(new);
        match self.seats.get_mut(&seat) {
            Some(seat) => seat.keep_ahead(ahead, now),
            None => self.give_back(&ahead),
        }
        any
    }

    /// How many of the first claimed events may be handed out: their attempts are durable, or their partition is gone.
    pub(crate) fn stored(&self, claimed: &[Claimed]) -> usize {
        let stored = |(id, _, version): &&Claimed| self.is_committed(id.0, *version) != Some(false);
        claimed.iter().take_while(stored).count()
    }

    /// Takes the events that were claimed ahead.
    pub(crate) fn take_ahead(&mut self, seat: u64) -> Vec<Claimed> {
        let seat = self.seats.get_mut(&seat);
        seat.map(|seat| std::mem::take(&mut seat.ahead))
            .unwrap_or_default()
    }

    /// Gives back events that were claimed ahead, and that the consumer has not asked for.
    pub(super) fn give_back_ahead(&mut self, now: Instant) {
        let seats = self.seats.iter();
        let late = seats.filter(|(_, seat)| seat.ahead_until().is_some_and(|until| until <= now));
        let late: Vec<u64> = late.map(|(seat, _)| *seat).collect();
        for seat in late {
            let claimed = self.take_ahead(seat);
            self.give_back(&claimed);
        }
    }

    fn pick(
        &mut self,
        seat: u64,
        max: usize,
        now: Instant,
        step: Duration,
        token: impl Fn() -> u64,
    ) -> Vec<(RowId, u64)> {
        let Some(own) = self.seats.get_mut(&seat) else {
            return Vec::new();
        };
        let max = max.min(own.room(now, step));
        let Some(own) = self.seats.get(&seat) else {
            return Vec::new();
        };
        if max == 0 || own.paused || self.held_alone > 0 {
            return Vec::new();
        }
        let handled = |seat: &Seat, id: &RowId| self.row(*id).is_some_and(|row| seat.takes(row));
        let danger = self
            .dangers
            .iter()
            .find(|id| self.seats.values().any(|seat| handled(seat, id)));
        if let Some(&danger) = danger {
            if self.held > 0 || !handled(own, &danger) {
                return Vec::new();
            }
            let token = token();
            self.hold(danger, seat, token, true);
            return vec![(danger, token)];
        }
        let (mut picked, mut unhandled) = (Vec::new(), Vec::new());
        let mut suspects = self.held_suspects;
        let mut begun: HashMap<u32, usize> = HashMap::new();
        // The next ready event of each partition, the one with the earliest turn on top.
        let mut partitions: Vec<_> = self
            .ready
            .iter()
            .filter_map(|(slot, ready)| Some((*slot, self.parts.get(slot)?, ready.iter())))
            .collect();
        let mut heads = BinaryHeap::new();
        for (n, (_, _, ready)) in partitions.iter_mut().enumerate() {
            heads.extend(ready.next().map(|head| Reverse(turn_of(head, n))));
        }
        for _ in 0..LOOKED_AT {
            if picked.len() == max {
                break;
            }
            let Some(Reverse((_, _, place, n))) = heads.pop() else {
                break;
            };
            let (slot, part, ready) = &mut partitions[n];
            let begins = place > part.begun;
            let begun = begun.entry(*slot).or_default();
            if begins && part.open + *begun >= MOST_OPEN {
                // All later places of this partition would begin as well.
                continue;
            }
            heads.extend(ready.next().map(|head| Reverse(turn_of(head, n))));
            let Some(row) = part.rows.get(&place) else {
                continue;
            };
            let id = (*slot, place);
            if !own.takes(row) {
                if !self.seats.values().any(|seat| seat.takes(row)) {
                    unhandled.push(id);
                }
                continue;
            }
            if row.suspect && suspects > 0 {
                continue;
            }
            // All places up to this one then count as begun.
            *begun += usize::from(begins);
            suspects += usize::from(row.suspect);
            picked.push(id);
        }
        for id in unhandled {
            self.set_aside(id, now);
        }
        picked
            .into_iter()
            .map(|id| {
                let token = token();
                self.hold(id, seat, token, false);
                (id, token)
            })
            .collect()
    }

    pub(super) fn set_aside(&mut self, id: RowId, now: Instant) {
        let Some(row) = self.row_mut(id) else {
            return;
        };
        if let State::Ready(fresh, number) = row.state {
            row.state = State::Blocked;
            self.not_ready(id.0, (fresh, number));
            self.dangers.remove(&id);
            self.aside.insert(id, now);
        }
    }

    pub(super) fn hold(&mut self, id: RowId, seat: u64, token: u64, alone: bool) {
        self.aside.remove(&id);
        self.dangers.remove(&id);
        let Some(part) = self.parts.get_mut(&id.0) else {
            return;
        };
        if id.1 > part.begun {
            part.open += part.rows.range(part.begun + 1..=id.1).count();
            part.begun = id.1;
        }
        part.touch();
        let Some(row) = part.rows.get_mut(&id.1) else {
            return;
        };
        let state = row.state;
        row.attempts += 1;
        row.last = Last::Running;
        row.alone = alone;
        row.state = State::Held {
            token,
            seat,
            until: None,
        };
        self.held += 1;
        self.held_suspects += usize::from(row.suspect);
        self.held_alone += usize::from(alone);
        if let State::Ready(fresh, number) = state {
            self.not_ready(id.0, (fresh, number));
        }
        if let Some(seat) = self.seats.get_mut(&seat) {
            seat.held += 1;
        }
    }

    /// Begins the lease of a claimed event.
    pub(super) fn hand_over(&mut self, id: RowId, lease: Duration, now: Instant) {
        if let Some(row) = self.row_mut(id)
            && let State::Held { until, .. } = &mut row.state
        {
            let end = later(now, lease);
            *until = Some(end);
            self.leases.insert((end, id));
        }
    }

    /// Hands out a claimed event; `None` if its partition is gone.
    pub(crate) fn deliver(
        &mut self,
        id: RowId,
        token: u64,
        now: Instant,
        wall: Timestamp,
    ) -> Option<Held> {
        let part = self.parts.get_mut(&id.0)?;
        let topic = part.topic.clone();
        let row = part.rows.get_mut(&id.1)?;
        let State::Held {
            seat,
            until: until @ None,
            token: known,
        } = &mut row.state
        else {
            return None;
        };
        if *known != token {
            return None;
        }
        let lease = self.seats.get(seat).map_or(Duration::ZERO, |s| s.lease);
        let end = later(now, lease);
        *until = Some(end);
        self.leases.insert((end, id));
        Some(row.held(topic, wall))
    }

    /// Takes back events that were claimed and not handed out: no attempt has begun.
    pub(crate) fn give_back(&mut self, claimed: &[Claimed]) {
        for (id, token, _) in claimed {
            let Some(row) = self.row_mut(*id) else {
                continue;
            };
            if matches!(row.state, State::Held { token: known, until: None, .. } if known == *token)
            {
                row.attempts -= 1;
                row.last = before(row.attempts);
                self.put_back(*id, None, Instant::now());
            }
        }
    }
}

/// A ready event: whether it is fresh, its turn, its place, and the number of its partition.
fn turn_of(ready: (&(bool, u64), &(u64, u64)), partition: usize) -> (bool, u64, u64, usize) {
    let ((fresh, _), (turn, place)) = ready;
    (*fresh, *turn, *place, partition)
}
