//! The circuit breaker from end to end: when it opens, what becomes of events meanwhile, and how it
//! closes.

mod consumer;
mod criticality;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::{
    BreakerInfo, BreakerPolicy, BreakerState, Bus, Clock, Context, HandlerError, Json, Receipt,
    Router, State, permanent, skip, sqlite, to,
};
use serde_json::Value;
use tracing::Level;

use crate::logs::{lines, lines_about};
use crate::support::{
    Kind, Lab, PATIENCE, eventually, handled, in_time, on_every_durable_engine, on_every_engine,
    published, wait_for_retry,
};

const OPEN_FOR: Duration = Duration::from_secs(30);

/// What a handler depends on, and the attempts that were made at it.
#[derive(Clone, Default)]
pub(super) struct Dependency {
    pub(super) works: Arc<AtomicBool>,
    attempts: Arc<Mutex<BTreeMap<u32, Vec<u32>>>>,
}

impl Dependency {
    pub(super) fn works(&self, works: bool) {
        self.works.store(works, Ordering::SeqCst);
    }

    pub(super) fn attempts(&self) -> usize {
        self.attempts.lock().unwrap().values().map(Vec::len).sum()
    }

    /// The attempts for one event.
    pub(super) fn attempts_for(&self, n: u32) -> Vec<u32> {
        let attempts = self.attempts.lock().unwrap();
        attempts.get(&n).cloned().unwrap_or_default()
    }
}

/// A handler that calls the dependency.
pub(super) async fn call(
    Json(n): Json<u32>,
    context: Context,
    State(dependency): State<Dependency>,
) -> Result<(), &'static str> {
    let mut attempts = dependency.attempts.lock().unwrap();
    attempts.entry(n).or_default().push(context.attempt());
    let works = dependency.works.load(Ordering::SeqCst);
    works.then_some(()).ok_or("the dependency is down")
}

pub(crate) fn the_breaker(bus: &Bus) -> BreakerInfo {
    let mut breakers = bus.breakers();
    assert_eq!(breakers.len(), 1, "{breakers:?}");
    breakers.remove(0)
}

pub(crate) async fn opened(bus: &Bus) {
    eventually("the breaker opens", || async {
        matches!(the_breaker(bus).state, BreakerState::Open { .. })
    })
    .await;
}

pub(crate) async fn closed(bus: &Bus) {
    eventually("the breaker closes", || async {
        the_breaker(bus).state == BreakerState::Closed
    })
    .await;
}

/// The payloads of an alert, once there are so many.
pub(super) async fn alerts(bus: &Bus, event_type: &str, expected: usize) -> Vec<Value> {
    eventually("the alert is published", || async {
        published(bus, event_type).await.len() >= expected
    })
    .await;
    let alerts = published(bus, event_type).await;
    assert_eq!(alerts.len(), expected);
    alerts.iter().map(|r| r.event.json().unwrap()).collect()
}

// conformance: framework/breaker-opens: the breaker of a consumer opens after 5 failures.
// conformance: framework/breaker-half-open: after 30 s one attempt is let through; it decides.
// conformance: framework/criticality-critical: a critical event waits for the breaker to close and is processed then; alert at once.
// conformance: handlers/breaker-critical: critical stops fetching: nothing is held, no attempt is burnt.
// conformance: handlers/breaker-events: system.circuit_opened and system.circuit_closed are published.
#[tokio::test]
async fn critical_events_wait_for_the_breaker_without_an_attempt() {
    const EVENTS: u32 = 20;
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let dependency = Dependency::default();
        let route = to(call).breaker(BreakerPolicy::default()).concurrency(1);
        let router = Router::new()
            .on("a", route.group("g"))
            .on("a", to(|| async {}).group("beside"))
            .with_state(dependency.clone());
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let began = lab.clock.now();
        let mut receipts = bus
            .publish_batch((0..EVENTS).map(|n| ("a", n)))
            .await
            .unwrap();
        opened(&bus).await;
        let info = the_breaker(&bus);
        let until = began.plus(OPEN_FOR);
        assert_eq!(info.name, "g");
        assert_eq!(info.state, BreakerState::Open { until });
        assert_eq!((info.failures, info.times_opened), (5, 1));
        let alert = &alerts(&bus, "system.circuit_opened", 1).await[0];
        assert_eq!(alert["dependency"], "g");
        assert_eq!(alert["group"], "g");
        assert_eq!(alert["criticality"], "critical");
        assert_eq!(alert["severity"], "critical");
        assert_eq!(alert["failures"], 5);
        assert_eq!(alert["until"], until.to_string());

        // The group gives back what it holds; others go on.
        let inspect = async |name: &str| {
            let groups = bus.groups().await.unwrap();
            let found = groups.into_iter().find(|group| group.name.as_str() == name);
            found.unwrap()
        };
        eventually("nothing is held", || async {
            inspect("g").await.in_flight == 0
        })
        .await;
        lab.clock.advance(OPEN_FOR - Duration::from_millis(1));
        receipts.push(handled_beside(&bus, EVENTS, &inspect).await);
        assert_eq!(
            dependency.attempts(),
            5,
            "not a single call while it is open"
        );

        // One probe, which fails: 30 s more.
        lab.clock.advance(Duration::from_millis(1));
        eventually("the probe fails", || async { dependency.attempts() == 6 }).await;
        opened(&bus).await;
        let again = lab.clock.now().plus(OPEN_FOR);
        assert_eq!(the_breaker(&bus).state, BreakerState::Open { until: again });
        receipts.push(handled_beside(&bus, EVENTS + 1, &inspect).await);
        assert_eq!(dependency.attempts(), 6, "one probe, not two");

        dependency.works(true);
        lab.clock.advance(OPEN_FOR);
        closed(&bus).await;
        // The probe that failed waits a moment longer than the breaker.
        lab.clock.advance(Duration::from_secs(1));
        for receipt in &receipts {
            let settled = receipt.settled().await.unwrap();
            assert!(settled.dead_lettered.is_empty());
        }
        let all = receipts.len() as u32;
        assert_eq!(dependency.attempts() as u32, all + 6);
        // Five attempts were counted: neither waiting nor the failed probe is one.
        let each = (0..all).map(|n| dependency.attempts_for(n));
        let burnt: u32 = each.map(|attempts| attempts.last().unwrap() - 1).sum();
        assert_eq!(burnt, 5);
        let alert = &alerts(&bus, "system.circuit_closed", 1).await[0];
        assert_eq!(
            (&alert["dependency"], &alert["group"]),
            (&"g".into(), &"g".into())
        );
        alerts(&bus, "system.circuit_opened", 1).await;
        bus.shutdown().await.unwrap();
    })
    .await;
}

/// An event comes and goes in the group beside, so that the first one had its chance.
async fn handled_beside(
    bus: &Bus,
    n: u32,
    inspect: &impl AsyncFn(&str) -> everbus::GroupInfo,
) -> Receipt {
    let before = inspect("beside").await.position;
    let receipt = bus.publish(("a", n)).await.unwrap();
    eventually("the group beside goes on", || async {
        let beside = inspect("beside").await;
        beside.position != before
            && beside.position.reaches(&before)
            && beside.behind == 0
            && beside.in_flight == 0
    })
    .await;
    eventually("the first one holds nothing", || async {
        inspect("g").await.in_flight == 0
    })
    .await;
    receipt
}

// conformance: framework/breaker-log: a rejection is logged with resilience_event=circuit_breaker_rejected and the dependency; opening and closing are logged too.
#[tokio::test]
async fn what_the_breaker_does_is_logged_with_its_dependency() {
    on_every_engine(|lab| async move {
        let name = format!("logged-{:?}", lab.kind);
        let bus = lab.open().await;
        let dependency = Dependency::default();
        let route = to(call)
            .depends_on(name.clone())
            .breaker(BreakerPolicy::default().fail_max(1))
            .criticality(everbus::Criticality::BestEffort);
        let router = Router::new().on("a", route).group("g");
        bus.mount(router.with_state(dependency.clone()))
            .await
            .unwrap();
        bus.start().await.unwrap();
        let failed = bus.publish(("a", 1)).await.unwrap();
        opened(&bus).await;
        let rejected = handled(&bus, ("a", 2)).await;
        dependency.works(true);
        lab.clock.advance(OPEN_FOR);
        failed.settled().await.unwrap();
        closed(&bus).await;
        let logged = lines(|line| line.field("dependency") == Some(&name));
        let events: Vec<&str> = logged
            .iter()
            .filter_map(|l| l.field("resilience_event"))
            .collect();
        let expected = [
            "circuit_breaker_opened",
            "circuit_breaker_rejected",
            "circuit_breaker_closed",
        ];
        assert_eq!(events, expected);
        let line = &logged[1];
        assert_eq!(line.level, Level::WARN);
        assert_eq!(
            line.field("event_id"),
            Some(rejected.id().to_string().as_str())
        );
        assert_eq!(line.field("event_type"), Some("a"));
        assert_eq!(line.field("group"), Some("g"));
        assert_eq!(line.field("criticality"), Some("best_effort"));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/breaker-dependency: a named dependency has one breaker for all groups that depend on it.
#[tokio::test]
async fn groups_that_share_a_dependency_share_its_breaker() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let dependency = Dependency::default();
        let shared = || to(call).depends_on("bank");
        let router = Router::new()
            .on("a", shared().group("x"))
            .on("b", shared().group("y"))
            .on("b", to(|| async {}).group("beside"))
            .with_state(dependency.clone());
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        bus.publish_batch((0..5).map(|n| ("a", n))).await.unwrap();
        opened(&bus).await;
        assert_eq!(the_breaker(&bus).name, "bank");
        // The other group has not failed, and stops all the same.
        let receipt = bus.publish(("b", 100)).await.unwrap();
        eventually("the group beside handles it", || async {
            crate::support::is_done(&bus, receipt.seq(), "beside").await
        })
        .await;
        assert!(dependency.attempts_for(100).is_empty());
        dependency.works(true);
        in_time(&lab, &bus, Duration::from_secs(1), "both go on", || async {
            closed_now(&bus) && dependency.attempts_for(100) == [1]
        })
        .await;
        receipt.settled().await.unwrap();
        bus.shutdown().await.unwrap();
    })
    .await;
}

fn closed_now(bus: &Bus) -> bool {
    the_breaker(bus).state == BreakerState::Closed
}

// conformance: handlers/breaker-dependency: a dependency may have the name of a group; each has its own breaker.
#[tokio::test]
async fn a_dependency_that_is_called_like_a_group_has_its_own_breaker() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let dependency = Dependency::default();
        let touchy = BreakerPolicy::default().fail_max(1);
        let router = Router::new()
            .on("a", to(|| async {}).breaker(touchy))
            .on("b", to(call).depends_on("mail").breaker(touchy))
            .group("mail")
            .merge(Router::new().on("b", to(|| async {}).group("beside")))
            .with_state(dependency.clone());
        bus.mount(router).await.unwrap();
        assert_eq!(bus.breakers().len(), 2);
        bus.start().await.unwrap();
        let failed = bus.publish(("b", 1)).await.unwrap();
        eventually("one of them opens", || async {
            bus.breakers()
                .iter()
                .any(|b| b.state != BreakerState::Closed)
        })
        .await;
        let waits = bus.publish(("b", 2)).await.unwrap();
        eventually("the group beside handles it", || async {
            crate::support::is_done(&bus, waits.seq(), "beside").await
        })
        .await;
        let rejected = lines_about(waits.id());
        assert!(rejected.is_empty(), "it was not even fetched: {rejected:?}");
        wait_for_retry(&bus, failed.seq(), "mail", 1).await;
        dependency.works(true);
        lab.clock.advance(OPEN_FOR);
        failed.settled().await.unwrap();
        waits.settled().await.unwrap();
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/breaker-counts: every failed attempt counts once, whatever failed; an event that cannot be read and a skip say nothing about the dependency.
#[tokio::test]
async fn what_says_nothing_about_the_dependency_does_not_open_the_breaker() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let handler = |Json(n): Json<u32>| async move {
            match n {
                0 => Err(skip("not mine")),
                1 => panic!("it panics"),
                2 => Err(permanent("for good")),
                _ => Err(HandlerError::new("it fails")),
            }
            .map(|()| ("never", 1))
        };
        let policy = BreakerPolicy::default().fail_max(3);
        bus.subscribe("a")
            .breaker(policy)
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        for _ in 0..5 {
            for harmless in ["text".into(), Value::from(0)] {
                let receipt = bus.publish(("a", harmless)).await.unwrap();
                receipt.settled().await.unwrap();
            }
        }
        let info = the_breaker(&bus);
        assert_eq!((info.state, info.failures), (BreakerState::Closed, 0));
        for n in 1..=2 {
            bus.publish(("a", n))
                .await
                .unwrap()
                .settled()
                .await
                .unwrap();
        }
        assert_eq!(the_breaker(&bus).failures, 2);
        bus.publish(("a", 3)).await.unwrap();
        opened(&bus).await;
        assert_eq!(the_breaker(&bus).failures, 3);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/breaker-counts: an effect that fails in its transaction is a failed attempt too.
#[tokio::test]
async fn a_transaction_that_fails_counts_for_the_breaker() {
    let lab = Lab::new(Kind::Sqlite);
    let bus = lab.open().await;
    let dependency = Dependency::default();
    let works = dependency.works.clone();
    let books = move || {
        let works = works.clone();
        async move {
            sqlite::in_transaction(move |_| {
                let works = works.load(Ordering::SeqCst);
                works.then_some(()).ok_or("cannot be booked")
            })
        }
    };
    let policy = BreakerPolicy::default().fail_max(3);
    bus.subscribe("a")
        .breaker(policy)
        .handler(books)
        .await
        .unwrap();
    bus.start().await.unwrap();
    let receipts = bus.publish_batch((0..3).map(|n| ("a", n))).await.unwrap();
    opened(&bus).await;
    assert_eq!(the_breaker(&bus).failures, 3);
    for receipt in &receipts {
        wait_for_retry(&bus, receipt.seq(), "", 1).await;
    }
    // The probe is decided by the transaction, not by the handler.
    lab.clock.advance(OPEN_FOR);
    eventually("the probe has failed", || async {
        the_breaker(&bus).failures == 4
    })
    .await;
    opened(&bus).await;
    // What becomes of it is durable: it waits from now on, not from a later moment of the clock.
    eventually("nothing is held", || async {
        bus.groups().await.unwrap()[0].in_flight == 0
    })
    .await;
    dependency.works(true);
    lab.clock.advance(OPEN_FOR);
    closed(&bus).await;
    // The probe that failed waits a moment longer than the breaker.
    lab.clock.advance(Duration::from_secs(1));
    for receipt in receipts {
        assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
    }
    bus.shutdown().await.unwrap();
}

// conformance: handlers/breaker-probe-unread: a probe that says nothing leaves the probe to the next event.
#[tokio::test]
async fn an_unreadable_event_does_not_use_up_the_probe() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let dependency = Dependency::default();
        let route = to(call).breaker(BreakerPolicy::default().fail_max(1));
        let once = route.retry(everbus::RetryPolicy::never());
        let router = Router::new().on("a", once).with_state(dependency.clone());
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        opened(&bus).await;
        let unreadable = bus.publish(("a", "text")).await.unwrap();
        let next = bus.publish(("a", 2)).await.unwrap();
        dependency.works(true);
        lab.clock.advance(OPEN_FOR);
        assert_eq!(unreadable.settled().await.unwrap().dead_lettered.len(), 1);
        assert!(next.settled().await.unwrap().dead_lettered.is_empty());
        closed(&bus).await;
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/breaker-unsubscribe: a group goes on when the handler whose breaker is open is unsubscribed.
#[tokio::test]
async fn a_group_goes_on_without_the_handler_whose_breaker_is_open() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let policy = BreakerPolicy::default().fail_max(1);
        let fails = || async { Err::<(), _>("down") };
        let router = Router::new()
            .on("a", to(fails).breaker(policy))
            .on("b", || async {})
            .group("g");
        let ids = bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        opened(&bus).await;
        let receipt = bus.publish(("b", 1)).await.unwrap();
        bus.unsubscribe(ids[0]).await.unwrap();
        receipt.settled().await.unwrap();
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/breaker-shutdown: a shutdown while the breaker is open ends at once, and what waited is still owed.
#[tokio::test]
async fn a_shutdown_while_the_breaker_is_open_neither_hangs_nor_loses() {
    on_every_durable_engine(|lab| async move {
        let dependency = Dependency::default();
        let open = async || {
            let bus = lab.open().await;
            let route = to(call).breaker(BreakerPolicy::default().fail_max(2));
            let router = Router::new().on("a", route).group("g").concurrency(1);
            bus.mount(router.with_state(dependency.clone()))
                .await
                .unwrap();
            bus.start().await.unwrap();
            bus
        };
        let bus = open().await;
        bus.publish_batch((0..10).map(|n| ("a", n))).await.unwrap();
        opened(&bus).await;
        let report = bus.shutdown_within(Duration::from_secs(3600));
        let report = tokio::time::timeout(PATIENCE, report).await;
        let report = report.expect("the shutdown ends by itself").unwrap();
        assert_eq!((report.abandoned, report.unsettled), (0, 0));
        assert!(report.closed);
        assert_eq!(dependency.attempts(), 2);

        dependency.works(true);
        let bus = open().await;
        lab.clock.advance(OPEN_FOR);
        eventually("all are handled", || async {
            (0..10).all(|n| !dependency.attempts_for(n).is_empty())
                && bus.stats().types.get("a").is_some_and(|a| a.handled == 10)
        })
        .await;
        assert_eq!(dependency.attempts(), 12);
        bus.shutdown().await.unwrap();
    })
    .await;
}
