//! Waiting until every group that wanted an event has settled it for good.

use std::time::Duration;

use everbus_core::{Code, GroupName, Position, SettledOutcome, Verdict};
use tokio::task::JoinHandle;

use super::needs::SETTLED;
use super::stage::{DEADLINE, QUIET, beyond, code, name, take_one};
use super::{Harness, Outcome, Stage, Time};

fn wait_for<H: Harness>(
    stage: &Stage<H>,
    position: Position,
) -> JoinHandle<everbus_core::Result<SettledOutcome>> {
    let settled = stage.engine().settled.clone().unwrap();
    tokio::spawn(async move { settled.settled(position, DEADLINE).await })
}

async fn still_waiting(waiting: &mut JoinHandle<everbus_core::Result<SettledOutcome>>) {
    let ended = tokio::time::timeout(QUIET, waiting).await;
    assert!(ended.is_err(), "settled too early: {ended:?}");
}

/// An event that no group wants is settled at once; one that does not exist is not found.
pub async fn an_event_no_group_wants_is_settled<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&SETTLED]).await?;
    let settled = stage.engine().settled().unwrap();
    let alone = stage.publish("a.b").await;
    let outcome = stage.settled(alone.position).await;
    assert_eq!(outcome, SettledOutcome::default());
    stage.declare("orders", &["order.*"]).await;
    let unmatched = stage.publish("user.created").await;
    let outcome = stage.settled(unmatched.position).await;
    assert_eq!(outcome, SettledOutcome::default());
    let nowhere = beyond(unmatched.position, 1000);
    let missing = settled.settled(nowhere, DEADLINE).await;
    assert_eq!(code(missing), Code::NotFound);
    stage.passed()
}

/// A group declared after the event was published is not waited for.
pub async fn a_later_group_is_not_waited_for<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&SETTLED]).await?;
    let appended = stage.publish("a.b").await;
    stage.declare("late", &["*"]).await;
    let outcome = stage.settled(appended.position).await;
    assert_eq!(outcome, SettledOutcome::default());
    stage.passed()
}

/// It waits for every group that matches, and names those in which it became a dead letter.
pub async fn settled_waits_for_every_group<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&SETTLED]).await?;
    stage.declare("", &["*"]).await;
    stage.declare("billing", &["order.*"]).await;
    stage.declare("users", &["user.*"]).await;
    let appended = stage.publish("order.placed").await;
    let mut waiting = wait_for(&stage, appended.position);
    still_waiting(&mut waiting).await;

    let mut unnamed = stage.consumer("").await;
    let delivery = take_one(&mut unnamed).await;
    still_waiting(&mut waiting).await;
    stage.fail(&delivery, Duration::ZERO).await;
    let delivery = take_one(&mut unnamed).await;
    stage.ack(&delivery).await;
    still_waiting(&mut waiting).await;

    let mut billing = stage.consumer("billing").await;
    let delivery = take_one(&mut billing).await;
    stage.kill(&delivery).await;
    let outcome = tokio::time::timeout(DEADLINE, waiting)
        .await
        .unwrap()
        .unwrap();
    let dead_lettered: Vec<GroupName> = vec![name("billing")];
    assert_eq!(outcome.unwrap(), SettledOutcome { dead_lettered });
    stage.passed()
}

/// Skipping settles an event; so does removing the last group that has to handle it.
pub async fn skipping_or_removing_the_group_settles<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&SETTLED]).await?;
    stage.declare("skips", &["*"]).await;
    stage.declare("goes", &["*"]).await;
    let appended = stage.publish("a.b").await;
    let mut waiting = wait_for(&stage, appended.position);
    let mut consumer = stage.consumer("skips").await;
    let delivery = take_one(&mut consumer).await;
    let reason = "stale".to_string();
    stage.end(&delivery, Verdict::Skip { reason }).await;
    still_waiting(&mut waiting).await;
    stage.broker().remove_group(name("goes")).await.unwrap();
    let outcome = tokio::time::timeout(DEADLINE, waiting)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(outcome.unwrap(), SettledOutcome::default());
    stage.passed()
}

/// A wait that times out is a separate error, and the event keeps waiting.
pub async fn a_wait_that_is_too_long_times_out<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&SETTLED]).await?;
    stage.declare("", &["*"]).await;
    let appended = stage.publish("a.b").await;
    let settled = stage.engine().settled().unwrap();
    let late = settled
        .settled(appended.position, Duration::from_millis(30))
        .await;
    assert_eq!(code(late), Code::Timeout);
    let mut consumer = stage.consumer("").await;
    let delivery = take_one(&mut consumer).await;
    stage.ack(&delivery).await;
    let outcome = stage.settled(appended.position).await;
    assert_eq!(outcome, SettledOutcome::default());
    stage.passed()
}
