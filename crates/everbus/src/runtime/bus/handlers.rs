//! Handlers and their groups: subscribing, mounting routers, and taking both away again.

use std::collections::BTreeSet;

use everbus_core::{GroupInfo, GroupName, Result};
use tokio::runtime::Handle;

use super::Bus;
use crate::audit::{Action, audited};
use crate::handler::SubscriptionId;
use crate::runtime::lag;
use crate::runtime::router::{Resolved, Router};
use crate::runtime::shutdown;
use crate::runtime::subscription::subscribe::Subscribe;

impl Bus {
    /// Begins a subscription to the events that match a pattern (`user.created`, `user.*`,
    /// `order.*.shipped`, `*`). It takes effect with [`Subscribe::handler`].
    pub fn subscribe(&self, pattern: impl AsRef<str>) -> Subscribe<'_> {
        Subscribe::new(self, pattern.as_ref())
    }

    /// Subscribes everything a router says. The whole of it is checked first; if anything is wrong,
    /// nothing is subscribed. Returns the ids in the order of the routes.
    ///
    /// A pattern that matches none of the event types that are known (from the handlers of this and of
    /// earlier routers, and from schemas) is logged as a warning: it is probably a typing error.
    ///
    /// What a group is still subscribed to and no handler of this bus takes, because a handler was removed or
    /// its pattern narrowed, is logged as a warning when the bus starts, or here if it runs already; see
    /// [`Router::exactly`].
    pub async fn mount(&self, router: Router) -> Result<Vec<SubscriptionId>> {
        let resolved = router.resolve()?;
        let subscriptions = resolved.subscriptions.iter();
        let groups: BTreeSet<GroupName> = subscriptions.map(|s| s.group.clone()).collect();
        let ids = self.mount_resolved(resolved).await?;
        let registry = self.inner.registry.lock().await;
        if registry.is_started() {
            registry.report_leftovers(&groups);
        }
        Ok(ids)
    }

    /// The same, without a word about what else the groups are subscribed to: more handlers may follow.
    pub(crate) async fn mount_resolved(&self, resolved: Resolved) -> Result<Vec<SubscriptionId>> {
        self.accepts()?;
        let mut registry = self.inner.registry.lock().await;
        // Checked again under the lock: a shutdown may have come first.
        self.accepts()?;
        let shared = &self.inner.shared;
        shared.unless_ending(registry.mount(shared, resolved)).await
    }

    /// Removes a subscription, its handler and its durable record. Runs of the handler that have
    /// begun finish; no new one begins. What its group owes and no other handler here matches is
    /// left to other processes.
    pub async fn unsubscribe(&self, id: SubscriptionId) -> Result<()> {
        let mut registry = self.inner.registry.lock().await;
        self.accepts()?;
        let shared = &self.inner.shared;
        shared.unless_ending(registry.unsubscribe(shared, id)).await
    }

    /// How every group of the engine stands, those of other processes included, and how far it is behind in
    /// each stream. The gauges of the lag are set by it as well.
    pub async fn groups(&self) -> Result<Vec<GroupInfo>> {
        lag::look(&self.inner.shared).await
    }

    /// Deletes a group with its position, what it owes and its dead letters. Refused while this bus
    /// has handlers in it.
    pub async fn remove_group(&self, group: GroupName) -> Result<()> {
        let mut registry = self.inner.registry.lock().await;
        self.accepts()?;
        registry.forget_group(&group)?;
        let shared = &self.inner.shared;
        shared.group_not_stopped(&group);
        let action = Action::new("groups.remove").on("GROUP", &group);
        let removed = shared.engine.broker.remove_group(group);
        let operator = shared.audit().operator();
        let removed = audited(&shared.engine, &operator, action, removed);
        shared.unless_ending(removed).await
    }

    /// Runs handlers in a group that has no subscriptions in the engine: it gets only what it is given.
    pub(crate) async fn mount_apart(&self, resolved: Resolved, group: &GroupName) -> Result<()> {
        let mut registry = self.inner.registry.lock().await;
        self.accepts()?;
        let _ = self.inner.runtime.set(Handle::current());
        let shared = &self.inner.shared;
        let mounting = registry.mount_apart(shared, resolved, group);
        shared.unless_ending(mounting).await
    }

    /// Ends the handlers of such a group and waits for those that run.
    pub(crate) async fn dismount(&self, group: &GroupName) {
        let shared = &self.inner.shared;
        let runner = self.inner.registry.lock().await.dismount(shared, group);
        if let Some(runner) = runner {
            let deadline = shutdown::deadline(shared.options.shutdown_timeout);
            runner.stop(deadline).await;
        }
    }

    /// Whether the inbox of a group may absorb what it has on record: if its handlers are not here,
    /// nobody knows.
    pub(crate) async fn may_absorb(&self, group: &GroupName) -> bool {
        let registry = self.inner.registry.lock().await;
        let handlers = registry.handlers(group);
        handlers.is_empty() || handlers.iter().any(|handler| handler.traits.idempotent)
    }
}
