//! Retrying dead letters: a few at a time, selected by their error, or with another payload.

use std::time::Duration;

use everbus_core::{
    Appended, Code, Cursor, DeadLetter, DeadLetterFilter, DeadLetterTally, EDIT_OF, Event,
    EventState, Failure, FailureKind, GroupSpec, Position, Replaced, Verdict,
};
use serde_json::json;

use super::needs::{
    DEAD_LETTERS, DEDUPLICATION, DEPTH, LOG, LOG_ORDER, MAINTENANCE, OWN_LOG, REDELIVER, RESTART,
    SENT_BACK, SETTLED,
};
use super::stage::{
    DEADLINE, code, name, nothing, ordering, pattern, positions, spec, take, take_one,
};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

fn all() -> DeadLetterFilter {
    DeadLetterFilter::default()
}

async fn kill_with<H: Harness>(stage: &Stage<H>, group: &str, error: &str, handler: &str) {
    let mut consumer = stage.consumer(group).await;
    let delivery = take_one(&mut consumer).await;
    let failure = Failure::new(1, stage.now(), FailureKind::Error, error);
    let failure = Some(failure.in_handler(handler));
    stage.end(&delivery, Verdict::Dead { failure }).await;
    consumer.close().await.unwrap();
}

/// Dead letters are chosen by tenant, handler, text of the last error and time of death; list, count,
/// tally and retry agree.
pub async fn dead_letters_are_chosen_by_why_they_died<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&DEAD_LETTERS]).await?;
    stage.declare("g", &["*"]).await;
    let cases = [
        (Some("acme"), "charge", "the bank's 100%_sure: \"no\""),
        (Some("acme"), "mail", "connection refused"),
        (Some("umbrella"), "charge", "Connection refused by the bank"),
        (None, "charge", "the bank is closed"),
    ];
    let mut deaths = Vec::new();
    for (tenant, handler, error) in cases {
        let mut event = Event::builder("a.x");
        if let Some(tenant) = tenant {
            event = event.tenant(tenant);
        }
        stage.append(event.build().unwrap()).await;
        stage.advance(SECOND).await;
        kill_with(&stage, "g", error, handler).await;
        deaths.push(stage.now());
    }
    let tenant = |name: &str| DeadLetterFilter {
        tenant: Some(name.into()),
        ..all()
    };
    let handler = |name: &str| DeadLetterFilter {
        handler: Some(name.into()),
        ..all()
    };
    let error = |text: &str| DeadLetterFilter {
        error: Some(text.into()),
        ..all()
    };
    let died = |at| DeadLetterFilter {
        died_until: Some(at),
        ..all()
    };
    let expected = [
        (all(), vec![3, 2, 1, 0]),
        (tenant("acme"), vec![1, 0]),
        (tenant(""), vec![3]),
        (tenant("ACME"), vec![]),
        (tenant("' OR 1=1 --"), vec![]),
        (handler("charge"), vec![3, 2, 0]),
        (handler("char"), vec![]),
        (error("bank"), vec![3, 2, 0]),
        (error("onnection refused"), vec![2, 1]),
        (error("connection refused"), vec![1]),
        (error("100%_"), vec![0]),
        (error("1%s"), vec![]),
        (error("'s 100"), vec![0]),
        (died(deaths[1]), vec![1, 0]),
        (died(deaths[0].minus(SECOND)), vec![]),
        (
            DeadLetterFilter {
                tenant: Some("acme".into()),
                handler: Some("charge".into()),
                ..error("bank")
            },
            vec![0],
        ),
    ];
    let dead = stage.dead_letters();
    for (filter, which) in &expected {
        let page = dead.list(filter.clone(), Default::default()).await.unwrap();
        let errors: Vec<&str> = page.items.iter().map(DeadLetter::last_error).collect();
        let wanted: Vec<&str> = which.iter().map(|n: &usize| cases[*n].2).collect();
        assert_eq!(errors, wanted, "{filter:?}");
        let count = dead.count(filter.clone()).await.unwrap();
        assert_eq!(count, which.len() as u64, "{filter:?}");
        let tally = dead.tally(filter.clone(), 100).await.unwrap();
        let sum: u64 = tally.iter().map(|tally| tally.count).sum();
        assert_eq!(sum, count, "{filter:?}");
    }
    assert_eq!(dead.retry(error("100%_")).await.unwrap(), 1);
    assert_eq!(dead.retry(tenant("umbrella")).await.unwrap(), 1);
    assert_eq!(dead.count(all()).await.unwrap(), 2);
    stage.passed()
}

/// A tally counts dead letters with the same failure, the most frequent first.
pub async fn a_tally_counts_what_fails_alike<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEAD_LETTERS]).await?;
    stage.declare("g", &["*"]).await;
    stage.declare("h", &["b.x"]).await;
    let long = format!("{}{}", "ä".repeat(200), "the rest");
    let also_long = format!("{}{}", "ä".repeat(200), "another end");
    let cases = [
        ("a.x", "down"),
        ("a.x", long.as_str()),
        ("a.x", also_long.as_str()),
        ("a.x", "down"),
        ("a.x", "down"),
        ("b.x", "down"),
    ];
    for (event_type, error) in cases {
        stage.publish(event_type).await;
        kill_with(&stage, "g", error, "handler").await;
    }
    kill_with(&stage, "h", "down", "handler").await;
    let tally = |group: &str, event_type: &str, error: &str, count| DeadLetterTally {
        group: name(group),
        event_type: event_type.into(),
        error: error.into(),
        count,
    };
    let whole = [
        tally("g", "a.x", "down", 3),
        tally("g", "a.x", &"ä".repeat(200), 2),
        tally("g", "b.x", "down", 1),
        tally("h", "b.x", "down", 1),
    ];
    let dead = stage.dead_letters();
    assert_eq!(dead.tally(all(), 100).await.unwrap(), whole);
    assert_eq!(dead.tally(all(), 2).await.unwrap(), whole[..2]);
    assert_eq!(dead.tally(all(), 0).await.unwrap(), []);
    assert_eq!(dead.tally(all(), usize::MAX).await.unwrap(), whole);
    stage.passed()
}

/// A few at a time, oldest first; dead letters that fail again meanwhile are not retried again.
pub async fn a_few_are_retried_oldest_first<H: Harness>(harness: H) -> Outcome {
    let needs = [&DEAD_LETTERS, &SENT_BACK, &LOG_ORDER];
    let stage = Stage::open(harness, Time::Virtual, &needs).await?;
    stage.declare("g", &["*"]).await;
    let published = stage.publish_many("a.x", 250).await;
    let mut consumer = stage.consumer("g").await;
    for _ in 0..5 {
        for delivery in take(&mut consumer, 50).await {
            stage.kill(&delivery).await;
        }
    }
    let dead = stage.dead_letters();
    let until = DeadLetterFilter {
        died_until: Some(stage.now()),
        ..all()
    };
    stage.advance(SECOND).await;
    assert_eq!(dead.retry_some(until.clone(), 0).await.unwrap(), 0);
    let mut next = 0;
    // More than one transaction of any engine, and more than is left.
    for (limit, expected) in [(1, 1), (2, 2), (201, 201), (100, 46), (1, 0)] {
        let retried = dead.retry_some(until.clone(), limit).await.unwrap();
        assert_eq!(retried, expected as u64, "after {next}");
        let end = next + expected;
        while next < end {
            let got = take(&mut consumer, (end - next).min(50)).await;
            let oldest = &published[next..next + got.len()];
            let oldest: Vec<Position> = oldest.iter().map(|a| a.position).collect();
            assert_eq!(positions(&got), oldest, "oldest first");
            for delivery in &got {
                assert_eq!(delivery.attempt, 1, "a fresh set of attempts");
                stage.kill(delivery).await;
            }
            next += got.len();
        }
        nothing(&mut consumer).await;
    }
    assert_eq!(next, 250);
    assert_eq!(dead.count(all()).await.unwrap(), 250, "all failed again");
    assert_eq!(dead.count(until).await.unwrap(), 0, "none is due once more");
    stage.passed()
}

/// In an ordered group the events of a key come back in their order, however few at a time.
pub async fn retried_events_of_a_key_keep_their_order<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEAD_LETTERS, &SENT_BACK]).await?;
    let ordered = GroupSpec {
        ordered: true,
        ..spec("g", &["*"])
    };
    stage.broker().declare(ordered).await.unwrap();
    let mut published = Vec::new();
    for n in 0..6 {
        let event = Event::builder("a.x").key(format!("k{}", n % 2));
        published.push(stage.append(event.build().unwrap()).await);
    }
    let mut consumer = stage.consumer("g").await;
    for _ in 0..6 {
        let delivery = take_one(&mut consumer).await;
        stage.kill(&delivery).await;
    }
    let dead = stage.dead_letters();
    assert_eq!(dead.retry_some(all(), 3).await.unwrap(), 3);
    // The first of each key may go; the third event waits for the first.
    let firsts = [&published[0], &published[1]];
    let got = stage.take_sent_back(&mut consumer, &firsts).await;
    assert_eq!(dead.retry_some(all(), 10).await.unwrap(), 3);
    nothing(&mut consumer).await;
    stage.ack(&got[0]).await;
    let third = stage.take_sent_back(&mut consumer, &[&published[2]]).await;
    stage.ack(&got[1]).await;
    let fourth = stage.take_sent_back(&mut consumer, &[&published[3]]).await;
    nothing(&mut consumer).await;
    stage.ack(&third[0]).await;
    stage.ack(&fourth[0]).await;
    let last = [&published[4], &published[5]];
    stage.take_sent_back(&mut consumer, &last).await;
    stage.passed()
}

/// The open dead letter of an event in a group.
async fn letter<H: Harness>(stage: &Stage<H>, appended: &Appended, group: &str) -> DeadLetter {
    let found = stage.dead_letters().get(appended.id).await.unwrap();
    let mut of_group = found.into_iter().filter(|l| l.group == name(group));
    of_group.next().expect("a dead letter")
}

/// A corrected event goes to the group that failed and to no other, whether that group has caught up, is
/// behind, or comes back after a restart. The original stays, and each names the other.
pub async fn a_corrected_event_replaces_a_dead_letter<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[&DEAD_LETTERS]).await?;
    for group in ["failing", "fine", "away"] {
        stage.declare(group, &["*"]).await;
    }
    stage.declare("elsewhere", &["b.*"]).await;
    let mut fine = stage.consumer("fine").await;
    let event = Event::builder("order.placed")
        .json(&json!({"amount": "ten"}))
        .version(3)
        .tenant("acme")
        .key("order-1")
        .entity("ORDER", "1")
        .meta("k", "v")
        .build()
        .unwrap();
    let original = stage.append(event.clone()).await;
    let mut failing = stage.consumer("failing").await;
    let delivery = take_one(&mut failing).await;
    stage.kill(&delivery).await;
    stage.ack(&take_one(&mut fine).await).await;
    stage.advance(SECOND).await;
    let broken = letter(&stage, &original, "failing").await;
    let corrected = broken.corrected(r#"{"amount":10}"#).unwrap();
    let dead = stage.dead_letters();
    let appended = dead.replace(broken.key(), corrected.clone()).await.unwrap();
    assert_eq!(appended.id, corrected.id());
    assert!(!appended.duplicate && appended.position > original.position);
    // The failing group gets it like any other event.
    let again = take_one(&mut failing).await;
    assert_eq!(again.record.position, appended.position);
    assert_eq!((again.attempt, again.failures.len()), (1, 0));
    let got = &again.record.event;
    assert_eq!(&got.payload()[..], br#"{"amount":10}"#);
    assert_eq!(got.metadata()[EDIT_OF], original.id.to_string());
    assert_eq!(got.metadata()["k"], "v");
    assert_eq!((got.version(), got.tenant()), (3, Some("acme")));
    assert_eq!(got.ordering_key(), event.ordering_key());
    assert_eq!(got.occurred_at(), event.occurred_at());
    assert_eq!(got.correlation_id(), event.correlation_id());
    assert_eq!(
        got.attributes().unwrap().causation_id,
        Some(original.id.to_string())
    );
    nothing(&mut fine).await;
    nothing(&mut failing).await;
    // Both are linked, and the original is as it was.
    let kept = letter(&stage, &original, "failing").await;
    assert_eq!(kept.replaced_by, Some(corrected.id()));
    let replaced = Replaced {
        key: broken.key(),
        by: corrected.id(),
    };
    assert_eq!(dead.replaced().await.unwrap(), [replaced]);
    assert_eq!(kept.retried_at, Some(stage.now()));
    assert_eq!(kept.record.event, event, "unchanged");
    assert_eq!(kept.failures, broken.failures);
    assert!(stage.open_dead_letters().await.is_empty());
    for group in ["fine", "away", "elsewhere"] {
        stage
            .assert_state(appended.position, group, EventState::Done)
            .await;
    }
    stage
        .assert_state(appended.position, "failing", EventState::Processing)
        .await;
    stage
        .assert_state(original.position, "failing", EventState::Done)
        .await;
    stage.ack(&again).await;
    if stage.offers(&RESTART) {
        drop((fine, failing));
        stage.restart().await;
    }
    // A group that was away gets the original and not its correction.
    let mut away = stage.consumer("away").await;
    let old = take_one(&mut away).await;
    assert_eq!(old.record.position, original.position);
    stage.ack(&old).await;
    nothing(&mut away).await;
    for group in ["failing", "fine"] {
        let mut consumer = stage.consumer(group).await;
        nothing(&mut consumer).await;
    }
    for appended in [original, appended] {
        if stage.offers(&SETTLED) {
            let settled = stage.engine().settled().unwrap();
            let outcome = settled.settled(appended.position, DEADLINE).await;
            assert!(outcome.unwrap().dead_lettered.is_empty());
        }
    }
    if stage.offers(&MAINTENANCE) {
        let maintenance = stage.engine().maintenance().unwrap();
        let report = maintenance.check().await.unwrap();
        assert!(report.is_ok(), "{report:?}");
    }
    stage.passed()
}

/// The failing group gets the corrected event once, also if the group has no consumer, is behind, or has
/// changed its patterns so that it would skip the event.
pub async fn a_correction_finds_its_group<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEAD_LETTERS]).await?;
    let subscriptions = stage.declare("g", &["a.*", "b.*"]).await;
    let a = subscriptions.iter().find(|s| s.pattern == pattern("a.*"));
    let original = stage.dead_letter("g", "a.x").await;
    let backlog = stage.publish("b.x").await;
    let broken = letter(&stage, &original, "g").await;
    let first = broken.corrected("1").unwrap();
    let first = stage.dead_letters().replace(broken.key(), first);
    let first = first.await.unwrap();
    let mut g = stage.consumer("g").await;
    let both = [backlog.position, first.position];
    let got = stage.take_these(&mut g, &both).await;
    nothing(&mut g).await;
    // It fails again and becomes its own dead letter; the chain goes on.
    stage.ack(&got[0]).await;
    stage.kill(&got[1]).await;
    let broken = letter(&stage, &first, "g").await;
    stage.assert_same(&broken.record, first.id, first.position);
    assert_eq!(broken.attempts, 1);
    let edited = broken.record.event.metadata()[EDIT_OF].clone();
    assert_eq!(edited, original.id.to_string());
    g.close().await.unwrap();
    stage.broker().retract(a.unwrap().id).await.unwrap();
    if !stage.offers(&REDELIVER) {
        // The group would skip it, so it is refused, and the dead letter stays.
        let second = broken.corrected("2").unwrap();
        let refused = stage.dead_letters().replace(broken.key(), second).await;
        assert_eq!(code(refused), Code::Unsupported);
        assert_eq!(stage.dead_letters().retry(all()).await.unwrap(), 0);
        assert_eq!(stage.open_dead_letters().await.len(), 1);
        return stage.passed();
    }
    let later = stage.publish("b.x").await;
    let second = broken.corrected("2").unwrap();
    let dead = stage.dead_letters();
    let second = dead.replace(broken.key(), second).await.unwrap();
    stage
        .assert_state(second.position, "g", EventState::Pending)
        .await;
    let mut g = stage.consumer("g").await;
    let mut got = positions(&take(&mut g, 2).await);
    got.sort_by_key(|position| ordering(*position));
    let mut both = [later.position, second.position];
    both.sort_by_key(|position| ordering(*position));
    assert_eq!(got, both);
    nothing(&mut g).await;
    stage
        .assert_state(second.position, "g", EventState::Processing)
        .await;
    stage.passed()
}

/// An event that may not replace a dead letter changes nothing.
pub async fn what_cannot_replace_a_dead_letter_is_refused<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEAD_LETTERS, &LOG]).await?;
    stage.declare("g", &["*"]).await;
    stage.declare("other", &["*"]).await;
    let event = Event::builder("a.x").tenant("acme").build().unwrap();
    let original = stage.append(event).await;
    let mut g = stage.consumer("g").await;
    let delivery = take_one(&mut g).await;
    stage.kill(&delivery).await;
    let broken = letter(&stage, &original, "g").await;
    let dead = stage.dead_letters();
    let fine = broken.corrected("{}").unwrap();
    let as_other = |event_type: &str, tenant: &str| {
        let builder = Event::builder(event_type).tenant(tenant);
        builder.build().unwrap()
    };
    let mut elsewhere = broken.key();
    elsewhere.group = name("other");
    let mut nowhere = broken.key();
    nowhere.group = name("nobody");
    let mut beyond = broken.key();
    beyond.position = super::stage::beyond(beyond.position, 1000);
    let reused = Event::builder("a.x").tenant("acme").id(original.id);
    let reused = reused.payload("[1]").build().unwrap();
    let same = broken.record.event.clone();
    let cases = [
        (elsewhere, fine.clone(), Code::NotFound),
        (nowhere, fine.clone(), Code::NotFound),
        (beyond, fine.clone(), Code::NotFound),
        (
            broken.key(),
            as_other("a.y", "acme"),
            Code::InvalidAttribute,
        ),
        (
            broken.key(),
            as_other("a.x", "evil"),
            Code::InvalidAttribute,
        ),
    ];
    let known = [
        (broken.key(), reused, Code::IdReused),
        (broken.key(), same, Code::IdReused),
    ];
    let known = known.into_iter().filter(|_| stage.offers(&DEDUPLICATION));
    let head = || async {
        match stage.offers(&OWN_LOG) {
            true => stage.log().head().await.unwrap(),
            false => Cursor::START,
        }
    };
    let before = head().await;
    for (key, event, expected) in cases.into_iter().chain(known) {
        let what = format!("{key:?} by {event:?}");
        assert_eq!(code(dead.replace(key, event).await), expected, "{what}");
    }
    assert!(broken.corrected("not JSON").is_err());
    assert_eq!(head().await, before, "nothing was appended");
    assert_eq!(stage.open_dead_letters().await.len(), 1);
    dead.replace(broken.key(), fine.clone()).await.unwrap();
    // The second time is refused: the dead letter is no longer open.
    let again = dead.replace(broken.key(), fine).await;
    assert_eq!(code(again), Code::NotFound);
    let another = broken.corrected("{}").unwrap();
    let again = dead.replace(broken.key(), another).await;
    assert_eq!(code(again), Code::NotFound);
    assert_eq!(dead.retry(all()).await.unwrap(), 0);
    assert_eq!(take(&mut g, 1).await.len(), 1);
    nothing(&mut g).await;
    stage.passed()
}

/// In an ordered group a corrected event stands at the end of its key and lets nothing overtake it;
/// a stream counts it once.
pub async fn a_correction_keeps_the_order_of_its_key<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEAD_LETTERS]).await?;
    let ordered = GroupSpec {
        ordered: true,
        ..spec("g", &["*"])
    };
    stage.broker().declare(ordered).await.unwrap();
    stage.declare("other", &["*"]).await;
    let publish = || async {
        let event = Event::builder("a.x").key("k").build().unwrap();
        stage.append(event).await
    };
    let original = publish().await;
    let mut g = stage.consumer("g").await;
    let delivery = take_one(&mut g).await;
    stage.kill(&delivery).await;
    let second = publish().await;
    let running = take_one(&mut g).await;
    assert_eq!(running.record.position, second.position);
    let broken = letter(&stage, &original, "g").await;
    let corrected = broken.corrected("{}").unwrap();
    let dead = stage.dead_letters();
    let corrected = dead.replace(broken.key(), corrected).await.unwrap();
    let last = publish().await;
    nothing(&mut g).await;
    if stage.offers(&DEPTH) {
        let depth = stage.engine().depth().unwrap();
        let depth = depth.depth(pattern("a.x"), 100).await.unwrap();
        assert_eq!(depth, 3, "the most is owed by g; the other skips one");
    }
    stage.ack(&running).await;
    let third = take_one(&mut g).await;
    assert_eq!(third.record.position, corrected.position);
    nothing(&mut g).await;
    stage.ack(&third).await;
    let fourth = take_one(&mut g).await;
    assert_eq!(fourth.record.position, last.position);
    let mut other = stage.consumer("other").await;
    let three = [original.position, second.position, last.position];
    stage.take_these(&mut other, &three).await;
    nothing(&mut other).await;
    stage.passed()
}
