//! Events that a failing handler publishes in the same step as the retry or the dead letter.

use std::time::Duration;

use everbus::{
    Code, Context, Event, EventId, HandlerError, Json, Outcome, RetryPolicy, Router, permanent,
    retry_after, skip, sqlite, testing, to,
};

use crate::faulty::faulty;
use crate::support::{
    Kind, Lab, counted, eventually, given_up, handled, is_done, on_every_engine, published,
};

fn retries(most: u32) -> RetryPolicy {
    RetryPolicy::default().max_retries(most)
}

/// A failure that is tried again at once.
fn failed(why: &str) -> HandlerError {
    retry_after(why, Duration::ZERO)
}

/// The numbers in the payloads of events in the log.
async fn numbers(bus: &everbus::Bus, event_type: &str) -> Vec<u64> {
    let events = published(bus, event_type).await;
    let each = events.iter();
    each.map(|record| record.event.json().unwrap()).collect()
}

// conformance: contract/failure-events: events of a failure are published with the retry and with the dead letter, one set for each attempt, under ids that a repetition chooses again
// conformance: omni/handler-failure-event: a handler tells of its failure by an event and is retried all the same.
#[tokio::test]
async fn each_failed_attempt_publishes_its_events() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().retry(retries(2))).await;
        let convert = |context: Context| async move {
            let attempt = context.attempt();
            let error = failed("no picture")
                .with_event(("media.failed", attempt))
                .with_event(("media.failed", attempt * 10));
            Err::<(), _>(error)
        };
        let router = Router::new().on("media.uploaded", to(convert).group("g").name("convert"));
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("media.uploaded", 0)).await;
        assert_eq!(letter.failures.len(), 3);
        assert_eq!(letter.last_error(), "no picture");
        assert_eq!(numbers(&bus, "media.failed").await, [1, 10, 2, 20, 3, 30]);
        let told = published(&bus, "media.failed").await;
        for record in &told {
            let cause = letter.event().id().to_string();
            assert_eq!(record.event.correlation_id(), cause);
            let attributes = record.event.attributes().unwrap();
            assert_eq!(attributes.causation_id.as_deref(), Some(&*cause));
        }
        let ids: std::collections::HashSet<EventId> =
            told.iter().map(|record| record.event.id()).collect();
        assert_eq!(ids.len(), 6);

        // After a retry by hand the attempts are counted afresh, and tell of themselves again.
        bus.dead_letters().retry(letter.event().id()).await.unwrap();
        eventually("it has died again", || async {
            numbers(&bus, "media.failed").await.len() == 12
        })
        .await;
        assert_eq!(
            numbers(&bus, "media.failed").await[6..],
            [1, 10, 2, 20, 3, 30]
        );
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: contract/failure-events: a settlement that is sent again publishes its events once
// conformance: handlers/stats-published: events of a failure are counted as published, once
#[tokio::test]
async fn a_failure_that_is_settled_again_publishes_once() {
    for after in [false, true] {
        let (bus, faults, _) = faulty().await;
        let fails = |context: Context| async move {
            let error = failed("no");
            Err::<(), _>(error.with_event(("failed", context.attempt())))
        };
        let subscribe = bus.subscribe("a").retry(retries(1));
        subscribe.handler(fails).await.unwrap();
        for errors in [&faults.settle, &faults.settle_one] {
            match after {
                true => errors.add_after(2, Code::Unavailable),
                false => errors.add(2, Code::Unavailable),
            }
        }
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("a", 1)).await;
        assert_eq!(letter.failures.len(), 2);
        assert_eq!(numbers(&bus, "failed").await, [1, 2]);
        assert_eq!(counted(&bus).await.types["failed"].published, 2);
        bus.shutdown().await.unwrap();
    }
}

// conformance: contract/failure-events-refused: a failure is recorded even if its events cannot be published, and says so
#[tokio::test]
async fn a_failure_is_recorded_even_if_its_events_are_refused() {
    const USED: EventId = EventId::from_bytes([9; 16]);
    on_every_engine(|lab| async move {
        let builder = lab.builder().max_payload(100).retry(retries(1));
        let bus = lab.open_with(builder).await;
        let fails = |Json(kind): Json<String>| async move {
            let error = failed("no");
            Err::<(), _>(match kind.as_str() {
                "large" => error
                    .with_event(("b", "x".repeat(101)))
                    .with_event(("b", "short")),
                "unbuildable" => error.with_event(("", 1)).with_event(("b", "short")),
                _ => error.with_event(Event::builder("b").id(USED).json("another body")),
            })
        };
        bus.subscribe("a").handler(fails).await.unwrap();
        bus.publish(Event::builder("c").id(USED)).await.unwrap();
        bus.start().await.unwrap();
        for (kind, why, there) in [
            ("large", "PayloadTooLarge", 2),
            ("unbuildable", "InvalidType", 4),
            ("used", "IdReused", 4),
        ] {
            let letter = given_up(&bus, ("a", kind)).await;
            assert_eq!(letter.failures.len(), 2, "{kind}");
            for failure in &letter.failures {
                assert!(failure.error.starts_with("no; "), "{}", failure.error);
                assert!(failure.error.contains(why), "{}", failure.error);
            }
            assert_eq!(published(&bus, "b").await.len(), there, "{kind}");
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: contract/failure-events: events of a skip are published with it, also if another handler handled the event
#[tokio::test]
async fn a_skip_publishes_its_events_too() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let skips = || async { Err::<(), _>(skip("not mine").with_event(("skipped", 1))) };
        let router = Router::new()
            .on("a", to(skips).group("alone"))
            .on("b", to(skips).group("both").name("first"))
            .on(
                "b",
                to(|| async { ("done", 1) }).group("both").name("second"),
            );
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let alone = handled(&bus, ("a", 1)).await;
        assert!(is_done(&bus, alone.seq(), "alone").await);
        assert_eq!(published(&bus, "skipped").await.len(), 1);
        handled(&bus, ("b", 1)).await;
        assert_eq!(published(&bus, "skipped").await.len(), 2);
        assert_eq!(published(&bus, "done").await.len(), 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: contract/failure-events: an effect that fails publishes the events of its error, and nothing else of it
#[tokio::test]
async fn an_effect_that_fails_publishes_the_events_of_its_error() {
    let lab = Lab::new(Kind::Sqlite);
    let bus = lab.open().await;
    let handler = || async {
        sqlite::in_transaction(|tx| {
            tx.execute_batch("CREATE TABLE IF NOT EXISTS own (n); INSERT INTO own VALUES (1)")?;
            Err::<Outcome, _>(permanent("no").with_event(("failed", 1)))
        })
    };
    bus.subscribe("a").handler(handler).await.unwrap();
    bus.start().await.unwrap();
    let letter = given_up(&bus, ("a", 1)).await;
    assert_eq!(letter.last_error(), "no");
    assert_eq!(numbers(&bus, "failed").await, [1]);
    bus.shutdown().await.unwrap();
}

/// Tests of handlers see the events.
#[tokio::test]
async fn a_direct_call_shows_the_events_of_a_failure() {
    let fails = || async { Err::<(), _>(permanent("no").with_event(("failed", 1))) };
    let error = testing::call(fails).with(("a", 1)).await.unwrap_err();
    assert_eq!(error.to_string(), "no");
    assert_eq!(error.events()[0].event_type(), "failed");
}
