//! An engine that delivers every event twice, to find handlers that are not idempotent.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    BoxFuture, Broker, BrokerLayer, Code, ConsumeOptions, Consumer, Delivery, Engine, Error,
    GroupInfo, GroupName, Lease, Pattern, Position, Result, Settled, SettledOutcome, Settlement,
    Verdict,
};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Wraps an engine so that every handled or skipped event is delivered once more, as after a lost ack.
///
/// A delivery that the engine has settled is delivered again, unchanged, to the same consumer. The outcome of the copy
/// is dropped: its settlement returns `Ok` and never reaches the engine. So a plain handler runs twice for every event,
/// and one that is [`idempotent`](crate::Route::idempotent) or works [in a transaction](crate::sqlite::in_transaction)
/// runs once. Events that are retried, dead-lettered or released are not repeated, nor events that were settled after
/// their consumer had closed.
///
/// [`TestBusBuilder::duplicate_deliveries`](super::TestBusBuilder::duplicate_deliveries) does this for a
/// test bus.
///
/// ```
/// use std::sync::atomic::{AtomicU32, Ordering};
/// use everbus::testing::Duplicator;
/// use everbus::{Bus, BusOptions, Router, to};
/// use serde_json::json;
///
/// static PLAIN: AtomicU32 = AtomicU32::new(0);
/// static CAREFUL: AtomicU32 = AtomicU32::new(0);
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let engine = Bus::open("memory:").await?.engine().clone();
/// let bus = Bus::with_engine(Duplicator::wrap(engine), BusOptions::default())?;
/// let router = Router::new()
///     .on("user.created", to(|| async { PLAIN.fetch_add(1, Ordering::SeqCst); }).group("plain"))
///     .on("user.created", to(|| async { CAREFUL.fetch_add(1, Ordering::SeqCst); }).group("careful").idempotent());
/// bus.mount(router).await?;
/// bus.start().await?;
/// bus.publish(("user.created", json!({}))).await?.settled().await?;
/// assert_eq!(PLAIN.load(Ordering::SeqCst), 2);
/// assert_eq!(CAREFUL.load(Ordering::SeqCst), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Duplicator;

impl Duplicator {
    /// The same engine, delivering every event twice.
    pub fn wrap(engine: Engine) -> Engine {
        let copies = Arc::<Copies>::default();
        let settled = engine.settled.map(|inner| {
            let copies = copies.clone();
            Arc::new(BothSettled { inner, copies }) as Arc<dyn Settled>
        });
        Engine {
            broker: Arc::new(Twice {
                inner: engine.broker,
                copies,
            }),
            settled,
            ..engine
        }
    }
}

/// The prefix of the leases of repeated deliveries.
const MARK: &str = "everbus-duplicate-";

/// Whether a lease belongs to a repeated delivery.
pub(super) fn is_copy(lease: &Lease) -> bool {
    lease
        .text()
        .map(AsRef::as_ref)
        .is_some_and(|text: &str| text.starts_with(MARK))
}

struct Twice {
    inner: Arc<dyn Broker>,
    copies: Arc<Copies>,
}

/// Deliveries that may be repeated, and their copies.
#[derive(Default)]
struct Copies {
    state: Mutex<State>,
    /// Notified when a copy begins to wait, or is done.
    changed: Notify,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Delivered by the engine and not settled.
    first: HashMap<Lease, First>,
    /// Copies that wait to be fetched, by consumer. Only consumers that fetch are here.
    waiting: BTreeMap<u64, VecDeque<Delivery>>,
    /// Copies that are expected, waiting or delivered, by their marked leases.
    open: HashMap<Lease, GroupName>,
}

struct First {
    delivery: Delivery,
    group: GroupName,
    consumer: u64,
}

impl State {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

impl Copies {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn handed(&self, consumer: u64, group: &GroupName, batch: &[Delivery]) {
        let mut state = self.state();
        for delivery in batch {
            let first = First {
                delivery: delivery.clone(),
                group: group.clone(),
                consumer,
            };
            state.first.insert(delivery.lease.clone(), first);
        }
    }

    /// Takes up to `max` waiting copies of a consumer.
    fn take(&self, consumer: u64, max: usize) -> Vec<Delivery> {
        let mut state = self.state();
        let Some(waiting) = state.waiting.get_mut(&consumer) else {
            return Vec::new();
        };
        let count = max.max(1).min(waiting.len());
        waiting.drain(..count).collect()
    }

    /// A copy is done, with any outcome.
    fn done(&self, lease: &Lease) {
        self.state().open.remove(lease);
        self.changed.notify_waiters();
    }

    /// Registers the copies before the engine settles the originals, so that the bus never looks idle in
    /// between.
    fn prepare(self: &Arc<Self>, settlements: &[Settlement]) -> Prepared {
        let mut state = self.state();
        let mut copies = Vec::with_capacity(settlements.len());
        for Settlement { lease, verdict, .. } in settlements {
            let repeated = matches!(verdict, Verdict::Ack | Verdict::Skip { .. });
            let Some(first) = state.first.get(lease).filter(|_| repeated) else {
                copies.push(None);
                continue;
            };
            let (mut copy, group, consumer) =
                (first.delivery.clone(), first.group.clone(), first.consumer);
            let number = state.number();
            copy.lease = copy.lease.with_text(format!("{MARK}{number}").into());
            state.open.insert(copy.lease.clone(), group);
            copies.push(Some((consumer, copy)));
        }
        Prepared {
            copies: self.clone(),
            prepared: copies,
        }
    }

    async fn all_done(&self, position: Position) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self
                .state()
                .open
                .keys()
                .all(|lease| lease.position() != position)
            {
                return;
            }
            changed.await;
        }
    }
}

/// Copies that will be delivered if the engine accepts the settlements. Dropping this cancels the rest.
struct Prepared {
    copies: Arc<Copies>,
    prepared: Vec<Option<(u64, Delivery)>>,
}

impl Prepared {
    fn answered(mut self, leases: &[Lease], answers: &[Result<()>]) {
        let mut state = self.copies.state();
        for ((lease, copy), answer) in leases.iter().zip(&mut self.prepared).zip(answers) {
            let over = match answer {
                Ok(()) => true,
                Err(error) => error.code() == Code::LeaseLost,
            };
            if over {
                state.first.remove(lease);
            }
            if answer.is_ok()
                && let Some((consumer, _)) = copy
                && let Some(waiting) = state.waiting.get_mut(consumer)
                && let Some((_, copy)) = copy.take()
            {
                waiting.push_back(copy);
            }
        }
        drop(state);
        self.copies.changed.notify_waiters();
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        for (_, copy) in self.prepared.drain(..).flatten() {
            self.copies.done(&copy.lease);
        }
    }
}

impl BrokerLayer for Twice {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            let inner = self.inner.consume(group.clone(), options).await?;
            let id = self.copies.state().number();
            let place = Place {
                id,
                copies: self.copies.clone(),
            };
            place.open();
            let consumer = TwiceConsumer {
                inner,
                group,
                place,
            };
            Ok(Box::new(consumer) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            let of_copies: Vec<bool> = settlements.iter().map(|s| is_copy(&s.lease)).collect();
            let (copies, firsts): (Vec<_>, Vec<_>) =
                settlements.into_iter().partition(|s| is_copy(&s.lease));
            for copy in copies {
                self.copies.done(&copy.lease);
            }
            if firsts.is_empty() {
                return Ok(vec![Ok(()); of_copies.len()]);
            }
            let prepared = self.copies.prepare(&firsts);
            let leases: Vec<Lease> = firsts.iter().map(|s| s.lease.clone()).collect();
            let answers = self.inner.settle(firsts).await?;
            prepared.answered(&leases, &answers);
            interleave(&of_copies, answers)
        })
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            let of_copies: Vec<bool> = leases.iter().map(is_copy).collect();
            let firsts: Vec<Lease> = leases.into_iter().filter(|lease| !is_copy(lease)).collect();
            if firsts.is_empty() {
                return Ok(vec![Ok(()); of_copies.len()]);
            }
            interleave(&of_copies, self.inner.extend(firsts, by).await?)
        })
    }

    /// Copies count as in flight.
    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        Box::pin(async move {
            let mut groups = self.inner.inspect().await?;
            for group in self.copies.state().open.values() {
                if let Some(info) = groups.iter_mut().find(|info| info.name == *group) {
                    info.in_flight += 1;
                }
            }
            Ok(groups)
        })
    }
}

/// Waits for the copies too.
struct BothSettled {
    inner: Arc<dyn Settled>,
    copies: Arc<Copies>,
}

impl Settled for BothSettled {
    fn settled(
        &self,
        position: Position,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<SettledOutcome>> {
        Box::pin(async move {
            let began = Instant::now();
            let outcome = self.inner.settled(position, timeout).await?;
            let left = timeout.saturating_sub(began.elapsed());
            let all = tokio::time::timeout(left, self.copies.all_done(position)).await;
            all.map(|()| outcome).map_err(|_| {
                let what =
                    format!("the copies of event {position} were not settled within {timeout:?}");
                Error::new(Code::Timeout, what)
            })
        })
    }
}

/// Combines the answers of the engine with those for the copies, in the order of the settlements.
fn interleave(of_copies: &[bool], answers: Vec<Result<()>>) -> Result<Vec<Result<()>>> {
    let mut answers = answers.into_iter();
    let all = of_copies
        .iter()
        .map(|copy| if *copy { Some(Ok(())) } else { answers.next() });
    let all: Option<Vec<_>> = all.collect();
    all.ok_or_else(|| Error::new(Code::Internal, "the engine did not answer for everything"))
}

struct TwiceConsumer {
    inner: Box<dyn Consumer>,
    group: GroupName,
    place: Place,
}

/// Where the copies for one consumer wait, while it fetches.
struct Place {
    id: u64,
    copies: Arc<Copies>,
}

impl Place {
    fn open(&self) {
        self.copies.state().waiting.entry(self.id).or_default();
    }

    /// Drops the waiting copies.
    fn shut(&self) {
        let mut state = self.copies.state();
        for copy in state.waiting.remove(&self.id).unwrap_or_default() {
            state.open.remove(&copy.lease);
        }
        drop(state);
        self.copies.changed.notify_waiters();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shut();
    }
}

impl Consumer for TwiceConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let Place { id, copies } = &self.place;
            loop {
                // Registered before the check, so that no notification between the two is lost.
                let mut changed = pin!(copies.changed.notified());
                changed.as_mut().enable();
                let again = copies.take(*id, max);
                if !again.is_empty() {
                    return Ok(again);
                }
                // Cancelling the engine's fetch loses nothing.
                tokio::select! {
                    biased;
                    batch = self.inner.fetch(max) => {
                        let batch = batch?;
                        copies.handed(*id, &self.group, &batch);
                        return Ok(batch);
                    }
                    () = changed => {}
                }
            }
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.inner.set_handled(handled);
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.inner.pause().await?;
            self.place.shut();
            Ok(())
        })
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.inner.resume(prefetch).await?;
            self.place.open();
            Ok(())
        })
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        let Self { inner, place, .. } = *self;
        Box::pin(async move {
            let closed = inner.close().await;
            drop(place);
            closed
        })
    }
}
