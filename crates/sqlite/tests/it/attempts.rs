//! Which events of a process that was killed count an attempt: those whose handlers may have run.
//!
//! A copy of the file is what a kill leaves of a process: everything it committed, and an owner whose lock
//! nobody holds.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use everbus_core::{
    ConsumeOptions, Consumer, Delivery, Engine, Event, FailureKind, GroupSpec, Position, StartFrom,
    SubscriptionSpec, Verdict,
};
use everbus_sqlite::Options;
use rusqlite::Connection;

use crate::{
    clock, declare, eventually, fetch, open, options, publish, retry_at_once, settle, try_settle,
};

const MANY: usize = 200;

async fn consume(engine: &Engine, options: ConsumeOptions) -> Box<dyn Consumer> {
    let group = "g".parse().unwrap();
    engine.broker.consume(group, options).await.unwrap()
}

/// Runs so many at once.
fn at_once(count: usize) -> ConsumeOptions {
    options().prefetch(1000).concurrency(count)
}

async fn publish_many(engine: &Engine, count: usize) {
    let events = (0..count).map(|_| Event::builder("a.b").build().unwrap());
    engine.broker.append(events.collect()).await.unwrap();
}

/// The file as it would be had the process been killed now.
fn killed(path: &Path, name: &str) -> PathBuf {
    let copy = path.with_file_name(name);
    let target = copy.to_str().unwrap();
    let conn = Connection::open(path).unwrap();
    conn.execute("VACUUM INTO ?1", [target]).unwrap();
    copy
}

/// How many attempts of an event are counted, and how many crashes.
async fn counted(engine: &Engine, position: Position) -> (u32, usize) {
    let states = engine.lookup().unwrap().states(position).await.unwrap();
    (states[0].attempts, states[0].failures.len())
}

/// What is owed, each event acked as it comes.
async fn handle_all(engine: &Engine, count: usize) -> Vec<Delivery> {
    let mut consumer = consume(engine, at_once(4)).await;
    let mut all = Vec::new();
    for _ in 0..count {
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        settle(engine, &delivery, Verdict::Ack).await;
        all.push(delivery);
    }
    all.sort_by_key(|delivery| delivery.record.position.place());
    all
}

// conformance: operations/attempts-begun: of many events that a killed process had prefetched, only the one whose handler ran counts an attempt
#[tokio::test]
async fn only_what_had_begun_counts_an_attempt_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "g", "*").await;
    publish_many(&engine, MANY).await;
    let mut consumer = consume(&engine, at_once(1)).await;
    let running = fetch(&mut consumer, 1).await.remove(0);
    let in_flight = engine.broker.inspect().await.unwrap()[0].in_flight;
    assert_eq!(in_flight, MANY as u64, "all of them are claimed");
    assert_eq!(counted(&engine, running.record.position).await, (1, 0));
    assert_eq!(counted(&engine, Position::seq(2)).await, (0, 0));

    let next = open(&killed(&path, "b.db"));
    let handled = handle_all(&next, MANY).await;
    for delivery in &handled {
        let ran = delivery.record.position == running.record.position;
        assert_eq!(delivery.attempt, 1 + u32::from(ran));
        assert_eq!(delivery.failures.len(), usize::from(ran));
    }
    let crash = &handled[0].failures[0];
    assert_eq!(crash.kind, FailureKind::Crash);
    assert!(crash.alone, "no other handler ran");
    let check = next.maintenance().unwrap().check().await.unwrap();
    assert!(check.is_ok(), "{check:?}");
}

// conformance: operations/attempts-begun-first: whatever a consumer was handed is counted, whenever its process is killed
#[tokio::test]
async fn what_was_handed_out_is_counted_whenever_the_process_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "g", "*").await;
    let mut consumer = consume(&engine, at_once(3)).await;
    let (mut running, mut handled) = (Vec::new(), 0);
    for round in 0..12 {
        publish_many(&engine, 40).await;
        // As much as it is given, so that the next round finds some of a claim handed out.
        running.extend(fetch(&mut consumer, 1).await);
        let more = tokio::time::timeout(Duration::from_millis(50), consumer.fetch(30)).await;
        running.extend(more.into_iter().flat_map(Result::unwrap));
        let copy = open(&killed(&path, &format!("{round}.db")));
        let _recovering = consume(&copy, at_once(1).prefetch(1)).await;
        for delivery in &running {
            let (attempts, crashes) = counted(&copy, delivery.record.position).await;
            assert!(attempts >= 1 && crashes == 1, "{attempts}, {crashes}");
        }
        for delivery in running.drain(..) {
            settle(&engine, &delivery, Verdict::Ack).await;
            handled += 1;
        }
    }
    assert!(handled >= 12, "{handled}");
}

// conformance: operations/attempts-begun-rows: retries, events of an ordered group and events far apart are leased as they can begin
#[tokio::test]
async fn rows_count_an_attempt_only_if_they_can_have_begun() {
    for ordered in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let engine = open(&path);
        let spec = GroupSpec {
            name: "g".parse().unwrap(),
            start_from: StartFrom::First,
            ordered,
            ephemeral: false,
            subscriptions: vec![SubscriptionSpec {
                name: "a".into(),
                pattern: "a.*".parse().unwrap(),
            }],
        };
        engine.broker.declare(spec).await.unwrap();
        // One in a hundred is wanted: too far apart for a claim.
        for _ in 0..10 {
            publish(&engine, "a.b").await;
            let others = (0..99).map(|_| Event::builder("other.x").build().unwrap());
            engine.broker.append(others.collect()).await.unwrap();
        }
        let mut consumer = consume(&engine, at_once(1)).await;
        let running = fetch(&mut consumer, 1).await.remove(0);
        eventually("all of them are set aside", async || {
            let info = engine.broker.inspect().await.unwrap().remove(0);
            info.behind == 0 && info.waiting + info.in_flight == 10
        })
        .await;
        let next = open(&killed(&path, "b.db"));
        for delivery in handle_all(&next, 10).await {
            let ran = delivery.record.position == running.record.position;
            assert_eq!(delivery.attempt, 1 + u32::from(ran), "ordered: {ordered}");
        }
    }
}

// conformance: operations/attempts-begun: what a process that sleeps past its leases had only reserved is no attempt
#[tokio::test]
async fn what_a_sleeping_process_had_reserved_is_no_attempt() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (clock, shared) = clock();
    let options = || Options {
        clock: shared.clone(),
        ..Options::default()
    };
    let engine = everbus_sqlite::open(&path, options()).unwrap();
    declare(&engine, "g", "*").await;
    publish_many(&engine, 20).await;
    let mut consumer = consume(&engine, at_once(1)).await;
    let running = fetch(&mut consumer, 1).await.remove(0);
    // A copy whose owner lives and does nothing: its lock is held, and its leases are not extended.
    let path = killed(&path, "b.db");
    let conn = Connection::open(&path).unwrap();
    let lock: String = conn
        .query_row("SELECT lock FROM owners", [], |row| row.get(0))
        .unwrap();
    let lock = File::create(dir.path().join(format!("b.db-owner-{lock}"))).unwrap();
    lock.lock().unwrap();
    let other = everbus_sqlite::open(&path, options()).unwrap();
    let mut rival = consume(&other, at_once(1)).await;
    let nothing = tokio::time::timeout(Duration::from_millis(300), rival.fetch(1)).await;
    assert!(nothing.is_err(), "the leases are held: {nothing:?}");
    rival.close().await.unwrap();
    clock.advance(at_once(1).lease + Duration::from_secs(1));
    for delivery in handle_all(&other, 20).await {
        let ran = delivery.record.position == running.record.position;
        assert_eq!(delivery.attempt, 1 + u32::from(ran));
    }
}

// conformance: operations/attempts-begun-fair: events that fail again and again at once do not keep the reserved ones waiting, nor the other way round
#[tokio::test]
async fn retries_and_what_is_reserved_take_turns() {
    // More than can run at once, and more than are handed out ahead of that.
    const FAILING: u64 = 40;
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("a.db"));
    declare(&engine, "g", "*").await;
    publish_many(&engine, 2 * FAILING as usize).await;
    let mut consumer = consume(&engine, at_once(1)).await;
    let (mut failed, mut handled) = (0, 0);
    while handled < FAILING {
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        if delivery.record.position.place() <= FAILING {
            settle(&engine, &delivery, retry_at_once("again")).await;
            failed += 1;
            assert!(failed < 20 * FAILING, "only {handled} others were handled");
        } else {
            settle(&engine, &delivery, Verdict::Ack).await;
            handled += 1;
        }
    }
    assert!(
        failed > FAILING,
        "none was tried again before all others were handled"
    );
}

// conformance: operations/attempts-begun-first: what could not be written as begun is not handed out
#[tokio::test]
async fn nothing_is_handed_out_that_the_file_does_not_know_as_begun() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "g", "*").await;
    publish_many(&engine, 5).await;
    let mut consumer = consume(&engine, at_once(1)).await;
    let first = fetch(&mut consumer, 1).await.remove(0);
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch(
        "CREATE TRIGGER sabotage BEFORE UPDATE OF started ON claims
         BEGIN SELECT RAISE(ABORT, 'sabotaged'); END",
    )
    .unwrap();
    let refused = try_settle(&engine, &first, Verdict::Ack).await;
    assert!(refused.is_err(), "{refused:?}");
    let more = tokio::time::timeout(Duration::from_millis(200), consumer.fetch(1)).await;
    assert!(more.is_err(), "{more:?}");
    conn.execute_batch("DROP TRIGGER sabotage").unwrap();
    settle(&engine, &first, Verdict::Ack).await;
    for place in 2..=5 {
        let next = fetch(&mut consumer, 1).await.remove(0);
        assert_eq!(next.record.position, Position::seq(place));
        settle(&engine, &next, Verdict::Ack).await;
    }
}
