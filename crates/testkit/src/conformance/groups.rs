//! Groups: where they begin, what they want, how that changes, and how they end.

use std::time::Duration;

use everbus_core::{
    Code, Event, EventId, EventState, FailureKind, GroupSpec, Position, StartFrom,
    SubscriptionSpec, Timestamp,
};

use super::needs::{DEAD_LETTERS, FENCING, LOG, LOG_ORDER, NO_HANDLER};
use super::stage::{
    LEASE, code, handling, name, nothing, options, pattern, positions, spec, take, take_one,
};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

async fn start<H: Harness>(stage: &Stage<H>, group: &str, start_from: StartFrom, wants: &str) {
    let group = GroupSpec {
        start_from,
        ..spec(group, &[wants])
    };
    stage.broker().declare(group).await.unwrap();
}

/// A group that starts at `new` gets what is published after it was declared, and all of that.
pub async fn start_from_new<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.publish_many("a.b", 3).await;
    start(&stage, "new", StartFrom::New, "*").await;
    let after = stage.publish("a.b").await;
    let mut consumer = stage.consumer("new").await;
    let got = take_one(&mut consumer).await;
    assert_eq!(got.record.position, after.position);
    nothing(&mut consumer).await;
    stage.passed()
}

/// A group that starts at `first` gets every event in the log.
pub async fn start_from_first<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    let published = stage.publish_many("a.b", 3).await;
    start(&stage, "first", StartFrom::First, "*").await;
    let mut consumer = stage.consumer("first").await;
    let expected: Vec<Position> = published.iter().map(|a| a.position).collect();
    stage.take_these(&mut consumer, &expected).await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// A group that starts at `last` begins with the newest event that matches, or at the end.
pub async fn start_from_last<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&LOG_ORDER]).await?;
    start(&stage, "empty log", StartFrom::Last, "*").await;
    stage.publish("a.x").await;
    let newest = stage.publish("a.x").await;
    stage.publish("b.x").await;
    start(&stage, "last", StartFrom::Last, "a.*").await;
    start(&stage, "no match", StartFrom::Last, "c.*").await;
    let after = stage.publish("a.x").await;
    let c = stage.publish("c.x").await;
    let mut consumer = stage.consumer("last").await;
    let got = take(&mut consumer, 2).await;
    assert_eq!(positions(&got), [newest.position, after.position]);
    nothing(&mut consumer).await;
    let mut consumer = stage.consumer("no match").await;
    assert_eq!(take_one(&mut consumer).await.record.position, c.position);
    nothing(&mut consumer).await;
    let mut consumer = stage.consumer("empty log").await;
    take(&mut consumer, 5).await;
    if stage.offers(&LOG) {
        let log = stage.log();
        let at = log
            .resolve(StartFrom::Last, vec![pattern("b.*")])
            .await
            .unwrap();
        let (found, _) = log.read(at, vec![pattern("b.*")], 10).await.unwrap();
        assert_eq!(found.len(), 1, "the newest that matches is included");
    }
    stage.passed()
}

/// A group that starts at a time begins with the first event received then or later.
pub async fn start_from_a_time<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[]).await?;
    let first = stage.publish("a.b").await;
    stage.advance(10 * SECOND).await;
    let second = stage.publish("a.b").await;
    stage.advance(10 * SECOND).await;
    let third = stage.publish("a.b").await;
    let just_after = Timestamp::from_micros(second.received_at.as_micros() + 1);
    for (group, time, expected) in [
        (
            "at",
            second.received_at,
            vec![second.position, third.position],
        ),
        ("after", just_after, vec![third.position]),
        (
            "before all",
            Timestamp::EPOCH,
            vec![first.position, second.position, third.position],
        ),
    ] {
        start(&stage, group, StartFrom::Time(time), "*").await;
        let mut consumer = stage.consumer(group).await;
        stage.take_these(&mut consumer, &expected).await;
        nothing(&mut consumer).await;
    }
    let future = stage.now().plus(1000 * SECOND);
    start(&stage, "future", StartFrom::Time(future), "*").await;
    let mut consumer = stage.consumer("future").await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// Declaring a group again keeps its position and its subscriptions' ids; another ordering is refused.
pub async fn an_existing_group_keeps_its_position<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[]).await?;
    let first = stage.declare("g", &["a.*", "b.*"]).await;
    assert_eq!(first.len(), 2);
    assert_ne!(first[0].id, first[1].id);
    assert_eq!(
        (first[0].name.as_str(), first[1].pattern.as_str()),
        ("a.*", "b.*")
    );
    stage.publish("a.x").await;
    let mut consumer = stage.consumer("g").await;
    let delivery = take_one(&mut consumer).await;
    stage.ack(&delivery).await;
    stage.advance(SECOND).await;
    for start_from in [StartFrom::First, StartFrom::Last, StartFrom::New] {
        let again = GroupSpec {
            start_from,
            ..spec("g", &["a.*", "b.*"])
        };
        let again = stage.broker().declare(again).await.unwrap();
        assert_eq!(again, first, "declaring again is harmless");
    }
    nothing(&mut consumer).await;
    let other = GroupSpec {
        ordered: true,
        ..spec("g", &["c.*"])
    };
    assert_eq!(
        code(stage.broker().declare(other).await),
        Code::GroupConflict
    );
    assert_eq!(
        stage.group_info("g").await.patterns.len(),
        2,
        "the refused one changed nothing"
    );
    stage.publish("b.x").await;
    take_one(&mut consumer).await;
    stage.passed()
}

/// An event that no subscription matches is skipped by the group: done, and holding nothing back.
pub async fn unmatched_events_are_skipped<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("orders", &["order.*", "*.shipped"]).await;
    let mut wanted = Vec::new();
    let mut skipped = Vec::new();
    for event_type in [
        "user.created",
        "order.placed",
        "order.a.b",
        "box.shipped",
        "order",
        "order.paid",
    ] {
        let appended = stage.publish(event_type).await;
        if matches!(event_type, "order.placed" | "box.shipped" | "order.paid") {
            wanted.push(appended.position);
        } else {
            skipped.push(appended.position);
        }
    }
    let mut consumer = stage.consumer("orders").await;
    let got = stage.take_these(&mut consumer, &wanted).await;
    nothing(&mut consumer).await;
    for delivery in &got {
        stage.ack(delivery).await;
    }
    for position in skipped {
        stage
            .assert_state(position, "orders", EventState::Done)
            .await;
    }
    // Beyond the position there are at most events that no group wants.
    stage.publish("order.last").await;
    let last = take_one(&mut consumer).await;
    stage.ack(&last).await;
    let info = stage.group_info("orders").await;
    assert_eq!((info.in_flight, info.waiting), (0, 0));
    stage.passed()
}

/// Events of one key: they are in one shard, and so the group passes them in this order.
fn of_key(event_type: &str) -> Event {
    Event::builder(event_type).key("k").build().unwrap()
}

/// A new pattern applies from the group's position on, not to what it has passed.
pub async fn widening_is_not_retroactive<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("g", &["a.*"]).await;
    let passed = stage.append(of_key("b.x")).await;
    stage.append(of_key("a.x")).await;
    let mut consumer = stage.consumer("g").await;
    let got = take_one(&mut consumer).await;
    stage.ack(&got).await;
    stage.declare("g", &["b.*"]).await;
    nothing(&mut consumer).await;
    stage
        .assert_state(passed.position, "g", EventState::Done)
        .await;
    let later = stage.append(of_key("b.x")).await;
    let got = take_one(&mut consumer).await;
    assert_eq!(got.record.position, later.position);
    stage.ack(&got).await;
    // The same name with another pattern replaces it, from here on.
    let replaced = GroupSpec {
        subscriptions: vec![SubscriptionSpec {
            name: "b.*".into(),
            pattern: pattern("c.*"),
        }],
        ..spec("g", &[])
    };
    stage.broker().declare(replaced).await.unwrap();
    stage.append(of_key("b.x")).await;
    let c = stage.append(of_key("c.x")).await;
    let got = take_one(&mut consumer).await;
    assert_eq!(got.record.position, c.position);
    nothing(&mut consumer).await;
    stage.passed()
}

/// System events are left out of `*` and go to groups that name them.
pub async fn system_events_are_left_out_of_the_star<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("all", &["*"]).await;
    stage.declare("system", &["system.>"]).await;
    let system = stage.publish("system.dead_letter").await;
    let plain = stage.publish("systematic").await;
    let mut all = stage.consumer("all").await;
    assert_eq!(take_one(&mut all).await.record.position, plain.position);
    nothing(&mut all).await;
    let mut own = stage.consumer("system").await;
    assert_eq!(take_one(&mut own).await.record.position, system.position);
    nothing(&mut own).await;
    stage
        .assert_state(system.position, "all", EventState::Done)
        .await;
    stage.passed()
}

/// A retracted subscription gets nothing new; events handed out before must still be settled.
pub async fn retracting_mid_flight_keeps_what_is_owed<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    let ids = stage.declare("g", &["a.*", "b.*"]).await;
    let in_flight = stage.publish("a.x").await;
    stage.publish("a.x").await;
    let mut consumer = stage.consumer("g").await;
    let got = take(&mut consumer, 2).await;
    stage.broker().retract(ids[0].id).await.unwrap();
    assert_eq!(stage.group_info("g").await.patterns, ["b.*"]);
    let unwanted = stage.publish("a.x").await;
    let wanted = stage.publish("b.x").await;
    let next = take_one(&mut consumer).await;
    assert_eq!(next.record.position, wanted.position);
    stage.ack(&next).await;
    stage
        .assert_state(unwanted.position, "g", EventState::Done)
        .await;
    stage
        .assert_state(in_flight.position, "g", EventState::Processing)
        .await;
    stage.ack(&got[0]).await;
    stage.fail(&got[1], Duration::ZERO).await;
    let again = take_one(&mut consumer).await;
    assert_eq!(
        (again.record.position, again.attempt),
        (got[1].record.position, 2)
    );
    stage.ack(&again).await;
    nothing(&mut consumer).await;
    let twice = stage.broker().retract(ids[0].id).await;
    assert_eq!(code(twice), Code::SubscriptionNotFound);
    let unknown = stage.broker().retract(EventId::new()).await;
    assert_eq!(code(unknown), Code::SubscriptionNotFound);
    stage.passed()
}

/// A removed group takes its position, its deliveries and its dead letters with it.
pub async fn a_removed_group_leaves_nothing_behind<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("g", &["*"]).await;
    stage.declare("other", &["*"]).await;
    stage.dead_letter("g", "a.x").await;
    stage.publish("a.x").await;
    let mut consumer = stage.consumer("g").await;
    let held = take_one(&mut consumer).await;
    drop(consumer);
    stage.broker().remove_group(name("g")).await.unwrap();
    let names = stage.groups().await;
    let names: Vec<&str> = names.iter().map(|g| g.name.as_str()).collect();
    assert_eq!(names, ["other"]);
    if stage.offers(&FENCING) {
        let late = stage.settle(&held, everbus_core::Verdict::Ack).await;
        assert_eq!(code(late), Code::LeaseLost);
    }
    if stage.offers(&DEAD_LETTERS) {
        assert!(stage.open_dead_letters().await.is_empty());
    }
    let gone = stage.broker().remove_group(name("g")).await;
    assert_eq!(code(gone), Code::GroupNotFound);
    let gone = stage.broker().consume(name("g"), options()).await.map(drop);
    assert_eq!(code(gone), Code::GroupNotFound);
    let mut other = stage.consumer("other").await;
    take(&mut other, 2).await;
    // The name is free again, for a group that starts from the beginning.
    stage.declare("g", &["*"]).await;
    let mut anew = stage.consumer("g").await;
    let got = take(&mut anew, 2).await;
    assert!(got.iter().all(|d| d.attempt == 1 && d.failures.is_empty()));
    stage.passed()
}

/// An event without a handler in this process is left to processes that have one.
pub async fn an_event_without_a_handler_is_left_to_others<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("g", &["a.*", "b.*"]).await;
    let b = stage.publish("b.x").await;
    let a = stage.publish("a.x").await;
    let only_a = handling(vec![pattern("a.*")]);
    let mut first = stage.consumer_with("g", only_a).await;
    let got = take_one(&mut first).await;
    assert_eq!(
        got.record.position, a.position,
        "it does not hold others back"
    );
    stage.ack(&got).await;
    nothing(&mut first).await;
    stage
        .assert_state(b.position, "g", EventState::Pending)
        .await;
    let only_b = handling(vec![pattern("b.*")]);
    let mut second = stage.consumer_with("g", only_b).await;
    let got = take_one(&mut second).await;
    assert_eq!((got.record.position, got.attempt), (b.position, 1));
    stage.ack(&got).await;
    second.close().await.unwrap();
    // A handler that is registered later gets what was left.
    let later = stage.publish("b.x").await;
    nothing(&mut first).await;
    first.set_handled(vec![pattern("a.*"), pattern("b.*")]);
    let got = take_one(&mut first).await;
    assert_eq!((got.record.position, got.attempt), (later.position, 1));
    stage.ack(&got).await;
    stage.passed()
}

/// An event that no process has a handler for becomes a dead letter after the configured time.
pub async fn an_event_without_a_handler_is_dead_lettered_in_the_end<H: Harness>(
    harness: H,
) -> Outcome {
    let needs = [&DEAD_LETTERS, &NO_HANDLER];
    let stage = Stage::open(harness, Time::Virtual, &needs).await?;
    stage.declare("g", &["a.*", "b.*"]).await;
    let orphan = stage.publish("b.x").await;
    let only_a = handling(vec![pattern("a.*")]).no_handler_after(LEASE * 2);
    // The time counts from the moment when a consumer without a handler reached it, so that an old event
    // survives the start of a process.
    stage.advance(LEASE * 4).await;
    let mut consumer = stage.consumer_with("g", only_a).await;
    nothing(&mut consumer).await;
    stage.advance(LEASE).await;
    nothing(&mut consumer).await;
    stage
        .assert_state(orphan.position, "g", EventState::Pending)
        .await;
    stage.advance(LEASE + SECOND).await;
    let mut rounds = 0;
    while stage.open_dead_letters().await.is_empty() {
        nothing(&mut consumer).await;
        rounds += 1;
        assert!(rounds < 100, "waited in vain for the dead letter");
    }
    let dead = stage.open_dead_letters().await.remove(0);
    assert_eq!(dead.record.position, orphan.position);
    let last = dead.failures.last().unwrap();
    assert_eq!(last.kind, FailureKind::NoHandler);
    stage
        .assert_state(orphan.position, "g", EventState::Dlq)
        .await;
    let a = stage.publish("a.x").await;
    assert_eq!(take_one(&mut consumer).await.record.position, a.position);
    stage.passed()
}
