//! What an engine declares about itself: each field of its `Capabilities` that no other scenario checks.

use std::time::Duration;

use everbus_core::{Code, Durability, Event, EventId, Position, Settlement, Verdict};

use super::needs::{
    ATOMIC_DEAD_LETTER, ATOMIC_FOLLOW_UPS, DEAD_LETTERS, DEDUPLICATION,
    DEDUPLICATION_WHILE_RETAINED, EXACT_ATTEMPTS, FENCING, NATIVE_DELAY,
};
use super::stage::{LEASE, code, event, following, nothing, options, take, take_one};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

fn with_id(id: EventId, payload: &'static str) -> Event {
    let event = Event::builder("mail.sent").id(id).payload(payload);
    event.build().unwrap()
}

/// Acknowledged events are there after a crash, unless the engine declares that it is in memory only.
pub async fn durability_is_what_it_says<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[]).await?;
    let durability = stage.capabilities().durability;
    let survives = stage.harness().survives_restart();
    assert_eq!(survives, durability != Durability::Memory, "{durability:?}");
    if survives {
        stage.declare("g", &["*"]).await;
        let appended = stage.publish_many("a.x", 3).await;
        stage.crash().await;
        let mut consumer = stage.consumer("g").await;
        let expected: Vec<Position> = appended.iter().map(|a| a.position).collect();
        for delivery in stage.take_these(&mut consumer, &expected).await {
            stage.ack(&delivery).await;
        }
        nothing(&mut consumer).await;
    }
    stage.passed()
}

/// Attempts are counted exactly: a failure and a lost lease count; a release does not, nor does an event that
/// was claimed and given back.
pub async fn attempts_are_exact<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&EXACT_ATTEMPTS]).await?;
    stage.declare("g", &["*"]).await;
    stage.publish_many("a.x", 2).await;
    let mut consumer = stage.consumer("g").await;
    let first = take_one(&mut consumer).await;
    assert_eq!(first.attempt, 1);
    stage.fail(&first, Duration::ZERO).await;
    // The second event may have been claimed with the first one: it is given back.
    consumer.close().await.unwrap();
    let mut consumer = stage.consumer("g").await;
    for delivery in take(&mut consumer, 2).await {
        if delivery.record.position == first.record.position {
            assert_eq!(delivery.attempt, 2, "one failed");
        } else {
            assert_eq!(delivery.attempt, 1, "given back");
            stage.ack(&delivery).await;
        }
    }
    consumer.close().await.unwrap();
    stage.advance(LEASE + SECOND).await;
    let mut consumer = stage.consumer("g").await;
    for released in [true, false] {
        let delivery = take_one(&mut consumer).await;
        assert_eq!(delivery.record.position, first.record.position);
        assert_eq!(delivery.attempt, 3, "one failed, one lost");
        assert_eq!(delivery.failures.len(), 2);
        let verdict = if released {
            let after = Duration::ZERO;
            Verdict::Release { after }
        } else {
            Verdict::Ack
        };
        stage.settle(&delivery, verdict).await.unwrap();
    }
    nothing(&mut consumer).await;
    stage.passed()
}

/// A consumer that runs one event at a time gets one at a time. An event that was claimed with it and never
/// handed out has no attempt, whether the lease or the process ends.
pub async fn what_has_not_begun_is_no_attempt<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Short, &[&EXACT_ATTEMPTS]).await?;
    stage.declare("g", &["*"]).await;
    stage.publish_many("a.x", 20).await;
    let one_at_a_time = || options().concurrency(1);
    let mut consumer = stage.consumer_with("g", one_at_a_time()).await;
    let first = take_one(&mut consumer).await;
    nothing(&mut consumer).await;
    stage.advance(LEASE + SECOND).await;
    drop(consumer);
    if stage.harness().survives_restart() {
        stage.crash().await;
    }
    let mut consumer = stage.consumer_with("g", one_at_a_time()).await;
    for _ in 0..20 {
        let delivery = take_one(&mut consumer).await;
        let begun = delivery.record.position == first.record.position;
        assert_eq!(delivery.attempt, 1 + u32::from(begun));
        assert_eq!(delivery.failures.len(), usize::from(begun));
        stage.ack(&delivery).await;
    }
    nothing(&mut consumer).await;
    stage.passed()
}

/// The engine itself waits before a retry: no consumer holds the event meanwhile, and its lease has ended.
pub async fn a_delay_is_the_engines_own<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&NATIVE_DELAY]).await?;
    stage.declare("g", &["*"]).await;
    let appended = stage.publish("a.x").await;
    let mut consumer = stage.consumer("g").await;
    let delivery = take_one(&mut consumer).await;
    stage.fail(&delivery, 8 * SECOND).await;
    consumer.close().await.unwrap();
    let info = stage.group_info("g").await;
    assert_eq!((info.in_flight, info.waiting), (0, 1));
    // Longer than a lease.
    stage.advance(LEASE + SECOND).await;
    let mut consumer = stage.consumer("g").await;
    nothing(&mut consumer).await;
    stage.advance(3 * SECOND).await;
    let again = take_one(&mut consumer).await;
    assert_eq!(again.record.position, appended.position);
    stage.ack(&again).await;
    stage.passed()
}

/// A settlement whose follow-up is refused is not applied: neither its verdict nor its other follow-ups.
pub async fn a_refused_follow_up_refuses_the_verdict<H: Harness>(harness: H) -> Outcome {
    let needs = [&ATOMIC_FOLLOW_UPS, &DEDUPLICATION];
    let stage = Stage::open(harness, Time::Short, &needs).await?;
    stage.declare("g", &["order.*"]).await;
    stage.declare("mail", &["mail.*"]).await;
    let taken = EventId::new();
    stage.append(with_id(taken, "1")).await;
    let appended = stage.publish("order.placed").await;
    let mut consumer = stage.consumer("g").await;
    let delivery = take_one(&mut consumer).await;
    let settlement = Settlement::new(delivery.lease.clone(), Verdict::Ack);
    let refused = following(settlement, vec![event("mail.new"), with_id(taken, "2")]);
    assert_eq!(code(stage.settle_with(refused).await), Code::IdReused);
    let mut mail = stage.consumer("mail").await;
    let only = take_one(&mut mail).await;
    assert_eq!(only.record.event.id(), taken);
    nothing(&mut mail).await;
    consumer.close().await.unwrap();
    stage.advance(LEASE + SECOND).await;
    let mut consumer = stage.consumer("g").await;
    let again = take_one(&mut consumer).await;
    assert_eq!(again.record.position, appended.position, "it is still owed");
    stage.ack(&again).await;
    stage.passed()
}

/// A verdict that is refused makes no dead letter.
pub async fn a_lost_lease_makes_no_dead_letter<H: Harness>(harness: H) -> Outcome {
    let needs = [&ATOMIC_DEAD_LETTER, &FENCING, &DEAD_LETTERS];
    let stage = Stage::open(harness, Time::Short, &needs).await?;
    stage.declare("g", &["*"]).await;
    stage.publish("a.x").await;
    let mut asleep = stage.consumer("g").await;
    let lost = take_one(&mut asleep).await;
    asleep.close().await.unwrap();
    stage.advance(LEASE + SECOND).await;
    let failure = Some(stage.failure(&lost));
    let late = stage.settle(&lost, Verdict::Dead { failure }).await;
    assert_eq!(code(late), Code::LeaseLost);
    assert!(stage.open_dead_letters().await.is_empty());
    assert_eq!(stage.group_info("g").await.dead_letters, 0);
    let mut consumer = stage.consumer("g").await;
    let again = take_one(&mut consumer).await;
    stage.kill(&again).await;
    assert_eq!(stage.open_dead_letters().await.len(), 1);
    nothing(&mut consumer).await;
    stage.passed()
}

/// A repeated id is recognised for as long as its event is kept.
pub async fn an_id_is_known_while_its_event_is_kept<H: Harness>(harness: H) -> Outcome {
    let needs = [&DEDUPLICATION, &DEDUPLICATION_WHILE_RETAINED];
    let stage = Stage::open(harness, Time::Virtual, &needs).await?;
    let id = EventId::new();
    let first = stage.append(with_id(id, "1")).await;
    stage.publish_many("a.x", 100).await;
    stage.advance(400 * 24 * 3600 * SECOND).await;
    let again = stage.append(with_id(id, "1")).await;
    assert!(again.duplicate);
    assert_eq!(again.position, first.position);
    assert_eq!(
        code(stage.try_append(with_id(id, "2")).await),
        Code::IdReused
    );
    stage.passed()
}
