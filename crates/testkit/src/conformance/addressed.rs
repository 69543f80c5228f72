//! Events for one group only: all other groups skip them.

use std::time::Duration;

use everbus_core::{
    Code, DeadLetterFilter, Event, EventKey, EventState, PageRequest, Retention, SettledOutcome,
};

use super::needs::{
    DEAD_LETTERS, DEDUPLICATION, DEPTH, LOG, LOOKUP, MAINTENANCE, RESTART, SETTLED,
};
use super::stage::{DEADLINE, code, event, name, nothing, take, take_one};
use super::{Harness, Outcome, Stage, Time};

fn to(group: &str, event_type: &str) -> Event {
    event(event_type).addressed_to(&name(group))
}

/// Groups that have caught up, are behind, are unnamed or are declared later skip it; their cursors move on.
pub async fn an_addressed_event_reaches_its_group_alone<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[]).await?;
    for group in ["", "mine", "behind", "other"] {
        stage.declare(group, &["*"]).await;
    }
    // These two groups have caught up, and wait when the event is published.
    let mut mine = stage.consumer("mine").await;
    let mut other = stage.consumer("other").await;
    let first = stage.publish("a.b").await;
    let addressed = stage.append(to("mine", "a.b")).await;
    let unnamed = stage.append(to("", "a.b")).await;
    let last = stage.publish("a.b").await;
    for (consumer, expected) in [
        (
            &mut mine,
            vec![first.position, addressed.position, last.position],
        ),
        (&mut other, vec![first.position, last.position]),
    ] {
        let got = stage.take_these(consumer, &expected).await;
        for delivery in &got {
            stage.ack(delivery).await;
        }
        nothing(consumer).await;
    }
    drop((mine, other));
    // These two groups are behind. One of them is declared only now.
    stage.declare("later", &["*"]).await;
    if stage.offers(&RESTART) {
        stage.restart().await;
    }
    for (group, expected) in [
        ("behind", vec![first.position, last.position]),
        ("later", vec![first.position, last.position]),
        ("", vec![first.position, unnamed.position, last.position]),
    ] {
        let mut consumer = stage.consumer(group).await;
        let got = stage.take_these(&mut consumer, &expected).await;
        for delivery in &got {
            stage.ack(delivery).await;
        }
        nothing(&mut consumer).await;
        consumer.close().await.unwrap();
        stage
            .eventually("the group has passed everything", || async {
                stage.group_info(group).await.behind == 0
            })
            .await;
    }
    if let Some(state) = stage.group_state(addressed.position, "other").await {
        assert_eq!(state.state, EventState::Done);
        assert!(state.skipped.is_some(), "it was not handled there");
    }
    if let Some(state) = stage.group_state(addressed.position, "mine").await {
        assert_eq!((state.state, state.skipped), (EventState::Done, None));
    }
    if stage.offers(&LOOKUP) {
        let own = &stage.lookup().find(addressed.id).await.unwrap()[0].event;
        assert!(own.is_for(&name("mine")) && !own.is_for(&name("other")));
    }
    stage.passed()
}

/// It is handled in the order of its key.
pub async fn an_addressed_event_comes_in_its_turn<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    for group in ["mine", "other"] {
        let mut spec = super::stage::spec(group, &["*"]);
        spec.ordered = true;
        stage.broker().declare(spec).await.unwrap();
    }
    let keyed = || {
        Event::builder("a.b")
            .payload("{}")
            .key("k")
            .build()
            .unwrap()
    };
    let events = [keyed(), keyed().addressed_to(&name("mine")), keyed()];
    let mut places = Vec::new();
    for event in events {
        places.push(stage.append(event).await.position);
    }
    for (group, expected) in [
        ("mine", places.clone()),
        ("other", vec![places[0], places[2]]),
    ] {
        let mut consumer = stage.consumer(group).await;
        for position in expected {
            let delivery = take_one(&mut consumer).await;
            assert_eq!(delivery.record.position, position, "{group}");
            nothing(&mut consumer).await;
            stage.ack(&delivery).await;
        }
        nothing(&mut consumer).await;
    }
    stage.passed()
}

/// `settled` does not wait for the other groups.
pub async fn settled_waits_for_the_addressed_group_alone<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&SETTLED]).await?;
    let settled = stage.engine().settled.clone().unwrap();
    stage.declare("mine", &["*"]).await;
    stage.declare("other", &["*"]).await;
    let addressed = stage.append(to("mine", "a.b")).await;
    let brief = Duration::from_millis(30);
    let early = settled.settled(addressed.position, brief).await;
    assert_eq!(code(early), Code::Timeout);
    stage
        .assert_state(addressed.position, "mine", EventState::Pending)
        .await;
    stage
        .assert_state(addressed.position, "other", EventState::Done)
        .await;
    let mut consumer = stage.consumer("mine").await;
    let delivery = take_one(&mut consumer).await;
    stage.kill(&delivery).await;
    let outcome = settled.settled(addressed.position, DEADLINE).await.unwrap();
    let dead_lettered = vec![name("mine")];
    assert_eq!(outcome, SettledOutcome { dead_lettered });
    // To a group that does not exist: no group has to handle it.
    let lost = stage.append(to("nobody", "a.b")).await;
    let outcome = settled.settled(lost.position, DEADLINE).await.unwrap();
    assert_eq!(outcome, SettledOutcome::default());
    stage.passed()
}

/// A group that need not handle the event does not count it in a stream's backlog and does not keep it.
pub async fn other_groups_do_not_owe_an_addressed_event<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEPTH, &MAINTENANCE]).await?;
    let depth = stage.engine().depth().unwrap();
    let maintenance = stage.engine().maintenance().unwrap();
    stage.declare("mine", &["*"]).await;
    stage.declare("other", &["*"]).await;
    for _ in 0..3 {
        stage.append(to("mine", "a.b")).await;
    }
    let all = super::stage::pattern("*");
    assert_eq!(depth.depth(all.clone(), 100).await.unwrap(), 3);
    let mut mine = stage.consumer("mine").await;
    for delivery in take(&mut mine, 3).await {
        stage.ack(&delivery).await;
    }
    assert_eq!(depth.depth(all.clone(), 100).await.unwrap(), 0);
    assert_eq!(depth.drop_oldest(all, 0).await.unwrap(), 0);
    let retention = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    let pruned = maintenance.prune(retention).await.unwrap();
    assert_eq!((pruned.removed, pruned.kept), (3, 0));
    let report = maintenance.check().await.unwrap();
    assert!(report.is_ok(), "{report:?}");
    stage.passed()
}

/// The same id with another address is another event. If the second publish counted as a duplicate, its group would
/// never get the event.
pub async fn the_address_belongs_to_the_event<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEDUPLICATION]).await?;
    stage.declare("mine", &["*"]).await;
    let event = event("a.b");
    let mine = event.clone().addressed_to(&name("mine"));
    let first = stage.append(mine.clone()).await;
    let again = stage.append(mine).await;
    assert!(again.duplicate);
    assert_eq!(again.position, first.position);
    let other = event.clone().addressed_to(&name("other"));
    assert_eq!(code(stage.try_append(other).await), Code::IdReused);
    assert_eq!(code(stage.try_append(event).await), Code::IdReused);
    stage.passed()
}

/// The corrected event is an event of the log like any other; no skip is written for the groups that pass it.
pub async fn a_correction_is_addressed_to_the_group_that_failed<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&LOG, &LOOKUP, &DEAD_LETTERS]).await?;
    stage.declare("mine", &["order.*"]).await;
    stage.declare("other", &["order.*"]).await;
    let dead = stage.dead_letter("mine", "order.placed").await;
    let page = stage
        .dead_letters()
        .list(DeadLetterFilter::default(), PageRequest::default());
    let letter = page.await.unwrap().items.remove(0);
    let corrected = letter.corrected(r#"{"fixed":true}"#).unwrap();
    let sent = stage
        .dead_letters()
        .replace(letter.key(), corrected.clone())
        .await
        .unwrap();
    // A second group fails with the same event, and gets its own correction.
    stage.declare("later", &["order.*"]).await;
    for (group, expected) in [
        ("mine", vec![sent.position]),
        ("other", vec![dead.position]),
        ("later", vec![dead.position]),
    ] {
        let mut consumer = stage.consumer(group).await;
        let got = take(&mut consumer, expected.len()).await;
        let positions: Vec<_> = got.iter().map(|d| d.record.position).collect();
        assert_eq!(positions, expected, "{group}");
        for delivery in &got {
            assert!(delivery.record.event.is_for(&name(group)));
            stage.ack(delivery).await;
        }
        nothing(&mut consumer).await;
    }
    stage.copied(&EventKey::of(&corrected)).await;
    let found = stage.lookup().find(corrected.id()).await.unwrap();
    let address = found[0].event.attributes().unwrap().address.as_deref();
    assert_eq!(address, Some("mine"));
    let kept = stage.dead_letters().get(dead.id).await.unwrap();
    assert_eq!(kept[0].replaced_by, Some(corrected.id()));
    stage.passed()
}
