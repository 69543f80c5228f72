//! Delivering events again, and the checkpoints of long-running work.

use std::time::Duration;

use everbus_core::{
    Checkpoints, Code, Event, EventState, GroupSpec, Position, Redelivery, Retention, Settlement,
    StartFrom, Verdict,
};
use serde_json::json;

use super::needs::{
    CHECKPOINTS, DEAD_LETTERS, INBOX, LOG, LOOKUP, MAINTENANCE, REDELIVER, RESTART,
};
use super::stage::{
    LEASE, beyond, code, following, handling, name, nothing, options, ordering, pattern, positions,
    spec, take, take_one,
};
use super::{Harness, Outcome, Stage, Time};
use Redelivery::{Gone, Owed, Queued};

const SECOND: Duration = Duration::from_secs(1);

/// Delivers events to a group again.
async fn again<H: Harness>(
    stage: &Stage<H>,
    group: &str,
    positions: &[Position],
) -> Vec<Redelivery> {
    let redeliver = stage.engine().redeliver().unwrap();
    let answers = redeliver.redeliver(name(group), positions.to_vec()).await;
    answers.unwrap()
}

/// Publishes some events and lets a group handle them.
async fn handled<H: Harness>(stage: &Stage<H>, group: &str, event_type: &str) -> Vec<Position> {
    let published = stage.publish_many(event_type, 4).await;
    let mut consumer = stage.consumer(group).await;
    for delivery in take(&mut consumer, 4).await {
        stage.ack(&delivery).await;
    }
    consumer.close().await.unwrap();
    published.iter().map(|appended| appended.position).collect()
}

/// An event that a group is done with comes again, in order, with fresh attempts, and marked. The position of
/// the group does not move, and other groups do not notice.
pub async fn a_handled_event_comes_again_on_request<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&REDELIVER]).await?;
    stage.declare("billing", &["order.*"]).await;
    stage.declare("mail", &["order.*"]).await;
    let done = handled(&stage, "billing", "order.placed").await;
    handled_by(&stage, "mail", 4).await;
    let before = stage.group_info("billing").await.position;
    let answers = again(&stage, "billing", &[done[2], done[0]]).await;
    assert_eq!(answers, [Queued, Queued]);
    assert_eq!(stage.group_info("billing").await.position, before);
    assert_eq!(stage.group_info("billing").await.waiting, 2);
    stage
        .assert_state(done[0], "billing", EventState::Pending)
        .await;
    stage.assert_state(done[0], "mail", EventState::Done).await;
    stage
        .assert_state(done[1], "billing", EventState::Done)
        .await;

    let mut mail = stage.consumer("mail").await;
    let mut billing = stage.consumer("billing").await;
    let came = take(&mut billing, 2).await;
    assert_eq!(positions(&came), [done[0], done[2]]);
    for delivery in &came {
        assert!(delivery.retried, "it is marked as retried");
        assert_eq!(delivery.attempt, 1);
        assert!(delivery.failures.is_empty());
        stage.ack(delivery).await;
    }
    nothing(&mut billing).await;
    nothing(&mut mail).await;
    let info = stage.group_info("billing").await;
    assert_eq!(
        (info.position, info.waiting, info.in_flight),
        (before, 0, 0)
    );
    stage
        .assert_state(done[0], "billing", EventState::Done)
        .await;

    // A new event is not marked.
    stage.publish("order.placed").await;
    let fresh = take_one(&mut billing).await;
    assert!(!fresh.retried);
    stage.passed()
}

async fn handled_by<H: Harness>(stage: &Stage<H>, group: &str, count: usize) {
    let mut consumer = stage.consumer(group).await;
    for delivery in take(&mut consumer, count).await {
        stage.ack(&delivery).await;
    }
    consumer.close().await.unwrap();
}

/// An event that the group is not done with stays as it is, and a missing event is reported as gone.
pub async fn what_is_owed_is_not_delivered_twice<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&REDELIVER]).await?;
    stage.declare("billing", &["*"]).await;
    let many = stage.publish_many("order.placed", 6).await;
    let at: Vec<Position> = many.iter().map(|appended| appended.position).collect();
    let few = options().prefetch(5);
    let mut consumer = stage.consumer_with("billing", few).await;
    let held = take(&mut consumer, 5).await;
    stage.ack(&held[0]).await;
    stage.fail(&held[1], 10 * SECOND).await;
    stage.kill(&held[2]).await;
    stage
        .end(
            &held[3],
            Verdict::Skip {
                reason: "not today".into(),
            },
        )
        .await;
    consumer.close().await.unwrap();
    // The fifth is in flight, the sixth was perhaps never claimed.
    let beyond = beyond(at[5], 1000);
    let asked = [at[0], at[1], at[2], at[3], at[4], at[5], beyond, at[0]];
    let before = stage.group_info("billing").await.waiting;
    let redeliver = stage.engine().redeliver().unwrap();
    let foretold = redeliver.redeliverable(name("billing"), asked.to_vec());
    let foretold = foretold.await.unwrap();
    let after = stage.group_info("billing").await.waiting;
    assert_eq!(after, before, "it was only asked");
    let answers = again(&stage, "billing", &asked).await;
    assert_eq!(
        answers,
        [Queued, Owed, Owed, Queued, Owed, Owed, Gone, Owed]
    );
    // Two previews give the same: nothing was done in between.
    assert_eq!(foretold[..7], answers[..7]);
    assert_eq!(foretold[7], Queued);
    stage.ack(&held[4]).await;
    let answers = again(&stage, "billing", &[at[4], at[3]]).await;
    assert_eq!(answers, [Queued, Owed]);

    // Each comes once; the retry at its own time.
    let mut consumer = stage.consumer("billing").await;
    let mut came = take(&mut consumer, 4).await;
    came.sort_by_key(|delivery| ordering(delivery.record.position));
    assert_eq!(positions(&came), [at[0], at[3], at[4], at[5]]);
    for delivery in &came {
        assert_eq!(delivery.retried, delivery.record.position != at[5]);
        stage.ack(delivery).await;
    }
    nothing(&mut consumer).await;
    stage.advance(11 * SECOND).await;
    let retried = take_one(&mut consumer).await;
    assert_eq!((retried.record.position, retried.attempt), (at[1], 2));
    assert!(!retried.retried, "a retry of its own accord is no request");
    stage.ack(&retried).await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// Events cannot be delivered to a group that was not declared.
pub async fn an_unknown_group_is_given_nothing<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&REDELIVER]).await?;
    let position = stage.publish("a").await.position;
    let redeliver = stage.engine().redeliver().unwrap();
    for asked in [vec![], vec![position]] {
        let answer = redeliver.redeliver(name("nobody"), asked).await;
        assert_eq!(code(answer), Code::GroupNotFound);
    }
    stage.passed()
}

/// A group without subscriptions gets only what is delivered to it on request, and does not keep other events
/// from being removed.
pub async fn a_group_without_subscriptions_gets_only_what_it_is_given<H: Harness>(
    harness: H,
) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&REDELIVER]).await?;
    let first = stage.publish("order.placed").await.position;
    let second = stage.publish("user.created").await.position;
    let apart = GroupSpec {
        start_from: StartFrom::New,
        ..spec("apart", &[])
    };
    stage.broker().declare(apart).await.unwrap();
    let answers = again(&stage, "apart", &[second]).await;
    assert_eq!(answers, [Queued]);
    let third = stage.publish("user.created").await.position;
    if stage.offers(&MAINTENANCE) {
        let maintenance = stage.engine().maintenance().unwrap();
        // Only the replayed event is needed; no group needs the others.
        let retention = Retention {
            max_len: Some(0),
            ..Retention::default()
        };
        let pruned = maintenance.prune(retention).await.unwrap();
        assert_eq!((pruned.removed, pruned.kept), (2, 1));
        let answers = again(&stage, "apart", &[first, third]).await;
        assert_eq!(answers, [Gone, Gone]);
    }
    let mut consumer = stage.consumer("apart").await;
    let came = take_one(&mut consumer).await;
    assert_eq!(came.record.position, second);
    stage.ack(&came).await;
    stage.publish("user.created").await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// A replayed event that fails is retried with its mark, dies like any other, and can be retried from the
/// dead letters.
pub async fn a_replayed_event_fails_like_any_other<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&REDELIVER]).await?;
    stage.declare("billing", &["*"]).await;
    let done = handled(&stage, "billing", "order.placed").await;
    let answers = again(&stage, "billing", &[done[1]]).await;
    assert_eq!(answers, [Queued]);
    let mut consumer = stage.consumer("billing").await;
    let first = take_one(&mut consumer).await;
    stage.fail(&first, SECOND).await;
    nothing(&mut consumer).await;
    stage.advance(2 * SECOND).await;
    let second = take_one(&mut consumer).await;
    assert_eq!((second.attempt, second.failures.len()), (2, 1));
    assert!(second.retried, "it is still a replay");
    stage.end(&second, Verdict::Release { after: SECOND }).await;
    stage.advance(2 * SECOND).await;
    let third = take_one(&mut consumer).await;
    assert_eq!(third.attempt, 2);
    assert!(third.retried);
    stage.kill(&third).await;
    stage
        .assert_state(done[1], "billing", EventState::Dlq)
        .await;
    let answers = again(&stage, "billing", &[done[1]]).await;
    assert_eq!(
        answers,
        [Owed],
        "an open dead letter is retried, not replayed"
    );
    if stage.offers(&DEAD_LETTERS) {
        let letters = stage.open_dead_letters().await;
        assert_eq!(letters.len(), 1);
        assert_eq!(letters[0].attempts, 2);
    }
    stage.passed()
}

/// In an ordered group a replayed event waits for earlier events of its key and holds back later ones.
pub async fn a_replay_keeps_the_order_of_its_key<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&REDELIVER]).await?;
    let ordered = GroupSpec {
        ordered: true,
        ..spec("ordered", &["*"])
    };
    stage.broker().declare(ordered).await.unwrap();
    let keyed = |key: &str| Event::builder("a").payload("{}").key(key).build().unwrap();
    let mut at = Vec::new();
    for key in ["x", "y", "x", "x"] {
        at.push(stage.append(keyed(key)).await.position);
    }
    let mut consumer = stage.consumer("ordered").await;
    for _ in 0..at.len() {
        let delivery = take_one(&mut consumer).await;
        stage.ack(&delivery).await;
    }
    let asked = [at[3], at[0], at[2], at[1]];
    let answers = again(&stage, "ordered", &asked).await;
    assert_eq!(answers, [Queued; 4]);
    let mut of_x = Vec::new();
    for _ in 0..at.len() {
        let delivery = take_one(&mut consumer).await;
        if delivery.record.position != at[1] {
            of_x.push(delivery.record.position);
        }
        stage.ack(&delivery).await;
    }
    assert_eq!(of_x, [at[0], at[2], at[3]]);
    nothing(&mut consumer).await;
    stage.passed()
}

/// An event that waits to be delivered again is there after a crash, still marked.
pub async fn a_replay_survives_a_crash<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Short, &[&RESTART, &REDELIVER]).await?;
    stage.declare("billing", &["*"]).await;
    let done = handled(&stage, "billing", "order.placed").await;
    let answers = again(&stage, "billing", &done[..2]).await;
    assert_eq!(answers, [Queued; 2]);
    let one = options().prefetch(1);
    let mut consumer = stage.consumer_with("billing", one).await;
    let held = take_one(&mut consumer).await;
    drop(consumer);
    stage.crash().await;
    stage.advance(LEASE + SECOND).await;
    let mut consumer = stage.consumer("billing").await;
    for _ in 0..2 {
        let delivery = take_one(&mut consumer).await;
        assert!(delivery.retried);
        let interrupted = delivery.record.position == held.record.position;
        assert_eq!(delivery.attempt, if interrupted { 2 } else { 1 });
        stage.ack(&delivery).await;
    }
    nothing(&mut consumer).await;
    stage.passed()
}

/// An event that the inbox records as handled is acked again without its follow-ups.
pub async fn the_inbox_absorbs_a_replay<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&INBOX, &LOG, &REDELIVER, &LOOKUP]).await?;
    stage.declare("billing", &["order.*"]).await;
    let position = stage.publish("order.placed").await.position;
    let follow_up = |id| Event::builder("paid").id(id).payload("{}").build().unwrap();
    let mut consumer = stage.consumer("billing").await;
    for round in 0..2 {
        let delivery = take_one(&mut consumer).await;
        let id = everbus_core::EventId::new();
        let settlement = Settlement::new(delivery.lease.clone(), Verdict::Ack);
        let mut settlement = following(settlement, vec![follow_up(id)]);
        settlement.inbox = true;
        stage.settle_with(settlement).await.unwrap();
        let found = stage.lookup().find(id).await.unwrap();
        assert_eq!(found.len(), usize::from(round == 0), "round {round}");
        if round == 0 {
            again(&stage, "billing", &[position]).await;
        }
    }
    stage.passed()
}

/// A checkpoint holds the last state saved under its name; names are listed by prefix.
pub async fn a_checkpoint_is_what_was_saved_last<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Short, &[&CHECKPOINTS]).await?;
    let save = async |stage: &Stage<H>, name: &str, state| {
        let checkpoints: &dyn Checkpoints = stage.engine().checkpoints().unwrap();
        checkpoints.save(name.to_owned(), state).await
    };
    save(&stage, "replay/b", json!({ "position": 1 }))
        .await
        .unwrap();
    save(&stage, "replay/a", json!([1.5, "ä", null]))
        .await
        .unwrap();
    save(&stage, "replax", json!(0)).await.unwrap();
    save(&stage, "replay/%", json!(0)).await.unwrap();
    stage.advance(SECOND).await;
    save(&stage, "replay/b", json!({ "position": 2 }))
        .await
        .unwrap();
    for bad in ["", "a\nb", &"x".repeat(256)] {
        let refused = save(&stage, bad, json!(0)).await;
        assert_eq!(code(refused), Code::InvalidSetting, "{bad:?}");
    }
    if stage.offers(&RESTART) {
        stage.crash().await;
    }
    let checkpoints = stage.engine().checkpoints().unwrap();
    let names = async |prefix: &str| {
        let found = checkpoints.load(prefix.to_owned()).await.unwrap();
        found.into_iter().map(|c| c.name).collect::<Vec<_>>()
    };
    assert_eq!(names("replay/").await, ["replay/%", "replay/a", "replay/b"]);
    assert_eq!(names("replay/b").await, ["replay/b"]);
    assert_eq!(names("replay/%").await, ["replay/%"], "no wildcard");
    assert_eq!(names("").await.len(), 4);
    let found = checkpoints.load("replay/".into()).await.unwrap();
    assert_eq!(found[1].state, json!([1.5, "ä", null]));
    assert_eq!(found[2].state, json!({ "position": 2 }));
    assert!(found[2].saved_at > found[1].saved_at);
    assert!(checkpoints.remove("replay/b".into()).await.unwrap());
    assert!(!checkpoints.remove("replay/b".into()).await.unwrap());
    assert_eq!(names("replay/b").await, Vec::<String>::new());
    stage.passed()
}

/// Events of a type that the group does not subscribe to can be delivered again, too.
pub async fn an_unwanted_event_can_be_given<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&REDELIVER]).await?;
    stage.declare("billing", &["order.*"]).await;
    let other = stage.publish("user.created").await.position;
    let done = handled(&stage, "billing", "order.placed").await;
    let answers = again(&stage, "billing", &[other, done[0]]).await;
    assert_eq!(answers, [Queued, Queued]);
    let handles = handling(vec![pattern("user.*")]);
    let mut consumer = stage.consumer_with("billing", handles).await;
    let came = take_one(&mut consumer).await;
    assert_eq!(came.record.position, other);
    stage.ack(&came).await;
    nothing(&mut consumer).await;
    stage.passed()
}
