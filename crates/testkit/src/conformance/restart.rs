//! After a restart or a crash, everything that was acknowledged is there.

use std::time::Duration;

use everbus_core::{Code, Event, EventId, EventState, FailureKind};

use super::needs::{DEAD_LETTERS, DEDUPLICATION, EXACT_ATTEMPTS, RESTART};
use super::stage::{code, nothing, ordering, take, take_one};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

async fn settled_stay_settled_and_the_rest_comes_again<H: Harness>(
    harness: H,
    crash: bool,
) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[&RESTART]).await?;
    let subscriptions = stage.declare("", &["*"]).await;
    let published = stage.publish_many("a.b", 6).await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 5).await;
    stage.ack(&got[0]).await;
    stage.fail(&got[1], 30 * SECOND).await;
    stage.kill(&got[2]).await;
    // 3 and 4 are in flight, 5 was never handed out.
    drop(consumer);
    if crash {
        stage.crash().await;
    } else {
        stage.restart().await;
    }
    assert_eq!(stage.declare("", &["*"]).await, subscriptions);
    stage
        .assert_state(published[0].position, "", EventState::Done)
        .await;
    stage
        .assert_state(published[2].position, "", EventState::Dlq)
        .await;
    let mut consumer = stage.consumer("").await;
    let mut again = Vec::new();
    for _ in 0..3 {
        // Events in flight at a crash may come one at a time.
        let delivery = take_one(&mut consumer).await;
        stage.ack(&delivery).await;
        again.push(delivery);
    }
    nothing(&mut consumer).await;
    again.sort_by_key(|d| ordering(d.record.position));
    for (delivery, expected) in again.iter().zip(&published[3..]) {
        assert_eq!(delivery.record.position, expected.position);
        assert_eq!(delivery.record.event.id(), expected.id);
        assert_eq!(delivery.record.received_at, expected.received_at);
    }
    for delivery in &again[..2] {
        assert_eq!(
            delivery.attempt, 2,
            "the attempt was counted before it was handed out"
        );
        assert_eq!(delivery.failures.len(), 1);
        assert_eq!(delivery.failures[0].kind, FailureKind::Crash);
    }
    assert_eq!(again[2].attempt, 1, "never handed out");
    // The waiting one keeps its time.
    stage.advance(28 * SECOND).await;
    nothing(&mut consumer).await;
    stage.advance(3 * SECOND).await;
    let waited = take_one(&mut consumer).await;
    assert_eq!(waited.record.position, published[1].position);
    assert_eq!((waited.attempt, waited.failures.len()), (2, 1));
    assert_eq!(waited.failures[0].error, "attempt 1 failed");
    stage.ack(&waited).await;
    nothing(&mut consumer).await;
    if stage.offers(&DEAD_LETTERS) {
        let dead = stage.open_dead_letters().await;
        assert_eq!(dead.len(), 1);
        assert_eq!(dead[0].record.position, published[2].position);
        assert_eq!((dead[0].attempts, dead[0].failures.len()), (1, 1));
    }
    stage.passed()
}

/// After an orderly restart settled events stay settled, the rest comes again, delays are kept.
pub async fn a_restart_keeps_everything<H: Harness>(harness: H) -> Outcome {
    settled_stay_settled_and_the_rest_comes_again(harness, false).await
}

/// After a crash settled events stay settled, the rest comes again, delays are kept.
pub async fn a_crash_keeps_everything<H: Harness>(harness: H) -> Outcome {
    settled_stay_settled_and_the_rest_comes_again(harness, true).await
}

/// Ids are recognised and positions go on after a restart.
pub async fn identity_and_positions_survive<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&RESTART]).await?;
    let id = EventId::new();
    let body = |payload: &'static str| {
        Event::builder("a.b")
            .id(id)
            .key("k")
            .payload(payload)
            .build()
            .unwrap()
    };
    stage.publish("a.b").await;
    let first = stage.append(body("1")).await;
    for crash in [false, true] {
        if crash {
            stage.crash().await;
        } else {
            stage.restart().await;
        }
        if stage.offers(&DEDUPLICATION) {
            let again = stage.append(body("1")).await;
            assert_eq!((again.position, again.duplicate), (first.position, true));
            assert_eq!(again.received_at, first.received_at);
            assert_eq!(code(stage.try_append(body("2")).await), Code::IdReused);
        }
        // Of the same key, and so in the same shard.
        let next = Event::builder("a.b").key("k").build().unwrap();
        let next = stage.append(next).await;
        assert!(next.position > first.position && next.received_at >= first.received_at);
    }
    stage.passed()
}

/// An event that is in flight at every crash has each of them counted and recorded.
pub async fn every_crash_is_counted<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&RESTART, &EXACT_ATTEMPTS]).await?;
    stage.declare("", &["*"]).await;
    let appended = stage.publish("a.b").await;
    for attempt in 1..=4u32 {
        let mut consumer = stage.consumer("").await;
        let delivery = take_one(&mut consumer).await;
        assert_eq!(delivery.record.position, appended.position);
        assert_eq!(delivery.attempt, attempt);
        let attempts: Vec<u32> = delivery.failures.iter().map(|f| f.attempt).collect();
        assert_eq!(attempts, (1..attempt).collect::<Vec<u32>>());
        assert!(
            delivery
                .failures
                .iter()
                .all(|f| f.kind == FailureKind::Crash)
        );
        drop(consumer);
        stage.crash().await;
    }
    stage.passed()
}

/// Time that goes backwards between runs neither loses nor reorders anything.
pub async fn a_clock_set_back_keeps_the_order<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[]).await?;
    stage.declare("", &["*"]).await;
    // Of one key, and so in one shard.
    let keyed = || Event::builder("a.b").key("k").build().unwrap();
    let before = stage.append(keyed()).await;
    let earlier = before.received_at.minus(3600 * SECOND);
    stage.clock.set(earlier);
    if stage.offers(&RESTART) {
        stage.restart().await;
    }
    let after = stage.append(keyed()).await;
    assert!(
        after.received_at >= before.received_at,
        "times of receipt never sink"
    );
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 2).await;
    assert_eq!(got[0].record.position, before.position);
    stage.ack(&got[0]).await;
    stage.ack(&got[1]).await;
    nothing(&mut consumer).await;
    stage.passed()
}
