//! The workers: each worker runs one delivery at a time, so a slow handler blocks only its worker.

use std::pin::pin;
use std::sync::Arc;

use super::Runner;
use super::queue::{NewWorker, Next, Work};
use crate::guard;
use crate::runtime::pipeline::Spare;

/// After this many deliveries without waiting, a worker lets other tasks of its thread run.
const BEFORE_YIELDING: u32 = 32;

impl Runner {
    /// Spawns a worker in the given slot, if there is one. A worker stays until there are too many workers
    /// or the group stops.
    pub(super) fn spawn_worker(self: &Arc<Self>, slot: Option<NewWorker>) {
        if slot.is_some() {
            let worker = Worker {
                runner: self.clone(),
                slot,
            };
            self.reap_workers();
            self.workers.lock().spawn(worker.work());
        }
    }

    /// Drops the task handles of workers that have ended, to free memory.
    fn reap_workers(&self) {
        let mut workers = self.workers.lock();
        while workers.try_join_next().is_some() {}
    }
}

/// A worker and its slot in the queue. Dropping the worker frees the slot, so an aborted worker frees it too.
struct Worker {
    runner: Arc<Runner>,
    /// `None` once the slot is free.
    slot: Option<usize>,
}

/// How a worker ended.
enum End {
    /// By [`Next::End`]: the queue has freed the slot.
    SlotFreed,
    /// The group stopped while the worker was idle. The slot is not free yet.
    Stopped,
}

impl Worker {
    /// Runs deliveries until the worker ends. Continues after a panic.
    async fn work(mut self) {
        let Some(slot) = self.slot else { return };
        loop {
            let end = {
                let deliveries = pin!(self.run_deliveries(slot));
                guard::contained(deliveries).await
            };
            match end {
                Ok(End::SlotFreed) => {
                    self.slot = None;
                    self.runner.reap_workers();
                    return;
                }
                Ok(End::Stopped) => return,
                // The worker continues, because queued deliveries could otherwise wait for ever. The event
                // that it was running is delivered again when its lease ends.
                Err(error) => {
                    let group = &self.runner.group;
                    guard::log(|| {
                        tracing::error!(target: "everbus::dispatch", %group, error, "a worker panicked");
                    });
                    tokio::task::yield_now().await;
                }
            }
        }
    }

    /// Runs one delivery after another until the worker must end.
    async fn run_deliveries(&self, slot: usize) -> End {
        let runner = &self.runner;
        let mut finished = None;
        let mut spare = Spare::default();
        let mut in_a_row = 0;
        let mut waking = true;
        loop {
            let next = (runner.queue).next(slot, waking, finished.take());
            waking = false;
            let work = match next {
                Next::Run(work, spawn) => {
                    runner.spawn_worker(spawn);
                    work
                }
                Next::Wait => {
                    in_a_row = 0;
                    // The spare message refers to an event and a handler. A waiting worker must not keep
                    // them alive.
                    spare = Spare::default();
                    if !runner.queue.woken().await {
                        return End::Stopped;
                    }
                    waking = true;
                    continue;
                }
                Next::End => return End::SlotFreed,
            };
            let pipeline = &runner.pipeline;
            let Work {
                delivery,
                matched,
                already_handled,
            } = work;
            let delivered = pipeline.deliver(delivery, matched, already_handled, &mut spare);
            finished = Some(delivered.await);
            in_a_row += 1;
            if in_a_row == BEFORE_YIELDING {
                in_a_row = 0;
                // The outcome is handed in before the pause, so that the settler does not wait for it.
                runner.queue.hand_in(slot, finished.take());
                tokio::task::yield_now().await;
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.runner.queue.leave(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use everbus_core::{Delivery, Event, GroupName, Lease, Position, Recorded, Timestamp};

    use super::super::queue::Work;
    use super::super::{Matched, Plan, Runner};
    use crate::handler::outcome::Outcome;
    use crate::handler::{Registered, Slot};
    use crate::runtime::bus::Bus;
    use crate::runtime::options::BusOptions;

    #[tokio::test]
    async fn the_handles_of_surplus_workers_are_dropped_when_the_workers_end() {
        const MANY: usize = 64;
        let bus = Bus::open("memory:").await.unwrap();
        let plan = |concurrency| Plan::new(&[], concurrency, &BusOptions::default());
        let runner = Runner::start(bus.shared().clone(), GroupName::unnamed(), plan(MANY));
        // Each handler runs until all of them run.
        let all = Arc::new(tokio::sync::Barrier::new(MANY));
        let run = Arc::new(move |_, slot: &mut Slot| {
            let all = all.clone();
            slot.put(async move {
                all.wait().await;
                Ok(Outcome::default())
            });
        });
        let handler = Arc::new(Registered::new("h", "a".parse().unwrap(), run));
        let meter = bus.shared().stats.meter(&GroupName::unnamed(), &"a".into());
        let matched = Arc::new(Matched::new(vec![handler], meter, None, None));
        let work = (0..MANY as u64).map(|n| {
            let event = Event::builder("a").build().unwrap();
            let record = Recorded::new(event, Position::seq(n), Timestamp::EPOCH);
            let lease = Lease::new(record.position, [0, n]);
            Work {
                delivery: Delivery::new(Arc::new(record), lease),
                matched: matched.clone(),
                already_handled: false,
            }
        });
        runner.spawn_worker(runner.queue.push(work));
        let until = async |condition: &dyn Fn() -> bool| {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let workers = || runner.workers.lock().len();
        let settled = async {
            until(&|| workers() == MANY).await;
            until(&|| runner.queue.held().is_empty()).await;
            runner.change(plan(1));
            // The worker that stays, and perhaps the last worker that ended.
            until(&|| workers() <= 2).await;
        };
        let settled = tokio::time::timeout(Duration::from_secs(30), settled).await;
        assert!(settled.is_ok(), "{} worker handles are kept", workers());
    }
}
