//! Workers: real child processes, good and bad ones, and functions in this process.

pub(crate) mod again;
mod bad_children;
mod child;
mod endings;
mod functions;
mod heartbeats;
mod stopping;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use everbus::{Bus, Recorded, RetryPolicy};
use everbus_jobs::events::{Json, TaskState};
use everbus_jobs::worker::child::{ChildCommand, ChildLimits};
use everbus_jobs::{Jobs, NewTask, Worker};
use serde_json::Value;

/// Long enough for a loaded machine; a test that waits for so long has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// A bus with a directory for the children to leave their process ids in.
pub(crate) struct Stage {
    pub(crate) bus: Bus,
    pub(crate) jobs: Jobs,
    pub(crate) dir: Arc<tempfile::TempDir>,
}

impl Stage {
    pub(crate) async fn new() -> Self {
        let bus = Bus::builder().open("memory:").await.unwrap();
        Self::on(bus, Arc::new(tempfile::tempdir().unwrap()))
    }

    pub(crate) fn on(bus: Bus, dir: Arc<tempfile::TempDir>) -> Self {
        let jobs = Jobs::new(bus.clone()).unwrap();
        Self { bus, jobs, dir }
    }

    /// The command that runs the script of the test's children.
    pub(crate) fn command(&self, limits: ChildLimits) -> ChildCommand {
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/worker/children.sh");
        ChildCommand::new("sh")
            .args([script])
            .env("PIDS", self.dir.path().to_str().unwrap())
            .limits(limits)
    }

    pub(crate) fn worker(&self, limits: ChildLimits) -> Worker {
        let retry = RetryPolicy::default()
            .max_retries(1)
            .base_delay(Duration::from_millis(1));
        Worker::new(self.jobs.clone())
            .id("worker-i-001")
            .command(self.command(limits))
            .retry(retry)
            .concurrency(4)
    }

    pub(crate) async fn start(&self, worker: Worker) {
        worker.mount().await.unwrap();
        self.bus.start().await.unwrap();
    }

    pub(crate) async fn submit(&self, name: &str, input: &str) -> String {
        let task = NewTask::new(name, Json::parse(input).unwrap()).id(format!("req-{name}"));
        self.jobs.submit(task).await.unwrap().request_id
    }

    /// Waits until the task has ended, and returns its events.
    pub(crate) async fn ended(&self, id: &str) -> Vec<Past> {
        self.until(&format!("{id} ends"), async || {
            let task = self.jobs.task(id).await.unwrap();
            task.is_some_and(|task| task.state.is_some_and(TaskState::is_terminal))
        })
        .await;
        self.history(id).await
    }

    pub(crate) async fn history(&self, id: &str) -> Vec<Past> {
        let history = self.jobs.task_history(id).await.unwrap();
        history.iter().map(Past::of).collect()
    }

    pub(crate) async fn state(&self, id: &str) -> TaskState {
        self.jobs.task(id).await.unwrap().unwrap().state.unwrap()
    }

    /// Runs one task to its end.
    pub(crate) async fn run(&self, name: &str, input: &str) -> Vec<Past> {
        let id = self.submit(name, input).await;
        self.ended(&id).await
    }

    pub(crate) async fn until(&self, what: &str, condition: impl AsyncFn() -> bool) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while !condition().await {
            assert!(
                tokio::time::Instant::now() < deadline,
                "waited too long: {what}"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The process id that a child left.
    pub(crate) async fn pid(&self, id: &str) -> u32 {
        let path = self.dir.path().join(id);
        let read = || {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            text.trim().parse::<u32>().ok()
        };
        self.until("the child has left its id", async || read().is_some())
            .await;
        read().unwrap()
    }

    /// Waits until a process is gone.
    pub(crate) async fn gone(&self, pid: u32) {
        self.until(&format!("process {pid} is gone"), async || !is_running(pid))
            .await;
    }

    pub(crate) fn go(&self) {
        std::fs::write(self.dir.path().join("go"), "").unwrap();
    }

    pub(crate) async fn dead_letters(&self) -> usize {
        self.bus.dead_letters().list().await.unwrap().len()
    }
}

/// An event of the past.
#[derive(Clone, Debug)]
pub(crate) struct Past {
    pub(crate) event_type: String,
    pub(crate) properties: Value,
    /// What the worker added about the child.
    pub(crate) details: Value,
    pub(crate) context: Value,
}

impl Past {
    fn of(record: &Arc<Recorded>) -> Self {
        let event = &record.event;
        let meta = |key: &str| {
            let text = event.metadata().get(key).cloned().unwrap_or_default();
            serde_json::from_str(&text).unwrap_or(Value::Null)
        };
        Self {
            event_type: event.event_type().to_owned(),
            properties: event.json().unwrap(),
            details: meta("worker"),
            context: meta("context"),
        }
    }
}

pub(crate) fn types(events: &[Past]) -> Vec<&str> {
    events.iter().map(|past| past.event_type.as_str()).collect()
}

/// Whether a process runs: a zombie does not.
pub(crate) fn is_running(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.is_some_and(|state| !state.trim().starts_with('Z'))
}
