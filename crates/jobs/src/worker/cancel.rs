//! Which runs of tasks were cancelled. Each worker process watches the cancels itself: a cancelled task must not
//! start, and a running one is stopped.

use std::collections::HashSet;
use std::sync::Arc;

use everbus::{Event, HistoryQuery, Pattern, Result, Timestamp, TypedEvent};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::events::{ErrorCategory, TASK, TaskFailed};
use crate::{Emitter, Jobs, WorkItem, run_of};

/// When more cancels are known than this, they are forgotten, and work that is older is looked up.
const MOST_KNOWN: usize = 100_000;

/// How many failures of a task are looked at. Each run of a task has one.
const FAILURES: usize = 100;

/// The cancels that a worker knows.
#[derive(Clone, Debug)]
pub(super) struct Cancellations {
    known: Arc<Mutex<Known>>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct Known {
    /// All cancels since then are in `runs`.
    since: Timestamp,
    runs: HashSet<Run>,
}

/// Tenant, task and run number.
type Run = (String, String, u32);

impl Cancellations {
    /// Begins to watch.
    pub(super) async fn watch(jobs: &Jobs) -> Result<Self> {
        let known = Known {
            since: jobs.now(),
            runs: HashSet::new(),
        };
        let this = Self {
            known: Arc::new(Mutex::new(known)),
            changed: watch::Sender::new(()),
        };
        let (told, jobs_of) = (this.clone(), jobs.clone());
        jobs.bus()
            .subscribe(TaskFailed::TYPE)
            .ephemeral()
            .name("cancels")
            .handler(move |message: everbus::Message| {
                let (told, jobs) = (told.clone(), jobs_of.clone());
                async move { told.tell(&jobs, message.event()) }
            })
            .await?;
        // Only from now on all of them are heard.
        this.known.lock().since = jobs.now();
        Ok(this)
    }

    fn tell(&self, jobs: &Jobs, event: &Event) {
        let Some((task, run)) = cancelled(event) else {
            return;
        };
        let mut known = self.known.lock();
        if known.runs.len() >= MOST_KNOWN {
            known.runs.clear();
            known.since = jobs.now();
        }
        let tenant = jobs.of(event).tenant().to_owned();
        known.runs.insert((tenant, task, run));
        drop(known);
        self.changed.send_replace(());
    }

    /// Whether the task was cancelled before its work is begun. A cancel that is published in this moment may be
    /// missed here; [`wait`](Self::wait) then returns at once.
    pub(super) async fn is_cancelled(
        &self,
        jobs: &Jobs,
        item: &WorkItem,
        received_at: Timestamp,
    ) -> Result<bool> {
        {
            let known = self.known.lock();
            if known.runs.contains(&key(jobs.tenant(), item)) {
                return Ok(true);
            }
            if received_at > known.since {
                return Ok(false);
            }
        }
        let query = HistoryQuery::default()
            .tenant(jobs.tenant())
            .entity(TASK, &item.work.request_id)
            .types(TaskFailed::TYPE.parse::<Pattern>()?)
            .limit(FAILURES);
        let page = jobs.bus().history()?.query(query).await?;
        let mut failures = page.items.iter();
        Ok(failures.any(|record| cancelled(&record.event).is_some_and(|(_, run)| run == item.run)))
    }

    /// Waits until this run of the task is cancelled.
    pub(super) async fn wait(&self, emitter: &Emitter, item: &WorkItem) {
        let key = key(emitter.tenant(), item);
        let mut changed = self.changed.subscribe();
        loop {
            if self.known.lock().runs.contains(&key) {
                return;
            }
            if changed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

fn key(tenant: &str, item: &WorkItem) -> Run {
    let task = item.work.request_id.clone();
    (tenant.to_owned(), task, item.run)
}

/// The task and the run that an event cancels.
fn cancelled(event: &Event) -> Option<(String, u32)> {
    let failed: TaskFailed = event.json().ok()?;
    let is_cancel = failed.error_category == ErrorCategory::Cancelled;
    is_cancel.then(|| (failed.request_id, run_of(event).unwrap_or(1)))
}
