//! Tasks over HTTP: submit, list by state, show, retry, cancel, and the health of running tasks.

use std::time::Duration;

use axum::extract::{Path, State};
use everbus::audit::{Action, Operator, audited};
use everbus::{Clock as _, SystemClock, Timestamp};
use everbus_jobs::events::{Json, TASK, TaskState};
use everbus_jobs::health::HealthReport;
use everbus_jobs::state::TaskStatus;
use everbus_jobs::{DEFAULT_TENANT, Jobs, NewTask};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::events::{self, EventsPage, EventsQuery};
use super::shapes::{HealthShape, SubmittedShape, TaskCounts, TaskShape};
use super::{Answer, Creation, percent_encoded};
use crate::auth::{Caller, Scope};
use crate::body::{Input, Params};
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;
use crate::tasks::of_caller;

pub(super) fn routes() -> Vec<Route> {
    let (read, operate) = (Access::Scope(Scope::Read), Access::Scope(Scope::Operate));
    vec![
        Route::post("/v1/tasks", Access::Scope(Scope::Publish), submit)
            .summary("Submits a task; the same request id twice is one task")
            .query::<Whose>()
            .json::<TaskRequest>()
            .returns::<SubmittedShape>(201)
            .again(200),
        Route::get("/v1/tasks", read, list)
            .summary("Tasks by state, the one whose state is newest first")
            .query::<TasksQuery>()
            .returns::<TasksPage>(200),
        Route::get("/v1/tasks/{id}", read, show)
            .summary("One task: its state, its run, its worker, its error")
            .query::<Whose>()
            .returns::<TaskShape>(200),
        Route::get("/v1/tasks/{id}/history", read, history)
            .summary("The events of a task, the oldest first")
            .query::<HistoryParams>()
            .returns::<EventsPage>(200),
        Route::post("/v1/tasks/{id}/retry", operate, retry)
            .summary("Runs a task again that has ended")
            .query::<Whose>()
            .json::<RetryRequest>()
            .returns::<Retried>(200),
        Route::post("/v1/tasks/{id}/cancel", operate, cancel)
            .summary("Cancels a task: its worker stops, and tasks that depend on it do not start")
            .query::<Whose>()
            .returns::<Cancelled>(200),
        Route::get("/v1/health/tasks", read, health)
            .summary("Which running tasks are healthy, late or overtime, and which wait for a worker for too long")
            .query::<HealthQuery>()
            .returns::<HealthShape>(200),
    ]
}

/// The tenant of the tasks and jobs of a request.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Whose {
    /// The tenant: `default` unless given. A token of a tenant can only use its own tenant.
    pub(super) tenant: Option<String>,
}

/// A task to be submitted.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct TaskRequest {
    /// The id of the request, which is the id of the task. Submitting the same id twice makes one task. A new id is
    /// made unless given.
    #[serde(default)]
    request_id: Option<String>,
    /// The name of the work.
    name: String,
    /// The input of the work.
    #[serde(default)]
    #[schemars(with = "Value")]
    input: Json,
    /// The task does not start before this time.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    at: Option<Timestamp>,
    /// The task does not start before this many milliseconds have passed.
    #[serde(default)]
    after_ms: Option<u64>,
    /// Whether a task that has ended runs again.
    #[serde(default)]
    again: bool,
}

/// Refuses JSON that readers cannot parse: nested too deeply, or with numbers out of range.
pub(super) fn check_input(what: &str, input: &Json) -> Result<(), Problem> {
    match input.read::<Value>() {
        Ok(_) => Ok(()),
        Err(error) => Err(Problem::bad_request(format!("{what}: {error}"))),
    }
}

/// The address of a task or job. A caller of all tenants has to name the tenant, unless it is the default one.
pub(super) fn address(jobs: &Jobs, caller: &Caller, kind: &str, id: &str) -> String {
    let path = format!("/v1/{kind}/{}", percent_encoded(id));
    match caller.tenant().is_some() || jobs.tenant() == DEFAULT_TENANT {
        true => path,
        false => format!("{path}?tenant={}", percent_encoded(jobs.tenant())),
    }
}

async fn submit(
    State(state): State<AppState>,
    caller: Caller,
    Params(whose): Params<Whose>,
    Input(request): Input<TaskRequest>,
) -> Result<Creation<everbus_jobs::Submitted>, Problem> {
    let jobs = of_caller(&state, &caller, whose.tenant)?;
    check_input("input", &request.input)?;
    let at = match (request.at, request.after_ms) {
        (Some(_), Some(_)) => return Err(Problem::bad_request("give at or afterMs, not both")),
        (None, Some(millis)) => Some(SystemClock.now().plus(Duration::from_millis(millis))),
        (at, None) => at,
    };
    let task = NewTask {
        request_id: request.request_id,
        name: request.name,
        input: request.input,
        at,
        again: request.again,
    };
    let submitted = jobs.submit(task).await?;
    state.tasks().want();
    Ok(Creation {
        new: submitted.new,
        address: address(&jobs, &caller, "tasks", &submitted.request_id),
        answer: submitted,
    })
}

/// The state of a task, in a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum WantedState {
    Pending,
    Processing,
    Completed,
    Failed,
}

impl From<WantedState> for TaskState {
    fn from(state: WantedState) -> Self {
        match state {
            WantedState::Pending => Self::Pending,
            WantedState::Processing => Self::Processing,
            WantedState::Completed => Self::Completed,
            WantedState::Failed => Self::Failed,
        }
    }
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct TasksQuery {
    /// The tenant: `default` unless given.
    tenant: Option<String>,
    /// Only tasks in this state.
    #[schemars(with = "Option<String>")]
    state: Option<WantedState>,
    /// At most this many; 100 unless given, 1000 at most.
    limit: Option<usize>,
    /// Where to continue: `next` of the page before.
    cursor: Option<String>,
    /// Whether to count the tasks in each state.
    counts: bool,
}

/// A page of tasks.
#[derive(Serialize, JsonSchema)]
struct TasksPage {
    /// The tasks.
    #[schemars(with = "Vec<TaskShape>")]
    items: Vec<TaskStatus>,
    /// The cursor of the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
    /// How many tasks are in each state, if the request asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    counts: Option<TaskCounts>,
}

/// The length of a page.
pub(super) fn page_length(limit: Option<usize>) -> Result<usize, Problem> {
    match limit.unwrap_or(100) {
        limit @ 1..=1000 => Ok(limit),
        _ => Err(Problem::bad_request("the limit is between 1 and 1000")),
    }
}

async fn list(
    State(state): State<AppState>,
    caller: Caller,
    Params(query): Params<TasksQuery>,
) -> Result<Answer<TasksPage>, Problem> {
    let jobs = of_caller(&state, &caller, query.tenant)?;
    let limit = page_length(query.limit)?;
    let wanted = query.state.map(TaskState::from);
    let cursor = query.cursor.as_deref().filter(|cursor| !cursor.is_empty());
    let page = jobs.tasks_page(wanted, cursor, limit).await?;
    let counts = match query.counts {
        true => Some(TaskCounts::of(&jobs.task_counts().await?)),
        false => None,
    };
    Ok(Answer(TasksPage {
        items: page.items,
        next: page.next,
        counts,
    }))
}

async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(whose): Params<Whose>,
) -> Result<Answer<TaskStatus>, Problem> {
    let jobs = of_caller(&state, &caller, whose.tenant)?;
    Ok(Answer(jobs.task_status(&id).await?))
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct HistoryParams {
    /// The tenant: `default` unless given.
    tenant: Option<String>,
    /// At most this many; 100 unless given, 1000 at most.
    limit: Option<usize>,
    /// Where to continue: `next` of the page before.
    cursor: Option<String>,
}

async fn history(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(params): Params<HistoryParams>,
) -> Result<Answer<EventsPage>, Problem> {
    let jobs = of_caller(&state, &caller, params.tenant)?;
    let query = EventsQuery {
        tenant: Some(jobs.tenant().to_owned()),
        entity: Some(format!("{TASK}:{id}")),
        order: Some("oldest".to_owned()),
        limit: params.limit,
        cursor: params.cursor,
        ..EventsQuery::default()
    };
    let page = events::page(&state, &caller, &query).await?;
    if page.items.is_empty() {
        // A task of a job that has not begun has no events. For an unknown task this returns `NotFound`.
        jobs.task_status(&id).await?;
    }
    Ok(Answer(page))
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct RetryRequest {
    /// Whether a completed task runs again too.
    completed: bool,
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct Retried {
    /// The task.
    request_id: String,
    /// Its new run.
    run: u32,
}

async fn retry(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(whose): Params<Whose>,
    Input(request): Input<RetryRequest>,
) -> Result<Answer<Retried>, Problem> {
    let jobs = of_caller(&state, &caller, whose.tenant)?;
    let action = Action::new("tasks.retry")
        .on(TASK, &id)
        .detail("tenant", json!(jobs.tenant()));
    let work = jobs.retry(&id, request.completed);
    let run = audited(state.bus().engine(), &Operator::current(), action, work).await?;
    state.tasks().want();
    Ok(Answer(Retried {
        request_id: id,
        run,
    }))
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct Cancelled {
    /// The task.
    request_id: String,
    /// Whether this request cancelled the task; false if it had ended before.
    cancelled: bool,
}

async fn cancel(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(whose): Params<Whose>,
) -> Result<Answer<Cancelled>, Problem> {
    let jobs = of_caller(&state, &caller, whose.tenant)?;
    let action = Action::new("tasks.cancel")
        .on(TASK, &id)
        .detail("tenant", json!(jobs.tenant()));
    let work = jobs.cancel_task(&id);
    let cancelled = audited(state.bus().engine(), &Operator::current(), action, work).await?;
    Ok(Answer(Cancelled {
        request_id: id,
        cancelled,
    }))
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct HealthQuery {
    /// The tenant: `default` unless given.
    tenant: Option<String>,
    /// A task that runs longer than this many milliseconds is overtime. Default: the setting of the server.
    overtime_ms: Option<u64>,
    /// The interval of heartbeats in milliseconds. Default: the setting of the server.
    heartbeat_ms: Option<u64>,
    /// A task that waits for a worker longer than this many milliseconds is reported. Default: the setting of the
    /// server.
    pending_ms: Option<u64>,
}

async fn health(
    State(state): State<AppState>,
    caller: Caller,
    Params(query): Params<HealthQuery>,
) -> Result<Answer<HealthReport>, Problem> {
    let jobs = of_caller(&state, &caller, query.tenant)?;
    let mut thresholds = state.options().task_health;
    for (given, threshold) in [
        (query.overtime_ms, &mut thresholds.overtime),
        (query.heartbeat_ms, &mut thresholds.heartbeat),
        (query.pending_ms, &mut thresholds.pending),
    ] {
        if let Some(millis) = given {
            // A threshold of more than a year makes no sense, and could leave the range of timestamps.
            if millis == 0 || millis > 366 * 86_400_000 {
                return Err(Problem::bad_request(
                    "a threshold is between a millisecond and a year",
                ));
            }
            *threshold = Duration::from_millis(millis);
        }
    }
    Ok(Answer(jobs.health(&thresholds).await?))
}
