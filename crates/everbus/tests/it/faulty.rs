//! The memory engine with planted faults.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::core::{
    Appended, BoxFuture, Broker, BrokerLayer, ConsumeOptions, Consumer, Deduplication, Delivery,
    GroupSpec, Lease, Redelivery, Settlement, SubscriptionInfo,
};
use everbus::{
    Bus, Capabilities, Code, Engine, Error, Event, GroupName, ManualClock, Pattern, Position,
    Result,
};

/// What goes wrong next, for one verb.
#[derive(Clone, Default)]
pub(crate) struct Errors(Arc<Mutex<VecDeque<Option<Error>>>>);

impl Errors {
    pub(crate) fn add(&self, times: usize, code: Code) {
        let error = Error::new(code, "planted");
        self.0.lock().unwrap().extend(vec![Some(error); times]);
    }

    /// Plants an error whose outcome is unknown: the call takes effect, and its answer is lost.
    pub(crate) fn add_after(&self, times: usize, code: Code) {
        let error = Error::new(code, "planted").with_unknown_outcome();
        self.0.lock().unwrap().extend(vec![Some(error); times]);
    }

    /// What was planted and has not come up does not any more.
    pub(crate) fn clear(&self) {
        self.0.lock().unwrap().clear();
    }

    /// Whether everything that was planted has come up.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().unwrap().is_empty()
    }

    /// Lets so many calls through before what is added next.
    pub(crate) fn spare(&self, times: usize) {
        self.0.lock().unwrap().extend(vec![None; times]);
    }

    fn next(&self) -> Result<()> {
        let next = self.0.lock().unwrap().pop_front().flatten();
        next.map_or(Ok(()), Err)
    }

    /// Makes a call, unless something goes wrong before it; its answer may be lost after it.
    async fn around<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        match self.next() {
            Ok(()) => call.await,
            Err(error) if error.outcome_unknown() => call.await.and(Err(error)),
            Err(error) => Err(error),
        }
    }
}

/// Says which events of an append are refused, and how.
pub(crate) type Judge = Box<dyn FnMut(&[Event]) -> Vec<Option<Code>> + Send>;

/// An engine with planted faults.
#[derive(Clone)]
pub(crate) struct Faulty {
    inner: Arc<dyn Broker>,
    pub(crate) declare: Errors,
    pub(crate) append: Errors,
    pub(crate) fetch: Errors,
    pub(crate) settle: Errors,
    pub(crate) settle_one: Errors,
    pub(crate) extend: Errors,
    /// What is thought of the events of an append, before what is planted.
    pub(crate) judge: Arc<Mutex<Option<Judge>>>,
    /// A batch is taken as a whole or not at all; otherwise each event has its own answer.
    pub(crate) atomic: Arc<AtomicBool>,
    /// Whether an event that is known is recognised.
    pub(crate) forgetful: Arc<AtomicBool>,
    /// How many events came at a time.
    pub(crate) batches: Arc<Mutex<Vec<usize>>>,
    /// How often leases were extended.
    pub(crate) extended: Arc<AtomicUsize>,
    /// How many outcomes were taken.
    pub(crate) taken: Arc<AtomicUsize>,
    /// Settling, declaring and closing are not answered, as when another program holds the file.
    pub(crate) stuck: Arc<AtomicBool>,
}

struct FaultyConsumer(Box<dyn Consumer>, Errors);

impl Consumer for FaultyConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let Self(consumer, errors) = self;
            errors.around(consumer.fetch(max)).await
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.0.set_handled(handled);
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        self.0.pause()
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        self.0.resume(prefetch)
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        self.0.close()
    }
}

impl Faulty {
    async fn while_stuck(&self) {
        if self.stuck.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
    }

    pub(crate) fn judge(&self, judge: impl FnMut(&[Event]) -> Vec<Option<Code>> + Send + 'static) {
        *self.judge.lock().unwrap() = Some(Box::new(judge));
    }
}

impl BrokerLayer for Faulty {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        capabilities.atomic_batch = self.atomic.load(Ordering::SeqCst);
        if self.forgetful.load(Ordering::SeqCst) {
            capabilities.deduplication = Deduplication::None;
        }
        capabilities
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        Box::pin(async move {
            self.while_stuck().await;
            self.declare.next()?;
            self.inner.declare(group).await
        })
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        let append = async move {
            self.batches.lock().unwrap().push(batch.len());
            let judged = match &mut *self.judge.lock().unwrap() {
                Some(judge) => judge(&batch),
                None => vec![None; batch.len()],
            };
            let planted = |code| Error::new(code, "planted");
            if self.atomic.load(Ordering::SeqCst) {
                if let Some(code) = judged.iter().flatten().next() {
                    return Err(planted(*code));
                }
                return self.inner.append(batch).await;
            }
            let mut answers = Vec::new();
            for (event, code) in batch.into_iter().zip(judged) {
                answers.push(match code {
                    Some(code) => Err(planted(code)),
                    None => match self.inner.append(vec![event]).await {
                        Ok(mut answers) => answers.remove(0),
                        Err(error) => Err(error),
                    },
                });
            }
            Ok(answers)
        };
        Box::pin(self.append.around(append))
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            let consumer = self.inner.consume(group, options).await?;
            Ok(Box::new(FaultyConsumer(consumer, self.fetch.clone())) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        let settle = async move {
            if let Err(error) = self.settle_one.next() {
                if error.outcome_unknown() {
                    let mut answers = self.inner.settle(settlements).await?;
                    answers[0] = Err(error);
                    return Ok(answers);
                }
                // The first is refused, the others go through.
                let mut settlements = settlements.into_iter();
                let _ = settlements.next();
                let mut answers = self.inner.settle(settlements.collect()).await?;
                answers.insert(0, Err(error));
                return Ok(answers);
            }
            let answers = self.inner.settle(settlements).await?;
            let taken = answers.iter().filter(|answer| answer.is_ok()).count();
            self.taken.fetch_add(taken, Ordering::SeqCst);
            Ok(answers)
        };
        Box::pin(async move {
            self.while_stuck().await;
            self.settle.around(settle).await
        })
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        self.extended.fetch_add(1, Ordering::SeqCst);
        Box::pin(self.extend.around(self.inner.extend(leases, by)))
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.while_stuck().await;
            self.inner.close().await
        })
    }
}

/// A bus on an engine with planted faults, and the clock of both.
pub(crate) async fn faulty() -> (Bus, Faulty, ManualClock) {
    crate::logs::listen();
    let clock = ManualClock::default();
    let memory = Bus::builder()
        .clock(clock.clone())
        .open("memory:")
        .await
        .unwrap();
    let engine = memory.engine();
    let faulty = Faulty {
        inner: engine.broker.clone(),
        declare: Errors::default(),
        append: Errors::default(),
        fetch: Errors::default(),
        settle: Errors::default(),
        settle_one: Errors::default(),
        extend: Errors::default(),
        judge: Arc::default(),
        atomic: Arc::new(AtomicBool::new(true)),
        forgetful: Arc::default(),
        batches: Arc::default(),
        extended: Arc::default(),
        taken: Arc::default(),
        stuck: Arc::default(),
    };
    let engine = Engine {
        broker: Arc::new(faulty.clone()),
        ..engine.clone()
    };
    let bus = Bus::builder()
        .clock(clock.clone())
        .with_engine(engine)
        .unwrap();
    (bus, faulty, clock)
}

// conformance: memory/broker-layer: a broker around another passes on every verb that it does not change, and the engine keeps its abilities
#[tokio::test]
async fn a_layer_passes_on_what_it_does_not_change() {
    let (bus, _, _) = faulty().await;
    let group: GroupName = "billing".parse().unwrap();
    let subscribe = bus.subscribe("order.*").group("billing");
    let handled = subscribe.handler(|| std::future::ready(()));
    handled.await.unwrap();
    for n in 0..3 {
        bus.publish(("order.placed", n)).await.unwrap();
    }
    let engine = bus.engine();
    let (depth, redeliver) = (engine.depth().unwrap(), engine.redeliver().unwrap());
    let orders = Pattern::new("order.*").unwrap();
    assert_eq!(depth.depth(orders.clone(), 10).await.unwrap(), 3);
    assert_eq!(depth.drop_oldest(orders, 1).await.unwrap(), 2);
    let positions = vec![Position::seq(3), Position::seq(4)];
    let answers = redeliver.redeliver(group.clone(), positions).await.unwrap();
    assert_eq!(answers, [Redelivery::Owed, Redelivery::Gone]);
    // What the layer does not mention reaches the engine below.
    let broker = &engine.broker;
    assert_eq!(broker.inspect().await.unwrap()[0].name, group);
    broker.remove_group(group).await.unwrap();
    assert!(broker.inspect().await.unwrap().is_empty());
}
