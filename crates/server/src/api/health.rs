//! Whether the server is alive, and whether it can take requests.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;

use super::Answer;
use crate::auth::Scope;
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

pub(super) fn routes() -> Vec<Route> {
    vec![
        Route::get("/healthz", Access::Public, alive)
            .summary("Whether the process is alive")
            .returns::<Alive>(200),
        Route::get("/readyz", Access::Public, ready)
            .summary("Whether events can be published now")
            .returns::<Alive>(200),
        Route::get("/v1/health", Access::Scope(Scope::Read), health)
            .summary("The engine, its durability, and what has stopped")
            .returns::<Health>(200),
    ]
}

#[derive(Serialize, JsonSchema)]
struct Alive {
    status: &'static str,
}

async fn alive() -> Answer<Alive> {
    Answer(Alive { status: "ok" })
}

async fn ready(State(state): State<AppState>) -> Response {
    if state.is_stopping() || state.bus().failure().is_some() {
        let what = "the server takes no more events";
        return Problem::new(StatusCode::SERVICE_UNAVAILABLE, "NotReady", what).into_response();
    }
    Answer(Alive { status: "ready" }).into_response()
}

/// The state of the server.
#[derive(Serialize, JsonSchema)]
struct Health {
    /// `ok`, or `failed` if the engine serves no more requests.
    status: &'static str,
    /// The version of the server.
    version: &'static str,
    /// The engine.
    engine: &'static str,
    /// The durability of an acknowledged event.
    #[schemars(with = "String")]
    durability: everbus::Durability,
    /// How long this server has been running, in seconds.
    uptime_seconds: u64,
    /// Why the engine failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
    /// Groups that have stopped in this process.
    stopped_groups: Vec<String>,
}

async fn health(State(state): State<AppState>, caller: crate::Caller) -> Answer<Health> {
    let bus = state.bus();
    let capabilities = bus.capabilities();
    let failure = bus.failure();
    let stopped = bus.stopped_groups();
    Answer(Health {
        status: if failure.is_some() { "failed" } else { "ok" },
        version: env!("CARGO_PKG_VERSION"),
        engine: capabilities.engine,
        durability: capabilities.durability,
        uptime_seconds: state.started().elapsed().as_secs(),
        failure: failure.map(|error| error.to_string()),
        stopped_groups: stopped
            .iter()
            .filter_map(|(group, _)| caller.group_shown(group))
            .collect(),
    })
}
