//! Groups over HTTP: list, show, delete, pause and resume.

use std::collections::BTreeMap;

use axum::extract::{Path, State};
use everbus::{Bus, GroupInfo, GroupName, PausedGroup};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Answer;
use super::events::no_group;
use crate::auth::{Caller, Scope};
use crate::body::Input;
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

pub(super) fn routes() -> Vec<Route> {
    let (read, operate) = (Access::Scope(Scope::Read), Access::Scope(Scope::Operate));
    vec![
        Route::get("/v1/groups", read, list)
            .summary("Every group: its lag, what is in flight, its dead letters, whether it is paused")
            .returns::<Groups>(200),
        Route::get("/v1/groups/{name}", read, show)
            .summary("One group")
            .returns::<Group>(200),
        Route::delete("/v1/groups/{name}", operate, remove)
            .summary("Deletes a group with its position, its pending events and its dead letters")
            .returns::<Removed>(200),
        Route::post("/v1/groups/{name}/pause", operate, pause)
            .summary("Pauses a group in every process: its handlers get no more events until it is resumed")
            .json::<Why>()
            .returns::<Group>(200),
        Route::post("/v1/groups/{name}/resume", operate, resume)
            .summary("Resumes a paused group")
            .returns::<Group>(200),
    ]
}

#[derive(Serialize, JsonSchema)]
struct Groups {
    items: Vec<Group>,
}

/// A group as the caller sees it.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Group {
    /// Its name.
    pub(crate) name: String,
    /// Who paused it, when and why; left out if it is not paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<PausedShape>")]
    pub(crate) paused: Option<PausedGroup>,
    /// The other fields.
    #[serde(flatten)]
    #[schemars(with = "GroupShape")]
    info: Value,
    /// The same information as `info`. It has the stored name, which other handlers need.
    #[serde(skip)]
    #[allow(dead_code, reason = "the pages of the dashboard read it")]
    pub(crate) group: GroupInfo,
}

/// The other fields of a group.
#[derive(Serialize, JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
struct GroupShape {
    /// The patterns of its subscriptions.
    patterns: Vec<String>,
    /// Matching events that were not delivered yet.
    behind: u64,
    /// Events delivered and not settled.
    in_flight: u64,
    /// Failed events that wait for their next attempt.
    waiting: u64,
    /// Events that wait because no process has a handler for them.
    unhandled: u64,
    /// Open dead letters.
    dead_letters: u64,
    /// When the oldest event that is not settled was received.
    oldest: Option<String>,
    /// How long the oldest event has been waiting, in milliseconds.
    behind_ms: u64,
}

/// Who paused a group, when and why.
#[derive(Serialize, JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
struct PausedShape {
    at: String,
    by: String,
    reason: Option<String>,
}

/// The groups that the caller may see.
pub(crate) async fn all(bus: &Bus, caller: &Caller) -> Result<Vec<Group>, Problem> {
    let groups = bus.groups().await?;
    let mut paused = paused(bus).await?;
    let shown = groups.into_iter().filter_map(|group| {
        let name = caller.group_shown(&group.name)?;
        let mut info = serde_json::to_value(&group).unwrap_or_default();
        if let Some(fields) = info.as_object_mut() {
            fields.remove("name");
            // Subscriptions contain the stored name of the group, which the caller must not see.
            for subscription in fields
                .get_mut("subscriptions")
                .and_then(Value::as_array_mut)
                .into_iter()
                .flatten()
            {
                subscription["group"] = json!(name);
            }
        }
        Some(Group {
            paused: paused.remove(&group.name),
            name,
            info,
            group,
        })
    });
    Ok(shown.collect())
}

async fn paused(bus: &Bus) -> Result<BTreeMap<GroupName, PausedGroup>, Problem> {
    match bus.paused_groups().await {
        Ok(paused) => Ok(paused),
        Err(error) if error.code() == everbus::Code::Unsupported => Ok(BTreeMap::new()),
        Err(error) => Err(error.into()),
    }
}

/// One group of the caller.
pub(crate) async fn one(bus: &Bus, caller: &Caller, name: &str) -> Result<Group, Problem> {
    let all = all(bus, caller).await?;
    let found = all.into_iter().find(|group| group.name == name);
    found.ok_or_else(|| no_group(name))
}

async fn list(State(state): State<AppState>, caller: Caller) -> Result<Answer<Groups>, Problem> {
    let items = all(state.bus(), &caller).await?;
    Ok(Answer(Groups { items }))
}

async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Answer<Group>, Problem> {
    one(state.bus(), &caller, &name).await.map(Answer)
}

#[derive(Serialize, JsonSchema)]
struct Removed {
    removed: String,
}

async fn remove(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Answer<Removed>, Problem> {
    let group = one(state.bus(), &caller, &name).await?.group.name;
    state.bus().remove_group(group).await?;
    Ok(Answer(Removed { removed: name }))
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct Why {
    /// The reason, shown with the paused group.
    reason: Option<String>,
}

async fn pause(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
    Input(why): Input<Why>,
) -> Result<Answer<Group>, Problem> {
    let group = one(state.bus(), &caller, &name).await?.group.name;
    state.bus().pause_group(group, why.reason).await?;
    one(state.bus(), &caller, &name).await.map(Answer)
}

async fn resume(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Answer<Group>, Problem> {
    let group = one(state.bus(), &caller, &name).await?.group.name;
    state.bus().resume_group(group).await?;
    one(state.bus(), &caller, &name).await.map(Answer)
}
