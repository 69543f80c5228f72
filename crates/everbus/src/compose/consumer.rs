//! A consumer of a broker with a store beside it: adds the failures of earlier attempts from the store, and
//! hands out events again that wait in this process.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    BoxFuture, Code, Consumer, Deduplication, Delivery, EventKey, Failure, FailureKind, GroupName,
    Pattern, Result, Settlement, Timestamp, Verdict,
};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::broker::Shared;
use super::dead_letters::RETRY_OF;
use super::waiting::Waiting;
use crate::guard;

pub(super) struct ConsumerBeside {
    inner: Box<dyn Consumer>,
    group: GroupName,
    shared: Arc<Shared>,
    waiting: Arc<Waiting>,
    /// Deliveries that were fetched from the broker and whose failures have not been read from the store yet.
    fetched: Vec<Delivery>,
    /// When `fetched` was fetched, which is when the leases began.
    fetched_at: Timestamp,
    paused: bool,
    lease: Duration,
    keeper: Keeper,
}

/// The task that extends the leases of waiting events. It ends when the consumer is closed or dropped. The
/// waiting events are then released; otherwise no other consumer would get them until they are due.
struct Keeper {
    task: JoinHandle<()>,
    shared: Arc<Shared>,
    waiting: Arc<Waiting>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.task.abort();
        let back = given_back(self.waiting.take_all());
        if let (false, Ok(runtime)) = (back.is_empty(), Handle::try_current()) {
            let shared = self.shared.clone();
            runtime.spawn(async move { shared.broker.settle(back).await });
        }
    }
}

fn given_back(deliveries: impl IntoIterator<Item = Delivery>) -> Vec<Settlement> {
    let after = Duration::ZERO;
    deliveries
        .into_iter()
        .map(|delivery| Settlement::new(delivery.lease, Verdict::Release { after }))
        .collect()
}

impl ConsumerBeside {
    pub(super) fn new(
        inner: Box<dyn Consumer>,
        group: GroupName,
        shared: Arc<Shared>,
        lease: Duration,
    ) -> Self {
        let waiting = Arc::<Waiting>::default();
        let keeper = Keeper {
            task: tokio::spawn(keep(shared.clone(), waiting.clone(), lease)),
            shared: shared.clone(),
            waiting: waiting.clone(),
        };
        Self {
            inner,
            group,
            shared,
            waiting,
            fetched: Vec::new(),
            fetched_at: Timestamp::EPOCH,
            paused: false,
            lease,
            keeper,
        }
    }

    /// Waits for deliveries and records them. The result is empty if all of them have to wait.
    async fn next_batch(&mut self, max: usize) -> Result<Vec<Delivery>> {
        // If the store did not answer before the leases ended, the broker delivers these events again.
        if self.fetched_at.plus(self.lease) <= self.shared.clock.now() {
            self.fetched.clear();
        }
        while self.fetched.is_empty() {
            // Registered before the check, so that no notification between the two is lost.
            let mut changed = pin!(self.waiting.changed.notified());
            changed.as_mut().enable();
            let mut jumped = pin!(self.shared.jumped.notified());
            jumped.as_mut().enable();
            let now = self.shared.clock.now();
            let due = if self.paused {
                Vec::new()
            } else {
                self.waiting.take_due(now, max.max(1))
            };
            if !due.is_empty() {
                return Ok(self.hand_out(due, now));
            }
            let next = self.waiting.next_due();
            let nap = next.map_or(Duration::MAX, |due| due.since(now));
            // The broker's fetch is cancel safe.
            tokio::select! {
                biased;
                batch = self.inner.fetch(max) => {
                    self.fetched = batch?;
                    self.fetched_at = self.shared.clock.now();
                }
                () = changed => {}
                () = jumped => {}
                () = tokio::time::sleep(nap), if next.is_some() && !self.paused => {}
            }
        }
        // A handler must know its earlier failures. If the store cannot be read, `fetched` stays, and the next
        // call reads the store again.
        let batch = with_failures(&self.shared, &self.group, self.fetched.clone()).await?;
        self.fetched.clear();
        Ok(self.hand_out(batch, self.fetched_at))
    }

    /// Records deliveries and returns those to handle now. If the broker may deliver an event twice, the second
    /// copy waits until the first one is settled, because only then does the inbox know the event.
    fn hand_out(&self, batch: Vec<Delivery>, since: Timestamp) -> Vec<Delivery> {
        let (batch, twins) = match self.shared.offers.deduplication {
            Deduplication::WhileRetained => (batch, Vec::new()),
            _ => self.shared.apart(&self.group, batch),
        };
        let due = self.shared.clock.now().plus(TWINS_WAIT);
        for twin in twins {
            self.waiting.add(due, twin);
        }
        self.shared
            .hold(&self.group, &self.waiting, &batch, since, self.lease);
        batch
    }
}

/// How long the second copy of an event waits before this process checks again whether the first is settled.
const TWINS_WAIT: Duration = Duration::from_millis(50);

/// An event with this many more deliveries than outcomes is taken for a poison event that kills its process. A
/// smaller number proves nothing, because a broker's delivery count includes released deliveries: NATS counts
/// each time that a process without a handler releases an event, about 35 times until the event is given up
/// after a day.
const UNEXPLAINED: u32 = 40;

/// Adds the failures of earlier attempts from the store, and sets the attempt number from them if the broker
/// counts deliveries and not attempts. If the broker counts attempts, the store is not read for first attempts.
async fn with_failures(
    shared: &Shared,
    group: &GroupName,
    mut batch: Vec<Delivery>,
) -> Result<Vec<Delivery>> {
    let exact = shared.offers.exact_attempts;
    for delivery in &mut batch {
        delivery.retried |= delivery.record.event.metadata().contains_key(RETRY_OF);
    }
    let mut again: Vec<&mut Delivery> = batch.iter_mut().collect();
    again.retain(|delivery| !exact || delivery.attempt > 1);
    if again.is_empty() {
        return Ok(batch);
    }
    let keys = again.iter().map(|d| EventKey::of(&d.record.event));
    let failures = shared.store.failures(group.clone(), keys.collect());
    for (delivery, kept) in again.into_iter().zip(failures.await?) {
        let begun = kept.last().map_or(0, |last| last.attempt);
        let mut crashes = std::mem::take(&mut delivery.failures);
        delivery.failures = kept;
        // Failures that only the broker knows: it could not read the event, or no process has a handler for it.
        let is_final =
            |f: &Failure| matches!(f.kind, FailureKind::Corrupt | FailureKind::NoHandler);
        let last: Vec<Failure> = crashes.extract_if(.., |f| is_final(f)).collect();
        if exact {
            // Only the broker knows the attempts that ended because their process died.
            let crashes = crashes.into_iter().filter(|f| f.kind == FailureKind::Crash);
            delivery.failures.extend(crashes);
            delivery.failures.sort_by_key(|failure| failure.attempt);
            delivery.attempt = delivery.attempt.max(begun + 1);
        } else if last.is_empty() && delivery.attempt > begun.saturating_add(UNEXPLAINED) {
            let (count, now) = (delivery.attempt - 1, shared.clock.now());
            let text = format!("delivered {count} times, {begun} of them with an outcome");
            let mut crash = Failure::new(count, now, FailureKind::Crash, text);
            crash.alone = true;
            delivery.failures.push(crash);
        } else {
            delivery.attempt = begun + 1;
        }
        delivery.failures.extend(last);
    }
    Ok(batch)
}

/// Extends the leases of waiting events three times per lease duration. Each extension lasts a lease duration
/// longer than the longest wait. Forgets events whose lease was lost.
async fn keep(shared: Arc<Shared>, waiting: Arc<Waiting>, lease: Duration) {
    loop {
        tokio::time::sleep(lease / 3).await;
        let leases = waiting.leases();
        if leases.is_empty() {
            continue;
        }
        let longest = waiting.longest(shared.clock.now());
        let by = longest.saturating_add(lease);
        match shared.broker.extend(leases.clone(), by).await {
            Ok(answers) => {
                for (lease, answer) in leases.iter().zip(answers) {
                    if answer.is_err_and(|e| e.code() == Code::LeaseLost) {
                        waiting.forget(lease);
                    }
                }
            }
            Err(error) if error.code() == Code::EventBusShutdownError => return,
            Err(error) => guard::log(|| {
                tracing::warn!(target: "everbus::beside", %error, "leases of waiting events could not be extended");
            }),
        }
    }
}

impl Consumer for ConsumerBeside {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            loop {
                let batch = self.next_batch(max).await?;
                if !batch.is_empty() {
                    return Ok(batch);
                }
            }
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.inner.set_handled(handled);
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.paused = true;
            let back = given_back(std::mem::take(&mut self.fetched));
            if !back.is_empty() {
                // If this fails, other consumers get the events when their leases end.
                let _ = self.shared.broker.settle(back).await;
            }
            self.inner.pause().await
        })
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        self.paused = prefetch == 0;
        self.inner.resume(prefetch)
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            let Self {
                inner,
                shared,
                waiting,
                fetched,
                keeper,
                ..
            } = *self;
            let back = given_back(waiting.take_all().into_iter().chain(fetched));
            drop(keeper);
            if !back.is_empty() {
                // Other consumers get the events at once, or if this fails, when the leases end.
                let _ = shared.broker.settle(back).await;
            }
            inner.close().await
        })
    }
}
