//! Partitions that are full stop for a while, and go on: also when they move meanwhile.

use std::collections::HashSet;

use everbus_core::{Consumer, Engine, Event, EventId, Settlement, Verdict};

use crate::server;
use crate::work::{DEADLINE, ack, consumer, group, take};

/// More than the two partitions of a topic may hold.
const EVENTS: usize = 10_000;

/// Takes and acks events until all of these were there.
async fn finish(engine: &Engine, consumer: &mut Box<dyn Consumer>, mut open: HashSet<EventId>) {
    while !open.is_empty() {
        let batch = tokio::time::timeout(DEADLINE, consumer.fetch(200)).await;
        let batch = batch.unwrap_or_else(|_| panic!("{} events do not come", open.len()));
        let batch = batch.unwrap();
        for delivery in &batch {
            open.remove(&delivery.record.event.id());
        }
        let acks = batch.into_iter();
        let acks = acks.map(|delivery| Settlement::new(delivery.lease, Verdict::Ack));
        engine.broker.settle(acks.collect()).await.unwrap();
    }
}

// conformance: contract/kafka-paused-moves: a partition that moves while it is paused for backpressure, and comes back, is read again
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_was_full_is_read_when_it_comes_back() {
    let Some(url) = server::space() else {
        return;
    };
    let one = server::open(&url).await;
    one.broker.declare(group("g", &["order.*"])).await.unwrap();
    let event = |n| Event::builder("order.placed").key(format!("{n}")).build();
    let events = (0..EVENTS).map(|n| event(n).unwrap()).collect();
    let answers = one.broker.append(events).await.unwrap();
    let mut ids: HashSet<EventId> = answers.into_iter().map(|a| a.unwrap().id).collect();
    // This process has both partitions, takes next to nothing, and so stops reading them.
    let mut here = consumer(&one, "g").await;
    let first = take(&mut here, 1).await.remove(0);
    ack(&one, &first).await;
    ids.remove(&first.record.event.id());
    // Another one gets one of them, and goes again.
    let two = server::open(&url).await;
    let mut there = consumer(&two, "g").await;
    drop(take(&mut there, 1).await);
    two.broker.close().await.unwrap();
    finish(&one, &mut here, ids).await;
}
