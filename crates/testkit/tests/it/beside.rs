//! A store beside a broker: what the store knows of events that the broker moves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus::{Bus, BusOptions, HandlerError, RetryPolicy, Router, archive_lag, to};
use everbus_core::{
    Clock, Code, ConsumeOptions, Consumer, Delivery, Engine, Event, EventKey, Failure, FailureKind,
    GroupName, GroupSpec, ManualClock, Pattern, Settlement, SubscriptionSpec, SystemClock, Verdict,
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
