//! What handlers answer: nothing, events, errors of any type, and what they ask for with them.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use everbus::{
    BoxError, Clock, Code, Error, Event, FailureKind, HandlerError, Json, Outcome, RetryPolicy,
    Router, permanent, retry_after, skip,
};
use serde::{Deserialize, Serialize};

use crate::faulty::faulty;
use crate::support::{
    counted, given_up, handled, is_done, on_every_durable_engine, on_every_engine, published,
    state_in, wait_for_retry,
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(type = "note.made")]
struct Note(u32);

// conformance: handlers/return-events: a handler returns nothing, an event, a builder, a pair, or a Vec, array or Option of those, alone or in a Result; they are published.
// conformance: omni/handler-emits: a handler returns nothing, an event, a builder, a pair, or a Vec, array or Option of those, alone or in a Result; they are published.
#[tokio::test]
async fn what_a_handler_returns_is_published() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let pair = |n: u32| ("note.made", n);
        let built = |n: u32| Event::builder("note.made").json(&n);
        let router = Router::new()
            .on("nothing", || async {})
            .on("value", || async { Note(1) })
            .on("vec", || async { vec![Note(1), Note(2)] })
            .on("array", || async { [Note(1), Note(2), Note(3)] })
            .on("some", || async { Some(Note(1)) })
            .on("none", || async { None::<Note> })
            .on("pair", move || async move { pair(1) })
            .on("pairs", move || async move { vec![pair(1), pair(2)] })
            .on("builder", move || async move { built(1) })
            .on("event", move || async move { built(1).build() })
            .on("result", || async { Ok::<_, String>(Note(1)) })
            .on("results", || async {
                Ok::<_, BoxError>(vec![Note(1), Note(2)])
            })
            .on("option", || async { Ok::<_, HandlerError>(Some(Note(1))) })
            .on("outcome", || async {
                Outcome::default().publish(Note(1))?.publish(Note(2))
            });
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let mut before = 0;
        for (event_type, expected) in [
            ("nothing", 0),
            ("value", 1),
            ("vec", 2),
            ("array", 3),
            ("some", 1),
            ("none", 0),
            ("pair", 1),
            ("pairs", 2),
            ("builder", 1),
            ("event", 1),
            ("result", 1),
            ("results", 2),
            ("option", 1),
            ("outcome", 2),
        ] {
            handled(&bus, (event_type, 0)).await;
            let notes = published(&bus, "note.made").await;
            let new: Vec<Note> = notes[before..]
                .iter()
                .map(|r| r.event.typed().unwrap())
                .collect();
            let in_order: Vec<Note> = (1..=expected).map(Note).collect();
            assert_eq!(new, in_order, "{event_type}");
            before = notes.len();
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[derive(Debug)]
struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the shop is closed")
    }
}

impl StdError for Closed {}

#[derive(Debug)]
struct NoDelivery(Closed);

impl fmt::Display for NoDelivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no delivery")
    }
}

impl StdError for NoDelivery {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.0)
    }
}

// conformance: handlers/errors-any-type: any error type is retryable by default, and what it says is kept with its causes.
// conformance: framework/guarantee-redelivery: failed processing results in redelivery.
// conformance: framework/retry-selective: failed processing results in redelivery.
#[tokio::test]
async fn an_error_of_any_type_is_retried_by_the_policy() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let router = Router::new()
            .on("std", || async { Err::<(), _>(Closed) })
            .on("caused", || async { Err::<(), _>(NoDelivery(Closed)) })
            .on("string", || async { Err::<(), _>("text".to_owned()) })
            .on("str", || async { Err::<(), _>("plain text") })
            .on("boxed", || async { Err::<(), BoxError>(Box::new(Closed)) })
            .on("own", || async {
                Err::<(), _>(Error::new(Code::Timeout, "too slow"))
            })
            .on("handler", || async {
                Err::<Note, _>(HandlerError::new("as it is"))
            })
            .on("question", || async {
                "x".parse::<u8>()?;
                everbus::handled()
            });
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        for (event_type, said) in [
            ("std", "the shop is closed"),
            ("caused", "no delivery: the shop is closed"),
            ("string", "text"),
            ("str", "plain text"),
            ("boxed", "the shop is closed"),
            ("own", "Timeout: too slow"),
            ("handler", "as it is"),
            ("question", "invalid digit found in string"),
        ] {
            let receipt = bus.publish((event_type, 0)).await.unwrap();
            let state = wait_for_retry(&bus, receipt.seq(), "", 1).await;
            let failure = &state.failures[0];
            assert_eq!(failure.error, said);
            assert_eq!(failure.kind, FailureKind::Error, "{event_type}");
            assert_eq!(failure.handler.as_deref(), Some(event_type));
            let waits = state.due_at.unwrap().since(lab.clock.now());
            assert_eq!(waits, Duration::from_secs(1), "as the policy says");
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/answer-permanent: permanent(e) sends the event to the dead letters at once.
// conformance: framework/retry-selective: permanent(e) sends the event to the dead letters at once.
#[tokio::test]
async fn a_permanent_error_is_a_dead_letter_at_once() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("a")
            .handler(|| async { Err::<(), _>(permanent(Closed)) })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("a", 0)).await;
        assert_eq!((letter.attempts, letter.failures.len()), (1, 1));
        assert_eq!(letter.failures[0].kind, FailureKind::Permanent);
        assert_eq!(letter.last_error(), "the shop is closed");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: fault-3/asked-again: a dead letter that the engine has no time for is not given up: it is settled again until it is durable, also the one of a refused follow-up.
#[tokio::test]
async fn a_dead_letter_is_settled_until_it_is_durable() {
    for refused in [false, true] {
        let (bus, faults, _) = faulty().await;
        let answer = move || async move {
            if refused {
                Ok(("b", 1))
            } else {
                Err(permanent(Closed))
            }
        };
        bus.subscribe("a").handler(answer).await.unwrap();
        if refused {
            faults.settle_one.add(1, Code::IdReused);
            faults.settle.spare(1);
        }
        faults.settle.add(3, Code::Busy);
        faults.settle_one.add(2, Code::DiskFull);
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("a", 0)).await;
        assert_eq!((letter.attempts, letter.failures.len()), (1, 1));
        assert_eq!(letter.failures[0].kind, FailureKind::Permanent);
        assert!(published(&bus, "b").await.is_empty());
        bus.shutdown().await.unwrap();
    }
}

// conformance: handlers/answer-retry-after: retry_after(e, d) waits that long instead of what the policy says, and is an attempt like any other.
#[tokio::test]
async fn retry_after_waits_as_long_as_it_says_and_counts() {
    on_every_engine(|lab| async move {
        let policy = RetryPolicy::default().max_retries(1);
        let bus = lab.open_with(lab.builder().retry(policy)).await;
        let wait = Duration::from_secs(777);
        bus.subscribe("a")
            .handler(move || async move { Err::<(), _>(retry_after("closed", wait)) })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 0)).await.unwrap();
        let state = wait_for_retry(&bus, receipt.seq(), "", 1).await;
        assert_eq!(state.due_at.unwrap(), lab.clock.now().plus(wait));
        lab.clock.advance(wait);
        let settled = receipt.settled().await.unwrap();
        assert_eq!(settled.dead_lettered.len(), 1, "the attempts are used up");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/answer-skip: skip(reason) ends the event for the group with the reason recorded; it is no failure.
#[tokio::test]
async fn a_skipped_event_is_done_and_no_failure() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("a")
            .handler(|Json(n): Json<u8>| async move {
                if n == 0 {
                    Err(skip("nothing to do"))
                } else {
                    Ok(Note(1))
                }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = handled(&bus, ("a", 0)).await;
        assert!(is_done(&bus, receipt.seq(), "").await);
        let state = state_in(&bus, receipt.seq(), "").await.unwrap();
        assert!(state.failures.is_empty());
        handled(&bus, ("a", 1)).await;
        let stats = counted(&bus).await;
        let of_a = &stats.types["a"];
        assert_eq!((of_a.skipped.handler, of_a.skipped.total()), (1, 1));
        assert_eq!((of_a.handled, of_a.failed), (1, 0));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/answer-skip: the reason is kept where the events are.
#[tokio::test]
async fn the_reason_of_a_skip_is_recorded() {
    on_every_durable_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("a")
            .group("g")
            .handler(|| async { Err::<(), _>(skip("nothing to do")) })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = handled(&bus, ("a", 0)).await;
        bus.shutdown().await.unwrap();
        assert_eq!(skip_reason(&lab, receipt.seq()), "nothing to do");
    })
    .await;
}

/// The recorded reason why an event was skipped.
pub(crate) fn skip_reason(lab: &crate::support::Lab, seq: u64) -> String {
    let file = rusqlite::Connection::open(lab.file()).unwrap();
    file.query_row(
        "SELECT reason FROM skips WHERE seq = ?1",
        [seq as i64],
        |r| r.get(0),
    )
    .unwrap()
}
