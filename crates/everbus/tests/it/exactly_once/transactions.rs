//! Exactly-once effects in the file: effect, record, follow-ups and ack together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::{
    Bus, Clock, Context, Event, EventId, FailureKind, HandlerError, Json, Message, Outcome, Router,
    permanent, retry_after, skip, sqlite, to,
};
use rusqlite::Connection;

use super::{on_record, once_more};
use crate::support::{
    Kind, Lab, counted, given_up, handled, is_done, published, run_out_of_retries, wait_for_retry,
};

const TABLE: &str = "CREATE TABLE IF NOT EXISTS booked (n INTEGER)";

/// Books an amount in the transaction of the ack.
fn book(tx: &sqlite::Transaction<'_>, n: i64) -> Result<(), HandlerError> {
    tx.execute(TABLE, ())?;
    tx.execute("INSERT INTO booked VALUES (?1)", [n])?;
    Ok(())
}

/// What is booked, as another program sees it.
fn booked(lab: &Lab) -> Vec<i64> {
    let file = Connection::open(lab.file()).unwrap();
    let made = file.prepare("SELECT n FROM booked ORDER BY rowid");
    let Ok(mut statement) = made else {
        return Vec::new();
    };
    let rows = statement.query_map((), |row| row.get(0)).unwrap();
    rows.map(|row| row.unwrap()).collect()
}

async fn open(router: Router) -> (Lab, Bus) {
    let lab = Lab::new(Kind::Sqlite);
    let bus = lab.open().await;
    bus.mount(router.group("ledger")).await.unwrap();
    bus.start().await.unwrap();
    (lab, bus)
}

// conformance: handlers/exactly-once-handler: a handler that returns in_transaction has its effect, inbox record, follow-up events and ack committed together.
// conformance: framework/guarantee-exactly-once: processing, the record of event_id and the acknowledgement are one transaction.
#[tokio::test]
async fn effect_record_follow_up_and_ack_are_there_together() {
    let books = |Json(n): Json<i64>, context: Context| async move {
        context.publish(("b", "staged"))?;
        Ok::<_, HandlerError>(sqlite::in_transaction(move |tx| {
            book(tx, n)?;
            Ok::<_, HandlerError>(("b", "in the transaction"))
        }))
    };
    let (lab, bus) = open(Router::new().on("a", books)).await;
    let receipt = handled(&bus, ("a", 7)).await;
    assert_eq!(booked(&lab), [7]);
    assert!(
        on_record(&bus, "ledger", &receipt).await,
        "without asking for it"
    );
    let events = published(&bus, "b").await;
    let payloads: Vec<String> = events.iter().map(|r| r.event.json().unwrap()).collect();
    assert_eq!(payloads, ["staged", "in the transaction"]);
    for record in &events {
        let attributes = record.event.attributes().unwrap();
        let cause = receipt.id().to_string();
        assert_eq!(attributes.causation_id.as_deref(), Some(cause.as_str()));
        assert_eq!(record.event.correlation_id(), cause);
    }
    let at = receipt.received_at();
    let first = EventId::derived(receipt.id(), at, "ledger", "a", 0);
    assert_eq!(events[0].event.id(), first);
    assert!(is_done(&bus, receipt.seq(), "ledger").await);
    bus.shutdown().await.unwrap();
}

// conformance: handlers/exactly-once-handler: an event that was handled before is acked without its effect.
#[tokio::test]
async fn an_effect_happens_once_however_often_its_event_comes() {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    let books = move |Json(n): Json<i64>| {
        let count = count.clone();
        async move {
            sqlite::in_transaction(move |tx| {
                count.fetch_add(1, Ordering::SeqCst);
                book(tx, n)
            })
        }
    };
    let (lab, bus) = open(Router::new().on("a", books)).await;
    let id = EventId::new();
    let event = || Event::builder("a").id(id).json(&7);
    handled(&bus, event()).await;
    once_more(&bus, event()).await;
    assert_eq!(booked(&lab), [7]);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    assert_eq!(counted(&bus).await.types["a"].inbox_hits, 1);
    bus.shutdown().await.unwrap();
}

// conformance: handlers/exactly-once-error: an effect that fails leaves nothing; its event is retried by the policy and dead-lettered with the error.
#[tokio::test]
async fn an_effect_that_fails_leaves_nothing_and_is_tried_again() {
    let books = |Json(n): Json<i64>, context: Context| async move {
        context.publish(("b", 1))?;
        Ok::<_, HandlerError>(sqlite::in_transaction(move |tx| {
            book(tx, n)?;
            tx.execute("INSERT INTO no_such_table VALUES (1)", ())?;
            Ok::<_, HandlerError>(())
        }))
    };
    let (lab, bus) = open(Router::new().on("a", to(books).name("books"))).await;
    let receipt = bus.publish(("a", 7)).await.unwrap();
    let state = wait_for_retry(&bus, receipt.seq(), "ledger", 1).await;
    let failure = &state.failures[0];
    assert_eq!(failure.kind, FailureKind::Error);
    assert!(failure.error.contains("no_such_table"), "{failure:?}");
    assert_eq!(failure.handler.as_deref(), Some("books"));
    assert_eq!(
        state.due_at.unwrap(),
        lab.clock.now().plus(Duration::from_secs(1))
    );
    run_out_of_retries(&lab, &bus, &receipt, "ledger").await;
    let letters = bus.dead_letters().get(receipt.id()).await.unwrap();
    assert_eq!((letters[0].attempts, letters[0].failures.len()), (4, 4));
    assert!(letters[0].last_error().contains("no_such_table"));
    assert!(booked(&lab).is_empty());
    assert!(published(&bus, "b").await.is_empty());
    assert!(!on_record(&bus, "ledger", &receipt).await);
    let stats = counted(&bus).await;
    let of_a = &stats.types["a"];
    assert_eq!((of_a.handled, of_a.failed, of_a.dead_lettered), (0, 4, 1));
    bus.shutdown().await.unwrap();
}

// conformance: handlers/exactly-once-answers: permanent, retry_after, skip and a panic in an effect mean what they mean in a handler.
#[tokio::test]
async fn an_effect_may_answer_like_a_handler() {
    let books = |Json(kind): Json<String>| async move {
        sqlite::in_transaction(move |tx| {
            book(tx, 1)?;
            match kind.as_str() {
                "permanent" => Err(permanent("for good")),
                "later" => Err(retry_after("later", Duration::from_secs(99))),
                "skip" => Err(skip("not mine")),
                "panic" => panic!("in the effect"),
                _ => Ok(()),
            }
        })
    };
    let (lab, bus) = open(Router::new().on("a", books)).await;
    let letter = given_up(&bus, ("a", "permanent")).await;
    assert_eq!(letter.failures[0].kind, FailureKind::Permanent);
    assert_eq!((letter.attempts, letter.last_error()), (1, "for good"));
    let later = bus.publish(("a", "later")).await.unwrap();
    let state = wait_for_retry(&bus, later.seq(), "ledger", 1).await;
    assert_eq!(
        state.due_at.unwrap(),
        lab.clock.now().plus(Duration::from_secs(99))
    );
    let skipped = handled(&bus, ("a", "skip")).await;
    assert!(is_done(&bus, skipped.seq(), "ledger").await);
    assert!(!on_record(&bus, "ledger", &skipped).await);
    assert_eq!(counted(&bus).await.types["a"].skipped.handler, 1);
    assert!(booked(&lab).is_empty());
    handled(&bus, ("a", "fine")).await;
    assert_eq!(booked(&lab), [1]);
    bus.shutdown().await.unwrap();
}

// conformance: handlers/exactly-once-panic: a panic in an effect is a failed attempt; nothing of it is done and the engine goes on.
// conformance: fault-4/effect-panic: a panic in an effect does not fall through to the ack.
#[tokio::test]
async fn a_panic_in_an_effect_is_a_failed_attempt() {
    let books = |Json(panics): Json<bool>| async move {
        sqlite::in_transaction(move |tx| {
            book(tx, 1)?;
            assert!(!panics, "in the effect");
            Ok::<_, HandlerError>(())
        })
    };
    let (lab, bus) = open(Router::new().on("a", books)).await;
    let receipt = bus.publish(("a", true)).await.unwrap();
    let state = wait_for_retry(&bus, receipt.seq(), "ledger", 1).await;
    assert!(
        state.failures[0].error.contains("in the effect"),
        "{state:?}"
    );
    assert!(booked(&lab).is_empty());
    handled(&bus, ("a", false)).await;
    assert_eq!(booked(&lab), [1]);
    run_out_of_retries(&lab, &bus, &receipt, "ledger").await;
    assert_eq!(booked(&lab), [1]);
    bus.shutdown().await.unwrap();
}

// conformance: handlers/exactly-once-several: effects of handlers that share a group and an event are done together or not at all.
#[tokio::test]
async fn effects_of_one_event_are_done_together() {
    let first = |Json(n): Json<i64>| async move { sqlite::in_transaction(move |tx| book(tx, n)) };
    let second = |Json(n): Json<i64>| async move {
        sqlite::in_transaction(move |tx| {
            book(tx, n + 1)?;
            if n == 0 {
                Err(permanent("not zero"))
            } else {
                Ok(Outcome::default())
            }
        })
    };
    let router = Router::new()
        .on("a", first)
        .on("a", second)
        .on("a", |_: Message| async {});
    let (lab, bus) = open(router).await;
    let letter = given_up(&bus, ("a", 0)).await;
    assert_eq!(letter.last_error(), "not zero");
    assert!(booked(&lab).is_empty());
    handled(&bus, ("a", 5)).await;
    assert_eq!(booked(&lab), [5, 6]);
    bus.shutdown().await.unwrap();
}

// conformance: handlers/exactly-once-async-first: what the handler does before it returns the transaction may be slow; other events are published and handled meanwhile.
#[tokio::test]
async fn slow_work_before_the_transaction_blocks_no_other_commit() {
    let (begun, gate) = (
        Arc::new(tokio::sync::Notify::new()),
        Arc::new(tokio::sync::Notify::new()),
    );
    let (begin, wait) = (begun.clone(), gate.clone());
    let slow = move || {
        let (begun, gate) = (begin.clone(), wait.clone());
        async move {
            begun.notify_one();
            gate.notified().await;
            sqlite::in_transaction(|tx| book(tx, 1))
        }
    };
    let quick = || async { sqlite::in_transaction(|tx| book(tx, 2)) };
    let (lab, bus) = open(Router::new().on("slow", slow).on("quick", quick)).await;
    let receipt = bus.publish(("slow", 0)).await.unwrap();
    begun.notified().await;
    handled(&bus, ("quick", 0)).await;
    assert_eq!(booked(&lab), [2]);
    gate.notify_one();
    receipt.settled().await.unwrap();
    assert_eq!(booked(&lab), [2, 1]);
    bus.shutdown().await.unwrap();
}
