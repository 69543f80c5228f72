//! Where layers meet: dead letters and staleness, shared breakers, effects of several handlers, caps and
//! prefetching.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use everbus::{
    BreakerPolicy, BreakerState, Bus, Criticality, OnFull, Router, StreamLimit, permanent, sqlite,
    to,
};
use serde_json::Value;

use crate::support::{Kind, Lab, eventually, on_every_engine, published, wait_for_retry};

// conformance: handlers/stale-retried: a dead letter that somebody retries is handled, however old it is.
#[tokio::test]
async fn a_retried_dead_letter_is_not_skipped_as_stale() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (works, handled) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicUsize::new(0)),
        );
        let (w, h) = (works.clone(), handled.clone());
        let handler = move || {
            let (w, h) = (w.clone(), h.clone());
            async move {
                if !w.load(Ordering::SeqCst) {
                    return Err(permanent("down"));
                }
                h.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }
        };
        let route = to(handler)
            .group("g")
            .max_staleness(Duration::from_secs(60));
        bus.mount(Router::new().on("a", route)).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        assert_eq!(receipt.settled().await.unwrap().dead_lettered.len(), 1);
        works.store(true, Ordering::SeqCst);
        lab.clock.advance(Duration::from_secs(3600));
        assert_eq!(bus.dead_letters().retry(receipt.id()).await.unwrap(), 1);
        receipt.settled().await.unwrap();
        bus.shutdown().await.unwrap();
        assert_eq!(handled.load(Ordering::SeqCst), 1);
    })
    .await;
}

/// Opens the breaker of "bank" through the group x, whose next attempt hangs as the probe.
async fn with_a_hanging_probe(lab: &Lab, bus: &Bus) {
    let hangs = Arc::new(AtomicBool::new(false));
    let h = hangs.clone();
    let x = move || {
        let h = h.clone();
        async move {
            if h.load(Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            Err::<(), _>("down")
        }
    };
    let policy = BreakerPolicy::default().fail_max(1);
    let on_bank = |route: everbus::Route| route.depends_on("bank").breaker(policy);
    let router = Router::new()
        .on("a", on_bank(to(x).group("x")))
        .on("b", on_bank(to(|| async {}).group("y")));
    bus.mount(router).await.unwrap();
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", 1)).await.unwrap();
    let state = || bus.breakers()[0].state;
    eventually("it opens", || async {
        matches!(state(), BreakerState::Open { .. })
    })
    .await;
    // What it waits for is counted from now, not from a later moment of the clock.
    wait_for_retry(bus, receipt.seq(), "x", 1).await;
    hangs.store(true, Ordering::SeqCst);
    lab.clock.advance(Duration::from_secs(31));
    let probing = || async { bus.stats().groups[&"x".parse().unwrap()].queue_depth == 1 };
    eventually("the probe is under way", probing).await;
}

// conformance: handlers/breaker-shared-probe: while one group makes the probe of a shared dependency, the others stop fetching: of 100 events at most two were fetched and rejected.
#[tokio::test]
async fn a_group_does_not_fetch_while_another_group_probes() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        with_a_hanging_probe(&lab, &bus).await;
        for n in 0..100 {
            bus.publish(("b", n)).await.unwrap();
        }
        // A group that needs nothing from the bank sees all of them meanwhile.
        let beside = Router::new().on(
            "b",
            to(|| async {})
                .group("z")
                .start_from(everbus::StartFrom::First),
        );
        bus.mount(beside).await.unwrap();
        eventually("the group beside is done", || async {
            let stats = bus.stats();
            stats
                .groups
                .get(&"z".parse().unwrap())
                .is_some_and(|g| g.handled == 100)
        })
        .await;
        let stats = bus.stats();
        assert!(stats.types["b"].breaker_rejections <= 2, "{stats:?}");
        bus.shutdown_within(Duration::ZERO).await.unwrap();
    })
    .await;
}

// conformance: handlers/breaker-effects: of several handlers with effects, the one whose effect failed is blamed, by its breaker and in the dead letter.
#[tokio::test]
async fn the_handler_whose_effect_failed_is_blamed() {
    let lab = Lab::new(Kind::Sqlite);
    let bus = lab.open().await;
    let first = || async { sqlite::in_transaction(|_| Err::<(), _>(permanent("the first fails"))) };
    let second = || async { sqlite::in_transaction(|_| ()) };
    let policy = BreakerPolicy::default().fail_max(2);
    let route =
        |route: everbus::Route, name: &str| route.name(name).depends_on(name).breaker(policy);
    let router = Router::new()
        .group("g")
        .on("a", route(to(first), "one"))
        .on("a", route(to(second), "two"));
    bus.mount(router).await.unwrap();
    bus.start().await.unwrap();
    for n in 0..2 {
        bus.publish(("a", n))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
    }
    let opened = |name: &str| {
        let found = bus.breakers().into_iter().find(|b| b.name == name);
        found.unwrap().times_opened
    };
    assert_eq!((opened("one"), opened("two")), (1, 0));
    for letter in bus.dead_letters().list().await.unwrap() {
        assert_eq!(letter.failures[0].handler.as_deref(), Some("one"));
    }
    bus.shutdown().await.unwrap();
}

// conformance: framework/backpressure-drop: a stream that drops its oldest stays near its cap, also while a slow consumer is connected.
#[tokio::test]
async fn a_slow_consumer_does_not_keep_a_stream_from_dropping_its_oldest() {
    on_every_engine(|lab| async move {
        let engine = lab.open().await.engine().clone();
        let limit = StreamLimit::new(10).on_full(OnFull::DropOldest);
        let bus = lab
            .builder()
            .stream_limit("a", limit)
            .with_engine(engine)
            .unwrap();
        let slow = to(std::future::pending::<()>).group("g").concurrency(1);
        bus.mount(Router::new().on("a", slow)).await.unwrap();
        bus.start().await.unwrap();
        for n in 0..200 {
            bus.publish(("a", n)).await.unwrap();
        }
        let pattern = "a".parse().unwrap();
        let owed = bus
            .engine()
            .depth()
            .unwrap()
            .depth(pattern, 1000)
            .await
            .unwrap();
        assert!(owed <= 12, "{owed} are owed");
        let dropped = bus.stats().types["a"].skipped.dropped;
        assert!(dropped >= 188, "{dropped} were dropped");
        bus.shutdown_within(Duration::ZERO).await.unwrap();
    })
    .await;
}

// conformance: handlers/breaker-severity: the alert of a shared breaker is as loud as the most critical handler that shares it asks for.
#[tokio::test]
async fn the_alert_is_critical_if_a_critical_group_stops() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let policy = BreakerPolicy::default().fail_max(1);
        let fails = || async { Err::<(), _>("down") };
        let on_bank = |route: everbus::Route, criticality| {
            route
                .depends_on("bank")
                .breaker(policy)
                .criticality(criticality)
        };
        let router = Router::new()
            .on("a", on_bank(to(fails).group("x"), Criticality::BestEffort))
            .on(
                "b",
                on_bank(to(|| async {}).group("y"), Criticality::Critical),
            );
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        let alerts = || async { published(&bus, "system.circuit_opened").await };
        eventually("the alert is there", || async {
            !alerts().await.is_empty()
        })
        .await;
        let alert: Value = alerts().await[0].event.json().unwrap();
        assert_eq!(alert["severity"], "critical");
        assert_eq!(alert["criticality"], "critical");
        bus.shutdown().await.unwrap();
    })
    .await;
}
