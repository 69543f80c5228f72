//! Server-sent events at `/v1/events/stream`, for clients that only listen. `Last-Event-ID` continues a stream.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt as _, stream};
use http::HeaderMap;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::auth::{Caller, Scope};
use crate::body::Params;
use crate::live::Place;
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;
use crate::ws::follow::{Follow, Followed};
use crate::ws::protocol;

/// How often a comment is sent, so that proxies do not close an idle stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How often the token of a client is checked.
const VALID_EVERY: Duration = Duration::from_secs(2);
/// How long clients are told to wait before they reconnect.
const RETRY: Duration = Duration::from_secs(1);

pub(crate) fn routes() -> Vec<Route> {
    vec![
        Route::get("/v1/events/stream", Access::Scope(Scope::Read), listen)
            .summary("Events as they are stored, as server-sent events")
            .query::<Wanted>()
            .answers("text/event-stream"),
    ]
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Wanted {
    /// Patterns of event types, separated by commas: `order.*,payment.failed`. Default: all but `system.` events.
    #[serde(default)]
    types: Option<String>,
    /// Only events of this tenant.
    #[serde(default)]
    tenant: Option<String>,
    /// `new` (the default), `first`, `last` or a time.
    #[serde(default)]
    from: Option<String>,
    /// Continue after this cursor. The header `Last-Event-ID` has the same effect and takes precedence.
    #[serde(default)]
    after: Option<String>,
}

async fn listen(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Params(wanted): Params<Wanted>,
) -> Result<Response, Problem> {
    let texts: Vec<String> = wanted
        .types
        .iter()
        .flat_map(|types| types.split(','))
        .map(|text| text.trim().to_owned())
        .filter(|text| !text.is_empty())
        .collect();
    let patterns = protocol::patterns(&texts)?;
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let after = last.map(str::to_owned).or(wanted.after);
    let begin = protocol::begin(after.as_deref(), wanted.from.as_deref())?;
    let tenant = caller.tenant_filter(wanted.tenant)?;
    let place = state.live().connect(state.options().websocket.connections);
    let place = place.ok_or_else(|| {
        Problem::new(
            http::StatusCode::SERVICE_UNAVAILABLE,
            "TooManyConnections",
            "there are too many listeners",
        )
        .retry_after(5)
    })?;
    let follow = state.live().hub().follow(patterns, tenant, begin).await?;
    let listening = Listening {
        follow,
        page: Vec::new().into_iter(),
        state,
        caller,
        valid: tokio::time::interval_at(tokio::time::Instant::now() + VALID_EVERY, VALID_EVERY),
        _place: place,
    };
    let hello = Event::default().retry(RETRY).comment("everbus");
    let events = stream::unfold(listening, |mut listening| async move {
        let event = listening.next().await?;
        Some((Ok::<_, Infallible>(event), listening))
    });
    let events = stream::once(std::future::ready(Ok(hello))).chain(events);
    let alive = KeepAlive::new().interval(KEEP_ALIVE);
    Ok(Sse::new(events).keep_alive(alive).into_response())
}

/// One client.
struct Listening {
    follow: Follow,
    page: std::vec::IntoIter<Followed>,
    state: AppState,
    caller: Caller,
    /// Ticks when the token has to be checked.
    valid: tokio::time::Interval,
    _place: Place,
}

impl Listening {
    /// The next event. `None` if the server stops, the token becomes invalid, or the engine fails.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(followed) = self.page.next() {
                return Some(sent(&followed));
            }
            tokio::select! {
                () = self.state.stopping() => return None,
                _ = self.valid.tick() => {
                    if !self.caller.is_valid(&self.state).await {
                        return None;
                    }
                }
                next = next_page(&mut self.follow) => self.page = next?,
            }
        }
    }
}

async fn next_page(follow: &mut Follow) -> Option<std::vec::IntoIter<Followed>> {
    // After an error of the engine the stream ends; the client reconnects and continues.
    follow.next().await.ok().map(Vec::into_iter)
}

fn sent(followed: &Followed) -> Event {
    let json = followed.event.json();
    // Server-sent events cannot contain a carriage return. In JSON it is only white space between values.
    let data = json.replace('\r', " ");
    Event::default().id(followed.cursor.to_string()).data(data)
}
