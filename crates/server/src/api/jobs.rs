//! Jobs over HTTP: submit, list, show, add tasks, resume, cancel, and the graph of a job now or at a past time.

use axum::extract::{Path, State};
use everbus::Timestamp;
use everbus::audit::{Action, Operator, audited};
use everbus_jobs::events::{JOB, Json, TaskSpec, TaskState};
use everbus_jobs::{JobRow, JobState, JobStatus, Jobs, NewJob, SubmittedJob};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::shapes::{JobRowShape, JobStatusShape, SubmittedJobShape};
use super::tasks::{Whose, address, check_input, page_length};
use super::{Answer, Creation};
use crate::auth::{Caller, Scope};
use crate::body::{Input, Params};
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;
use crate::tasks::of_caller;

pub(super) fn routes() -> Vec<Route> {
    let (read, operate) = (Access::Scope(Scope::Read), Access::Scope(Scope::Operate));
    let publish = Access::Scope(Scope::Publish);
    vec![
        Route::post("/v1/jobs", publish, submit)
            .summary("Submits a job: a graph of tasks; the same job or request twice is one job")
            .query::<Whose>()
            .json::<JobRequest>()
            .returns::<SubmittedJobShape>(201)
            .again(200),
        Route::get("/v1/jobs", read, list)
            .summary("Jobs, the newest first, with the number of their tasks in each state")
            .query::<JobsQuery>()
            .returns::<JobsPage>(200),
        Route::get("/v1/jobs/{id}", read, show)
            .summary("One job with the state of each task")
            .query::<Whose>()
            .returns::<JobStatusShape>(200),
        Route::get("/v1/jobs/{id}/graph", read, graph)
            .summary("The graph of a job, now or at a past moment, and why each task waits")
            .query::<GraphQuery>()
            .returns::<JobGraph>(200),
        Route::post("/v1/jobs/{id}/tasks", publish, add)
            .summary("Adds tasks to a job, also to one that has completed")
            .query::<Whose>()
            .json::<AddRequest>()
            .returns::<Added>(200),
        Route::post("/v1/jobs/{id}/resume", operate, resume)
            .summary("Runs the failed tasks of a job again; those that depend on them follow")
            .query::<Whose>()
            .returns::<Resumed>(200),
        Route::post("/v1/jobs/{id}/cancel", operate, cancel)
            .summary("Cancels the tasks of a job that run, wait or could start")
            .query::<Whose>()
            .returns::<CancelledJob>(200),
    ]
}

/// A job to be submitted.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct JobRequest {
    /// The id of the job. Without it, the id is made from the request id, or is new.
    #[serde(default)]
    job_id: Option<String>,
    /// The id of the request. Submitting the same request twice makes one job.
    #[serde(default)]
    request_id: Option<String>,
    /// How many tasks there are; checked if given.
    #[serde(default)]
    total_tasks: Option<usize>,
    /// The tasks: 1 to 10,000.
    tasks: Vec<TaskOfJob>,
    /// Whether the ids of the tasks get the id of the job and a dot as a prefix.
    #[serde(default)]
    prefix_ids: bool,
}

/// A task of a job.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct TaskOfJob {
    /// Its id, unique among the tasks of the tenant.
    task_id: String,
    /// The name of the work.
    name: String,
    /// The tasks that must complete first.
    #[serde(default)]
    depends_on: Vec<String>,
    /// Its input. The outputs of the tasks before it are added as `dependencyOutputs`.
    #[serde(default)]
    #[schemars(with = "Value")]
    input: Json,
}

fn specs(tasks: Vec<TaskOfJob>) -> Result<Vec<TaskSpec>, Problem> {
    let specs = tasks.into_iter().map(|task| {
        check_input(
            &format!("the input of the task {:?}", task.task_id),
            &task.input,
        )?;
        Ok(TaskSpec {
            task_id: task.task_id,
            name: task.name,
            depends_on: task.depends_on,
            input: task.input,
        })
    });
    specs.collect()
}

async fn submit(
    State(state): State<AppState>,
    caller: Caller,
    Params(whose): Params<Whose>,
    Input(request): Input<JobRequest>,
) -> Result<Creation<SubmittedJob>, Problem> {
    let jobs = of_caller(&state, &caller, whose.tenant)?;
    let given = request.tasks.len();
    if let Some(total) = request.total_tasks.filter(|total| *total != given) {
        let what = format!("totalTasks is {total}, but there are {given} tasks");
        return Err(Problem::bad_request(what).hint("leave totalTasks out"));
    }
    let job = NewJob {
        job_id: request.job_id,
        request_id: request.request_id,
        tasks: specs(request.tasks)?,
        prefix_ids: request.prefix_ids,
    };
    let submitted = jobs.submit_job(job).await?;
    state.tasks().want();
    Ok(Creation {
        new: submitted.new,
        address: address(&jobs, &caller, "jobs", &submitted.job_id),
        answer: submitted,
    })
}

/// The state of a job, in a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum WantedJobs {
    Running,
    Completed,
    Failed,
}

impl From<WantedJobs> for JobState {
    fn from(state: WantedJobs) -> Self {
        match state {
            WantedJobs::Running => Self::Running,
            WantedJobs::Completed => Self::Completed,
            WantedJobs::Failed => Self::Failed,
        }
    }
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct JobsQuery {
    /// The tenant: `default` unless given.
    tenant: Option<String>,
    /// Only jobs in this state: `running`, `completed` or `failed`.
    #[schemars(with = "Option<String>")]
    state: Option<WantedJobs>,
    /// At most this many; 100 unless given, 1000 at most.
    limit: Option<usize>,
    /// Where to continue: `next` of the page before.
    cursor: Option<String>,
}

/// A job in a list.
#[derive(Serialize, JsonSchema)]
struct JobItem {
    /// The state, derived from the counts alone: a job with a failed task is `failed` here even if another task is
    /// about to start.
    #[schemars(with = "String")]
    state: JobState,
    #[serde(flatten)]
    #[schemars(with = "JobRowShape")]
    row: JobRow,
}

/// A page of jobs.
#[derive(Serialize, JsonSchema)]
struct JobsPage {
    /// The jobs.
    items: Vec<JobItem>,
    /// The cursor of the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

async fn list(
    State(state): State<AppState>,
    caller: Caller,
    Params(query): Params<JobsQuery>,
) -> Result<Answer<JobsPage>, Problem> {
    let jobs = of_caller(&state, &caller, query.tenant)?;
    let limit = page_length(query.limit)?;
    let cursor = query.cursor.as_deref().filter(|cursor| !cursor.is_empty());
    let page = jobs
        .jobs_page(query.state.map(JobState::from), cursor, limit)
        .await?;
    let items = page.items.into_iter().map(|row| JobItem {
        state: row.state(),
        row,
    });
    Ok(Answer(JobsPage {
        items: items.collect(),
        next: page.next,
    }))
}

async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(whose): Params<Whose>,
) -> Result<Answer<JobStatus>, Problem> {
    let jobs = of_caller(&state, &caller, whose.tenant)?;
    Ok(Answer(jobs.job(&id).await?))
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct GraphQuery {
    /// The tenant: `default` unless given.
    tenant: Option<String>,
    /// The graph as it was at this time.
    #[schemars(with = "Option<String>")]
    at: Option<Timestamp>,
}

/// The graph of a job.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct JobGraph {
    /// The job.
    job_id: String,
    /// The past time, if one was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    at: Option<Timestamp>,
    /// The tasks.
    nodes: Vec<Node>,
    /// The dependencies between the tasks.
    edges: Vec<Edge>,
}

/// A task of a graph.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct Node {
    /// The task.
    task_id: String,
    /// The name of the work.
    name: String,
    /// 0 for a task without dependencies, else one more than the highest layer of the tasks it depends on.
    layer: usize,
    /// `pending`, `processing`, `completed` or `failed`; null for a task that has not begun.
    #[schemars(with = "Option<String>")]
    state: Option<TaskState>,
    /// Why the task waits or failed, or which worker has it; left out once it has completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// A dependency between two tasks.
#[derive(Serialize, JsonSchema)]
struct Edge {
    /// The task that must complete first.
    from: String,
    /// The task that depends on it.
    to: String,
}

async fn graph(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(query): Params<GraphQuery>,
) -> Result<Answer<JobGraph>, Problem> {
    let jobs = of_caller(&state, &caller, query.tenant)?;
    let picture = jobs.job_graph(&id, query.at).await?;
    let statuses = match query.at {
        None => jobs.job_tasks(&id).await?,
        Some(_) => Vec::new(),
    };
    let graph = &picture.graph;
    let layers = graph.layers();
    let nodes = graph.tasks().iter().enumerate().map(|(number, task)| Node {
        task_id: task.task_id.clone(),
        name: task.name.clone(),
        layer: layers[number],
        state: picture.states[number],
        reason: picture.reason(number, statuses.get(number)),
    });
    let edges = (0..graph.len()).flat_map(|from| {
        let children = graph.children(from).iter();
        children.map(move |to| Edge {
            from: graph.task(from).task_id.clone(),
            to: graph.task(*to).task_id.clone(),
        })
    });
    Ok(Answer(JobGraph {
        job_id: id,
        at: query.at,
        nodes: nodes.collect(),
        edges: edges.collect(),
    }))
}

/// Tasks to be added to a job.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct AddRequest {
    /// The tasks. They may depend on each other and on tasks of the job.
    tasks: Vec<TaskOfJob>,
    /// Whether the ids of the new tasks get the id of the job and a dot as a prefix.
    #[serde(default)]
    prefix_ids: bool,
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct Added {
    /// The job.
    job_id: String,
    /// How many tasks were added.
    added: usize,
    /// How many tasks it has now.
    total_tasks_now: usize,
}

async fn add(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(whose): Params<Whose>,
    Input(request): Input<AddRequest>,
) -> Result<Answer<Added>, Problem> {
    let jobs = of_caller(&state, &caller, whose.tenant)?;
    let tasks = specs(request.tasks)?;
    let added = tasks.len();
    let action = action(&jobs, "jobs.add", &id).detail("tasks", json!(added));
    let work = jobs.add_tasks(&id, tasks, request.prefix_ids);
    let total_tasks_now = audited(state.bus().engine(), &Operator::current(), action, work).await?;
    state.tasks().want();
    Ok(Answer(Added {
        job_id: id,
        added,
        total_tasks_now,
    }))
}

fn action(jobs: &Jobs, name: &str, id: &str) -> Action {
    Action::new(name)
        .on(JOB, id)
        .detail("tenant", json!(jobs.tenant()))
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct Resumed {
    /// The job.
    job_id: String,
    /// The tasks that were started again.
    resumed: Vec<String>,
    /// Failed tasks that were not started, because a task they depend on has not completed. Resume the job again after
    /// that.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    waiting: Vec<String>,
}

async fn resume(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(whose): Params<Whose>,
) -> Result<Answer<Resumed>, Problem> {
    let jobs = of_caller(&state, &caller, whose.tenant)?;
    let (action, work) = (action(&jobs, "jobs.resume", &id), jobs.resume(&id));
    let resumed = audited(state.bus().engine(), &Operator::current(), action, work).await?;
    state.tasks().want();
    Ok(Answer(Resumed {
        job_id: id,
        resumed: resumed.started,
        waiting: resumed.waiting,
    }))
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct CancelledJob {
    /// The job.
    job_id: String,
    /// The tasks that were cancelled.
    cancelled: Vec<String>,
}

async fn cancel(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(whose): Params<Whose>,
) -> Result<Answer<CancelledJob>, Problem> {
    let jobs = of_caller(&state, &caller, whose.tenant)?;
    let (action, work) = (action(&jobs, "jobs.cancel", &id), jobs.cancel_job(&id));
    let cancelled = audited(state.bus().engine(), &Operator::current(), action, work).await?;
    Ok(Answer(CancelledJob {
        job_id: id,
        cancelled,
    }))
}
