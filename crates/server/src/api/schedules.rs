//! Schedules over HTTP: list, declare, pause, resume, remove. Servers and `everbus schedule run` run the schedules.

use axum::extract::{Path, State};
use everbus::audit::{Action, Operator, audited};
use everbus::duty::{Duty, DutyState};
use everbus::{Clock as _, SystemClock, Timestamp};
use everbus_jobs::events::Json;
use everbus_jobs::schedule::{Action as Does, Missed, SCHEDULE, Schedules, StoredSchedule};
use http::{Method, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Answer;
use super::tasks::check_input;
use crate::auth::{Caller, Scope};
use crate::body::Input;
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

pub(super) fn routes() -> Vec<Route> {
    let (read, operate) = (Access::Scope(Scope::Read), Access::Scope(Scope::Operate));
    vec![
        Route::get("/v1/schedules", read, list)
            .summary("The schedules: when each runs next, and how its last run ended")
            .returns::<ScheduleList>(200),
        Route::get("/v1/schedules/{name}", read, show)
            .summary("One schedule")
            .returns::<Schedule>(200),
        Route::new(Method::PUT, "/v1/schedules/{name}", operate, put)
            .summary(
                "Adds a schedule, or replaces the one of this name; needs the scope publish too",
            )
            .json::<ScheduleRequest>()
            .returns::<Schedule>(200),
        Route::delete("/v1/schedules/{name}", operate, remove)
            .summary("Removes a schedule")
            .returns::<Schedule>(200),
        Route::post("/v1/schedules/{name}/pause", operate, pause)
            .summary("Pauses a schedule: it takes no ticks until it is resumed")
            .returns::<Schedule>(200),
        Route::post("/v1/schedules/{name}/resume", operate, resume)
            .summary("Resumes a paused schedule; ticks that were missed meanwhile are left out")
            .returns::<Schedule>(200),
    ]
}

/// A schedule to be declared.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ScheduleRequest {
    /// The cron expression: minute, hour, day of month, month, day of week.
    cron: String,
    /// The time zone of the expression; UTC unless given.
    #[serde(default)]
    timezone: Option<String>,
    /// What happens at each tick.
    action: ActionRequest,
    /// How long a run may take, in milliseconds. Default: a minute less than the interval, or 90 % of an interval under
    /// 10 minutes.
    #[serde(default)]
    timeout_ms: Option<u64>,
    /// What happens to ticks at which no scheduler ran.
    #[serde(default)]
    missed: MissedPolicy,
    /// The tenant of the tasks and events. A token of a tenant can only use its own tenant.
    #[serde(default)]
    tenant: Option<String>,
}

/// What a schedule does.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
enum ActionRequest {
    /// Submits a task, unless the task of an earlier tick has not ended.
    Task {
        /// The name of the work.
        name: String,
        /// Its input.
        #[serde(default)]
        #[schemars(with = "Value")]
        input: Json,
    },
    /// Publishes an event.
    Event {
        /// Its type.
        #[serde(rename = "type")]
        event_type: String,
        /// Its payload.
        #[serde(default = "Json::null")]
        #[schemars(with = "Value")]
        payload: Json,
    },
}

#[derive(Clone, Copy, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum MissedPolicy {
    /// Missed ticks are skipped.
    #[default]
    Skip,
    /// The newest missed tick runs.
    Once,
    /// All missed ticks run; at most the newest hundred.
    All,
}

/// A schedule.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Schedule {
    /// The stored schedule: `name`, `cron`, `timezone`, `action`, `paused` and other fields.
    #[schemars(with = "Value")]
    pub(crate) schedule: StoredSchedule,
    /// When it runs next; null while it is paused.
    #[schemars(with = "Option<String>")]
    pub(crate) next: Option<Timestamp>,
    /// The last run: its tick, process, end and error; null if it has not run.
    #[schemars(with = "Option<Value>")]
    pub(crate) last: Option<DutyState>,
}

#[derive(Serialize, JsonSchema)]
struct ScheduleList {
    items: Vec<Schedule>,
}

/// Whether the caller may see and change a schedule.
fn is_own(caller: &Caller, schedule: &StoredSchedule) -> bool {
    caller.sees(schedule.tenant.as_deref())
}

async fn shown(state: &AppState, schedule: StoredSchedule) -> Result<Schedule, Problem> {
    let name = format!("schedule/{}", schedule.name);
    let last = Duty::of(state.bus().engine(), name, "")?.state().await?;
    let next = match schedule.paused {
        true => None,
        false => schedule.times()?.next_after(SystemClock.now()),
    };
    Ok(Schedule {
        schedule,
        next,
        last,
    })
}

/// The schedules that the caller may see. The dashboard uses it too.
pub(crate) async fn all(state: &AppState, caller: &Caller) -> Result<Vec<Schedule>, Problem> {
    let stored = Schedules::of(state.bus())?.list().await?;
    let mut items = Vec::new();
    for schedule in stored.into_iter().filter(|s| is_own(caller, s)) {
        items.push(shown(state, schedule).await?);
    }
    Ok(items)
}

async fn list(
    State(state): State<AppState>,
    caller: Caller,
) -> Result<Answer<ScheduleList>, Problem> {
    let items = all(&state, &caller).await?;
    Ok(Answer(ScheduleList { items }))
}

async fn known(state: &AppState, caller: &Caller, name: &str) -> Result<StoredSchedule, Problem> {
    let found = Schedules::of(state.bus())?.get(name).await?;
    found
        .filter(|schedule| is_own(caller, schedule))
        .ok_or_else(|| {
            Problem::not_found(format!("there is no schedule {name:?}"))
                .hint("GET /v1/schedules lists them")
        })
}

async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Answer<Schedule>, Problem> {
    let schedule = known(&state, &caller, &name).await?;
    shown(&state, schedule).await.map(Answer)
}

async fn put(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
    Input(request): Input<ScheduleRequest>,
) -> Result<Answer<Schedule>, Problem> {
    // A schedule publishes on behalf of the caller, so the caller needs the scope.
    if !caller.may(Scope::Publish) {
        let what = "a schedule publishes, and the token does not have the scope publish";
        return Err(Problem::forbidden(what));
    }
    let tenant = caller.tenant_filter(request.tenant)?;
    if let Some(tenant) = &tenant {
        // A tenant name that is not allowed in events is refused here, not at each tick.
        state.jobs()?.of_tenant(tenant)?;
    }
    let action = match request.action {
        ActionRequest::Task { name, input } => {
            check_input("input", &input)?;
            if name.is_empty() {
                return Err(Problem::bad_request("the task has no name"));
            }
            Does::Task { name, input }
        }
        ActionRequest::Event {
            event_type,
            payload,
        } => {
            check_input("payload", &payload)?;
            Does::Event {
                event_type,
                payload,
            }
        }
    };
    let now = SystemClock.now();
    let schedule = StoredSchedule {
        name: name.clone(),
        cron: request.cron,
        timezone: request.timezone.unwrap_or_else(|| "UTC".to_owned()),
        action,
        timeout_ms: request.timeout_ms,
        missed: match request.missed {
            MissedPolicy::Skip => Missed::Skip,
            MissedPolicy::Once => Missed::Once,
            MissedPolicy::All => Missed::All,
        },
        paused: false,
        tenant,
        since: now,
    };
    schedule.check(now)?;
    let schedules = Schedules::of(state.bus())?;
    let taken = schedules.get(&name).await?;
    if taken.is_some_and(|taken| !is_own(&caller, &taken)) {
        let what = format!("the name {name:?} is taken");
        return Err(
            Problem::new(StatusCode::CONFLICT, "NameTaken", what).hint("choose another name")
        );
    }
    store(&state, "schedules.put", &schedule).await?;
    state.tasks().want();
    shown(&state, schedule).await.map(Answer)
}

async fn store(state: &AppState, action: &str, schedule: &StoredSchedule) -> Result<(), Problem> {
    let schedules = Schedules::of(state.bus())?;
    let action = Action::new(action).on(SCHEDULE, &schedule.name);
    let work = schedules.put(schedule);
    audited(state.bus().engine(), &Operator::current(), action, work).await?;
    Ok(())
}

async fn remove(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Answer<Schedule>, Problem> {
    let schedule = known(&state, &caller, &name).await?;
    let schedules = Schedules::of(state.bus())?;
    let action = Action::new("schedules.remove").on(SCHEDULE, &name);
    let work = schedules.remove(&name);
    audited(state.bus().engine(), &Operator::current(), action, work).await?;
    shown(&state, schedule).await.map(Answer)
}

async fn pause(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Answer<Schedule>, Problem> {
    let mut schedule = known(&state, &caller, &name).await?;
    schedule.paused = true;
    store(&state, "schedules.pause", &schedule).await?;
    shown(&state, schedule).await.map(Answer)
}

async fn resume(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Answer<Schedule>, Problem> {
    let mut schedule = known(&state, &caller, &name).await?;
    schedule.paused = false;
    schedule.since = SystemClock.now();
    store(&state, "schedules.resume", &schedule).await?;
    shown(&state, schedule).await.map(Answer)
}
