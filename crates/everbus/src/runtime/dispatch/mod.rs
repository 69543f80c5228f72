//! Dispatch: brings deliveries from the engine to the handlers, and outcomes from the handlers to the engine.
//!
//! Each group has its own [`Runner`] with its own tasks, so that a slow or failing group does not delay
//! another group:
//!
//! ```text
//!            fetch             pop                settlements
//!  consumer ───────▶ [Queue] ───────▶ workers ─────────────────▶ [Queue] ───────▶ settler
//!                       └───────────── leases held ─────────────────┘ ───────▶ lease keeper
//! ```
//!
//! A worker hands in its settlement and takes its next delivery under one lock, so an event costs one lock.

mod fetch;
mod keep;
mod outage;
mod plan;
mod queue;
mod settle;
mod work;

use std::sync::Arc;
use std::time::Duration;

use everbus_core::GroupName;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use crate::runtime::bus::Shared;
use crate::runtime::pipeline::Pipeline;
use crate::stats::QueueDepth;

pub(crate) use plan::{Matched, Plan};
use queue::Queue;

/// How long a shutdown may take after the time for handlers is over, to make outcomes durable and to close
/// the engine. [`Bus::shutdown_within`](crate::Bus::shutdown_within) documents the number.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

/// How much was not finished when the group ended.
#[derive(Default)]
pub(crate) struct Leftovers {
    /// Handlers that were still running.
    pub(crate) abandoned: usize,
    /// Handlers that had finished, but whose outcome is not known to be durable.
    pub(crate) unsettled: usize,
}

/// The dispatch of one group.
pub(crate) struct Runner {
    shared: Arc<Shared>,
    group: GroupName,
    pipeline: Pipeline,
    plan: Mutex<Arc<Plan>>,
    /// Tells the fetch loop to look at the plan and the breakers again.
    changed: Arc<Notify>,
    /// The lease duration of the open consumer. It changes only after the previous consumer is closed: all
    /// its deliveries are then in the queue, where the lease keeper sees them.
    lease: watch::Sender<Duration>,
    /// When the lease keeper last began an extension of all held leases that succeeded. `None` before the
    /// first one.
    kept_at: Mutex<Option<Instant>>,
    queue: Queue,
    depth: QueueDepth,
    workers: Mutex<JoinSet<()>>,
    tasks: Mutex<Tasks>,
}

#[derive(Default)]
struct Tasks {
    fetch: Option<JoinHandle<()>>,
    settle: Option<JoinHandle<()>>,
    keep: Option<JoinHandle<()>>,
}

impl Runner {
    /// Starts the tasks of a group.
    pub(crate) fn start(shared: Arc<Shared>, group: GroupName, plan: Plan) -> Arc<Self> {
        shared.group_not_stopped(&group);
        let changed = Arc::new(Notify::new());
        let depth = shared.stats.queue(&group);
        shared.circuits.tell(&changed);
        shared.pauses.tell(&changed);
        let runner = Arc::new(Self {
            pipeline: Pipeline {
                shared: shared.clone(),
                group: group.clone(),
            },
            shared,
            group,
            queue: Queue::new(plan.concurrency),
            depth,
            lease: watch::Sender::new(plan.lease),
            kept_at: Mutex::default(),
            plan: Mutex::new(Arc::new(plan)),
            changed,
            workers: Mutex::default(),
            tasks: Mutex::default(),
        });
        *runner.tasks.lock() = Tasks {
            fetch: Some(tokio::spawn(runner.clone().fetch_loop())),
            settle: Some(tokio::spawn(runner.clone().settle_loop())),
            keep: Some(tokio::spawn(runner.clone().keep_leases())),
        };
        runner
    }

    /// Replaces the plan of the group. Queued deliveries stay queued.
    pub(crate) fn change(self: &Arc<Self>, plan: Plan) {
        self.spawn_worker(self.queue.set_concurrency(plan.concurrency));
        *self.plan.lock() = Arc::new(plan);
        self.changed.notify_one();
    }

    /// Whether the group stops or has stopped: it was told to stop, the engine failed, or the group was
    /// removed.
    pub(crate) fn has_stopped(&self) -> bool {
        self.queue.is_stopping()
    }

    /// Stops the group in the background, with the shutdown timeout of the bus.
    pub(crate) fn retire(self: Arc<Self>) {
        let deadline = Instant::now() + self.shared.options.shutdown_timeout;
        tokio::spawn(self.stop(deadline));
    }

    fn plan(&self) -> Arc<Plan> {
        self.plan.lock().clone()
    }

    /// Stops the group: releases deliveries that no handler has begun, waits for running handlers until the
    /// deadline, and makes every outcome durable if that is possible within [`GRACE`] after the deadline.
    pub(crate) async fn stop(self: Arc<Self>, deadline: Instant) -> Leftovers {
        let tasks = std::mem::take(&mut *self.tasks.lock());
        self.queue.stop();
        self.changed.notify_one();
        let mut workers = std::mem::take(&mut *self.workers.lock());
        let all = async { while workers.join_next().await.is_some() {} };
        let in_time = tokio::time::timeout_at(deadline, all).await.is_ok();
        let abandoned = if in_time { 0 } else { self.queue.abandon() };
        workers.abort_all();
        workers.detach_all();
        let end = deadline + GRACE;
        if let Some(fetch) = tasks.fetch {
            // The fetch loop may still release deliveries.
            let _ = tokio::time::timeout_at(end, fetch).await;
        }
        self.queue.finish(end);
        if let Some(mut settle) = tasks.settle
            && tokio::time::timeout_at(end, &mut settle).await.is_err()
        {
            settle.abort();
            let _ = settle.await;
        }
        if let Some(keep) = tasks.keep {
            keep.abort();
        }
        Leftovers {
            abandoned,
            unsettled: self.queue.unsettled(),
        }
    }
}
