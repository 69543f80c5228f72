//! Settling: ack, skip, retry, dead-letter, release; leases that end, are fenced and are extended;
//! follow-up events.

use std::time::Duration;

use everbus_core::{
    Code, Cursor, Deduplication, Event, EventState, FailureKind, Settlement, Verdict,
};

use super::needs::{
    ATOMIC_FOLLOW_UPS, DEAD_LETTERS, DELAY, EXACT_ATTEMPTS, FENCING, LOG, LOG_ORDER, LOOKUP,
};
use super::stage::{LEASE, code, event, following, nothing, take, take_one};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

/// An acked event is done and never comes again; a skipped one too.
pub async fn an_acked_event_is_done<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[]).await?;
    stage.declare("", &["*"]).await;
    let a = stage.publish("a.b").await;
    let b = stage.publish("a.b").await;
    stage
        .assert_state(a.position, "", EventState::Pending)
        .await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 2).await;
    stage
        .assert_state(a.position, "", EventState::Processing)
        .await;
    stage.ack(&got[0]).await;
    let reason = "stale".to_string();
    stage.end(&got[1], Verdict::Skip { reason }).await;
    stage.assert_state(a.position, "", EventState::Done).await;
    stage.assert_state(b.position, "", EventState::Done).await;
    stage.advance(LEASE * 3).await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// Acks may come in any order; an unfinished event in the middle is not skipped.
pub async fn acks_out_of_order_pass_over_nothing<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[]).await?;
    stage.declare("", &["*"]).await;
    stage.publish_many("a.b", 20).await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 20).await;
    for delivery in got
        .iter()
        .rev()
        .filter(|d| d.record.position != got[7].record.position)
    {
        stage.ack(delivery).await;
    }
    let stuck = got[7].record.position;
    stage.assert_state(stuck, "", EventState::Processing).await;
    assert_eq!(stage.group_info("").await.in_flight, 1);
    stage.advance(LEASE + SECOND).await;
    let again = take_one(&mut consumer).await;
    assert_eq!(
        again.record.position, stuck,
        "the unfinished one comes again"
    );
    stage.ack(&again).await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// A failed event comes again when its delay is over, not before, with its failures in order.
pub async fn a_failed_event_waits_out_its_delay<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&DELAY]).await?;
    stage.declare("", &["*"]).await;
    let failing = stage.publish("a.b").await;
    let mut consumer = stage.consumer("").await;
    for attempt in 1..=3u32 {
        let delivery = take_one(&mut consumer).await;
        assert_eq!(delivery.record.position, failing.position);
        assert_eq!(delivery.attempt, attempt);
        let texts: Vec<&str> = delivery.failures.iter().map(|f| f.error.as_str()).collect();
        let expected: Vec<String> = (1..attempt)
            .map(|n| format!("attempt {n} failed"))
            .collect();
        assert_eq!(texts, expected, "every failure, in order");
        assert!(
            delivery
                .failures
                .iter()
                .zip(1..)
                .all(|(f, n)| f.attempt == n)
        );
        stage.fail(&delivery, 4 * SECOND).await;
        if let Some(state) = stage.group_state(failing.position, "").await {
            assert_eq!(
                state.state,
                EventState::Processing,
                "waiting shows as processing"
            );
            assert_eq!(state.attempts, attempt);
            assert_eq!(state.failures.len() as u32, attempt);
            assert!(state.due_at.is_some());
        }
        stage.advance(2 * SECOND).await;
        // Rule 5: a failing event does not block others.
        stage.publish("c.d").await;
        let other = take_one(&mut consumer).await;
        assert_eq!(other.record.event.event_type(), "c.d");
        stage.ack(&other).await;
        nothing(&mut consumer).await;
        stage.advance(3 * SECOND).await;
    }
    let last = take_one(&mut consumer).await;
    assert_eq!(last.attempt, 4);
    stage.ack(&last).await;
    stage
        .assert_state(failing.position, "", EventState::Done)
        .await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// Waiting events come when they are due, each at its own time.
pub async fn waiting_events_come_each_at_its_time<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&DELAY]).await?;
    stage.declare("", &["*"]).await;
    stage.publish_many("a.b", 3).await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 3).await;
    for (delivery, seconds) in got.iter().zip([9, 3, 6]) {
        stage.fail(delivery, seconds * SECOND).await;
    }
    for expected in [1, 2, 0] {
        nothing(&mut consumer).await;
        stage.advance(3 * SECOND).await;
        let due = take_one(&mut consumer).await;
        assert_eq!(due.record.position, got[expected].record.position);
        stage.ack(&due).await;
    }
    stage.passed()
}

/// A dead-lettered event is kept with everything needed to understand it, and comes no more.
pub async fn a_dead_lettered_event_is_kept_with_its_history<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[]).await?;
    stage.declare("billing", &["*"]).await;
    let body = everbus_core::Event::builder("order.placed")
        .payload("{\"order\": 42}")
        .meta("channel", "web")
        .build()
        .unwrap();
    let appended = stage.append(body.clone()).await;
    let mut consumer = stage.consumer("billing").await;
    let first = take_one(&mut consumer).await;
    stage.fail(&first, Duration::ZERO).await;
    let second = take_one(&mut consumer).await;
    stage.advance(SECOND).await;
    stage.kill(&second).await;
    stage
        .assert_state(appended.position, "billing", EventState::Dlq)
        .await;
    stage.advance(LEASE * 2).await;
    nothing(&mut consumer).await;
    assert_eq!(stage.group_info("billing").await.dead_letters, 1);
    if !stage.offers(&DEAD_LETTERS) {
        return stage.passed();
    }
    let dead = stage.open_dead_letters().await;
    assert_eq!(dead.len(), 1);
    let dead = &dead[0];
    assert_eq!(dead.record.event, body);
    stage.assert_same(&dead.record, appended.id, appended.position);
    assert_eq!(dead.group.as_str(), "billing");
    assert_eq!(dead.handler.as_deref(), Some("the handler"));
    assert_eq!(dead.attempts, 2);
    let errors: Vec<&str> = dead.failures.iter().map(|f| f.error.as_str()).collect();
    assert_eq!(errors, ["attempt 1 failed", "attempt 2 failed"]);
    assert_eq!(dead.first_seen_at, dead.died_at);
    assert_eq!(dead.retried_at, None);
    let found = stage.dead_letters().get(appended.id).await.unwrap();
    assert_eq!(found.as_slice(), std::slice::from_ref(dead));
    stage.passed()
}

/// A released event comes again without an attempt counted, and not before its time.
pub async fn a_release_is_not_an_attempt<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&EXACT_ATTEMPTS, &DELAY]).await?;
    stage.declare("", &["*"]).await;
    let appended = stage.publish("a.b").await;
    let mut consumer = stage.consumer("").await;
    for _ in 0..3 {
        let delivery = take_one(&mut consumer).await;
        assert_eq!((delivery.attempt, delivery.failures.len()), (1, 0));
        let after = Duration::ZERO;
        stage.end(&delivery, Verdict::Release { after }).await;
    }
    let delivery = take_one(&mut consumer).await;
    let after = 4 * SECOND;
    stage.end(&delivery, Verdict::Release { after }).await;
    if let Some(state) = stage.group_state(appended.position, "").await {
        assert_eq!(state.state, EventState::Pending);
        assert_eq!(state.attempts, 0);
    }
    nothing(&mut consumer).await;
    stage.advance(5 * SECOND).await;
    let delivery = take_one(&mut consumer).await;
    assert_eq!(delivery.attempt, 1);
    stage.fail(&delivery, Duration::ZERO).await;
    let delivery = take_one(&mut consumer).await;
    assert_eq!(delivery.attempt, 2);
    let after = Duration::ZERO;
    stage.end(&delivery, Verdict::Release { after }).await;
    let delivery = take_one(&mut consumer).await;
    assert_eq!((delivery.attempt, delivery.failures.len()), (2, 1));
    stage.ack(&delivery).await;
    stage.passed()
}

/// A lease that ends gives the event back, with the attempt counted and the crash recorded.
pub async fn a_lease_that_ends_counts_as_a_crash<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[]).await?;
    stage.declare("", &["*"]).await;
    let appended = stage.publish("a.b").await;
    let mut asleep = stage.consumer("").await;
    let lost = take_one(&mut asleep).await;
    asleep.close().await.unwrap();
    let mut consumer = stage.consumer("").await;
    stage.advance(LEASE - SECOND).await;
    nothing(&mut consumer).await;
    stage.advance(2 * SECOND).await;
    let again = take_one(&mut consumer).await;
    assert_eq!(again.record.position, appended.position);
    if stage.offers(&EXACT_ATTEMPTS) {
        assert_eq!(again.attempt, 2, "the lost attempt counts");
        assert_eq!(again.failures.len(), 1);
        assert_eq!(again.failures[0].kind, FailureKind::Crash);
        assert_eq!(again.failures[0].attempt, 1);
    }
    assert_ne!(again.lease, lost.lease);
    stage.ack(&again).await;
    stage.passed()
}

/// A worker that slept past its lease cannot settle or extend what another holds now.
pub async fn a_late_settlement_is_refused<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&FENCING]).await?;
    stage.declare("", &["*"]).await;
    let appended = stage.publish("a.b").await;
    let mut asleep = stage.consumer("").await;
    let lost = take_one(&mut asleep).await;
    asleep.close().await.unwrap();
    stage.advance(LEASE + SECOND).await;
    let mut consumer = stage.consumer("").await;
    let held = take_one(&mut consumer).await;
    let failure = Some(stage.failure(&lost));
    for verdict in [
        Verdict::Ack,
        Verdict::Dead { failure },
        Verdict::Release {
            after: Duration::ZERO,
        },
    ] {
        assert_eq!(code(stage.settle(&lost, verdict).await), Code::LeaseLost);
    }
    let extended = stage.broker().extend(vec![lost.lease.clone()], LEASE).await;
    let extended = extended.unwrap().remove(0);
    assert_eq!(code(extended), Code::LeaseLost);
    stage
        .assert_state(appended.position, "", EventState::Processing)
        .await;
    stage.ack(&held).await;
    stage
        .assert_state(appended.position, "", EventState::Done)
        .await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// An expired lease is lost even if no other consumer took the event yet; the event is not lost.
pub async fn a_settlement_after_the_lease_is_refused<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&FENCING]).await?;
    stage.declare("", &["*"]).await;
    stage.publish("a.b").await;
    let mut asleep = stage.consumer("").await;
    let lost = take_one(&mut asleep).await;
    asleep.close().await.unwrap();
    stage.advance(LEASE + SECOND).await;
    assert_eq!(
        code(stage.settle(&lost, Verdict::Ack).await),
        Code::LeaseLost
    );
    let mut consumer = stage.consumer("").await;
    let again = take_one(&mut consumer).await;
    assert_eq!(again.attempt, 2);
    stage.ack(&again).await;
    stage.passed()
}

/// A second settlement of the same lease is refused and changes nothing; the answers are per item.
pub async fn a_second_settlement_is_refused<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&FENCING]).await?;
    stage.declare("", &["*"]).await;
    stage.publish_many("a.b", 3).await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 3).await;
    stage.ack(&got[0]).await;
    let failure = stage.failure(&got[0]);
    let after = Duration::ZERO;
    let batch = vec![
        Settlement::new(got[1].lease.clone(), Verdict::Ack),
        Settlement::new(got[0].lease.clone(), Verdict::Retry { after, failure }),
        Settlement::new(got[2].lease.clone(), Verdict::Ack),
        Settlement::new(got[2].lease.clone(), Verdict::Ack),
    ];
    let answers = stage.broker().settle(batch).await.unwrap();
    let codes: Vec<Option<Code>> = answers
        .iter()
        .map(|a| a.as_ref().err().map(everbus_core::Error::code))
        .collect();
    assert_eq!(
        codes,
        [None, Some(Code::LeaseLost), None, Some(Code::LeaseLost)]
    );
    stage.advance(LEASE * 2).await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// Extending keeps a delivery beyond its first lease, from now on.
pub async fn an_extended_lease_is_kept<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[]).await?;
    stage.declare("", &["*"]).await;
    stage.publish_many("a.b", 2).await;
    let mut slow = stage.consumer("").await;
    let held = take(&mut slow, 2).await;
    slow.close().await.unwrap();
    let mut consumer = stage.consumer("").await;
    for _ in 0..2 {
        stage.advance(LEASE - SECOND).await;
        stage.extend(&held[1], LEASE).await.unwrap();
    }
    let other = take_one(&mut consumer).await;
    assert_eq!(
        other.record.position, held[0].record.position,
        "the other one ended"
    );
    stage.ack(&other).await;
    nothing(&mut consumer).await;
    stage.ack(&held[1]).await;
    stage.advance(LEASE * 2).await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// Follow-up events are there when the verdict is, and are delivered like any other.
pub async fn follow_ups_are_appended_with_the_verdict<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("", &["*"]).await;
    stage.publish("order.placed").await;
    let mut consumer = stage.consumer("").await;
    let cause = take_one(&mut consumer).await;
    let follow_ups = vec![event("order.billed"), event("order.mailed")];
    let ids: Vec<_> = follow_ups.iter().map(everbus_core::Event::id).collect();
    stage
        .settle_with(following(
            Settlement::new(cause.lease.clone(), Verdict::Ack),
            follow_ups,
        ))
        .await
        .unwrap();
    let followed = take(&mut consumer, 2).await;
    let mut got: Vec<_> = followed.iter().map(|d| d.record.event.id()).collect();
    if !stage.offers(&LOG_ORDER) {
        got.sort_by_key(|id| ids.iter().position(|known| known == id));
    }
    assert_eq!(got, ids);
    for delivery in &followed {
        stage.ack(delivery).await;
    }
    nothing(&mut consumer).await;
    stage.passed()
}

/// A settlement whose lease was lost appends nothing.
pub async fn follow_ups_of_a_lost_lease_are_not_appended<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(
        harness,
        Time::Short,
        &[&FENCING, &ATOMIC_FOLLOW_UPS, &LOG, &LOOKUP],
    )
    .await?;
    stage.declare("", &["*"]).await;
    stage.publish("order.placed").await;
    let mut asleep = stage.consumer("").await;
    let lost = take_one(&mut asleep).await;
    asleep.close().await.unwrap();
    stage.advance(LEASE + SECOND).await;
    let follow_up = event("order.billed");
    let id = follow_up.id();
    let late = stage
        .settle_with(following(
            Settlement::new(lost.lease.clone(), Verdict::Ack),
            vec![follow_up],
        ))
        .await;
    assert_eq!(code(late), Code::LeaseLost);
    assert!(stage.lookup().find(id).await.unwrap().is_empty());
    let head = stage.log().head().await.unwrap();
    assert_eq!(head, Cursor::from(lost.record.position));
    stage.passed()
}

/// Follow-ups go with a retry, a dead letter and a skip as they go with an ack. If one of them is refused,
/// nothing is applied, and the lease is still held.
pub async fn follow_ups_go_with_a_failure<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&ATOMIC_FOLLOW_UPS, &LOOKUP]).await?;
    stage.declare("", &["order.placed"]).await;
    stage.declare("told", &["order.failed"]).await;
    let mut consumer = stage.consumer("").await;
    let mut told = stage.consumer("told").await;
    let taken = stage.publish("order.taken").await;
    let reason = "not ours".to_owned();
    for expected in [EventState::Processing, EventState::Dlq, EventState::Done] {
        let appended = stage.publish("order.placed").await;
        let delivery = take_one(&mut consumer).await;
        let failure = stage.failure(&delivery);
        let verdict = match expected {
            EventState::Processing => Verdict::Retry {
                after: LEASE * 100,
                failure,
            },
            EventState::Dlq => Verdict::Dead {
                failure: Some(failure),
            },
            _ => Verdict::Skip {
                reason: reason.clone(),
            },
        };
        let settlement = |follow_ups| {
            let settlement = Settlement::new(delivery.lease.clone(), verdict.clone());
            following(settlement, follow_ups)
        };
        if stage.capabilities().deduplication == Deduplication::WhileRetained {
            let fresh = event("order.failed");
            let used = Event::builder("order.failed").id(taken.id);
            let used = used.json(&"another body").build().unwrap();
            let refused = stage.settle_with(settlement(vec![fresh, used])).await;
            assert_eq!(code(refused), Code::IdReused);
            nothing(&mut told).await;
        }
        let follow_up = event("order.failed");
        let id = follow_up.id();
        stage
            .settle_with(settlement(vec![follow_up]))
            .await
            .unwrap();
        let got = take_one(&mut told).await;
        assert_eq!(got.record.event.id(), id);
        stage.ack(&got).await;
        stage.assert_state(appended.position, "", expected).await;
    }
    nothing(&mut told).await;
    stage.passed()
}
