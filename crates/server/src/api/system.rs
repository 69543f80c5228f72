//! Streams, the outbox and the audit trail over HTTP.

use axum::extract::State;
use everbus::audit::{Action, Operator, audited};
use everbus::{AuditPage, AuditQuery, Entity, Order, Pattern, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Answer;
use crate::auth::{Caller, Scope};
use crate::body::{Input, Params};
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

/// Waiting events are counted up to this limit, so that the response is quick.
const COUNTED: u64 = 100_000;

pub(super) fn routes() -> Vec<Route> {
    let (read, operate) = (Access::Scope(Scope::Read), Access::Scope(Scope::Operate));
    vec![
        Route::get("/v1/streams", read, streams)
            .summary("Which event types are in which stream, with its limits and how full it is")
            .returns::<StreamList>(200),
        Route::get("/v1/outbox", read, outbox)
            .all_tenants()
            .summary("The outbox of the store: how many rows wait, failed and were sent")
            .returns::<Value>(200),
        Route::post("/v1/outbox/retry", operate, retry_outbox)
            .all_tenants()
            .summary("Makes failed rows of the outbox wait again")
            .json::<OutboxRetry>()
            .returns::<OutboxRetried>(200),
        Route::get("/v1/audit", read, audit)
            .all_tenants()
            .summary("Who did what, newest first, page by page")
            .query::<AuditParams>()
            .returns::<Value>(200),
    ]
}

#[derive(Serialize, JsonSchema)]
struct StreamList {
    items: Vec<StreamInfo>,
}

/// A stream.
#[derive(Serialize, JsonSchema)]
struct StreamInfo {
    name: String,
    /// The patterns of its types.
    types: Vec<String>,
    /// How long events are kept, in seconds.
    max_age_s: Option<u64>,
    /// How many events may be pending.
    max_len: Option<u64>,
    /// How many events wait for the group that is furthest behind, up to 100,000. Only for tokens of all tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting: Option<u64>,
}

async fn streams(
    State(state): State<AppState>,
    caller: Caller,
) -> Result<Answer<StreamList>, Problem> {
    let bus = state.bus();
    let mut items = Vec::new();
    for stream in bus.streams() {
        let depth = bus.engine().depth.as_deref();
        let waiting = match depth.filter(|_| caller.tenant().is_none()) {
            Some(depth) => Some(depth.depth(stream.types().clone(), COUNTED).await?),
            None => None,
        };
        items.push(StreamInfo {
            name: stream.name.to_string(),
            types: stream
                .patterns()
                .iter()
                .map(|pattern: &Pattern| pattern.as_str().to_owned())
                .collect(),
            max_age_s: stream.max_age.map(|age| age.as_secs()),
            max_len: stream.limit.as_ref().map(|limit| limit.max_len),
            waiting,
        });
    }
    Ok(Answer(StreamList { items }))
}

async fn outbox(State(state): State<AppState>) -> Result<Answer<Value>, Problem> {
    let source = state.bus().engine().outbox()?;
    let status = source.status().await?;
    Ok(Answer(json!(status)))
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct OutboxRetry {
    /// The ids of rows or of their events; all failed rows unless given.
    ids: Option<Vec<String>>,
}

#[derive(Serialize, JsonSchema)]
struct OutboxRetried {
    retried: u64,
}

async fn retry_outbox(
    State(state): State<AppState>,
    Input(which): Input<OutboxRetry>,
) -> Result<Answer<OutboxRetried>, Problem> {
    let engine = state.bus().engine();
    let source = engine.outbox()?;
    let action = Action::new("outbox.retry").detail("ids", json!(which.ids));
    let work = source.retry(which.ids);
    let retried = audited(engine, &Operator::current(), action, work).await?;
    Ok(Answer(OutboxRetried { retried }))
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct AuditParams {
    /// Only by this actor.
    pub(crate) actor: Option<String>,
    /// Only this action. With a trailing `*`: all actions with this prefix.
    pub(crate) action: Option<String>,
    /// Only with this target, as TYPE:ID.
    pub(crate) entity: Option<String>,
    /// Only at or after this time.
    #[schemars(with = "Option<String>")]
    pub(crate) since: Option<Timestamp>,
    /// Only at or before this time.
    #[schemars(with = "Option<String>")]
    pub(crate) until: Option<Timestamp>,
    /// `newest` (the default) or `oldest` first.
    pub(crate) order: Option<String>,
    /// At most this many; 100 unless given, 1000 at most.
    pub(crate) limit: Option<usize>,
    /// Where to continue: `next` of the page before.
    pub(crate) after: Option<u64>,
}

impl AuditParams {
    pub(crate) fn query(self) -> Result<AuditQuery, Problem> {
        let entity = match self.entity.as_deref() {
            None => None,
            Some(text) => {
                let parts = text.split_once(':');
                let (kind, id) =
                    parts.ok_or_else(|| Problem::bad_request("an entity is written TYPE:ID"))?;
                Some(Entity {
                    kind: kind.to_owned(),
                    id: id.to_owned(),
                })
            }
        };
        let query = AuditQuery {
            actor: self.actor,
            action: self.action,
            entity,
            since: self.since,
            until: self.until,
            order: match self.order.as_deref() {
                None | Some("newest") => Order::Newest,
                Some("oldest") => Order::Oldest,
                Some(_) => return Err(Problem::bad_request("the order is newest or oldest")),
            },
            limit: self.limit.unwrap_or(100).min(1000),
            after: self.after,
        };
        query.validate()?;
        Ok(query)
    }
}

async fn audit(
    State(state): State<AppState>,
    Params(params): Params<AuditParams>,
) -> Result<Answer<AuditPage>, Problem> {
    let page = state.bus().audit().query(params.query()?).await?;
    Ok(Answer(page))
}
