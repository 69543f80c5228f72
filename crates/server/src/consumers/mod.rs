//! Consumers without Rust code: webhooks and commands. They are handlers of the bus, with retry, breaker, timeout,
//! inbox, ordering and dead letters. Clients that fetch over HTTP are in `api/pull.rs`.

mod exec;
mod webhook;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use everbus::config::{self, Delivery};
use everbus::{
    Bus, Code, Error, GroupName, HandlerError, HandlerResult, Message, Result, StartFrom,
    SubscriptionId,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::auth::{TOKENS_BUCKET, tenant_group};
use crate::state::AppState;

pub(crate) use webhook::Hook;

/// The reason with which the group of a tenant skips an event of another tenant.
pub(crate) const OTHER_TENANT: &str = "it belongs to another tenant";
const KEY: &str = "webhooks";
/// How often a server looks for webhooks that other servers declared.
const EVERY: Duration = Duration::from_secs(2);
const TRIES: usize = 20;
/// More webhooks of one tenant are refused as a mistake.
const MOST: usize = 200;
/// Webhooks and commands are slow, and another process cannot take an event that was prefetched here. So the prefetch
/// is twice the concurrency, which is this number unless one is set: the default of the bus.
const AT_ONCE: usize = 16;

/// A webhook that was declared over HTTP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Declared {
    /// The group, by its stored name.
    pub(crate) group: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<String>,
    pub(crate) pattern: String,
    pub(crate) url: String,
    /// The current secret, and the previous one while receivers change to the current one.
    pub(crate) secrets: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_attempts: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) timeout_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) concurrency: Option<usize>,
    #[serde(default)]
    pub(crate) ordered: bool,
    #[serde(default)]
    pub(crate) from_first: bool,
}

/// The webhooks that were declared over HTTP and run in this server.
#[derive(Default)]
pub(crate) struct Webhooks {
    running: Mutex<BTreeMap<String, (Declared, SubscriptionId)>>,
    changing: tokio::sync::Mutex<()>,
}

type Stored = BTreeMap<String, Declared>;

/// The webhooks that were declared over HTTP, by the stored names of their groups.
pub(crate) async fn declared(bus: &Bus) -> Result<Stored> {
    let found = bus.kv(TOKENS_BUCKET)?.get_json(KEY).await?;
    Ok(found.map_or_else(Stored::new, |(stored, _)| stored))
}

/// Declares, replaces or removes one webhook, and starts or stops it in this server. If the webhook cannot be started,
/// the change is undone.
pub(crate) async fn change(state: &AppState, group: &str, new: Option<Declared>) -> Result<()> {
    let before = store(state.bus(), group, |_| true, new.clone()).await?;
    let Some(error) = reconciled(state).await?.remove(group) else {
        return Ok(());
    };
    // The change is not undone if another client has changed the webhook meanwhile.
    store(state.bus(), group, |now| now == new.as_ref(), before).await?;
    reconciled(state).await?;
    Err(error)
}

/// Stores or removes one webhook, if `may_replace` allows it for the stored one. Returns the one that was replaced.
async fn store(
    bus: &Bus,
    group: &str,
    may_replace: impl Fn(Option<&Declared>) -> bool,
    new: Option<Declared>,
) -> Result<Option<Declared>> {
    let kv = bus.kv(TOKENS_BUCKET)?;
    let mut tries = 0;
    loop {
        let found = kv.get_json(KEY).await?;
        let (mut stored, revision) = found.unwrap_or((Stored::new(), everbus_core::ABSENT));
        if !may_replace(stored.get(group)) {
            return Ok(None);
        }
        let before = match &new {
            Some(new) => stored.insert(group.to_owned(), new.clone()),
            None => stored.remove(group),
        };
        if let Some(new) = &new
            && stored.values().filter(|d| d.tenant == new.tenant).count() > MOST
        {
            let what = format!("there are {MOST} webhooks already");
            return Err(Error::new(Code::InvalidSetting, what).hint("remove unused ones"));
        }
        match kv.put_json(KEY, &stored).expected(revision).await {
            Err(e) if e.code() == Code::RevisionConflict && tries < TRIES => tries += 1,
            put => return put.map(|_| before),
        }
    }
}

/// Starts the consumers of the configuration file.
pub(crate) async fn mount_configured(state: &AppState) -> Result<()> {
    let Some(config) = state.config() else {
        return Ok(());
    };
    for consumer in &config.consumers {
        mount_consumer(state.bus(), consumer, state.options().private_webhooks).await?;
    }
    Ok(())
}

/// Subscribes a consumer of a configuration file to a bus, with its webhook or command as the handler. For a pull
/// consumer only the group is declared. A consumer without a delivery has its handler in a program: nothing is done.
///
/// `private_webhooks` allows `http` and private addresses for every webhook, like `server.private_webhooks`.
pub async fn mount_consumer(
    bus: &Bus,
    consumer: &config::Consumer,
    private_webhooks: bool,
) -> Result<()> {
    match &consumer.delivery {
        Some(Delivery::Webhook(hook)) => {
            let private = hook.allow_private || private_webhooks;
            let secrets = hook.secrets.iter().map(|secret| secret.reveal().to_owned());
            let secrets: Vec<String> = secrets.collect();
            let hook = Arc::new(Hook::new(&hook.url, &secrets, private)?);
            let (sender, tenant) = (bus.clone(), consumer.tenant.clone());
            let handler = move |message: Message| {
                let (hook, bus, tenant) = (hook.clone(), sender.clone(), tenant.clone());
                async move {
                    of_tenant(&message, tenant.as_deref())?;
                    hook.deliver(&bus, &message).await
                }
            };
            configured(bus, consumer, handler).await
        }
        Some(Delivery::Exec(command)) => {
            let command = Arc::new(command.clone());
            let tenant = consumer.tenant.clone();
            let handler = move |message: Message| {
                let (command, tenant) = (command.clone(), tenant.clone());
                async move {
                    of_tenant(&message, tenant.as_deref())?;
                    exec::run(&command, &message).await
                }
            };
            configured(bus, consumer, handler).await
        }
        Some(Delivery::Pull(_)) => declare_pull(bus, consumer).await,
        _ => Ok(()),
    }
}

/// The stored name of a consumer's group.
pub(crate) fn group_of(consumer: &config::Consumer) -> Result<GroupName> {
    match &consumer.tenant {
        Some(tenant) => tenant_group(tenant, consumer.group.as_str()),
        None => Ok(consumer.group.clone()),
    }
}

/// Subscribes a handler with the settings of the file. The bus applies the settings by the name of the group. The group
/// of a tenant has another stored name, so the settings are given here.
async fn configured<F, Fut>(bus: &Bus, consumer: &config::Consumer, handler: F) -> Result<()>
where
    F: Fn(Message) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = HandlerResult> + Send + 'static,
{
    let group = group_of(consumer)?;
    let at_once = consumer.concurrency.unwrap_or(AT_ONCE);
    let mut subscribe = bus
        .subscribe(consumer.pattern.as_str())
        .group(group.as_str())
        .name(consumer.name.clone())
        .prefetch(at_once.saturating_mul(2));
    if let Some(timeout) = consumer.processing_timeout {
        subscribe = subscribe.timeout(timeout);
    }
    if let Some(concurrency) = consumer.concurrency {
        subscribe = subscribe.concurrency(concurrency);
    }
    if consumer.ordered == Some(true) {
        subscribe = subscribe.ordered();
    }
    if consumer.idempotent == Some(true) {
        subscribe = subscribe.idempotent();
    }
    if let Some(start) = consumer.start_from {
        subscribe = subscribe.start_from(start);
    }
    if let Some(criticality) = consumer.criticality {
        subscribe = subscribe.criticality(criticality);
    }
    if let Some(dependency) = &consumer.dependency {
        subscribe = subscribe.depends_on(dependency.clone());
    }
    if let config::Breaker::On(policy) = consumer.circuit_breaker {
        subscribe = subscribe.breaker(policy);
    }
    if let Some(retry) = consumer.retry {
        subscribe = subscribe.retry_with(move |policy| retry.over(policy));
    }
    subscribe.handler(handler).await.map(drop)
}

/// Declares the group of a pull consumer, so that it collects events from now on.
async fn declare_pull(bus: &Bus, consumer: &config::Consumer) -> Result<()> {
    let spec = everbus_core::GroupSpec {
        start_from: consumer.start_from.unwrap_or(StartFrom::New),
        ordered: consumer.ordered.unwrap_or(false),
        subscriptions: vec![everbus_core::SubscriptionSpec {
            name: consumer.name.clone(),
            pattern: consumer.pattern.clone(),
        }],
        ..everbus_core::GroupSpec::new(group_of(consumer)?)
    };
    bus.engine().broker.declare(spec).await.map(drop)
}

fn of_tenant(message: &Message, tenant: Option<&str>) -> HandlerResult {
    match tenant {
        Some(tenant) if message.event().tenant() != Some(tenant) => {
            Err(HandlerError::skip(OTHER_TENANT))
        }
        _ => Ok(()),
    }
}

/// Starts and stops the webhooks that are declared over HTTP at any server of the store, until the future is dropped.
pub(crate) async fn follow(state: AppState) {
    let mut failed = BTreeMap::new();
    loop {
        match reconcile(&state).await {
            Err(error) if error.code() == Code::Unsupported => return,
            Err(error) => {
                tracing::warn!(target: "everbus::webhook", %error, "the declared webhooks are not known");
            }
            Ok(errors) => {
                // A webhook that still fails is logged only once.
                for (group, error) in &errors {
                    if !failed.contains_key(group) {
                        tracing::error!(target: "everbus::webhook", %group, %error, "the webhook does not run");
                    }
                }
                failed = errors;
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Like [`reconcile`], but it runs to its end even if the client disconnects.
async fn reconciled(state: &AppState) -> Result<BTreeMap<String, Error>> {
    let state = state.clone();
    let work = tokio::spawn(async move { reconcile(&state).await });
    work.await
        .map_err(|e| Error::new(Code::Internal, e.to_string()))?
}

/// Starts the declared webhooks that do not run, and stops those that were removed or changed. Returns the errors of
/// webhooks that cannot be started, by group; the others run.
///
/// A stopped webhook keeps its subscription: without one the engine would move the group past events that are not
/// delivered yet.
async fn reconcile(state: &AppState) -> Result<BTreeMap<String, Error>> {
    let webhooks = state.webhooks();
    let _one = webhooks.changing.lock().await;
    let wanted = declared(state.bus()).await?;
    let running = webhooks.running.lock().clone();
    for (name, (now, id)) in &running {
        if wanted.get(name) != Some(now) {
            match state.bus().detach(*id).await {
                Err(error) if error.code() == Code::SubscriptionNotFound => {}
                stopped => stopped?,
            }
            webhooks.running.lock().remove(name);
        }
    }
    let mut failed = BTreeMap::new();
    for (name, hook) in wanted {
        if webhooks.running.lock().contains_key(&name) {
            continue;
        }
        match mount(state, &hook).await {
            Ok(id) => {
                webhooks.running.lock().insert(name, (hook, id));
            }
            Err(error) if error.code() == Code::EventBusShutdownError => return Err(error),
            Err(error) => {
                failed.insert(name, error);
            }
        }
    }
    Ok(failed)
}

async fn mount(state: &AppState, declared: &Declared) -> Result<SubscriptionId> {
    let private = state.options().private_webhooks;
    let hook = Hook::new(&declared.url, &declared.secrets, private)?;
    let (hook, bus) = (Arc::new(hook), state.bus().clone());
    let tenant = declared.tenant.clone();
    let handler = move |message: Message| {
        let (hook, bus, tenant) = (hook.clone(), bus.clone(), tenant.clone());
        async move {
            of_tenant(&message, tenant.as_deref())?;
            hook.deliver(&bus, &message).await
        }
    };
    let at_once = declared.concurrency.unwrap_or(AT_ONCE);
    let mut subscribe = state
        .bus()
        .subscribe(&declared.pattern)
        .group(&declared.group)
        .name("webhook")
        .prefetch(at_once.saturating_mul(2))
        .timeout(Duration::from_millis(declared.timeout_ms.unwrap_or(30_000)));
    if declared.from_first {
        subscribe = subscribe.start_from(StartFrom::First);
    }
    if let Some(concurrency) = declared.concurrency {
        subscribe = subscribe.concurrency(concurrency);
    }
    if let Some(attempts) = declared.max_attempts {
        subscribe = subscribe.retry_with(move |p| p.max_retries(attempts.saturating_sub(1)));
    }
    if declared.ordered {
        subscribe = subscribe.ordered();
    }
    subscribe.handler(handler).await
}
