//! A broker whose leases are as short as a test needs them.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, ConsumeOptions, Consumer, Event, EventId, GroupInfo,
    GroupName, GroupSpec, Lease, Result, SettledOutcome, Settlement, SubscriptionInfo,
};

/// Passes everything on, except that no lease lasts longer than it says.
pub struct ShortLeases {
    inner: Arc<dyn Broker>,
    lease: Duration,
}

impl ShortLeases {
    /// Shortens the leases of a broker.
    pub fn wrap(inner: Arc<dyn Broker>, lease: Duration) -> Arc<dyn Broker> {
        Arc::new(Self { inner, lease })
    }
}

impl Broker for ShortLeases {
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
        self.inner.append(batch)
    }

    fn consume(
        &self,
        group: GroupName,
        mut options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        options.lease = options.lease.min(self.lease);
        self.inner.consume(group, options)
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        self.inner.settle(settlements)
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        self.inner.extend(leases, by.min(self.lease))
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
