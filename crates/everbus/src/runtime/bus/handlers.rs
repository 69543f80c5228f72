//! Handlers and their groups: subscribing, mounting routers, and removing both again.

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

    /// Subscribes every route of a router. The router is checked first; on any error nothing is subscribed.
    /// Returns the ids in the order of the routes.
    ///
    /// A pattern that matches none of the event types that are known (from the handlers of this and of
    /// earlier routers, and from schemas) is logged as a warning: it is probably a typing error.
    ///
    /// Logs a warning for each pattern that a group is still subscribed to and that no handler of this bus
    /// takes, because a handler was removed or its pattern narrowed. The warning is logged when the bus
    /// starts, or by this call if the bus runs already; see [`Router::exactly`].
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

    /// Like `mount`, without the warnings about leftover subscriptions: more handlers may follow.
    pub(crate) async fn mount_resolved(&self, resolved: Resolved) -> Result<Vec<SubscriptionId>> {
        self.accepts()?;
        let mut registry = self.inner.registry.lock().await;
        // Checked again under the lock: a shutdown may have come first.
        self.accepts()?;
        let shared = &self.inner.shared;
        shared.unless_ending(registry.mount(shared, resolved)).await
    }

    /// Removes a subscription, its handler and its durable record. Running calls of the handler finish; no
    /// new call begins. Pending events of the group that no other handler of this bus matches are left to
    /// other processes.
    pub async fn unsubscribe(&self, id: SubscriptionId) -> Result<()> {
        let mut registry = self.inner.registry.lock().await;
        self.accepts()?;
        let shared = &self.inner.shared;
        shared.unless_ending(registry.unsubscribe(shared, id)).await
    }

    /// Removes a handler from this bus, as if its process had ended: the subscription stays, and its events
    /// wait for a handler in this or another process. Running calls of the handler finish.
    pub async fn detach(&self, id: SubscriptionId) -> Result<()> {
        let mut registry = self.inner.registry.lock().await;
        self.accepts()?;
        registry.detach(&self.inner.shared, id)
    }

    /// The state of every group of the engine, groups of other processes included, with the lag in each
    /// stream. Also updates the lag gauges.
    pub async fn groups(&self) -> Result<Vec<GroupInfo>> {
        lag::look(&self.inner.shared).await
    }

    /// Deletes a group with its position, its pending events and its dead letters. Refused while this bus
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

    /// Runs handlers in a group without subscriptions in the engine: the group gets only the events that
    /// are given to it.
    pub(crate) async fn mount_apart(&self, resolved: Resolved, group: &GroupName) -> Result<()> {
        let mut registry = self.inner.registry.lock().await;
        self.accepts()?;
        let _ = self.inner.runtime.set(Handle::current());
        let shared = &self.inner.shared;
        let mounting = registry.mount_apart(shared, resolved, group);
        shared.unless_ending(mounting).await
    }

    /// Stops the handlers of a group that was mounted with `mount_apart`, and waits for running ones.
    pub(crate) async fn dismount(&self, group: &GroupName) {
        let shared = &self.inner.shared;
        let runner = self.inner.registry.lock().await.dismount(shared, group);
        if let Some(runner) = runner {
            let deadline = shutdown::deadline(shared.options.shutdown_timeout);
            runner.stop(deadline).await;
        }
    }

    /// Whether the inbox of a group may skip events that the group has handled before: a handler of the group
    /// is idempotent. Also true if this process has no handlers of the group, because then it is not known.
    pub(crate) async fn may_absorb(&self, group: &GroupName) -> bool {
        let registry = self.inner.registry.lock().await;
        let handlers = registry.handlers(group);
        handlers.is_empty() || handlers.iter().any(|handler| handler.traits.idempotent)
    }
}
