//! Tasks: submitting, retrying and cancelling them.

use everbus::{Code, Error, Event, Result, Timestamp, TypedEvent as _};
use serde::Serialize;

use super::{PART, conflict, no_task, waits_for};
use crate::events::{Json, TaskState, Work};
use crate::handle::{Emitter, Jobs, Origin, check_id};
use crate::ids;
use crate::state::TaskStatus;
use crate::work::{Start, publish_once, run_id};

/// A task to submit.
#[derive(Clone, Debug)]
pub struct NewTask {
    /// The id of the request, which is the id of the task. Submitting the same id twice makes one task. `None`: a new
    /// id.
    pub request_id: Option<String>,
    /// The name of the work.
    pub name: String,
    /// The input.
    pub input: Json,
    /// The task does not start before this time.
    pub at: Option<Timestamp>,
    /// Whether a task that has ended runs again.
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
    /// Whether this call started the run; false if the task existed already.
    pub new: bool,
    /// Its state.
    pub state: TaskState,
}

impl Jobs {
    /// Submits a task: publishes its `Task Pending` and its work message as one batch.
    ///
    /// An existing task starts again only with [`NewTask::again`], and only if no worker has it. Fails with
    /// `TaskConflict` if the id belongs to a task of a job, or if the task was submitted before with another name or
    /// input.
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
            // An earlier call stored `Task Pending` and failed before the work message.
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

    /// Submits new tasks, in large batches. The ids must be new: they are not compared with existing tasks. Returns the
    /// ids.
    pub async fn submit_all(&self, tasks: &[NewTask]) -> Result<Vec<String>> {
        let mut submitted = Vec::with_capacity(tasks.len());
        let emitter = self.emitter(Origin::Producer);
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
                events.extend(start_events(&emitter, &id, 1, task)?);
                submitted.push(id);
            }
            self.bus().publish_batch(events).await?;
        }
        Ok(submitted)
    }

    fn start_events(&self, id: &str, run: u32, task: &NewTask) -> Result<[Event; 2]> {
        start_events(&self.emitter(Origin::Producer), id, run, task)
    }

    /// Starts a run. `is_begun`: the `Task Pending` of the run is stored, but its work message is not.
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
            // If a task and a job use the same id at the same moment, it belongs to the first of them in the log.
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

    /// Starts a task again. Returns its run. Fails with `TaskConflict` if the task waits for a worker, if a worker has
    /// it, or if it has completed and `completed` is false.
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

    /// The work message of the last run of a task without a job.
    async fn last_work(&self, task: &TaskStatus) -> Result<Work> {
        let mut found = None;
        // The last run may have no work message: then the one of the run before is used.
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

    /// The run number for starting a task again. Refuses a task that waits for a worker, or that a worker has.
    async fn next_run(&self, task: &TaskStatus) -> Result<u32> {
        let id = &task.request_id;
        match task.state {
            // The work message of this run was never stored. The run is started now, with the same number.
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

    /// Cancels a run whose lock has expired, before the next run starts. The group still has the work message of the
    /// old run. Workers skip a cancelled run, so no worker runs it beside the new one.
    async fn end_run(&self, task: &TaskStatus) -> Result<()> {
        if task.state == Some(TaskState::Processing) {
            self.bus().publish(self.cancel_event(task)?).await?;
        }
        Ok(())
    }

    /// Cancels a task: its worker stops, and dependent tasks do not start. Returns false if the task had ended before.
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
}

/// The events that start a task without a job.
fn start_events(emitter: &Emitter, id: &str, run: u32, task: &NewTask) -> Result<[Event; 2]> {
    let start = Start {
        task: id,
        job: None,
        name: &task.name,
        depends_on: None,
        input: task.input.clone(),
        run,
        at: task.at,
    };
    start.events(emitter)
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
