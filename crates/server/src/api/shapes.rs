//! The schemas of API responses, for the OpenAPI document. The responses themselves are values of the library.

use std::collections::BTreeMap;

use everbus_jobs::events::TaskState;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

/// An event in the log.
#[derive(Serialize, JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct EventShape {
    /// A UUID.
    id: String,
    /// Its position in the log: a number, or a text on an engine with several logs.
    seq: Value,
    /// `domain.entity.action`.
    #[serde(rename = "type")]
    event_type: String,
    /// The version of the payload.
    version: u32,
    /// When it happened.
    occurred_at: String,
    /// When it was stored.
    received_at: String,
    /// Who emitted it.
    source: Option<String>,
    /// The tenant.
    tenant: Option<String>,
    /// The app.
    app: Option<String>,
    /// The entity that the event is about.
    entity: Option<EntityShape>,
    /// Links all events that one request caused.
    correlation_id: String,
    /// The event that caused it.
    causation_id: Option<String>,
    /// Additional texts by key.
    metadata: Option<BTreeMap<String, String>>,
    /// The payload, if it is JSON.
    payload: Value,
}

/// The entity that an event is about.
#[derive(Serialize, JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct EntityShape {
    #[serde(rename = "type")]
    kind: String,
    id: String,
}

/// The state of an event in a group.
#[derive(Serialize, JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct GroupStateShape {
    group: String,
    /// `pending`, `processing`, `done` or `dlq`.
    state: String,
    attempts: u32,
    failures: Vec<FailureShape>,
    /// When the next attempt is due.
    due_at: Option<String>,
    /// Why the group skipped it.
    skipped: Option<String>,
}

/// A failed attempt.
#[derive(Serialize, JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct FailureShape {
    attempt: u32,
    at: String,
    /// `error`, `permanent`, `timeout`, `panic`, `crash`, `decode` and others.
    kind: String,
    handler: Option<String>,
    error: String,
    took_us: Option<u64>,
    worker: Option<String>,
}

/// A submitted task.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct SubmittedShape {
    /// The task.
    request_id: String,
    /// The run, from 1.
    run: u32,
    /// Whether this request started the run; false if the task existed already.
    new: bool,
    /// `pending`, `processing`, `completed` or `failed`.
    state: String,
}

/// A task.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct TaskShape {
    /// The task.
    request_id: String,
    /// Its job.
    job_id: Option<String>,
    /// The name of the work.
    name: String,
    /// `pending`, `processing`, `completed` or `failed`; null for a task of a job that has not begun.
    state: Option<String>,
    /// The run, from 1; 0 before the first event.
    run: u32,
    /// Whether the run was cancelled.
    cancelled: Option<bool>,
    /// When the state began.
    since: Option<String>,
    /// When the last attempt started.
    started_at: Option<String>,
    /// The type of the last event of this run.
    last_event_type: Option<String>,
    /// When the last event of this run was received.
    last_event_at: Option<String>,
    /// The task is locked until then, in seconds since 1970.
    effective_until: Option<u64>,
    /// The worker that runs the task, or ran it last.
    worker_id: Option<String>,
    /// The last error.
    error: Option<String>,
}

/// How many tasks are in each state.
#[derive(Serialize, JsonSchema)]
pub(crate) struct TaskCounts {
    pending: u64,
    processing: u64,
    completed: u64,
    failed: u64,
}

impl TaskCounts {
    pub(crate) fn of(counts: &[(TaskState, u64); 4]) -> Self {
        let of = |wanted: TaskState| {
            let found = counts.iter().find(|(state, _)| *state == wanted);
            found.map_or(0, |(_, count)| *count)
        };
        Self {
            pending: of(TaskState::Pending),
            processing: of(TaskState::Processing),
            completed: of(TaskState::Completed),
            failed: of(TaskState::Failed),
        }
    }
}

/// The health of the tasks of a tenant.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct HealthShape {
    /// The tenant.
    tenant: String,
    /// The counts by health. They sum to `totalProcessing`.
    summary: HealthSummaryShape,
    /// Each task that is being processed.
    tasks: Vec<TaskHealthShape>,
    /// The tasks that wait too long for a worker, the longest first.
    pending_too_long: Vec<WaitingShape>,
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[allow(dead_code, reason = "only its schema is used")]
struct HealthSummaryShape {
    total_processing: u64,
    healthy: u64,
    warning: u64,
    critical: u64,
    overtime: u64,
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[allow(dead_code, reason = "only its schema is used")]
struct TaskHealthShape {
    request_id: String,
    /// `healthy`, `warning`, `critical` or `overtime`.
    health: String,
    /// Milliseconds that it has run.
    elapsed: u64,
    /// Milliseconds since its last event.
    time_since_last_event: u64,
    last_event_type: String,
    worker_id: String,
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[allow(dead_code, reason = "only its schema is used")]
struct WaitingShape {
    request_id: String,
    job_id: Option<String>,
    name: String,
    /// Milliseconds that it has waited.
    waiting: u64,
}

/// A submitted job.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct SubmittedJobShape {
    job_id: String,
    request_id: String,
    /// How many tasks it has.
    total_tasks: usize,
    /// False if the same job was submitted before.
    new: bool,
}

/// A job with the number of its tasks in each state.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct JobRowShape {
    job_id: String,
    app: Option<String>,
    request_id: String,
    /// When it was submitted.
    created_at: String,
    total_tasks: usize,
    /// Why it was refused.
    refused: Option<String>,
    pending: usize,
    processing: usize,
    completed: usize,
    failed: usize,
}

/// A job with the state of each task.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct JobStatusShape {
    job_id: String,
    request_id: String,
    /// `running`, `completed`, `failed` or `refused`.
    state: String,
    /// When it was submitted.
    created_at: String,
    total_tasks: usize,
    /// The state of each task; null for one that has not begun.
    task_statuses: BTreeMap<String, Option<String>>,
    /// Why it was refused, if it was.
    refused: Option<String>,
}
