//! Events that handlers emit: published in the same step as the ack, or not at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::core::EventId;
use everbus::{
    Bus, Code, Context, Cursor, Event, FailureKind, HandlerError, Json, Outcome, Router, State,
    permanent, sqlite, to,
};
use serde_json::json;

use crate::faulty::faulty;
use crate::support::{
    Kind, Lab, given_up, handled, is_done, on_every_engine, published, wait_for_retry,
};

// conformance: handlers/follow-ups-order: events of Context::publish come before those that are returned.
// conformance: handlers/follow-ups-ack: follow-ups appear only with the ack: while the handler runs and after it failed there are none.
#[tokio::test]
async fn nothing_is_published_unless_the_attempt_succeeds() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let log = bus.engine().clone();
        let handler = move |context: Context| {
            let log = log.clone();
            async move {
                context.publish(("b", "staged"))?;
                let log = log.log()?;
                let (there, _) = log.read(Cursor::START, vec!["b".parse()?], 10).await?;
                assert!(there.is_empty(), "published before the end");
                match context.attempt() {
                    1 => Err(HandlerError::new("not yet")),
                    _ => Ok(("b", "returned")),
                }
            }
        };
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 0)).await.unwrap();
        let state = wait_for_retry(&bus, receipt.seq(), "", 1).await;
        assert_eq!(state.failures[0].error, "not yet");
        assert!(published(&bus, "b").await.is_empty());
        lab.clock.set(state.due_at.unwrap());
        receipt.settled().await.unwrap();
        let published = published(&bus, "b").await;
        let payloads: Vec<String> = published.iter().map(|r| r.event.json().unwrap()).collect();
        assert_eq!(payloads, ["staged", "returned"], "once each");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/follow-ups-atomic: ack and follow-ups are one step: whoever looks sees both or neither.
#[tokio::test]
async fn an_ack_is_never_seen_without_its_follow_up() {
    const EVENTS: i64 = 200;
    let lab = Lab::new(Kind::Sqlite);
    let bus = lab.open().await;
    assert!(bus.capabilities().atomic_follow_ups);
    bus.subscribe("a")
        .handler(|Json(n): Json<i64>| async move { ("b", n) })
        .await
        .unwrap();
    bus.start().await.unwrap();
    let publisher = tokio::spawn({
        let bus = bus.clone();
        async move {
            for n in 0..EVENTS {
                bus.publish(("a", n)).await.unwrap();
            }
        }
    });
    let file = rusqlite::Connection::open(lab.file()).unwrap();
    let mut statement = file
        .prepare(
            "SELECT count(*) FILTER (WHERE type = 'a' AND status = 'done'),
                    count(*) FILTER (WHERE type = 'b') FROM events",
        )
        .unwrap();
    let mut looks = 0;
    loop {
        // One statement sees one moment.
        let (acked, emitted): (i64, i64) = statement
            .query_row([], |row| Ok((row.get(0)?, row.get(1)?)))
            .unwrap();
        assert_eq!(acked, emitted, "after {looks} looks");
        looks += 1;
        if acked == EVENTS {
            break;
        }
        tokio::task::yield_now().await;
    }
    publisher.await.unwrap();
    bus.shutdown().await.unwrap();
}

// conformance: handlers/follow-ups-once: an outcome that the engine is asked for again publishes its events once.
#[tokio::test]
async fn a_settlement_that_is_repeated_publishes_once() {
    let (bus, faults, _) = faulty().await;
    bus.subscribe("a")
        .handler(|| async { ("b", 1) })
        .await
        .unwrap();
    faults.settle.add(3, Code::Busy);
    faults.settle_one.add(2, Code::Busy);
    bus.start().await.unwrap();
    handled(&bus, ("a", 0)).await;
    assert_eq!(published(&bus, "b").await.len(), 1);
    bus.shutdown().await.unwrap();
}

// conformance: handlers/follow-ups-ids: ids of follow-ups are made from cause, group, handler and index, so that a second run repeats them; an id that the handler brings is kept.
#[tokio::test]
async fn follow_ups_have_ids_that_a_second_run_repeats() {
    const OWN: EventId = EventId::from_bytes([7; 16]);
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let two = || async { vec![("b", 1), ("b", 2)] };
        let router = Router::new()
            .on("a", to(two).group("x").name("first"))
            .on("a", to(two).group("x").name("second"))
            .on("a", to(two).group("y").name("first"))
            .on("own", || async { Event::builder("c").id(OWN) });
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let cause = handled(&bus, ("a", 0)).await;
        let ids: Vec<EventId> = published(&bus, "b")
            .await
            .iter()
            .map(|r| r.event.id())
            .collect();
        let mut expected = Vec::new();
        for (group, handler) in [("x", "first"), ("x", "second"), ("y", "first")] {
            for index in 0..2 {
                let at = cause.received_at();
                expected.push(EventId::derived(cause.id(), at, group, handler, index));
            }
        }
        let sorted = |mut ids: Vec<EventId>| {
            ids.sort();
            ids.dedup();
            ids
        };
        assert_eq!(ids.len(), 6);
        assert_eq!(
            sorted(ids),
            sorted(expected),
            "all different, and known before"
        );
        handled(&bus, ("own", 0)).await;
        assert_eq!(published(&bus, "c").await[0].event.id(), OWN);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/follow-ups-refused: a follow-up that the engine refuses makes a dead letter of its cause instead of a loop.
#[tokio::test]
async fn a_follow_up_under_a_used_id_ends_its_cause() {
    const ID: EventId = EventId::from_bytes([9; 16]);
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let runs = Arc::new(AtomicUsize::new(0));
        let count = runs.clone();
        bus.subscribe("a")
            .handler(move |Json(n): Json<u64>| {
                count.fetch_add(1, Ordering::SeqCst);
                async move { Event::builder("b").id(ID).json(&n) }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        handled(&bus, ("a", 1)).await;
        // The same body again is no mistake.
        handled(&bus, ("a", 1)).await;
        let letter = given_up(&bus, ("a", 2)).await;
        assert_eq!((letter.attempts, letter.failures.len()), (1, 1));
        assert_eq!(letter.failures[0].kind, FailureKind::Permanent);
        assert!(letter.last_error().contains("IdReused"), "{letter:?}");
        assert_eq!(letter.handler.as_deref(), Some("a"));
        assert_eq!(runs.load(Ordering::SeqCst), 3);
        assert_eq!(published(&bus, "b").await.len(), 1);
        handled(&bus, ("a", 1)).await;
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/follow-ups-checked: what a handler emits is checked like what is published: size and schema.
#[tokio::test]
async fn a_follow_up_that_may_not_be_published_ends_its_cause() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().max_payload(100)).await;
        let router = Router::new()
            .schema("b", 1, json!({ "type": "integer" }))
            .on("large", || async { ("c", "x".repeat(101)) })
            .on("wrong", || async { ("b", "text") })
            .on("staged", |context: Context| async move {
                context.publish(("b", "text"))
            })
            .on("right", || async { ("b", 1) });
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        for (event_type, why) in [
            ("large", "PayloadTooLarge"),
            ("wrong", "ValidationError"),
            ("staged", "ValidationError"),
        ] {
            let letter = given_up(&bus, (event_type, 0)).await;
            assert_eq!(letter.failures[0].kind, FailureKind::Permanent);
            assert!(letter.last_error().contains(why), "{}", letter.last_error());
        }
        assert!(published(&bus, "b").await.is_empty());
        assert!(published(&bus, "c").await.is_empty());
        handled(&bus, ("right", 0)).await;
        assert_eq!(published(&bus, "b").await.len(), 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/follow-ups-checked: the events of a transaction are checked too, and nothing of it is done.
#[tokio::test]
async fn an_event_of_a_transaction_that_may_not_be_published_undoes_it() {
    let lab = Lab::new(Kind::Sqlite);
    let bus = lab.open_with(lab.builder().max_payload(100)).await;
    let router = Router::new()
        .schema("b", 1, json!({ "type": "integer" }))
        .on("a", |Json(kind): Json<String>| async move {
            sqlite::in_transaction(move |tx| {
                tx.execute_batch("CREATE TABLE IF NOT EXISTS own (n); INSERT INTO own VALUES (1)")?;
                Ok::<_, HandlerError>(match kind.as_str() {
                    "large" => Outcome::default().publish(("c", "x".repeat(101)))?,
                    "wrong" => Outcome::default().publish(("b", "text"))?,
                    _ => Outcome::default().publish(("b", 1))?,
                })
            })
        });
    bus.mount(router).await.unwrap();
    bus.start().await.unwrap();
    for (kind, why) in [("large", "PayloadTooLarge"), ("wrong", "ValidationError")] {
        let letter = given_up(&bus, ("a", kind)).await;
        assert_eq!(letter.failures[0].kind, FailureKind::Permanent);
        assert!(letter.last_error().contains(why), "{}", letter.last_error());
    }
    handled(&bus, ("a", "right")).await;
    assert!(published(&bus, "c").await.is_empty());
    assert_eq!(published(&bus, "b").await.len(), 1);
    let file = rusqlite::Connection::open(lab.file()).unwrap();
    let rows: i64 = file
        .query_row("SELECT count(*) FROM own", (), |r| r.get(0))
        .unwrap();
    assert_eq!(rows, 1);
    bus.shutdown().await.unwrap();
}

// conformance: handlers/follow-ups-ack: an event that is staged after the attempt has ended is refused, not lost.
#[tokio::test]
async fn nothing_can_be_staged_after_the_attempt_has_ended() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (sender, mut kept) = tokio::sync::mpsc::unbounded_channel();
        let fails = |context: &Context| context.correlation_id() == "fails";
        let handler = move |context: Context| {
            let _ = sender.send(context.clone());
            async move {
                if fails(&context) {
                    Err(permanent("no"))
                } else {
                    Ok(())
                }
            }
        };
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        for correlation in ["fails", "works"] {
            let event = Event::builder("a").correlation_id(correlation);
            bus.publish(event).await.unwrap().settled().await.unwrap();
            let context: Context = kept.recv().await.unwrap();
            let error = context.publish(("b", 1)).unwrap_err();
            assert_eq!(error.code(), Code::LeaseLost, "{error}");
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/follow-ups-bounded: what one attempt emits is bounded.
#[tokio::test]
async fn one_attempt_cannot_stage_events_without_end() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    let router = Router::new()
        .on(
            "a",
            |context: Context, State(most): State<usize>| async move {
                for _ in 0..=most {
                    context.publish(("b", 1))?;
                }
                Ok::<_, HandlerError>(())
            },
        )
        .with_state(10_000_usize);
    bus.mount(router).await.unwrap();
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", 0)).await.unwrap();
    let state = wait_for_retry(&bus, receipt.seq(), "", 1).await;
    assert!(state.failures[0].error.contains("10000"), "{state:?}");
    assert!(published(&bus, "b").await.is_empty());
    bus.shutdown().await.unwrap();
}

// conformance: fault-10/between-handler-and-settle: an outcome that a shutdown cut off before it was durable is not lost: the event comes again, and nothing of it was published.
// conformance: framework/guarantee-at-least-once: an outcome that a shutdown cut off before it was durable is not lost: the event comes again, and nothing of it was published.
#[tokio::test(start_paused = true)]
async fn an_outcome_cut_off_by_a_shutdown_comes_again() {
    let (bus, faults, clock) = faulty().await;
    let emit = |context: Context| async move { ("b", context.attempt()) };
    bus.subscribe("a").group("g").handler(emit).await.unwrap();
    bus.start().await.unwrap();
    faults.stuck.store(true, Ordering::SeqCst);
    let receipt = bus.publish(("a", 0)).await.unwrap();
    while bus
        .stats()
        .groups
        .values()
        .all(|group| group.queue_depth == 0)
    {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let report = bus.shutdown_within(Duration::from_secs(1)).await.unwrap();
    assert_eq!((report.abandoned, report.unsettled), (0, 1));

    // The engine was not closed: another bus goes on with it.
    faults.stuck.store(false, Ordering::SeqCst);
    let again = Bus::builder().clock(clock.clone());
    let again = again.with_engine(bus.engine().clone()).unwrap();
    assert!(published(&again, "b").await.is_empty());
    again.subscribe("a").group("g").handler(emit).await.unwrap();
    again.start().await.unwrap();
    // The lease of the first attempt ends.
    clock.advance(Duration::from_secs(60));
    while !is_done(&again, receipt.seq(), "g").await {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let emitted = published(&again, "b").await;
    assert_eq!(emitted.len(), 1);
    assert_eq!(
        emitted[0].event.json::<u32>().unwrap(),
        2,
        "by the second attempt"
    );
}
