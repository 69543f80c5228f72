//! The cancelled runs of tasks. Each worker process reads all cancels: a cancelled task must not start, and a running
//! one is stopped.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use everbus::core::{EDIT_OF, REPLAY_OF};
use everbus::{Cursor, Event, Message, Result, TypedEvent};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::ending::end_id;
use crate::events::{ErrorCategory, TaskFailed, TaskState};
use crate::state::TaskStatus;
use crate::{DEFAULT_TENANT, Emitter, Jobs, WorkItem, run_of};

/// With this many known cancels, the older half is dropped. For older work messages the state of the task is looked up.
const MOST_KNOWN: usize = 100_000;

/// The cancels that a worker has received.
#[derive(Clone, Debug)]
pub(super) struct Cancellations {
    known: Arc<Mutex<Known>>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct Known {
    /// `runs` has every cancel after this cursor. Positions are compared, not times: clocks differ.
    since: Cursor,
    /// The cancelled runs, each with the sequence number of its last cancel.
    runs: HashMap<Run, u64>,
    last: u64,
}

/// Tenant, task and run number.
type Run = (String, String, u32);

impl Cancellations {
    /// Subscribes to cancels.
    pub(super) async fn watch(jobs: &Jobs) -> Result<Self> {
        let known = Known {
            since: Cursor::START,
            runs: HashMap::new(),
            last: 0,
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
            .handler(move |message: Message| {
                let (told, jobs) = (told.clone(), jobs_of.clone());
                async move {
                    told.tell(&jobs, message.event()).await?;
                    everbus::handled()
                }
            })
            .await?;
        // All cancels after this position are received: the subscription exists now.
        let head = jobs.bus().log()?.head().await?;
        this.known.lock().since = head;
        Ok(this)
    }

    async fn tell(&self, jobs: &Jobs, event: &Event) -> Result<()> {
        let Some((task, run)) = cancelled(event) else {
            return Ok(());
        };
        if self.known.lock().runs.len() >= MOST_KNOWN {
            let head = jobs.bus().log()?.head().await?;
            let mut known = self.known.lock();
            let old = known.last - MOST_KNOWN as u64 / 2;
            known.runs.retain(|_, number| *number > old);
            known.since = head;
        }
        let tenant = jobs.of(event).tenant().to_owned();
        let mut known = self.known.lock();
        known.last += 1;
        let number = known.last;
        known.runs.insert((tenant, task, run), number);
        drop(known);
        self.changed.send_replace(());
        Ok(())
    }

    /// Whether the run must not begin: it was cancelled, a later run has replaced it, or it has ended. Called before
    /// the work begins. A cancel that is published at this moment may be missed here; then [`wait`](Self::wait) returns
    /// at once.
    pub(super) async fn is_over(
        &self,
        jobs: &Jobs,
        item: &WorkItem,
        message: &Message,
    ) -> Result<bool> {
        let tenant = message.event().tenant().unwrap_or(DEFAULT_TENANT);
        let key = key(tenant, item);
        // A store beside the broker has its own positions, and may be behind the broker.
        let beside = jobs.bus().engine().background.is_some();
        let heard = {
            let known = self.known.lock();
            let heard = known.runs.get(&key).copied();
            if heard.is_some() && beside {
                return Ok(true);
            }
            // If a person asked for this delivery, a later run may have begun before it.
            let is_new = !is_asked_for(message) && !known.since.covers(message.position());
            if heard.is_none() && !beside && is_new {
                return Ok(false);
            }
            heard
        };
        // The state decides. A cancel that came after the end of the run has no effect on a later delivery of the run.
        let jobs = jobs.for_tenant(tenant);
        let is_over = match jobs.task(&item.work.request_id).await? {
            None => false,
            Some(task) => match task.run.cmp(&item.run) {
                Ordering::Greater => true,
                Ordering::Equal => {
                    task.cancelled
                        || (!is_asked_for(message) && has_ended(&jobs, &task, message).await?)
                }
                Ordering::Less => false,
            },
        };
        if !is_over && let Some(heard) = heard {
            let mut known = self.known.lock();
            // Another cancel may have arrived meanwhile: it is kept.
            if known.runs.get(&key) == Some(&heard) {
                known.runs.remove(&key);
            }
        }
        Ok(is_over)
    }

    /// Waits until this run of the task is cancelled.
    pub(super) async fn wait(&self, emitter: &Emitter, item: &WorkItem) {
        let key = key(emitter.tenant(), item);
        let mut changed = self.changed.subscribe();
        loop {
            if self.known.lock().runs.contains_key(&key) {
                return;
            }
            if changed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Whether a person asked for this delivery: a dead letter that was retried or corrected, or a replay.
pub(super) fn is_asked_for(message: &Message) -> bool {
    let metadata = message.event().metadata();
    message.was_retried()
        || [EDIT_OF, REPLAY_OF]
            .iter()
            .any(|key| metadata.contains_key(*key))
}

/// Whether the run has an end that only the ack of its work follows. A broker delivers such work again if the ack was
/// lost, or if the work was stored twice.
///
/// A run whose attempts are used up goes on: its dead letter may be missing. Its `Task Failed` has another id.
async fn has_ended(jobs: &Jobs, task: &TaskStatus, message: &Message) -> Result<bool> {
    match task.state {
        Some(TaskState::Completed) => Ok(true),
        Some(TaskState::Failed) => {
            let end = end_id(message.event().id(), None);
            let found = jobs.bus().lookup()?.find(end).await?;
            let mut tenants = found.iter().map(|record| record.event.tenant());
            Ok(tenants.any(|tenant| tenant == message.event().tenant()))
        }
        _ => Ok(false),
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
