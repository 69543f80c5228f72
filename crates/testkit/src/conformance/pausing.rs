//! A consumer that pauses stays in its group and leaves the work to others.

use std::time::Duration;

use everbus_core::{Code, EventState};

use super::needs::{DEAD_LETTERS, EXACT_ATTEMPTS};
use super::stage::{
    DEADLINE, code, handling, nothing, options, pattern, positions, take, take_one,
};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

/// A paused consumer gets nothing. Deliveries that it had fetched stay valid. Other consumers get the rest,
/// also what it had claimed and not fetched, without an attempt. After the pause it goes on.
pub async fn a_paused_consumer_leaves_the_work_to_others<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("g", &["*"]).await;
    let published = stage.publish_many("a.x", 6).await;
    let mut paused = stage.consumer("g").await;
    let held = take(&mut paused, 2).await;
    paused.pause().await.unwrap();
    nothing(&mut paused).await;
    let mut other = stage.consumer("g").await;
    let rest = take(&mut other, 4).await;
    let mut all = positions(&held);
    all.extend(positions(&rest));
    for appended in &published {
        assert!(all.contains(&appended.position), "{all:?}");
    }
    if stage.offers(&EXACT_ATTEMPTS) {
        assert!(rest.iter().all(|d| d.attempt == 1 && d.failures.is_empty()));
    }
    for delivery in held.iter().chain(&rest) {
        stage.ack(delivery).await;
    }
    let later = stage.publish("a.x").await;
    nothing(&mut paused).await;
    let delivery = take_one(&mut other).await;
    assert_eq!(delivery.record.position, later.position);
    stage.ack(&delivery).await;
    other.close().await.unwrap();
    // Pausing twice is harmless, and events published meanwhile are delivered afterwards.
    paused.pause().await.unwrap();
    let missed = stage.publish("a.x").await;
    nothing(&mut paused).await;
    paused.resume(64).await.unwrap();
    let delivery = take_one(&mut paused).await;
    assert_eq!(delivery.record.position, missed.position);
    stage.ack(&delivery).await;
    nothing(&mut paused).await;
    assert_eq!(stage.group_info("g").await.in_flight, 0);
    stage.passed()
}

/// An event for which only a paused consumer has a handler waits; it does not become a dead letter.
pub async fn a_paused_consumer_stays_in_its_group<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&DEAD_LETTERS]).await?;
    stage.declare("g", &["a.*", "b.*"]).await;
    let only = |text: &str| handling(vec![pattern(text)]).no_handler_after(10 * SECOND);
    let mut paused = stage.consumer_with("g", only("b.*")).await;
    let mut other = stage.consumer_with("g", only("a.*")).await;
    paused.pause().await.unwrap();
    let waits = stage.publish("b.x").await;
    for _ in 0..3 {
        nothing(&mut other).await;
        stage.advance(11 * SECOND).await;
    }
    nothing(&mut other).await;
    assert!(stage.open_dead_letters().await.is_empty());
    stage
        .assert_state(waits.position, "g", EventState::Pending)
        .await;
    paused.resume(8).await.unwrap();
    let delivery = take_one(&mut paused).await;
    assert_eq!(delivery.record.position, waits.position);
    if stage.offers(&EXACT_ATTEMPTS) {
        assert_eq!(delivery.attempt, 1);
    }
    stage.ack(&delivery).await;
    stage.passed()
}

/// A resumed consumer claims at most as many as its new limit. A consumer that did not pause keeps what it
/// has beyond that, and goes on within the new limit.
pub async fn a_resumed_consumer_keeps_to_its_new_bound<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("g", &["*"]).await;
    stage.publish_many("a.x", 8).await;
    let mut consumer = stage.consumer_with("g", options().prefetch(4)).await;
    consumer.pause().await.unwrap();
    consumer.resume(1).await.unwrap();
    for _ in 0..2 {
        let delivery = take_one(&mut consumer).await;
        nothing(&mut consumer).await;
        assert_eq!(stage.group_info("g").await.in_flight, 1);
        stage.ack(&delivery).await;
    }
    consumer.resume(3).await.unwrap();
    let mut held = take(&mut consumer, 3).await;
    nothing(&mut consumer).await;
    consumer.resume(1).await.unwrap();
    nothing(&mut consumer).await;
    while let Some(delivery) = held.pop() {
        nothing(&mut consumer).await;
        stage.ack(&delivery).await;
    }
    for _ in 0..3 {
        let delivery = take_one(&mut consumer).await;
        nothing(&mut consumer).await;
        stage.ack(&delivery).await;
    }
    nothing(&mut consumer).await;
    stage.passed()
}

/// A paused consumer learns that the engine was closed, and closing it gives nothing away.
pub async fn a_paused_consumer_can_end<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("g", &["*"]).await;
    stage.publish_many("a.x", 2).await;
    let mut paused = stage.consumer("g").await;
    let held = take_one(&mut paused).await;
    paused.pause().await.unwrap();
    paused.close().await.unwrap();
    stage.ack(&held).await;
    let mut next = stage.consumer("g").await;
    let rest = take_one(&mut next).await;
    assert_ne!(rest.record.position, held.record.position);
    next.pause().await.unwrap();
    let waiting = tokio::spawn(async move { next.fetch(1).await });
    tokio::time::sleep(Duration::from_millis(20)).await;
    stage.broker().close().await.unwrap();
    let ended = tokio::time::timeout(DEADLINE, waiting).await;
    assert_eq!(code(ended.unwrap().unwrap()), Code::EventBusShutdownError);
    stage.passed()
}
