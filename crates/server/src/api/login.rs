//! The session of the dashboard: a cookie in exchange for a token.

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, header};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Answer;
use crate::auth::{Caller, Scope, session};
use crate::body::SmallInput;
use crate::guard::Connection;
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

pub(super) fn routes() -> Vec<Route> {
    vec![
        Route::post("/v1/session", Access::Public, begin)
            .summary("Begins a session of the dashboard: a cookie in exchange for a token")
            .json::<Login>()
            .returns::<Session>(200),
        Route::delete("/v1/session", Access::Public, end)
            .summary("Ends the session of the dashboard")
            .returns::<Ended>(200),
        Route::get("/v1/session", Access::Scope(Scope::Read), show)
            .summary("Who the caller is")
            .returns::<Session>(200),
    ]
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Login {
    /// The token.
    token: String,
}

/// Who the caller is.
#[derive(Serialize, JsonSchema)]
struct Session {
    /// `session:NAME` or `token:NAME` with the name of the token; `http` on an open server.
    actor: String,
    /// The tenant of the token; left out for a token of all tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<String>,
    /// The scopes of the caller.
    scopes: Vec<Scope>,
}

impl Session {
    fn of(caller: &Caller) -> Self {
        let scopes = Scope::ALL.iter().copied().filter(|s| caller.may(*s));
        Self {
            actor: caller.actor(),
            tenant: caller.tenant().map(str::to_owned),
            scopes: scopes.collect(),
        }
    }
}

#[derive(Serialize, JsonSchema)]
struct Ended {
    ended: bool,
}

async fn begin(
    State(state): State<AppState>,
    connection: Option<Extension<Connection>>,
    SmallInput(login): SmallInput<Login>,
) -> Result<Response, Problem> {
    if let Some(Extension(connection)) = connection {
        state.rates().take(|| connection.peer.unnamed())?;
    }
    let cookie = session::begin(&state, login.token.trim()).await?;
    let token = state.tokens().find(login.token.trim()).await?;
    match (cookie, token) {
        (Some(cookie), Some(token)) => {
            let session = Session::of(&Caller::with(token, None, true));
            let mut response = Answer(session).into_response();
            response.headers_mut().insert(header::SET_COOKIE, cookie);
            Ok(response)
        }
        _ => Err(Problem::new(
            StatusCode::UNAUTHORIZED,
            "Unauthenticated",
            "the token is unknown, revoked or has expired",
        )),
    }
}

async fn end(State(state): State<AppState>, headers: HeaderMap) -> Result<Response, Problem> {
    let cookie = session::end(&state, &headers).await?;
    let mut response = Answer(Ended { ended: true }).into_response();
    response.headers_mut().insert(header::SET_COOKIE, cookie);
    Ok(response)
}

async fn show(caller: Caller) -> Answer<Session> {
    Answer(Session::of(&caller))
}
