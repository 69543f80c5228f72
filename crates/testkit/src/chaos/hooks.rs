//! A broker with something done right before and right after each append: where a process shall die
//! between an object and its event, and where bugs are planted.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, ConsumeOptions, Consumer, Event, EventId, GroupInfo,
    GroupName, GroupSpec, Lease, Result, SettledOutcome, Settlement, SubscriptionInfo,
};

/// What is done around an append.
pub trait Hook: Send + Sync + 'static {
    /// Before the engine has the events.
    fn before(&self, batch: &[Event]);
    /// When they are committed, and before anybody is told.
    fn after(&self, batch: &[Event]);
}

/// Passes everything on, with a hook around appends.
pub struct Hooked {
    inner: Arc<dyn Broker>,
    hook: Box<dyn Hook>,
}

impl Hooked {
    /// Puts a hook around the appends of a broker.
    pub fn wrap(inner: Arc<dyn Broker>, hook: impl Hook) -> Arc<dyn Broker> {
        let hook = Box::new(hook);
        Arc::new(Self { inner, hook })
    }
}

impl Broker for Hooked {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        self.inner.declare(group)
    }

    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        self.inner.retract(subscription)
    }

    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        self.inner.remove_group(group)
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        Box::pin(async move {
            self.hook.before(&batch);
            let answers = self.inner.append(batch.clone()).await?;
            self.hook.after(&batch);
            Ok(answers)
        })
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        self.inner.consume(group, options)
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        self.inner.settle(settlements)
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        self.inner.extend(leases, by)
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        self.inner.inspect()
    }

    fn settled(&self, position: u64, timeout: Duration) -> BoxFuture<'_, Result<SettledOutcome>> {
        self.inner.settled(position, timeout)
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        self.inner.close()
    }
}
