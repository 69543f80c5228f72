//! The trait `Broker` for a broker with a store beside it. Settlements are in `settle`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use everbus_core::dead_letters::MAX_PAGE;
use everbus_core::{
    ARCHIVE, Background, BoxFuture, Broker, BrokerLayer, Capabilities, Clock, Code, ConsumeOptions,
    Consumer, DeadLetterFilter, DeadLetters, Delivery, Error, EventKey, GroupInfo, GroupName,
    GroupSpec, Lease, Result, Settlement, Store, Streams, SubscriptionInfo, Timestamp,
};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::archive;
use super::consumer::ConsumerBeside;
use super::waiting::Waiting;

/// What the broker and its consumers share.
pub(super) struct Shared {
    pub(super) broker: Arc<dyn Broker>,
    pub(super) store: Arc<dyn Store>,
    pub(super) clock: Arc<dyn Clock>,
    /// The capabilities of the broker.
    pub(super) offers: Capabilities,
    /// Notified when the clock jumps, because waiting events may be due then.
    pub(super) jumped: Arc<Notify>,
    held: Mutex<HashMap<Lease, Held>>,
}

/// A delivery that a consumer holds.
#[derive(Clone)]
pub(super) struct Held {
    pub(super) group: GroupName,
    pub(super) delivery: Delivery,
    pub(super) waiting: Arc<Waiting>,
    /// The lease duration of the consumer.
    pub(super) lease: Duration,
    /// When the lease ends, as far as this process knows.
    until: Timestamp,
    /// Whether the events of the verdict are in the broker. If so, repeating the verdict does not append them
    /// again.
    pub(super) appended: Arc<AtomicBool>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<Lease, Held>> {
        self.held.lock()
    }

    /// Records deliveries whose leases began at `since`. When the table is full, first forgets deliveries whose
    /// lease ended without a verdict.
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

    /// Splits deliveries into first and second copies: a second copy is of an event that this process already
    /// holds for the group, or that is earlier in the batch.
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

    /// The delivery of a lease; `None` if it is not known or has ended. A verdict after the end of the lease must
    /// reach neither the store nor the broker: the store would record it although the broker refuses it, and a
    /// broker without fencing tokens would apply it to another delivery of the event.
    pub(super) fn held(&self, lease: &Lease) -> Option<Held> {
        let held = self.lock().get(lease).cloned()?;
        let is_over = held.until < self.clock.now();
        (!is_over).then_some(held)
    }
}

pub(super) struct Beside {
    pub(super) shared: Arc<Shared>,
    /// The broker of the engine that the store belongs to. It is closed together with the broker.
    store_broker: Arc<dyn Broker>,
    pub(super) letters: Arc<dyn DeadLetters>,
    /// The ephemeral groups. The store keeps nothing for them, so they have no dead letters.
    ephemeral: Mutex<HashSet<GroupName>>,
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
        // Follow-ups are appended before the store is written, so they are not atomic with the ack. In the other
        // order a crash in between would lose them: the inbox knows the event, so the handler does not run again.
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

    pub(super) fn ephemeral(&self) -> MutexGuard<'_, HashSet<GroupName>> {
        self.ephemeral.lock()
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
        // Read from the broker each time, because it is known only after the streams are declared.
        offers.drops_by_age = self.shared.broker.capabilities().drops_by_age;
        // Only the store keeps dead letters, so they are only as durable as the store.
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

    /// Removes the group from the store too, so that a new group with the same name has handled nothing.
    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if group.as_str() == ARCHIVE {
                let what = "without the archive no event reaches the store";
                let error = Error::new(Code::InvalidSetting, what);
                return Err(error.hint("to do without a store, open the broker without one"));
            }
            // The store comes first: after a crash in between, the group still exists and can be removed again.
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
            // The broker must not make dead letters by itself, because the store would not have them. It hands
            // out an event without a handler with a failure that says so, and this layer dead-letters it.
            let unhandled = options.no_handler_after;
            let mut options = options.no_handler_after(Duration::MAX);
            options.hand_out_unhandled = Some(unhandled);
            if !self.shared.offers.native_delay {
                // Events that wait in this process are not settled in the broker. They must not count against
                // the concurrency of the consumer.
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

    fn ping(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.shared.broker.ping().await?;
            self.store_broker.ping().await
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
