//! Replays over HTTP: delivers past events again, to one group or as copies to all groups, with a preview and progress.
//!
//! A replay runs in the server and has a name. Its checkpoint is in the store. So after a restart of the server an
//! unfinished replay is still listed, and the same request continues it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use everbus::audit::Operator;
use everbus::replay::{ReplayProgress, ReplayRun};
use everbus::{Bus, Replay, ReplayPreview, ReplayReport, Timestamp};
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::Answer;
use super::publish::event_id;
use crate::auth::{Caller, Scope};
use crate::body::Input;
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

/// How long the response to a start waits for the replay to end or fail.
const FIRST_MOMENT: Duration = Duration::from_secs(1);
/// Finished replays stay in the list until there are this many. Then the next start removes them all.
const KEPT: usize = 100;

pub(super) fn routes() -> Vec<Route> {
    let (read, operate) = (Access::Scope(Scope::Read), Access::Scope(Scope::Operate));
    vec![
        Route::get("/v1/replays", read, list)
            .summary("Replays of this server and unfinished ones of the store, with their progress")
            .returns::<Replays>(200),
        Route::get("/v1/replays/{name}", read, show)
            .summary("One replay")
            .returns::<Shown>(200),
        Route::post("/v1/replays", operate, start)
            .summary("Starts or continues a replay; with dry_run only counts")
            .json::<ReplayRequest>()
            .returns::<Value>(200),
        Route::delete("/v1/replays/{name}", operate, stop)
            .summary("Stops a replay; its checkpoint stays, and the same request continues it")
            .returns::<Shown>(200),
    ]
}

/// The events to replay, and their target.
#[derive(Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct ReplayRequest {
    /// The name of the replay, for listing and continuing it. A new name is made unless given.
    name: Option<String>,
    /// The group that gets the events again. Without one, copies are published for every group.
    group: Option<String>,
    /// Only this event.
    id: Option<String>,
    /// Only events received at or after this time.
    #[schemars(with = "Option<String>")]
    since: Option<Timestamp>,
    /// Only events received at or before this time.
    #[schemars(with = "Option<String>")]
    until: Option<Timestamp>,
    /// Only types that match.
    #[serde(rename = "type")]
    event_type: Option<String>,
    /// Only of this stream.
    stream: Option<String>,
    /// Only of this tenant.
    tenant: Option<String>,
    /// Only of this app.
    app: Option<String>,
    /// At most this many events per second.
    rate: Option<f64>,
    /// Whether to return only a preview.
    dry_run: bool,
}

impl ReplayRequest {
    /// Whether the request names neither a group nor events, which is more likely a mistake than wanted.
    fn is_everything(&self) -> bool {
        let texts = [
            &self.group,
            &self.id,
            &self.event_type,
            &self.stream,
            &self.tenant,
            &self.app,
        ];
        let no_time = self.since.is_none() && self.until.is_none();
        no_time && !self.dry_run && texts.iter().all(|text| text.is_none())
    }

    fn replay(&self, bus: &Bus, caller: &Caller) -> Result<Replay, Problem> {
        let mut replay = bus.replay();
        if let Some(id) = &self.id {
            replay = replay.event(event_id(id, None));
        }
        if let Some(at) = self.since {
            replay = replay.since(at);
        }
        if let Some(at) = self.until {
            replay = replay.until(at);
        }
        if let Some(types) = &self.event_type {
            replay = replay.types(everbus::streams::canonical(types));
        }
        if let Some(stream) = &self.stream {
            replay = replay.stream(stream);
        }
        if let Some(tenant) = caller.tenant_filter(self.tenant.clone())? {
            replay = replay.tenant(tenant);
        }
        if let Some(app) = &self.app {
            replay = replay.app(app);
        }
        if let Some(rate) = self.rate {
            replay = replay.rate(rate);
        }
        Ok(replay)
    }
}

/// The replays that this server has started.
#[derive(Default)]
pub(crate) struct RunningReplays {
    all: Mutex<BTreeMap<String, Arc<Running>>>,
}

struct Running {
    tenant: Option<String>,
    progress: Mutex<Option<ReplayProgress>>,
    outcome: Mutex<Option<Result<ReplayReport, Problem>>>,
    stop: Notify,
    ended: Notify,
}

#[derive(Serialize, JsonSchema)]
struct Replays {
    items: Vec<Shown>,
}

/// A replay.
#[derive(Serialize, JsonSchema)]
struct Shown {
    /// Its name.
    name: String,
    /// `running`, `complete`, `stopped` or `failed`.
    state: &'static str,
    /// The progress.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Value>")]
    progress: Option<Value>,
    /// The result, once the replay has ended in this server.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Value>")]
    report: Option<ReplayReport>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Problem>,
}

impl Shown {
    fn running(name: &str, running: &Running) -> Self {
        let outcome = running.outcome.lock().clone();
        let (state, report, error) = match outcome {
            None => ("running", None, None),
            Some(Ok(report)) if report.is_complete() => ("complete", Some(report), None),
            Some(Ok(report)) => ("stopped", Some(report), None),
            Some(Err(problem)) => ("failed", None, Some(problem)),
        };
        let progress = running.progress.lock().as_ref().map(|told| json!(told));
        Self {
            name: name.to_owned(),
            state,
            progress,
            report,
            error,
        }
    }

    /// A replay that another process runs, or that no process runs.
    fn saved(run: &ReplayRun) -> Self {
        Self {
            name: run.name.clone(),
            state: if run.idle { "stopped" } else { "running" },
            progress: Some(json!(run)),
            report: None,
            error: None,
        }
    }
}

/// The name of a replay in the store. It has the tenant as a prefix, like the names of groups.
fn stored_name(caller: &Caller, name: &str) -> Result<String, Problem> {
    match caller.tenant() {
        Some(_) => Ok(caller.group(name)?.as_str().to_owned()),
        None => Ok(name.to_owned()),
    }
}

fn shown_name(caller: &Caller, stored: &str) -> Option<String> {
    match caller.tenant() {
        Some(_) => caller.group_shown(&stored.parse().ok()?),
        None => Some(stored.to_owned()),
    }
}

async fn known(state: &AppState, caller: &Caller) -> Result<Vec<Shown>, Problem> {
    let mut shown: BTreeMap<String, Shown> = BTreeMap::new();
    match state.bus().replays().await {
        Ok(runs) => {
            for run in &runs {
                if let Some(name) = shown_name(caller, &run.name) {
                    let saved = Shown::saved(run);
                    shown.insert(name.clone(), Shown { name, ..saved });
                }
            }
        }
        Err(error) if error.code() == everbus::Code::Unsupported => {}
        Err(error) => return Err(error.into()),
    }
    for (stored, running) in &*state.replays().all.lock() {
        let own = caller.tenant().is_none() || running.tenant.as_deref() == caller.tenant();
        if let Some(name) = shown_name(caller, stored).filter(|_| own) {
            shown.insert(name.clone(), Shown::running(&name, running));
        }
    }
    Ok(shown.into_values().collect())
}

async fn list(State(state): State<AppState>, caller: Caller) -> Result<Answer<Replays>, Problem> {
    let items = known(&state, &caller).await?;
    Ok(Answer(Replays { items }))
}

async fn find(state: &AppState, caller: &Caller, name: &str) -> Result<Shown, Problem> {
    let all = known(state, caller).await?;
    let found = all.into_iter().find(|replay| replay.name == name);
    found.ok_or_else(|| Problem::not_found(format!("there is no replay {name:?}")))
}

async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Answer<Shown>, Problem> {
    find(&state, &caller, &name).await.map(Answer)
}

async fn start(
    State(state): State<AppState>,
    caller: Caller,
    Input(request): Input<ReplayRequest>,
) -> Result<Answer<Value>, Problem> {
    let replay = request.replay(state.bus(), &caller)?;
    if request.is_everything() {
        let what = "this would publish a copy of every event for every group";
        let hint = "name a group, or choose events; \"since\": \"1970-01-01T00:00:00Z\" chooses all of them";
        return Err(Problem::bad_request(what).hint(hint));
    }
    let group = request
        .group
        .as_deref()
        .map(|name| caller.group(name))
        .transpose()?;
    if request.dry_run {
        let preview: ReplayPreview = match &group {
            Some(group) => replay.into_group(group.to_string()).preview().await?,
            None => replay.publish_copies().preview().await?,
        };
        let mut preview = json!(preview);
        keep_own_groups(&caller, &mut preview);
        return Ok(Answer(preview));
    }
    let name = match &request.name {
        Some(name) => name.clone(),
        None => format!("http-{}", everbus::EventId::new()),
    };
    let stored = stored_name(&caller, &name)?;
    let running = Arc::new(Running {
        tenant: caller.tenant().map(str::to_owned),
        progress: Mutex::default(),
        outcome: Mutex::default(),
        stop: Notify::new(),
        ended: Notify::new(),
    });
    begin(&state, &stored, &running)?;
    let (told, stopped) = (running.clone(), running.clone());
    let stopping = state.clone();
    let replay = replay
        .name(&stored)
        .progress(move |progress| *told.progress.lock() = Some(*progress))
        .stop_on(async move {
            tokio::select! {
                () = stopped.stop.notified() => {}
                () = stopping.stopping() => {}
            }
        });
    let done = running.clone();
    let work = async move {
        let report = match group {
            Some(group) => replay.into_group(group.to_string()).await,
            None => replay.publish_copies().await,
        };
        *done.outcome.lock() = Some(report.map_err(Problem::from));
        done.ended.notify_one();
    };
    // The replay continues when the client disconnects. The audit trail has the name of the caller.
    tokio::spawn(everbus::audit::with_operator(Operator::current(), work));
    // A wrong request fails at once, so the client gets the error.
    let _ = tokio::time::timeout(FIRST_MOMENT, running.ended.notified()).await;
    let failed = running.outcome.lock().clone().and_then(Result::err);
    if let Some(problem) = failed {
        state.replays().all.lock().remove(&stored);
        return Err(problem);
    }
    Ok(Answer(json!(Shown::running(&name, &running))))
}

/// Registers a replay. Refuses a name that is running in this server.
fn begin(state: &AppState, stored: &str, running: &Arc<Running>) -> Result<(), Problem> {
    let mut all = state.replays().all.lock();
    let is_running = |run: &Arc<Running>| run.outcome.lock().is_none();
    if all.get(stored).is_some_and(is_running) {
        let what = "a replay of this name is running";
        return Err(Problem::new(
            http::StatusCode::CONFLICT,
            "ReplayRunning",
            what,
        ));
    }
    let ended: Vec<String> = all
        .iter()
        .filter(|(_, run)| !is_running(run))
        .map(|(name, _)| name.clone())
        .collect();
    if ended.len() >= KEPT {
        for name in ended {
            all.remove(&name);
        }
    }
    all.insert(stored.to_owned(), running.clone());
    Ok(())
}

/// Removes the groups of other tenants from a preview.
fn keep_own_groups(caller: &Caller, preview: &mut Value) {
    let Some(groups) = preview.get_mut("groups").and_then(Value::as_array_mut) else {
        return;
    };
    groups.retain_mut(|group| {
        let stored = group["group"].as_str().and_then(|name| name.parse().ok());
        match stored.and_then(|stored| caller.group_beside_event(&stored)) {
            Some(name) => {
                group["group"] = json!(name);
                true
            }
            None => false,
        }
    });
}

async fn stop(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Answer<Shown>, Problem> {
    let stored = stored_name(&caller, &name)?;
    let running = state.replays().all.lock().get(&stored).cloned();
    if let Some(running) = running {
        running.stop.notify_one();
        return Ok(Answer(Shown::running(&name, &running)));
    }
    find(&state, &caller, &name).await.map(Answer)
}
