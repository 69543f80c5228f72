//! The runtime on an engine that offers nothing beyond the verbs, with a SQLite file beside it, through
//! random faults: no event that was acknowledged is lost.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use everbus::{Bus, BusOptions, Code, HandlerError, Message, RetryPolicy, Router, to};
use everbus_core::{
    Clock, ConsumeOptions, DeadLetterFilter, Engine, Event, EventId, Failure, FailureKind,
    GroupName, GroupSpec, Pattern, Settlement, SubscriptionSpec, SystemClock, Verdict,
};
use everbus_testkit::narrow::{self, Faults};

const SHARDS: usize = 3;
const GROUPS: [&str; 2] = ["billing", "shipping"];
const DEADLINE: Duration = Duration::from_secs(240);

async fn composed(path: &std::path::Path, faults: Faults) -> Engine {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let broker = narrow::open(&clock, SHARDS, faults).unwrap();
    let store = everbus_sqlite::open(path, everbus_sqlite::Options::default()).unwrap();
    everbus::compose(broker, store, clock).await.unwrap()
}

/// Who handled which event how often.
type Handled = Arc<Mutex<Counts>>;
type Counts = HashMap<(&'static str, EventId), u32>;

/// At most so many events wait for a group in the never-lost test.
const BACKLOG: usize = 20;

/// What the runtime tells the store in the never-lost test.
const TOLD: [&str; 5] = [
    "ingest",
    "record_failure",
    "record_handled",
    "record_skip",
    "bury",
];

/// Two groups: one works at its second attempt at every third event, the other skips every seventh and never
/// works for every fifth.
fn router(handled: &Handled) -> Router {
    let policy = RetryPolicy::new()
        .max_retries(3)
        .base_delay(Duration::from_millis(5))
        .max_delay(Duration::from_millis(10));
    let mut router = Router::new();
    for group in GROUPS {
        let handled = handled.clone();
        let handler = move |message: Message| {
            let handled = handled.clone();
            async move {
                let number: u64 = message.json()?;
                let key = (group, message.event().id());
                let fails = match group {
                    "billing" => number.is_multiple_of(3) && message.failures().is_empty(),
                    _ => number.is_multiple_of(5),
                };
                if fails {
                    return Err(HandlerError::new(format!(
                        "event {number} fails in {group}"
                    )));
                }
                if group == "shipping" && number.is_multiple_of(7) {
                    *handled.lock().unwrap().entry(key).or_default() += 1;
                    return Err(HandlerError::skip("not ours"));
                }
                *handled.lock().unwrap().entry(key).or_default() += 1;
                Ok::<(), HandlerError>(())
            }
        };
        let route = to(handler).group(group).idempotent().retry(policy);
        router = router.on("order.placed", route);
    }
    router
}

/// Publishes until the bus acknowledges it, under the same id each time.
async fn publish(bus: &Bus, number: u64) -> EventId {
    let event = Event::builder("order.placed")
        .json(&number)
        .key(format!("customer-{}", number % 7))
        .build()
        .unwrap();
    let give_up = Instant::now() + DEADLINE;
    loop {
        match bus.publish(event.clone()).await {
            Ok(receipt) => return receipt.id(),
            Err(error) if error.code() == Code::Unavailable && Instant::now() < give_up => {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// The events of a group that are neither handled nor dead letters.
async fn missing(
    bus: &Bus,
    group: &'static str,
    published: &[EventId],
    handled: &Handled,
) -> Vec<EventId> {
    let letters = bus.engine().dead_letters().unwrap();
    let mut dead = HashSet::new();
    let mut page = everbus_core::PageRequest::default();
    loop {
        let filter = DeadLetterFilter {
            group: Some(group.parse().unwrap()),
            ..DeadLetterFilter::default()
        };
        let found = letters.list(filter, page.clone()).await.unwrap();
        for letter in &found.items {
            // It is the handler that failed, not the engine.
            let own = format!("fails in {group}");
            let failures = &letter.failures;
            assert!(!failures.is_empty(), "{letter:?}");
            assert!(
                failures.iter().all(|f| f.error.contains(&own)),
                "{letter:?}"
            );
            dead.insert(letter.event().id());
        }
        match found.next {
            Some(next) => page.after = Some(next),
            None => break,
        }
    }
    let handled = handled.lock().unwrap();
    let ended = |id: &EventId| dead.contains(id) || handled.contains_key(&(group, *id));
    published.iter().copied().filter(|id| !ended(id)).collect()
}

/// The events of which the store has no end state in a group: neither handled nor skipped nor dead.
async fn without_a_record(bus: &Bus, group: &str, published: &[EventId]) -> Vec<EventId> {
    let (lookup, engine) = (bus.lookup().unwrap(), bus.engine());
    let (inbox, letters) = (engine.inbox().unwrap(), engine.dead_letters().unwrap());
    let group: GroupName = group.parse().unwrap();
    let mut without = Vec::new();
    for id in published {
        let Some(record) = lookup.find(*id).await.unwrap().pop() else {
            without.push(*id);
            continue;
        };
        let states = lookup.states(record.position).await.unwrap();
        let skipped = states
            .iter()
            .any(|s| s.group == group && s.skipped.is_some());
        let handled = inbox.handled(group.clone(), vec![record]).await.unwrap();
        let dead = letters.get(*id).await.unwrap();
        if handled != [true] && !skipped && !dead.iter().any(|letter| letter.group == group) {
            without.push(*id);
        }
    }
    without
}

// conformance: contract/narrow-never-lost: on an engine with every capability off and a store beside it, through 1,000 random faults of both, every acknowledged event is handled or a dead letter with its failures, and is in the archive
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_through_a_thousand_faults() {
    let seed = super::seed();
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::random(seed, 12);
    let engine = loop {
        // Also the first calls may fail.
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let broker = narrow::open(&clock, SHARDS, faults.clone()).unwrap();
        let path = dir.path().join("store.db");
        let store = everbus_sqlite::open(&path, everbus_sqlite::Options::default()).unwrap();
        let store = narrow::with_faulty_store(store, faults.clone());
        if let Ok(engine) = everbus::compose(broker, store, clock).await {
            break engine;
        }
    };
    let handled = Handled::default();
    let bus = Bus::with_engine(engine, BusOptions::default()).unwrap();
    let give_up = Instant::now() + DEADLINE;
    while let Err(error) = bus.mount(router(&handled)).await {
        assert!(Instant::now() < give_up, "{error:?}");
    }
    bus.start().await.unwrap();
    let mut published = Vec::new();
    // An error of any of these that is taken for an answer must lose an event.
    let enough = || TOLD.iter().all(|verb| faults.failed(verb) >= 3);
    while faults.tally().total() < 1000 || !enough() {
        assert!(
            Instant::now() < give_up,
            "{:?}, {:?}, seed {seed}",
            faults.tally(),
            TOLD.map(|verb| faults.failed(verb))
        );
        for _ in 0..10 {
            published.push(publish(&bus, published.len() as u64).await);
        }
        // Most of the work is to be done while calls fail, not when it is over.
        for group in GROUPS {
            while missing(&bus, group, &published, &handled).await.len() > BACKLOG
                && Instant::now() < give_up
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    faults.stop();
    for group in GROUPS {
        loop {
            let mut missing = missing(&bus, group, &published, &handled).await;
            if missing.is_empty() {
                missing = without_a_record(&bus, group, &published).await;
            }
            if missing.is_empty() {
                break;
            }
            assert!(
                Instant::now() < give_up,
                "{} of {} events are lost in {group}, first {:?}; {:?}, seed {seed}",
                missing.len(),
                published.len(),
                missing[0],
                faults.tally()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let lookup = bus.lookup().unwrap();
    for id in &published {
        while lookup.find(*id).await.unwrap().is_empty() {
            assert!(
                Instant::now() < give_up,
                "{id} is not archived, seed {seed}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let tally = faults.tally();
    // A handler runs again only for a fault.
    let runs: u64 = handled
        .lock()
        .unwrap()
        .values()
        .map(|n| u64::from(*n))
        .sum();
    let repeated = runs - handled.lock().unwrap().len() as u64;
    assert!(
        repeated <= tally.total(),
        "{repeated} runs again, {tally:?}, seed {seed}"
    );
    assert!(tally.before > 0 && tally.after > 0, "{tally:?}");
    assert!(tally.duplicates > 0 && tally.lost_shards > 0, "{tally:?}");
    eprintln!("{} events, {tally:?}", published.len());
    bus.shutdown().await.unwrap();
}

// conformance: contract/beside-dead-letter: beside a broker that keeps nothing, a dead letter has every failure with its text; sent back it reaches its group alone, and dies as the same dead letter
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_has_its_failures_and_goes_back_to_its_group() {
    let dir = tempfile::tempdir().unwrap();
    let engine = composed(&dir.path().join("store.db"), Faults::none()).await;
    let handled = Handled::default();
    let bus = Bus::with_engine(engine, BusOptions::default()).unwrap();
    bus.mount(router(&handled)).await.unwrap();
    bus.start().await.unwrap();
    // Every fifth fails for good in one group, and works at its second attempt in the other.
    let id = publish(&bus, 30).await;
    let letters = bus.engine().dead_letters().unwrap();
    let give_up = Instant::now() + DEADLINE;
    let open = async |attempts: u32| loop {
        let known = letters.get(id).await.unwrap();
        let open = known.into_iter().find(|l| l.retried_at.is_none());
        match open {
            Some(letter) if letter.attempts == attempts => return letter,
            other => assert!(Instant::now() < give_up, "{other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let letter = open(4).await;
    assert_eq!(letter.group.as_str(), "shipping");
    assert_eq!(letter.failures.len(), 4);
    assert!(
        letter
            .failures
            .iter()
            .all(|f| f.error.contains("fails in shipping"))
    );
    assert_eq!(letters.retry(DeadLetterFilter::default()).await.unwrap(), 1);
    let again = open(8).await;
    assert_eq!(again.key(), letter.key());
    assert_eq!(again.first_seen_at, letter.first_seen_at);
    assert_eq!(again.failures.len(), 8);
    let by_billing = handled.lock().unwrap().clone();
    assert_eq!(by_billing, HashMap::from([(("billing", id), 1)]));
    bus.shutdown().await.unwrap();
}

// conformance: contract/beside-replay: where the engine cannot deliver once more, a replay into a group sends copies that are addressed to it
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_into_a_group_reaches_that_group_alone() {
    let dir = tempfile::tempdir().unwrap();
    let engine = composed(&dir.path().join("store.db"), Faults::none()).await;
    let handled = Handled::default();
    let bus = Bus::with_engine(engine, BusOptions::default()).unwrap();
    bus.mount(router(&handled)).await.unwrap();
    bus.start().await.unwrap();
    let id = publish(&bus, 1).await;
    let give_up = Instant::now() + DEADLINE;
    let until = async |done: &dyn Fn(&Counts) -> bool| {
        while !done(&handled.lock().unwrap()) {
            assert!(Instant::now() < give_up, "{:?}", handled.lock().unwrap());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    until(&|handled| handled.len() == 2).await;
    while bus.lookup().unwrap().find(id).await.unwrap().is_empty() {
        assert!(Instant::now() < give_up, "not archived");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let report = bus.replay().event(id).into_group("billing").await.unwrap();
    assert_eq!(report.processed, 1);
    until(&|handled| handled.len() == 3).await;
    let counts = handled.lock().unwrap().clone();
    let of = |group| counts.iter().filter(|((g, _), _)| *g == group).count();
    assert_eq!((of("billing"), of("shipping")), (2, 1));
    bus.shutdown().await.unwrap();
}

// conformance: contract/beside-refused: without dead letters a handler, and without any inbox an idempotent one, is refused when it is mounted, with a hint
#[tokio::test]
async fn an_idempotent_handler_without_an_inbox_is_refused() {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let engine = narrow::open(&clock, SHARDS, Faults::none()).unwrap();
    let bus = Bus::with_engine(engine, BusOptions::default()).unwrap();
    let refused = bus.mount(router(&Handled::default())).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unsupported);
    assert!(
        refused
            .hint_text()
            .is_some_and(|hint| hint.contains("store"))
    );
    // Nor is a plain one taken where its dead letters could not be seen.
    let plain = || Router::new().on("a.b", || async {});
    let refused = bus.mount(plain()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unsupported);
    bus.mount(plain().ephemeral()).await.unwrap();
}

fn retry_in(after: Duration) -> Verdict {
    let failure = Failure::new(1, SystemClock.now(), FailureKind::Error, "not yet");
    Verdict::Retry { after, failure }
}

/// A group that wants everything, with one event published to it.
async fn one_event(engine: &Engine) -> GroupName {
    let name: GroupName = "g".parse().unwrap();
    let mut spec = GroupSpec::new(name.clone());
    spec.subscriptions.push(SubscriptionSpec {
        name: "all".to_owned(),
        pattern: Pattern::new("*").unwrap(),
    });
    engine.broker.declare(spec).await.unwrap();
    let event = Event::builder("a.b").build().unwrap();
    engine.broker.append(vec![event]).await.unwrap();
    name
}

// conformance: contract/beside-verdict-once: a verdict on a delivery that was settled already does not reach the broker
#[tokio::test]
async fn a_second_verdict_on_one_delivery_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let engine = composed(&dir.path().join("store.db"), Faults::none()).await;
    let group = one_event(&engine).await;
    let options = ConsumeOptions::new(vec![Pattern::new("*").unwrap()]);
    let mut consumer = engine.broker.consume(group, options).await.unwrap();
    let lease = consumer.fetch(1).await.unwrap().remove(0).lease;
    let settle = async |verdict| {
        let settlement = Settlement::new(lease.clone(), verdict);
        engine
            .broker
            .settle(vec![settlement])
            .await
            .unwrap()
            .remove(0)
    };
    settle(retry_in(Duration::from_secs(3600))).await.unwrap();
    let late = settle(Verdict::Dead { failure: None }).await.unwrap_err();
    assert_eq!(late.code(), Code::LeaseLost);
    // The broker still has it: it is given back when its consumer leaves.
    consumer.close().await.unwrap();
    let info = engine.broker.inspect().await.unwrap();
    let info = info.iter().find(|info| info.name.as_str() == "g").unwrap();
    assert_eq!((info.waiting, info.dead_letters), (1, 0));
}

// conformance: contract/beside-no-attempt: a failure that was no attempt is not counted in the dead letter, nor in the event that tells of it
#[tokio::test]
async fn a_failure_that_was_no_attempt_is_counted_once() {
    let dir = tempfile::tempdir().unwrap();
    let engine = composed(&dir.path().join("store.db"), Faults::none()).await;
    let group = one_event(&engine).await;
    let options = ConsumeOptions::new(vec![Pattern::new("*").unwrap()]);
    let mut consumer = engine.broker.consume(group, options).await.unwrap();
    let settle = async |lease, verdict| {
        let settlement = Settlement::new(lease, verdict);
        let answers = engine.broker.settle(vec![settlement]).await.unwrap();
        answers.into_iter().next().unwrap().unwrap();
    };
    let first = consumer.fetch(1).await.unwrap().remove(0);
    settle(first.lease, retry_in(Duration::ZERO)).await;
    let second = consumer.fetch(1).await.unwrap().remove(0);
    assert_eq!(second.attempt, 2);
    let open = Failure::new(2, SystemClock.now(), FailureKind::Rejected, "open");
    let failure = Some(open);
    settle(second.lease, Verdict::Dead { failure }).await;
    let letters = engine.dead_letters().unwrap();
    let letter = letters.get(second.record.event.id()).await.unwrap();
    assert_eq!((letter[0].attempts, letter[0].failures.len()), (1, 2));
}

// conformance: contract/beside-dropped: what waits in a consumer that was dropped comes to another one when its lease ends
#[tokio::test]
async fn what_waits_in_a_dropped_consumer_comes_to_another() {
    let dir = tempfile::tempdir().unwrap();
    let engine = composed(&dir.path().join("store.db"), Faults::none()).await;
    let group = one_event(&engine).await;
    let options =
        ConsumeOptions::new(vec![Pattern::new("*").unwrap()]).lease(Duration::from_millis(300));
    let broker = &engine.broker;
    let mut first = broker
        .consume(group.clone(), options.clone())
        .await
        .unwrap();
    let delivery = first.fetch(1).await.unwrap().remove(0);
    let retry = Settlement::new(delivery.lease, retry_in(Duration::from_secs(3600)));
    broker.settle(vec![retry]).await.unwrap().remove(0).unwrap();
    drop(first);
    let mut second = broker.consume(group, options).await.unwrap();
    let again = tokio::time::timeout(Duration::from_secs(30), second.fetch(1)).await;
    let again = again.expect("it is not kept for ever").unwrap().remove(0);
    assert_eq!(again.failures.len(), 1);
}
