//! Mistakes that were made once, each with the test that would have caught it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

use everbus_core::{
    Clock, Code, Consumer, Cursor, DeadLetterFilter, Engine, Event, Failure, FailureKind,
    GroupSpec, Position, Retention, Settlement, StartFrom, SubscriptionSpec, SystemClock,
    Timestamp, Verdict,
};
use everbus_sqlite::Options;
use rusqlite::Connection;

use crate::{
    PATIENCE, consume, consume_some, declare, eventually, failure, fetch, open, publish, settle,
    try_settle,
};

fn event(event_type: String) -> Event {
    Event::builder(event_type).build().unwrap()
}

async fn append(engine: &Engine, events: Vec<Event>) {
    let answers = engine.broker.append(events).await.unwrap();
    assert!(answers.iter().all(Result::is_ok));
}

async fn ack_all(engine: &Engine, consumer: &mut Box<dyn Consumer>, count: usize) -> Vec<u64> {
    let mut seen = Vec::new();
    while seen.len() < count {
        let more = tokio::time::timeout(PATIENCE, consumer.fetch(1000)).await;
        let Ok(batch) = more else {
            panic!("{} of {count} were delivered", seen.len());
        };
        let batch = batch.unwrap();
        let acks = batch
            .iter()
            .map(|d| Settlement::new(d.lease.clone(), Verdict::Ack))
            .collect();
        let answers = engine.broker.settle(acks).await.unwrap();
        assert!(answers.iter().all(Result::is_ok));
        seen.extend(batch.iter().map(|d| d.record.position.place()));
    }
    seen
}

// conformance: fault-5/many-types: a group that wants thousands of types among others gets every event of them
#[tokio::test]
async fn a_group_that_wants_thousands_of_types_gets_them_all() {
    const TYPES: usize = 2100;
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("a.db"));
    declare(&engine, "g", "order.*.shipped").await;
    let events = (0..TYPES)
        .flat_map(|n| ["placed", "shipped"].map(|what| event(format!("order.{n}.{what}"))));
    append(&engine, events.collect()).await;
    let mut consumer = consume_some(&engine, "g", &["*", "order.*.shipped"], 100)
        .await
        .unwrap();
    let seen = ack_all(&engine, &mut consumer, TYPES).await;
    let wanted: Vec<u64> = (1..=TYPES as u64).map(|n| 2 * n).collect();
    assert_eq!(seen, wanted, "each once, in order");
}

// conformance: bus/widening: a pattern added while the group's backlog is being read applies from where the group stands
// conformance: fault-5/widening: what was read with the old patterns does not carry the group past what it now wants
#[tokio::test]
async fn a_pattern_added_while_the_backlog_is_read_gets_what_it_is_owed() {
    const EACH: u64 = 1000;
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("a.db"));
    let types = (0..2 * EACH).map(|n| if n % 2 == 0 { "x.1" } else { "y.1" });
    append(&engine, types.map(|t| event(t.into())).collect()).await;
    for round in 0..5 {
        let group = format!("g{round}");
        declare(&engine, &group, "x.*").await;
        let mut consumer = consume_some(&engine, &group, &["*"], 4096).await.unwrap();
        // The backlog is being read with the old pattern now.
        let widened = GroupSpec {
            name: group.parse().unwrap(),
            start_from: StartFrom::First,
            ordered: false,
            ephemeral: false,
            subscriptions: vec![SubscriptionSpec {
                name: "y".into(),
                pattern: "y.*".parse().unwrap(),
            }],
        };
        let after = engine.broker.declare(widened).await.unwrap()[0]
            .after
            .clone();
        let owed = (1..=2 * EACH).filter(|p| p % 2 == 1 || !after.covers(Position::seq(*p)));
        let owed: Vec<u64> = owed.collect();
        let mut seen = ack_all(&engine, &mut consumer, owed.len()).await;
        seen.sort_unstable();
        assert_eq!(seen, owed);
        consumer.close().await.unwrap();
    }
}

// conformance: bus/several-processes: a consumer of a group that another process removed never gets events of the next group
#[tokio::test]
async fn a_consumer_of_a_removed_group_gets_nothing_of_the_group_declared_next() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (service, tool) = (open(&path), open(&path));
    declare(&service, "old", "*").await;
    let mut orphan = consume(&service, "old").await;
    tool.broker
        .remove_group("old".parse().unwrap())
        .await
        .unwrap();
    declare(&tool, "new", "*").await;
    let published = publish(&tool, "a.b").await;
    // A commit of its own makes the service see all of that.
    publish(&service, "a.c").await;
    let orphaned = tokio::time::timeout(Duration::from_millis(200), orphan.fetch(1)).await;
    if let Ok(answer) = orphaned {
        let refused = answer.expect_err("nothing is owed to a group that is gone");
        assert_eq!(refused.code(), Code::GroupNotFound);
    }
    let mut consumer = consume(&tool, "new").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(
        (delivery.record.position, delivery.attempt),
        (published.position, 1)
    );
}

/// Leaves an event as three crashes would have: to be handed out only while nothing else is in
/// flight.
fn make_suspect(path: &std::path::Path, position: Position) {
    let conn = Connection::open(path).unwrap();
    conn.execute_batch(&format!(
        "BEGIN IMMEDIATE;
         DELETE FROM claims WHERE lo = {position} AND hi = {position};
         INSERT OR REPLACE INTO deliveries
           (group_id, seq, state, due, attempt, type, suspect, crashes, updated_at)
           SELECT 1, seq, 0, 0, 3, type, 1, 3, 0 FROM log WHERE seq = {position};
         COMMIT"
    ))
    .unwrap();
}

// conformance: bus/several-processes: a process that waits to run a suspect alone goes on when another has run it
#[tokio::test]
async fn a_process_that_keeps_a_suspect_apart_goes_on_when_another_takes_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (first, second) = (open(&path), open(&path));
    declare(&first, "", "*").await;
    let mut waiting = consume(&first, "").await;
    publish(&first, "a.slow").await;
    let slow = fetch(&mut waiting, 1).await.remove(0);
    publish(&first, "a.bad").await;
    let bad = fetch(&mut waiting, 1).await.remove(0);
    make_suspect(&path, bad.record.position);
    // In this transaction the first process finds the suspect, and waits for the slow one to end.
    let held_back = publish(&first, "a.held").await;
    let mut other = consume(&second, "").await;
    let suspect = fetch(&mut other, 1).await.remove(0);
    assert_eq!(suspect.record.position, bad.record.position);
    settle(&second, &suspect, Verdict::Ack).await;
    other.close().await.unwrap();
    second.broker.close().await.unwrap();
    settle(&first, &slow, Verdict::Ack).await;
    let next = publish(&first, "a.next").await;
    let mut seen = ack_all(&first, &mut waiting, 2).await;
    seen.sort_unstable();
    assert_eq!(
        seen,
        [held_back.position, next.position].map(Position::place)
    );
}

#[tokio::test]
async fn a_suspect_waits_for_what_runs_and_then_everything_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    for _ in 0..2 {
        publish(&engine, "a.b").await;
    }
    let running = fetch(&mut consumer, 2).await;
    make_suspect(&path, running[1].record.position);
    publish(&engine, "a.b").await;
    // Due in the midst of it.
    let retry = Verdict::Retry {
        after: Duration::from_millis(1),
        failure: failure("x"),
    };
    settle(&engine, &running[0], retry).await;
    let suspect = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(suspect.record.position, running[1].record.position);
    let lost = try_settle(&engine, &running[1], Verdict::Ack).await;
    assert_eq!(lost.unwrap_err().code(), Code::LeaseLost);
    settle(&engine, &suspect, Verdict::Ack).await;
    let mut rest = ack_all(&engine, &mut consumer, 2).await;
    rest.sort_unstable();
    assert_eq!(rest, [1, 3]);
}

#[tokio::test]
async fn an_endless_prefetch_is_no_trouble() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("a.db"));
    declare(&engine, "", "*").await;
    let mut consumer = consume_some(&engine, "", &["*"], usize::MAX).await.unwrap();
    for _ in 0..3 {
        publish(&engine, "a.b").await;
    }
    assert_eq!(ack_all(&engine, &mut consumer, 3).await, [1, 2, 3]);
}

/// A clock that breaks, on demand, everywhere but in the test itself.
#[derive(Debug)]
struct BrokenClock {
    broken: AtomicBool,
    test: ThreadId,
}

impl Clock for BrokenClock {
    fn now(&self) -> Timestamp {
        let elsewhere = std::thread::current().id() != self.test;
        assert!(
            !(elsewhere && self.broken.load(Ordering::SeqCst)),
            "the clock broke, as the test wants it"
        );
        SystemClock.now()
    }
}

async fn refused_soon<T>(what: &str, answer: impl Future<Output = everbus_core::Result<T>>) {
    let answer = tokio::time::timeout(PATIENCE, answer).await;
    let answer = answer.unwrap_or_else(|_| panic!("{what} hangs"));
    assert!(answer.is_err(), "{what} cannot succeed");
}

// conformance: bus/storage-failed: a writer that panicked leaves nobody waiting
#[tokio::test]
async fn no_caller_waits_for_a_writer_that_panicked() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(BrokenClock {
        broken: AtomicBool::new(false),
        test: std::thread::current().id(),
    });
    let options = Options {
        clock: clock.clone(),
        ..Options::default()
    };
    let engine = everbus_sqlite::open(&dir.path().join("a.db"), options).unwrap();
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    let stored = publish(&engine, "a.b").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    clock.broken.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        let publishing = engine.broker.append(vec![event("a.b".into())]);
        refused_soon("a publish", publishing).await;
    }
    refused_soon("a verdict", try_settle(&engine, &delivery, Verdict::Ack)).await;
    refused_soon("a fetch", consumer.fetch(1)).await;
    let settled = engine
        .settled()
        .unwrap()
        .settled(stored.position, 2 * PATIENCE);
    refused_soon("settled", settled).await;
    let closing = tokio::time::timeout(PATIENCE, engine.broker.close()).await;
    assert!(closing.is_ok(), "closing does not hang");
}

// conformance: bus/dlq-filters: a retry takes each dead letter once, also when it dies again meanwhile
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_of_many_dead_letters_takes_each_once_although_they_die_again() {
    const DEAD: u64 = 1100;
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("a.db"));
    declare(&engine, "", "*").await;
    let mut consumer = consume_some(&engine, "", &["*"], 4096).await.unwrap();
    append(&engine, (0..DEAD).map(|_| event("a.b".into())).collect()).await;
    let deaths = Arc::new(AtomicU64::new(0));
    let (broker, counted) = (engine.broker.clone(), deaths.clone());
    let worker = tokio::spawn(async move {
        while let Ok(batch) = consumer.fetch(4096).await {
            let failure = Failure::new(1, SystemClock.now(), FailureKind::Error, "x");
            let dead = Verdict::Dead {
                failure: Some(failure),
            };
            let verdicts = batch
                .iter()
                .map(|d| Settlement::new(d.lease.clone(), dead.clone()));
            let answers = broker.settle(verdicts.collect()).await.unwrap();
            counted.fetch_add(answers.len() as u64, Ordering::SeqCst);
        }
    });
    eventually("all of them are dead", async || {
        deaths.load(Ordering::SeqCst) == DEAD
    })
    .await;
    let letters = engine.dead_letters().unwrap();
    let retry = letters.retry(DeadLetterFilter::default());
    let retried = tokio::time::timeout(PATIENCE, retry).await;
    assert_eq!(retried.expect("it ends").unwrap(), DEAD);
    eventually("all of them have died again", async || {
        deaths.load(Ordering::SeqCst) >= 2 * DEAD
    })
    .await;
    let open = letters.count(DeadLetterFilter::default()).await.unwrap();
    assert_eq!(open, DEAD);
    engine.broker.close().await.unwrap();
    worker.await.unwrap();
    assert_eq!(deaths.load(Ordering::SeqCst), 2 * DEAD, "none a third time");
}

// conformance: bus/no-handler-here: consumers of one process with different handlers each get what they handle
#[tokio::test]
async fn consumers_of_one_process_with_different_handlers_each_get_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("a.db"));
    declare(&engine, "g", "x.*").await;
    declare(&engine, "g", "y.*").await;
    let mut of_x = consume_some(&engine, "g", &["x.*"], 10).await.unwrap();
    let mut of_y = consume_some(&engine, "g", &["y.*"], 10).await.unwrap();
    for _ in 0..5 {
        let (x, y) = (publish(&engine, "x.1").await, publish(&engine, "y.1").await);
        assert_eq!(ack_all(&engine, &mut of_x, 1).await, [x.position.place()]);
        assert_eq!(ack_all(&engine, &mut of_y, 1).await, [y.position.place()]);
    }
    // The same for what waits in a row of its own.
    let y = publish(&engine, "y.1").await;
    let delivery = fetch(&mut of_y, 1).await.remove(0);
    settle(&engine, &delivery, crate::retry_at_once("x")).await;
    assert_eq!(ack_all(&engine, &mut of_y, 1).await, [y.position.place()]);
}

// conformance: bus/backup: a backup does not begin anew because of what is published meanwhile
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_gets_on_while_publishes_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    let payload = "x".repeat(100_000);
    for _ in 0..60 {
        let large = Event::builder("a.b").json(&payload).build().unwrap();
        append(&engine, vec![large]).await;
    }
    let (publisher, runtime) = (engine.clone(), tokio::runtime::Handle::current());
    let repeated = Arc::new(AtomicU64::new(0));
    let (counted, mut last, mut steps) = (repeated.clone(), 0, 0);
    // A publish between any two steps, but not for ever.
    let progress = move |done: u64, _all: u64| {
        if done <= last {
            counted.fetch_add(1, Ordering::SeqCst);
        }
        (last, steps) = (done, steps + 1);
        if steps < 100 {
            runtime.block_on(async {
                let publishing = append(&publisher, vec![event("a.b".into())]);
                let published = tokio::time::timeout(PATIENCE, publishing).await;
                published.expect("publishes go on");
            });
        }
    };
    let copy = dir.path().join("b.db");
    let maintenance = engine.maintenance().unwrap();
    let backup = maintenance.backup(copy.clone(), Box::new(progress));
    backup.await.unwrap();
    assert_eq!(repeated.load(Ordering::SeqCst), 0, "it never began anew");
    let copied = open(&copy).log().unwrap().head().await.unwrap();
    assert!(copied.reaches(&Cursor::seq(60)), "{copied}");
}

// conformance: bus/retention-length: what retention removed is given back to the file system
#[tokio::test]
async fn retention_gives_the_room_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    let payload = "x".repeat(10_000);
    let large = || Event::builder("a.b").json(&payload).build().unwrap();
    append(&engine, (0..400).map(|_| large()).collect()).await;
    let conn = Connection::open(&path).unwrap();
    let count = |what: &str| -> i64 {
        let sql = format!("PRAGMA {what}");
        conn.query_row(&sql, [], |r| r.get(0)).unwrap()
    };
    let before = count("page_count");
    assert!(before > 1000, "{before}");
    let newest = Retention {
        max_len: Some(1),
        ..Retention::default()
    };
    let pruned = engine.maintenance().unwrap().prune(newest).await.unwrap();
    assert_eq!(pruned.removed, 399);
    let (pages, free) = (count("page_count"), count("freelist_count"));
    assert!(pages < before / 4, "{pages} of {before} pages, {free} free");
}

// conformance: rule-5/damaged-event: an event that cannot be read fails no publish, unless the file is reported as damaged
#[tokio::test]
async fn an_event_that_cannot_be_read_fails_no_publish_without_saying_so() {
    for damage in ["version = -1", "attrs = '{'"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let engine = open(&path);
        declare(&engine, "g", "a.*").await;
        for _ in 0..3 {
            publish(&engine, "a.b").await;
        }
        let conn = Connection::open(&path).unwrap();
        conn.execute(&format!("UPDATE log SET {damage} WHERE seq = 2"), [])
            .unwrap();
        let _reading = consume(&engine, "g").await;
        // Long enough for the backlog to be read many times.
        for _ in 0..200 {
            if let Err(e) = engine.broker.append(vec![event("other.x".into())]).await {
                assert_eq!(e.code(), Code::Corrupt, "{damage}: {e}");
                assert!(e.message().contains("event 2"), "it says which: {e}");
            }
        }
    }
}
