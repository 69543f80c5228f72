//! The consumer of the narrow engine: it fetches from all shards.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use everbus_core::{
    BoxFuture, ConsumeOptions, Consumer, Delivery, EventId, GroupName, Lease, Pattern, Position,
    Result, Settlement, Shard, Verdict,
};

use super::broker::Shared;
use super::wire::{is_wrapped, unwrap};

pub(super) struct NarrowConsumer {
    shared: Arc<Shared>,
    id: EventId,
    /// At most this many are held, over all shards.
    prefetch: usize,
    lease: Duration,
    /// One for each shard.
    inner: Vec<(Shard, Box<dyn Consumer>)>,
    /// Which shard is read first, so that none is starved.
    next: usize,
    /// Fetched from a shard and not handed out yet.
    ready: Vec<Delivery>,
}

impl NarrowConsumer {
    pub(super) async fn open(
        shared: Arc<Shared>,
        group: GroupName,
        mut options: ConsumeOptions,
    ) -> Result<Self> {
        let (prefetch, lease) = (options.prefetch, options.lease);
        // It counts deliveries, not attempts.
        options.concurrency = None;
        let mut inner = Vec::new();
        for (shard, engine) in &shared.shards {
            let consumer = engine.broker.consume(group.clone(), options.clone());
            inner.push((*shard, consumer.await?));
        }
        Ok(Self {
            shared,
            id: EventId::new(),
            prefetch,
            lease,
            inner,
            next: 0,
            ready: Vec::new(),
        })
    }

    /// Fetches from one of the shards. The shard's internal events, such as the notice of a dead letter under
    /// an id unknown here, are skipped.
    async fn fetch_more(&mut self, max: usize) -> Result<()> {
        self.shared.faults.before("fetch")?;
        let room = room(&self.shared, self.id, self.prefetch).await?;
        let (shard, batch) = self.fetch_any(max.min(room)).await?;
        let (batch, own): (Vec<_>, Vec<_>) = batch.into_iter().partition(|d| is_wrapped(&d.record));
        let shown = batch.iter().map(|delivery| {
            self.shared
                .hold(shard, &delivery.lease, self.id, self.lease);
            shown(shard, delivery)
        });
        self.ready.extend(shown);
        give_back(&self.shared, shard, &own, &Verdict::Ack).await?;
        if self.shared.faults.loses_shards() {
            // This consumer keeps its copies, and another member of the group gets the events too.
            let after = Duration::ZERO;
            give_back(&self.shared, shard, &batch, &Verdict::Release { after }).await?;
        } else if self.shared.faults.duplicates() {
            self.ready.extend(self.ready.first().cloned());
        }
        Ok(())
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

/// Waits until a consumer has room for another delivery, and says for how many. One that is paused waits at
/// its shards, where it learns of the end of the engine.
async fn room(shared: &Shared, consumer: EventId, prefetch: usize) -> Result<usize> {
    loop {
        let mut freed = pin!(shared.freed.notified());
        freed.as_mut().enable();
        shared.check_open()?;
        let (held, first_end) = shared.held_by(consumer);
        if held < prefetch || prefetch == 0 {
            return Ok(prefetch.saturating_sub(held).max(1));
        }
        tokio::select! {
            () = freed => {}
            () = tokio::time::sleep(first_end) => {}
        }
    }
}

/// The delivery as this engine shows it: without the failures, which it does not keep.
fn shown(shard: Shard, delivery: &Delivery) -> Delivery {
    let position = Position::new(shard, delivery.record.position.place());
    let lease = Lease::new(position, delivery.lease.words());
    Delivery::new(unwrap(&delivery.record, position), lease)
        .after(delivery.attempt, Vec::new())
        .retried(delivery.retried)
}

/// Settles deliveries of a shard without the consumer.
async fn give_back(
    shared: &Shared,
    shard: Shard,
    batch: &[Delivery],
    verdict: &Verdict,
) -> Result<()> {
    let engine = shared.shards.iter().find(|(known, _)| *known == shard);
    if let (false, Some((_, engine))) = (batch.is_empty(), engine) {
        let back = batch
            .iter()
            .map(|delivery| Settlement::new(delivery.lease.clone(), verdict.clone()));
        engine.broker.settle(back.collect()).await?;
    }
    Ok(())
}

impl Consumer for NarrowConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            while self.ready.is_empty() {
                self.fetch_more(max).await?;
            }
            let count = self.ready.len().min(max.max(1));
            Ok(self.ready.drain(..count).collect())
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
            self.prefetch = prefetch;
            for (_, consumer) in &mut self.inner {
                consumer.resume(prefetch).await?;
            }
            Ok(())
        })
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            for delivery in self.ready {
                let after = Duration::ZERO;
                let back = Settlement::new(delivery.lease, Verdict::Release { after });
                self.shared.settle_one(back).await?;
            }
            for (_, consumer) in self.inner {
                consumer.close().await?;
            }
            Ok(())
        })
    }
}
