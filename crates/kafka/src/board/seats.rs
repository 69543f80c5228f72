//! The consumers of a group in this process, and which events they take.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{ConsumeOptions, Event, Pattern, Window};

use super::{Board, Claimed, Row, RowId, State, later};

/// A consumer.
pub(crate) struct Seat {
    pub(super) handled: Arc<[Pattern]>,
    pub(super) prefetch: usize,
    pub(super) paused: bool,
    pub(super) lease: Duration,
    pub(super) no_handler_after: Duration,
    pub(super) window: Window,
    pub(super) held: usize,
    /// How many events were settled since `told`, when the window was last updated.
    pub(super) settled: usize,
    told: Instant,
    /// Events that were claimed before the consumer asked for them, and until when they are kept for it.
    pub(super) ahead: Vec<Claimed>,
    ahead_until: Instant,
}

impl Seat {
    fn new(options: ConsumeOptions) -> Self {
        Self {
            paused: options.prefetch == 0,
            handled: options.handled.into(),
            prefetch: options.prefetch,
            lease: options.lease,
            no_handler_after: options.no_handler_after,
            window: Window::new(options.concurrency),
            held: 0,
            settled: 0,
            told: Instant::now(),
            ahead: Vec::new(),
            ahead_until: Instant::now(),
        }
    }

    /// When the events that were claimed ahead are given back.
    pub(super) fn ahead_until(&self) -> Option<Instant> {
        (!self.ahead.is_empty()).then_some(self.ahead_until)
    }

    pub(super) fn keep_ahead(&mut self, claimed: Vec<Claimed>, now: Instant) {
        self.ahead = claimed;
        self.ahead_until = later(now, self.lease / 2);
    }

    /// How many more events it may get. `step` is how long a commit takes.
    pub(super) fn room(&mut self, now: Instant, step: Duration) -> usize {
        let since = now.saturating_duration_since(self.told);
        match (self.settled, self.held) {
            (0, 0) => {
                self.window.began(now);
                self.told = now;
            }
            // The window expects the number of events that were settled in one whole step.
            (1.., held) if held == 0 || since >= step => {
                let settled = std::mem::take(&mut self.settled);
                self.window.settled(settled, now, step);
                self.told = now;
            }
            _ => {}
        }
        let most = self.prefetch.min(self.window.size());
        most.saturating_sub(self.held)
    }

    /// Whether it has a handler for an event. A record that cannot be read needs none: it is dead-lettered.
    pub(super) fn takes(&self, row: &Row) -> bool {
        let event_type = row.record.event.event_type();
        let handles = |pattern: &Pattern| pattern.matches(event_type);
        row.foreign.is_some() || self.handled.iter().any(handles)
    }
}

impl Board {
    pub(crate) fn sit(&mut self, seat: u64, options: ConsumeOptions) {
        self.stand_up(seat);
        self.seats.insert(seat, Seat::new(options));
        self.handlers_changed();
    }

    pub(crate) fn stand_up(&mut self, seat: u64) {
        let ahead = self.take_ahead(seat);
        self.give_back(&ahead);
        self.seats.remove(&seat);
    }

    pub(crate) fn has_seats(&self) -> bool {
        !self.seats.is_empty()
    }

    pub(crate) fn set_handled(&mut self, seat: u64, handled: Vec<Pattern>) {
        if let Some(seat) = self.seats.get_mut(&seat) {
            seat.handled = handled.into();
        }
        self.handlers_changed();
    }

    pub(crate) fn set_prefetch(&mut self, seat: u64, prefetch: usize) {
        if let Some(seat) = self.seats.get_mut(&seat) {
            seat.paused = prefetch == 0;
            seat.prefetch = prefetch;
        }
    }

    /// Makes events that were set aside ready again.
    fn handlers_changed(&mut self) {
        for (id, _) in std::mem::take(&mut self.aside) {
            self.set_ready(id);
        }
    }

    /// Skips events without attempts that no subscription matches any more.
    pub(crate) fn refilter(&mut self, wanted: impl Fn(&Event) -> bool) {
        let mut unwanted = Vec::new();
        for (slot, part) in &self.parts {
            let fresh = part.rows.iter().filter(|(_, row)| {
                let held = matches!(row.state, State::Held { .. });
                let foreign = row.foreign.is_some();
                row.attempts == 0 && !held && !foreign && !wanted(&row.record.event)
            });
            unwanted.extend(fresh.map(|(place, _)| (*slot, *place)));
        }
        for id in unwanted {
            self.finish(id);
        }
    }

    /// Takes the events that had no handler here for too long. They are held from now on.
    pub(crate) fn orphans(&mut self, now: Instant, token: impl Fn() -> u64) -> Vec<(RowId, u64)> {
        let after = self.seats.values().map(|seat| seat.no_handler_after).min();
        let Some(after) = after else {
            return Vec::new();
        };
        let old = self
            .aside
            .iter()
            .filter(|(_, since)| now.saturating_duration_since(**since) >= after);
        let old: Vec<RowId> = old.map(|(id, _)| *id).collect();
        old.into_iter()
            .map(|id| {
                let token = token();
                self.hold(id, 0, token, false);
                self.hand_over(id, Duration::from_secs(60), now);
                (id, token)
            })
            .collect()
    }
}
