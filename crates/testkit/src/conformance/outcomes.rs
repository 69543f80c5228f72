//! The results of attempts: an event that failed and then succeeded keeps its failures.

use std::time::Duration;

use everbus_core::{
    Clock as _, DeadLetterFilter, Delivery, EventState, Failure, FailureKind, GroupState, Position,
    Ran, Redelivery, Retention, Settlement, Verdict,
};

use super::needs::{DEAD_LETTERS, LOG, LOOKUP, MAINTENANCE, REDELIVER, RESTART, STATES};
use super::stage::{name, take_one};
use super::{Harness, Outcome, Stage, Time};

const TOOK: Duration = Duration::from_micros(1500);

/// A failure with all its fields.
fn failure<H: Harness>(stage: &Stage<H>, delivery: &Delivery) -> Failure {
    let text = format!("attempt {} failed", delivery.attempt);
    let at = stage.clock.now();
    Failure::new(delivery.attempt, at, FailureKind::Error, text)
        .in_handler("mail")
        .on_worker(Some(TOOK), format!("host/{}", delivery.attempt))
}

async fn fail<H: Harness>(stage: &Stage<H>, delivery: &Delivery) -> Failure {
    let failure = failure(stage, delivery);
    let verdict = Verdict::Retry {
        after: Duration::from_secs(1),
        failure: failure.clone(),
    };
    stage.settle(delivery, verdict).await.unwrap();
    stage.advance(Duration::from_secs(1)).await;
    failure
}

/// Ends a delivery as the runtime does, with the data of the last attempt.
async fn end<H: Harness>(stage: &Stage<H>, delivery: &Delivery, verdict: Verdict) {
    let mut settlement = Settlement::new(delivery.lease.clone(), verdict);
    settlement.ran = Some(Box::new(Ran::new(Some(TOOK), "host/last")));
    stage.settle_with(settlement).await.unwrap();
}

async fn state<H: Harness>(stage: &Stage<H>, position: Position) -> GroupState {
    stage.group_state(position, "billing").await.unwrap()
}

fn texts(state: &GroupState) -> Vec<&str> {
    state.failures.iter().map(|f| f.error.as_str()).collect()
}

/// An event that failed twice and then worked, or was skipped, keeps its failures with their handler,
/// duration and worker, and when and where it ended; also after a restart.
pub async fn an_event_that_failed_and_then_worked_keeps_its_failures<H: Harness>(
    harness: H,
) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[&LOG, &LOOKUP, &STATES]).await?;
    stage.declare("billing", &["*"]).await;
    let skip = Verdict::Skip {
        reason: "enough".into(),
    };
    for verdict in [Verdict::Ack, skip] {
        let published = stage.publish("a.b").await;
        let mut consumer = stage.consumer("billing").await;
        let mut failures = Vec::new();
        for _ in 0..2 {
            let delivery = take_one(&mut consumer).await;
            failures.push(fail(&stage, &delivery).await);
        }
        let delivery = take_one(&mut consumer).await;
        let at = stage.clock.now();
        end(&stage, &delivery, verdict.clone()).await;
        consumer.close().await.unwrap();
        for restarted in [false, true] {
            if restarted && stage.offers(&RESTART) {
                stage.restart().await;
            }
            let state = state(&stage, published.position).await;
            assert_eq!((state.state, state.attempts), (EventState::Done, 3));
            assert_eq!(state.failures, failures);
            assert_eq!(state.skipped.is_some(), verdict != Verdict::Ack);
            let ended = state.ended.unwrap();
            assert_eq!(ended.ran, Ran::new(Some(TOOK), "host/last"));
            assert!(ended.at >= at, "{} is before {at}", ended.at);
        }
    }
    stage.passed()
}

/// An event that succeeds at its first attempt leaves nothing; nor does one that was given back first.
pub async fn an_event_that_simply_works_leaves_nothing<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&LOG, &LOOKUP, &STATES]).await?;
    stage.declare("billing", &["*"]).await;
    let mut consumer = stage.consumer("billing").await;
    for released in [false, true] {
        let published = stage.publish("a.b").await;
        let mut delivery = take_one(&mut consumer).await;
        if released {
            let after = Duration::ZERO;
            stage.end(&delivery, Verdict::Release { after }).await;
            delivery = take_one(&mut consumer).await;
        }
        stage.ack(&delivery).await;
        let state = state(&stage, published.position).await;
        assert_eq!((state.state, state.attempts), (EventState::Done, 0));
        assert_eq!((state.failures.len(), state.ended), (0, None));
    }
    stage.passed()
}

/// A dead letter that was retried and then worked keeps its failures, and those of the retry.
pub async fn a_retried_dead_letter_keeps_the_failures_of_all_its_runs<H: Harness>(
    harness: H,
) -> Outcome {
    let stage = Stage::open(
        harness,
        Time::Virtual,
        &[&LOG, &LOOKUP, &STATES, &DEAD_LETTERS],
    )
    .await?;
    stage.declare("billing", &["a.*"]).await;
    for again in [0, 1] {
        let published = stage.publish("a.b").await;
        let mut consumer = stage.consumer("billing").await;
        let first = fail(&stage, &take_one(&mut consumer).await).await;
        let delivery = take_one(&mut consumer).await;
        let last = failure(&stage, &delivery);
        let verdict = Verdict::Dead {
            failure: Some(last.clone()),
        };
        stage.settle(&delivery, verdict).await.unwrap();
        let mut expected = vec![first, last];
        let filter = DeadLetterFilter::default();
        assert_eq!(stage.dead_letters().retry(filter).await.unwrap(), 1);
        stage.advance(Duration::from_secs(1)).await;
        for _ in 0..again {
            expected.push(fail(&stage, &take_one(&mut consumer).await).await);
        }
        let delivery = take_one(&mut consumer).await;
        assert!(delivery.retried);
        end(&stage, &delivery, Verdict::Ack).await;
        consumer.close().await.unwrap();
        let state = state(&stage, published.position).await;
        assert_eq!(state.state, EventState::Done);
        assert_eq!((state.failures, state.attempts), (expected, 3 + again));
        assert_eq!(state.ended.unwrap().ran.took, Some(TOOK));
    }
    stage.passed()
}

/// A replayed event keeps the failures of every run.
pub async fn a_replayed_event_keeps_the_failures_of_every_run<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(
        harness,
        Time::Virtual,
        &[&LOG, &LOOKUP, &STATES, &REDELIVER],
    )
    .await?;
    stage.declare("billing", &["*"]).await;
    let mut consumer = stage.consumer("billing").await;
    let published = stage.publish("a.b").await;
    for run in 1..=2u32 {
        fail(&stage, &take_one(&mut consumer).await).await;
        let delivery = take_one(&mut consumer).await;
        end(&stage, &delivery, Verdict::Ack).await;
        let state = state(&stage, published.position).await;
        assert_eq!(texts(&state), vec!["attempt 1 failed"; run as usize]);
        assert_eq!(state.attempts, 2 * run);
        if run == 1 {
            let positions = vec![published.position];
            let engine = stage.engine().redeliver().unwrap();
            let answers = engine.redeliver(name("billing"), positions).await;
            assert_eq!(answers.unwrap(), [Redelivery::Queued]);
        }
    }
    stage.passed()
}

/// The kept attempts are removed with their event, and with their group.
pub async fn what_is_kept_of_attempts_goes_with_its_event_and_group<H: Harness>(
    harness: H,
) -> Outcome {
    let stage = Stage::open(
        harness,
        Time::Virtual,
        &[&LOG, &LOOKUP, &STATES, &MAINTENANCE],
    )
    .await?;
    let maintenance = stage.engine().maintenance().unwrap();
    stage.declare("billing", &["*"]).await;
    let mut consumer = stage.consumer("billing").await;
    let published = stage.publish("a.b").await;
    fail(&stage, &take_one(&mut consumer).await).await;
    stage.ack(&take_one(&mut consumer).await).await;
    consumer.close().await.unwrap();
    assert_eq!(state(&stage, published.position).await.failures.len(), 1);
    stage.broker().remove_group(name("billing")).await.unwrap();
    stage.declare("billing", &["*"]).await;
    let mut consumer = stage.consumer("billing").await;
    let delivery = take_one(&mut consumer).await;
    assert_eq!(delivery.failures, []);
    stage.ack(&delivery).await;
    assert_eq!(state(&stage, published.position).await.failures, []);
    let next = stage.publish("a.b").await;
    fail(&stage, &take_one(&mut consumer).await).await;
    stage.ack(&take_one(&mut consumer).await).await;
    consumer.close().await.unwrap();
    stage.advance(Duration::from_secs(3600)).await;
    let retention = Retention {
        max_age: Some(Duration::from_secs(60)),
        ..Retention::default()
    };
    maintenance.prune(retention).await.unwrap();
    assert!(stage.lookup().find(next.id).await.unwrap().is_empty());
    let report = maintenance.check().await.unwrap();
    assert!(report.is_ok(), "{report:?}");
    stage.passed()
}
