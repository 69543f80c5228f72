//! The test bus waits for everything that is due, and for nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::testing::{Fate, TestBus};
use everbus::{
    BreakerPolicy, BreakerState, Code, DeadLetterFilter, Event, HandlerError, Json, Message,
    RetryPolicy, Router, State, to,
};
use serde_json::json;
use tokio::sync::Notify;

use super::{SECOND, everywhere, relay};

// conformance: handlers/test-bus-idle: publish waits until everything due is handled, by all groups and with all follow-ups
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_publish_returns_only_when_everything_it_caused_is_handled() {
    everywhere(|builder| async move {
        let slow = |_: Message| tokio::time::sleep(Duration::from_micros(300));
        let router = Router::new()
            .on("relay.step", to(relay).group("relay").name("relay"))
            .on(
                "relay.*",
                to(slow).group("slow").name("slow").concurrency(2),
            )
            .on("relay.step", to(|| async {}).group("quick").name("quick"));
        let bus = builder.open(router).await.unwrap();
        // Often, since a mistake here shows itself by chance.
        for round in 1..=60 {
            bus.publish(("relay.step", 4))
                .await
                .unwrap()
                .assert_handled();
            assert_eq!(bus.published_events("relay.step").len(), round * 5);
            for handler in ["relay", "slow", "quick"] {
                assert_eq!(bus.calls(handler), round * 5, "{handler} in round {round}");
            }
            let stats = bus.bus().stats();
            assert_eq!(stats.types["relay.step"].handled, 15 * round as u64);
        }
    })
    .await;
}

// conformance: handlers/test-bus-idle: publish waits until everything due is handled, by all groups and with all follow-ups
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_was_published_before_is_waited_for_too() {
    everywhere(|builder| async move {
        let handled = Arc::new(AtomicUsize::new(0));
        let count = handled.clone();
        let handler = move || {
            let count = count.clone();
            async move {
                tokio::task::yield_now().await;
                count.fetch_add(1, Ordering::SeqCst);
            }
        };
        let bus = builder.open(Router::new().on("n", handler)).await.unwrap();
        for round in 1..=20 {
            let batch = (0..50).map(|n| ("n", n));
            bus.bus().publish_batch(batch).await.unwrap();
            bus.settle().await.unwrap();
            assert_eq!(handled.load(Ordering::SeqCst), round * 50);
        }
    })
    .await;
}

// conformance: handlers/test-bus-idle: publish waits until everything due is handled, by all groups and with all follow-ups
#[tokio::test]
async fn a_handler_that_takes_its_time_is_waited_for() {
    let (began, finish) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (told, waits) = (began.clone(), finish.clone());
    let handler = move || {
        let (told, waits) = (told.clone(), waits.clone());
        async move {
            told.notify_one();
            waits.notified().await;
        }
    };
    let bus = TestBus::new(Router::new().on("a", handler)).await.unwrap();
    let mut publish = std::pin::pin!(bus.publish(("a", 1)));
    tokio::select! {
        _ = &mut publish => panic!("the handler has not finished"),
        () = began.notified() => {}
    }
    // Still not, however often it is asked.
    let early = tokio::time::timeout(Duration::from_millis(50), &mut publish).await;
    assert!(early.is_err());
    finish.notify_one();
    publish.await.unwrap().assert_handled();
}

// conformance: handlers/test-bus-idle: publish waits until everything due is handled, by all groups and with all follow-ups
#[tokio::test]
async fn a_handler_that_never_ends_is_named() {
    let router = Router::new().on("a.b", to(std::future::pending::<()>).group("stuck"));
    // Long enough for the handler to begin.
    let builder = TestBus::builder().patience(SECOND);
    let bus = builder.open(router).await.unwrap();
    let error = bus.publish(("a.b", 1)).await.unwrap_err();
    assert_eq!(error.code(), Code::Timeout);
    assert!(
        error.message().contains("group stuck is handling a.b"),
        "{error}"
    );
}

// conformance: handlers/test-bus-virtual-time: time is virtual; each retry is made at its own time
#[tokio::test(start_paused = true)]
async fn with_tokios_time_stopped_no_test_waits_for_a_handlers_timeout() {
    let handler = to(std::future::pending::<()>)
        .timeout(3600 * SECOND)
        .retry(RetryPolicy::never());
    let bus = TestBus::new(Router::new().on("a", handler)).await.unwrap();
    let report = bus.publish(("a", 1)).await.unwrap();
    assert_eq!(report.fate("(unnamed)"), Some(&Fate::DeadLettered));
    let kinds: Vec<_> = report.failures().map(|f| f.kind.as_str()).collect();
    assert_eq!(kinds, ["timeout"]);
}

/// Something that works when it is told to.
#[derive(Clone, Default)]
struct Dependency(Arc<std::sync::atomic::AtomicBool>);

impl Dependency {
    fn work(&self, works: bool) {
        self.0.store(works, Ordering::SeqCst);
    }
}

async fn use_it(State(dependency): State<Dependency>) -> Result<(), HandlerError> {
    match dependency.0.load(Ordering::SeqCst) {
        true => Ok(()),
        false => Err(HandlerError::new("down")),
    }
}

fn with_breaker(dependency: &Dependency) -> Router {
    let policy = BreakerPolicy::default().fail_max(2);
    Router::new()
        .on(
            "a",
            to(use_it).group("careful").breaker(policy).concurrency(1),
        )
        .on("a", to(|| async {}).group("other").name("other"))
        .with_state(dependency.clone())
}

// conformance: handlers/test-bus-breaker: an open breaker is no work that is due; moving the clock lets its probe through
#[tokio::test]
async fn a_bus_whose_breaker_is_open_is_idle_until_the_clock_is_moved() {
    everywhere(|builder| async move {
        let dependency = Dependency::default();
        let bus = builder.open(with_breaker(&dependency)).await.unwrap();
        for round in 0..4 {
            bus.publish(("a", round)).await.unwrap();
        }
        // The alert is there, though the bus publishes it in the background.
        assert_eq!(bus.published_events("system.circuit_opened").len(), 1);
        assert!(matches!(
            bus.bus().breakers()[0].state,
            BreakerState::Open { .. }
        ));
        assert_eq!(bus.calls("other"), 4);
        let last = bus.publish(("a", 9)).await.unwrap();
        assert_eq!(last.fate("careful"), Some(&Fate::Waiting));
        assert_eq!(last.fate("other"), Some(&Fate::Handled));

        bus.advance(5 * SECOND).await.unwrap();
        assert_eq!(bus.published_events("system.>").len(), 1);
        dependency.work(true);
        bus.run_to_end().await.unwrap();
        bus.assert_handled(last.id());
        assert_eq!(bus.published_events("system.circuit_closed").len(), 1);
        assert_eq!(bus.bus().breakers()[0].state, BreakerState::Closed);
        bus.assert_no_dead_letters().await;
        assert_eq!(
            bus.bus().stats().groups[&"careful".parse().unwrap()].handled,
            5
        );
    })
    .await;
}

// conformance: handlers/breaker-quiet: a test does not wait for the alert of a best-effort breaker, which never comes.
#[tokio::test]
async fn a_bus_whose_best_effort_breaker_opens_is_idle() {
    everywhere(|builder| async move {
        let policy = BreakerPolicy::default().fail_max(1);
        let route = to(use_it).breaker(policy);
        let route = route.criticality(everbus::Criticality::BestEffort);
        let router = Router::new().on("a", route);
        let router = router.with_state(Dependency::default());
        let bus = builder.open(router).await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        assert!(bus.published_events("system.>").is_empty());
    })
    .await;
}

// conformance: handlers/test-bus-breaker: an open breaker is no work that is due; moving the clock lets its probe through
#[tokio::test]
async fn a_dependency_that_stays_down_keeps_critical_events_waiting() {
    everywhere(|builder| async move {
        let dependency = Dependency::default();
        let bus = builder.open(with_breaker(&dependency)).await.unwrap();
        for n in 0..3 {
            bus.publish_only(("a", n)).await.unwrap();
        }
        // There is no end: they wait for as long as it is down, and no attempt is counted.
        assert_eq!(bus.run_to_end().await.unwrap_err().code(), Code::Timeout);
        assert_eq!(bus.dead_letters().await.unwrap(), []);
        dependency.work(true);
        bus.run_to_end().await.unwrap();
        assert_eq!(bus.dead_letters().await.unwrap(), []);
        let stats = bus.bus().stats();
        assert_eq!(stats.groups[&"careful".parse().unwrap()].handled, 3);
    })
    .await;
}

// conformance: handlers/test-bus-breaker: an open breaker is no work that is due; moving the clock lets its probe through
#[tokio::test]
async fn one_open_breaker_does_not_hide_the_work_of_another_group() {
    everywhere(|builder| async move {
        let dependency = Dependency::default();
        let named = |name: &str, open_for| {
            let policy = BreakerPolicy::default().fail_max(1).open_for(open_for);
            let route = to(use_it)
                .group(name)
                .name(name)
                .depends_on(format!("{name} service"));
            route.breaker(policy).concurrency(1)
        };
        let router = Router::new()
            .on("a", named("short", 2 * SECOND))
            .on("a", named("long", 1000 * SECOND))
            .with_state(dependency.clone());
        let bus = builder.open(router).await.unwrap();
        let report = bus.publish(("a", 1)).await.unwrap();
        assert_eq!(bus.published_events("system.circuit_opened").len(), 2);
        dependency.work(true);
        bus.advance(2 * SECOND).await.unwrap();
        let now = bus.publish(("a", 2)).await.unwrap();
        assert_eq!(now.fate("short"), Some(&Fate::Handled));
        assert_eq!(now.fate("long"), Some(&Fate::Waiting));
        assert_eq!((bus.calls("short"), bus.calls("long")), (3, 1));
        bus.run_to_end().await.unwrap();
        bus.assert_handled(report.id());
        bus.assert_handled(now.id());
    })
    .await;
}

// conformance: handlers/test-bus-idle: publish waits until everything due is handled, by all groups and with all follow-ups
#[tokio::test]
async fn events_behind_a_waiting_one_of_the_same_key_are_not_due() {
    everywhere(|builder| async move {
        let router = Router::new().on("a", to(|| async {}).name("h").group("g").ordered());
        let bus = builder.open(router).await.unwrap();
        let keyed = |key: &str, n: u32| Event::builder("a").key(key).json(&n);
        bus.fail_next(1);
        let first = bus.publish(keyed("k", 1)).await.unwrap();
        assert!(matches!(first.fate("g"), Some(Fate::Retrying { .. })));
        let behind = bus.publish(keyed("k", 2)).await.unwrap();
        assert_eq!(behind.fate("g"), Some(&Fate::Waiting));
        bus.publish(keyed("other", 3))
            .await
            .unwrap()
            .assert_handled();
        bus.advance(SECOND).await.unwrap();
        bus.assert_handled(first.id());
        bus.assert_handled(behind.id());
        assert_eq!(bus.calls("h"), 4);
    })
    .await;
}

// conformance: handlers/test-bus-idle: publish waits until everything due is handled, by all groups and with all follow-ups
#[tokio::test]
async fn a_dead_letter_that_is_sent_back_is_work_again() {
    everywhere(|builder| async move {
        let router = Router::new().on("a", to(|| async {}).name("h").retry(RetryPolicy::never()));
        let bus = builder.open(router).await.unwrap();
        bus.fail_next(1);
        let report = bus.publish(("a", 1)).await.unwrap();
        assert_eq!(report.fate("(unnamed)"), Some(&Fate::DeadLettered));
        let filter = DeadLetterFilter::default();
        assert_eq!(bus.bus().dead_letters().retry_all(filter).await.unwrap(), 1);
        bus.settle().await.unwrap();
        bus.assert_handled(report.id());
        bus.assert_no_dead_letters().await;
    })
    .await;
}

#[tokio::test]
async fn handlers_come_and_go_while_the_test_runs() {
    everywhere(|builder| async move {
        let bus = builder.open(Router::new()).await.unwrap();
        let counted = Arc::new(AtomicUsize::new(0));
        let count = counted.clone();
        let handler = move |Json(_): Json<u32>| {
            count.fetch_add(1, Ordering::SeqCst);
            async {}
        };
        let subscribe = bus.bus().subscribe("a").group("late");
        let id = subscribe.handler(handler).await.unwrap();
        bus.publish(("a", 1)).await.unwrap().assert_handled();
        bus.bus().unsubscribe(id).await.unwrap();
        // No handler here takes it, so it is not waited for.
        let report = bus.publish(("a", 2)).await.unwrap();
        assert_eq!(report.fate("late"), None);
        assert_eq!(counted.load(Ordering::SeqCst), 1);
    })
    .await;
}

#[tokio::test]
async fn an_event_dropped_to_make_room_is_reported_as_skipped() {
    let limit = everbus::StreamLimit::new(1).on_full(everbus::OnFull::DropOldest);
    let router = Router::new().on("a", to(|| async {}).group("g").name("h"));
    let builder = TestBus::builder().bus(|bus| bus.stream_limit("a", limit));
    let bus = builder.open(router).await.unwrap();
    bus.fail_next(1);
    let first = bus.publish_only(("a", 1)).await.unwrap();
    bus.settle().await.unwrap();
    let report = bus.report(&first).await.unwrap();
    assert!(matches!(report.fate("g"), Some(Fate::Retrying { .. })));
    bus.publish(("a", 2)).await.unwrap().assert_handled();
    let report = bus.report(&first).await.unwrap();
    assert!(
        matches!(report.fate("g"), Some(Fate::Skipped { .. })),
        "{report}"
    );
    bus.run_to_end().await.unwrap();
    assert_eq!(bus.calls("h"), 2);
}

#[tokio::test]
async fn a_bus_that_was_shut_down_is_not_waited_for() {
    let bus = TestBus::new(Router::new().on("a", || async {}))
        .await
        .unwrap();
    bus.bus().shutdown().await.unwrap();
    assert_eq!(
        bus.settle().await.unwrap_err().code(),
        Code::EventBusShutdownError
    );
    let refused = bus.publish(("a", json!(1))).await.unwrap_err();
    assert_eq!(refused.code(), Code::EventBusShutdownError);
}
