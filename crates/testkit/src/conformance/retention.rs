//! Retention: by stream, by the event's expiry time, dead letters by the time of death. No event that a group
//! needs is removed.

use std::collections::HashSet;
use std::time::Duration;

use everbus_core::{
    AuditEntry, Cursor, Event, EventState, GroupName, Maintenance, Position, Pruned, Retention,
    Settlement, StreamAge, Verdict, letter_kept_for,
};

use super::lapsing::skipped;
use super::needs::{AUDIT, DEAD_LETTERS, LOG, LOOKUP, MAINTENANCE, OWED_IS_KEPT, RESTART};
use super::stage::{name, nothing, options, pattern, take, take_one};
use super::{Harness, Outcome, Stage, Time};
use crate::model::Random;

const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

async fn left<H: Harness>(stage: &Stage<H>) -> Vec<String> {
    let everything = vec![pattern(">"), pattern("system.>")];
    let (records, _) = stage
        .log()
        .read(Cursor::START, everything, 10_000)
        .await
        .unwrap();
    let types = records.iter().map(|r| r.event.event_type().to_owned());
    types.collect()
}

/// Runs the preview, then retention, and compares the two.
pub(super) async fn foretold(maintenance: &dyn Maintenance, retention: &Retention) -> Pruned {
    let foretold = maintenance.preview(retention.clone()).await.unwrap();
    let again = maintenance.preview(retention.clone()).await.unwrap();
    assert_eq!(foretold, again, "a preview changes nothing");
    let done = maintenance.prune(retention.clone()).await.unwrap();
    assert_eq!(foretold, done.outcome());
    foretold
}

/// Each stream has its own age; the first match counts.
pub async fn streams_have_ages_of_their_own<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&MAINTENANCE, &LOG]).await?;
    let maintenance = stage.engine().maintenance().unwrap();
    let types = [
        "message.sent",
        "identity.made",
        "media.seen",
        "agent.ran",
        "access.given",
        "channel.up",
        "system.note",
        "other",
    ];
    for event_type in types {
        stage.publish(event_type).await;
    }
    let omni = Retention::omni();
    let mut expected: Vec<&str> = types.to_vec();
    for (days, gone) in [
        (6, &[][..]),
        (2, &["media.seen", "agent.ran", "channel.up"][..]),
        (21, &[]),
        (2, &["message.sent", "access.given", "system.note", "other"]),
        (58, &[]),
        (2, &["identity.made"]),
    ] {
        stage.advance(days * DAY).await;
        let pruned = foretold(maintenance, &omni).await;
        assert_eq!((pruned.removed, pruned.kept), (gone.len() as u64, 0));
        expected.retain(|event_type| !gone.contains(event_type));
        assert_eq!(left(&stage).await, expected);
    }
    // Events that are kept longer lie between those that are removed, and a stream may be kept for ever.
    for n in 0..60 {
        stage.publish(["a.x", "a.y", "b"][n % 3]).await;
    }
    stage.advance(2 * DAY).await;
    let age = |types, max_age| StreamAge {
        types: pattern(types),
        max_age,
    };
    let mixed = Retention {
        max_age: Some(3 * DAY),
        streams: vec![age("a.y", None), age("a.>", Some(DAY))],
        ..Retention::default()
    };
    assert_eq!(foretold(maintenance, &mixed).await.removed, 20);
    stage.advance(2 * DAY).await;
    assert_eq!(foretold(maintenance, &mixed).await.removed, 20);
    assert_eq!(left(&stage).await, ["a.y"; 20]);
    assert!(maintenance.check().await.unwrap().is_ok());
    stage.passed()
}

/// An event with an expiry time is removed then, however long the others are kept, unless a group has yet to
/// handle it.
pub async fn events_go_when_they_expire<H: Harness>(harness: H) -> Outcome {
    let needs = [&MAINTENANCE, &LOG, &OWED_IS_KEPT];
    let mut stage = Stage::open(harness, Time::Virtual, &needs).await?;
    let ttl = |event_type: &str, ttl| {
        let now = stage.now();
        let event = Event::builder(event_type).occurred_at(now).ttl(ttl);
        event.build().unwrap()
    };
    stage.declare("g", &["owed.*", "cause"]).await;
    let (first, second) = (ttl("done", SECOND), ttl("done", 10 * SECOND));
    let follow_up = ttl("done", SECOND);
    stage.append(first).await;
    stage.append(second).await;
    stage.publish("done").await;
    stage.append(ttl("owed.x", SECOND)).await;
    stage.publish("cause").await;
    let mut consumer = stage.consumer("g").await;
    let got = take(&mut consumer, 2).await;
    let mut settlement = Settlement::new(got[1].lease.clone(), Verdict::Ack);
    settlement.follow_ups = vec![follow_up];
    stage.settle_with(settlement).await.unwrap();
    drop(consumer);
    stage.advance(2 * SECOND).await;
    if stage.offers(&RESTART) {
        stage.restart().await;
    }
    let maintenance = stage.engine().maintenance().unwrap();
    let keep = Retention::default();
    let pruned = foretold(maintenance, &keep).await;
    assert_eq!((pruned.removed, pruned.kept), (2, 1), "one is owed");
    assert_eq!(left(&stage).await, ["done", "done", "owed.x", "cause"]);
    stage.advance(10 * SECOND).await;
    let mut consumer = stage.consumer("g").await;
    let delivery = take_one(&mut consumer).await;
    assert_eq!(delivery.record.event.event_type(), "owed.x");
    stage.ack(&delivery).await;
    let pruned = foretold(maintenance, &keep).await;
    assert_eq!((pruned.removed, pruned.kept), (2, 0));
    assert_eq!(left(&stage).await, ["done", "cause"]);
    assert_eq!(maintenance.holdings().await.unwrap().expiring.count, 0);
    assert!(maintenance.check().await.unwrap().is_ok());
    stage.passed()
}

/// Groups that are behind, and groups declared while retention would remove everything.
pub async fn retention_waits_for_those_who_lag<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&MAINTENANCE, &OWED_IS_KEPT]).await?;
    let maintenance = stage.engine().maintenance().unwrap();
    let everything = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    stage.declare("fast", &["*"]).await;
    stage.declare("slow", &["*"]).await;
    let published = stage.publish_many("a", 300).await;
    let mut fast = stage.consumer_with("fast", options().prefetch(300)).await;
    for delivery in take(&mut fast, 300).await {
        stage.ack(&delivery).await;
    }
    let pruned = foretold(maintenance, &everything).await;
    assert_eq!(
        (pruned.removed, pruned.kept),
        (0, 300),
        "slow has seen none"
    );
    let mut slow = stage.consumer_with("slow", options().prefetch(10)).await;
    let got = take(&mut slow, 10).await;
    slow.close().await.unwrap();
    for delivery in &got[..5] {
        stage.ack(delivery).await;
    }
    let pruned = foretold(maintenance, &everything).await;
    assert_eq!((pruned.removed, pruned.kept), (5, 295));
    // A group from the start of the log wants all that is left.
    let mut fresh = super::stage::spec("fresh", &["*"]);
    fresh.start_from = everbus_core::StartFrom::First;
    stage.broker().declare(fresh).await.unwrap();
    for delivery in &got[5..] {
        stage.ack(delivery).await;
    }
    let pruned = foretold(maintenance, &everything).await;
    assert_eq!((pruned.removed, pruned.kept), (0, 295), "fresh wants them");
    let mut fresh = stage.consumer("fresh").await;
    let first = take_one(&mut fresh).await;
    assert_eq!(first.record.position, published[5].position);
    // A group that is removed wants nothing any more.
    for group in ["slow", "fresh"] {
        stage.broker().remove_group(name(group)).await.unwrap();
    }
    let pruned = foretold(maintenance, &everything).await;
    assert_eq!((pruned.removed, pruned.kept), (295, 0));
    nothing(&mut fast).await;
    assert!(maintenance.check().await.unwrap().is_ok());
    stage.passed()
}

/// For random logs, groups and policies: removes exactly the events that are over the limits and that no
/// group needs.
#[allow(clippy::print_stderr, reason = "a failure must be reproducible")]
pub async fn exactly_what_no_group_needs_goes<H: Harness>(make: impl Fn() -> H) -> Outcome {
    let seeds = match Random::seed_from_env() {
        Some(seed) => vec![seed],
        None => (0..12).collect(),
    };
    let mut outcome = None;
    for seed in seeds {
        eprintln!("EVERBUS_SEED={seed}");
        outcome = Some(Box::pin(random_policy(make(), Random::new(seed))).await?);
    }
    Ok(outcome.expect("a seed"))
}

async fn random_policy<H: Harness>(harness: H, mut random: Random) -> Outcome {
    const TYPES: [&str; 4] = ["a.x", "a.y", "b.x", "c"];
    let needs = [&MAINTENANCE, &LOG, &LOOKUP, &OWED_IS_KEPT];
    let stage = Stage::open(harness, Time::Virtual, &needs).await?;
    let maintenance = stage.engine().maintenance().unwrap();
    let groups = ["g", "h"];
    for group in groups {
        stage.declare(group, &["*", "*.*"]).await;
    }
    for _ in 0..3 {
        for _ in 0..random.below(80) {
            let event_type = TYPES[random.below(4)];
            let mut builder = Event::builder(event_type).occurred_at(stage.now());
            if random.one_in(4) {
                builder = builder.ttl(random.below(200) as u32 * SECOND + SECOND);
            }
            stage.append(builder.build().unwrap()).await;
            if random.one_in(3) {
                stage.advance(random.below(5) as u32 * SECOND).await;
            }
        }
        for group in groups {
            work(&stage, &mut random, group).await;
        }
        let age = |random: &mut Random| {
            let age = random.below(150) as u32 * SECOND + SECOND;
            (!random.one_in(3)).then_some(age)
        };
        let letters = age(&mut random);
        let mut stream = |types: &str| StreamAge {
            types: pattern(types),
            max_age: age(&mut random),
        };
        let streams = vec![stream("a.x"), stream("*.x"), stream("c")];
        let retention = Retention {
            max_age: age(&mut random),
            max_len: random.one_in(3).then(|| random.below(60) as u64),
            streams,
            dead_letters: letters,
            ..Retention::default()
        };
        check_policy(&stage, maintenance, &retention).await;
    }
    stage.passed()
}

/// A consumer takes some, acks most, and leaves the rest in every other state.
async fn work<H: Harness>(stage: &Stage<H>, random: &mut Random, group: &str) {
    let behind = stage.group_info(group).await.behind;
    let wanted = random.below(usize::try_from(behind).unwrap() + 1);
    if wanted == 0 {
        return;
    }
    let limited = options().prefetch(wanted);
    let mut consumer = stage.consumer_with(group, limited).await;
    let got = take(&mut consumer, wanted).await;
    consumer.close().await.unwrap();
    for delivery in &got {
        match random.below(12) {
            0 => stage.kill(delivery).await,
            1 => stage.fail(delivery, 1000 * DAY).await,
            2 => {
                let reason = "no".to_owned();
                let skipped = stage.settle(delivery, Verdict::Skip { reason }).await;
                skipped.unwrap();
            }
            3 => {}
            _ => stage.ack(delivery).await,
        }
    }
}

async fn check_policy<H: Harness>(
    stage: &Stage<H>,
    maintenance: &dyn Maintenance,
    retention: &Retention,
) {
    let now = stage.now();
    let read = || async {
        let everything = vec![pattern(">"), pattern("system.>")];
        let all = stage.log().read(Cursor::START, everything, 10_000).await;
        all.unwrap().0
    };
    let before = read().await;
    let beyond = retention.max_len.map_or(0, |max| {
        before.len().saturating_sub(usize::try_from(max).unwrap())
    });
    let lapsed: HashSet<(Position, GroupName)> = match retention.dead_letters {
        Some(age) if stage.offers(&DEAD_LETTERS) => {
            let open = stage.open_dead_letters().await;
            let old = open.iter().filter(|letter| letter.died_at.plus(age) < now);
            old.map(|letter| (letter.record.position, letter.group.clone()))
                .collect()
        }
        _ => HashSet::new(),
    };
    let (mut gone, mut kept) = (HashSet::new(), 0);
    for (index, record) in before.iter().enumerate() {
        let age = retention.age_of(record.event.event_type());
        let expires = record.event.attributes().and_then(|a| a.expires_at);
        let over = index < beyond
            || age.is_some_and(|age| record.received_at.plus(age) < now)
            || expires.is_some_and(|at| at < now);
        let states = stage.lookup().states(record.position).await.unwrap();
        let mut needed = false;
        for state in states {
            needed |= match state.state {
                EventState::Done => false,
                EventState::Dlq => !lapsed.contains(&(record.position, state.group)),
                EventState::Pending | EventState::Processing => true,
            };
        }
        if over && needed {
            kept += 1;
        } else if over {
            gone.insert(record.position);
        }
    }
    let pruned = foretold(maintenance, retention).await;
    assert_eq!((pruned.removed, pruned.kept), (gone.len() as u64, kept));
    // None is retried here, so all of them are open.
    assert_eq!(pruned.dead_letters, lapsed.len() as u64);
    for (position, group) in &lapsed {
        if !gone.contains(position) {
            let reason = skipped(stage, *position, group.as_str()).await;
            let age = retention.dead_letters.unwrap();
            assert_eq!(reason, Some(letter_kept_for(age)));
        }
    }
    let expected: Vec<Position> = before
        .iter()
        .map(|record| record.position)
        .filter(|position| !gone.contains(position))
        .collect();
    let after: Vec<Position> = read().await.iter().map(|r| r.position).collect();
    assert_eq!(after, expected);
    assert!(maintenance.check().await.unwrap().is_ok());
}

/// Counts what there is, by type and kind.
pub async fn holdings_say_what_there_is<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&MAINTENANCE]).await?;
    let maintenance = stage.engine().maintenance().unwrap();
    let empty = maintenance.holdings().await.unwrap();
    assert_eq!(empty, everbus_core::Holdings::default());
    let first = stage.publish("b").await;
    stage.advance(SECOND).await;
    stage.publish("a").await;
    stage.publish("b").await;
    let expiring = Event::builder("b").occurred_at(stage.now()).ttl(DAY);
    stage.append(expiring.build().unwrap()).await;
    let died = stage.now();
    if stage.offers(&DEAD_LETTERS) {
        stage.declare("g", &["dead"]).await;
        stage.dead_letter("g", "dead").await;
    }
    let held = maintenance.holdings().await.unwrap();
    let types: Vec<(&str, u64)> = held
        .types
        .iter()
        .map(|t| (t.event_type.as_str(), t.events))
        .collect();
    assert_eq!(types[..2], [("a", 1), ("b", 3)]);
    assert_eq!(held.types[1].oldest, first.received_at);
    assert_eq!(held.expiring.count, 1);
    assert_eq!(held.expiring.oldest, Some(stage.now().plus(DAY)));
    if stage.offers(&DEAD_LETTERS) {
        assert_eq!(held.dead_letters.count, 1);
        assert_eq!(held.dead_letters.oldest, Some(died));
    }
    stage.passed()
}

/// Audit records are removed by age, and the trail can still be verified.
pub async fn audit_records_go_by_their_age<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&MAINTENANCE, &AUDIT]).await?;
    let maintenance = stage.engine().maintenance().unwrap();
    let audit = stage.engine().audit().unwrap();
    for n in 0..6 {
        audit
            .record(AuditEntry::new("somebody", format!("did.{n}")))
            .await
            .unwrap();
        stage.advance(DAY).await;
    }
    let keep = |days: u32| Retention {
        audit: Some(days * DAY),
        ..Retention::default()
    };
    assert_eq!(maintenance.holdings().await.unwrap().audit.count, 6);
    let none = foretold(maintenance, &Retention::standard()).await;
    assert_eq!(none.audit, 0, "kept unless told otherwise");
    assert_eq!(foretold(maintenance, &keep(4)).await.audit, 2);
    assert_eq!(foretold(maintenance, &keep(4)).await.audit, 0);
    assert_eq!(maintenance.holdings().await.unwrap().audit.count, 4);
    assert!(audit.verify(None).await.unwrap().is_ok());
    stage.passed()
}
