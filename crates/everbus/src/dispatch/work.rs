//! The workers: each takes one delivery at a time, so a slow handler holds back nothing but itself.

use std::sync::Arc;

use everbus_core::Settlement;

use super::queue::{NewSeat, Next};
use super::{Runner, lock};
use crate::pipeline;

/// After this many deliveries in a row a worker lets other tasks of its thread run.
const BEFORE_YIELDING: u32 = 32;

impl Runner {
    /// Spawns the worker that is asked for. Workers come as they are needed and stay.
    pub(super) fn spawn_worker(self: &Arc<Self>, seat: Option<NewSeat>) {
        if seat.is_some() {
            let seat = Seat {
                runner: self.clone(),
                number: seat,
            };
            lock(&self.workers).spawn(seat.work());
        }
    }
}

/// A worker's place; it is given back however the worker ends.
struct Seat {
    runner: Arc<Runner>,
    /// None once it has been given back.
    number: Option<usize>,
}

impl Seat {
    async fn work(mut self) {
        let Some(number) = self.number else { return };
        let runner = &self.runner;
        let clock = &*runner.shared.options.clock;
        let mut finished = None;
        let mut in_a_row = 0;
        loop {
            let work = match runner.queue.next(number, finished.take()) {
                Next::Run(work, spawn) => {
                    runner.spawn_worker(spawn);
                    work
                }
                Next::Wait => {
                    in_a_row = 0;
                    if !runner.queue.woken().await {
                        return;
                    }
                    continue;
                }
                Next::End => {
                    self.number = None;
                    return;
                }
            };
            let verdict =
                pipeline::deliver(&runner.group, clock, &work.delivery, &work.route).await;
            finished = Some(Settlement::new(work.delivery.lease, verdict));
            in_a_row += 1;
            if in_a_row == BEFORE_YIELDING {
                in_a_row = 0;
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
