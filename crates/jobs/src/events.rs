//! The twelve event types of tasks and jobs, and the message that carries the work of a task.
//!
//! The payload of each event has the `properties` of the specification, with the same names. Optional fields without a
//! value are left out. The table keys of the specification (`PK`, `GSI1PK`, …) come from the *workflow* dialect.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use everbus::{Entity, TypedEvent};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::WORK;

/// JSON text that is kept unchanged: the digits of numbers and the order of keys stay as they are.
#[derive(Clone)]
pub struct Json(Arc<RawValue>);

impl Json {
    /// JSON `null`.
    pub fn null() -> Self {
        Self(Arc::from(RawValue::NULL.to_owned()))
    }

    /// An empty object.
    pub fn empty() -> Self {
        Self(Arc::from(
            RawValue::from_string("{}".into()).unwrap_or_default(),
        ))
    }

    /// The JSON of a value.
    pub fn of<T: Serialize + ?Sized>(value: &T) -> Result<Self, serde_json::Error> {
        Ok(Self(Arc::from(serde_json::value::to_raw_value(value)?)))
    }

    /// Parses a text. Fails if it is not JSON.
    pub fn parse(text: impl Into<String>) -> Result<Self, serde_json::Error> {
        Ok(Self(Arc::from(RawValue::from_string(text.into())?)))
    }

    /// The text.
    pub fn get(&self) -> &str {
        self.0.get()
    }

    /// Deserialises the JSON into a value.
    pub fn read<'a, T: Deserialize<'a>>(&'a self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.get())
    }
}

impl Default for Json {
    fn default() -> Self {
        Self::empty()
    }
}

impl PartialEq for Json {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.get())
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Box::<RawValue>::deserialize(deserializer).map(|raw| Self(Arc::from(raw)))
    }
}

/// The properties of an event of a task or a job.
pub trait Properties: TypedEvent + DeserializeOwned {
    /// The task or job that the event is about; `None` for the health check.
    fn entity(&self) -> Option<Entity>;

    /// The job that the event belongs to, if the event names one.
    fn job(&self) -> Option<&str>;
}

fn entity(kind: &str, id: &str) -> Option<Entity> {
    let (kind, id) = (kind.to_owned(), id.to_owned());
    Some(Entity { kind, id })
}

/// The entity type of tasks.
pub const TASK: &str = "TASK";
/// The entity type of jobs.
pub const JOB: &str = "JOB";

macro_rules! task_events {
    ($($name:ident = $type:literal,)*) => {
        $(
            impl TypedEvent for $name {
                const TYPE: &'static str = $type;
            }

            impl Properties for $name {
                fn entity(&self) -> Option<Entity> {
                    entity(TASK, &self.request_id)
                }

                fn job(&self) -> Option<&str> {
                    self.job_id.as_deref()
                }
            }
        )*
    };
}

task_events! {
    TaskPending = "Task Pending",
    TaskStarted = "Task Processing Started",
    TaskProcessingFailed = "Task Processing Failed",
    TaskCompleted = "Task Completed",
    TaskFailed = "Task Failed",
    TaskTimeout = "Task Timeout",
}

macro_rules! job_events {
    ($($name:ident = $type:literal,)*) => {
        $(
            impl TypedEvent for $name {
                const TYPE: &'static str = $type;
            }

            impl Properties for $name {
                fn entity(&self) -> Option<Entity> {
                    entity(JOB, &self.job_id)
                }

                fn job(&self) -> Option<&str> {
                    Some(&self.job_id)
                }
            }
        )*
    };
}

job_events! {
    JobCreated = "Job Created",
    JobTasksAdded = "Job Tasks Added",
    JobCompleted = "Job Completed",
    JobFailureDetected = "Job Failure Detected",
}

impl TypedEvent for TaskHeartbeat {
    const TYPE: &'static str = "Task Heartbeat";
}

impl Properties for TaskHeartbeat {
    fn entity(&self) -> Option<Entity> {
        entity(TASK, &self.request_id)
    }

    fn job(&self) -> Option<&str> {
        None
    }
}

impl TypedEvent for TaskHealthCheck {
    const TYPE: &'static str = "Task Health Check";
}

impl Properties for TaskHealthCheck {
    fn entity(&self) -> Option<Entity> {
        None
    }

    fn job(&self) -> Option<&str> {
        None
    }
}

/// All twelve types, and the type of the work.
pub const TYPES: [&str; 13] = [
    TaskPending::TYPE,
    TaskStarted::TYPE,
    TaskProcessingFailed::TYPE,
    TaskCompleted::TYPE,
    TaskFailed::TYPE,
    TaskTimeout::TYPE,
    TaskHeartbeat::TYPE,
    JobCreated::TYPE,
    JobTasksAdded::TYPE,
    JobCompleted::TYPE,
    JobFailureDetected::TYPE,
    TaskHealthCheck::TYPE,
    WORK,
];

/// The state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// Waits for a worker.
    Pending,
    /// A worker runs the task, or the task waits for its next attempt.
    Processing,
    /// Ended well.
    Completed,
    /// Ended with a failure, a timeout or a cancel.
    Failed,
}

impl TaskState {
    /// All states, in the order of a task's life.
    pub const ALL: [Self; 4] = [
        Self::Pending,
        Self::Processing,
        Self::Completed,
        Self::Failed,
    ];

    /// The name in events.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Processing => "processing",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }

    /// Whether the task has ended.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed)
    }
}

impl fmt::Display for TaskState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The kind of an error. The first four kinds are retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCategory {
    /// Something took too long.
    Timeout,
    /// A connection failed.
    Network,
    /// Another service refuses requests because there are too many.
    RateLimit,
    /// Another service failed.
    ServerError,
    /// The credentials are wrong.
    Auth,
    /// The input is wrong.
    Validation,
    /// The program is wrong.
    Programming,
    /// The task was cancelled.
    Cancelled,
}

impl ErrorCategory {
    /// The name in events.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Network => "network",
            Self::RateLimit => "rate-limit",
            Self::ServerError => "server-error",
            Self::Auth => "auth",
            Self::Validation => "validation",
            Self::Programming => "programming",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether another attempt may help.
    pub const fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::Timeout | Self::Network | Self::RateLimit | Self::ServerError
        )
    }
}

/// The part of the system that ended a task with a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailureSource {
    /// The worker, for an error that no retry can fix.
    Worker,
    /// The dead letter queue: no attempts were left.
    Dlq,
    /// The producer, which cancelled the task.
    Producer,
}

/// The signal that ended a child process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Signal {
    /// The child ended after SIGTERM.
    #[serde(rename = "SIGTERM")]
    Term,
    /// The child was killed.
    #[serde(rename = "SIGKILL")]
    Kill,
}

/// A task waits for a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskPending {
    /// The task.
    pub request_id: String,
    /// Its job, if it is part of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// The name of the work.
    pub name: String,
    /// The tasks that must complete first. `None` for a task without a job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depends_on: Option<Vec<String>>,
}

/// A worker began an attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskStarted {
    /// The task.
    pub request_id: String,
    /// Its job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// The task is locked until then, in seconds since 1970.
    pub effective_until: u64,
    /// The worker.
    pub worker_id: String,
    /// The process that does the work.
    pub process_id: u32,
}

/// An attempt failed with a retryable error. If no attempt is left, `Task Failed` follows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskProcessingFailed {
    /// The task.
    pub request_id: String,
    /// Its job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// The attempt that failed, from 1.
    pub attempt_number: u32,
    /// What went wrong.
    pub error: String,
    /// Its kind.
    pub error_category: ErrorCategory,
}

/// A task ended well.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskCompleted {
    /// The task.
    pub request_id: String,
    /// Its job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// The result, which the dependent tasks receive. `null` if the output is in the object store and was not loaded.
    #[serde(default = "Json::null")]
    pub output: Json,
    /// How long the attempt ran.
    pub duration_ms: u64,
    /// The exit code of the process.
    pub exit_code: i32,
    /// The tokens that a language model used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// The tokens that a language model used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Usage {
    /// Tokens read.
    pub input_tokens: u64,
    /// Tokens written.
    pub output_tokens: u64,
    /// Tokens read from a cache.
    pub cache_read_tokens: u64,
}

/// A task ended with a failure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskFailed {
    /// The task.
    pub request_id: String,
    /// Its job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// What went wrong.
    pub error: String,
    /// Its kind.
    pub error_category: ErrorCategory,
    /// How many attempts there were.
    pub retry_count: u32,
    /// The part of the system that ended the task.
    pub source: FailureSource,
}

/// The worker ended a child that ran too long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskTimeout {
    /// The task.
    pub request_id: String,
    /// Its job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// The limit.
    pub timeout_ms: u64,
    /// How long the child ran.
    pub elapsed_ms: u64,
    /// The signal that ended it.
    pub signal: Signal,
}

/// A worker extended its lease of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskHeartbeat {
    /// The task.
    pub request_id: String,
    /// The task is locked until then, in seconds since 1970.
    pub effective_until: u64,
    /// The number of this heartbeat in its attempt, from 1.
    pub heartbeat_number: u64,
    /// How long the attempt has run.
    pub elapsed_ms: u64,
    /// The worker.
    pub worker_id: String,
    /// The process that does the work.
    pub process_id: u32,
    /// The memory of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_usage: Option<MemoryUsage>,
    /// What the process last reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_activity: Option<LastActivity>,
}

/// The memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUsage {
    /// Resident memory in bytes.
    pub rss: u64,
}

/// What a process last reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LastActivity {
    /// `step_running`, `sdk_query` or `waiting`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_name: Option<String>,
    /// When, in seconds since 1970.
    pub timestamp: u64,
}

/// One task of a job, as its producer described it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskSpec {
    /// The task.
    pub task_id: String,
    /// The name of the work.
    pub name: String,
    /// The tasks that must complete first.
    #[serde(default)]
    pub depends_on: Vec<String>,
    /// Its own input, without the outputs of its parents.
    #[serde(default)]
    pub input: Json,
}

/// A job was submitted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobCreated {
    /// The job.
    pub job_id: String,
    /// The request that submitted it.
    pub request_id: String,
    /// Its tasks.
    pub tasks: Vec<TaskSpec>,
    /// How many there are.
    pub total_tasks: usize,
}

/// Tasks were added to a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobTasksAdded {
    /// The job.
    pub job_id: String,
    /// The tasks.
    pub new_tasks: Vec<TaskSpec>,
    /// How many tasks the job had before.
    pub previous_total_tasks: usize,
    /// How many tasks the job has now.
    pub total_tasks_now: usize,
}

/// The state of each task of a job; `None` for a task that has not begun.
pub type TaskStatuses = BTreeMap<String, Option<TaskState>>;

/// All tasks of a job have completed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobCompleted {
    /// The job.
    pub job_id: String,
    /// How many tasks it has.
    pub total_tasks: usize,
    /// The state of each task.
    pub task_statuses: TaskStatuses,
}

/// A task of a job failed. The other tasks of the job continue, and the job can be resumed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobFailureDetected {
    /// The job.
    pub job_id: String,
    /// The task that failed.
    pub failed_task_id: String,
    /// The state of each task.
    pub task_statuses: TaskStatuses,
}

/// The result of a health check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskHealthCheck {
    /// The counts.
    pub summary: HealthSummary,
    /// The tasks that are being processed.
    pub tasks: Vec<TaskHealth>,
}

/// How many tasks have each health. The last four fields sum to the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthSummary {
    /// All tasks that are being processed.
    pub total_processing: usize,
    /// Tasks with a recent event.
    pub healthy: usize,
    /// Tasks without an event for more than two heartbeat intervals.
    pub warning: usize,
    /// Tasks whose lock has expired.
    pub critical: usize,
    /// Tasks that run longer than the threshold.
    pub overtime: usize,
}

/// The health of a task that is being processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// The task had a recent event.
    Healthy,
    /// The task had no event for more than two heartbeat intervals.
    Warning,
    /// The lock of the task has expired.
    Critical,
    /// The task runs longer than the threshold.
    Overtime,
}

/// One task in a health check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskHealth {
    /// The task.
    pub request_id: String,
    /// Its health.
    pub health: Health,
    /// Milliseconds since it started.
    pub elapsed: u64,
    /// Milliseconds since its last event.
    pub time_since_last_event: u64,
    /// The type of that event.
    pub last_event_type: String,
    /// The worker that has it.
    pub worker_id: String,
}

/// The work of a task, as a worker receives it. This message does not change the state of the task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Work {
    /// The task.
    pub request_id: String,
    /// Its job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// The name of the work.
    pub name: String,
    /// The input of the task. A dependent task also gets the outputs of its parents, as `dependencyOutputs`.
    pub input: Json,
}

impl TypedEvent for Work {
    const TYPE: &'static str = WORK;
}

impl Properties for Work {
    fn entity(&self) -> Option<Entity> {
        None
    }

    fn job(&self) -> Option<&str> {
        self.job_id.as_deref()
    }
}
