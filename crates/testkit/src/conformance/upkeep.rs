//! Operations: the state of groups, and retention that removes nothing that is needed.

use std::time::Duration;

use everbus_core::{Clock as _, Cursor, Event, EventId, EventState, Retention, Stream, Streams};

use super::needs::{
    DEAD_LETTERS, LOG, LOG_ORDER, LOOKUP, MAINTENANCE, NATIVE_DELAY, OWED_IS_KEPT, STATES,
};
use super::stage::{nothing, options, take, take_one};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

/// The figures of a group are right.
pub async fn the_numbers_of_a_group_are_right<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[]).await?;
    assert!(stage.groups().await.is_empty());
    stage.declare("g", &["a.*", "b.*"]).await;
    let empty = stage.group_info("g").await;
    assert!(empty.position.is_start());
    assert_eq!((empty.behind, empty.in_flight), (0, 0));
    assert_eq!(
        (empty.waiting, empty.dead_letters, empty.oldest),
        (0, 0, None)
    );
    assert_eq!(empty.behind_for, Duration::ZERO);
    assert_eq!(empty.patterns, ["a.*", "b.*"]);
    assert!(!empty.ordered);

    let mut published = Vec::new();
    for _ in 0..6 {
        published.push(stage.publish("a.x").await);
        stage.advance(SECOND).await;
    }
    let behind = stage.group_info("g").await;
    assert!(behind.position.is_start());
    assert_eq!(behind.behind, 6);
    assert_eq!(behind.oldest, Some(published[0].received_at));
    assert_eq!(behind.behind_for, 6 * SECOND);

    let exactly_three = options().prefetch(3);
    let mut consumer = stage.consumer_with("g", exactly_three).await;
    let got = take(&mut consumer, 3).await;
    consumer.close().await.unwrap();
    let info = stage.group_info("g").await;
    assert_eq!((info.in_flight, info.waiting, info.dead_letters), (3, 0, 0));
    assert_eq!(info.active_at, stage.now());
    stage.ack(&got[0]).await;
    stage.fail(&got[1], 100 * SECOND).await;
    stage.kill(&got[2]).await;
    let info = stage.group_info("g").await;
    assert_eq!((info.in_flight + info.waiting, info.dead_letters), (1, 1));
    if stage.offers(&NATIVE_DELAY) {
        assert_eq!(info.waiting, 1);
    }
    assert_eq!(info.behind, 3);
    if !stage.offers(&LOG_ORDER) {
        return stage.passed();
    }
    // Three events; the notice of the dead letter is not for this group.
    assert_eq!(info.position, Cursor::from(published[2].position));
    assert_eq!(info.oldest, Some(published[1].received_at));
    assert_eq!(info.behind_for, 5 * SECOND);
    stage.passed()
}

/// A group that wants one type among many is behind only by events of that type, and its oldest is one of
/// them. Events in flight, waiting and dead are counted by type and by stream.
pub async fn a_group_is_not_behind_by_what_it_does_not_want<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[]).await?;
    stage.declare("g", &["wanted.*"]).await;
    stage.declare("other", &["noise.*", "wanted.b"]).await;
    for n in 0..20 {
        stage.publish(["noise.x", "noise.y"][n % 2]).await;
    }
    let info = stage.group_info("g").await;
    assert_eq!((info.behind, info.oldest), (0, None));
    assert_eq!(info.behind_for, Duration::ZERO);
    assert_eq!(stage.group_info("other").await.behind, 20);

    stage.advance(SECOND).await;
    let mut wanted = Vec::new();
    for event_type in ["wanted.a", "wanted.b", "wanted.a", "wanted.b"] {
        wanted.push(stage.publish(event_type).await);
        stage.publish("noise.x").await;
    }
    stage.advance(2 * SECOND).await;
    let info = stage.group_info("g").await;
    assert_eq!(info.behind, 4);
    assert_eq!(info.oldest, Some(wanted[0].received_at));
    assert_eq!(info.behind_for, 2 * SECOND);
    assert_eq!(stage.group_info("other").await.behind, 26);
    if !stage.offers(&LOG_ORDER) {
        return stage.passed();
    }

    let three = options().prefetch(3);
    let mut consumer = stage.consumer_with("g", three).await;
    let got = take(&mut consumer, 3).await;
    stage.ack(&got[0]).await;
    stage.kill(&got[1]).await;
    let info = stage.group_info("g").await;
    let all = info.behind + info.in_flight + info.waiting;
    assert_eq!((all, info.dead_letters), (2, 1));
    let lag = |event_type: &str| info.types.get(event_type).cloned().unwrap_or_default();
    assert_eq!(
        (lag("wanted.a").unsettled(), lag("wanted.b").unsettled()),
        (1, 1)
    );
    assert_eq!(
        (lag("wanted.a").dead_letters, lag("wanted.b").dead_letters),
        (0, 1)
    );
    assert_eq!(info.oldest, Some(wanted[2].received_at));
    let stream = |name, pattern: &str| Stream::new(name, [pattern]).unwrap();
    let table = [
        stream("A", "wanted.a"),
        stream("B", "wanted.b"),
        stream("N", "noise.>"),
    ];
    let now = stage.clock.now();
    let info = info.with_streams(&Streams::new(table).unwrap(), now);
    let by_stream: Vec<_> = info
        .streams
        .iter()
        .map(|of| (&*of.stream, of.lag.unsettled(), of.lag.dead_letters))
        .collect();
    assert_eq!(by_stream, [("A", 1, 0), ("B", 1, 1)]);
    consumer.close().await.unwrap();
    stage.passed()
}

/// Every event has exactly one state in every group.
pub async fn every_event_has_one_state_per_group<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&LOG, &LOOKUP, &STATES]).await?;
    stage.declare("g", &["a.*"]).await;
    stage.declare("h", &["*"]).await;
    for event_type in ["a.1", "a.2", "a.3", "a.4", "a.5", "b.1"] {
        stage.publish(event_type).await;
    }
    let mut consumer = stage.consumer_with("g", options().prefetch(4)).await;
    let got = take(&mut consumer, 4).await;
    consumer.close().await.unwrap();
    stage.ack(&got[0]).await;
    stage.kill(&got[1]).await;
    stage.fail(&got[2], SECOND).await;
    let expected = [
        EventState::Done,
        EventState::Dlq,
        EventState::Processing,
        EventState::Processing,
        EventState::Pending,
        EventState::Done,
    ];
    let (records, _) = stage
        .log()
        .read(Cursor::START, vec![super::stage::pattern("*")], 10)
        .await
        .unwrap();
    for (record, expected) in records.iter().zip(expected) {
        let states = stage.lookup().states(record.position).await.unwrap();
        assert_eq!(states.len(), 2);
        stage.assert_state(record.position, "g", expected).await;
        stage
            .assert_state(record.position, "h", EventState::Pending)
            .await;
    }
    stage.passed()
}

/// Retention removes events that every group is done with, and none that a group has yet to handle or has as
/// a dead letter.
pub async fn retention_removes_nothing_that_a_group_needs<H: Harness>(harness: H) -> Outcome {
    let needs = [&MAINTENANCE, &LOOKUP, &OWED_IS_KEPT];
    let stage = Stage::open(harness, Time::Virtual, &needs).await?;
    let maintenance = stage.engine().maintenance().unwrap();
    stage.declare("g", &["*"]).await;
    let published = stage.publish_many("a.x", 6).await;
    let mut consumer = stage.consumer_with("g", options().prefetch(5)).await;
    let got = take(&mut consumer, 5).await;
    stage.ack(&got[0]).await;
    stage.kill(&got[1]).await;
    stage.fail(&got[2], SECOND).await;
    stage.ack(&got[3]).await;
    // 4 is in flight, 5 was not handed out or only just claimed.
    stage.advance(2 * SECOND).await;
    let nothing_left = Retention {
        max_age: Some(SECOND),
        max_len: Some(0),
        ..Retention::default()
    };
    let pruned = maintenance.prune(nothing_left.clone()).await.unwrap();
    // No group needs the notice of the dead letter; an engine may keep it until every group has passed it.
    let told = stage
        .log()
        .read(Cursor::START, vec![super::stage::pattern("system.>")], 10);
    let told = told.await.unwrap().0.len() as u64;
    assert_eq!((pruned.removed, pruned.kept), (3 - told, 4 + told));
    for (n, appended) in published.iter().enumerate() {
        let found = stage.lookup().find(appended.id).await.unwrap().len();
        assert_eq!(found, usize::from(n != 0 && n != 3), "event {n}");
    }
    // Events that were kept are still delivered.
    stage.ack(&got[4]).await;
    for _ in 0..2 {
        let delivery = take_one(&mut consumer).await;
        stage.ack(&delivery).await;
    }
    nothing(&mut consumer).await;
    let pruned = maintenance.prune(nothing_left).await.unwrap();
    assert_eq!(
        (pruned.removed, pruned.kept),
        (3, 1),
        "only the dead letter stays"
    );
    if stage.offers(&DEAD_LETTERS) {
        let now = stage.now();
        let purged = stage
            .dead_letters()
            .purge(now, Default::default(), Default::default());
        assert_eq!(purged.await.unwrap().dead_letters, 1);
        assert!(
            stage
                .lookup()
                .find(published[1].id)
                .await
                .unwrap()
                .is_empty()
        );
    }
    // The log is empty; positions are not used again.
    let next = stage.publish("a.x").await;
    assert!(next.position > published[5].position);
    assert_eq!(take_one(&mut consumer).await.record.position, next.position);
    assert!(maintenance.check().await.unwrap().is_ok());
    stage.passed()
}

/// Retention by age and by length removes the oldest, and the id of a removed event may be used again.
pub async fn retention_by_age_and_by_length<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&MAINTENANCE]).await?;
    let maintenance = stage.engine().maintenance().unwrap();
    let id = EventId::new();
    let body = |payload: &'static str| {
        Event::builder("a.x")
            .id(id)
            .payload(payload)
            .build()
            .unwrap()
    };
    stage.append(body("1")).await;
    for _ in 0..4 {
        stage.advance(10 * SECOND).await;
        stage.publish("a.x").await;
    }
    let keep = |max_age: Option<u64>, max_len: Option<u64>| Retention {
        max_age: max_age.map(Duration::from_secs),
        max_len,
        ..Retention::default()
    };
    assert_eq!(
        maintenance.prune(keep(None, None)).await.unwrap().removed,
        0
    );
    assert_eq!(
        maintenance
            .prune(keep(Some(1000), Some(5)))
            .await
            .unwrap()
            .removed,
        0
    );
    assert_eq!(
        maintenance
            .prune(keep(Some(35), None))
            .await
            .unwrap()
            .removed,
        1
    );
    assert_eq!(
        maintenance
            .prune(keep(None, Some(2)))
            .await
            .unwrap()
            .removed,
        2
    );
    assert!(!stage.append(body("2")).await.duplicate);
    let (left, _) = stage
        .log()
        .read(Cursor::START, vec![super::stage::pattern("*")], 100)
        .await
        .unwrap();
    assert_eq!(left.len(), 3);
    stage.passed()
}
