//! The producer: submits tasks and jobs, adds tasks to jobs, retries, resumes and cancels.

mod jobs;
mod tasks;

use std::sync::Arc;
use std::time::Duration;

use everbus::{Class, Code, Error, Event, EventId, Recorded, Result, TypedEvent as _};

pub use self::jobs::{NewJob, Resumed, SubmittedJob};
pub use self::tasks::{NewTask, Submitted};
use crate::events::{ErrorCategory, FailureSource, TaskFailed, TaskState, Work};
use crate::graph::Graph;
use crate::handle::{Jobs, Origin};
use crate::state::TaskStatus;
use crate::work::run_id;

/// The number of events in one batch. `submit_all` uses it as the number of tasks, with two events each.
const PART: usize = 500;
/// How long to wait for an event that was published, until a store beside a broker has it.
const STORED_WITHIN: Duration = Duration::from_secs(30);
/// How long to wait for an event that may not exist. If a store beside a broker does not have it then, it was not
/// published.
const BEHIND: Duration = Duration::from_secs(5);

impl Jobs {
    /// Whether the work message of the current run of a task was stored.
    pub(crate) async fn has_work(&self, task: &TaskStatus) -> Result<bool> {
        let created_at = match &task.job_id {
            Some(job) => self.index().job(self.tenant(), job)?.map(|j| j.created_at),
            None => None,
        };
        let job = task.job_id.as_deref().zip(created_at);
        let id = run_id(self.tenant(), job, &task.request_id, task.run, Work::TYPE);
        Ok(self.stored(id).await?.is_some())
    }

    /// Finds an event of this tenant by its derived id. A store beside a broker may be behind, so this waits up to
    /// [`BEHIND`] for the event.
    pub(crate) async fn stored(&self, id: EventId) -> Result<Option<Arc<Recorded>>> {
        let begin = tokio::time::Instant::now();
        loop {
            let found = self.bus().lookup()?.find(id).await?;
            let mut found = found.into_iter();
            let ours = found.find(|record| record.event.tenant() == Some(self.tenant()));
            let wait = self.bus().engine().background.is_some() && begin.elapsed() < BEHIND;
            if ours.is_some() || !wait {
                return Ok(ours);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the store has an event. Only a store beside a broker can be behind.
    pub(crate) async fn until_stored(&self, id: EventId) -> Result<()> {
        if self.bus().engine().background.is_none() {
            return Ok(());
        }
        let begin = tokio::time::Instant::now();
        while self.bus().lookup()?.find(id).await?.is_empty() {
            if begin.elapsed() > STORED_WITHIN {
                let what =
                    format!("the event {id} is published, and the store does not have it yet");
                return Err(Error::new(Code::Timeout, what)
                    .hint("the archive is behind, or no bus with this store runs: `everbus groups` shows it"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// The event that cancels a task. Its id is not derived: a cancel after the end of a run has no effect, and a later
    /// cancel of the same run must not be dropped as its duplicate.
    fn cancel_event(&self, task: &TaskStatus) -> Result<Event> {
        let run = task.run.max(1);
        let job = task.job_id.as_deref();
        let failed = TaskFailed {
            request_id: task.request_id.clone(),
            job_id: task.job_id.clone(),
            error: "the task was cancelled".to_owned(),
            error_category: ErrorCategory::Cancelled,
            retry_count: 0,
            source: FailureSource::Producer,
        };
        let emitter = self.emitter(Origin::Producer);
        emitter.event_of_run(&failed, job, run).build()
    }
}

/// The first parent of a task that has not completed.
fn waits_for(graph: &Graph, tasks: &[TaskStatus], number: usize) -> Option<String> {
    let mut parents = graph.parents(number).iter().map(|parent| &tasks[*parent]);
    let open = parents.find(|parent| parent.state != Some(TaskState::Completed))?;
    Some(open.request_id.clone())
}

fn conflict(what: impl Into<String>) -> Error {
    let error = Error::new(Code::TaskConflict, what);
    debug_assert_eq!(error.class(), Class::Conflict);
    error
}

/// The error for a task that does not exist.
pub(crate) fn no_task(id: &str) -> Error {
    Error::new(Code::NotFound, format!("there is no task {id:?}"))
        .hint("`everbus task list` shows them; --tenant chooses the tenant")
}
