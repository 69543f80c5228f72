//! A broker that wraps another broker: for tests, for counting, for fault injection.

use std::time::Duration;

use crate::broker::{
    Appended, BoxFuture, Broker, Capabilities, ConsumeOptions, Consumer, Lease, Settlement,
};
use crate::error::Result;
use crate::event::Event;
use crate::group::{GroupInfo, GroupName, GroupSpec, SubscriptionInfo};
use crate::id::EventId;
use crate::stream::Streams;

/// A [`Broker`] that wraps another one. Every operation is forwarded unless it is overridden, including
/// operations that are added later.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use everbus_core::{Appended, BoxFuture, Broker, BrokerLayer, Event, Result};
///
/// /// Counts what is appended.
/// struct Counting {
///     inner: Arc<dyn Broker>,
///     events: AtomicUsize,
/// }
///
/// impl BrokerLayer for Counting {
///     fn inner(&self) -> &dyn Broker {
///         &*self.inner
///     }
///
///     fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
///         self.events.fetch_add(batch.len(), Ordering::Relaxed);
///         self.inner.append(batch)
///     }
/// }
/// # fn is_a_broker(counting: Counting) -> Arc<dyn Broker> { Arc::new(counting) }
/// ```
pub trait BrokerLayer: Send + Sync + 'static {
    /// The wrapped broker.
    fn inner(&self) -> &dyn Broker;

    /// As [`Broker::capabilities`].
    fn capabilities(&self) -> Capabilities {
        self.inner().capabilities()
    }

    /// As [`Broker::declare_streams`].
    fn declare_streams(&self, streams: Streams) -> BoxFuture<'_, Result<()>> {
        self.inner().declare_streams(streams)
    }

    /// As [`Broker::declare`].
    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        self.inner().declare(group)
    }

    /// As [`Broker::retract`].
    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        self.inner().retract(subscription)
    }

    /// As [`Broker::remove_group`].
    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        self.inner().remove_group(group)
    }

    /// As [`Broker::append`].
    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        self.inner().append(batch)
    }

    /// As [`Broker::consume`].
    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        self.inner().consume(group, options)
    }

    /// As [`Broker::settle`].
    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        self.inner().settle(settlements)
    }

    /// As [`Broker::extend`].
    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        self.inner().extend(leases, by)
    }

    /// As [`Broker::inspect`].
    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        self.inner().inspect()
    }

    /// As [`Broker::ping`].
    fn ping(&self) -> BoxFuture<'_, Result<()>> {
        self.inner().ping()
    }

    /// As [`Broker::close`].
    fn close(&self) -> BoxFuture<'_, Result<()>> {
        self.inner().close()
    }
}

impl<L: BrokerLayer> Broker for L {
    fn capabilities(&self) -> Capabilities {
        BrokerLayer::capabilities(self)
    }

    fn declare_streams(&self, streams: Streams) -> BoxFuture<'_, Result<()>> {
        BrokerLayer::declare_streams(self, streams)
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        BrokerLayer::declare(self, group)
    }

    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        BrokerLayer::retract(self, subscription)
    }

    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        BrokerLayer::remove_group(self, group)
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        BrokerLayer::append(self, batch)
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        BrokerLayer::consume(self, group, options)
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        BrokerLayer::settle(self, settlements)
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        BrokerLayer::extend(self, leases, by)
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        BrokerLayer::inspect(self)
    }

    fn ping(&self) -> BoxFuture<'_, Result<()>> {
        BrokerLayer::ping(self)
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        BrokerLayer::close(self)
    }
}
