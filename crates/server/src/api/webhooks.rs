//! Webhooks over HTTP: declare, list, remove.

use axum::extract::{Path, State};
use data_encoding::BASE64;
use everbus::audit::{Action, Operator, audited};
use everbus::{Code, Error, Pattern};
use http::Method;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Answer;
use crate::auth::{Caller, Scope, check_new_group};
use crate::body::Input;
use crate::consumers::{self, Declared, Hook};
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;

pub(super) fn routes() -> Vec<Route> {
    let consume = Access::Scope(Scope::Consume);
    vec![
        Route::get("/v1/webhooks", consume, list)
            .summary("The webhooks that were declared over HTTP")
            .returns::<Webhooks>(200),
        Route::new(Method::PUT, "/v1/webhooks/{name}", consume, put)
            .summary("Declares a webhook: a group whose events are sent to an address, signed")
            .json::<WebhookRequest>()
            .returns::<Created>(200),
        Route::delete("/v1/webhooks/{name}", consume, remove)
            .summary("Removes a webhook; its group stays and collects events until it is deleted")
            .returns::<Webhook>(200),
    ]
}

/// A webhook to be declared.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct WebhookRequest {
    /// The pattern of the event types, such as `orders.*`.
    pattern: String,
    /// The URL that gets the events; https only, unless the server allows private webhooks.
    url: String,
    /// The secret that signs the requests: whsec_ and base64. One is made unless given.
    #[serde(default)]
    secret: Option<String>,
    /// The previous secret, while receivers change to the new one: requests have both signatures.
    #[serde(default)]
    previous_secret: Option<String>,
    /// All attempts, the first included; 4 unless given.
    #[serde(default)]
    max_attempts: Option<u32>,
    /// How long one attempt may take; 30 seconds unless given.
    #[serde(default)]
    timeout_ms: Option<u64>,
    /// How many requests run at once.
    #[serde(default)]
    concurrency: Option<usize>,
    /// Whether events with the same key are delivered one after another.
    #[serde(default)]
    ordered: bool,
    /// `new` (the default) or `first`: where a new group begins.
    #[serde(default)]
    start_from: Option<String>,
}

/// A webhook, without its secrets.
#[derive(Serialize, JsonSchema)]
struct Webhook {
    /// Its name, which is also the name of its group.
    name: String,
    pattern: String,
    url: String,
    /// How many secrets sign the requests.
    secrets: usize,
}

impl Webhook {
    fn of(caller: &Caller, declared: &Declared) -> Option<Self> {
        let group = declared.group.parse().ok()?;
        Some(Self {
            name: caller.group_shown(&group)?,
            pattern: declared.pattern.clone(),
            url: declared.url.clone(),
            secrets: declared.secrets.len(),
        })
    }
}

#[derive(Serialize, JsonSchema)]
struct Webhooks {
    items: Vec<Webhook>,
}

#[derive(Serialize, JsonSchema)]
struct Created {
    /// The secret that receivers verify signatures with. It is shown this once.
    secret: String,
    #[serde(flatten)]
    webhook: Webhook,
}

async fn list(State(state): State<AppState>, caller: Caller) -> Result<Answer<Webhooks>, Problem> {
    let declared = consumers::declared(state.bus()).await?;
    let items = declared.values().filter_map(|d| Webhook::of(&caller, d));
    Ok(Answer(Webhooks {
        items: items.collect(),
    }))
}

async fn put(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
    Input(request): Input<WebhookRequest>,
) -> Result<Answer<Created>, Problem> {
    check_new_group(&caller, &name)?;
    let group = caller.group(&name)?;
    if group.is_unnamed() {
        return Err(Problem::bad_request("a webhook has a name"));
    }
    let pattern = Pattern::new(&everbus::streams::canonical(&request.pattern))?;
    let from_first = match request.start_from.as_deref() {
        None | Some("new") => false,
        Some("first") => true,
        Some(_) => return Err(Problem::bad_request("start_from is new or first")),
    };
    if request.max_attempts.is_some_and(|n| n == 0 || n > 1000)
        || request.timeout_ms.is_some_and(|ms| ms == 0 || ms > 600_000)
        || request.concurrency.is_some_and(|n| n == 0 || n > 1000)
    {
        let what = "max_attempts and concurrency are 1 to 1000, timeout_ms at most 600000";
        return Err(Problem::bad_request(what));
    }
    let secret = match request.secret {
        Some(secret) => secret,
        None => new_secret()?,
    };
    let secrets: Vec<String> = std::iter::once(secret.clone())
        .chain(request.previous_secret)
        .collect();
    // The URL and the secrets are checked before they are stored.
    Hook::new(&request.url, &secrets, state.options().private_webhooks)?;
    let declared = Declared {
        group: group.as_str().to_owned(),
        tenant: caller.tenant().map(str::to_owned),
        pattern: pattern.as_str().to_owned(),
        url: request.url,
        secrets,
        max_attempts: request.max_attempts,
        timeout_ms: request.timeout_ms,
        concurrency: request.concurrency,
        ordered: request.ordered,
        from_first,
    };
    let action = Action::new("webhooks.put")
        .on("GROUP", &group)
        .detail("pattern", json!(declared.pattern));
    let work = consumers::change(&state, group.as_str(), Some(declared.clone()));
    audited(state.bus().engine(), &Operator::current(), action, work).await?;
    let webhook = Webhook::of(&caller, &declared).ok_or_else(|| no_webhook(&name))?;
    Ok(Answer(Created { secret, webhook }))
}

fn new_secret() -> Result<String, Problem> {
    let mut bytes = [0_u8; 32];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::new(Code::OutOfResources, format!("no random bytes: {e}")))?;
    Ok(format!("whsec_{}", BASE64.encode(&bytes)))
}

fn no_webhook(name: &str) -> Problem {
    Problem::not_found(format!("there is no webhook {name:?}"))
}

async fn remove(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Answer<Webhook>, Problem> {
    let group = caller.group(&name)?;
    let known = consumers::declared(state.bus()).await?;
    let known = known.get(group.as_str());
    let webhook = known.and_then(|declared| Webhook::of(&caller, declared));
    let webhook = webhook.ok_or_else(|| no_webhook(&name))?;
    let action = Action::new("webhooks.remove").on("GROUP", &group);
    let work = consumers::change(&state, group.as_str(), None);
    audited(state.bus().engine(), &Operator::current(), action, work).await?;
    Ok(Answer(webhook))
}
