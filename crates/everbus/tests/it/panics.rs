//! Panics of handlers and loggers: each costs an attempt at most, and dispatch goes on.

use everbus::{Bus, Clock, FailureKind, HandlerError, Message, RetryPolicy, Timestamp};

use crate::logs::UNLOGGABLE;
use crate::support::{is_done, on_every_engine, wait_for_retry};

/// Panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        std::panic::panic_any(Bomb);
    }
}

// conformance: bus/panic-is-failure: a panic is a failure whatever it throws, and what is queued behind it is handled.
#[tokio::test]
async fn a_panic_whose_payload_panics_costs_one_attempt_and_no_worker() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("a")
            .concurrency(1)
            .handler(|m: Message| async move {
                if m.json::<i32>()? == 0 && m.attempt() == 1 {
                    std::panic::panic_any(Bomb);
                }
                everbus::handled()
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipts = bus.publish_batch((0..40).map(|n| ("a", n))).await.unwrap();
        for receipt in &receipts[1..] {
            receipt.settled().await.unwrap();
        }
        let state = wait_for_retry(&bus, receipts[0].seq(), "", 1).await;
        assert_eq!(state.failures[0].kind, FailureKind::Panic);
        lab.clock.set(state.due_at.unwrap());
        receipts[0].settled().await.unwrap();
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: bus/panic-is-failure: a logger that panics changes nothing of what becomes of an event.
#[tokio::test]
async fn a_logger_that_panics_costs_nothing() {
    on_every_engine(|lab| async move {
        let bus = lab
            .open_with(lab.builder().retry(RetryPolicy::never()))
            .await;
        bus.subscribe("a")
            .concurrency(1)
            .handler(|m: Message| async move {
                match m.json::<i32>()? {
                    0 => Err(HandlerError::new(UNLOGGABLE)),
                    _ => Ok(()),
                }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipts = bus.publish_batch((0..40).map(|n| ("a", n))).await.unwrap();
        for receipt in &receipts {
            receipt.settled().await.unwrap();
        }
        let letters = bus.dead_letters().list().await.unwrap();
        assert_eq!(letters.len(), 1);
        assert_eq!(letters[0].failures[0].kind, FailureKind::Error);
        assert_eq!(letters[0].failures[0].error, UNLOGGABLE);
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_handler_that_panics_when_it_is_dropped_harms_no_other_handler() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let subscribe = async |pattern: &str| {
            let bomb = Bomb;
            let handler = move || {
                let _held = &bomb;
                async {}
            };
            bus.subscribe(pattern).handler(handler).await.unwrap()
        };
        let id = subscribe("a").await;
        subscribe("b").await;
        bus.start().await.unwrap();
        bus.publish(("a", 1))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
        bus.unsubscribe(id).await.unwrap();
        bus.publish(("b", 1))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
        let report = bus.shutdown().await.unwrap();
        assert!(report.closed);
    })
    .await;
}

// A clock that panics: the failure is recorded all the same, the event stays owed, and the worker goes on.
#[tokio::test]
async fn a_worker_that_panics_goes_on_with_what_is_queued() {
    #[derive(Debug)]
    struct Broken;
    impl Clock for Broken {
        fn now(&self) -> Timestamp {
            panic!("no time");
        }
    }
    crate::logs::listen();
    let memory = Bus::open("memory:").await.unwrap();
    let bus = Bus::builder()
        .clock(Broken)
        .with_engine(memory.engine().clone())
        .unwrap();
    bus.subscribe("a")
        .concurrency(1)
        .handler(|m: Message| async move {
            match m.json::<i32>()? {
                0 => Err(HandlerError::new("the time of this is asked for")),
                _ => Ok(()),
            }
        })
        .await
        .unwrap();
    bus.start().await.unwrap();
    let receipts = bus.publish_batch((0..40).map(|n| ("a", n))).await.unwrap();
    for receipt in &receipts[1..] {
        receipt.settled().await.unwrap();
    }
    assert!(!is_done(&bus, receipts[0].seq(), "").await);
    bus.shutdown().await.unwrap();
}
