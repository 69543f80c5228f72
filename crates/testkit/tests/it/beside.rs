//! A store beside a broker: what the store knows of events that the broker moves.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use everbus::{Bus, BusOptions, HandlerError, RetryPolicy, Router, archive_lag, to};
use everbus_core::{
    BoxFuture, Broker, BrokerLayer, Clock, Code, ConsumeOptions, Consumer, Delivery, Engine, Error,
    Event, EventKey, Failure, FailureKind, GroupName, GroupSpec, ManualClock, Pattern, Settlement,
    SubscriptionSpec, SystemClock, Verdict,
};
use everbus_testkit::narrow::{self, Faults};

const DEADLINE: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(30);

async fn composed(path: &std::path::Path, clock: Arc<dyn Clock>) -> Engine {
    let broker = narrow::open(&clock, 2, Faults::none()).unwrap();
    let options = everbus_sqlite::Options {
        clock: clock.clone(),
        ..everbus_sqlite::Options::default()
    };
    let store = everbus_sqlite::open(path, options).unwrap();
    everbus::compose(broker, store, clock).await.unwrap()
}

/// A group that wants `a.b`, and its consumer.
async fn consumer(engine: &Engine, group: &str) -> Box<dyn Consumer> {
    let pattern = Pattern::new("a.b").unwrap();
    let mut spec = GroupSpec::new(group.parse().unwrap());
    spec.subscriptions.push(SubscriptionSpec {
        name: "a.b".to_owned(),
        pattern: pattern.clone(),
    });
    engine.broker.declare(spec).await.unwrap();
    let options = ConsumeOptions::new(vec![pattern]).lease(LEASE);
    let group: GroupName = group.parse().unwrap();
    engine.broker.consume(group, options).await.unwrap()
}

fn event() -> Event {
    Event::builder("a.b").json(&1).build().unwrap()
}

async fn one(consumer: &mut Box<dyn Consumer>) -> Delivery {
    let batch = tokio::time::timeout(DEADLINE, consumer.fetch(1)).await;
    batch.unwrap().unwrap().remove(0)
}

async fn settle(engine: &Engine, delivery: &Delivery, verdict: Verdict) -> Result<(), Code> {
    let settlement = Settlement::new(delivery.lease.clone(), verdict);
    let answers = engine.broker.settle(vec![settlement]).await.unwrap();
    answers.into_iter().next().unwrap().map_err(|e| e.code())
}

fn failure(attempt: u32) -> Failure {
    let now = SystemClock.now();
    Failure::new(attempt, now, FailureKind::Error, format!("no {attempt}"))
}

// conformance: contract/beside-archive: Every event reaches the store, also one that is for a single group; how many are missing can be asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_addressed_event_is_archived_too() {
    let dir = tempfile::tempdir().unwrap();
    let engine = composed(&dir.path().join("store.db"), Arc::new(SystemClock)).await;
    let bus = Bus::with_engine(engine, BusOptions::default()).unwrap();
    let addressed = event().addressed_to(&"billing".parse().unwrap());
    let ids = [
        bus.publish(event()).await.unwrap().id(),
        bus.publish(addressed).await.unwrap().id(),
    ];
    let behind = archive_lag(bus.engine()).await.unwrap().unwrap();
    assert_eq!(behind.unsettled(), 2);
    bus.start().await.unwrap();
    let give_up = Instant::now() + DEADLINE;
    while archive_lag(bus.engine())
        .await
        .unwrap()
        .unwrap()
        .unsettled()
        > 0
    {
        assert!(Instant::now() < give_up, "the archive does not catch up");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for id in ids {
        assert_eq!(bus.lookup().unwrap().find(id).await.unwrap().len(), 1);
    }
    bus.shutdown().await.unwrap();
}

/// Notes the lease of each group that consumes.
struct Leases {
    inner: Arc<dyn Broker>,
    noted: Arc<Mutex<HashMap<GroupName, Duration>>>,
}

impl BrokerLayer for Leases {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>, Error>> {
        let mut noted = self.noted.lock().unwrap();
        noted.insert(group.clone(), options.lease);
        self.inner.consume(group, options)
    }
}

// conformance: contract/beside-archive: The archive asks for a lease of at most 20 seconds. After it, a broker gives the events that a killed process was copying to another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_archive_asks_for_a_short_lease() {
    let dir = tempfile::tempdir().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let mut broker = narrow::open(&clock, 2, Faults::none()).unwrap();
    let noted = Arc::default();
    broker.broker = Arc::new(Leases {
        inner: broker.broker.clone(),
        noted: Arc::clone(&noted),
    });
    let options = everbus_sqlite::Options::default();
    let store = everbus_sqlite::open(&dir.path().join("store.db"), options).unwrap();
    let engine = everbus::compose(broker, store, clock).await.unwrap();
    let bus = Bus::with_engine(engine, BusOptions::default()).unwrap();
    bus.start().await.unwrap();
    let archive: GroupName = everbus::ARCHIVE.parse().unwrap();
    let give_up = Instant::now() + DEADLINE;
    let lease = loop {
        if let Some(lease) = noted.lock().unwrap().get(&archive) {
            break *lease;
        }
        assert!(Instant::now() < give_up, "the archive does not start");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert!(lease <= Duration::from_secs(20), "{lease:?}");
    bus.shutdown().await.unwrap();
}

// conformance: contract/beside-stages: A payload stage is kept before the archive has its event, and is with the event afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payload_stage_may_come_before_its_event() {
    let dir = tempfile::tempdir().unwrap();
    let engine = composed(&dir.path().join("store.db"), Arc::new(SystemClock)).await;
    let bus = Bus::with_engine(engine, BusOptions::default()).unwrap();
    let event = event();
    let key = EventKey::of(&event);
    bus.publish(event).await.unwrap();
    bus.payloads()
        .store(key.clone(), "webhook_raw", &7)
        .await
        .unwrap();
    bus.start().await.unwrap();
    let give_up = Instant::now() + DEADLINE;
    let payloads = bus.engine().payloads().unwrap();
    while payloads.stages(key.clone(), None).await.unwrap().is_empty() {
        assert!(Instant::now() < give_up, "the stage did not come");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bus.shutdown().await.unwrap();
}

// conformance: contract/beside-fence: Where the broker has no fence, a verdict that comes after the end of its lease is refused, and an extended lease has not ended.
#[tokio::test]
async fn a_verdict_after_the_end_of_its_lease_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new(SystemClock.now()));
    let engine = composed(&dir.path().join("store.db"), clock.clone()).await;
    assert!(!engine.broker.capabilities().fencing);
    let mut consumer = consumer(&engine, "billing").await;
    let events = vec![event(), event()];
    engine.broker.append(events).await.unwrap();
    let (late, extended) = (one(&mut consumer).await, one(&mut consumer).await);
    clock.advance(LEASE / 2);
    let leases = vec![extended.lease.clone()];
    engine.broker.extend(leases, LEASE).await.unwrap();
    clock.advance(LEASE / 2 + Duration::from_secs(1));
    let refused = settle(&engine, &late, Verdict::Ack).await;
    assert_eq!(refused, Err(Code::LeaseLost));
    assert_eq!(settle(&engine, &extended, Verdict::Ack).await, Ok(()));
}

// conformance: contract/beside-runs: What failed before an event was handled is kept, and does not count when the event comes again.
#[tokio::test]
async fn failures_of_a_run_that_ended_do_not_count_in_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let engine = composed(&dir.path().join("store.db"), Arc::new(SystemClock)).await;
    let mut consumer = consumer(&engine, "billing").await;
    engine.broker.append(vec![event()]).await.unwrap();
    let first = one(&mut consumer).await;
    let key = EventKey::of(&first.record.event);
    let retry = Verdict::Retry {
        after: Duration::from_millis(1),
        failure: failure(1),
    };
    settle(&engine, &first, retry).await.unwrap();
    let second = one(&mut consumer).await;
    assert_eq!((second.attempt, second.failures.len()), (2, 1));
    settle(&engine, &second, Verdict::Ack).await.unwrap();
    let group: GroupName = "billing".parse().unwrap();
    let store = engine.store().unwrap();
    let failures = store.failures(group, vec![key]).await.unwrap();
    assert_eq!(failures, [vec![]]);
}

// conformance: contract/beside-replaced: A dead letter that was corrected beside a broker names the event sent in its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_corrected_dead_letter_names_its_correction() {
    let dir = tempfile::tempdir().unwrap();
    let engine = composed(&dir.path().join("store.db"), Arc::new(SystemClock)).await;
    let bus = Bus::with_engine(engine, BusOptions::default()).unwrap();
    let fails = |number: everbus::Json<u64>| async move {
        match number.0 {
            1 => Err(HandlerError::new("one")),
            _ => Ok(()),
        }
    };
    let route = to(fails).group("billing").retry(RetryPolicy::never());
    bus.mount(Router::new().on("a.b", route)).await.unwrap();
    bus.start().await.unwrap();
    let id = bus.publish(event()).await.unwrap().id();
    let letters = bus.engine().dead_letters().unwrap();
    let give_up = Instant::now() + DEADLINE;
    let letter = loop {
        if let Some(letter) = letters.get(id).await.unwrap().pop() {
            break letter;
        }
        assert!(Instant::now() < give_up, "no dead letter");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let corrected = letter.corrected("2").unwrap();
    let by = corrected.id();
    letters.replace(letter.key(), corrected).await.unwrap();
    let letter = letters.get(id).await.unwrap().remove(0);
    assert_eq!(letter.replaced_by, Some(by));
    assert!(letter.retried_at.is_some());
    let replaced = letters.replaced().await.unwrap();
    assert_eq!(replaced.len(), 1);
    bus.shutdown().await.unwrap();
}

// conformance: contract/beside-twins: A second copy of an event waits while the first is being handled, so that the inbox can absorb it.
#[tokio::test]
async fn a_second_copy_waits_for_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let engine = composed(&dir.path().join("store.db"), Arc::new(SystemClock)).await;
    let mut consumer = consumer(&engine, "billing").await;
    // The broker recognises no ids: a publish that is repeated is stored twice.
    let event = event();
    for _ in 0..2 {
        engine.broker.append(vec![event.clone()]).await.unwrap();
    }
    let first = consumer.fetch(10).await.unwrap();
    assert_eq!(first.len(), 1);
    let early = tokio::time::timeout(Duration::from_millis(300), consumer.fetch(10)).await;
    assert!(early.is_err(), "{early:?}");
    let mut ack = Settlement::new(first[0].lease.clone(), Verdict::Ack);
    ack.inbox = true;
    engine.broker.settle(vec![ack]).await.unwrap();
    let second = one(&mut consumer).await;
    let inbox = engine.inbox().unwrap();
    let group: GroupName = "billing".parse().unwrap();
    let handled = inbox.handled(group, vec![second.record]).await.unwrap();
    assert_eq!(handled, [true]);
}

// conformance: contract/beside-crash-loop: Beside a broker that counts deliveries, those that were given back are no attempts, and an event that is delivered again and again without an outcome is given up.
#[tokio::test]
async fn deliveries_without_an_outcome_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new(SystemClock.now()));
    let engine = composed(&dir.path().join("store.db"), clock.clone()).await;
    let mut consumer = consumer(&engine, "billing").await;
    engine.broker.append(vec![event()]).await.unwrap();
    for _ in 0..5 {
        let delivery = one(&mut consumer).await;
        assert_eq!((delivery.attempt, delivery.failures.len()), (1, 0));
        let after = Duration::ZERO;
        settle(&engine, &delivery, Verdict::Release { after })
            .await
            .unwrap();
    }
    let last = loop {
        let delivery = one(&mut consumer).await;
        if !delivery.failures.is_empty() {
            break delivery;
        }
        assert_eq!(delivery.attempt, 1);
        // Its process dies with it.
        clock.advance(LEASE + Duration::from_secs(1));
    };
    let crash = &last.failures[0];
    assert!(crash.alone && crash.kind == FailureKind::Crash, "{crash:?}");
    assert!(last.attempt > 20, "{}", last.attempt);
}

// conformance: contract/beside-follow-ups-once: While the store does not answer, a verdict that is told again does not append its events once more.
#[tokio::test]
async fn follow_ups_are_appended_once_while_the_store_is_away() {
    let dir = tempfile::tempdir().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let broker = narrow::open(&clock, 2, Faults::none()).unwrap();
    let path = dir.path().join("store.db");
    let store = everbus_sqlite::open(&path, everbus_sqlite::Options::default()).unwrap();
    let faults = Faults::none();
    let store = narrow::with_faulty_store(store, faults.clone());
    let engine = everbus::compose(broker, store, clock).await.unwrap();
    let mut consumer = consumer(&engine, "billing").await;
    engine.broker.append(vec![event()]).await.unwrap();
    let delivery = one(&mut consumer).await;
    let follow_up = event();
    let verdict = || {
        let mut ack = Settlement::new(delivery.lease.clone(), Verdict::Ack);
        ack.inbox = true;
        ack.follow_ups = vec![follow_up.clone()];
        ack
    };
    faults.set(1);
    for _ in 0..3 {
        let answers = engine.broker.settle(vec![verdict()]).await.unwrap();
        assert!(answers[0].is_err());
    }
    faults.stop();
    let answers = engine.broker.settle(vec![verdict()]).await.unwrap();
    assert!(answers[0].is_ok(), "{answers:?}");
    let delivered = one(&mut consumer).await;
    assert_eq!(delivered.record.event.id(), follow_up.id());
    settle(&engine, &delivered, Verdict::Ack).await.unwrap();
    let more = tokio::time::timeout(Duration::from_millis(300), consumer.fetch(10)).await;
    assert!(more.is_err(), "{more:?}");
}

// conformance: contract/beside-batch: Acks of one batch are one write to the store, and the events that they publish are one append, in their order.
#[tokio::test]
async fn acks_of_a_batch_are_recorded_together() {
    let dir = tempfile::tempdir().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let (of_broker, of_store) = (Faults::none(), Faults::none());
    let broker = narrow::open(&clock, 1, of_broker.clone()).unwrap();
    let path = dir.path().join("store.db");
    let store = everbus_sqlite::open(&path, everbus_sqlite::Options::default()).unwrap();
    let store = narrow::with_faulty_store(store, of_store.clone());
    let engine = everbus::compose(broker, store, clock).await.unwrap();
    let mut consumer = consumer(&engine, "billing").await;
    let events: Vec<Event> = (0..20).map(|_| event()).collect();
    engine.broker.append(events).await.unwrap();
    let mut batch = Vec::new();
    while batch.len() < 20 {
        batch.extend(consumer.fetch(20).await.unwrap());
    }
    let before = of_broker.calls("append");
    let mut published = Vec::new();
    let ack = |delivery: &Delivery| {
        let mut ack = Settlement::new(delivery.lease.clone(), Verdict::Ack);
        (ack.inbox, ack.follow_ups) = (true, vec![event()]);
        published.push(ack.follow_ups[0].id());
        ack
    };
    let acks = batch.iter().map(ack).collect();
    let answers = engine.broker.settle(acks).await.unwrap();
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(of_store.calls("record_handled"), 1);
    assert_eq!(of_broker.calls("append") - before, 1);
    let records = batch.into_iter().map(|delivery| delivery.record).collect();
    let inbox = engine.inbox().unwrap();
    let handled = inbox.handled("billing".parse().unwrap(), records).await;
    assert_eq!(handled.unwrap(), [true; 20]);
    let mut came = Vec::new();
    while came.len() < 20 {
        let next = consumer.fetch(20).await.unwrap();
        came.extend(next.iter().map(|delivery| delivery.record.event.id()));
    }
    assert_eq!(came, published);
}

// conformance: contract/beside-closed: What fails after its consumer was closed goes to another consumer and waits for none.
#[tokio::test]
async fn a_failure_after_the_close_is_not_parked() {
    let dir = tempfile::tempdir().unwrap();
    let engine = composed(&dir.path().join("store.db"), Arc::new(SystemClock)).await;
    let mut first = consumer(&engine, "billing").await;
    engine.broker.append(vec![event()]).await.unwrap();
    let delivery = one(&mut first).await;
    first.close().await.unwrap();
    let retry = Verdict::Retry {
        after: Duration::from_secs(3600),
        failure: failure(1),
    };
    settle(&engine, &delivery, retry).await.unwrap();
    let mut second = consumer(&engine, "billing").await;
    let again = one(&mut second).await;
    assert_eq!((again.attempt, again.failures.len()), (2, 1));
}
