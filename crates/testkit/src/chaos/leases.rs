//! A broker whose leases are as short as a test needs them.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    BoxFuture, Broker, BrokerLayer, ConsumeOptions, Consumer, GroupName, Lease, Result,
};

/// Passes every call on, but limits the length of leases.
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

impl BrokerLayer for ShortLeases {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn consume(
        &self,
        group: GroupName,
        mut options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        options.lease = options.lease.min(self.lease);
        self.inner.consume(group, options)
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        self.inner.extend(leases, by.min(self.lease))
    }
}
