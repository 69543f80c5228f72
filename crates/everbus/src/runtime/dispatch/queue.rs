//! Everything that a group holds in this process: deliveries that wait for a worker, the leases of running
//! deliveries, and outcomes that are not settled yet.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Delivery, Lease, Settlement, Verdict};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use super::plan::Matched;
use crate::runtime::pipeline::{Counted, Finished};

/// A delivery and the handlers of its event type.
pub(super) struct Work {
    pub(super) delivery: Delivery,
    pub(super) matched: Arc<Matched>,
    /// Whether the inbox says that the group has handled this event before.
    pub(super) already_handled: bool,
}

impl Work {
    /// The outcome that releases the delivery: no attempt is counted, and the event is not delivered again
    /// before `after` has passed.
    fn released(self, after: Duration) -> Finished {
        Finished {
            received_at: self.delivery.record.received_at,
            settlement: Settlement::new(self.delivery.lease, Verdict::Release { after }),
            counted: Counted::Nothing,
            matched: self.matched,
            case: None,
        }
    }
}

/// Fetching pauses when this many deliveries wait. An event that is not fetched costs neither a lease nor
/// memory in this process.
const PAUSE_AT: usize = 256;
/// After a pause, fetching resumes when fewer deliveries than this wait.
const RESUME_BELOW: usize = 64;

/// How many workers may be waking at once: woken or spawned, but not yet in [`Queue::next`]. A worker that
/// takes work wakes the next worker. With quick handlers, more waking workers would find an empty queue. The
/// number is two because the runtime may put the first one on the busy thread that woke it.
const MAX_WAKING: usize = 2;

/// The deliveries of a group, from the fetch to the settlement.
///
/// A delivery goes waiting → running → done → sending, with two exceptions: a delivery that is released
/// never runs, and [`send_again`](Self::send_again) goes back from sending to done. Every step happens under
/// the lock, so [`held`](Self::held) always sees each delivery that is in the queue.
pub(super) struct Queue {
    state: Mutex<State>,
    /// One permit wakes one idle worker. A count, because two wake-ups must not become one.
    idle: Semaphore,
    /// Wakes the settler.
    outcomes: Notify,
    /// Wakes the fetch loop when it waits for room: fewer than [`RESUME_BELOW`] deliveries wait, the waiting
    /// deliveries were released, or the group stops.
    room: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Work>,
    /// The lease that each worker holds, by slot number. `None`: the slot is free, or its worker has no
    /// delivery.
    running: Vec<Option<Lease>>,
    /// The slots of `running` that no worker uses.
    free_slots: Vec<usize>,
    /// Outcomes that the settler has not taken yet.
    done: Vec<Finished>,
    /// The batch that the settler took last.
    sending: Option<Arc<Vec<Finished>>>,
    workers: usize,
    /// Workers that wait for a permit of [`Queue::idle`].
    idle_workers: usize,
    /// Workers that were woken or spawned by [`Queue::wake_one`] and have not called [`Queue::next`] yet.
    waking: usize,
    /// How many workers there may be.
    concurrency: usize,
    /// Whether the group stops: new deliveries are released, and idle workers end.
    stopping: bool,
    /// Whether outcomes of handlers are dropped instead of settled: the time for handlers is over. Their
    /// events are delivered again when the leases end.
    abandoned: bool,
    /// Whether the fetch loop found the queue full and may wait for room.
    full: bool,
    /// How many outcomes of handlers the settler gave up on after the group began to stop.
    unsettled: usize,
    /// Set when no more outcomes will come: the settler ends when it has settled everything, and repeats no
    /// settlement after this time. `None` before.
    finish_by: Option<Instant>,
}

impl State {
    /// Frees the slot of a worker that ends.
    fn leave(&mut self, slot: usize) {
        self.running[slot] = None;
        self.free_slots.push(slot);
        self.workers -= 1;
    }

    /// Adds an outcome to `done`; drops it if the group was abandoned. Returns whether the settler must be
    /// woken: `done` was empty before and now has this outcome.
    fn hand_in(&mut self, finished: Option<Finished>) -> bool {
        match finished {
            Some(finished) if !self.abandoned => {
                self.done.push(finished);
                self.done.len() == 1
            }
            _ => false,
        }
    }

    /// Moves all waiting deliveries to `done`, as releases.
    fn release_waiting(&mut self) {
        let released = |work: Work| work.released(Duration::ZERO);
        self.done.extend(self.waiting.drain(..).map(released));
    }
}

/// What a worker does next.
pub(super) enum Next {
    /// Spawn the new worker if there is one, then run this work.
    Run(Work, Option<NewWorker>),
    /// Wait to be woken.
    Wait,
    /// End: there are too many workers, or the group stops. The slot of the worker is free already.
    End,
}

/// The slot number of a worker that the caller must spawn.
pub(super) type NewWorker = usize;

/// What the settler does next.
pub(super) enum Outcomes {
    /// Settle this batch.
    Send(Arc<Vec<Finished>>),
    /// Wait for outcomes.
    Wait,
    /// End: nothing is left to settle, and no more outcomes will come.
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

    /// Queues deliveries and wakes a worker; returns a new worker if the caller must spawn one. If the group
    /// is stopping, releases the deliveries instead.
    pub(super) fn push(&self, work: impl Iterator<Item = Work>) -> Option<NewWorker> {
        let mut state = self.state();
        if state.stopping {
            state
                .done
                .extend(work.map(|work| work.released(Duration::ZERO)));
            drop(state);
            self.outcomes.notify_one();
            return None;
        }
        state.waiting.extend(work);
        self.wake_one(&mut state)
    }

    /// Whether there is no room for another batch. Remembers a `true` in `full`: the worker that makes room
    /// then notifies `room`.
    fn is_full(&self) -> bool {
        let mut state = self.state();
        state.full = state.waiting.len() >= PAUSE_AT;
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

    /// Hands in the outcome of a worker's last delivery without taking the next delivery. A worker calls
    /// this before it lets other tasks run.
    pub(super) fn hand_in(&self, slot: usize, finished: Option<Finished>) {
        let mut state = self.state();
        let first = state.hand_in(finished);
        state.running[slot] = None;
        drop(state);
        if first {
            self.outcomes.notify_one();
        }
    }

    /// Hands in the outcome of a worker's last delivery, and takes the next delivery unless the worker must
    /// wait or end. `waking` says whether the worker was woken or spawned just now.
    pub(super) fn next(&self, slot: usize, waking: bool, finished: Option<Finished>) -> Next {
        let mut state = self.state();
        if waking {
            state.waking = state.waking.saturating_sub(1);
        }
        let first = state.hand_in(finished);
        let mut room = false;
        let next = if state.workers > state.concurrency {
            // This worker ends, but it may have been woken for work that is still queued.
            if !state.waiting.is_empty() {
                self.wake_one(&mut state);
            }
            state.leave(slot);
            Next::End
        } else if let Some(work) = state.waiting.pop_front() {
            state.running[slot] = Some(work.delivery.lease.clone());
            room = state.full && state.waiting.len() < RESUME_BELOW;
            state.full &= !room;
            let spawn = if state.waiting.is_empty() {
                None
            } else {
                self.wake_one(&mut state)
            };
            Next::Run(work, spawn)
        } else {
            if state.stopping {
                state.leave(slot);
                Next::End
            } else {
                state.running[slot] = None;
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

    /// Adds one working worker: wakes an idle one, or returns a new one for the caller to spawn. Does
    /// nothing while [`MAX_WAKING`] workers are waking, or when every allowed worker is busy.
    fn wake_one(&self, state: &mut State) -> Option<NewWorker> {
        if state.waking >= MAX_WAKING {
            return None;
        }
        if state.idle_workers > 0 {
            state.idle_workers -= 1;
            state.waking += 1;
            self.idle.add_permits(1);
            return None;
        }
        if state.workers >= state.concurrency {
            return None;
        }
        state.workers += 1;
        state.waking += 1;
        let slot = state.free_slots.pop().unwrap_or_else(|| {
            state.running.push(None);
            state.running.len() - 1
        });
        Some(slot)
    }

    /// Waits until the worker is woken. Returns `false` if the group stops.
    pub(super) async fn woken(&self) -> bool {
        match self.idle.acquire().await {
            Ok(permit) => {
                permit.forget();
                true
            }
            Err(_) => false,
        }
    }

    /// Frees the slot of a worker that ended without [`Next::End`]: the group stopped while the worker was
    /// idle, or the worker was aborted.
    pub(super) fn leave(&self, slot: usize) {
        self.state().leave(slot);
    }

    /// Changes how many workers there may be. Wakes all idle workers, so that surplus workers end. Returns a
    /// new worker for the caller to spawn if deliveries wait and there may be more workers.
    pub(super) fn set_concurrency(&self, concurrency: usize) -> Option<NewWorker> {
        let mut state = self.state();
        state.concurrency = concurrency;
        let idle = std::mem::take(&mut state.idle_workers);
        self.idle.add_permits(idle);
        if state.waiting.is_empty() {
            return None;
        }
        self.wake_one(&mut state)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.state().stopping
    }

    /// Stops the group: releases waiting deliveries and ends idle workers. Running handlers may finish.
    pub(super) fn stop(&self) {
        let mut state = self.state();
        state.stopping = true;
        state.release_waiting();
        drop(state);
        self.idle.close();
        self.room.notify_one();
        self.outcomes.notify_one();
    }

    /// Releases the waiting deliveries without counting an attempt. Running handlers continue.
    pub(super) fn release_waiting(&self) {
        let mut state = self.state();
        state.release_waiting();
        drop(state);
        self.outcomes.notify_one();
        self.room.notify_one();
    }

    /// Releases these deliveries without counting an attempt. Their events are not delivered again before
    /// `after` has passed.
    pub(super) fn release(&self, work: impl Iterator<Item = Work>, after: Duration) {
        let mut state = self.state();
        state.done.extend(work.map(|work| work.released(after)));
        drop(state);
        self.outcomes.notify_one();
    }

    /// How many deliveries wait, run, or have an outcome that is not settled yet.
    pub(super) fn depth(&self) -> u64 {
        let state = self.state();
        let running = state.running.iter().flatten().count();
        let sending = state.sending.as_deref().map_or(0, Vec::len);
        (state.waiting.len() + running + state.done.len() + sending) as u64
    }

    /// Drops the outcomes of handlers that finish from now on. Returns how many handlers still run.
    pub(super) fn abandon(&self) -> usize {
        let mut state = self.state();
        state.abandoned = true;
        state.running.iter().flatten().count()
    }

    /// Tells the settler to end when nothing is left to settle, and to repeat no settlement after this time.
    pub(super) fn finish(&self, by: Instant) {
        self.state().finish_by = Some(by);
        self.outcomes.notify_one();
    }

    /// The time after which the settler repeats no settlement; `None` until [`finish`](Self::finish) sets it.
    pub(super) fn finish_by(&self) -> Option<Instant> {
        self.state().finish_by
    }

    /// Takes all outcomes as one batch. The leases of the batch stay in [`held`](Self::held) until the next
    /// call.
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
        let next = Vec::with_capacity(state.done.len().min(RESUME_BELOW));
        let batch = Arc::new(std::mem::replace(&mut state.done, next));
        state.sending = Some(batch.clone());
        Outcomes::Send(batch)
    }

    /// Puts outcomes of the batch that was taken last at the front of the next batch: outcomes that could
    /// not be settled, and new verdicts for outcomes that the engine refused.
    pub(super) fn send_again(&self, mut again: Vec<Finished>) {
        let mut state = self.state();
        state.sending = None;
        again.append(&mut state.done);
        state.done = again;
    }

    /// Counts outcomes that the settler gives up on, if the group is stopping. Before that nothing is
    /// counted: this process can handle the events again.
    pub(super) fn count_unsettled(&self, batch: &[Finished]) {
        let mut state = self.state();
        if state.stopping {
            state.unsettled += outcomes_in(batch);
        }
    }

    /// How many outcomes of handlers are not known to be durable. Call this after the settler has ended.
    pub(super) fn unsettled(&self) -> usize {
        let state = self.state();
        let sending = state.sending.as_deref().map_or(0, |s| outcomes_in(s));
        state.unsettled + sending + outcomes_in(&state.done)
    }

    /// Waits until there may be outcomes to settle, or the settler may have to end.
    pub(super) async fn outcomes(&self) {
        self.outcomes.notified().await;
    }

    /// The leases of all deliveries that are not settled yet.
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

/// How many of these outcomes are more than a release.
fn outcomes_in(batch: &[Finished]) -> usize {
    let of_handler = |f: &&Finished| !matches!(f.settlement.verdict, Verdict::Release { .. });
    batch.iter().filter(of_handler).count()
}
