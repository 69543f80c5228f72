//! A planted bug: a consumer that acks what it fetches before any handler has run.
//!
//! The control of the kill campaign, as `NORMAL` is that of the power losses: with this in place the
//! campaign must find lost events, or it proves nothing.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, ConsumeOptions, Consumer, Delivery, Event, EventId,
    GroupInfo, GroupName, GroupSpec, Lease, Pattern, Result, SettledOutcome, Settlement,
    SubscriptionInfo, Verdict,
};

/// Acks on fetch, and answers later settlements as if they had been applied.
#[derive(Clone)]
pub struct AckFirst(Arc<dyn Broker>);

impl AckFirst {
    /// Plants the bug in a broker.
    pub fn wrap(inner: Arc<dyn Broker>) -> Arc<dyn Broker> {
        Arc::new(Self(inner))
    }
}

impl Broker for AckFirst {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        self.0.declare(group)
    }

    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        self.0.retract(subscription)
    }

    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        self.0.remove_group(group)
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        self.0.append(batch)
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            let inner = self.0.consume(group, options).await?;
            let broker = self.0.clone();
            Ok(Box::new(AckingConsumer { inner, broker }) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        let answers = settlements.iter().map(|_| Ok(())).collect();
        Box::pin(std::future::ready(Ok(answers)))
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        self.0.extend(leases, by)
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        self.0.inspect()
    }

    fn settled(&self, position: u64, timeout: Duration) -> BoxFuture<'_, Result<SettledOutcome>> {
        self.0.settled(position, timeout)
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        self.0.close()
    }
}

struct AckingConsumer {
    inner: Box<dyn Consumer>,
    broker: Arc<dyn Broker>,
}

impl Consumer for AckingConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let batch = self.inner.fetch(max).await?;
            let ack = |delivery: &Delivery| Settlement::new(delivery.lease.clone(), Verdict::Ack);
            self.broker.settle(batch.iter().map(ack).collect()).await?;
            Ok(batch)
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.inner.set_handled(handled);
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        self.inner.close()
    }
}
