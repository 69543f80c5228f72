//! What `bus.stats()` says after a known run.

use std::time::Duration;

use everbus::{
    BreakerPolicy, Clock, Context, Criticality, Event, EventId, GroupName, HandlerError, Json,
    Outcomes, RetryPolicy, Router, permanent, skip, sqlite, to,
};

use crate::breaker::opened;
use crate::exactly_once::once_more;
use crate::support::{
    Kind, Lab, counted, eventually, given_up, handled, on_every_engine, run_out_of_retries,
    wait_for_retry,
};

fn group(name: &str) -> GroupName {
    name.parse().unwrap()
}

/// Handled, failed, retried, skipped, dead-lettered, inbox hits, rejections.
fn counts(outcomes: &Outcomes) -> [u64; 7] {
    [
        outcomes.handled,
        outcomes.failed,
        outcomes.retried,
        outcomes.skipped.total(),
        outcomes.dead_lettered,
        outcomes.inbox_hits,
        outcomes.breaker_rejections,
    ]
}

// conformance: handlers/stats-run: counts per type and per group after a known run: published, handled, failed, retried, skipped, dead-lettered.
// conformance: framework/framework-observability: counts per type and per group after a known run: published, handled, failed, retried, skipped, dead-lettered.
// conformance: omni/metrics-counts: counts per type and per group after a known run: published, handled, failed, retried, skipped, dead-lettered.
#[tokio::test]
async fn every_outcome_is_counted_once_by_type_and_by_group() {
    on_every_engine(|lab| async move {
        let policy = RetryPolicy::default().max_retries(1);
        let bus = lab.open_with(lab.builder().retry(policy)).await;
        let handler = |Json(kind): Json<String>, context: Context| async move {
            match kind.as_str() {
                "second" if context.attempt() == 1 => Err(HandlerError::new("not yet")),
                "never" => Err(HandlerError::new("never")),
                "permanent" => Err(permanent("no")),
                "skip" => Err(skip("no")),
                _ => Ok(()),
            }
        };
        let router = Router::new()
            .on("a", to(handler).group("g"))
            .on("b", to(handler).group("g"))
            .on("b", to(|| async {}).group("h"));
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        for _ in 0..3 {
            handled(&bus, ("a", "fine")).await;
        }
        handled(&bus, ("a", "skip")).await;
        given_up(&bus, ("a", "permanent")).await;
        let second = bus.publish(("a", "second")).await.unwrap();
        let state = wait_for_retry(&bus, second.seq(), "g", 1).await;
        lab.clock.set(state.due_at.unwrap());
        second.settled().await.unwrap();
        let never = bus.publish(("b", "never")).await.unwrap();
        run_out_of_retries(&lab, &bus, &never, "g").await;
        handled(&bus, ("b", "fine")).await;
        // A duplicate is not stored, and a type without a handler is.
        let event = Event::builder("c").id(EventId::new()).build().unwrap();
        bus.publish(event.clone()).await.unwrap();
        bus.publish(event).await.unwrap();

        let stats = counted(&bus).await;
        let published = |name: &str| stats.types[name].published;
        assert_eq!([published("a"), published("b"), published("c")], [6, 2, 1]);
        assert_eq!(counts(&stats.types["a"]), [4, 2, 1, 1, 1, 0, 0]);
        // "fine" in both groups, "never" in one.
        assert_eq!(counts(&stats.types["b"]), [3, 2, 1, 0, 1, 0, 0]);
        assert_eq!(counts(&stats.groups[&group("g")]), [5, 4, 2, 1, 2, 0, 0]);
        assert_eq!(counts(&stats.groups[&group("h")]), [2, 0, 0, 0, 0, 0, 0]);
        assert_eq!(counts(&stats.types["c"]), [0; 7]);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/stats-run: inbox hits, rejections, and skips by their reason.
#[tokio::test]
async fn what_never_reached_a_handler_is_counted_by_its_reason() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let touchy = BreakerPolicy::default().fail_max(1);
        let handler = |Json(fails): Json<bool>| async move { (!fails).then_some(()).ok_or("down") };
        let route = |criticality| {
            to(handler)
                .breaker(touchy)
                .criticality(criticality)
                .max_staleness(Duration::from_secs(60))
                .idempotent()
        };
        let router = Router::new()
            .on("a", route(Criticality::BestEffort).group("g"))
            .on("b", route(Criticality::Standard).group("h"));
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let at = lab.clock.now();
        let id = EventId::new();
        let event = || Event::builder("a").id(id).occurred_at(at).json(&false);
        handled(&bus, event()).await;
        once_more(&bus, event()).await;
        let old = at.minus(Duration::from_secs(61));
        handled(&bus, Event::builder("a").occurred_at(old).json(&false)).await;
        let fresh = |name: &str, fails: bool| Event::builder(name).occurred_at(at).json(&fails);
        bus.publish(fresh("a", true)).await.unwrap();
        eventually("the breaker opens", || async {
            bus.stats().breakers.iter().any(|b| b.times_opened == 1)
        })
        .await;
        handled(&bus, fresh("a", false)).await;
        bus.publish(fresh("b", true)).await.unwrap();
        eventually("the other opens too", || async {
            bus.stats().breakers.iter().all(|b| b.times_opened == 1)
        })
        .await;
        given_up(&bus, fresh("b", false)).await;
        let stats = counted(&bus).await;
        let a = &stats.types["a"];
        assert_eq!((a.skipped.stale, a.skipped.best_effort), (1, 1));
        assert_eq!((a.skipped.handler, a.skipped.dropped), (0, 0));
        assert_eq!(counts(a), [1, 1, 1, 2, 0, 1, 1]);
        assert_eq!(counts(&stats.types["b"]), [0, 1, 1, 0, 1, 0, 1]);
        assert_eq!(stats.breakers, bus.breakers());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/stats-published: events that handlers emit are counted as published, however they emit them.
#[tokio::test]
async fn what_handlers_emit_is_counted_as_published() {
    let lab = Lab::new(Kind::Sqlite);
    let bus = lab.open().await;
    let router = Router::new()
        .on("a", |context: Context| async move {
            context.publish(("staged", 1))?;
            Ok::<_, everbus::Error>(vec![("returned", 1), ("returned", 2)])
        })
        .on("t", || async {
            sqlite::in_transaction(|_| ("in.transaction", 1))
        })
        .on("fails", || async { Err::<(&str, u8), _>(permanent("no")) });
    bus.mount(router).await.unwrap();
    bus.start().await.unwrap();
    handled(&bus, ("a", 1)).await;
    handled(&bus, ("t", 1)).await;
    given_up(&bus, ("fails", 1)).await;
    let stats = counted(&bus).await;
    let published = |name: &str| stats.types.get(name).map_or(0, |t| t.published);
    let all = ["staged", "returned", "in.transaction"].map(published);
    assert_eq!(all, [1, 2, 1]);
    bus.shutdown().await.unwrap();
}

// conformance: handlers/stats-latency: latency is from publish to handled, with p50, p95 and p99 per type and group.
// conformance: framework/framework-observability: latency is from publish to handled, with p50, p95 and p99 per type and group.
// conformance: omni/metrics-latency: latency is from publish to handled, with p50, p95 and p99 per type and group.
#[tokio::test]
async fn latencies_have_their_quantiles() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let clock = lab.clock.clone();
        // The n-th event takes n milliseconds from its publish until it is handled.
        let handler = move |Json(n): Json<u64>| {
            clock.advance(Duration::from_millis(n));
            async {}
        };
        bus.subscribe("a")
            .group("g")
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        for n in 1..=100 {
            handled(&bus, ("a", n)).await;
        }
        let stats = counted(&bus).await;
        for latency in [stats.types["a"].latency, stats.groups[&group("g")].latency] {
            assert_eq!(latency.count, 100);
            assert_eq!(latency.max, 100.0);
            let near = |value: f64, expected: f64| (value - expected).abs() <= expected * 0.04;
            for (value, expected) in [
                (latency.p50, 50.0),
                (latency.p95, 95.0),
                (latency.p99, 99.0),
                (latency.mean, 50.5),
            ] {
                assert!(
                    near(value, expected),
                    "{value} is not {expected}: {latency:?}"
                );
            }
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/stats-durable: an outcome is counted when it is durable: a retry of the settlement counts once.
#[tokio::test]
async fn an_outcome_is_counted_when_it_is_durable() {
    let (bus, faults, _) = crate::faulty::faulty().await;
    bus.subscribe("a")
        .handler(|| async { ("b", 1) })
        .await
        .unwrap();
    faults.settle.add(2, everbus::Code::Busy);
    faults.settle_one.add(1, everbus::Code::Busy);
    bus.start().await.unwrap();
    handled(&bus, ("a", 1)).await;
    let stats = counted(&bus).await;
    bus.shutdown().await.unwrap();
    assert_eq!(counts(&stats.types["a"]), [1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(stats.types["b"].published, 1);
}

// conformance: handlers/stats-breaker: the state of a breaker is shown.
#[tokio::test]
async fn breakers_are_shown_with_their_state() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    let fails = || async { Err::<(), _>("down") };
    let policy = BreakerPolicy::default().fail_max(1);
    bus.subscribe("a")
        .depends_on("bank")
        .breaker(policy)
        .handler(fails)
        .await
        .unwrap();
    bus.start().await.unwrap();
    assert_eq!(bus.stats().breakers[0].state.to_string(), "closed");
    bus.publish(("a", 1)).await.unwrap();
    opened(&bus).await;
    let shown = serde_json::to_value(&bus.stats().breakers[0]).unwrap();
    assert_eq!(shown["name"], "bank");
    assert_eq!(shown["state"], "open");
    let until = lab.clock.now().plus(Duration::from_secs(30));
    assert_eq!(shown["until"], until.to_string());
    lab.clock.advance(Duration::from_secs(30));
    // Another attempt fails and opens it again, so it may be either for a moment.
    let state = bus.stats().breakers[0].state.to_string();
    assert!(["half_open", "open"].contains(&state.as_str()), "{state}");
    bus.shutdown().await.unwrap();
}
