//! What a configuration file says takes effect on the handlers of a bus.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use everbus::{
    BreakerPolicy, BreakerState, Bus, Clock, Code, Config, Durability, Event, EventState,
    FailureKind, HandlerError, Json, Message, Router, to,
};
use serde_json::json;

use crate::support::{
    Lab, broken, eventually, fine, given_up, handled, on_every_engine, recorder, state_in,
    wait_for_retry,
};

const FILE: &str = "
streams:
  overrides:
    'orders:order-placed': {maxlen: 2, on_full: reject}
consumers:
  mail:
    stream: orders:order-placed
    criticality: standard
    circuit_breaker: {fail_max: 2, timeout_duration: 10}
    retry: {max_attempts: 2, backoff_multiplier: 7, backoff_max: 100}
    processing_timeout: 20
backpressure:
  max_staleness_ms:
    'signals:price-update': 5000
";

// conformance: contract/require-durability: an engine that promises less than the file requires is refused, with the setting to change
#[tokio::test]
async fn an_engine_below_the_required_durability_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.db");
    let text = |grade: &str| {
        format!(
            "broker: {{url: 'sqlite:{}', require_durability: {grade}}}",
            file.display()
        )
    };
    let parsed = |grade: &str| Config::parse(&text(grade), "everbus.yaml").unwrap();
    for grade in ["memory", "process", "power_loss"] {
        let bus = Bus::builder()
            .config(&parsed(grade))
            .open_configured()
            .await
            .unwrap();
        bus.shutdown().await.unwrap();
    }
    let refused = Bus::builder()
        .config(&parsed("replicated"))
        .open_configured()
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::NotDurable);
    assert!(refused.message().contains("power_loss"), "{refused}");
    // A weaker setting of the engine is named.
    let weak = Bus::builder()
        .durability(everbus::Durable::Normal)
        .require_durability(Durability::PowerLoss)
        .open(file.to_str().unwrap())
        .await
        .unwrap_err();
    assert_eq!(weak.code(), Code::NotDurable);
    assert!(
        weak.hint_text().unwrap().contains("Durable::Full"),
        "{weak:?}"
    );
    // Beside a broker the weaker of the two counts: dead letters are only in the store.
    let beside = Bus::builder()
        .store("memory:")
        .require_durability(Durability::Process)
        .open(file.to_str().unwrap())
        .await
        .unwrap_err();
    assert_eq!(beside.code(), Code::NotDurable);
    let unknown = Config::parse(&text("power-loss"), "everbus.yaml").unwrap_err();
    assert!(
        unknown.hint_text().unwrap().contains("did you mean"),
        "{unknown:?}"
    );
}

async fn open(lab: &Lab) -> Bus {
    let config = Config::parse(FILE, "everbus.yaml").unwrap();
    let engine = lab.open().await.engine().clone();
    lab.builder().config(&config).with_engine(engine).unwrap()
}

// conformance: framework/config-applied: the file's retry, timeout, breaker and criticality hold for the handlers of its consumer, over what the program says.
// conformance: handlers/config-spec-file: the file's retry, timeout, breaker and criticality hold for the handlers of its consumer, over what the program says.
#[tokio::test]
async fn the_settings_of_a_consumer_hold_for_its_handlers() {
    on_every_engine(|lab| async move {
        let bus = open(&lab).await;
        let allowed = Arc::new(AtomicU32::new(0));
        let seen = allowed.clone();
        let handler = move |m: Message| {
            seen.store(m.max_attempts(), Ordering::SeqCst);
            let left = m
                .deadline()
                .saturating_duration_since(tokio::time::Instant::now());
            async move {
                assert!(left > Duration::from_secs(10), "the file says 20 s");
                Err::<(), _>(HandlerError::new("mail server not reached"))
            }
        };
        let route = to(handler).group("mail").timeout(Duration::from_secs(1));
        bus.mount(Router::new().on("orders.order.*", route))
            .await
            .unwrap();
        bus.start().await.unwrap();
        let first = bus.publish(("orders.order.placed", 1)).await.unwrap();
        let waiting = || async {
            let states = bus
                .lookup()
                .unwrap()
                .states(first.position())
                .await
                .unwrap();
            states[0].due_at
        };
        eventually("the first attempt failed", || async {
            waiting().await.is_some()
        })
        .await;
        assert_eq!(allowed.load(Ordering::SeqCst), 2);
        let wait = waiting().await.unwrap().since(first.received_at());
        assert_eq!(wait, Duration::from_secs(7));
        lab.clock.advance(wait);
        let settled = first.settled().await.unwrap();
        assert_eq!(settled.dead_lettered.len(), 1);

        // Two failures opened the breaker; a standard consumer's events go to the dead letters.
        let breaker = bus.breakers().remove(0);
        assert_eq!(breaker.name, "mail");
        assert!(
            matches!(breaker.state, BreakerState::Open { .. }),
            "{breaker:?}"
        );
        let second = bus.publish(("orders.order.placed", 2)).await.unwrap();
        second.settled().await.unwrap();
        let letters = bus.dead_letters().list().await.unwrap();
        let kinds: Vec<_> = letters
            .iter()
            .map(|l| l.failures[l.failures.len() - 1].kind)
            .collect();
        assert_eq!(kinds, [FailureKind::Rejected, FailureKind::Error]);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/config-spec-file: what the specification's file says of its consumers and of staleness holds for them.
#[tokio::test]
async fn the_file_of_the_specification_holds_for_its_consumers() {
    on_every_engine(|lab| async move {
        let config = crate::config::specification();
        let engine = lab.open().await.engine().clone();
        let bus = lab.builder().config(&config).with_engine(engine).unwrap();
        let (notify, mut notified) = recorder(broken);
        let (signal, mut signalled) = recorder(fine);
        let mail = "notification-service";
        let router = Router::new()
            .on("orders.order.placed", to(notify).group(mail))
            .on("signals.price.update", to(signal).group("signal-processor"));
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let aged = |event_type: &str, age: u64| {
            let at = lab.clock.now().minus(Duration::from_millis(age));
            Event::builder(event_type).occurred_at(at).json(&1)
        };

        // Three attempts, after 1 s and 2 s; an order is never too old.
        let old = aged("orders.order.placed", 1_000_000_000);
        let first = bus.publish(old).await.unwrap();
        for (failed, wait) in [(1, 1), (2, 2)] {
            assert_eq!(notified.next().await.max_attempts(), 3);
            let state = wait_for_retry(&bus, first.seq(), mail, failed).await;
            let due = state.due_at.unwrap();
            let at = state.failures[failed - 1].at;
            assert_eq!(due.since(at), Duration::from_secs(wait));
            lab.clock.set(due);
        }
        assert_eq!(first.settled().await.unwrap().dead_lettered.len(), 1);
        // The fifth failure opens the breaker for 30 s; a standard event goes to the dead letters.
        let second = bus.publish(("orders.order.placed", 2)).await.unwrap();
        let state = wait_for_retry(&bus, second.seq(), mail, 1).await;
        let is_open = || {
            let breakers = bus.breakers();
            let of_mail = breakers.iter().find(|breaker| breaker.name == mail);
            match of_mail.unwrap().state {
                BreakerState::Open { until } => Some(until),
                _ => None,
            }
        };
        assert_eq!(is_open(), None, "four failures");
        lab.clock.set(state.due_at.unwrap());
        wait_for_retry(&bus, second.seq(), mail, 2).await;
        let open_for = is_open().unwrap().since(lab.clock.now());
        assert_eq!(open_for, Duration::from_secs(30));
        let third = given_up(&bus, ("orders.order.placed", 3)).await;
        assert_eq!(third.failures[0].kind, FailureKind::Rejected);

        // A price is skipped once it is older than 5 s, and handled in at most 5 s.
        handled(&bus, aged("signals.price.update", 5001)).await;
        assert!(signalled.is_empty(), "it was stale");
        handled(&bus, aged("signals.price.update", 5000)).await;
        let left = signalled.next().await.deadline() - tokio::time::Instant::now();
        assert!(left <= Duration::from_secs(5), "{left:?}");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: framework/config-applied: the file's caps and staleness hold for its streams.
// conformance: handlers/config-spec-file: the file's caps and staleness hold for its streams.
#[tokio::test]
async fn caps_and_staleness_of_the_file_hold_for_its_streams() {
    on_every_engine(|lab| async move {
        let bus = open(&lab).await;
        let router = Router::new()
            .group("slow")
            .on("orders.order.placed", std::future::pending::<()>)
            .on("signals.price.update", || async {});
        bus.mount(router).await.unwrap();
        for n in 0..2 {
            bus.publish(("orders.order.placed", n)).await.unwrap();
        }
        let refused = bus.publish(("orders.order.placed", 2)).await.unwrap_err();
        assert_eq!(refused.code(), Code::Backpressure);
        assert!(
            refused.to_string().contains("orders.order.placed"),
            "{refused}"
        );
        bus.publish(("users.user.created", 1)).await.unwrap();

        let old = everbus::Event::builder("signals.price.update")
            .occurred_at(lab.clock.now().minus(Duration::from_millis(5001)))
            .json(&json!(1));
        bus.start().await.unwrap();
        bus.publish(old).await.unwrap().settled().await.unwrap();
        eventually("the skip is counted", || async {
            bus.stats().types["signals.price.update"].skipped.stale == 1
        })
        .await;
        bus.shutdown_within(Duration::ZERO).await.unwrap();
    })
    .await;
}

// conformance: framework/config-breaker-default: what the file does not say of a breaker is the program's to say, and the default if it says nothing.
#[tokio::test]
async fn the_program_may_say_what_the_file_leaves_out() {
    let file = "consumers: {mail: {stream: 'a:b'}, other: {stream: 'a:b'}}";
    let config = Config::parse(file, "everbus.yaml").unwrap();
    let bus = Bus::builder()
        .config(&config)
        .open("memory:")
        .await
        .unwrap();
    let fail = |_: Message| async { Err::<(), _>(HandlerError::permanent("no")) };
    let own = BreakerPolicy::default().fail_max(1);
    let router = Router::new()
        .on("a.b", to(fail).group("mail").breaker(own))
        .on("a.b", to(fail).group("other"));
    bus.mount(router).await.unwrap();
    bus.start().await.unwrap();
    let receipt = bus.publish(("a.b", 1)).await.unwrap();
    receipt.settled().await.unwrap();
    let states: Vec<_> = bus
        .breakers()
        .iter()
        .map(|b| b.state == BreakerState::Closed)
        .collect();
    assert_eq!(
        states,
        [false, true],
        "one failure opens mail's own breaker, not the default one"
    );
    bus.shutdown().await.unwrap();
}

// conformance: contract/decode-config: the file says decode: retry for the handlers of its consumer.
#[tokio::test]
async fn the_file_says_what_becomes_of_an_event_that_cannot_be_read() {
    on_every_engine(|lab| async move {
        let file = "consumers: {mail: {stream: 'a:b', decode: retry}, other: {stream: 'a:b'}}";
        let config = Config::parse(file, "everbus.yaml").unwrap();
        let bus = lab.open_with(lab.builder().config(&config)).await;
        let router = Router::new()
            .on("a.b", to(|_: Json<u8>| async {}).group("mail"))
            .on("a.b", to(|_: Json<u8>| async {}).group("other"));
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a.b", "text")).await.unwrap();
        wait_for_retry(&bus, receipt.seq(), "mail", 1).await;
        eventually("the other group has given it up", || async {
            let state = state_in(&bus, receipt.seq(), "other").await;
            state.is_some_and(|state| state.state == EventState::Dlq)
        })
        .await;
        bus.shutdown().await.unwrap();
    })
    .await;
}
