//! Engines that wake each other.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{ConsumeOptions, Delivery, Event, GroupName, Pattern, SystemClock};
use everbus_postgres::Options;

use crate::support::{event, fresh_schema, group, open, options};

// conformance: engines/postgres-wake: an engine that was alone, and so notified none, wakes the consumers of an engine that came later
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_was_alone_wakes_one_that_came_later() {
    // The first engine counts the listeners again before each publish, or never.
    for poll in [Duration::from_millis(20), Duration::from_secs(3600)] {
        let Some(url) = fresh_schema() else { return };
        wake_one_that_came_later(&url, poll).await;
    }
}

async fn wake_one_that_came_later(url: &str, poll: Duration) {
    let polling = |poll| Options {
        poll,
        ..options(Arc::new(SystemClock))
    };
    let first = everbus_postgres::open(url, polling(poll)).await.unwrap();
    first.broker.declare(group("g")).await.unwrap();
    // Its session has begun then, and sees that no other engine listens.
    let lease = Duration::from_secs(3600);
    let wanted = || ConsumeOptions::new(vec![Pattern::new("*").unwrap()]).lease(lease);
    let name = || GroupName::new("g").unwrap();
    drop(first.broker.consume(name(), wanted()).await.unwrap());
    first.broker.append(vec![event(0)]).await.unwrap();
    // Polling would find the events too.
    let never = polling(Duration::from_secs(3600));
    let second = everbus_postgres::open(url, never).await.unwrap();
    let mut consumer = second.broker.consume(name(), wanted()).await.unwrap();
    assert_eq!(consumer.fetch(10).await.unwrap().len(), 1);
    // It waits before anything is published. Again and again: the news of the second engine needs a moment.
    let fetch = consumer.fetch(10);
    let mut publishing = tokio::time::interval(Duration::from_millis(200));
    publishing.tick().await;
    let woken = async {
        let mut fetch = std::pin::pin!(fetch);
        loop {
            tokio::select! {
                batch = &mut fetch => return batch.unwrap(),
                _ = publishing.tick() => drop(first.broker.append(vec![event(1)]).await.unwrap()),
            }
        }
    };
    let woken = tokio::time::timeout(Duration::from_secs(60), woken).await;
    assert!(woken.is_ok(), "the consumer was not woken");
    second.broker.close().await.unwrap();
    first.broker.close().await.unwrap();
}

// conformance: engines/postgres-in-advance: events that were claimed in advance are given back if handlers become slow, and do not count as crashed
// needs: PostgreSQL
#[tokio::test]
async fn claims_in_advance_are_given_back_before_their_leases_end() {
    let Some(url) = fresh_schema() else { return };
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    let events: Vec<Event> = (0..600).map(event).collect();
    engine.broker.append(events).await.unwrap();
    let wanted = || {
        ConsumeOptions::new(vec![Pattern::new("*").unwrap()])
            .concurrency(1000)
            .prefetch(1000)
            .lease(Duration::from_secs(8))
    };
    let consume = || {
        engine
            .broker
            .consume(GroupName::new("g").unwrap(), wanted())
    };
    let mut slow = consume().await.unwrap();
    let first = slow.fetch(200).await.unwrap();
    assert_eq!(first.len(), 200);
    // The slow consumer fetches no more. Another one gets everything that it has not returned.
    let mut other = consume().await.unwrap();
    let mut rest = Vec::new();
    while rest.len() < 400 {
        rest.extend(other.fetch(200).await.unwrap());
    }
    let places = |deliveries: &[Delivery]| -> BTreeSet<u64> {
        let places = deliveries.iter().map(|d| d.record.position.place());
        places.collect()
    };
    assert!(places(&first).is_disjoint(&places(&rest)));
    for delivery in rest {
        assert_eq!((delivery.attempt, delivery.failures.len()), (1, 0));
    }
}
