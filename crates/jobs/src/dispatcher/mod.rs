//! The dispatcher: starts the tasks of jobs, and publishes `Job Completed` and `Job Failure Detected`.
//!
//! It is a group on the bus. For each event it first updates its graphs up to the place of the event in the log, then
//! publishes what follows. So it knows everything that is in the log before the event, also the work of other
//! processes: of two parents, the one whose `Task Completed` is later in the log starts their child. The published
//! events have derived ids, so a repetition after a crash, or by a second dispatcher, changes nothing.

mod graphs;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use everbus::{
    Code, Event, EventId, HandlerError, Message, Outcome, Position, Result, StartFrom,
    TypedEvent as _,
};
use serde::Deserialize;

use self::graphs::{Graphs, JobGraph};
use crate::events::{
    ErrorCategory, FailureSource, JobCompleted, JobCreated, JobFailureDetected, JobTasksAdded,
    TaskCompleted, TaskFailed, TaskState, TaskTimeout,
};
use crate::handle::{Emitter, Jobs, Origin, is_copy, run_of};
use crate::ids::Parts;
use crate::state::{Fold, Note};
use crate::work::{Output, Start, merged, publish_once, run_id};
use crate::{DEFAULT_TENANT, DISPATCHER};

/// Up to this many starts are published in one step with the ack. More are published before the ack, in parts.
const WITH_ACK: usize = 128;
/// The number of starts in one part.
const PART: usize = 250;
/// How long the start of a large job may take.
const TIMEOUT: Duration = Duration::from_secs(300);
/// A broker delivers the events of a killed dispatcher to another one after this time. A step that takes longer keeps
/// its lease, because the bus extends it.
pub(crate) const LEASE: Duration = Duration::from_secs(30);

/// How often the retention hold is moved forward.
const RELEASE_EVERY: Duration = Duration::from_secs(600);

/// Starts the tasks of jobs.
#[derive(Clone, Debug)]
pub struct Dispatcher {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    jobs: Jobs,
    graphs: tokio::sync::Mutex<Graphs>,
}

/// The fields of an event that the dispatcher reads.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct About {
    request_id: Option<String>,
    job_id: Option<String>,
    /// Only in a failure.
    error_category: Option<String>,
    /// Only in `Job Tasks Added`.
    previous_total_tasks: Option<usize>,
}

/// What has to be published after an event: the tasks to start, `Job Completed`, the failed task and its run.
#[derive(Default)]
struct Next {
    starts: Vec<usize>,
    completed: bool,
    failed: Option<(usize, u32)>,
}

impl Dispatcher {
    /// Subscribes the dispatcher to the bus. It works once the bus is started, for all tenants.
    pub async fn subscribe(jobs: &Jobs) -> Result<Self> {
        let dispatcher = Self {
            inner: Arc::new(Inner {
                jobs: jobs.clone(),
                graphs: tokio::sync::Mutex::new(Graphs::new(jobs)),
            }),
        };
        for event_type in [
            JobCreated::TYPE,
            JobTasksAdded::TYPE,
            TaskCompleted::TYPE,
            TaskFailed::TYPE,
            TaskTimeout::TYPE,
        ] {
            let this = dispatcher.clone();
            jobs.bus()
                .subscribe(event_type)
                .group(DISPATCHER)
                .start_from(StartFrom::First)
                .name(event_type)
                .timeout(TIMEOUT)
                .lease(LEASE)
                // A broker that is unavailable for an hour must not end a job for good.
                .retry_with(|policy| policy.max_retries(10_000))
                .concurrency(64)
                .handler(move |message: Message| {
                    let this = this.clone();
                    async move { this.inner.handle(message).await }
                })
                .await?;
        }
        tokio::spawn(release(jobs.clone(), Arc::downgrade(&dispatcher.inner)));
        Ok(dispatcher)
    }
}

/// Lets retention remove the events of completed jobs, as long as the dispatcher lives.
async fn release(jobs: Jobs, dispatcher: Weak<Inner>) {
    loop {
        tokio::time::sleep(RELEASE_EVERY).await;
        if dispatcher.strong_count() == 0 {
            return;
        }
        match jobs.release_completed().await {
            Err(error) if error.code() == Code::EventBusShutdownError => return,
            Err(error) => {
                tracing::warn!(target: "everbus::jobs", %error, "the events of completed jobs stay until the next try");
            }
            Ok(_) => {}
        }
    }
}

impl Inner {
    async fn handle(&self, message: Message) -> Result<Outcome, HandlerError> {
        let event = message.event();
        if is_copy(event) {
            return Ok(Outcome::default());
        }
        let about: About = event.json()?;
        // Most tasks have no job.
        let Some(job) = &about.job_id else {
            return Ok(Outcome::default());
        };
        let tenant = event.tenant().unwrap_or(DEFAULT_TENANT).to_owned();
        let position = self.place_of(&message).await?;

        let mut graphs = self.graphs.lock().await;
        graphs.catch_up(position).await?;
        let Some(graph) = graphs.job(&tenant, job, position).await? else {
            // The job was refused, or its first event is not in the log.
            return Ok(Outcome::default());
        };
        let mut next = next(graph, event, about.request_id.as_deref(), position.place());
        if about.error_category.as_deref() == Some(ErrorCategory::Cancelled.as_str()) {
            // A cancel was asked for: it is not reported as a failure.
            next.failed = None;
        }
        let mut half_started = Vec::new();
        // A broker that does not count the attempts of killed processes calls each delivery the first attempt.
        let counts_attempts = self.jobs.bus().capabilities().exact_attempts;
        let is_maybe_again = message.attempt() > 1 || !counts_attempts;
        if is_maybe_again {
            half_started = maybe_half_started(graph, event, &about);
        }
        let is_nothing = next.starts.is_empty() && half_started.is_empty();
        if is_nothing && !next.completed && next.failed.is_none() {
            return Ok(Outcome::default());
        }
        let jobs = self.jobs.of(event);
        let emitter = jobs.emitter(Origin::Dispatcher);
        let (mut same, mut too_large) = (Vec::new(), Vec::new());
        for number in &next.starts {
            match self.start(graph, *number, &emitter).await? {
                Ok(pair) => same.extend(pair),
                Err(failed) => too_large.push(failed),
            }
        }
        same.append(&mut too_large);
        let mut again = Vec::new();
        for number in half_started {
            again.extend(self.start(graph, number, &emitter).await?.ok());
        }
        if next.completed {
            same.push(completed(graph, &emitter)?);
        }
        let mut failure = None;
        if let Some((number, run)) = next.failed {
            failure = Some(failed(graph, number, run, &emitter)?);
        }
        drop(graphs);

        for [pending, work] in again {
            if jobs.stored(work.id()).await?.is_none() {
                publish_once(self.jobs.bus(), vec![pending, work]).await?;
            }
        }
        if let Some(failure) = failure {
            // The task states in the event may differ from those of an earlier attempt. The first stored event counts.
            publish_once(self.jobs.bus(), vec![failure]).await?;
        }
        // An earlier attempt may have stored one of these events with another body. Published with the ack, such an
        // event would make the ack fail. And the broker may have forgotten the ids: `publish_once` asks the store.
        if same.len() > 2 * WITH_ACK || is_maybe_again {
            for part in same.chunks(2 * PART) {
                publish_once(self.jobs.bus(), part.to_vec()).await?;
            }
            return Ok(Outcome::default());
        }
        let mut outcome = Outcome::default();
        for event in same {
            outcome = outcome.publish(event)?;
        }
        Ok(outcome)
    }

    /// The position of the event in the log that the graphs are read from.
    async fn place_of(&self, message: &Message) -> Result<Position> {
        let bus = self.jobs.bus();
        if bus.engine().background.is_none() {
            return Ok(message.position());
        }
        // A store beside the broker has its own positions, and may be behind the broker.
        loop {
            let found = bus.lookup()?.find(message.event().id()).await?;
            let mut found = found
                .iter()
                .filter(|r| r.event.tenant() == message.event().tenant());
            if let Some(record) = found.next() {
                return Ok(record.position);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The two events that start a task. `Err`: the `Task Failed` of a task whose input is too large for an event.
    async fn start(
        &self,
        graph: &mut JobGraph,
        number: usize,
        emitter: &Emitter,
    ) -> Result<Result<[Event; 2], Event>> {
        let limit = self.jobs.bus().max_payload();
        self.fetch_outputs(graph, number, emitter.tenant()).await?;
        let spec = graph.graph.task(number);
        let parents = graph.graph.parents(number);
        let input = if parents.is_empty() {
            spec.input.clone()
        } else {
            let outputs = parents.iter().filter_map(|parent| {
                let (output, event) = graph.nodes[*parent].output.clone()?;
                Some((graph.graph.task(*parent).task_id.as_str(), (output, event)))
            });
            merged(&spec.input, &outputs.collect::<BTreeMap<_, _>>(), limit)?
        };
        let start = Start {
            task: &spec.task_id,
            job: Some((&graph.id, graph.created_at)),
            name: &spec.name,
            depends_on: Some(&spec.depends_on),
            input,
            // The task has not begun (run 0), or its current run has no work message.
            run: graph.nodes[number].fold.run.max(1),
            at: None,
        };
        let [pending, work] = start.events(emitter)?;
        let bytes = work.payload().len();
        if bytes <= limit {
            return Ok(Ok([pending, work]));
        }
        let failed = TaskFailed {
            request_id: spec.task_id.clone(),
            job_id: Some(graph.id.clone()),
            error: format!(
                "its input with the outputs of its parents has {bytes} bytes, the limit is {limit}"
            ),
            error_category: ErrorCategory::Validation,
            retry_count: 0,
            source: FailureSource::Worker,
        };
        let of_job = Some((graph.id.as_str(), graph.created_at));
        let id = run_id(
            emitter.tenant(),
            of_job,
            &spec.task_id,
            start.run,
            "Task Failed/too large",
        );
        let failed = emitter.event_of_run(&failed, Some(&graph.id), start.run);
        Ok(Err(failed.id(id).build()?))
    }

    /// Reads the outputs of parents that are not in memory: too large ones, and those from before the graph was loaded.
    async fn fetch_outputs(&self, graph: &mut JobGraph, number: usize, tenant: &str) -> Result<()> {
        let parents: Vec<usize> = graph.graph.parents(number).to_vec();
        for parent in parents {
            if graph.nodes[parent].output.is_none() {
                let task = graph.graph.task(parent).task_id.clone();
                graph.nodes[parent].output = output_of(&self.jobs, tenant, &task).await?;
            }
        }
        Ok(())
    }
}

/// The output of the `Task Completed` that counts for the last completed run. A second worker that lost its lease may
/// have published another `Task Completed` for the same run later.
pub(crate) async fn output_of(
    jobs: &Jobs,
    tenant: &str,
    task: &str,
) -> Result<Option<(Output, EventId)>> {
    let (mut fold, mut last) = (Fold::default(), None);
    let jobs = jobs.for_tenant(tenant);
    jobs.each_event_of_task(task, |record| {
        if let Some(note) = Note::of(record)
            && fold.apply(&note)
            && fold.state == Some(TaskState::Completed)
        {
            last = Some(record.clone());
        }
    })
    .await?;
    let Some(record) = last else {
        return Ok(None);
    };
    let id = record.event.id();
    if record.event.overflow().is_some() {
        return Ok(Some((Output::Large(id), id)));
    }
    let completed: TaskCompleted = record.event.json()?;
    Ok(Some((Output::of(&completed.output, id), id)))
}

/// Decides what to publish after an event, from the state of the job at the place of the event or later.
fn next(graph: &JobGraph, event: &Event, task: Option<&str>, place: u64) -> Next {
    let number = task.and_then(|task| graph.graph.number(task));
    match event.event_type() {
        JobCreated::TYPE | JobTasksAdded::TYPE => Next {
            starts: (0..graph.graph.len())
                .filter(|n| graph.can_start(*n))
                .collect(),
            ..Next::default()
        },
        TaskCompleted::TYPE => {
            let Some(number) = number else {
                return Next::default();
            };
            let children = graph.graph.children(number).iter().copied();
            Next {
                starts: children
                    .filter(|n| graph.is_started_by(*n, place))
                    .collect(),
                completed: graph.is_to_be_told(place),
                failed: None,
            }
        }
        TaskFailed::TYPE | TaskTimeout::TYPE => {
            let Some(number) = number else {
                return Next::default();
            };
            let node = &graph.nodes[number].fold;
            let run = run_of(event).unwrap_or(node.run.max(1));
            // A failure of a run that has completed does not count.
            let counts = node.run > run || node.state == Some(TaskState::Failed);
            // Only the newest of several failures is reported: its event has the states of all tasks anyway.
            let newest = graph.last_failed <= place;
            Next {
                failed: (counts && newest).then_some((number, run)),
                ..Next::default()
            }
        }
        _ => Next::default(),
    }
}

/// The tasks for which an earlier attempt at this event may have stored `Task Pending` but no work message: not every
/// engine stores both in one step.
fn maybe_half_started(graph: &JobGraph, event: &Event, about: &About) -> Vec<usize> {
    let candidates = match event.event_type() {
        JobCreated::TYPE | JobTasksAdded::TYPE => {
            let first = about.previous_total_tasks.unwrap_or(0);
            (first..graph.graph.len()).collect()
        }
        TaskCompleted::TYPE => {
            let task = about.request_id.as_deref();
            let number = task.and_then(|task| graph.graph.number(task));
            number.map_or_else(Vec::new, |number| graph.graph.children(number).to_vec())
        }
        _ => Vec::new(),
    };
    let pending = |number: &usize| graph.nodes[*number].fold.state == Some(TaskState::Pending);
    candidates.into_iter().filter(pending).collect()
}

fn completed(graph: &JobGraph, emitter: &Emitter) -> Result<Event> {
    let completed = JobCompleted {
        job_id: graph.id.clone(),
        total_tasks: graph.graph.len(),
        task_statuses: graph.statuses(),
    };
    let parts = Parts {
        tenant: emitter.tenant(),
        job: &graph.id,
        task: "",
        run: graph.graph.len() as u64,
        event_type: JobCompleted::TYPE,
    };
    let id = parts.at(Some(graph.created_at));
    emitter.event(&completed).id(id).build()
}

fn failed(graph: &JobGraph, number: usize, run: u32, emitter: &Emitter) -> Result<Event> {
    let task = &graph.graph.task(number).task_id;
    let failed = JobFailureDetected {
        job_id: graph.id.clone(),
        failed_task_id: task.clone(),
        task_statuses: graph.statuses(),
    };
    let parts = Parts {
        tenant: emitter.tenant(),
        job: &graph.id,
        task,
        run: run.into(),
        event_type: JobFailureDetected::TYPE,
    };
    let id = parts.at(Some(graph.created_at));
    emitter
        .event_of_run(&failed, Some(&graph.id), run)
        .id(id)
        .build()
}

/// The error for a job that does not exist.
pub(crate) fn no_job(id: &str) -> everbus::Error {
    everbus::Error::new(Code::NotFound, format!("there is no job {id:?}"))
        .hint("`everbus job list` shows them; --tenant chooses the tenant")
}
