//! A long outage of what a critical group depends on: its events wait, however long it takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use everbus::{BreakerPolicy, BreakerState, Bus, HandlerError, Message};

use crate::support::{eventually, in_time, is_done, on_every_engine};

const EVENTS: usize = 8;
const PROBES: u32 = 12;

/// Waits until the breaker is open and every outcome is durable: what waits is due as of this moment of
/// the clock, not of a later one.
async fn is_open_and_settled(bus: &Bus) {
    eventually("the breaker is open and nothing is held", || async {
        let open = matches!(bus.breakers()[0].state, BreakerState::Open { .. });
        open && bus.groups().await.unwrap()[0].in_flight == 0
    })
    .await;
}

// conformance: handlers/critical-outage: failed probes of a critical group use up no attempts; nothing is dead-lettered for an outage, and everything is handled after it.
#[tokio::test]
async fn an_outage_of_many_probes_dead_letters_nothing() {
    on_every_engine(|lab| async move {
        let (down, calls) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU32::new(0)));
        let bus = lab.open().await;
        let (is_down, called) = (down.clone(), calls.clone());
        bus.subscribe("order.placed")
            .group("mail")
            .concurrency(1)
            .breaker(BreakerPolicy::default())
            .handler(move |_: Message| {
                let (is_down, called) = (is_down.clone(), called.clone());
                async move {
                    called.fetch_add(1, Ordering::SeqCst);
                    if is_down.load(Ordering::SeqCst) {
                        return Err(HandlerError::new("mail server not reached"));
                    }
                    Ok(())
                }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let events = (0..EVENTS).map(|n| ("order.placed", n));
        let receipts = bus.publish_batch(events).await.unwrap();
        let calls_reach = async |wanted: u32| {
            eventually("the handler is called", || async {
                calls.load(Ordering::SeqCst) >= wanted
            })
            .await;
        };
        calls_reach(5).await;
        for probe in 1..=PROBES {
            is_open_and_settled(&bus).await;
            assert_eq!(
                calls.load(Ordering::SeqCst),
                4 + probe,
                "one probe at a time"
            );
            lab.clock.advance(Duration::from_secs(31));
            calls_reach(5 + probe).await;
        }
        assert_eq!(bus.dead_letters().list().await.unwrap(), []);
        down.store(false, Ordering::SeqCst);
        let step = Duration::from_secs(31);
        for receipt in &receipts {
            in_time(&lab, &bus, step, "it is handled after all", || async {
                is_done(&bus, receipt.seq(), "mail").await
            })
            .await;
        }
        assert_eq!(bus.dead_letters().list().await.unwrap(), []);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/critical-bound: a bad event does not keep the breaker of a critical group open for ever: a day after its publish its probes are attempts.
#[tokio::test]
async fn a_bad_event_ends_in_the_dead_letters_after_a_day() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let calls = Arc::new(AtomicU32::new(0));
        let called = calls.clone();
        bus.subscribe("order.placed")
            .group("mail")
            .breaker(BreakerPolicy::default().fail_max(1))
            .handler(move |_: Message| {
                called.fetch_add(1, Ordering::SeqCst);
                async { Err::<(), _>(HandlerError::new("a bad address")) }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("order.placed", 1)).await.unwrap();
        let probe = async |wanted: u32| {
            eventually("the handler is called", || async {
                calls.load(Ordering::SeqCst) >= wanted
            })
            .await;
            is_open_and_settled(&bus).await;
        };
        probe(1).await;
        for n in 2..8 {
            lab.clock.advance(Duration::from_secs(32));
            probe(n).await;
        }
        assert_eq!(bus.dead_letters().list().await.unwrap(), []);
        lab.clock.advance(Duration::from_secs(24 * 3600));
        let step = Duration::from_secs(32);
        in_time(&lab, &bus, step, "it is a dead letter", || async {
            bus.dead_letters().list().await.unwrap().len() == 1
        })
        .await;
        let settled = receipt.settled().await.unwrap();
        assert_eq!(settled.dead_lettered.len(), 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}
