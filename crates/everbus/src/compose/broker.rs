//! The `Broker` operations of a broker with a store beside it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus_core::dead_letters::MAX_PAGE;
use everbus_core::{
    ARCHIVE, Appended, Background, BoxFuture, Broker, BrokerLayer, Burial, Capabilities, Clock,
    Code, ConsumeOptions, Consumer, DeadLetterFilter, DeadLetters, Delivery, Error, Event,
    EventKey, Failure, GroupInfo, GroupName, GroupSpec, Lease, Result, Settlement, Store, Streams,
    SubscriptionInfo, Timestamp, Verdict, dead_letter_notice,
};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::archive;
use super::consumer::ConsumerBeside;
use super::dead_letters::original_of;
use super::waiting::Waiting;
use crate::guard;

/// What the broker and its consumers share.
pub(super) struct Shared {
    pub(super) broker: Arc<dyn Broker>,
    pub(super) store: Arc<dyn Store>,
    pub(super) clock: Arc<dyn Clock>,
    /// The capabilities of the broker.
    pub(super) offers: Capabilities,
    /// Notified when the clock was set: waiting events may be due.
    pub(super) jumped: Arc<Notify>,
    held: Mutex<HashMap<Lease, Held>>,
}

/// A delivery that a consumer holds.
#[derive(Clone)]
struct Held {
    group: GroupName,
    delivery: Delivery,
    waiting: Arc<Waiting>,
    /// The lease duration of the consumer.
    lease: Duration,
    /// When the lease ends, as far as this process knows.
    until: Timestamp,
    /// The events of the verdict are in the broker: repeating the verdict does not append them again.
    appended: Arc<AtomicBool>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<Lease, Held>> {
        self.held.lock()
    }

    /// Records deliveries with leases that began at `since`, and forgets deliveries whose lease ended
    /// without a verdict.
    pub(super) fn hold(
        &self,
        group: &GroupName,
        waiting: &Arc<Waiting>,
        batch: &[Delivery],
        since: Timestamp,
        lease: Duration,
    ) {
        let now = self.clock.now();
        let until = since.plus(lease);
        let mut held = self.lock();
        if held.len() + batch.len() > held.capacity() {
            held.retain(|_, held| held.until >= now);
        }
        for delivery in batch {
            let note = Held {
                group: group.clone(),
                delivery: delivery.clone(),
                waiting: waiting.clone(),
                lease,
                until: until.minus(delivery.held_for),
                appended: Arc::default(),
            };
            held.insert(delivery.lease.clone(), note);
        }
    }

    /// Splits deliveries: those whose event the group holds in no other delivery, and the rest.
    pub(super) fn apart(
        &self,
        group: &GroupName,
        batch: Vec<Delivery>,
    ) -> (Vec<Delivery>, Vec<Delivery>) {
        let now = self.clock.now();
        let held = self.lock();
        let held = held.values();
        let held = held.filter(|held| held.group == *group && held.until >= now);
        let mut keys: HashSet<EventKey> = held
            .map(|held| EventKey::of(&held.delivery.record.event))
            .collect();
        let mut is_first = |d: &Delivery| keys.insert(EventKey::of(&d.record.event));
        batch.into_iter().partition(|delivery| is_first(delivery))
    }

    /// The delivery of a lease. A verdict after the end of its lease is refused here: a broker without fencing
    /// tokens would apply it to another delivery of the event, and with them the store would have it already.
    fn held(&self, lease: &Lease) -> Option<Held> {
        let held = self.lock().get(lease).cloned()?;
        let is_over = held.until < self.clock.now();
        (!is_over).then_some(held)
    }
}

pub(super) struct Beside {
    shared: Arc<Shared>,
    /// The engine that the store belongs to: closed with the broker.
    store_broker: Arc<dyn Broker>,
    letters: Arc<dyn DeadLetters>,
    /// Ephemeral groups: the store keeps nothing for them, so they have no dead letters.
    ephemeral: Mutex<HashSet<GroupName>>,
}

/// What to tell the broker after the store is written.
enum Next {
    /// This verdict.
    Tell(Verdict),
    /// Nothing: the event waits in this process until it is due.
    Wait(Duration, Box<Delivery>),
}

impl Beside {
    pub(super) fn new(
        broker: Arc<dyn Broker>,
        store_broker: Arc<dyn Broker>,
        store: Arc<dyn Store>,
        letters: Arc<dyn DeadLetters>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let jumped = Arc::<Notify>::default();
        let wake = jumped.clone();
        clock.on_jump(Box::new(move || wake.notify_waiters()));
        // Follow-ups come before everything that the store gets: an event that the store has as handled, and
        // whose verdict the broker never got, would not run again.
        let offers = broker.capabilities().atomic_follow_ups(false);
        let shared = Arc::new(Shared {
            offers,
            broker,
            store,
            clock,
            jumped,
            held: Mutex::default(),
        });
        Self {
            shared,
            store_broker,
            letters,
            ephemeral: Mutex::default(),
        }
    }

    fn ephemeral(&self) -> MutexGuard<'_, HashSet<GroupName>> {
        self.ephemeral.lock()
    }

    /// Appends the events of a verdict before the verdict. A repetition uses the same ids, so the broker or
    /// the inboxes of the groups recognise duplicates.
    async fn append_first(&self, events: Vec<Event>) -> Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        let answers = match self.shared.broker.append(events.clone()).await {
            Ok(answers) => answers,
            // Where a batch is stored as a whole, one of them refuses the others.
            Err(error) if error.code() == Code::IdReused && events.len() > 1 => {
                let mut answers = Vec::with_capacity(events.len());
                for event in events {
                    answers.push(self.append_one(event).await);
                }
                answers
            }
            Err(error) if error.code() == Code::IdReused => vec![Err(error)],
            Err(error) => return Err(error),
        };
        answers.into_iter().try_for_each(|answer| match answer {
            // An earlier run appended it, perhaps with another time in its body. The first one counts.
            Err(error) if error.code() == Code::IdReused => {
                guard::log(|| {
                    tracing::warn!(target: "everbus::beside", %error, "an event that belongs to an outcome is there already with another body");
                });
                Ok(())
            }
            answer => answer.map(drop),
        })
    }

    async fn append_one(&self, event: Event) -> Result<Appended> {
        let answers = self.shared.broker.append(vec![event]).await?;
        let missing = || Err(Error::new(Code::Internal, "an append was not answered"));
        answers.into_iter().next().unwrap_or_else(missing)
    }

    /// Makes everything durable that must be durable before the broker gets the verdict.
    async fn prepare(&self, held: &Held, settlement: Settlement) -> Result<Next> {
        let Settlement {
            verdict,
            follow_ups,
            inbox,
            effect,
            ..
        } = settlement;
        if effect.is_some() {
            return Err(Error::new(
                Code::Unsupported,
                "this broker has no transactions for effects",
            )
            .hint("do the effect in the handler, with the context's idempotency key"));
        }
        if !held.appended.load(Ordering::Acquire) {
            self.append_first(follow_ups).await?;
            held.appended.store(true, Ordering::Release);
        }
        let store = &self.shared.store;
        let (group, record) = (held.group.clone(), held.delivery.record.clone());
        match verdict {
            Verdict::Ack => {
                // The earlier failures must not count if the event is ever delivered again.
                if inbox || !held.delivery.failures.is_empty() {
                    let original = original_of(&*self.letters, &record, &held.group).await?;
                    let both = match original.event.id() == record.event.id() {
                        true => vec![record],
                        // The broker may deliver the original once more.
                        false => vec![record, original],
                    };
                    store.record_handled(group, both).await?;
                }
                Ok(Next::Tell(Verdict::Ack))
            }
            Verdict::Skip { reason } => {
                store.record_skip(group, record, reason).await?;
                Ok(Next::Tell(Verdict::Ack))
            }
            Verdict::Retry { after, failure } => {
                store.record_failure(group, record, failure.clone()).await?;
                let mut again = held.delivery.clone();
                again.attempt += 1;
                again.held_for = Duration::ZERO;
                again.failures.push(failure.clone());
                let verdict = Verdict::Retry { after, failure };
                Ok(self.later(after, again, verdict))
            }
            Verdict::Dead { failure } if self.ephemeral().contains(&group) => {
                Ok(Next::Tell(Verdict::Dead { failure }))
            }
            Verdict::Dead { failure } => {
                self.bury(held, failure).await?;
                Ok(Next::Tell(Verdict::Ack))
            }
            Verdict::Release { after } => {
                let again = held.delivery.clone();
                Ok(self.later(after, again, Verdict::Release { after }))
            }
        }
    }

    /// Whether the broker supports a delay of this length.
    fn can_delay(&self, after: Duration) -> bool {
        self.shared.offers.native_delay || after.is_zero()
    }

    /// Leaves the wait to the broker if it supports delays, and to this process otherwise.
    fn later(&self, after: Duration, again: Delivery, verdict: Verdict) -> Next {
        if self.can_delay(after) {
            Next::Tell(verdict)
        } else {
            Next::Wait(after, Box::new(again))
        }
    }

    /// Puts the dead letter into the store, then publishes its event. Repeating both is harmless.
    async fn bury(&self, held: &Held, failure: Option<Failure>) -> Result<()> {
        let Held {
            group, delivery, ..
        } = held;
        let mut failures = delivery.failures.clone();
        // The event is given up because of recorded failures: this delivery was no attempt.
        let was_none = failure.is_none() && !failures.is_empty();
        let attempts = delivery.attempt.saturating_sub(u32::from(was_none));
        failures.extend(failure);
        let died_at = failures
            .last()
            .map_or_else(|| self.shared.clock.now(), |f| f.at);
        // A copy that was sent back from the dead letters dies under the id of its original.
        let record = original_of(&*self.letters, &delivery.record, group).await?;
        let mut letter = Burial::new(record.clone(), group.clone(), attempts, failures, died_at);
        if record.event.id() != delivery.record.event.id() {
            letter = letter.of_sent_back();
        }
        self.shared.store.bury(letter).await?;
        // The store has added up the attempts of all earlier deaths.
        let known = self.letters.get(record.event.id()).await?;
        let tenant = record.event.tenant();
        let letter = known
            .iter()
            .find(|l| l.group == *group && l.record.event.tenant() == tenant)
            .ok_or_else(|| Error::new(Code::Internal, "a dead letter was put and is not there"))?;
        let last = letter.failures.last();
        let notice = dead_letter_notice(&record, group, letter.attempts, last, died_at);
        self.append_first(notice.into_iter().collect()).await
    }

    /// Keeps an event in this process until it is due. Its lease is extended past the wait at once, so that
    /// it does not depend on the next extension. If the broker does not answer, the consumer's keeper
    /// extends the lease in time.
    async fn wait(&self, held: &Held, after: Duration, again: Delivery) -> Result<()> {
        let lease = again.lease.clone();
        let by = after.saturating_add(held.lease);
        let extended = self.shared.broker.extend(vec![lease.clone()], by).await;
        self.shared.lock().remove(&lease);
        if let Ok(answers) = extended
            && let Some(Err(lost)) = answers.into_iter().next()
            && lost.code() == Code::LeaseLost
        {
            return Err(lost);
        }
        let due = self.shared.clock.now().plus(after);
        if held.waiting.add(due, again) {
            return Ok(());
        }
        // The consumer has closed, so the event would never be handed out here: the broker may deliver it
        // early to another consumer.
        let after = Duration::ZERO;
        let release = Settlement::new(lease, Verdict::Release { after });
        let answers = self.shared.broker.settle(vec![release]).await?;
        answers.into_iter().next().unwrap_or(Ok(()))
    }

    async fn settle_all(&self, settlements: Vec<Settlement>) -> Result<Vec<Result<()>>> {
        let mut answers: Vec<Result<()>> = Vec::with_capacity(settlements.len());
        let mut told = Vec::new();
        let mut tell = Vec::new();
        for (index, settlement) in settlements.into_iter().enumerate() {
            let lease = settlement.lease.clone();
            let held = self.shared.held(&lease);
            let next = match &held {
                Some(held) => self.prepare(held, settlement).await,
                // Settled already, or never handed out here. The broker must not get a verdict that the
                // store does not have.
                None => Err(Error::new(
                    Code::LeaseLost,
                    format!("the lease on event {} had ended", lease.position()),
                )),
            };
            answers.push(match (next, held) {
                (Ok(Next::Tell(verdict)), _) => {
                    told.push(index);
                    tell.push(Settlement::new(lease, verdict));
                    Ok(())
                }
                (Ok(Next::Wait(after, delivery)), Some(held)) => {
                    self.wait(&held, after, *delivery).await
                }
                (Ok(Next::Wait(..)), None) => Ok(()),
                (Err(error), _) => Err(error),
            });
        }
        if tell.is_empty() {
            return Ok(answers);
        }
        let leases: Vec<Lease> = tell.iter().map(|s| s.lease.clone()).collect();
        let from_broker = match self.shared.broker.settle(tell).await {
            Ok(from_broker) => from_broker,
            Err(error) if told.len() == answers.len() => return Err(error),
            Err(error) => {
                // The other events wait in this process already: they must not be settled again.
                for index in told {
                    answers[index] = Err(error.clone());
                }
                return Ok(answers);
            }
        };
        let mut held = self.shared.lock();
        for ((index, lease), answer) in told.into_iter().zip(leases).zip(from_broker) {
            let over = match &answer {
                Ok(()) => true,
                Err(error) => error.code() == Code::LeaseLost,
            };
            if over {
                held.remove(&lease);
            }
            answers[index] = answer;
        }
        Ok(answers)
    }
}

impl BrokerLayer for Beside {
    fn inner(&self) -> &dyn Broker {
        &*self.shared.broker
    }

    /// The capabilities of the broker itself, without what this layer adds. Follow-ups and dead letters are
    /// durable before the broker gets the verdict, and no effect runs in the transaction of an ack.
    fn capabilities(&self) -> Capabilities {
        let offers = self.shared.offers.clone();
        let mut offers = offers.atomic_dead_letter(false);
        offers.transaction = None;
        // A dead letter is kept by the store alone.
        offers.durability = offers
            .durability
            .min(self.store_broker.capabilities().durability);
        offers
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        Box::pin(async move {
            let (name, ephemeral) = (group.name.clone(), group.ephemeral);
            let declared = self.shared.broker.declare(group).await?;
            if ephemeral {
                self.ephemeral().insert(name);
            }
            Ok(declared)
        })
    }

    /// Removes the group from the store too: a new group with the same name has handled nothing.
    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if group.as_str() == ARCHIVE {
                let what = "without the archive no event reaches the store";
                let error = Error::new(Code::InvalidSetting, what);
                return Err(error.hint("to do without a store, open the broker without one"));
            }
            // The store first: after a crash in between, the group still exists and can be removed again.
            match self.store_broker.remove_group(group.clone()).await {
                Err(error) if error.code() != Code::GroupNotFound => return Err(error),
                _ => {}
            }
            self.shared.broker.remove_group(group.clone()).await?;
            self.ephemeral().remove(&group);
            self.shared.lock().retain(|_, held| held.group != group);
            Ok(())
        })
    }

    fn declare_streams(&self, streams: Streams) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.shared.broker.declare_streams(streams).await?;
            // The archive group must read the new streams too.
            archive::declare(&*self.shared.broker).await
        })
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            let until = self.shared.clock.now().plus(by);
            let answers = self.shared.broker.extend(leases.clone(), by).await?;
            let mut held = self.shared.lock();
            for (lease, answer) in leases.iter().zip(&answers) {
                if let (Ok(()), Some(held)) = (answer, held.get_mut(lease)) {
                    held.until = until;
                }
            }
            Ok(answers)
        })
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            let lease = options.lease;
            // A dead letter that the broker made by itself would be missing in the store.
            let mut options = options.no_handler_after(Duration::MAX);
            if !self.shared.offers.native_delay {
                // Events that wait here are unsettled. They must not count against the concurrency of the
                // consumer.
                options.concurrency = None;
            }
            let inner = self.shared.broker.consume(group.clone(), options).await?;
            let consumer = ConsumerBeside::new(inner, group, self.shared.clone(), lease);
            Ok(Box::new(consumer) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(self.settle_all(settlements))
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        Box::pin(async move {
            let mut groups = self.shared.broker.inspect().await?;
            for info in &mut groups {
                let filter = DeadLetterFilter {
                    group: Some(info.name.clone()),
                    ..DeadLetterFilter::default()
                };
                info.dead_letters = self.letters.count(filter.clone()).await?;
                for tally in self.letters.tally(filter, MAX_PAGE).await? {
                    let lag = info.types.entry(tally.event_type.into()).or_default();
                    lag.dead_letters += tally.count;
                }
            }
            Ok(groups)
        })
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let closed = self.shared.broker.close().await;
            self.store_broker.close().await.and(closed)
        })
    }
}

impl Background for Beside {
    fn run(&self) -> BoxFuture<'static, ()> {
        let (broker, store) = (self.shared.broker.clone(), self.shared.store.clone());
        Box::pin(archive::run(broker, store))
    }
}
