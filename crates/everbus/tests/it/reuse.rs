//! What the pipeline saves must not show: memory that is used again, events that are fetched later.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::{Bus, HandlerError, Message};
use tokio::sync::Semaphore;

use crate::support::on_every_engine;

// conformance: contract/speed-kept-message: a message that a handler keeps says the same for ever, however many events come after it.
#[tokio::test]
async fn a_message_that_a_handler_keeps_stays_as_it_is() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let kept = Arc::new(Mutex::new(Vec::<Message>::new()));
        let keep = kept.clone();
        let subscribe = bus.subscribe("a").concurrency(1);
        subscribe
            .handler(move |message: Message| {
                keep.lock().unwrap().push(message);
                async {}
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let events = (0..100).map(|n| ("a", n));
        let receipts = bus.publish_batch(events).await.unwrap();
        receipts[99].settled().await.unwrap();
        let kept = std::mem::take(&mut *kept.lock().unwrap());
        let said: Vec<u32> = kept.iter().map(|m| m.json().unwrap()).collect();
        assert_eq!(said, (0..100).collect::<Vec<_>>());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: contract/speed-fresh-message: a message begins without the follow-ups, failures and deadline of the one before.
#[tokio::test]
async fn a_message_has_nothing_of_the_one_before() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let note = seen.clone();
        let subscribe = bus.subscribe("a").concurrency(1);
        subscribe
            .timeout(Duration::from_secs(30))
            .handler(move |message: Message| {
                let left = message.deadline() - tokio::time::Instant::now();
                let usual = left <= Duration::from_secs(30);
                let fresh = (message.attempt(), message.failures().len(), usual);
                note.lock().unwrap().push(fresh);
                let odd = message.json::<u32>().is_ok_and(|n| n % 2 == 1);
                if odd {
                    message.extend(Duration::from_secs(3600));
                    message.publish(("b", 1)).unwrap();
                }
                let result = if odd { Err("odd") } else { Ok(()) };
                async move { result.map_err(HandlerError::permanent) }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipts = bus.publish_batch((0..50).map(|n| ("a", n))).await.unwrap();
        for receipt in receipts {
            receipt.settled().await.unwrap();
        }
        assert_eq!(*seen.lock().unwrap(), vec![(1, 0, true); 50]);
        let published = bus.stats().types.get("b").map_or(0, |b| b.published);
        assert_eq!(
            published, 0,
            "what a failed attempt staged is not published"
        );
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: contract/speed-bounded-queue: while handlers are busy, a group fetches a bounded number of events, whatever its prefetch.
#[tokio::test]
async fn a_group_fetches_no_more_than_it_needs_to_stay_busy() {
    let bus = Bus::builder()
        .prefetch(100_000)
        .open("memory:")
        .await
        .unwrap();
    let gate = Arc::new(Semaphore::new(0));
    let (open, started) = (gate.clone(), Arc::new(Semaphore::new(0)));
    let begun = started.clone();
    let subscribe = bus.subscribe("a").group("g").concurrency(1);
    subscribe
        .handler(move || {
            let open = open.clone();
            begun.add_permits(1);
            async move { open.acquire().await.unwrap().forget() }
        })
        .await
        .unwrap();
    let receipts = bus
        .publish_batch((0..5000).map(|n| ("a", n)))
        .await
        .unwrap();
    bus.start().await.unwrap();
    // The first handler runs, and whatever can be fetched beside it has been.
    started.acquire().await.unwrap().forget();
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    let in_flight = bus.groups().await.unwrap()[0].in_flight;
    assert!((1..1000).contains(&in_flight), "{in_flight} in flight");
    // Nothing is left behind for it.
    gate.add_permits(5000);
    receipts[4999].settled().await.unwrap();
    bus.shutdown().await.unwrap();
}
