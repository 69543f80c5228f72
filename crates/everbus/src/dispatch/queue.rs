//! Everything a group holds: deliveries that wait, leases of those that run, outcomes to be settled.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use everbus_core::{Delivery, Lease, Settlement, Verdict};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use super::lock;
use super::plan::Route;

/// A delivery and the handlers it goes to.
pub(super) struct Work {
    pub(super) delivery: Delivery,
    pub(super) route: Route,
}

/// A delivery passes through here in one direction, waiting → running → done → sending, each step
/// under the lock, so a look at all of them misses none.
pub(super) struct Queue {
    state: Mutex<State>,
    /// One permit wakes one idle worker. A count, because two wake-ups must not become one.
    idle: Semaphore,
    outcomes: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Work>,
    /// The lease each worker holds, by its seat.
    running: Vec<Option<Lease>>,
    free_seats: Vec<usize>,
    done: Vec<Settlement>,
    sending: Option<Arc<Vec<Settlement>>>,
    workers: usize,
    idle_workers: usize,
    concurrency: usize,
    stopping: bool,
    abandoned: bool,
    /// Outcomes the settler gave up on since the group stops.
    unsettled: usize,
    finish_by: Option<Instant>,
}

impl State {
    fn leave(&mut self, seat: usize) {
        self.running[seat] = None;
        self.free_seats.push(seat);
        self.workers -= 1;
    }
}

/// What a worker does next.
pub(super) enum Next {
    /// Run this, and spawn another worker first if told so.
    Run(Work, Option<NewSeat>),
    /// Wait to be woken.
    Wait,
    /// End; the seat has been given back.
    End,
}

/// The seat of a worker that is to be spawned.
pub(super) type NewSeat = usize;

/// What the settler does next.
pub(super) enum Outcomes {
    Send(Arc<Vec<Settlement>>),
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
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Queues deliveries. If the group is stopping they are given back instead.
    pub(super) fn push(&self, work: impl Iterator<Item = Work>) -> Option<NewSeat> {
        let mut state = self.state();
        if state.stopping {
            state
                .done
                .extend(work.map(|work| given_back(work.delivery)));
            drop(state);
            self.outcomes.notify_one();
            return None;
        }
        state.waiting.extend(work);
        self.rouse(&mut state)
    }

    /// Hands in what became of the last delivery and takes the next.
    pub(super) fn next(&self, seat: usize, finished: Option<Settlement>) -> Next {
        let mut state = self.state();
        let mut first = false;
        if let Some(settlement) = finished
            && !state.abandoned
        {
            first = state.done.is_empty();
            state.done.push(settlement);
        }
        let next = if state.workers > state.concurrency {
            // Whoever ends here may have been woken for work that is still there.
            if !state.waiting.is_empty() {
                self.rouse(&mut state);
            }
            state.leave(seat);
            Next::End
        } else if let Some(work) = state.waiting.pop_front() {
            state.running[seat] = Some(work.delivery.lease.clone());
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
        next
    }

    /// Gets one more worker going: wakes an idle one, or has the caller spawn one if there is room.
    fn rouse(&self, state: &mut State) -> Option<NewSeat> {
        if state.idle_workers > 0 {
            state.idle_workers -= 1;
            self.idle.add_permits(1);
            return None;
        }
        if state.workers >= state.concurrency {
            return None;
        }
        state.workers += 1;
        let seat = state.free_seats.pop().unwrap_or_else(|| {
            state.running.push(None);
            state.running.len() - 1
        });
        Some(seat)
    }

    /// Waits until there may be work; false if the group is stopping.
    pub(super) async fn woken(&self) -> bool {
        match self.idle.acquire().await {
            Ok(permit) => {
                permit.forget();
                true
            }
            Err(_) => false,
        }
    }

    /// A worker has ended otherwise than by [`Next::End`].
    pub(super) fn leave(&self, seat: usize) {
        self.state().leave(seat);
    }

    /// Changes how many workers there may be. Idle ones look up, so that surplus ones end.
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

    /// Lets running handlers finish and gives back what waits.
    pub(super) fn stop(&self) {
        let mut state = self.state();
        state.stopping = true;
        let State { waiting, done, .. } = &mut *state;
        done.extend(waiting.drain(..).map(|work| given_back(work.delivery)));
        drop(state);
        self.idle.close();
        self.outcomes.notify_one();
    }

    /// From now on, what running handlers come up with is not settled. Returns how many there are.
    pub(super) fn abandon(&self) -> usize {
        let mut state = self.state();
        state.abandoned = true;
        state.running.iter().flatten().count()
    }

    /// The settler ends when nothing is left to settle, or when it cannot by this time.
    pub(super) fn finish(&self, by: Instant) {
        self.state().finish_by = Some(by);
        self.outcomes.notify_one();
    }

    pub(super) fn finish_by(&self) -> Option<Instant> {
        self.state().finish_by
    }

    /// Takes all outcomes there are. They stay visible to [`held`](Self::held) until the next call.
    pub(super) fn take_outcomes(&self) -> Outcomes {
        let mut state = self.state();
        state.sending = None;
        if state.done.is_empty() {
            return match state.finish_by {
                Some(_) => Outcomes::End,
                None => Outcomes::Wait,
            };
        }
        let batch = Arc::new(std::mem::take(&mut state.done));
        state.sending = Some(batch.clone());
        Outcomes::Send(batch)
    }

    /// Only these of what was taken last are not settled yet.
    pub(super) fn still_sending(&self, batch: Arc<Vec<Settlement>>) {
        self.state().sending = Some(batch);
    }

    /// The settler gives up on these. Before the group stops that is no end: they come again.
    pub(super) fn count_unsettled(&self, batch: &[Settlement]) {
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
        let settling = state.done.iter().chain(sending).map(|s| &s.lease);
        waiting.chain(running).chain(settling).cloned().collect()
    }
}

/// How many of these came from a handler; the others only give back what has not begun.
fn outcomes_in(batch: &[Settlement]) -> usize {
    let of_handler = |s: &&Settlement| !matches!(s.verdict, Verdict::Release { .. });
    batch.iter().filter(of_handler).count()
}

/// Given back without an attempt.
fn given_back(delivery: Delivery) -> Settlement {
    Settlement::new(
        delivery.lease,
        Verdict::Release {
            after: Duration::ZERO,
        },
    )
}
