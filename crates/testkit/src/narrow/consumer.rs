//! A consumer of all shards.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use everbus_core::{
    BoxFuture, ConsumeOptions, Consumer, Delivery, GroupName, Lease, Pattern, Position, Result,
    Settlement, Shard, Verdict,
};

use super::broker::Shared;
use super::wire::unwrap;

pub(super) struct NarrowConsumer {
    shared: Arc<Shared>,
    /// One for each shard.
    inner: Vec<(Shard, Box<dyn Consumer>)>,
    /// Which shard is looked at first, so that none is starved.
    next: usize,
    /// A delivery that is handed out a second time.
    again: Option<Delivery>,
}

impl NarrowConsumer {
    pub(super) async fn open(
        shared: Arc<Shared>,
        group: GroupName,
        options: ConsumeOptions,
    ) -> Result<Self> {
        let mut inner = Vec::new();
        for (shard, engine) in &shared.shards {
            let consumer = engine.broker.consume(group.clone(), options.clone());
            inner.push((*shard, consumer.await?));
        }
        Ok(Self {
            shared,
            inner,
            next: 0,
            again: None,
        })
    }

    /// Waits until one of the shards has something.
    async fn fetch_any(&mut self, max: usize) -> Result<(Shard, Vec<Delivery>)> {
        self.next = (self.next + 1) % self.inner.len();
        let first = self.next;
        let mut fetches: Vec<(Shard, BoxFuture<'_, Result<Vec<Delivery>>>)> = self
            .inner
            .iter_mut()
            .map(|(shard, consumer)| (*shard, consumer.fetch(max)))
            .collect();
        fetches.rotate_left(first);
        // Dropping the other fetches loses nothing.
        std::future::poll_fn(|context| {
            for (shard, fetch) in &mut fetches {
                if let Poll::Ready(batch) = Pin::as_mut(fetch).poll(context) {
                    return Poll::Ready(batch.map(|batch| (*shard, batch)));
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// The delivery as this engine shows it: without the failures, which it does not keep.
fn shown(shared: &Shared, shard: Shard, delivery: &Delivery) -> Delivery {
    let position = Position::new(shard, delivery.record.position.place());
    shared.holds(shard, &delivery.lease);
    let lease = Lease::new(position, delivery.lease.words());
    Delivery::new(unwrap(&delivery.record, position), lease)
        .after(delivery.attempt, Vec::new())
        .retried(delivery.retried)
}

/// Takes back what was just fetched, as when another member of the group is given the shard.
async fn lose(shared: &Shared, shard: Shard, batch: &[Delivery]) -> Result<()> {
    let engine = shared.shards.iter().find(|(known, _)| *known == shard);
    if let Some((_, engine)) = engine {
        let back = batch.iter().map(|delivery| {
            let after = Duration::ZERO;
            Settlement::new(delivery.lease.clone(), Verdict::Release { after })
        });
        engine.broker.settle(back.collect()).await?;
    }
    Ok(())
}

impl Consumer for NarrowConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            if let Some(again) = self.again.take() {
                return Ok(vec![again]);
            }
            self.shared.faults.before("fetch")?;
            let (shard, batch) = self.fetch_any(max).await?;
            let shown: Vec<Delivery> = batch
                .iter()
                .map(|d| shown(&self.shared, shard, d))
                .collect();
            if self.shared.faults.loses_shards() {
                // It still has them, and somebody else is about to.
                lose(&self.shared, shard, &batch).await?;
            } else if self.shared.faults.duplicates() {
                self.again = shown.first().cloned();
            }
            Ok(shown)
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        for (_, consumer) in &mut self.inner {
            consumer.set_handled(handled.clone());
        }
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        self.resume(0)
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            for (_, consumer) in &mut self.inner {
                consumer.resume(prefetch).await?;
            }
            Ok(())
        })
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            for (_, consumer) in self.inner {
                consumer.close().await?;
            }
            Ok(())
        })
    }
}
