//! The producer: submits tasks and jobs, adds tasks to jobs, retries, resumes and cancels.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use everbus::{Class, Code, Error, Event, EventId, Recorded, Result, Timestamp, TypedEvent as _};
use serde::Serialize;

use crate::dispatcher::{no_job, output_of};
use crate::events::{
    ErrorCategory, FailureSource, JobCreated, JobTasksAdded, Json, TaskFailed, TaskSpec, TaskState,
    Work,
};
use crate::graph::Graph;
use crate::handle::{Jobs, Origin, check_id};
use crate::ids::{self, Parts, time_in};
use crate::query::load_graph;
use crate::state::TaskStatus;
use crate::work::{Start, merged, publish_once, run_id};

/// Events in one step.
const PART: usize = 500;
/// How long a store beside a broker may be behind.
const STORED_WITHIN: Duration = Duration::from_secs(30);
/// An event that a store beside a broker does not have after this time was not published.
const BEHIND: Duration = Duration::from_secs(5);
/// How often an add is tried again when others add to the same job.
const MOST_TRIES: usize = 100;

/// A task to submit.
#[derive(Clone, Debug)]
pub struct NewTask {
    /// The id of the request. The same id twice is one task. A new one is made if it is `None`.
    pub request_id: Option<String>,
    /// The name of the work.
    pub name: String,
    /// The input.
    pub input: Json,
    /// Not to be started before this time.
    pub at: Option<Timestamp>,
    /// Runs the task again if it has ended.
    pub again: bool,
}

impl NewTask {
    /// A task with a new id.
    pub fn new(name: impl Into<String>, input: Json) -> Self {
        Self {
            request_id: None,
            name: name.into(),
            input,
            at: None,
            again: false,
        }
    }

    /// Sets the id of the request.
    #[must_use]
    pub fn id(mut self, request_id: impl Into<String>) -> Self {
        self.request_id = Some(request_id.into());
        self
    }
}

/// A submitted task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Submitted {
    /// The task.
    pub request_id: String,
    /// The run, from 1.
    pub run: u32,
    /// Whether this call started the run; false if the task was there already.
    pub new: bool,
    /// Its state.
    pub state: TaskState,
}

/// A job to submit.
#[derive(Clone, Debug, Default)]
pub struct NewJob {
    /// The id of the job: made from the request id, or new.
    pub job_id: Option<String>,
    /// The id of the request. The same request twice is one job.
    pub request_id: Option<String>,
    /// The tasks.
    pub tasks: Vec<TaskSpec>,
    /// Puts the id of the job and a dot before the ids of its tasks.
    pub prefix_ids: bool,
}

/// A submitted job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SubmittedJob {
    /// The job.
    pub job_id: String,
    /// The request.
    pub request_id: String,
    /// How many tasks it has.
    pub total_tasks: usize,
    /// False if the same job was submitted before.
    pub new: bool,
}

impl Jobs {
    /// Submits a task: its `Task Pending` and its work are stored in one step.
    ///
    /// A task that is there already is not started again unless [`NewTask::again`] says so, and then only if no worker
    /// has it. `TaskConflict` if it is the task of a job, or was submitted with another name or input.
    pub async fn submit(&self, task: NewTask) -> Result<Submitted> {
        if task.name.is_empty() {
            return Err(Error::new(Code::InvalidAttribute, "the task has no name")
                .hint("the name says which work it is: scrape-store"));
        }
        let Some(id) = &task.request_id else {
            let id = ids::fresh("task-");
            return self.submit_new(id, 1, &task, false).await;
        };
        check_id("request id", id)?;
        self.index().catch_up(self.bus(), None).await?;
        let Some(known) = self.index().task(self.tenant(), id)? else {
            return self.submit_new(id.clone(), 1, &task, false).await;
        };
        if let Some(job) = &known.job_id {
            return Err(task_of_job(id, job));
        }
        if task.again {
            let run = self.next_run(&known).await?;
            self.end_run(&known).await?;
            let is_begun = run == known.run;
            return self.submit_new(id.clone(), run, &task, is_begun).await;
        }
        let [_, work] = self.start_events(id, 1, &task)?;
        match self.stored(work.id()).await? {
            Some(first) if !first.event.same_body(&work) => return Err(other_input(id)),
            // An earlier call stored `Task Pending` and failed before the work.
            None if known.run == 1 && known.state == Some(TaskState::Pending) => {
                return self.submit_new(id.clone(), 1, &task, true).await;
            }
            _ => {}
        }
        Ok(Submitted {
            request_id: id.clone(),
            run: known.run,
            new: false,
            state: known.state.unwrap_or(TaskState::Pending),
        })
    }

    /// Submits tasks with new ids, in steps of many. Ids that are given are not compared with known tasks: the caller
    /// has made them for these tasks. Returns the ids.
    pub async fn submit_all(&self, tasks: &[NewTask]) -> Result<Vec<String>> {
        let mut submitted = Vec::with_capacity(tasks.len());
        for part in tasks.chunks(PART) {
            let mut events = Vec::with_capacity(2 * part.len());
            for task in part {
                let id = match &task.request_id {
                    Some(id) => {
                        check_id("request id", id)?;
                        id.clone()
                    }
                    None => ids::fresh("task-"),
                };
                events.extend(self.start_events(&id, 1, task)?);
                submitted.push(id);
            }
            self.bus().publish_batch(events).await?;
        }
        Ok(submitted)
    }

    fn start_events(&self, id: &str, run: u32, task: &NewTask) -> Result<[Event; 2]> {
        let start = Start {
            task: id,
            job: None,
            name: &task.name,
            depends_on: None,
            input: task.input.clone(),
            run,
            at: task.at,
        };
        start.events(&self.emitter(Origin::Producer))
    }

    /// Starts a run. `is_begun`: its `Task Pending` is stored, and its work is not.
    async fn submit_new(
        &self,
        id: String,
        run: u32,
        task: &NewTask,
        is_begun: bool,
    ) -> Result<Submitted> {
        let events = self.start_events(&id, run, task)?;
        let work = events[1].id();
        let new = if is_begun {
            publish_once(self.bus(), events.to_vec()).await? > 0
        } else {
            let published = self.bus().publish_batch(events).await;
            let receipts = published.map_err(|error| match error.code() {
                Code::IdReused => other_input(&id),
                _ => error,
            })?;
            receipts.iter().any(|receipt| !receipt.is_duplicate())
        };
        self.until_stored(work).await?;
        if task.request_id.is_some() {
            // Of a task and a job that name one id at the same moment, the first in the log has it.
            self.index().catch_up(self.bus(), None).await?;
            let known = self.index().task(self.tenant(), &id)?;
            if let Some(job) = known.and_then(|task| task.job_id) {
                return Err(task_of_job(&id, &job));
            }
        }
        Ok(Submitted {
            request_id: id,
            run,
            new,
            state: TaskState::Pending,
        })
    }

    /// The run that a task gets when it is run again. Refuses if it waits, or if a worker has it.
    async fn next_run(&self, task: &TaskStatus) -> Result<u32> {
        let id = &task.request_id;
        match task.state {
            // The work of this run was never stored: the run is started now.
            Some(TaskState::Pending) if !self.has_work(task).await? => Ok(task.run),
            Some(TaskState::Pending) => {
                let what = format!("the task {id:?} waits for a worker already");
                Err(conflict(what).hint("cancel it first to replace it"))
            }
            Some(TaskState::Processing) if task.is_locked(self.now()) => {
                let worker = task.worker_id.as_deref().unwrap_or("unknown");
                let what = format!("the task {id:?} is being processed by the worker {worker:?}");
                Err(conflict(what).hint("wait until it has ended, or cancel it"))
            }
            _ => Ok(task.run + 1),
        }
    }

    /// Ends a run whose lock has ended, before the next one starts. Its work is still in the group, and a worker that
    /// comes back would take it as well: workers skip a run that was cancelled.
    async fn end_run(&self, task: &TaskStatus) -> Result<()> {
        if task.state == Some(TaskState::Processing) {
            self.bus().publish(self.cancel_event(task)?).await?;
        }
        Ok(())
    }

    /// Whether the work of the present run of a task was stored.
    async fn has_work(&self, task: &TaskStatus) -> Result<bool> {
        let created_at = match &task.job_id {
            Some(job) => self.index().job(self.tenant(), job)?.map(|j| j.created_at),
            None => None,
        };
        let job = task.job_id.as_deref().zip(created_at);
        let id = run_id(self.tenant(), job, &task.request_id, task.run, Work::TYPE);
        Ok(self.stored(id).await?.is_some())
    }

    /// An event of this tenant with a derived id. A store beside a broker may be behind: it has some time.
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

    /// Submits a job. The same job or request twice is one job.
    ///
    /// `InvalidJob` if the graph is invalid. `TaskConflict` if another job has one of the tasks, or the job was
    /// submitted with other tasks.
    pub async fn submit_job(&self, job: NewJob) -> Result<SubmittedJob> {
        let (job_id, request_id) = match (job.job_id, job.request_id) {
            (Some(job), Some(request)) => (job, request),
            (Some(job), None) => (job.clone(), job),
            (None, Some(request)) => (format!("job-{request}"), request),
            (None, None) => {
                let id = ids::fresh("job-");
                (id.clone(), id)
            }
        };
        check_id("job id", &job_id)?;
        check_id("request id", &request_id)?;
        let mut tasks = job.tasks;
        if job.prefix_ids {
            prefix(&job_id, &mut tasks, |_| true);
        }
        let graph = Graph::new(tasks)?;
        let created = JobCreated {
            job_id: job_id.clone(),
            request_id: request_id.clone(),
            total_tasks: graph.len(),
            tasks: graph.tasks().to_vec(),
        };
        let parts = Parts {
            tenant: self.tenant(),
            job: &job_id,
            task: "",
            run: 0,
            event_type: JobCreated::TYPE,
        };
        let event = self
            .emitter(Origin::Producer)
            .event(&created)
            .id(parts.at(time_in(&job_id)))
            .build()?;
        // Looked at before: an invalid job should not be in the log, if that can be avoided.
        let index = self.index();
        index.catch_up(self.bus(), None).await?;
        let known = index.job(self.tenant(), &job_id)?.is_some();
        if !known && let Some(what) = index.taken(self.tenant(), &created.tasks)? {
            return Err(taken(what));
        }
        self.keep_jobs().await?;
        let receipt = self
            .bus()
            .publish(event)
            .await
            .map_err(|error| match error.code() {
                Code::IdReused => conflict(format!(
                    "the job {job_id:?} was submitted before with other tasks"
                ))
                .hint("choose another id for the job, or add tasks to it with `everbus job add`"),
                _ => error,
            })?;
        self.until_stored(receipt.id()).await?;
        // Of two jobs that name one task at the same moment, the first in the log has it.
        index.catch_up(self.bus(), None).await?;
        let row = index.job(self.tenant(), &job_id)?;
        if let Some(what) = row.and_then(|row| row.refused) {
            return Err(taken(what));
        }
        Ok(SubmittedJob {
            job_id,
            request_id,
            total_tasks: graph.len(),
            new: !receipt.is_duplicate(),
        })
    }

    /// Adds tasks to a job, also to one that has completed: it goes on then. Returns how many tasks the job has now.
    ///
    /// Of adds at the same moment one is first; the others are checked again on the new graph.
    pub async fn add_tasks(
        &self,
        job: &str,
        mut tasks: Vec<TaskSpec>,
        prefix_ids: bool,
    ) -> Result<usize> {
        if prefix_ids {
            let new: Vec<String> = tasks.iter().map(|task| task.task_id.clone()).collect();
            let (_, graph, _) = self.graph_of(job).await?;
            prefix(job, &mut tasks, |id| {
                new.iter().any(|new| new == id) || graph.number(id).is_none()
            });
        }
        // How many adds to the graph of this size were refused by the index: each has an id of its own.
        let (mut refused, mut size) = (0, 0);
        for _ in 0..MOST_TRIES {
            let (_, mut graph, created_at) = self.graph_of(job).await?;
            let previous = graph.len();
            // The add whose id is taken is in the index by now. If the graph is as it was, that add was refused.
            refused = if previous == size { refused + 1 } else { 0 };
            size = previous;
            graph.check(&tasks)?;
            if let Some(what) = self.index().taken(self.tenant(), &tasks)? {
                return Err(taken(what));
            }
            graph.add(tasks.clone())?;
            self.check_size(&graph)?;
            let added = JobTasksAdded {
                job_id: job.to_owned(),
                new_tasks: tasks.clone(),
                previous_total_tasks: previous,
                total_tasks_now: graph.len(),
            };
            let again = match refused {
                0 => String::new(),
                refused => refused.to_string(),
            };
            let parts = Parts {
                tenant: self.tenant(),
                job,
                task: &again,
                run: previous as u64,
                event_type: JobTasksAdded::TYPE,
            };
            let id = parts.at(Some(created_at));
            let event = self
                .emitter(Origin::Producer)
                .event(&added)
                .id(id)
                .build()?;
            self.keep_since(created_at).await?;
            match self.bus().publish(event).await {
                Ok(receipt) => self.until_stored(receipt.id()).await?,
                // Another add was first. What it added is looked at before the next try.
                Err(error) if error.code() == Code::IdReused => {
                    self.until_stored(id).await?;
                    continue;
                }
                Err(error) => return Err(error),
            }
            self.index().catch_up(self.bus(), None).await?;
            let ours = self.index().task(self.tenant(), &tasks[0].task_id)?;
            if ours.is_some_and(|task| task.job_id.as_deref() == Some(job)) {
                return Ok(graph.len());
            }
            // Another job took one of the ids at the same moment.
            let what = self.index().taken(self.tenant(), &tasks)?;
            return Err(taken(
                what.unwrap_or_else(|| "the tasks could not be added".to_owned()),
            ));
        }
        let what = format!("too many others add tasks to the job {job:?}");
        Err(Error::new(Code::Busy, what).hint("try again later"))
    }

    /// Refuses a graph whose states would not fit into `Job Completed`.
    fn check_size(&self, graph: &Graph) -> Result<()> {
        let states = graph.tasks().iter().map(|task| task.task_id.len() + 16);
        if states.sum::<usize>() + 1024 <= self.bus().max_payload() {
            return Ok(());
        }
        let what = format!("the job has too many tasks with long ids: {}", graph.len());
        Err(Error::new(Code::InvalidJob, what)
            .hint("shorter ids, a second job, or an object store for large events"))
    }

    /// Starts the failed tasks of a job again. Those that depend on them follow when they have completed. Returns the
    /// tasks that were started.
    pub async fn resume(&self, job: &str) -> Result<Vec<String>> {
        let (tasks, graph, created_at) = self.graph_of(job).await?;
        let is_atomic = self.bus().capabilities().atomic_batch;
        let mut started = Vec::new();
        let mut events = Vec::new();
        for (number, task) in tasks.iter().enumerate() {
            let run = match task.state {
                Some(TaskState::Failed) => task.run + 1,
                // An earlier call may have failed between `Task Pending` and the work.
                Some(TaskState::Pending) if !is_atomic && !self.has_work(task).await? => task.run,
                _ => continue,
            };
            if waits_for(&graph, &tasks, number).is_none() {
                let start = self.start_again((job, created_at), &graph, number, run);
                events.extend(start.await?);
                started.push(task.request_id.clone());
            }
        }
        for part in events.chunks(PART) {
            publish_once(self.bus(), part.to_vec()).await?;
        }
        Ok(started)
    }

    /// Starts one task again that has ended. Returns its new run. `TaskConflict` if it waits, or a worker has it; or if
    /// it has completed, unless `completed` allows that.
    pub async fn retry(&self, id: &str, completed: bool) -> Result<u32> {
        self.index().catch_up(self.bus(), None).await?;
        let task = self
            .index()
            .task(self.tenant(), id)?
            .ok_or_else(|| no_task(id))?;
        if task.state == Some(TaskState::Completed) && !completed {
            let what = format!("the task {id:?} has completed");
            return Err(conflict(what).hint("--completed runs it again all the same"));
        }
        let run = self.next_run(&task).await?;
        let events = match &task.job_id {
            Some(job) => {
                let (tasks, graph, created_at) = self.graph_of(job).await?;
                self.keep_since(created_at).await?;
                let number = graph.number(id).ok_or_else(|| no_task(id))?;
                if let Some(parent) = waits_for(&graph, &tasks, number) {
                    let what =
                        format!("the task {id:?} depends on {parent:?}, which has not completed");
                    return Err(conflict(what).hint("retry that one first, or resume the job"));
                }
                self.start_again((job, created_at), &graph, number, run)
                    .await?
            }
            None => {
                let work = self.last_work(&task).await?;
                self.start_events(id, run, &NewTask::new(work.name, work.input))?
            }
        };
        self.end_run(&task).await?;
        publish_once(self.bus(), events.to_vec()).await?;
        Ok(run)
    }

    /// The work of the last run of a task without a job.
    async fn last_work(&self, task: &TaskStatus) -> Result<Work> {
        let mut found = None;
        // The last run may have been left without its work.
        for run in (1..=task.run).rev().take(2) {
            let id = run_id(self.tenant(), None, &task.request_id, run, Work::TYPE);
            found = self.stored(id).await?;
            if found.is_some() {
                break;
            }
        }
        let Some(record) = found else {
            let what = format!(
                "the work of the task {:?} is not in the log",
                task.request_id
            );
            return Err(Error::new(Code::NotFound, what)
                .hint("another program submitted it, or retention removed it; submit it again"));
        };
        self.bus().whole(&record).await?.event.json()
    }

    async fn start_again(
        &self,
        (job, created_at): (&str, Timestamp),
        graph: &Graph,
        number: usize,
        run: u32,
    ) -> Result<[Event; 2]> {
        let spec = graph.task(number);
        let mut outputs = BTreeMap::new();
        for parent in graph.parents(number) {
            let parent = graph.task(*parent).task_id.as_str();
            if let Some(output) = output_of(self, self.tenant(), parent).await? {
                outputs.insert(parent, output);
            }
        }
        let input = match graph.parents(number) {
            [] => spec.input.clone(),
            _ => merged(&spec.input, &outputs, self.bus().max_payload())?,
        };
        let start = Start {
            task: &spec.task_id,
            job: Some((job, created_at)),
            name: &spec.name,
            depends_on: Some(&spec.depends_on),
            input,
            run,
            at: None,
        };
        start.events(&self.emitter(Origin::Producer))
    }

    /// Cancels a task: a worker that has it stops, and dependent tasks do not start. Returns false if it had ended
    /// before.
    pub async fn cancel_task(&self, id: &str) -> Result<bool> {
        self.index().catch_up(self.bus(), None).await?;
        let task = self
            .index()
            .task(self.tenant(), id)?
            .ok_or_else(|| no_task(id))?;
        if task.state.is_some_and(TaskState::is_terminal) {
            return Ok(false);
        }
        let receipt = self.bus().publish(self.cancel_event(&task)?).await?;
        self.until_stored(receipt.id()).await?;
        self.index().catch_up(self.bus(), None).await?;
        let task = self.index().task(self.tenant(), id)?;
        Ok(task.is_some_and(|task| task.cancelled))
    }

    /// Cancels a job: all its tasks that run, wait or could start. Returns the tasks that were cancelled.
    pub async fn cancel_job(&self, job: &str) -> Result<Vec<String>> {
        let mut cancelled = BTreeSet::new();
        loop {
            // A task may complete while its cancel is on the way, and a child of it may start. So this is repeated
            // until nothing is left that runs or can start.
            let (tasks, graph, _) = self.graph_of(job).await?;
            let open = tasks
                .iter()
                .enumerate()
                .filter(|(number, task)| match task.state {
                    Some(state) => !state.is_terminal(),
                    None => waits_for(&graph, &tasks, *number).is_none(),
                });
            let open: Vec<&TaskStatus> = open.map(|(_, task)| task).collect();
            if open.is_empty() {
                return Ok(cancelled.into_iter().collect());
            }
            let events = open.iter().map(|task| self.cancel_event(task));
            let events: Vec<Event> = events.collect::<Result<_>>()?;
            for part in events.chunks(PART) {
                self.bus().publish_batch(part.to_vec()).await?;
            }
            if let Some(last) = events.last() {
                self.until_stored(last.id()).await?;
            }
            let new = open.into_iter().map(|task| task.request_id.clone());
            cancelled.extend(new);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the store has an event. Only a store beside a broker may be behind.
    async fn until_stored(&self, id: EventId) -> Result<()> {
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

    /// Each cancel has an id of its own: one that came after the end of a run says nothing, and a later one must.
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

    /// The tasks of a job with their states, its graph, and when it was submitted.
    async fn graph_of(&self, job: &str) -> Result<(Vec<TaskStatus>, Graph, Timestamp)> {
        self.index().catch_up(self.bus(), None).await?;
        let row = self
            .index()
            .job(self.tenant(), job)?
            .ok_or_else(|| no_job(job))?;
        if let Some(what) = row.refused {
            return Err(taken(what));
        }
        let tasks = self.index().job_tasks(self.tenant(), job)?;
        let loaded = load_graph(self, self.tenant(), job, Some(tasks.len()), None).await?;
        let (graph, created_at) = loaded.ok_or_else(|| no_job(job))?;
        Ok((tasks, graph, created_at))
    }
}

/// The first parent of a task that has not completed.
fn waits_for(graph: &Graph, tasks: &[TaskStatus], number: usize) -> Option<String> {
    let mut parents = graph.parents(number).iter().map(|parent| &tasks[*parent]);
    let open = parents.find(|parent| parent.state != Some(TaskState::Completed))?;
    Some(open.request_id.clone())
}

/// Puts the id of the job before the ids of tasks, and before the dependencies that name one of them.
fn prefix(job: &str, tasks: &mut [TaskSpec], of_job: impl Fn(&str) -> bool) {
    for task in tasks {
        task.task_id = format!("{job}.{}", task.task_id);
        for parent in &mut task.depends_on {
            if of_job(parent) {
                *parent = format!("{job}.{parent}");
            }
        }
    }
}

fn conflict(what: impl Into<String>) -> Error {
    let error = Error::new(Code::TaskConflict, what);
    debug_assert_eq!(error.class(), Class::Conflict);
    error
}

fn taken(what: String) -> Error {
    conflict(what).hint("choose other ids, or --prefix-ids to put the id of the job before them")
}

fn task_of_job(id: &str, job: &str) -> Error {
    conflict(format!("the task {id:?} belongs to the job {job:?}"))
        .hint("choose another id, or `everbus task retry` to run it again")
}

fn other_input(id: &str) -> Error {
    conflict(format!(
        "the task {id:?} was submitted before with another name or input"
    ))
    .hint("choose another id; --again runs it again with the new input once it has ended")
}

/// The error for a task that is not there.
pub(crate) fn no_task(id: &str) -> Error {
    Error::new(Code::NotFound, format!("there is no task {id:?}"))
        .hint("`everbus task list` shows them; --tenant chooses the tenant")
}
