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

/// How often an add is tried when other processes add tasks to the same job at the same time.
const MOST_TRIES: usize = 100;

/// A job to submit.
#[derive(Clone, Debug, Default)]
pub struct NewJob {
    /// The id of the job. `None`: it is made from the request id, or is new if there is no request id either.
    pub job_id: Option<String>,
    /// The id of the request. Submitting the same request twice makes one job.
    pub request_id: Option<String>,
    /// The tasks.
    pub tasks: Vec<TaskSpec>,
    /// Whether the ids of the tasks get the id of the job and a dot as a prefix.
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

/// The result of resuming a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Resumed {
    /// The tasks that were started again.
    pub started: Vec<String>,
    /// Failed tasks that were not started, because a task they depend on has not completed: they were cancelled before
    /// they could start. Resume the job again once those tasks have completed.
    pub waiting: Vec<String>,
}

impl Jobs {
    /// Submits a job. Submitting the same job or request twice makes one job.
    ///
    /// Fails with `InvalidJob` if the graph is invalid, and with `TaskConflict` if one of the task ids is taken or the
    /// job was submitted before with other tasks.
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
        // This check comes before the publish, so that a refused job is not in the log if that can be avoided.
        let index = self.index();
        index.catch_up(self.bus(), None).await?;
        let known = index.job(self.tenant(), &job_id)?;
        if known.is_none()
            && let Some(what) = index.taken(self.tenant(), &created.tasks)?
        {
            return Err(taken(what));
        }
        let submitted = |new| SubmittedJob {
            job_id: job_id.clone(),
            request_id: request_id.clone(),
            total_tasks: graph.len(),
            new,
        };
        // A broker may not know the id of the event any more. The store knows it.
        if let Some(known) = known
            && let Some(first) = self.stored(event.id()).await?
        {
            return match known.refused {
                _ if !first.event.same_body(&event) => Err(other_tasks(&job_id)),
                Some(what) => Err(taken(what)),
                None => Ok(submitted(false)),
            };
        }
        self.keep_jobs().await?;
        let receipt = self
            .bus()
            .publish(event)
            .await
            .map_err(|error| match error.code() {
                Code::IdReused => other_tasks(&job_id),
                _ => error,
            })?;
        self.until_stored(receipt.id()).await?;
        // If two jobs name the same task at the same moment, the task belongs to the first job in the log.
        index.catch_up(self.bus(), None).await?;
        let row = index.job(self.tenant(), &job_id)?;
        if let Some(what) = row.and_then(|row| row.refused) {
            return Err(taken(what));
        }
        Ok(submitted(!receipt.is_duplicate()))
    }

    /// Adds tasks to a job. A completed job continues with them. Returns how many tasks the job has now.
    ///
    /// If several processes add tasks at the same moment, one add is stored first; the others are checked again with
    /// the new graph.
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
        // How many adds for a graph of this size the index has refused. The number is part of the event id: the ids of
        // the refused adds are taken.
        let (mut refused, mut size) = (0, 0);
        for _ in 0..MOST_TRIES {
            let (_, mut graph, created_at) = self.graph_of(job).await?;
            let previous = graph.len();
            // The index has applied the add that took our id. If the size of the graph is unchanged, the index refused
            // that add.
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
                // Another add was stored first. The next try sees its tasks.
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
            // Another job took one of the task ids at the same moment. If not, the broker does not recognise ids, and
            // another add with our id was stored first.
            if let Some(what) = self.index().taken(self.tenant(), &tasks)? {
                return Err(taken(what));
            }
        }
        let what = format!("too many others add tasks to the job {job:?}");
        Err(Error::new(Code::Busy, what).hint("try again later"))
    }

    /// Refuses a graph whose task states would not fit into `Job Completed`.
    fn check_size(&self, graph: &Graph) -> Result<()> {
        let states = graph.tasks().iter().map(|task| task.task_id.len() + 16);
        if states.sum::<usize>() + 1024 <= self.bus().max_payload() {
            return Ok(());
        }
        let what = format!("the job has too many tasks with long ids: {}", graph.len());
        Err(Error::new(Code::InvalidJob, what)
            .hint("shorter ids, a second job, or an object store for large events"))
    }

    /// Starts the failed tasks of a job again. When they complete, the dispatcher starts the tasks that depend on them.
    pub async fn resume(&self, job: &str) -> Result<Resumed> {
        let (tasks, graph, created_at) = self.graph_of(job).await?;
        let is_atomic = self.bus().capabilities().atomic_batch;
        let mut resumed = Resumed::default();
        let mut events = Vec::new();
        for (number, task) in tasks.iter().enumerate() {
            let run = match task.state {
                Some(TaskState::Failed) => task.run + 1,
                // An earlier call may have stored `Task Pending` and failed before the work message.
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

    /// Cancels a job: all its tasks that run, wait for a worker, or could start. Returns the cancelled tasks.
    pub async fn cancel_job(&self, job: &str) -> Result<Vec<String>> {
        let mut cancelled = BTreeSet::new();
        loop {
            // A task may complete before its cancel is stored, and its child may start. So this is repeated until no
            // task runs or can start.
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

    /// The tasks of a job with their states, its graph, and the time of its submission.
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

/// Adds the id of the job as a prefix to the task ids, and to the dependencies for which `of_job` is true.
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

fn other_tasks(job: &str) -> Error {
    conflict(format!(
        "the job {job:?} was submitted before with other tasks"
    ))
    .hint("choose another id for the job, or add tasks to it with `everbus job add`")
}

fn taken(what: String) -> Error {
    conflict(what).hint("choose other ids, or --prefix-ids to put the id of the job before them")
}
