//! An engine that is busy, full, failing or slow: outcomes are kept, leases are kept, nothing is
//! acked by falling through.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::core::{
    Appended, BoxFuture, Broker, ConsumeOptions, Consumer, Delivery, GroupSpec, Lease,
    SettledOutcome, Settlement, SubscriptionInfo,
};
use everbus::{
    Bus, Capabilities, Code, Engine, Error, Event, EventId, GroupInfo, GroupName, ManualClock,
    Message, Pattern, Result,
};
use tokio::sync::Semaphore;

use crate::support::{eventually, fine, is_done, recorder};

/// What goes wrong next, for one verb.
#[derive(Clone, Default)]
struct Errors(Arc<Mutex<VecDeque<Error>>>);

impl Errors {
    fn add(&self, times: usize, code: Code) {
        let error = Error::new(code, "planted");
        self.0.lock().unwrap().extend(vec![error; times]);
    }

    fn next(&self) -> Result<()> {
        self.0.lock().unwrap().pop_front().map_or(Ok(()), Err)
    }
}

/// An engine with planted faults.
#[derive(Clone)]
struct Faulty {
    inner: Arc<dyn Broker>,
    fetch: Errors,
    settle: Errors,
    settle_one: Errors,
    extended: Arc<AtomicUsize>,
    taken: Arc<AtomicUsize>,
}

struct FaultyConsumer(Box<dyn Consumer>, Errors);

impl Consumer for FaultyConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            self.1.next()?;
            self.0.fetch(max).await
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.0.set_handled(handled);
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        self.0.close()
    }
}

impl Broker for Faulty {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        self.inner.declare(group)
    }

    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        self.inner.retract(subscription)
    }

    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        self.inner.remove_group(group)
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        self.inner.append(batch)
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
        Box::pin(async move {
            self.settle.next()?;
            if let Err(error) = self.settle_one.next() {
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
        })
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        self.extended.fetch_add(1, Ordering::SeqCst);
        self.inner.extend(leases, by)
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        self.inner.inspect()
    }

    fn settled(&self, position: u64, timeout: Duration) -> BoxFuture<'_, Result<SettledOutcome>> {
        self.inner.settled(position, timeout)
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        self.inner.close()
    }
}

/// A bus on an engine with planted faults, and the clock of both.
async fn faulty() -> (Bus, Faulty, ManualClock) {
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
        fetch: Errors::default(),
        settle: Errors::default(),
        settle_one: Errors::default(),
        extended: Arc::default(),
        taken: Arc::default(),
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

// conformance: embedded/sqlite-lock: an engine that is busy or full is asked again with backoff until the outcome is durable.
#[tokio::test]
async fn outcomes_are_settled_again_until_the_engine_has_time() {
    let (bus, faults, _) = faulty().await;
    let (handler, mut seen) = recorder(fine);
    bus.subscribe("a").handler(handler).await.unwrap();
    faults.settle.add(2, Code::Busy);
    faults.settle.add(1, Code::DiskFull);
    faults.settle_one.add(2, Code::Busy);
    bus.start().await.unwrap();
    for receipt in bus.publish_batch((0..20).map(|n| ("a", n))).await.unwrap() {
        receipt.settled().await.unwrap();
        assert_eq!(seen.next().await.attempt(), 1);
    }
    assert!(seen.is_empty(), "each event is handled once");
    assert!(bus.failure().is_none());
    bus.shutdown().await.unwrap();
}

// conformance: fault-10/pending-ack: a shutdown waits for outcomes that the engine has not taken yet.
#[tokio::test]
async fn a_shutdown_waits_for_outcomes_the_engine_is_too_busy_for() {
    let (bus, faults, _) = faulty().await;
    let (handler, mut seen) = recorder(fine);
    bus.subscribe("a").handler(handler).await.unwrap();
    faults.settle.add(4, Code::Busy);
    bus.start().await.unwrap();
    bus.publish(("a", 1)).await.unwrap();
    seen.next().await;
    bus.shutdown().await.unwrap();
    assert_eq!(faults.taken.load(Ordering::SeqCst), 1);
}

// conformance: issue-2/busy-fetch: an engine that is busy is asked again, and dispatch goes on.
#[tokio::test]
async fn fetching_goes_on_after_the_engine_was_busy() {
    let (bus, faults, _) = faulty().await;
    let (handler, mut seen) = recorder(fine);
    bus.subscribe("a").handler(handler).await.unwrap();
    faults.fetch.add(3, Code::Busy);
    bus.start().await.unwrap();
    bus.publish(("a", 1))
        .await
        .unwrap()
        .settled()
        .await
        .unwrap();
    seen.next().await;
    assert!(bus.failure().is_none());
    bus.shutdown().await.unwrap();
}

// conformance: issue-2/storage-failed: once storage has failed, the bus says so and takes no more publishes.
#[tokio::test]
async fn after_storage_failed_publishes_are_refused_with_the_reason() {
    let (bus, faults, _) = faulty().await;
    let (handler, mut seen) = recorder(fine);
    bus.subscribe("a").handler(handler).await.unwrap();
    faults.fetch.add(1, Code::StorageFailed);
    bus.start().await.unwrap();
    eventually("the failure is seen", || async { bus.failure().is_some() }).await;
    assert_eq!(bus.failure().unwrap().code(), Code::StorageFailed);
    let error = bus.publish(("a", 1)).await.unwrap_err();
    assert_eq!(error.code(), Code::StorageFailed);
    assert!(seen.is_empty());
    bus.shutdown().await.unwrap();
}

/// Subscribes a handler that notes its message and waits at the gate.
async fn gated(bus: &Bus) -> (Arc<Semaphore>, crate::support::Seen) {
    let gate = Arc::new(Semaphore::new(0));
    let inside = gate.clone();
    let (note, seen) = recorder(fine);
    let note = Arc::new(note);
    bus.subscribe("a")
        .handler(move |m: Message| {
            let (gate, note) = (inside.clone(), note.clone());
            async move {
                note(m).await?;
                gate.acquire().await?.forget();
                Ok(())
            }
        })
        .await
        .unwrap();
    (gate, seen)
}

// conformance: rule-4/fencing: an outcome that comes after the lease was lost is refused; it neither acks nor fails the new delivery.
#[tokio::test]
async fn an_outcome_that_comes_after_its_lease_is_refused() {
    let (bus, _, clock) = faulty().await;
    let (gate, mut seen) = gated(&bus).await;
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", 1)).await.unwrap();
    assert_eq!(seen.next().await.attempt(), 1);
    // As if this process had been stopped for an hour.
    clock.advance(Duration::from_secs(3600));
    assert_eq!(seen.next().await.attempt(), 2);
    gate.add_permits(1);
    eventually("the late outcome is refused", || async {
        bus.lost_leases() == 1
    })
    .await;
    assert!(!is_done(&bus, receipt.seq(), "").await);
    gate.add_permits(1);
    receipt.settled().await.unwrap();
    assert_eq!(bus.lost_leases(), 1);
    bus.shutdown().await.unwrap();
}

// conformance: rule-4/extend: leases are extended while the handler runs, so a long handler keeps its event.
#[tokio::test(start_paused = true)]
async fn a_long_handler_keeps_its_event() {
    let (bus, faults, clock) = faulty().await;
    let (gate, mut seen) = gated(&bus).await;
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", 1)).await.unwrap();
    seen.next().await;
    // The lease is 40 s and is extended every 13⅓ s of real time. The engine's clock moves 70 s;
    // tokio's stays below 30 s, where the handler would time out.
    for _ in 0..2 {
        let before = faults.extended.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(13_400)).await;
        assert!(faults.extended.load(Ordering::SeqCst) > before);
        clock.advance(Duration::from_secs(35));
    }
    gate.add_permits(1);
    receipt.settled().await.unwrap();
    assert!(seen.is_empty(), "delivered once");
    assert_eq!(bus.lost_leases(), 0);
    bus.shutdown().await.unwrap();
}
