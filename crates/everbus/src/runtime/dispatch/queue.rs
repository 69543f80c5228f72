//! Everything that a group holds: waiting deliveries, the leases of running ones, and outcomes to settle.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Delivery, Lease, Settlement, Verdict};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use super::plan::Matched;
use crate::runtime::pipeline::{Counted, Finished};

/// A delivery and the handlers it goes to.
pub(super) struct Work {
    pub(super) delivery: Delivery,
    pub(super) matched: Arc<Matched>,
    /// The inbox has it on record as handled.
    pub(super) already_handled: bool,
}

impl Work {
    /// Gives the delivery back without counting an attempt; it is not delivered again before `after` has
    /// passed.
    fn given_back(self, after: Duration) -> Finished {
        Finished {
            received_at: self.delivery.record.received_at,
            settlement: Settlement::new(self.delivery.lease, Verdict::Release { after }),
            counted: Counted::Nothing,
            matched: self.matched,
            case: None,
        }
    }
}

/// While this many deliveries wait, fetching pauses,
const HIGH: usize = 256;
/// until fewer than this wait. An event that is not fetched costs neither a lease nor memory here.
const LOW: usize = 64;

/// At most this many woken workers have not yet asked for work; each one that asks wakes the next. With
/// quick handlers, more woken workers would find an empty queue. The number is two because the runtime may
/// put the first one on the busy thread that woke it.
const ON_THEIR_WAY: usize = 2;

/// A delivery passes through in one direction, waiting → running → done → sending. Each step happens under
/// the lock, so [`held`](Self::held) misses none.
pub(super) struct Queue {
    state: Mutex<State>,
    /// One permit wakes one idle worker. A count, because two wake-ups must not become one.
    idle: Semaphore,
    outcomes: Notify,
    /// Fewer than [`LOW`] deliveries wait, after there were too many.
    room: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Work>,
    /// The lease that each worker holds, by seat number.
    running: Vec<Option<Lease>>,
    free_seats: Vec<usize>,
    done: Vec<Finished>,
    sending: Option<Arc<Vec<Finished>>>,
    workers: usize,
    idle_workers: usize,
    /// Workers that were woken or spawned and have not asked for work yet.
    roused: usize,
    concurrency: usize,
    stopping: bool,
    abandoned: bool,
    /// The fetch loop waits for room.
    full: bool,
    /// Outcomes that the settler gave up on because the group stops.
    unsettled: usize,
    finish_by: Option<Instant>,
}

impl State {
    fn leave(&mut self, seat: usize) {
        self.running[seat] = None;
        self.free_seats.push(seat);
        self.workers -= 1;
    }

    /// Takes an outcome. Returns whether it is the only one.
    fn hand_in(&mut self, finished: Option<Finished>) -> bool {
        match finished {
            Some(finished) if !self.abandoned => {
                self.done.push(finished);
                self.done.len() == 1
            }
            _ => false,
        }
    }

    fn give_back_waiting(&mut self) {
        let given_back = |work: Work| work.given_back(Duration::ZERO);
        self.done.extend(self.waiting.drain(..).map(given_back));
    }
}

/// What a worker does next.
pub(super) enum Next {
    /// Run this, and first spawn another worker if a seat is given.
    Run(Work, Option<NewSeat>),
    /// Wait to be woken.
    Wait,
    /// End; the seat is free again.
    End,
}

/// The seat of a worker that is to be spawned.
pub(super) type NewSeat = usize;

/// What the settler does next.
pub(super) enum Outcomes {
    Send(Arc<Vec<Finished>>),
    Wait,
    End,
}

impl Queue {
    pub(super) fn new(concurrency: usize) -> Self {
        Self {
            state: Mutex::new(State {
                concurrency,
                ..State::default()
            }),
            idle: Semaphore::new(0),
            outcomes: Notify::new(),
            room: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Queues deliveries. If the group is stopping they are given back instead.
    pub(super) fn push(&self, work: impl Iterator<Item = Work>) -> Option<NewSeat> {
        let mut state = self.state();
        if state.stopping {
            state
                .done
                .extend(work.map(|work| work.given_back(Duration::ZERO)));
            drop(state);
            self.outcomes.notify_one();
            return None;
        }
        state.waiting.extend(work);
        self.rouse(&mut state)
    }

    /// Whether there is no room for another batch; if so, the worker that makes room sends a notification.
    fn is_full(&self) -> bool {
        let mut state = self.state();
        state.full = state.waiting.len() >= HIGH;
        state.full
    }

    /// Waits until there is room for another batch.
    pub(super) async fn room(&self) {
        loop {
            let room = self.room.notified();
            if !self.is_full() {
                return;
            }
            room.await;
        }
    }

    /// Hands in the outcome of the last delivery and takes no new one: the worker lets other tasks run.
    pub(super) fn hand_in(&self, seat: usize, finished: Option<Finished>) {
        let mut state = self.state();
        let first = state.hand_in(finished);
        state.running[seat] = None;
        drop(state);
        if first {
            self.outcomes.notify_one();
        }
    }

    /// Hands in the outcome of the last delivery and takes the next one. `roused` says whether the worker
    /// was woken or spawned just now.
    pub(super) fn next(&self, seat: usize, roused: bool, finished: Option<Finished>) -> Next {
        let mut state = self.state();
        if roused {
            state.roused = state.roused.saturating_sub(1);
        }
        let first = state.hand_in(finished);
        let mut room = false;
        let next = if state.workers > state.concurrency {
            // The worker that ends here may have been woken for work that is still queued.
            if !state.waiting.is_empty() {
                self.rouse(&mut state);
            }
            state.leave(seat);
            Next::End
        } else if let Some(work) = state.waiting.pop_front() {
            state.running[seat] = Some(work.delivery.lease.clone());
            room = state.full && state.waiting.len() < LOW;
            state.full &= !room;
            let spawn = if state.waiting.is_empty() {
                None
            } else {
                self.rouse(&mut state)
            };
            Next::Run(work, spawn)
        } else {
            if state.stopping {
                state.leave(seat);
                Next::End
            } else {
                state.running[seat] = None;
                state.idle_workers += 1;
                Next::Wait
            }
        };
        drop(state);
        if first {
            self.outcomes.notify_one();
        }
        if room {
            self.room.notify_one();
        }
        next
    }

    /// Starts one more worker: wakes an idle one, or returns a seat for the caller to spawn one.
    fn rouse(&self, state: &mut State) -> Option<NewSeat> {
        if state.roused >= ON_THEIR_WAY {
            return None;
        }
        if state.idle_workers > 0 {
            state.idle_workers -= 1;
            state.roused += 1;
            self.idle.add_permits(1);
            return None;
        }
        if state.workers >= state.concurrency {
            return None;
        }
        state.workers += 1;
        state.roused += 1;
        let seat = state.free_seats.pop().unwrap_or_else(|| {
            state.running.push(None);
            state.running.len() - 1
        });
        Some(seat)
    }

    /// Waits until there may be work. Returns false if the group is stopping.
    pub(super) async fn woken(&self) -> bool {
        match self.idle.acquire().await {
            Ok(permit) => {
                permit.forget();
                true
            }
            Err(_) => false,
        }
    }

    /// A worker has ended in another way than by [`Next::End`].
    pub(super) fn leave(&self, seat: usize) {
        self.state().leave(seat);
    }

    /// Changes the number of workers. Wakes the idle ones, so that surplus ones end.
    pub(super) fn set_concurrency(&self, concurrency: usize) -> Option<NewSeat> {
        let mut state = self.state();
        state.concurrency = concurrency;
        let idle = std::mem::take(&mut state.idle_workers);
        self.idle.add_permits(idle);
        if state.waiting.is_empty() {
            return None;
        }
        self.rouse(&mut state)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.state().stopping
    }

    /// Lets running handlers finish and gives waiting deliveries back.
    pub(super) fn stop(&self) {
        let mut state = self.state();
        state.stopping = true;
        state.give_back_waiting();
        drop(state);
        self.idle.close();
        self.room.notify_one();
        self.outcomes.notify_one();
    }

    /// Gives waiting deliveries back without counting an attempt; running ones continue.
    pub(super) fn give_back_waiting(&self) {
        let mut state = self.state();
        state.give_back_waiting();
        drop(state);
        self.outcomes.notify_one();
        self.room.notify_one();
    }

    /// Gives these deliveries back; they are not delivered again before `after` has passed.
    pub(super) fn give_back(&self, work: impl Iterator<Item = Work>, after: Duration) {
        let mut state = self.state();
        state.done.extend(work.map(|work| work.given_back(after)));
        drop(state);
        self.outcomes.notify_one();
    }

    /// How many deliveries wait, run, or have an outcome that is not durable yet.
    pub(super) fn depth(&self) -> u64 {
        let state = self.state();
        let running = state.running.iter().flatten().count();
        let sending = state.sending.as_deref().map_or(0, Vec::len);
        (state.waiting.len() + running + state.done.len() + sending) as u64
    }

    /// From now on, outcomes of running handlers are not settled. Returns how many handlers run.
    pub(super) fn abandon(&self) -> usize {
        let mut state = self.state();
        state.abandoned = true;
        state.running.iter().flatten().count()
    }

    /// Tells the settler to end when nothing is left to settle, or at this time.
    pub(super) fn finish(&self, by: Instant) {
        self.state().finish_by = Some(by);
        self.outcomes.notify_one();
    }

    pub(super) fn finish_by(&self) -> Option<Instant> {
        self.state().finish_by
    }

    /// Takes all outcomes. They stay visible to [`held`](Self::held) until the next call.
    pub(super) fn take_outcomes(&self) -> Outcomes {
        let mut state = self.state();
        state.sending = None;
        if state.done.is_empty() {
            return match state.finish_by {
                Some(_) => Outcomes::End,
                None => Outcomes::Wait,
            };
        }
        // The next batch is probably about as large.
        let next = Vec::with_capacity(state.done.len().min(LOW));
        let batch = Arc::new(std::mem::replace(&mut state.done, next));
        state.sending = Some(batch.clone());
        Outcomes::Send(batch)
    }

    /// Puts back outcomes that were taken last and could not be settled. They come first in the next batch.
    pub(super) fn send_again(&self, mut again: Vec<Finished>) {
        let mut state = self.state();
        state.sending = None;
        again.append(&mut state.done);
        state.done = again;
    }

    /// The settler gives up on these outcomes. Before the group stops, this is not final: their events are
    /// delivered again.
    pub(super) fn count_unsettled(&self, batch: &[Finished]) {
        let mut state = self.state();
        if state.stopping {
            state.unsettled += outcomes_in(batch);
        }
    }

    /// How many outcomes of handlers are not known to be durable, once the settler has ended.
    pub(super) fn unsettled(&self) -> usize {
        let state = self.state();
        let sending = state.sending.as_deref().map_or(0, |s| outcomes_in(s));
        state.unsettled + sending + outcomes_in(&state.done)
    }

    /// Waits until there may be outcomes to settle.
    pub(super) async fn outcomes(&self) {
        self.outcomes.notified().await;
    }

    /// The leases of everything that is not settled yet.
    pub(super) fn held(&self) -> Vec<Lease> {
        let state = self.state();
        let waiting = state.waiting.iter().map(|work| &work.delivery.lease);
        let running = state.running.iter().flatten();
        let sending = state.sending.iter().flat_map(|batch| batch.iter());
        let settling = state
            .done
            .iter()
            .chain(sending)
            .map(|f| &f.settlement.lease);
        waiting.chain(running).chain(settling).cloned().collect()
    }
}

/// How many of these outcomes came from a handler; the others only give deliveries back.
fn outcomes_in(batch: &[Finished]) -> usize {
    let of_handler = |f: &&Finished| !matches!(f.settlement.verdict, Verdict::Release { .. });
    batch.iter().filter(of_handler).count()
}
