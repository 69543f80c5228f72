//! Ephemeral groups: they end with the engine that declared them, and nothing is kept for them.

use std::time::Duration;

use everbus_core::{Code, EventState, GroupSpec, Retention, Verdict};

use super::needs::{DEAD_LETTERS, LOG, LOOKUP, MAINTENANCE, OWED_IS_KEPT, RESTART};
use super::stage::{code, event, name, options, spec, take_one};
use super::{Harness, Outcome, Stage, Time};

fn ephemeral(group: &str) -> GroupSpec {
    GroupSpec {
        ephemeral: true,
        ..spec(group, &["*"])
    }
}

async fn groups<H: Harness>(stage: &Stage<H>) -> Vec<String> {
    let groups = stage.groups().await;
    groups.iter().map(|group| group.name.to_string()).collect()
}

/// An ephemeral group works like any other, and is gone after a close and after a crash; a group that
/// lasts stays.
pub async fn an_ephemeral_group_goes_with_its_engine<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&RESTART]).await?;
    stage.declare("billing", &["*"]).await;
    for crash in [false, true] {
        stage.broker().declare(ephemeral("viewers")).await.unwrap();
        // Declaring it again here is the same group.
        stage.broker().declare(ephemeral("viewers")).await.unwrap();
        assert!(stage.group_info("viewers").await.ephemeral);
        assert!(!stage.group_info("billing").await.ephemeral);
        let published = stage.publish("a.b").await;
        let mut consumer = stage.consumer("viewers").await;
        loop {
            let delivery = take_one(&mut consumer).await;
            if delivery.record.position == published.position {
                // The last one stays in flight.
                break;
            }
            stage.ack(&delivery).await;
        }
        drop(consumer);
        if crash {
            stage.crash().await;
        } else {
            stage.restart().await;
        }
        // The groups of a crashed engine may be removed a moment later.
        let gone = || async { groups(&stage).await == ["billing"] };
        stage.eventually("the group is gone", gone).await;
        if let Ok(maintenance) = stage.engine().maintenance() {
            let report = maintenance.check().await.unwrap();
            assert!(report.is_ok(), "{report:?}");
        }
    }
    // Everything for the other group is there.
    let mut consumer = stage.consumer("billing").await;
    for _ in 0..2 {
        stage.ack(&take_one(&mut consumer).await).await;
    }
    stage.passed()
}

/// Retention removes events that only an ephemeral group has not reached. It keeps events that the group has
/// in flight, and the group goes on with later ones.
pub async fn an_ephemeral_group_never_pins_the_log<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(
        harness,
        Time::Virtual,
        &[&LOG, &LOOKUP, &MAINTENANCE, &OWED_IS_KEPT],
    )
    .await?;
    let maintenance = stage.engine().maintenance().unwrap();
    stage.broker().declare(ephemeral("viewers")).await.unwrap();
    let published = stage.publish_many("a.b", 3).await;
    let one_at_a_time = options().prefetch(1).lease(Duration::from_secs(24 * 3600));
    let mut consumer = stage.consumer_with("viewers", one_at_a_time).await;
    let held = take_one(&mut consumer).await;
    assert_eq!(held.record.position, published[0].position);
    stage.advance(Duration::from_secs(3600)).await;
    let retention = Retention {
        max_age: Some(Duration::from_secs(60)),
        ..Retention::default()
    };
    maintenance.prune(retention).await.unwrap();
    for (appended, there) in published.iter().zip([true, false, false]) {
        let found = stage.lookup().find(appended.id).await.unwrap();
        assert_eq!(!found.is_empty(), there, "event {}", appended.position);
    }
    let after = Duration::ZERO;
    let failure = stage.failure(&held);
    stage.end(&held, Verdict::Retry { after, failure }).await;
    let next = stage.publish("a.b").await;
    for expected in [published[0].position, next.position] {
        let delivery = take_one(&mut consumer).await;
        assert_eq!(delivery.record.position, expected);
        stage.ack(&delivery).await;
    }
    let report = maintenance.check().await.unwrap();
    assert!(report.is_ok(), "{report:?}");
    stage.passed()
}

/// An event that an ephemeral group gives up is skipped, and the reason and the failures are recorded. It is
/// not a dead letter, and there is no notice.
pub async fn what_an_ephemeral_group_gives_up_is_skipped<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&LOG, &LOOKUP]).await?;
    stage.broker().declare(ephemeral("viewers")).await.unwrap();
    let published = stage.publish("a.b").await;
    let mut consumer = stage.consumer("viewers").await;
    let delivery = take_one(&mut consumer).await;
    stage.fail(&delivery, Duration::ZERO).await;
    stage.kill(&take_one(&mut consumer).await).await;
    if stage.offers(&DEAD_LETTERS) {
        assert_eq!(stage.open_dead_letters().await, []);
    }
    if let Some(state) = stage.group_state(published.position, "viewers").await {
        assert_eq!((state.state, state.attempts), (EventState::Done, 2));
        assert_eq!(state.failures.len(), 2);
        assert_eq!(state.skipped.as_deref(), Some("given up: attempt 2 failed"));
        let head = stage.log().head().await.unwrap();
        assert_eq!(head, published.position.into());
    }
    if let Ok(engine) = stage.engine().settled() {
        let within = Duration::from_secs(60);
        let settled = engine.settled(published.position, within);
        assert_eq!(settled.await.unwrap().dead_lettered, []);
    }
    stage.passed()
}

/// The lifetime of a group does not change while it is there, and the unnamed group always lasts.
pub async fn an_ephemeral_group_is_not_taken_for_one_that_lasts<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("billing", &["*"]).await;
    stage.broker().declare(ephemeral("viewers")).await.unwrap();
    let broker = stage.broker();
    let refused = [
        (ephemeral("billing"), Code::GroupConflict),
        (spec("viewers", &["*"]), Code::GroupConflict),
        (ephemeral(""), Code::InvalidSetting),
    ];
    for (spec, expected) in refused {
        assert_eq!(code(broker.declare(spec).await), expected);
    }
    broker.remove_group(name("viewers")).await.unwrap();
    broker.declare(spec("viewers", &["*"])).await.unwrap();
    assert!(!stage.group_info("viewers").await.ephemeral);
    stage.append(event("a.b")).await;
    stage.passed()
}
