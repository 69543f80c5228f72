//! Consumers over HTTP: a client fetches events under leases, settles each, and extends a lease while it works.
//!
//! A lease is an opaque text that the server signs: a client can neither forge one nor use it for another group.
//! PostgreSQL keeps leases in the database, so that any server can settle them. The other engines keep leases in the
//! process that fetched: a client must settle at the server that it fetched from.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::extract::{Path, State};
use data_encoding::BASE64URL_NOPAD;
use everbus::config::Delivery as ConfiguredDelivery;
use everbus::{
    Bus, Clock as _, Code, Error, EventId, Failure, FailureKind, GroupName, Pattern, Recorded,
    RetryPolicy, StartFrom, SystemClock,
};
use everbus_core::{
    ConsumeOptions, Delivery, GroupSpec, Lease, Settlement, SubscriptionSpec, Verdict,
};
use ring::hmac;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::Answer;
use super::events::no_group;
use super::shapes::EventShape;
use crate::auth::{Caller, Scope, TOKENS_BUCKET, check_new_group, tenant_of_group};
use crate::body::Input;
use crate::consumers::{OTHER_TENANT, group_of};
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

/// The length of a lease, unless the client or the configuration file sets another.
const LEASE: Duration = Duration::from_secs(30);
const LONGEST_LEASE: Duration = Duration::from_secs(12 * 3600);
/// The longest wait of a long poll.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
const MOST_EVENTS: usize = 1000;
/// The name of the handler in recorded failures.
const HANDLER: &str = "pull";
const KEY: &str = "lease-key";

pub(super) fn routes() -> Vec<Route> {
    let consume = Access::Scope(Scope::Consume);
    vec![
        Route::post("/v1/groups/{name}/fetch", consume, fetch)
            .summary("Fetches events of a group under leases; waits for the first one")
            .json::<FetchRequest>()
            .returns::<Fetched>(200),
        Route::post("/v1/groups/{name}/settle", consume, settle)
            .summary("Settles fetched events: ack, retry, dead, skip or release")
            .json::<SettleRequest>()
            .returns::<Settled>(200),
        Route::post("/v1/groups/{name}/extend", consume, extend)
            .summary("Extends leases while the client works")
            .json::<ExtendRequest>()
            .returns::<Settled>(200),
    ]
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct FetchRequest {
    /// The patterns of the events that the group gets. Creates the group, or adds the patterns to its subscriptions.
    pub(crate) patterns: Vec<String>,
    /// Where a new group begins: `new` (the default) or `first`.
    pub(crate) start_from: Option<String>,
    /// For a new group: whether events with the same key are delivered one after another.
    pub(crate) ordered: bool,
    /// At most this many events; 1 unless given.
    pub(crate) max: Option<usize>,
    /// How long to wait for the first event, in milliseconds; 0 unless given, 60000 at most.
    pub(crate) wait_ms: u64,
    /// How long the client holds the events, in milliseconds; 30000 unless given or configured. Then they go to another
    /// client.
    pub(crate) lease_ms: Option<u64>,
}

#[derive(Serialize, JsonSchema)]
struct Fetched {
    /// The events, oldest first. Empty if no event came in time.
    items: Vec<Item>,
}

/// An event under a lease.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Item {
    /// The lease: needed to settle the event.
    pub(crate) lease: String,
    /// The number of the attempt, from 1.
    pub(crate) attempt: u32,
    /// The event.
    #[schemars(with = "EventShape")]
    pub(crate) event: Arc<Recorded>,
}

/// The content of a lease. The server signs it.
#[derive(Serialize, Deserialize)]
struct Ticket {
    group: String,
    position: String,
    words: [u64; 2],
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    attempt: u32,
    /// The process that fetched the event.
    server: String,
}

async fn fetch(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
    Input(request): Input<FetchRequest>,
) -> Result<Answer<Fetched>, Problem> {
    let items = fetch_for(&state, &caller, &name, &request).await?;
    Ok(Answer(Fetched { items }))
}

/// Fetches events of a group for a caller. The WebSocket uses it too.
pub(crate) async fn fetch_for(
    state: &AppState,
    caller: &Caller,
    name: &str,
    request: &FetchRequest,
) -> Result<Vec<Item>, Problem> {
    let bus = state.bus();
    let group = caller.group(name)?;
    let handled = if request.patterns.is_empty() {
        patterns_of(state, &group)
            .await?
            .ok_or_else(|| no_group(name))?
    } else {
        check_new_group(caller, name)?;
        declare(bus, &group, request).await?
    };
    // The key is read before events are taken: after an error here, events would stay under leases that no client has.
    let key = signing_key(bus).await?;
    let options = Fetch {
        handled,
        max: request.max.unwrap_or(1).clamp(1, MOST_EVENTS),
        wait: Duration::from_millis(request.wait_ms).min(LONGEST_WAIT),
        lease: lease(state, &group, request.lease_ms)?,
        policy: policy(state, &group),
        tenant: tenant_of_group(&group),
    };
    let deliveries = tokio::select! {
        fetched = take(bus, &group, &options) => fetched?,
        // The server stops: the client gets no events, and asks another server.
        () = state.stopping() => Vec::new(),
    };
    let mut items = Vec::with_capacity(deliveries.len());
    let mut refused = Vec::new();
    for delivery in deliveries {
        match bus.whole(&delivery.record).await {
            Ok(event) => items.push(Item {
                lease: ticket(&key, &group, &delivery),
                attempt: delivery.attempt,
                event,
            }),
            // An event whose large part cannot be loaded fails alone. The other events are delivered.
            Err(error) => {
                let why = error.to_string();
                let verdict = after_failure(&options.policy, delivery.attempt, None, why);
                refused.push(Settlement::new(delivery.lease, verdict));
            }
        }
    }
    if !refused.is_empty() {
        // If this fails, the events are delivered again when their leases expire.
        let _ = bus.engine().broker.settle(refused).await;
    }
    Ok(items)
}

/// The patterns of an existing group; `None` if there is no such group. Inspecting all groups counts their backlogs,
/// which is slow, so the cached figures are used first.
async fn patterns_of(state: &AppState, group: &GroupName) -> Result<Option<Vec<Pattern>>, Error> {
    let of = |groups: &[everbus::GroupInfo]| {
        let known = groups.iter().find(|known| known.name == *group)?;
        let patterns = known.subscriptions.iter().map(|s| s.pattern.clone());
        Some(patterns.collect())
    };
    match of(&state.live().figures().groups().await?) {
        Some(patterns) => Ok(Some(patterns)),
        // The group may be newer than the cached figures.
        None => Ok(of(&state.bus().engine().broker.inspect().await?)),
    }
}

struct Fetch {
    handled: Vec<Pattern>,
    max: usize,
    wait: Duration,
    lease: Duration,
    policy: RetryPolicy,
    tenant: Option<String>,
}

/// Takes deliveries for a client. Skips events of other tenants, and dead-letters events without attempts left: the
/// client gets neither.
async fn take(bus: &Bus, group: &GroupName, options: &Fetch) -> Result<Vec<Delivery>, Error> {
    // A consumer needs a moment to claim events, even if events are there. Events of other tenants do not extend the
    // wait.
    let until = Instant::now() + options.wait.max(FIRST_LOOK);
    while is_paused(bus, group).await {
        // A group that is resumed meanwhile is served in this request.
        let next = Instant::now() + PAUSE_CHECK;
        tokio::time::sleep_until(next.min(until)).await;
        if next >= until {
            return Ok(Vec::new());
        }
    }
    let mut checked = Instant::now();
    let broker = &bus.engine().broker;
    let consume = ConsumeOptions::new(options.handled.clone())
        .prefetch(options.max)
        .lease(options.lease);
    let mut consumer = broker.consume(group.clone(), consume).await?;
    let mut taken = Vec::new();
    loop {
        let fetched = tokio::time::timeout_at(until, consumer.fetch(options.max)).await;
        let fetched = match fetched {
            Ok(fetched) => fetched?,
            Err(_) => break,
        };
        // The group may have been paused while the request waited. Then its events wait, too.
        if checked.elapsed() > FIRST_LOOK && is_paused(bus, group).await {
            let release = Verdict::Release {
                after: Duration::ZERO,
            };
            let released = fetched.into_iter();
            let released = released.map(|d| Settlement::new(d.lease, release.clone()));
            broker.settle(released.collect()).await?;
            break;
        }
        checked = Instant::now();
        let mut settled = Vec::new();
        for delivery in fetched {
            match refusal(&delivery, options) {
                Some(verdict) => settled.push(Settlement::new(delivery.lease, verdict)),
                None => taken.push(delivery),
            }
        }
        if !settled.is_empty()
            && let Err(error) = broker.settle(settled).await
            && taken.is_empty()
        {
            return Err(error);
        }
        if !taken.is_empty() {
            break;
        }
    }
    // If events were taken, an error of the close is ignored: the client must get the events.
    if let Err(error) = consumer.close().await
        && taken.is_empty()
    {
        return Err(error);
    }
    Ok(taken)
}

/// How long a fetch with a shorter wait, or none, looks for events. A pause is seen after this time, too.
const FIRST_LOOK: Duration = Duration::from_millis(100);
/// How often a fetch that waits at a paused group looks whether it was resumed.
const PAUSE_CHECK: Duration = Duration::from_secs(1);

/// Whether a group is paused. If the pauses cannot be read, the group counts as running.
async fn is_paused(bus: &Bus, group: &GroupName) -> bool {
    let paused = bus.paused_groups().await;
    paused.is_ok_and(|paused| paused.contains_key(group))
}

/// The verdict for a delivery that the client must not get; `None` if the client gets it.
fn refusal(delivery: &Delivery, options: &Fetch) -> Option<Verdict> {
    let event = &delivery.record.event;
    if let Some(tenant) = &options.tenant
        && event.tenant() != Some(tenant)
    {
        let reason = OTHER_TENANT.to_owned();
        return Some(Verdict::Skip { reason });
    }
    (delivery.attempt > options.policy.max_attempts()).then_some(Verdict::Dead { failure: None })
}

/// Creates the group, or adds subscriptions to it. Returns the patterns of all its subscriptions.
async fn declare(
    bus: &Bus,
    group: &GroupName,
    request: &FetchRequest,
) -> Result<Vec<Pattern>, Problem> {
    let mut subscriptions = Vec::new();
    for pattern in &request.patterns {
        let pattern = Pattern::new(&everbus::streams::canonical(pattern))?;
        subscriptions.push(SubscriptionSpec {
            name: pattern.as_str().to_owned(),
            pattern,
        });
    }
    let spec = GroupSpec {
        start_from: match request.start_from.as_deref() {
            None | Some("new") => StartFrom::New,
            Some("first") => StartFrom::First,
            Some(_) => return Err(Problem::bad_request("start_from is new or first")),
        },
        ordered: request.ordered,
        subscriptions,
        ..GroupSpec::new(group.clone())
    };
    let all = bus.engine().broker.declare(spec).await?;
    Ok(all.into_iter().map(|s| s.pattern).collect())
}

/// The settings of a pull consumer in the configuration file for this group.
fn configured<'a>(state: &'a AppState, group: &GroupName) -> Option<&'a everbus::config::Consumer> {
    let consumers = &state.config()?.consumers;
    consumers.iter().find(|consumer| {
        let same = group_of(consumer).is_ok_and(|name| name == *group);
        same && matches!(consumer.delivery, Some(ConfiguredDelivery::Pull(_)))
    })
}

fn policy(state: &AppState, group: &GroupName) -> RetryPolicy {
    let retry = configured(state, group).and_then(|consumer| consumer.retry);
    retry.map(|retry| retry.policy()).unwrap_or_default()
}

fn lease(state: &AppState, group: &GroupName, asked: Option<u64>) -> Result<Duration, Problem> {
    let configured = configured(state, group).and_then(|consumer| match &consumer.delivery {
        Some(ConfiguredDelivery::Pull(pull)) => pull.lease,
        _ => None,
    });
    let asked = asked.map(Duration::from_millis);
    let lease = asked.or(configured).unwrap_or(LEASE);
    if lease < Duration::from_millis(100) || lease > LONGEST_LEASE {
        return Err(Problem::bad_request(
            "a lease lasts from 100 ms to 12 hours",
        ));
    }
    Ok(lease)
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SettleRequest {
    /// One item for each event.
    items: Vec<SettleItem>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SettleItem {
    /// The lease.
    pub(crate) lease: String,
    /// `ack`, `retry`, `dead`, `skip` or `release`.
    pub(crate) verdict: String,
    /// The reason, for retry, dead and skip.
    #[serde(default)]
    pub(crate) error: Option<String>,
    /// For retry and release: the delay in milliseconds. Without it a retry waits as the policy says, and a release
    /// does not wait.
    #[serde(default)]
    pub(crate) after_ms: Option<u64>,
}

/// One result for each lease, in the same order.
#[derive(Serialize, JsonSchema)]
struct Settled {
    items: Vec<SettledItem>,
}

#[derive(Serialize, JsonSchema)]
struct SettledItem {
    /// Whether the request was applied to the event.
    ok: bool,
    /// The error code. `LeaseLost`: the lease had expired, and another client may have the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
    /// What to do about the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

impl Settled {
    fn of(answers: Vec<Result<(), Error>>) -> Self {
        let items = answers.into_iter().map(|answer| SettledItem {
            ok: answer.is_ok(),
            code: answer.as_ref().err().map(|error| error.code().as_str()),
            hint: answer
                .err()
                .and_then(|error| error.hint_text().map(str::to_owned)),
        });
        Self {
            items: items.collect(),
        }
    }
}

async fn settle(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
    Input(request): Input<SettleRequest>,
) -> Result<Answer<Settled>, Problem> {
    let answers = settle_for(&state, &caller, &name, request.items).await?;
    Ok(Answer(Settled::of(answers)))
}

/// Settles fetched events for a caller. The WebSocket uses it too.
pub(crate) async fn settle_for(
    state: &AppState,
    caller: &Caller,
    name: &str,
    items: Vec<SettleItem>,
) -> Result<Vec<Result<(), Error>>, Problem> {
    let group = caller.group(name)?;
    let policy = policy(state, &group);
    let key = signing_key(state.bus()).await?;
    let mut settlements = Vec::with_capacity(items.len());
    let mut foreign = Vec::with_capacity(items.len());
    for item in items {
        let given = read_ticket(&key, &group, &item.lease)?;
        let verdict = verdict(&item, given.attempt, &policy)?;
        settlements.push(Settlement::new(given.lease, verdict));
        foreign.push(given.foreign);
    }
    let answers = state.bus().engine().broker.settle(settlements).await?;
    Ok(explained(answers, &foreign))
}

/// Adds a hint to the error of a lost lease that another process had given.
fn explained(answers: Vec<Result<(), Error>>, foreign: &[bool]) -> Vec<Result<(), Error>> {
    let answers = answers.into_iter().zip(foreign);
    answers
        .map(|(answer, foreign)| match answer {
            Err(error) if error.code() == Code::LeaseLost && *foreign => Err(error.hint(
                "another server, or this one before a restart, gave the lease: settle where \
                 you fetch (sticky sessions), or use PostgreSQL",
            )),
            answer => answer,
        })
        .collect()
}

/// Extends leases for a caller. The WebSocket uses it too.
pub(crate) async fn extend_for(
    state: &AppState,
    caller: &Caller,
    name: &str,
    leases: &[String],
    by: Duration,
) -> Result<Vec<Result<(), Error>>, Problem> {
    let group = caller.group(name)?;
    let key = signing_key(state.bus()).await?;
    let mut given = Vec::with_capacity(leases.len());
    let mut foreign = Vec::with_capacity(leases.len());
    for text in leases {
        let ticket = read_ticket(&key, &group, text)?;
        given.push(ticket.lease);
        foreign.push(ticket.foreign);
    }
    let answers = state.bus().engine().broker.extend(given, by).await?;
    Ok(explained(answers, &foreign))
}

fn verdict(item: &SettleItem, attempt: u32, policy: &RetryPolicy) -> Result<Verdict, Problem> {
    let after = item.after_ms.map(Duration::from_millis);
    let why = || {
        let given = item.error.clone();
        given.unwrap_or_else(|| "the client gave no reason".to_owned())
    };
    Ok(match item.verdict.as_str() {
        "ack" => Verdict::Ack,
        "skip" => Verdict::Skip {
            reason: item
                .error
                .clone()
                .unwrap_or_else(|| "skipped by the client".to_owned()),
        },
        "dead" => Verdict::Dead {
            failure: Some(failure(attempt, FailureKind::Permanent, why())),
        },
        "release" => Verdict::Release {
            after: after.unwrap_or_default(),
        },
        "retry" => after_failure(policy, attempt, after, why()),
        other => {
            let what = format!("{other:?} is not a verdict");
            return Err(Problem::bad_request(what).hint("ack, retry, dead, skip or release"));
        }
    })
}

/// The verdict after a failure: a retry if the policy has attempts left, else a dead letter.
fn after_failure(
    policy: &RetryPolicy,
    attempt: u32,
    after: Option<Duration>,
    why: String,
) -> Verdict {
    let failure = failure(attempt, FailureKind::Error, why);
    match policy.after_failure(attempt, fastrand::f64()) {
        Some(delay) => Verdict::Retry {
            after: after.unwrap_or(delay),
            failure,
        },
        None => Verdict::Dead {
            failure: Some(failure),
        },
    }
}

fn failure(attempt: u32, kind: FailureKind, error: String) -> Failure {
    Failure {
        attempt,
        at: SystemClock.now(),
        kind,
        handler: Some(HANDLER.to_owned()),
        error,
        backtrace: None,
        alone: false,
        took: None,
        worker: None,
    }
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ExtendRequest {
    /// The leases.
    leases: Vec<String>,
    /// Each lease then ends this many milliseconds from now.
    by_ms: u64,
}

async fn extend(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
    Input(request): Input<ExtendRequest>,
) -> Result<Answer<Settled>, Problem> {
    let group = caller.group(&name)?;
    let by = lease(&state, &group, Some(request.by_ms))?;
    let answers = extend_for(&state, &caller, &name, &request.leases, by).await?;
    Ok(Answer(Settled::of(answers)))
}

/// The key that signs leases. It is created once per store, so that every server accepts the leases of the others.
async fn signing_key(bus: &Bus) -> Result<hmac::Key, Problem> {
    let kv = bus.kv(TOKENS_BUCKET)?;
    let bytes = match kv.get(KEY).await? {
        Some(entry) => entry.value,
        None => {
            let mut fresh = [0_u8; 32];
            getrandom::fill(&mut fresh)
                .map_err(|e| Error::new(Code::OutOfResources, format!("no random bytes: {e}")))?;
            match kv.put(KEY, fresh.to_vec()).if_absent().await {
                Err(error) if error.code() != Code::RevisionConflict => return Err(error.into()),
                _ => {}
            }
            let entry = kv.get(KEY).await?;
            let missing = || Error::new(Code::Internal, "the key of the leases is missing");
            entry.ok_or_else(missing)?.value
        }
    };
    Ok(hmac::Key::new(hmac::HMAC_SHA256, &bytes))
}

fn ticket(key: &hmac::Key, group: &GroupName, delivery: &Delivery) -> String {
    let lease = &delivery.lease;
    let ticket = Ticket {
        group: group.as_str().to_owned(),
        position: lease.position().to_string(),
        words: lease.words(),
        text: lease.text().map(ToString::to_string),
        attempt: delivery.attempt,
        server: PROCESS.to_string(),
    };
    // The ticket has only numbers and texts: serialising it cannot fail.
    let body = serde_json::to_vec(&ticket).unwrap_or_default();
    let tag = hmac::sign(key, &body);
    format!(
        "{}.{}",
        BASE64URL_NOPAD.encode(&body),
        BASE64URL_NOPAD.encode(tag.as_ref())
    )
}

/// The id of this process in the leases that it gives.
static PROCESS: LazyLock<EventId> = LazyLock::new(EventId::new);

/// A lease that a client sent.
struct Given {
    lease: Lease,
    attempt: u32,
    /// Whether another process fetched the event.
    foreign: bool,
}

fn read_ticket(key: &hmac::Key, group: &GroupName, text: &str) -> Result<Given, Problem> {
    let bad = || {
        Problem::bad_request("this is not a lease of the group")
            .hint("send `lease` of a fetched event as it is")
    };
    let (body, tag) = text.split_once('.').ok_or_else(bad)?;
    let body = BASE64URL_NOPAD.decode(body.as_bytes()).map_err(|_| bad())?;
    let tag = BASE64URL_NOPAD.decode(tag.as_bytes()).map_err(|_| bad())?;
    hmac::verify(key, &body, &tag).map_err(|_| bad())?;
    let ticket: Ticket = serde_json::from_slice(&body).map_err(|_| bad())?;
    if ticket.group != group.as_str() {
        return Err(bad());
    }
    let mut lease = Lease::new(ticket.position.parse()?, ticket.words);
    if let Some(text) = ticket.text {
        lease = lease.with_text(text.into());
    }
    Ok(Given {
        lease,
        attempt: ticket.attempt,
        foreign: ticket.server != PROCESS.to_string(),
    })
}
