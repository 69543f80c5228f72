//! Order by key across processes.

use std::time::Duration;

use everbus_core::{Consumer, Delivery, Engine, Event, Settlement, Verdict};

use crate::server;
use crate::streams::{group, open, options};

async fn one(consumer: &mut Box<dyn Consumer>) -> Delivery {
    let fetched = tokio::time::timeout(Duration::from_secs(90), consumer.fetch(1)).await;
    fetched.expect("something comes").unwrap().remove(0)
}

async fn ack(engine: &Engine, delivery: Delivery) {
    let ack = Settlement::new(delivery.lease, Verdict::Ack);
    engine
        .broker
        .settle(vec![ack])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
}

// conformance: contract/nats-ordered-takeover: when another process takes an ordered group over, the events of a key stay in order
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_takes_over_keeps_the_order() {
    let Some(url) = server::account() else { return };
    let (first, second) = (open(&url).await, open(&url).await);
    let mut spec = group("g", &["*"]);
    spec.ordered = true;
    first.broker.declare(spec.clone()).await.unwrap();
    second.broker.declare(spec).await.unwrap();
    let mut at = Vec::new();
    for n in 0..3 {
        let event = Event::builder("step.done")
            .json(&n)
            .key("k")
            .build()
            .unwrap();
        let answers = first.broker.append(vec![event]).await.unwrap();
        at.push(answers.into_iter().next().unwrap().unwrap().position);
    }
    let name = || "g".parse().unwrap();
    let mut one_here = first.broker.consume(name(), options()).await.unwrap();
    let held = one(&mut one_here).await;
    assert_eq!(held.record.position, at[0]);
    let mut one_there = second.broker.consume(name(), options()).await.unwrap();
    let early = tokio::time::timeout(Duration::from_secs(1), one_there.fetch(1)).await;
    assert!(early.is_err(), "the first process has the key: {early:?}");
    // The first process ends with its event unsettled.
    drop((one_here, first));
    for expected in at {
        let delivery = one(&mut one_there).await;
        assert_eq!(delivery.record.position, expected);
        ack(&second, delivery).await;
    }
}

// conformance: contract/nats-ordered-full: a process whose room is full of events that wait for one of a dead process gets that one
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_process_takes_over() {
    let Some(url) = server::account() else { return };
    let (first, second) = (open(&url).await, open(&url).await);
    let mut spec = group("g", &["*"]);
    spec.ordered = true;
    first.broker.declare(spec.clone()).await.unwrap();
    second.broker.declare(spec).await.unwrap();
    let mut at = Vec::new();
    for n in 0..6 {
        let event = Event::builder("step.done")
            .json(&n)
            .key("k")
            .build()
            .unwrap();
        let answers = first.broker.append(vec![event]).await.unwrap();
        at.push(answers[0].as_ref().unwrap().position);
    }
    let name = || "g".parse().unwrap();
    // A long lease: the server unpins the first process before its event is due.
    let long = options().lease(Duration::from_secs(30)).prefetch(1);
    let mut one_here = first.broker.consume(name(), long.clone()).await.unwrap();
    assert_eq!(one(&mut one_here).await.record.position, at[0]);
    drop((one_here, first));
    let mut one_there = second
        .broker
        .consume(name(), long.prefetch(2))
        .await
        .unwrap();
    for expected in at {
        let delivery = one(&mut one_there).await;
        assert_eq!(delivery.record.position, expected);
        ack(&second, delivery).await;
    }
}
