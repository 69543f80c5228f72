//! Jobs: submitting, extending, resuming and cancelling them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use everbus::{Code, Error, Event, Result, Timestamp, TypedEvent as _};
use serde::Serialize;

use super::{PART, conflict, waits_for};
use crate::dispatcher::{no_job, output_of};
use crate::events::{JobCreated, JobTasksAdded, TaskSpec, TaskState};
use crate::graph::Graph;
use crate::handle::{Jobs, Origin, check_id};
use crate::ids::{self, Parts, time_in};
use crate::query::load_graph;
use crate::state::TaskStatus;
use crate::work::{Start, merged, publish_once};

/// How often an add is tried again when others add to the same job.
const MOST_TRIES: usize = 100;

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

/// What a resume of a job did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Resumed {
    /// The tasks that were started again.
    pub started: Vec<String>,
    /// Failed tasks that depend on a task that has not completed: they were cancelled before it was their turn. The next
    /// resume starts them, once the tasks before them have completed.
    pub waiting: Vec<String>,
}

impl Jobs {
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

    /// Starts the failed tasks of a job again. Those that depend on them and have not begun follow when they have
    /// completed.
    pub async fn resume(&self, job: &str) -> Result<Resumed> {
        let (tasks, graph, created_at) = self.graph_of(job).await?;
        let is_atomic = self.bus().capabilities().atomic_batch;
        let mut resumed = Resumed::default();
        let mut events = Vec::new();
        for (number, task) in tasks.iter().enumerate() {
            let run = match task.state {
                Some(TaskState::Failed) => task.run + 1,
                // An earlier call may have failed between `Task Pending` and the work.
                Some(TaskState::Pending) if !is_atomic && !self.has_work(task).await? => task.run,
                _ => continue,
            };
            let id = task.request_id.clone();
            if waits_for(&graph, &tasks, number).is_some() {
                resumed.waiting.push(id);
                continue;
            }
            let start = self.start_again((job, created_at), &graph, number, run);
            events.extend(start.await?);
            resumed.started.push(id);
        }
        for part in events.chunks(PART) {
            publish_once(self.bus(), part.to_vec()).await?;
        }
        Ok(resumed)
    }

    pub(super) async fn start_again(
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

    /// The tasks of a job with their states, its graph, and when it was submitted.
    pub(super) async fn graph_of(&self, job: &str) -> Result<(Vec<TaskStatus>, Graph, Timestamp)> {
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

fn taken(what: String) -> Error {
    conflict(what).hint("choose other ids, or --prefix-ids to put the id of the job before them")
}
