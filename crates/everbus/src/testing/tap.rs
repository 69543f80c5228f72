//! A layer between the bus and its engine: forwards every call and records its result.

use std::sync::Arc;

use everbus_core::{
    Appended, BoxFuture, Broker, BrokerLayer, ConsumeOptions, Consumer, Delivery, Engine, Event,
    EventId, GroupName, GroupSpec, Pattern, Position, Redeliver, Redelivery, Result, Settlement,
    SubscriptionInfo,
};

use super::journal::{Fetches, Journal};

/// The engine with a recording broker.
pub(super) fn tapped(engine: Engine, journal: &Arc<Journal>) -> Engine {
    let redeliver = engine.redeliver.map(|inner| {
        let journal = journal.clone();
        Arc::new(TappedRedeliver { inner, journal }) as Arc<dyn Redeliver>
    });
    Engine {
        broker: Arc::new(Tap {
            inner: engine.broker,
            journal: journal.clone(),
        }),
        redeliver,
        ..engine
    }
}

struct Tap {
    inner: Arc<dyn Broker>,
    journal: Arc<Journal>,
}

impl BrokerLayer for Tap {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        Box::pin(async move {
            let declared = self.inner.declare(group).await?;
            self.journal.declared(&declared);
            Ok(declared)
        })
    }

    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.inner.retract(subscription).await?;
            self.journal.retracted(subscription);
            Ok(())
        })
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        Box::pin(async move {
            let _under_way = self.journal.under_way();
            let types: Vec<_> = batch.iter().map(|event| event.type_arc().clone()).collect();
            let answers = self.inner.append(batch).await;
            self.read_log().await;
            self.journal.appended(types.iter().map(|name| &**name));
            answers
        })
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            let inner = self.inner.consume(group.clone(), options).await?;
            let consumer = TappedConsumer {
                inner,
                fetches: Some(self.journal.fetches(&group)),
                journal: self.journal.clone(),
                group,
            };
            Ok(Box::new(consumer) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            let _under_way = self.journal.under_way();
            let publishes = |s: &Settlement| !s.follow_ups.is_empty() || s.effect.is_some();
            let publishing = settlements.iter().any(publishes);
            let verdicts: Vec<_> = settlements
                .iter()
                .map(|settlement| (settlement.lease.clone(), settlement.verdict.clone()))
                .collect();
            let answers = self.inner.settle(settlements).await?;
            if publishing {
                self.read_log().await;
            }
            self.journal.settled(&verdicts, &answers);
            Ok(answers)
        })
    }
}

struct TappedRedeliver {
    inner: Arc<dyn Redeliver>,
    journal: Arc<Journal>,
}

impl Redeliver for TappedRedeliver {
    fn redeliver(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        Box::pin(async move {
            let _under_way = self.journal.under_way();
            self.inner.redeliver(group, positions).await
        })
    }

    fn redeliverable(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        self.inner.redeliverable(group, positions)
    }
}

impl Tap {
    /// A caller that gets the answer must find the events in the journal. An event that cannot be read now
    /// is read later; the error is reported to the next wait.
    async fn read_log(&self) {
        let _ = self.journal.catch_up().await;
    }
}

struct TappedConsumer {
    inner: Box<dyn Consumer>,
    /// `None` while it is paused.
    fetches: Option<Fetches>,
    journal: Arc<Journal>,
    group: GroupName,
}

impl Consumer for TappedConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let batch = self.inner.fetch(max).await?;
            self.journal.handed(&self.group, &batch);
            Ok(batch)
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.inner.set_handled(handled);
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.inner.pause().await?;
            self.fetches = None;
            Ok(())
        })
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        let fetches = &mut self.fetches;
        fetches.get_or_insert_with(|| self.journal.fetches(&self.group));
        self.inner.resume(prefetch)
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        let Self { inner, fetches, .. } = *self;
        Box::pin(async move {
            let closed = inner.close().await;
            drop(fetches);
            closed
        })
    }
}
