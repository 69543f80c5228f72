//! The workers: each takes one delivery at a time, so a slow handler blocks only its worker.

use std::pin::pin;
use std::sync::Arc;

use super::Runner;
use super::queue::{NewSeat, Next, Work};
use crate::guard;
use crate::runtime::pipeline::Spare;

/// After this many deliveries in a row a worker lets other tasks of its thread run.
const BEFORE_YIELDING: u32 = 32;

impl Runner {
    /// Spawns a worker for the given seat. Workers are spawned on demand and kept.
    pub(super) fn spawn_worker(self: &Arc<Self>, seat: Option<NewSeat>) {
        if seat.is_some() {
            let seat = Seat {
                runner: self.clone(),
                number: seat,
            };
            self.reap_workers();
            self.workers.lock().spawn(seat.work());
        }
    }

    /// Drops the handles of workers that have ended, to free memory.
    fn reap_workers(&self) {
        let mut workers = self.workers.lock();
        while workers.try_join_next().is_some() {}
    }
}

/// The seat of a worker; it is freed however the worker ends.
struct Seat {
    runner: Arc<Runner>,
    /// `None` once the seat is free.
    number: Option<usize>,
}

/// Why a worker ends.
enum End {
    /// There are too many workers, or the group stops; the seat is free again.
    Surplus,
    Stopped,
}

impl Seat {
    async fn work(mut self) {
        let Some(number) = self.number else { return };
        loop {
            let end = {
                let turns = pin!(self.take_turns(number));
                guard::contained(turns).await
            };
            match end {
                Ok(End::Surplus) => {
                    self.number = None;
                    self.runner.reap_workers();
                    return;
                }
                Ok(End::Stopped) => return,
                // The worker continues; otherwise queued deliveries would wait for ever. The current event
                // is delivered again when its lease ends.
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

    /// Takes one delivery after another.
    async fn take_turns(&self, number: usize) -> End {
        let runner = &self.runner;
        let mut finished = None;
        let mut spare = Spare::default();
        let mut in_a_row = 0;
        let mut roused = true;
        loop {
            let next = (runner.queue).next(number, roused, finished.take());
            roused = false;
            let work = match next {
                Next::Run(work, spawn) => {
                    runner.spawn_worker(spawn);
                    work
                }
                Next::Wait => {
                    in_a_row = 0;
                    // The spare message holds an event and a handler; a waiting worker must hold nothing.
                    spare = Spare::default();
                    if !runner.queue.woken().await {
                        return End::Stopped;
                    }
                    roused = true;
                    continue;
                }
                Next::End => return End::Surplus,
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
                // Handed in first: the position of the group waits for the oldest outcome.
                runner.queue.hand_in(number, finished.take());
                tokio::task::yield_now().await;
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.runner.queue.leave(number);
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
    async fn workers_that_are_too_many_are_forgotten_when_they_end() {
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
            // The worker that stays, and the last one to end.
            until(&|| workers() <= 2).await;
        };
        let settled = tokio::time::timeout(Duration::from_secs(30), settled).await;
        assert!(settled.is_ok(), "{} workers are remembered", workers());
    }
}
