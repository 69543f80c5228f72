//! The registry: the handlers of a bus, their groups and their subscriptions.

mod leftover;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use everbus_core::builder::validate_type;
use everbus_core::{
    Code, DEAD_LETTER_EVENT, Error, GroupName, GroupSpec, Result, StartFrom, SubscriptionInfo,
    SubscriptionSpec,
};
use tokio::task::JoinHandle;

use crate::handler::Registered;
use crate::handler::SubscriptionId;
use crate::runtime::bus::Shared;
use crate::runtime::circuits::{CLOSED, OPENED};
use crate::runtime::dispatch::{Plan, Runner};
use crate::runtime::router::{Resolved, Subscription};
use crate::runtime::subscription::agreed::Agreed;
use crate::runtime::subscription::prepare::prepare;
use crate::schema::Schemas;

/// The groups this bus has handlers in. Guarded by one lock: subscribing is rare.
#[derive(Default)]
pub(crate) struct Registry {
    groups: BTreeMap<GroupName, Group>,
    started: bool,
    housekeeping: Vec<JoinHandle<()>>,
    /// The event types that handlers and schemas name.
    known: BTreeSet<String>,
    /// All subscriptions of the groups, including those of other processes and earlier versions.
    subscribed: Subscribed,
}

type Subscribed = BTreeMap<GroupName, Vec<SubscriptionInfo>>;

/// A group and its handlers in this bus.
#[derive(Default)]
struct Group {
    agreed: Agreed,
    /// In the order they were subscribed, which is the order they run in.
    handlers: Vec<Arc<Registered>>,
    runner: Option<Arc<Runner>>,
}

/// A router after the checks: its handlers, the settings of their groups with them, and the schemas and
/// event types that are known with it.
struct Prepared {
    handlers: Vec<Registered>,
    groups: BTreeMap<GroupName, Agreed>,
    schemas: Schemas,
    known: BTreeSet<String>,
}

impl Registry {
    /// Subscribes every route of a router, after all of them passed the checks.
    pub(crate) async fn mount(
        &mut self,
        shared: &Arc<Shared>,
        resolved: Resolved,
    ) -> Result<Vec<SubscriptionId>> {
        let breakers = shared.circuits.owners();
        let exact = resolved.exact.clone();
        let declared = self.declare(shared, resolved).await;
        let (prepared, subscribed) =
            declared.inspect_err(|_| shared.circuits.keep_only(&breakers))?;
        shared.set_schemas(prepared.schemas);
        self.known = prepared.known;
        let ids = prepared.handlers.iter().map(|handler| handler.id).collect();
        self.register(shared, prepared.handlers, prepared.groups);
        self.subscribed.extend(subscribed);
        self.retract_leftovers(shared, &exact).await?;
        Ok(ids)
    }

    /// Checks the router and makes all its subscriptions durable. No handler is registered yet, so a mount
    /// that fails half way can be repeated without registering a handler twice.
    async fn declare(
        &self,
        shared: &Arc<Shared>,
        resolved: Resolved,
    ) -> Result<(Prepared, Subscribed)> {
        let mut prepared = self.prepare(shared, resolved)?;
        let Prepared {
            handlers, groups, ..
        } = &mut prepared;
        if handlers.len() > 1 {
            check_groups(shared, groups).await?;
        }
        let mut subscribed = Subscribed::new();
        for handler in handlers {
            let agreed = groups.entry(handler.group.clone()).or_default();
            let (id, all) = declare(shared, handler, agreed).await?;
            handler.id = id;
            subscribed.insert(handler.group.clone(), all);
        }
        Ok((prepared, subscribed))
    }

    /// Checks a router against the bus and the existing subscriptions. This adds breakers, which the caller
    /// removes on an error; it changes nothing else.
    fn prepare(&self, shared: &Arc<Shared>, resolved: Resolved) -> Result<Prepared> {
        let schemas = schemas_with(&shared.schemas(), &resolved)?;
        let mut known = self.known.clone();
        known.extend(resolved.known_types());
        known.extend(
            schemas
                .iter()
                .map(|(event_type, _, _)| event_type.to_owned()),
        );
        let mut matched = known.clone();
        if !known.is_empty() {
            matched.extend([OPENED, CLOSED, DEAD_LETTER_EVENT].map(str::to_owned));
        }
        for (pattern, near) in resolved.unmatched(&matched) {
            tracing::warn!(
                target: "everbus::router",
                pattern,
                did_you_mean = near,
                "the pattern matches no event type that is known here"
            );
        }
        check_streams(shared, &resolved)?;
        let mut groups: BTreeMap<GroupName, Agreed> = BTreeMap::new();
        let mut handlers = Vec::with_capacity(resolved.subscriptions.len());
        for subscription in resolved.subscriptions {
            let group = subscription.group.clone();
            let agreed = groups.entry(group).or_insert_with_key(|name| {
                let existing = self.groups.get(name);
                existing.map_or_else(Agreed::default, |group| group.agreed.clone())
            });
            handlers.push(prepare(shared, subscription, agreed)?);
        }
        Ok(Prepared {
            handlers,
            groups,
            schemas,
            known,
        })
    }

    fn register(
        &mut self,
        shared: &Arc<Shared>,
        handlers: Vec<Registered>,
        agreed: BTreeMap<GroupName, Agreed>,
    ) {
        for handler in handlers {
            let group = self.groups.entry(handler.group.clone()).or_default();
            group.handlers.push(Arc::new(handler));
        }
        for (name, agreed) in agreed {
            let group = self.groups.entry(name.clone()).or_default();
            group.agreed = agreed;
            if self.started {
                group.run(shared, &name);
            }
        }
    }

    /// Mounts the handlers of a router in one group without subscriptions in the engine: the group gets
    /// only the events that are given to it. The handlers start at once.
    pub(crate) async fn mount_apart(
        &mut self,
        shared: &Arc<Shared>,
        mut resolved: Resolved,
        name: &GroupName,
    ) -> Result<()> {
        if self.groups.contains_key(name) {
            return Err(Error::new(
                Code::GroupConflict,
                format!("the group {name} has handlers in this bus already"),
            ));
        }
        for subscription in &mut resolved.subscriptions {
            subscription.group = name.clone();
            subscription.settings.group = Some(name.to_string());
            subscription.settings.start_from = None;
        }
        let breakers = shared.circuits.owners();
        let prepared = self.prepare(shared, resolved);
        // The router's schemas are not added to the bus: they must not apply to other publishers.
        let prepared = prepared.inspect_err(|_| shared.circuits.keep_only(&breakers))?;
        let ordered = prepared.groups.values().any(Agreed::is_ordered);
        shared.declare_streams().await?;
        shared
            .engine
            .broker
            .declare(GroupSpec {
                name: name.clone(),
                start_from: StartFrom::New,
                ordered,
                ephemeral: false,
                subscriptions: Vec::new(),
            })
            .await?;
        self.register(shared, prepared.handlers, prepared.groups);
        if let Some(group) = self.groups.get_mut(name) {
            group.run(shared, name);
        }
        Ok(())
    }

    /// Removes the handlers of a group that was mounted apart. Returns the runner, which the caller stops.
    pub(crate) fn dismount(&mut self, shared: &Shared, name: &GroupName) -> Option<Arc<Runner>> {
        let group = self.groups.remove(name)?;
        group.handlers.iter().for_each(|handler| handler.remove());
        shared.circuits.forget(name);
        shared.group_not_stopped(name);
        group.runner
    }

    /// The handlers of a group in this bus.
    pub(crate) fn handlers(&self, name: &GroupName) -> &[Arc<Registered>] {
        self.groups.get(name).map_or(&[], |group| &group.handlers)
    }

    pub(crate) async fn unsubscribe(
        &mut self,
        shared: &Arc<Shared>,
        id: SubscriptionId,
    ) -> Result<()> {
        self.find(id)?;
        match shared.engine.broker.retract(id.into()).await {
            // Another process has removed the subscription; the handler is removed nevertheless.
            Err(error) if error.code() == Code::SubscriptionNotFound => {}
            retracted => retracted?,
        }
        for all in self.subscribed.values_mut() {
            all.retain(|s| SubscriptionId::from(s.id) != id);
        }
        self.detach(shared, id)
    }

    /// Removes a handler; its subscription stays.
    pub(crate) fn detach(&mut self, shared: &Arc<Shared>, id: SubscriptionId) -> Result<()> {
        let (name, index) = self.find(id)?;
        let Some(group) = self.groups.get_mut(&name) else {
            return Ok(());
        };
        let handler = group.handlers.remove(index);
        handler.remove();
        group.agreed.leave(&handler.name);
        if self.started {
            group.run(shared, &name);
        }
        Ok(())
    }

    /// The group of a handler, and its index there.
    fn find(&self, id: SubscriptionId) -> Result<(GroupName, usize)> {
        let found = self.groups.iter().find_map(|(name, group)| {
            let index = group.handlers.iter().position(|h| h.id == id)?;
            Some((name.clone(), index))
        });
        found.ok_or_else(|| {
            Error::new(
                Code::SubscriptionNotFound,
                format!("this bus has no subscription {id}"),
            )
            .hint("unsubscribe takes the id that subscribe returned, once")
        })
    }

    /// Starts every group. Returns whether this was the first start.
    pub(crate) fn start(&mut self, shared: &Arc<Shared>) -> bool {
        if std::mem::replace(&mut self.started, true) {
            return false;
        }
        for (name, group) in &mut self.groups {
            group.run(shared, name);
        }
        self.report_unused_consumers(shared);
        self.report_leftovers(self.groups.keys());
        true
    }

    /// Logs consumers of the configuration file without a handler in this bus: another process may have the
    /// handler, or the name is a typing error.
    fn report_unused_consumers(&self, shared: &Shared) {
        let subscriptions = self.groups.iter().flat_map(|(name, group)| {
            let handlers = group.handlers.iter();
            handlers.map(move |handler| (name, &handler.pattern))
        });
        for unused in shared.options.unused_consumers(subscriptions) {
            tracing::warn!(
                target: "everbus::config",
                consumer = unused.name,
                group = %unused.group,
                stream = %unused.pattern,
                "the configuration names a consumer that has no handler here"
            );
        }
    }

    pub(crate) fn is_started(&self) -> bool {
        self.started
    }

    /// Adds a background task that ends with the bus.
    pub(crate) fn keep(&mut self, task: JoinHandle<()>) {
        self.housekeeping.push(task);
    }

    pub(crate) fn stop_housekeeping(&mut self) {
        self.housekeeping.drain(..).for_each(|task| task.abort());
    }

    pub(crate) fn take_runners(&mut self) -> Vec<Arc<Runner>> {
        self.groups
            .values_mut()
            .filter_map(|group| group.runner.take())
            .collect()
    }

    /// Forgets a group. Fails if the group has handlers in this bus.
    pub(crate) fn forget_group(&mut self, name: &GroupName) -> Result<()> {
        match self.groups.get(name) {
            Some(group) if !group.handlers.is_empty() => Err(Error::new(
                Code::GroupConflict,
                format!("the group {name} still has handlers in this bus"),
            )
            .hint("unsubscribe them first")),
            _ => {
                if let Some(runner) = self.groups.remove(name).and_then(|group| group.runner) {
                    runner.retire();
                }
                Ok(())
            }
        }
    }
}

impl Group {
    /// Gives the runner its current handlers, and starts a runner if there is none.
    fn run(&mut self, shared: &Arc<Shared>, name: &GroupName) {
        let concurrency = self.agreed.concurrency();
        let plan = Plan::new(&self.handlers, concurrency, &shared.options);
        if let Some(stopped) = self.runner.take_if(|runner| runner.has_stopped()) {
            stopped.retire();
        }
        match &self.runner {
            Some(runner) => runner.change(plan),
            None if self.handlers.is_empty() => shared.group_not_stopped(name),
            None => self.runner = Some(Runner::start(shared.clone(), name.clone(), plan)),
        }
    }
}

/// Checks that the declared streams cover every subscription and every event type that a handler declares as
/// its result.
fn check_streams(shared: &Shared, resolved: &Resolved) -> Result<()> {
    let streams = &shared.options.streams;
    for subscription in &resolved.subscriptions {
        streams.reaches(&subscription.pattern)?;
        for emitted in &subscription.route.returns.emits {
            streams.route(emitted.event_type)?;
        }
    }
    Ok(())
}

/// Checks that existing groups of the engine are ordered or unordered as requested. A mount of a single
/// subscription does not need this: the declaration checks it.
async fn check_groups(shared: &Shared, wanted: &BTreeMap<GroupName, Agreed>) -> Result<()> {
    let groups = shared.engine.broker.inspect().await?;
    for (name, agreed) in wanted {
        let ordered = agreed.is_ordered();
        let existing = groups.iter().find(|group| group.name == *name);
        if existing.is_some_and(|group| group.ordered != ordered) {
            let not = if ordered { "not " } else { "" };
            let what = format!("the group {name} exists and is {not}ordered");
            return Err(Error::new(Code::GroupConflict, what)
                .hint("use another group name, or remove the group first"));
        }
    }
    Ok(())
}

/// Makes a subscription durable.
async fn declare(
    shared: &Shared,
    handler: &Registered,
    agreed: &Agreed,
) -> Result<(SubscriptionId, Vec<SubscriptionInfo>)> {
    let name = &handler.name;
    shared.declare_streams().await?;
    let declared = shared
        .engine
        .broker
        .declare(GroupSpec {
            name: handler.group.clone(),
            start_from: agreed.start_from(&handler.group),
            ordered: agreed.is_ordered(),
            ephemeral: agreed.is_ephemeral(),
            subscriptions: vec![SubscriptionSpec {
                name: name.clone(),
                pattern: handler.pattern.clone(),
            }],
        })
        .await?;
    match declared.iter().find(|info| info.name == *name) {
        Some(info) => Ok((SubscriptionId::from(info.id), declared)),
        None => Err(Error::new(
            Code::Internal,
            format!("the engine did not confirm the subscription {name:?}"),
        )),
    }
}

/// The known schemas together with those of the router.
fn schemas_with(known: &Schemas, resolved: &Resolved) -> Result<Schemas> {
    let mut schemas = known.clone();
    for declared in &resolved.declared {
        validate_type(&declared.event_type)?;
        if let Some(schema) = &declared.schema {
            let (event_type, version) = (&declared.event_type, declared.version);
            schemas.insert(event_type, version, schema, declared.rust_type)?;
        }
    }
    for Subscription { route, .. } in &resolved.subscriptions {
        for need in &route.needs.payloads {
            if let Some(schema) = &need.schema {
                schemas.insert(need.event_type, need.version, schema, Some(need.rust_type))?;
            }
        }
        for emitted in &route.returns.emits {
            if let Some(schema) = &emitted.schema {
                let (event_type, version) = (emitted.event_type, emitted.version);
                schemas.insert(event_type, version, schema, Some(emitted.rust_type))?;
            }
        }
    }
    Ok(schemas)
}
