//! Queries about tasks and jobs: states, histories, and the graph of a job now or at a past time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use everbus::{
    Code, Error, HistoryQuery, Order, Pattern, Recorded, Result, Timestamp, TypedEvent as _,
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde::Serialize;

use crate::dispatcher::no_job;
use crate::events::{
    JOB, JobCreated, JobTasksAdded, TASK, TaskProcessingFailed, TaskState, TaskStatuses,
};
use crate::graph::Graph;
use crate::handle::{Jobs, readable};
use crate::index::{JobRow, JobState, Page, TaskFilter};
use crate::producer::no_task;
use crate::state::{Fold, Kind, Note, TaskStatus};

/// The number of events that are read from a history at once.
const PAGE: usize = 1_000;
/// How many histories are read at the same time.
const AT_ONCE: usize = 16;

/// A job with the state of each task.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct JobStatus {
    /// The job.
    pub job_id: String,
    /// The request that submitted it.
    pub request_id: String,
    /// Its state.
    pub state: JobState,
    /// When it was submitted.
    pub created_at: Timestamp,
    /// How many tasks it has.
    pub total_tasks: usize,
    /// The state of each task; `None` for a task that has not begun.
    pub task_statuses: TaskStatuses,
    /// Why it was refused, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

impl JobStatus {
    /// How many tasks are in a state.
    pub fn count(&self, state: TaskState) -> usize {
        let states = self.task_statuses.values();
        states.filter(|s| **s == Some(state)).count()
    }
}

/// The graph of a job at one point in time.
#[derive(Clone, Debug)]
pub struct JobPicture {
    /// The job.
    pub job_id: String,
    /// Its tasks and their dependencies.
    pub graph: Graph,
    /// The state of each task, in the order of the graph.
    pub states: Vec<Option<TaskState>>,
}

impl Jobs {
    /// The state of a task, folded from its events; `None` if it has no events.
    pub async fn task(&self, id: &str) -> Result<Option<TaskStatus>> {
        self.task_at(id, None).await
    }

    /// The state of a task at a past time, or now if `at` is `None`.
    pub async fn task_at(&self, id: &str, at: Option<Timestamp>) -> Result<Option<TaskStatus>> {
        let mut status: Option<TaskStatus> = None;
        self.each_event(TASK, id, at, |record| {
            if let Some(note) = Note::of(record) {
                status.get_or_insert_default().apply(&note);
            }
        })
        .await?;
        Ok(status.filter(|status| status.state.is_some()))
    }

    /// The events of a task, the oldest first.
    pub async fn task_history(&self, id: &str) -> Result<Vec<Arc<Recorded>>> {
        let mut events = Vec::new();
        self.each_event(TASK, id, None, |record| events.push(record.clone()))
            .await?;
        Ok(events)
    }

    /// Calls a function with each event of a task, the oldest first.
    pub(crate) async fn each_event_of_task(
        &self,
        id: &str,
        take: impl FnMut(&Arc<Recorded>),
    ) -> Result<()> {
        self.each_event(TASK, id, None, take).await
    }

    async fn each_event(
        &self,
        kind: &str,
        id: &str,
        until: Option<Timestamp>,
        mut take: impl FnMut(&Arc<Recorded>),
    ) -> Result<()> {
        let mut query = HistoryQuery::default()
            .tenant(self.tenant())
            .entity(kind, id)
            .order(Order::Oldest)
            .limit(PAGE);
        query.until = until;
        loop {
            let page = self.bus().history()?.query(query.clone()).await?;
            for record in &page.items {
                take(&readable(self.bus(), record).await?);
            }
            match page.next {
                Some(next) => query = query.after(next),
                None => return Ok(()),
            }
        }
    }

    /// The tasks that pass a filter.
    pub async fn tasks(&self, filter: &TaskFilter) -> Result<Vec<TaskStatus>> {
        self.index().catch_up(self.bus(), None).await?;
        self.index().tasks(self.tenant(), filter)
    }

    /// One task, also a task of a job that has not begun. Fails with `NotFound` if it does not exist.
    pub async fn task_status(&self, id: &str) -> Result<TaskStatus> {
        self.index().catch_up(self.bus(), None).await?;
        let task = self.index().task(self.tenant(), id)?;
        task.ok_or_else(|| no_task(id))
    }

    /// Tasks page by page. The task whose state changed last is first. `state` selects the tasks in one state; `after`
    /// is the [`next`](Page::next) of the page before.
    pub async fn tasks_page(
        &self,
        state: Option<TaskState>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page<TaskStatus>> {
        self.index().catch_up(self.bus(), None).await?;
        self.index().tasks_page(self.tenant(), state, after, limit)
    }

    /// Jobs page by page, the newest first. `state` selects the jobs in one state; `after` is the [`next`](Page::next)
    /// of the page before.
    pub async fn jobs_page(
        &self,
        state: Option<JobState>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page<JobRow>> {
        self.index().catch_up(self.bus(), None).await?;
        self.index().jobs_page(self.tenant(), state, after, limit)
    }

    /// How many tasks are in each state.
    pub async fn task_counts(&self) -> Result<[(TaskState, u64); 4]> {
        self.index().catch_up(self.bus(), None).await?;
        self.index().counts(self.tenant())
    }

    /// Jobs, the newest first.
    pub async fn jobs(&self, limit: usize) -> Result<Vec<JobRow>> {
        self.index().catch_up(self.bus(), None).await?;
        self.index().jobs(self.tenant(), limit)
    }

    /// A job with the state of each task. Fails with `NotFound` if it does not exist.
    pub async fn job(&self, id: &str) -> Result<JobStatus> {
        self.index().catch_up(self.bus(), None).await?;
        let row = self
            .index()
            .job(self.tenant(), id)?
            .ok_or_else(|| no_job(id))?;
        let tasks = self.index().job_tasks(self.tenant(), id)?;
        let mut state = row.state();
        // The counts are the same for a failed job and for a job with a failed task whose next task is about to start.
        if state == JobState::Failed {
            let picture = self.picture(id, &tasks).await?;
            if picture.can_go_on() {
                state = JobState::Running;
            }
        }
        Ok(JobStatus {
            job_id: row.job_id,
            request_id: row.request_id,
            state,
            created_at: row.created_at,
            total_tasks: row.total_tasks,
            task_statuses: tasks.into_iter().map(|t| (t.request_id, t.state)).collect(),
            refused: row.refused,
        })
    }

    /// The tasks of a job with their full status, in the order in which they were added.
    pub async fn job_tasks(&self, id: &str) -> Result<Vec<TaskStatus>> {
        self.index().catch_up(self.bus(), None).await?;
        self.index()
            .job(self.tenant(), id)?
            .ok_or_else(|| no_job(id))?;
        self.index().job_tasks(self.tenant(), id)
    }

    /// The graph of a job with the state of each task, now or at a past time.
    pub async fn job_graph(&self, id: &str, at: Option<Timestamp>) -> Result<JobPicture> {
        let Some(at) = at else {
            let tasks = self.job_tasks(id).await?;
            return self.picture(id, &tasks).await;
        };
        self.index().catch_up(self.bus(), None).await?;
        let loaded = load_graph(self, self.tenant(), id, None, Some(at)).await?;
        let (graph, _) = loaded.ok_or_else(|| {
            Error::new(Code::NotFound, format!("there was no job {id:?} at {at}"))
                .hint("choose a later time")
        })?;
        // The index has the states of now. A task without an event since `at` had the same state then; the history is
        // asked for the others only.
        let tasks = self.index().job_tasks(self.tenant(), id)?;
        let now: HashMap<&str, &TaskStatus> =
            tasks.iter().map(|t| (t.request_id.as_str(), t)).collect();
        let states: Vec<_> = graph
            .tasks()
            .iter()
            .map(|task| {
                let status = now.get(task.task_id.as_str());
                async move {
                    match status.map(|status| (status.state, status.last_event_at)) {
                        Some((None, _)) => Ok(None),
                        Some((state, Some(last))) if last <= at => Ok(state),
                        _ => self.state_in_job(id, &task.task_id, at).await,
                    }
                }
            })
            .collect();
        let states: Vec<_> = stream::iter(states).buffered(AT_ONCE).try_collect().await?;
        let job_id = id.to_owned();
        Ok(JobPicture {
            job_id,
            graph,
            states,
        })
    }

    /// The state of a task of a job at a past time. Events that name another job do not count, as in the index.
    async fn state_in_job(&self, job: &str, id: &str, at: Timestamp) -> Result<Option<TaskState>> {
        let mut fold = Fold::default();
        self.each_event(TASK, id, Some(at), |record| {
            let note = Note::of(record);
            let note = note.filter(|n| n.kind == Kind::Heartbeat || n.job.as_deref() == Some(job));
            if let Some(note) = note {
                fold.apply(&note);
            }
        })
        .await?;
        Ok(fold.state)
    }

    async fn picture(&self, id: &str, tasks: &[TaskStatus]) -> Result<JobPicture> {
        let loaded = load_graph(self, self.tenant(), id, Some(tasks.len()), None).await?;
        let (graph, _) = loaded.ok_or_else(|| no_job(id))?;
        Ok(JobPicture {
            job_id: id.to_owned(),
            graph,
            states: tasks.iter().map(|task| task.state).collect(),
        })
    }

    /// Waits until a job has ended: it has completed, was refused, or has failed and no task can continue. Calls `seen`
    /// with the status now and after each change.
    pub async fn wait(&self, id: &str, mut seen: impl FnMut(&JobStatus)) -> Result<JobStatus> {
        let mut last: Option<JobStatus> = None;
        loop {
            let head = self.bus().log()?.head().await?;
            let status = self.job(id).await?;
            if last.as_ref() != Some(&status) {
                seen(&status);
            }
            if status.state != JobState::Running {
                return Ok(status);
            }
            // Events come in bursts: one query after a pause serves many of them. The query is slower for a large job,
            // so the pause is longer.
            let pause = Duration::from_millis(5 + status.total_tasks as u64 / 100);
            last = Some(status);
            self.bus().log()?.wait_beyond(head).await?;
            tokio::time::sleep(pause).await;
        }
    }
}

impl JobPicture {
    /// The parents of a task that have not completed.
    pub fn open_parents(&self, number: usize) -> Vec<usize> {
        let parents = self.graph.parents(number).iter().copied();
        parents
            .filter(|parent| self.states[*parent] != Some(TaskState::Completed))
            .collect()
    }

    /// Explains in a few words why a task waits or failed, or which worker has it; `None` once it has completed.
    /// `status` adds details for a task that has begun.
    pub fn reason(&self, number: usize, status: Option<&TaskStatus>) -> Option<String> {
        let status = status.filter(|status| status.state == self.states[number]);
        let error = status.and_then(|status| status.error.as_deref());
        let reason = match self.states[number] {
            Some(TaskState::Completed) => return None,
            None => self.reason_to_wait(number),
            Some(TaskState::Pending) => "waits for a worker".to_owned(),
            Some(TaskState::Processing) => {
                let last = status.and_then(|status| status.last_event_type.as_deref());
                let worker = status.and_then(|status| status.worker_id.as_deref());
                match (last, worker) {
                    (Some(TaskProcessingFailed::TYPE), _) => {
                        let error = error.unwrap_or("its attempt failed");
                        format!("waits for its next attempt: {error}")
                    }
                    (_, Some(worker)) => format!("the worker {worker} has it"),
                    _ => "a worker has it".to_owned(),
                }
            }
            Some(TaskState::Failed) => match (status, error) {
                (Some(status), _) if status.cancelled => "was cancelled".to_owned(),
                (_, Some(error)) => error.to_owned(),
                _ => "has failed".to_owned(),
            },
        };
        Some(reason)
    }

    fn reason_to_wait(&self, number: usize) -> String {
        const NAMED: usize = 5;
        let open = self.open_parents(number);
        let failed = |parent: &usize| self.states[*parent] == Some(TaskState::Failed);
        let names = |numbers: Vec<usize>| {
            let more = numbers.len().saturating_sub(NAMED);
            let ids = numbers.iter().take(NAMED);
            let ids: Vec<&str> = ids.map(|n| self.graph.task(*n).task_id.as_str()).collect();
            match more {
                0 => ids.join(", "),
                more => format!("{} and {more} more", ids.join(", ")),
            }
        };
        let stopped: Vec<usize> = open.iter().copied().filter(failed).collect();
        if !stopped.is_empty() {
            format!("cannot start: {} failed", names(stopped))
        } else if !open.is_empty() {
            format!("waits for {}", names(open))
        } else {
            "is about to start: every task before it has completed".to_owned()
        }
    }

    /// Whether a task runs, waits for a worker, or can start.
    fn can_go_on(&self) -> bool {
        let completed = |n: &usize| self.states[*n] == Some(TaskState::Completed);
        (0..self.graph.len()).any(|number| match self.states[number] {
            Some(state) => !state.is_terminal(),
            None => self.graph.parents(number).iter().all(completed),
        })
    }
}

/// Loads the graph of a job, and the time of its submission. `total`: stop at this many tasks. `until`: the graph as it
/// was at this time.
pub(crate) async fn load_graph(
    jobs: &Jobs,
    tenant: &str,
    id: &str,
    total: Option<usize>,
    until: Option<Timestamp>,
) -> Result<Option<(Graph, Timestamp)>> {
    let bus = jobs.bus();
    let query = |event_type: &str| -> Result<HistoryQuery> {
        let query = HistoryQuery::default()
            .tenant(tenant)
            .entity(JOB, id)
            .types(Pattern::new(event_type)?)
            .order(Order::Oldest)
            .limit(PAGE);
        Ok(HistoryQuery { until, ..query })
    };
    let first = query(JobCreated::TYPE)?.limit(1);
    let page = bus.history()?.query(first).await?;
    let Some(record) = page.items.first() else {
        return Ok(None);
    };
    let record = bus.whole(record).await?;
    let created: JobCreated = record.event.json()?;
    let mut graph = Graph::new(created.tasks)?;
    let mut added = query(JobTasksAdded::TYPE)?;
    loop {
        if total.is_some_and(|total| graph.len() >= total) {
            break;
        }
        let page = bus.history()?.query(added.clone()).await?;
        for record in &page.items {
            let record = bus.whole(record).await?;
            let more: JobTasksAdded = record.event.json()?;
            let fits = total.is_none_or(|total| graph.len() + more.new_tasks.len() <= total);
            // The log also has adds that the index refused: invalid ones, and those with a task of another job.
            let fits = fits && more.previous_total_tasks == graph.len();
            if fits && jobs.index().belong(tenant, id, &more.new_tasks)? {
                let _ = graph.add(more.new_tasks);
            }
        }
        match page.next {
            Some(next) => added = added.after(next),
            None => break,
        }
    }
    Ok(Some((graph, record.received_at)))
}
