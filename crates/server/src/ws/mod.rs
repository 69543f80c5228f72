//! The WebSocket at `/ws`: sends events as they are stored to many clients, within limits.

mod connection;
pub(crate) mod follow;
mod group;
mod outbox;
pub(crate) mod protocol;

use axum::extract::State;
use axum::extract::ws::{WebSocketUpgrade, rejection::WebSocketUpgradeRejection};
use axum::response::{IntoResponse, Response};
use http::StatusCode;

use crate::auth::{Caller, Scope};
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

/// The subprotocol of the server. A browser sends its token as a second one: `everbus.token.TOKEN`.
const PROTOCOL: &str = "everbus.v1";

pub(crate) fn routes() -> Vec<Route> {
    vec![Route::get("/ws", Access::Scope(Scope::Read), upgrade)]
}

async fn upgrade(
    State(state): State<AppState>,
    caller: Caller,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Response {
    let upgrade = match upgrade {
        Ok(upgrade) => upgrade,
        Err(rejection) => {
            return Problem::new(rejection.status(), "UpgradeRequired", rejection.body_text())
                .hint("connect with a WebSocket client, or listen at /v1/events/stream")
                .into_response();
        }
    };
    let limits = state.options().websocket.clone();
    let Some(place) = state.live().connect(limits.connections) else {
        return Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "TooManyConnections",
            format!(
                "there are {} WebSocket connections already",
                limits.connections
            ),
        )
        .retry_after(5)
        .into_response();
    };
    upgrade
        .protocols([PROTOCOL])
        .max_frame_size(limits.frame_bytes)
        .max_message_size(limits.frame_bytes)
        // Frames are written without a buffer, so that all waiting bytes are in the outbox and count against its limit.
        .write_buffer_size(0)
        .on_upgrade(move |socket| async move {
            connection::serve(socket, state, caller, limits).await;
            drop(place);
        })
}
