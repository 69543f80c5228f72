//! Full streams: counting the backlog, and dropping the oldest waiting events for the newest.

use std::time::Duration;

use everbus_core::{Consumer, EventState, GroupSpec, Position, Retention, SettledOutcome, Verdict};

use super::needs::{DEPTH, MAINTENANCE, OWED_IS_KEPT, RESTART};
use super::stage::{
    DEADLINE, event, name, nothing, options, pattern, positions, spec, take, take_one,
};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

async fn depth<H: Harness>(stage: &Stage<H>, stream: &str) -> u64 {
    let counted = stage.engine().depth().unwrap();
    counted.depth(pattern(stream), 1_000_000).await.unwrap()
}

async fn drop_oldest<H: Harness>(stage: &Stage<H>, stream: &str, keep: u64) -> u64 {
    let counted = stage.engine().depth().unwrap();
    counted.drop_oldest(pattern(stream), keep).await.unwrap()
}

/// A consumer with at most `prefetch` events in flight.
async fn narrow<H: Harness>(stage: &Stage<H>, group: &str, prefetch: usize) -> Box<dyn Consumer> {
    let options = options().prefetch(prefetch);
    stage.consumer_with(group, options).await
}

/// The depth is the backlog of the group that is furthest behind: events not yet handed out, waiting for a
/// retry, or in flight; not those handled, skipped or dead.
pub async fn the_depth_is_what_the_slowest_group_owes<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEPTH]).await?;
    stage.publish_many("order.placed", 3).await;
    assert_eq!(depth(&stage, "order.placed").await, 0, "no group wants any");
    stage.declare("users", &["user.*"]).await;
    assert_eq!(depth(&stage, "order.placed").await, 0);
    stage.declare("orders", &["order.*"]).await;
    stage.declare("placed", &["order.placed"]).await;
    stage.publish_many("order.placed", 4).await;
    stage.publish_many("order.paid", 5).await;
    stage.publish_many("user.created", 2).await;
    assert_eq!(depth(&stage, "order.placed").await, 7);
    assert_eq!(depth(&stage, "order.*").await, 12);
    assert_eq!(depth(&stage, "user.created").await, 2);
    assert_eq!(depth(&stage, "*").await, 12, "of one group, not of all");
    assert_eq!(depth(&stage, "mail.sent").await, 0, "there are none");
    for (limit, expected) in [(0, 0), (1, 1), (6, 6), (7, 7), (8, 7)] {
        let counted = stage.engine().depth().unwrap();
        let limited = counted.depth(pattern("order.placed"), limit).await;
        assert_eq!(limited.unwrap(), expected, "up to {limit}");
    }

    let mut orders = narrow(&stage, "orders", 6).await;
    let got = take(&mut orders, 6).await;
    assert_eq!(depth(&stage, "order.*").await, 12, "in flight is owed");
    stage.fail(&got[0], 100 * SECOND).await;
    let released = Verdict::Release {
        after: 100 * SECOND,
    };
    stage.settle(&got[1], released).await.unwrap();
    assert_eq!(depth(&stage, "order.*").await, 12, "what waits is owed");
    stage.ack(&got[2]).await;
    stage.kill(&got[3]).await;
    let reason = "stale".to_string();
    stage.end(&got[4], Verdict::Skip { reason }).await;
    assert_eq!(depth(&stage, "order.*").await, 9);
    assert_eq!(depth(&stage, "order.placed").await, 7, "the other group");
    stage.broker().remove_group(name("placed")).await.unwrap();
    assert_eq!(depth(&stage, "order.placed").await, 4);
    stage.passed()
}

/// The oldest waiting events are skipped, and so settled; the newest stay, in order.
pub async fn the_oldest_make_room_for_the_newest<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&DEPTH]).await?;
    stage.declare("", &["order.*"]).await;
    let published = stage.publish_many("order.placed", 10).await;
    assert_eq!(drop_oldest(&stage, "order.placed", 10).await, 0);
    let oldest = published[0].position;
    let waiting = stage
        .engine()
        .settled
        .clone()
        .map(|settled| tokio::spawn(async move { settled.settled(oldest, DEADLINE).await }));
    assert_eq!(drop_oldest(&stage, "order.placed", 4).await, 6);
    assert_eq!(drop_oldest(&stage, "order.placed", 4).await, 0);
    assert_eq!(depth(&stage, "order.placed").await, 4);
    if let Some(waiting) = waiting {
        let outcome = waiting.await.unwrap().unwrap();
        assert_eq!(outcome, SettledOutcome::default());
    }
    if stage.offers(&RESTART) {
        stage.crash().await;
        assert_eq!(depth(&stage, "order.placed").await, 4);
    }
    let info = stage.group_info("").await;
    assert_eq!(
        (info.behind, info.waiting, info.in_flight, info.dead_letters),
        (4, 0, 0, 0)
    );
    assert_eq!(info.oldest, Some(published[6].received_at));
    for (n, appended) in published.iter().enumerate() {
        let expected = if n < 6 {
            EventState::Done
        } else {
            EventState::Pending
        };
        stage.assert_state(appended.position, "", expected).await;
    }
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 4).await;
    let kept: Vec<Position> = published[6..].iter().map(|a| a.position).collect();
    assert_eq!(positions(&got), kept);
    for delivery in &got {
        assert_eq!(delivery.attempt, 1);
        stage.ack(delivery).await;
    }
    let next = stage.publish("order.placed").await;
    assert_eq!(take_one(&mut consumer).await.record.position, next.position);
    nothing(&mut consumer).await;
    stage.passed()
}

/// Events in flight are not dropped, and count among those that are kept.
pub async fn what_is_in_flight_is_not_dropped<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEPTH]).await?;
    stage.declare("", &["*"]).await;
    let published = stage.publish_many("order.placed", 8).await;
    let mut consumer = narrow(&stage, "", 3).await;
    let got = take(&mut consumer, 3).await;
    assert_eq!(drop_oldest(&stage, "order.placed", 5).await, 3);
    for appended in &published[3..6] {
        stage
            .assert_state(appended.position, "", EventState::Done)
            .await;
    }
    assert_eq!(
        drop_oldest(&stage, "order.placed", 1).await,
        2,
        "all that wait"
    );
    assert_eq!(depth(&stage, "order.placed").await, 3);
    for delivery in &got {
        stage
            .assert_state(delivery.record.position, "", EventState::Processing)
            .await;
        stage.ack(delivery).await;
    }
    assert_eq!(depth(&stage, "order.placed").await, 0);
    nothing(&mut consumer).await;
    let next = stage.publish("order.placed").await;
    assert_eq!(take_one(&mut consumer).await.record.position, next.position);
    stage.passed()
}

/// Other streams are not touched, although their events lie between the dropped ones.
pub async fn other_streams_are_not_touched<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEPTH]).await?;
    stage.declare("", &["*"]).await;
    let mut kept = Vec::new();
    for _ in 0..5 {
        stage.publish("order.placed").await;
        kept.push(stage.publish("order.paid").await.position);
    }
    assert_eq!(drop_oldest(&stage, "order.placed", 0).await, 5);
    assert_eq!(depth(&stage, "order.placed").await, 0);
    assert_eq!(depth(&stage, "*").await, 5);
    assert_eq!(stage.group_info("").await.behind, 5);
    let last = stage.publish("order.placed").await;
    kept.push(last.position);
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 6).await;
    assert_eq!(positions(&got), kept);
    for delivery in &got {
        stage.ack(delivery).await;
    }
    nothing(&mut consumer).await;
    stage.passed()
}

/// Waiting retries are older than events that were never begun, and are dropped first; each group is counted
/// separately.
pub async fn waiting_retries_go_in_every_group<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&DEPTH]).await?;
    stage.declare("a", &["*"]).await;
    stage.declare("b", &["*"]).await;
    let published = stage.publish_many("order.placed", 6).await;
    let mut a = narrow(&stage, "a", 3).await;
    let got = take(&mut a, 3).await;
    a.close().await.unwrap();
    stage.fail(&got[0], 50 * SECOND).await;
    stage.ack(&got[1]).await;
    stage.fail(&got[2], 10 * SECOND).await;
    // Group a has 0, 2, 3, 4, 5 to handle; group b all six.
    let mut b = narrow(&stage, "b", 1).await;
    let of_b = take_one(&mut b).await;
    assert_eq!(
        drop_oldest(&stage, "order.*", 4).await,
        3,
        "0 in a, 1 and 2 in b"
    );
    let expected = [
        [EventState::Done, EventState::Processing],
        [EventState::Done, EventState::Done],
        [EventState::Processing, EventState::Done],
        [EventState::Pending, EventState::Pending],
    ];
    for (appended, [in_a, in_b]) in published.iter().zip(expected) {
        stage.assert_state(appended.position, "a", in_a).await;
        stage.assert_state(appended.position, "b", in_b).await;
    }
    stage.ack(&of_b).await;
    let mut a = stage.consumer("a").await;
    let fresh = take(&mut a, 3).await;
    let rest: Vec<Position> = published[3..].iter().map(|a| a.position).collect();
    assert_eq!(positions(&fresh), rest);
    for delivery in &fresh {
        stage.ack(delivery).await;
    }
    stage.advance(11 * SECOND).await;
    let retried = take_one(&mut a).await;
    assert_eq!(retried.record.position, published[2].position);
    stage.ack(&retried).await;
    stage.advance(60 * SECOND).await;
    nothing(&mut a).await;
    stage.passed()
}

/// In an ordered group the next event of a key may go when the one before it is dropped.
pub async fn dropping_frees_the_key<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEPTH]).await?;
    let ordered = GroupSpec {
        ordered: true,
        ..spec("", &["*"])
    };
    stage.broker().declare(ordered).await.unwrap();
    let mut published = Vec::new();
    for _ in 0..4 {
        let keyed = everbus_core::Event::builder("order.placed")
            .key("k")
            .payload("{}");
        published.push(stage.append(keyed.build().unwrap()).await.position);
    }
    let mut consumer = stage.consumer("").await;
    let first = take_one(&mut consumer).await;
    nothing(&mut consumer).await;
    stage.fail(&first, 1000 * SECOND).await;
    nothing(&mut consumer).await;
    assert_eq!(drop_oldest(&stage, "order.placed", 2).await, 2);
    for &position in &published[2..] {
        let next = take_one(&mut consumer).await;
        assert_eq!(next.record.position, position);
        nothing(&mut consumer).await;
        stage.ack(&next).await;
    }
    nothing(&mut consumer).await;
    stage.passed()
}

/// No group needs a dropped event: retention may remove it, and the group goes on.
pub async fn retention_takes_what_was_dropped<H: Harness>(harness: H) -> Outcome {
    let needs = [&DEPTH, &MAINTENANCE, &OWED_IS_KEPT];
    let stage = Stage::open(harness, Time::Still, &needs).await?;
    stage.declare("", &["*"]).await;
    let keep = stage.publish("order.paid").await;
    let published = stage.publish_many("order.placed", 5).await;
    assert_eq!(drop_oldest(&stage, "order.placed", 2).await, 3);
    let everything = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    let maintenance = stage.engine().maintenance().unwrap();
    let pruned = maintenance.prune(everything).await.unwrap();
    assert_eq!((pruned.removed, pruned.kept), (3, 3));
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 3).await;
    let kept = [keep.position, published[3].position, published[4].position];
    assert_eq!(positions(&got), kept);
    for delivery in &got {
        stage.ack(delivery).await;
    }
    let next = stage.append(event("order.placed")).await;
    assert_eq!(take_one(&mut consumer).await.record.position, next.position);
    nothing(&mut consumer).await;
    let report = maintenance.check().await.unwrap();
    assert!(report.is_ok(), "{report:?}");
    stage.passed()
}

/// Events in flight at a crash wait again, and may be dropped.
pub async fn what_a_crash_left_may_be_dropped<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&DEPTH, &RESTART]).await?;
    stage.declare("", &["*"]).await;
    stage.declare("else", &["mail.*"]).await;
    stage.publish_many("order.placed", 5).await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 5).await;
    stage.ack(&got[1]).await;
    drop(consumer);
    stage.crash().await;
    // A consumer must run to find the work of the dead process. This one handles none of these events.
    let mut finder = stage.consumer("else").await;
    let waits = async || {
        let info = stage.group_info("").await;
        (info.waiting, info.in_flight) == (4, 0)
    };
    stage
        .eventually("the work of the dead is found", waits)
        .await;
    assert_eq!(depth(&stage, "order.placed").await, 4);
    assert_eq!(drop_oldest(&stage, "order.placed", 1).await, 3);
    assert_eq!(depth(&stage, "order.placed").await, 1);
    nothing(&mut finder).await;
    let mut consumer = stage.consumer("").await;
    let last = take_one(&mut consumer).await;
    assert_eq!(last.record.position, got[4].record.position);
    stage.ack(&last).await;
    nothing(&mut consumer).await;
    assert_eq!(depth(&stage, "order.placed").await, 0);
    stage.passed()
}
