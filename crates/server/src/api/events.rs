//! Reading events over HTTP: the history with filters and cursors, one event with its states and payload stages, and
//! the tree of causes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Path, State};
use everbus::{
    Bus, Code, Error, EventId, EventState, GroupInfo, GroupState, HistoryQuery, Order, Pattern,
    Recorded, Timestamp,
};
use everbus_core::UNMATCHED;
use everbus_core::payloads::EventKey;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Answer;
use super::publish::{event_id, no_event};
use super::shapes::{EventShape, GroupStateShape};
use crate::auth::{Caller, Scope};
use crate::body::Params;
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

/// The events of a causal tree are searched up to this time after its root.
const TREE_SPAN: Duration = Duration::from_secs(7 * 24 * 3600);
/// A tree has at most this many events.
const TREE_SIZE: usize = 500;
/// A search reads pages of this size.
const SEARCH_PAGE: usize = 1000;

pub(super) fn routes() -> Vec<Route> {
    let read = Access::Scope(Scope::Read);
    vec![
        Route::get("/v1/events", read, list)
            .summary("Events by tenant, app, entity, type and time, page by page")
            .query::<EventsQuery>()
            .returns::<EventsPage>(200),
        Route::get("/v1/events/{id}", read, show)
            .summary(
                "One event: its state in every group with each attempt, and its payload stages",
            )
            .query::<SourceQuery>()
            .returns::<EventPage>(200),
        Route::get("/v1/events/{id}/tree", read, tree)
            .summary("What caused the event, and what it caused")
            .query::<SourceQuery>()
            .returns::<Tree>(200),
    ]
}

/// Filters of the history. Eight combinations of tenant, app, entity and type have an index each.
#[derive(Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EventsQuery {
    /// Only of this tenant.
    pub(crate) tenant: Option<String>,
    /// Only of this app.
    pub(crate) app: Option<String>,
    /// Only about this entity, as TYPE:ID.
    pub(crate) entity: Option<String>,
    /// Only types that match: `orders.order.placed`, `orders.*`, `orders.>`.
    #[serde(rename = "type")]
    pub(crate) event_type: Option<String>,
    /// Only events received at or after this time.
    #[schemars(with = "Option<String>")]
    pub(crate) since: Option<Timestamp>,
    /// Only events received at or before this time.
    #[schemars(with = "Option<String>")]
    pub(crate) until: Option<Timestamp>,
    /// `newest` (the default) or `oldest` first.
    pub(crate) order: Option<String>,
    /// At most this many; 100 unless given, 1000 at most.
    pub(crate) limit: Option<usize>,
    /// Where to continue: `next` of the page before.
    pub(crate) cursor: Option<String>,
    /// Only events whose payload contains this text. There is no index for it: the search ends after two seconds. Then
    /// `stopped` is true, and `next` continues the search.
    pub(crate) contains: Option<String>,
    /// Only events with this correlation id, and the event whose own id it is. An engine without an index for it
    /// searches like `contains`.
    pub(crate) correlation_id: Option<String>,
    /// Only events caused by this event; searched like `contains`.
    pub(crate) causation_id: Option<String>,
}

/// A page of events.
#[derive(Serialize, JsonSchema)]
pub(crate) struct EventsPage {
    /// The events.
    #[schemars(with = "Vec<EventShape>")]
    pub(crate) items: Vec<Arc<Recorded>>,
    /// The cursor of the next page, if there may be one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next: Option<String>,
    /// The search reached its time limit before the end of the history. Continue with `next`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) stopped: bool,
    /// How the store found the events: with which indexes, or with a scan.
    pub(crate) plan: String,
}

impl EventsQuery {
    /// The query for the store, limited to the tenant of the caller. It has the correlation id only if the store has an
    /// index for it.
    fn history(&self, bus: &Bus, caller: &Caller) -> Result<HistoryQuery, Problem> {
        let mut query = HistoryQuery::default().limit(self.limit.unwrap_or(100));
        if query.limit == 0 || query.limit > 1000 {
            return Err(Problem::bad_request("the limit is between 1 and 1000"));
        }
        query.tenant = caller.tenant_filter(self.tenant.clone())?;
        query.app.clone_from(&self.app);
        if let Some(entity) = &self.entity {
            let parts = entity.split_once(':').or_else(|| entity.split_once('#'));
            let (kind, id) = parts.ok_or_else(|| {
                Problem::bad_request("an entity is written TYPE:ID, such as ORDER:123")
            })?;
            query = query.entity(kind, id);
        }
        if let Some(pattern) = &self.event_type {
            query = query.types(Pattern::new(&everbus::streams::canonical(pattern))?);
        }
        if bus.history()?.indexes_correlations() {
            query.correlation_id.clone_from(&self.correlation_id);
        }
        (query.since, query.until) = (self.since, self.until);
        query.order = match self.order.as_deref() {
            None | Some("newest") => Order::Newest,
            Some("oldest") => Order::Oldest,
            Some(_) => return Err(Problem::bad_request("the order is newest or oldest")),
        };
        if let Some(cursor) = self.cursor.as_deref().filter(|cursor| !cursor.is_empty()) {
            query = query.after(cursor.parse()?);
        }
        query.validate()?;
        Ok(query)
    }

    /// Whether there is a filter that the query for the store does not have.
    fn searches(&self, history: &HistoryQuery) -> bool {
        self.contains.is_some()
            || self.causation_id.is_some()
            || self.correlation_id != history.correlation_id
    }

    fn matches(&self, record: &Recorded) -> bool {
        let event = &record.event;
        let causation = event.attributes().and_then(|a| a.causation_id.as_deref());
        let correlates = |id: &String| event.correlation_id() == id.as_str();
        self.correlation_id.as_ref().is_none_or(correlates)
            && self
                .causation_id
                .as_ref()
                .is_none_or(|id| causation == Some(id.as_str()))
            && self
                .contains
                .as_ref()
                .is_none_or(|text| contains(event.payload(), text.as_bytes()))
    }
}

/// Whether the bytes contain the text. The case of ASCII letters is ignored.
fn contains(bytes: &[u8], text: &[u8]) -> bool {
    text.is_empty()
        || bytes
            .windows(text.len())
            .any(|window| window.eq_ignore_ascii_case(text))
}

/// One page of events. The dashboard uses it too.
pub(crate) async fn page(
    state: &AppState,
    caller: &Caller,
    query: &EventsQuery,
) -> Result<EventsPage, Problem> {
    let history = query.history(state.bus(), caller)?;
    match history.correlation_id {
        Some(_) => correlated(state, query, history).await,
        None => found(state, query, history).await,
    }
}

async fn found(
    state: &AppState,
    query: &EventsQuery,
    history: HistoryQuery,
) -> Result<EventsPage, Problem> {
    if query.searches(&history) {
        return search(state, query, history).await;
    }
    let page = state.bus().history()?.query(history).await?;
    Ok(EventsPage {
        items: page.items,
        next: page.next.map(|cursor| cursor.to_string()),
        stopped: false,
        plan: page.plan,
    })
}

/// A page of the events with one correlation id, from the index. The root event, whose own id is the correlation id, is
/// usually not in the index. It is added as the oldest event.
async fn correlated(
    state: &AppState,
    query: &EventsQuery,
    mut history: HistoryQuery,
) -> Result<EventsPage, Problem> {
    let limit = history.limit;
    let is_first = history.cursor.is_none() && history.order == Order::Oldest;
    if history.order == Order::Oldest && !is_first {
        return found(state, query, history).await;
    }
    let Some(root) = began(state.bus(), query, &history).await? else {
        return found(state, query, history).await;
    };
    if !is_first {
        let mut page = found(state, query, history.clone()).await?;
        match (&page.next, page.items.last()) {
            (Some(_), _) => {}
            // This page is full: the root event comes on a page of its own.
            (None, Some(last)) if page.items.len() == limit => {
                page.next = Some(history.cursor_after(last.position).to_string());
            }
            (None, _) => page.items.push(root),
        }
        return Ok(page);
    }
    let next = history.cursor_after(root.position).to_string();
    history.limit = limit - 1;
    if history.limit == 0 {
        return Ok(EventsPage {
            items: vec![root],
            next: Some(next),
            stopped: false,
            plan: "id".to_owned(),
        });
    }
    let mut page = found(state, query, history).await?;
    page.items.insert(0, root);
    Ok(page)
}

/// The root event, whose own id is the correlation id. `None` if it does not match the query, or is in the index.
async fn began(
    bus: &Bus,
    query: &EventsQuery,
    history: &HistoryQuery,
) -> Result<Option<Arc<Recorded>>, Problem> {
    let id = query.correlation_id.as_ref();
    let Some(Ok(id)) = id.map(|id| id.parse::<EventId>()) else {
        return Ok(None);
    };
    let others = HistoryQuery {
        correlation_id: None,
        ..history.clone()
    };
    let found = bus.lookup()?.find(id).await?;
    Ok(found.into_iter().find(|record| {
        let at = record.received_at;
        query.matches(record)
            && others.matches(&record.event)
            && history.since.is_none_or(|since| at >= since)
            && history.until.is_none_or(|until| at <= until)
            // A root event that was published with its own id as its correlation id is in the index.
            && !history.matches(&record.event)
    }))
}

/// Reads pages until enough events match, the history ends, or the time limit is reached.
async fn search(
    state: &AppState,
    query: &EventsQuery,
    mut history: HistoryQuery,
) -> Result<EventsPage, Problem> {
    let (began, wanted) = (Instant::now(), history.limit);
    let mut found = Vec::new();
    history.limit = SEARCH_PAGE;
    loop {
        let page = state.bus().history()?.query(history.clone()).await?;
        for record in &page.items {
            if query.matches(record) {
                found.push(record.clone());
            }
            if found.len() == wanted {
                let next = history.cursor_after(record.position);
                return Ok(EventsPage {
                    items: found,
                    next: Some(next.to_string()),
                    stopped: false,
                    plan: page.plan,
                });
            }
        }
        let over = began.elapsed() >= state.options().limits.search;
        match page.next {
            Some(next) if !over => history.cursor = Some(next),
            next => {
                return Ok(EventsPage {
                    items: found,
                    stopped: next.is_some(),
                    next: next.map(|cursor| cursor.to_string()),
                    plan: page.plan,
                });
            }
        }
    }
}

async fn list(
    State(state): State<AppState>,
    caller: Caller,
    Params(query): Params<EventsQuery>,
) -> Result<Answer<EventsPage>, Problem> {
    page(&state, &caller, &query).await.map(Answer)
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct SourceQuery {
    /// The source of an event whose id is not a UUID.
    source: Option<String>,
}

/// One event with its states and payload stages.
#[derive(Serialize, JsonSchema)]
pub(crate) struct EventPage {
    /// The event.
    #[schemars(with = "EventShape")]
    pub(crate) event: Arc<Recorded>,
    /// The error if the large part of the payload could not be loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) payload_error: Option<String>,
    /// Its state in every group that is subscribed to its type, with each failed attempt.
    #[schemars(with = "Vec<GroupStateShape>")]
    pub(crate) groups: Vec<Value>,
    /// The groups that are not subscribed to its type.
    pub(crate) not_subscribed: Vec<String>,
    /// The same states, for the dashboard.
    #[serde(skip)]
    pub(crate) states: Vec<(String, GroupState)>,
    /// The payload at each processing stage.
    #[schemars(with = "Vec<serde_json::Value>")]
    pub(crate) stages: Vec<Value>,
}

/// Finds an event that the caller may see.
pub(crate) async fn find(
    bus: &Bus,
    caller: &Caller,
    id: &str,
    source: Option<&str>,
) -> Result<Arc<Recorded>, Problem> {
    let found = bus.lookup()?.find(event_id(id, source)).await?;
    let mut seen = found.into_iter().filter(|r| caller.sees(r.event.tenant()));
    seen.next().ok_or_else(|| no_event(id))
}

/// One event with its states and stages. The dashboard uses it too.
pub(crate) async fn one(
    state: &AppState,
    caller: &Caller,
    id: &str,
    source: Option<&str>,
) -> Result<EventPage, Problem> {
    let bus = state.bus();
    let record = find(bus, caller, id, source).await?;
    let (event, payload_error) = match bus.whole(&record).await {
        Ok(whole) => (whole, None),
        Err(error) => (record.clone(), Some(error.to_string())),
    };
    // The cached figures: inspecting the groups counts their backlogs. Without them the states are shown as the engine
    // reports them.
    let known = state.live().figures().groups().await.unwrap_or_default();
    let (mut states, mut not_subscribed) = (Vec::new(), Vec::new());
    for state in bus.lookup()?.states(record.position).await? {
        let Some(name) = caller.group_beside_event(&state.group) else {
            continue;
        };
        match passed_by(&state, event.event.event_type(), &known) {
            true => not_subscribed.push(name),
            false => states.push((name, state)),
        }
    }
    let groups = states.iter().map(|(name, state)| {
        let mut value = serde_json::to_value(state).unwrap_or_default();
        value["group"] = json!(name);
        value
    });
    let groups = groups.collect();
    Ok(EventPage {
        stages: stages(bus, &record).await?,
        event,
        payload_error,
        groups,
        not_subscribed,
        states,
    })
}

/// Whether the group passed the event because none of its subscriptions matches the type. The engine counts such an
/// event as done, with or without a reason, but the group did not handle it.
fn passed_by(state: &GroupState, event_type: &str, known: &[GroupInfo]) -> bool {
    if state.state != EventState::Done || !state.failures.is_empty() || state.ended.is_some() {
        return false;
    }
    if let Some(reason) = &state.skipped {
        return reason == UNMATCHED;
    }
    let group = known.iter().find(|group| group.name == state.group);
    group.is_some_and(|group| {
        let mut subscriptions = group.subscriptions.iter();
        !subscriptions.any(|subscription| subscription.pattern.matches(event_type))
    })
}

/// The payload stages of an event; empty if the engine does not store them.
async fn stages(bus: &Bus, record: &Recorded) -> Result<Vec<Value>, Problem> {
    let stages = match bus.payloads().get(EventKey::of(&record.event)).await {
        Ok(stages) => stages,
        Err(error) if error.code() == Code::Unsupported => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let shown = stages.iter().map(|stage| {
        let mut value = serde_json::to_value(&stage.info).unwrap_or_default();
        match stage.bytes() {
            Ok(bytes) => match serde_json::from_slice::<Value>(&bytes) {
                Ok(content) => value["content"] = content,
                Err(_) => value["content"] = json!(String::from_utf8_lossy(&bytes)),
            },
            Err(error) => value["error"] = json!(error.to_string()),
        }
        value
    });
    Ok(shown.collect())
}

async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(query): Params<SourceQuery>,
) -> Result<Answer<EventPage>, Problem> {
    let page = one(&state, &caller, &id, query.source.as_deref()).await?;
    Ok(Answer(page))
}

/// The causes of an event, and the events that it caused.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Tree {
    /// The event that was asked for.
    pub(crate) id: String,
    /// The first cause, or the earliest cause that is still stored.
    pub(crate) root: String,
    /// Every event of the tree, oldest first. `causation_id` of each names its parent.
    #[schemars(with = "Vec<EventShape>")]
    pub(crate) items: Vec<Arc<Recorded>>,
    /// The search ended early: there may be more events.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) stopped: bool,
}

async fn tree(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(query): Params<SourceQuery>,
) -> Result<Answer<Tree>, Problem> {
    let tree = causal_tree(&state, &caller, &id, query.source.as_deref()).await?;
    Ok(Answer(tree))
}

/// Finds the causal tree: upwards by the causation ids, downwards by searching the events with the same correlation id.
pub(crate) async fn causal_tree(
    state: &AppState,
    caller: &Caller,
    id: &str,
    source: Option<&str>,
) -> Result<Tree, Problem> {
    let bus = state.bus();
    let asked = find(bus, caller, id, source).await?;
    let mut root = asked.clone();
    let mut above = vec![root.clone()];
    let mut seen: HashSet<EventId> = HashSet::from([root.event.id()]);
    while let Some(cause) = cause_of(&root) {
        let Ok(cause) = cause.parse::<EventId>() else {
            break;
        };
        let found = bus.lookup()?.find(cause).await?;
        let mut found = found.into_iter().filter(|r| caller.sees(r.event.tenant()));
        match found.next() {
            Some(found) if seen.insert(cause) && above.len() < TREE_SIZE => {
                root = found.clone();
                above.push(found);
            }
            _ => break,
        }
    }
    let below = descendants(state, caller, &root).await?;
    let mut all: BTreeMap<_, _> = above
        .into_iter()
        .chain(below.0)
        .map(|record| ((record.received_at, record.event.id().to_string()), record))
        .collect();
    let mut items: Vec<Arc<Recorded>> = Vec::with_capacity(all.len());
    while let Some((_, record)) = all.pop_first() {
        items.push(record);
    }
    Ok(Tree {
        id: asked.event.id().to_string(),
        root: root.event.id().to_string(),
        items,
        stopped: below.1,
    })
}

fn cause_of(record: &Recorded) -> Option<&str> {
    record.event.attributes()?.causation_id.as_deref()
}

/// The events that a root caused, directly or indirectly. They have its correlation id and come after it.
async fn descendants(
    state: &AppState,
    caller: &Caller,
    root: &Recorded,
) -> Result<(Vec<Arc<Recorded>>, bool), Problem> {
    let query = EventsQuery {
        correlation_id: Some(root.event.correlation_id().into_owned()),
        since: Some(root.received_at),
        until: Some(root.received_at.plus(TREE_SPAN)),
        order: Some("oldest".to_owned()),
        tenant: root.event.tenant().map(str::to_owned),
        ..EventsQuery::default()
    };
    let mut history = query.history(state.bus(), caller)?;
    history.limit = TREE_SIZE;
    let page = found(state, &query, history).await?;
    let stopped = page.stopped || page.items.len() == TREE_SIZE;
    let mut by_cause: HashMap<String, Vec<Arc<Recorded>>> = HashMap::new();
    for record in page.items {
        if let Some(cause) = cause_of(&record) {
            by_cause.entry(cause.to_owned()).or_default().push(record);
        }
    }
    let mut below = Vec::new();
    let mut open = vec![root.event.id().to_string()];
    while let Some(id) = open.pop() {
        for record in by_cause.remove(&id).unwrap_or_default() {
            open.push(record.event.id().to_string());
            below.push(record);
        }
    }
    Ok((below, stopped))
}

/// The error for a group that does not exist, or that belongs to another tenant.
pub(super) fn no_group(name: &str) -> Problem {
    Error::new(Code::GroupNotFound, format!("there is no group {name:?}"))
        .hint("GET /v1/groups lists them")
        .into()
}
