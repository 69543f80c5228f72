//! A worker for tests, and waiting for what a job must come to.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::{Bus, HandlerError, Message, Outcome, Recorded, Result, StartFrom, TypedEvent};
use everbus_jobs::events::{
    ErrorCategory, FailureSource, Json, TaskCompleted, TaskFailed, TaskSpec, TaskStarted,
};
use everbus_jobs::{Dispatcher, JobStatus, Jobs, NewJob, Origin, WORK, WORKERS, WorkItem};
use serde_json::{Value, json};

/// Longer than anything takes on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) async fn memory() -> Jobs {
    Jobs::new(Bus::open("memory:").await.unwrap()).unwrap()
}

pub(crate) struct File {
    pub(crate) dir: tempfile::TempDir,
}

impl File {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { dir }
    }

    pub(crate) async fn open(&self) -> Jobs {
        let url = format!("sqlite:{}", self.dir.path().join("events.db").display());
        Jobs::new(Bus::open(url).await.unwrap()).unwrap()
    }
}

pub(crate) fn task(id: &str, depends_on: &[&str]) -> TaskSpec {
    task_with(id, depends_on, &json!({}))
}

/// `{"fail": true}` in the input makes the test worker fail the task for good; `{"fail": N}` in its first N runs.
pub(crate) fn task_with(id: &str, depends_on: &[&str], input: &Value) -> TaskSpec {
    TaskSpec {
        task_id: id.to_owned(),
        name: format!("work-{id}"),
        depends_on: depends_on.iter().map(ToString::to_string).collect(),
        input: Json::of(input).unwrap(),
    }
}

pub(crate) fn job(id: &str, tasks: Vec<TaskSpec>) -> NewJob {
    NewJob {
        job_id: Some(id.to_owned()),
        tasks,
        ..NewJob::default()
    }
}

/// A worker that answers each task at once, and counts.
pub(crate) async fn worker(jobs: &Jobs) -> Arc<AtomicUsize> {
    let runs = Arc::new(AtomicUsize::new(0));
    let (jobs_of, counted) = (jobs.clone(), runs.clone());
    jobs.bus()
        .subscribe(WORK)
        .group(WORKERS)
        .start_from(StartFrom::First)
        .handler(move |message: Message| {
            let (jobs, runs) = (jobs_of.clone(), counted.clone());
            async move {
                runs.fetch_add(1, Ordering::Relaxed);
                answer(&jobs, &message).await
            }
        })
        .await
        .unwrap();
    runs
}

pub(crate) async fn answer(jobs: &Jobs, message: &Message) -> Result<Outcome, HandlerError> {
    let item = WorkItem::of(message.event())?;
    let emitter = jobs
        .of(message.event())
        .emitter(Origin::Worker)
        .worker("w-1");
    let started = TaskStarted {
        request_id: item.work.request_id.clone(),
        job_id: item.work.job_id.clone(),
        effective_until: seconds(jobs) + 60,
        worker_id: "w-1".into(),
        process_id: std::process::id(),
    };
    jobs.bus().publish(item.event(&emitter, &started)).await?;
    let input: Value = item.work.input.read()?;
    let fails = match &input["fail"] {
        Value::Bool(fails) => *fails,
        Value::Number(runs) => u64::from(item.run) <= runs.as_u64().unwrap_or(0),
        _ => false,
    };
    if fails {
        let failed = TaskFailed {
            request_id: item.work.request_id.clone(),
            job_id: item.work.job_id.clone(),
            error: "it was asked to".into(),
            error_category: ErrorCategory::Validation,
            retry_count: 1,
            source: FailureSource::Worker,
        };
        return Outcome::default().publish(item.event(&emitter, &failed));
    }
    let completed = TaskCompleted {
        request_id: item.work.request_id.clone(),
        job_id: item.work.job_id.clone(),
        output: Json::of(&json!({ "of": item.work.request_id, "got": input }))?,
        duration_ms: 1,
        exit_code: 0,
        usage: None,
    };
    Outcome::default().publish(item.event(&emitter, &completed))
}

pub(crate) fn seconds(jobs: &Jobs) -> u64 {
    u64::try_from(jobs.now().as_micros() / 1_000_000).unwrap()
}

/// A running bus with a dispatcher and the test worker.
pub(crate) async fn running(jobs: &Jobs) -> Arc<AtomicUsize> {
    Dispatcher::subscribe(jobs).await.unwrap();
    let runs = worker(jobs).await;
    jobs.bus().start().await.unwrap();
    runs
}

/// Waits until a job has ended.
pub(crate) async fn ended(jobs: &Jobs, id: &str) -> JobStatus {
    let wait = jobs.wait(id, |_| {});
    match tokio::time::timeout(PATIENCE, wait).await {
        Ok(status) => status.unwrap(),
        Err(_) => panic!("{id} did not end: {:?}", jobs.job(id).await),
    }
}

/// The events of a type, oldest first.
pub(crate) async fn events_of<T: TypedEvent>(jobs: &Jobs) -> Vec<Arc<Recorded>> {
    let log = jobs.bus().log().unwrap();
    let pattern = everbus::Pattern::new(T::TYPE).unwrap();
    let mut cursor = everbus::Cursor::START;
    let mut found = Vec::new();
    loop {
        let (records, next) = log
            .read(cursor.clone(), vec![pattern.clone()], 1000)
            .await
            .unwrap();
        if records.is_empty() && next == cursor {
            return found;
        }
        found.extend(records);
        cursor = next;
    }
}

/// Whether a group has settled all events so far.
pub(crate) async fn is_settled(bus: &Bus, group: &str) -> bool {
    let groups = bus.groups().await.unwrap();
    let group = groups.iter().find(|info| info.name.as_str() == group);
    group.is_some_and(|info| info.behind + info.in_flight + info.waiting + info.unhandled == 0)
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !holds().await {
        assert!(
            tokio::time::Instant::now() < deadline,
            "waited too long until {what}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
