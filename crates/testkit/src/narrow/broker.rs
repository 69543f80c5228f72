//! The broker of the narrow engine: the required verbs, over several shards.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, Clock, Code, ConsumeOptions, Consumer, Cursor,
    Durability, Engine, Error, Event, EventId, Failure, FailureKind, GroupInfo, GroupName,
    GroupSpec, Lease, Position, Result, Settlement, Shard, SubscriptionInfo, Timestamp, Verdict,
};
use tokio::sync::Notify;

use super::consumer::NarrowConsumer;
use super::faults::Faults;
use super::wire::wrap;

pub(super) struct Narrow {
    pub(super) shared: Arc<Shared>,
}

/// What the broker and its consumers share.
pub(super) struct Shared {
    pub(super) shards: Vec<(Shard, Engine)>,
    pub(super) faults: Faults,
    clock: Arc<dyn Clock>,
    closed: AtomicBool,
    /// Events that are held now, by shard, place and group. A settlement with an older lease counts as one
    /// with the current lease: nothing here is fenced.
    held: Mutex<HashMap<(Shard, u64, u64), Held>>,
    /// A consumer may hold more than before: something was settled, or the clock was set.
    pub(super) freed: Arc<Notify>,
    /// The ids of a subscription in the other shards, by the one in the first.
    subscriptions: Mutex<HashMap<EventId, Vec<EventId>>>,
}

/// An event that a consumer holds.
struct Held {
    /// The lease of the shard's own engine.
    lease: Lease,
    consumer: EventId,
    until: Timestamp,
}

impl Narrow {
    pub(super) fn new(clock: &Arc<dyn Clock>, shards: usize, faults: Faults) -> Result<Self> {
        let open = |number: usize| {
            let shard = Shard::named(&format!("narrow/{number}"))?;
            let options = everbus_memory::Options {
                clock: clock.clone(),
            };
            Ok((shard, everbus_memory::open(options)))
        };
        let shards: Result<Vec<_>> = (0..shards.max(1)).map(open).collect();
        let freed = Arc::<Notify>::default();
        let wake = freed.clone();
        clock.on_jump(Box::new(move || wake.notify_waiters()));
        Ok(Self {
            shared: Arc::new(Shared {
                shards: shards?,
                faults,
                clock: clock.clone(),
                closed: AtomicBool::new(false),
                held: Mutex::default(),
                freed,
                subscriptions: Mutex::default(),
            }),
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn key(lease: &Lease) -> (Shard, u64, u64) {
    let position = lease.position();
    (position.shard(), position.place(), lease.words()[0])
}

fn away() -> Error {
    Error::new(Code::Internal, "an answer of a shard is missing")
}

impl Shared {
    /// The shard of an event: by its key, so that order holds within a key and nowhere else.
    fn shard_of(&self, event: &Event) -> usize {
        let key = event.ordering_key();
        let key = key.map_or_else(|| event.id().to_string(), std::borrow::Cow::into_owned);
        let sum = key.bytes().fold(0_usize, |sum, byte| {
            sum.wrapping_mul(31).wrapping_add(usize::from(byte))
        });
        sum % self.shards.len()
    }

    fn engine(&self, shard: Shard) -> Result<&Engine> {
        let found = self.shards.iter().find(|(known, _)| *known == shard);
        found
            .map(|(_, engine)| engine)
            .ok_or_else(|| Error::new(Code::LeaseLost, "the lease is of a shard that is not here"))
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::new(
                Code::EventBusShutdownError,
                "the narrow engine is closed",
            ));
        }
        Ok(())
    }

    /// Notes who holds an event from now on, and with which lease.
    pub(super) fn hold(&self, shard: Shard, lease: &Lease, consumer: EventId, by: Duration) {
        let key = (shard, lease.position().place(), lease.words()[0]);
        let held = Held {
            lease: lease.clone(),
            consumer,
            until: self.clock.now().plus(by),
        };
        lock(&self.held).insert(key, held);
    }

    /// How many events a consumer holds, and how long it is until the first of its leases ends.
    pub(super) fn held_by(&self, consumer: EventId) -> (usize, Duration) {
        let now = self.clock.now();
        let held = lock(&self.held);
        let ends = held
            .values()
            .filter(|held| held.consumer == consumer && held.until > now)
            .map(|held| held.until.since(now));
        ends.fold((0, Duration::MAX), |(count, first), end| {
            (count + 1, first.min(end))
        })
    }

    /// The lease of the shard's own engine under which the event is held now, by any consumer.
    fn current(&self, lease: &Lease) -> Option<Lease> {
        lock(&self.held)
            .get(&key(lease))
            .map(|held| held.lease.clone())
    }

    /// The event is no longer held with this lease of the shard's own engine.
    fn free(&self, lease: &Lease, own: &Lease) {
        let mut held = lock(&self.held);
        if held.get(&key(lease)).is_some_and(|held| held.lease == *own) {
            held.remove(&key(lease));
        }
        drop(held);
        self.freed.notify_waiters();
    }

    async fn append_one(&self, event: Event) -> Result<Appended> {
        let (shard, engine) = &self.shards[self.shard_of(&event)];
        let id = event.id();
        let copies = 1 + usize::from(self.faults.duplicates());
        let mut first = None;
        for _ in 0..copies {
            let answers = engine.broker.append(vec![wrap(&event)?]).await?;
            let appended = answers.into_iter().next().ok_or_else(away)??;
            first.get_or_insert(appended);
        }
        let stored = first.ok_or_else(away)?;
        let position = Position::new(*shard, stored.position.place());
        Ok(Appended::new(id, position, stored.received_at))
    }

    /// One settlement: follow-ups first, then the verdict, as two separate steps.
    pub(super) async fn settle_one(&self, settlement: Settlement) -> Result<()> {
        if settlement.effect.is_some() {
            return Err(Error::new(Code::Unsupported, "there are no transactions"));
        }
        for event in settlement.follow_ups {
            self.append_one(event).await?;
        }
        let Some(lease) = self.current(&settlement.lease) else {
            // The event is already settled; this engine does not record by which consumer.
            return Ok(());
        };
        let now = self.clock.now();
        let counted = |text: &str| Failure::new(1, now, FailureKind::Error, text);
        let verdict = match settlement.verdict {
            // There is no delay, and the failure text is not kept.
            Verdict::Retry { .. } | Verdict::Release { .. } => Verdict::Retry {
                after: Duration::ZERO,
                failure: counted("handed out and not acked"),
            },
            verdict => verdict,
        };
        let engine = self.engine(settlement.lease.position().shard())?;
        let answers = engine
            .broker
            .settle(vec![Settlement::new(lease.clone(), verdict)])
            .await?;
        match answers.into_iter().next().ok_or_else(away)? {
            // Nothing is fenced: a late settlement gets a success.
            Err(error) if error.code() != Code::LeaseLost => return Err(error),
            _ => self.free(&settlement.lease, &lease),
        }
        Ok(())
    }

    async fn extend_one(&self, lease: &Lease, by: Duration) -> Result<()> {
        let lost = || Error::new(Code::LeaseLost, "the event is not held");
        let own = self.current(lease).ok_or_else(lost)?;
        let engine = self.engine(lease.position().shard())?;
        let answers = engine.broker.extend(vec![own], by).await?;
        answers.into_iter().next().ok_or_else(away)??;
        if let Some(held) = lock(&self.held).get_mut(&key(lease)) {
            held.until = self.clock.now().plus(by);
        }
        Ok(())
    }
}

impl Broker for Narrow {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("narrow", Durability::Memory)
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        Box::pin(async move {
            self.shared.faults.before("declare")?;
            let mut first: Option<Vec<SubscriptionInfo>> = None;
            for (_, engine) in &self.shared.shards {
                let declared = engine.broker.declare(group.clone()).await?;
                match &first {
                    None => first = Some(declared),
                    Some(first) => {
                        let mut known = lock(&self.shared.subscriptions);
                        for (of_first, other) in first.iter().zip(declared) {
                            let others = known.entry(of_first.id).or_default();
                            if !others.contains(&other.id) {
                                others.push(other.id);
                            }
                        }
                    }
                }
            }
            self.shared.faults.after("declare")?;
            first.ok_or_else(away)
        })
    }

    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.shared.faults.before("retract")?;
            let others = lock(&self.shared.subscriptions).remove(&subscription);
            let ids = [subscription].into_iter().chain(others.unwrap_or_default());
            for ((_, engine), id) in self.shared.shards.iter().zip(ids) {
                engine.broker.retract(id).await?;
            }
            Ok(())
        })
    }

    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.shared.faults.before("remove_group")?;
            for (_, engine) in &self.shared.shards {
                engine.broker.remove_group(group.clone()).await?;
            }
            Ok(())
        })
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        Box::pin(async move {
            self.shared.check_open()?;
            self.shared.faults.before("append")?;
            let mut answers = Vec::with_capacity(batch.len());
            for event in batch {
                answers.push(self.shared.append_one(event).await);
                // Closed meanwhile: none of the batch is acknowledged.
                self.shared.check_open()?;
            }
            self.shared.faults.after("append")?;
            Ok(answers)
        })
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            self.shared.faults.before("consume")?;
            let consumer = NarrowConsumer::open(self.shared.clone(), group, options).await?;
            Ok(Box::new(consumer) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            self.shared.check_open()?;
            self.shared.faults.before("settle")?;
            let mut answers = Vec::with_capacity(settlements.len());
            for settlement in settlements {
                // Each may fail alone, before or after it took effect.
                let answer = match self.shared.faults.before("settle") {
                    Ok(()) => match self.shared.settle_one(settlement).await {
                        Ok(()) => self.shared.faults.after("settle"),
                        refused => refused,
                    },
                    away => away,
                };
                answers.push(answer);
            }
            self.shared.faults.after("settle")?;
            Ok(answers)
        })
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            self.shared.faults.before("extend")?;
            let mut answers = Vec::with_capacity(leases.len());
            for lease in &leases {
                answers.push(self.shared.extend_one(lease, by).await);
            }
            Ok(answers)
        })
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        Box::pin(async move {
            self.shared.faults.before("inspect")?;
            let mut groups: Vec<GroupInfo> = Vec::new();
            for (shard, engine) in &self.shared.shards {
                for mut info in engine.broker.inspect().await? {
                    let place = info.position.place(Shard::ONLY);
                    info.position = Cursor::from(Position::new(*shard, place));
                    match groups.iter_mut().find(|known| known.name == info.name) {
                        None => groups.push(info),
                        Some(known) => {
                            known.position.advance_to(&info.position);
                            known.behind += info.behind;
                            known.in_flight += info.in_flight;
                            known.waiting += info.waiting;
                            known.unhandled += info.unhandled;
                            known.dead_letters += info.dead_letters;
                            known.oldest = [known.oldest, info.oldest].into_iter().flatten().min();
                            known.behind_for = known.behind_for.max(info.behind_for);
                            known.active_at = known.active_at.max(info.active_at);
                            for (event_type, lag) in info.types {
                                known.types.entry(event_type).or_default().add(&lag);
                            }
                        }
                    }
                }
            }
            Ok(groups)
        })
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.shared.closed.store(true, Ordering::SeqCst);
            self.shared.freed.notify_waiters();
            for (_, engine) in &self.shared.shards {
                engine.broker.close().await?;
            }
            Ok(())
        })
    }
}
