//! The worker: takes tasks from the bus and runs each in a child process, or with a function in this process.
//!
//! ```text
//!                    ┌ Task Processing Started ┐          ┌ exit code 0: Task Completed, with the ack
//!  task.work ─▶ start a child                  ├─▶ ended ─┤ another attempt: Task Processing Failed, with the retry
//!                    └ Task Heartbeat, …       ┘          └ no other attempt: Task Failed or Task Timeout, with the ack
//! ```
//!
//! - The lease of the work message is the lock of the task. Each extension of the lease is a heartbeat. A worker that
//!   loses the lease kills the child.
//! - The event that ends a task is appended in one step with the ack of its work message.
//! - A task whose attempts are used up becomes a dead letter, with `Task Failed` of the source `dlq`.

mod attempt;
mod cancel;
pub mod child;
pub mod classify;
mod dead;
mod ending;
mod task;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use everbus::core::Deduplication;
use everbus::{Code, Context, Error, Message, Result, RetryPolicy, StartFrom};
use serde::Serialize;

use crate::{Jobs, Origin, WORK, WORKERS};
use child::ChildCommand;
use classify::Classifier;
use task::TaskHandler;
pub use task::{Task, TaskError};

/// The group that turns dead letters of workers into `Task Failed`.
pub const DEAD_WORK: &str = "tasks.dead-work";

/// The time between two heartbeats, unless set.
pub const HEARTBEAT: Duration = Duration::from_secs(20);

/// The metadata key in a work message for the time limit of an attempt, in milliseconds. It applies if it is shorter
/// than the limit of the worker.
pub const TIMEOUT: &str = "timeout_ms";
/// The metadata key in a work message for the number of attempts. It applies if it is smaller than the number of the
/// worker.
pub const ATTEMPTS: &str = "max_attempts";

/// The length of a lease in heartbeats. By the specification an extension is two heartbeats, and the lock lasts one and
/// a half times the extension.
const HEARTBEATS_IN_LEASE: u32 = 3;

/// How long running tasks may continue after a shutdown has begun. Then they are stopped and given back.
const FINISH: Duration = Duration::from_secs(20);

/// How long a task with an unknown name is left to other workers.
const PATIENCE: Duration = Duration::from_secs(300);

/// The builder of a worker. [`mount`](Self::mount) subscribes it to the work messages of the bus.
///
/// ```
/// use everbus::Bus;
/// use everbus_jobs::{Jobs, Worker};
/// use serde_json::{Value, json};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let bus = Bus::open("memory:").await?;
/// Worker::new(Jobs::new(bus.clone())?)
///     .handler("greet", async |task: everbus_jobs::Task| {
///         let name: String = task.read::<Value>()?["name"].to_string();
///         Ok(json!({ "greeting": format!("hello {name}") }))
///     })
///     .mount()
///     .await?;
/// bus.start().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a worker takes tasks once it is mounted"]
pub struct Worker {
    jobs: Jobs,
    id: String,
    command: Option<Arc<ChildCommand>>,
    handlers: BTreeMap<String, TaskHandler>,
    any: Option<TaskHandler>,
    classifier: Classifier,
    concurrency: usize,
    heartbeat: Duration,
    timeout: Duration,
    finish: Duration,
    patience: Duration,
    retry: Option<RetryPolicy>,
}

impl Worker {
    /// A worker without anything to run.
    pub fn new(jobs: Jobs) -> Self {
        Self {
            jobs,
            id: default_id(),
            command: None,
            handlers: BTreeMap::new(),
            any: None,
            classifier: Classifier::default(),
            concurrency: std::thread::available_parallelism().map_or(2, usize::from),
            heartbeat: HEARTBEAT,
            timeout: child::ChildLimits::default().timeout,
            finish: FINISH,
            patience: PATIENCE,
            retry: None,
        }
    }

    /// The id of the worker in events (`worker-`, the host name and the process id).
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = id.into();
        self
    }

    /// Runs the tasks whose name has no handler as child processes with this command.
    pub fn command(mut self, command: ChildCommand) -> Self {
        self.command = Some(Arc::new(command));
        self
    }

    /// Runs tasks with this name with a function in this process.
    ///
    /// If the function never waits, the start and the end of the task are stored in one step with the ack: while the
    /// function computes, its task counts as pending.
    pub fn handler<F, R, T>(mut self, name: impl Into<String>, function: F) -> Self
    where
        F: Fn(Task) -> R + Send + Sync + 'static,
        R: Future<Output = std::result::Result<T, TaskError>> + Send + 'static,
        T: Serialize + 'static,
    {
        self.handlers.insert(name.into(), task::handler(function));
        self
    }

    /// Runs tasks with any other name with a function in this process.
    pub fn any<F, R, T>(mut self, function: F) -> Self
    where
        F: Fn(Task) -> R + Send + Sync + 'static,
        R: Future<Output = std::result::Result<T, TaskError>> + Send + 'static,
        T: Serialize + 'static,
    {
        self.any = Some(task::handler(function));
        self
    }

    /// Sets how failures are classified.
    pub fn classifier(mut self, classifier: Classifier) -> Self {
        self.classifier = classifier;
        self
    }

    /// How many tasks run at once (default: the number of processors).
    pub fn concurrency(mut self, tasks: usize) -> Self {
        self.concurrency = tasks;
        self
    }

    /// The interval of heartbeats (20 s). The lock of a task lasts three intervals.
    pub fn heartbeat(mut self, heartbeat: Duration) -> Self {
        self.heartbeat = heartbeat;
        self
    }

    /// How long a handler in this process may run (200,000 ms). A command has its own limits.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long running tasks may continue after the shutdown of the bus has begun (20 s). Then they are stopped and
    /// given back; no attempt is counted. The shutdown timeout of the bus must be longer than this time plus the grace
    /// period of child processes.
    pub fn finish_within(mut self, time: Duration) -> Self {
        self.finish = time;
        self
    }

    /// How long a task whose name has no handler here is left to other workers before it fails (5 minutes). No attempt
    /// is counted in this time.
    pub fn leave_unknown_for(mut self, time: Duration) -> Self {
        self.patience = time;
        self
    }

    /// How often and when failed tasks are retried. Default: the policy of the bus, which has four attempts unless set.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = Some(policy);
        self
    }

    /// Subscribes the worker. It runs tasks once the bus is started.
    pub async fn mount(self) -> Result<()> {
        if self.command.is_none() && self.any.is_none() && self.handlers.is_empty() {
            return Err(
                Error::new(Code::InvalidSetting, "a worker without anything to run")
                    .hint("give it a command or a handler"),
            );
        }
        if self.command.is_some() && self.any.is_some() {
            let what = "a worker with a command and a function for every name";
            return Err(Error::new(Code::InvalidSetting, what).hint(
                "leave one of them out: handlers for single names may stand beside a command",
            ));
        }
        if let Some(command) = &self.command {
            command.check()?;
        }
        if self.heartbeat < Duration::from_millis(100) {
            let what = format!("a heartbeat every {:?}", self.heartbeat);
            return Err(Error::new(Code::InvalidSetting, what).hint("at least every 100 ms"));
        }
        let bus = self.jobs.bus().clone();
        let lease = self.heartbeat * HEARTBEATS_IN_LEASE;
        let (concurrency, retry) = (self.concurrency, self.retry);
        dead::mount(&self.jobs).await?;
        let cancellations = cancel::Cancellations::watch(&self.jobs).await?;
        let runner = Arc::new(attempt::Runner {
            emitter: self.jobs.emitter(Origin::Worker).worker(&self.id),
            id: self.id,
            jobs: self.jobs,
            command: self.command,
            handlers: self.handlers,
            any: self.any,
            classifier: self.classifier,
            heartbeat: self.heartbeat,
            timeout: self.timeout,
            finish: self.finish,
            cancellations,
            patience: self.patience,
            unknown: parking_lot::Mutex::default(),
        });
        let mut subscription = bus
            .subscribe(WORK)
            .group(WORKERS)
            .name("worker")
            .start_from(StartFrom::First)
            .concurrency(concurrency)
            // No larger prefetch: another worker cannot take work that waits here.
            .prefetch(concurrency)
            .lease(lease)
            .timeout(lease);
        if let Some(policy) = retry {
            subscription = subscription.retry(policy);
        }
        if bus.capabilities().deduplication != Deduplication::WhileRetained {
            // The broker may store the work of a task twice.
            subscription = subscription.idempotent();
        }
        let run = move |message: Message, context: Context| {
            let runner = runner.clone();
            async move { runner.run(&message, &context).await }
        };
        subscription.handler(run).await?;
        Ok(())
    }
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker")
            .field("id", &self.id)
            .field("command", &self.command)
            .field("handlers", &self.handlers.keys())
            .field("concurrency", &self.concurrency)
            .field("heartbeat", &self.heartbeat)
            .finish_non_exhaustive()
    }
}

/// The default id. It has the process id too, because several workers may run on one host.
fn default_id() -> String {
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    let host: String = host.chars().take(100).collect();
    format!("worker-{host}-{}", std::process::id())
}
