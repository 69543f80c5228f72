//! Damage that SQLite does not notice: flipped bits, changed rows, a write-ahead log that is gone.

use std::path::{Path, PathBuf};
use std::time::Duration;

use everbus_core::{
    Clock as _, Code, Cursor, DeadLetter, DeadLetterFilter, Engine, Event, FailureKind,
    HistoryQuery, ManualClock, PageRequest, Timestamp, Verdict,
};
use everbus_sqlite::Options;
use everbus_testkit::model::Random;
use rusqlite::Connection;

use crate::{consume, declare, eventually, fetch, open, publish, settle};

const FILLER: &str = "nothing of this may change: not a bit, and not in a hundred years";

async fn fill(engine: &Engine, events: usize) -> Vec<Event> {
    let events: Vec<Event> = (0..events)
        .map(|n| {
            Event::builder("a.b")
                .tenant("acme")
                .json(&serde_json::json!({ "n": n, "filler": FILLER }))
                .build()
                .unwrap()
        })
        .collect();
    for answer in engine.broker.append(events.clone()).await.unwrap() {
        answer.unwrap();
    }
    events
}

async fn wrong(engine: &Engine) -> String {
    let report = engine.maintenance().unwrap().check().await.unwrap();
    let wrong = report.findings.iter().filter(|f| !f.ok);
    let wrong: Vec<String> = wrong
        .map(|f| format!("{}: {}", f.check, f.detail))
        .collect();
    wrong.join("\n")
}

async fn dead_letters(engine: &Engine) -> Vec<DeadLetter> {
    let dead = engine.dead_letters().unwrap();
    let page = dead.list(DeadLetterFilter::default(), PageRequest::default());
    page.await.unwrap().items
}

/// A group gets every event but one, which is its dead letter; no other group gets that one either.
async fn one_is_damaged(engine: &Engine, events: &[Event], damaged: u64, what: &str) {
    declare(engine, "", "*").await;
    let mut consumer = consume(engine, "").await;
    for delivery in fetch(&mut consumer, events.len() - 1).await {
        let place = delivery.record.position.place();
        assert_ne!(place, damaged, "{what}");
        assert_eq!(delivery.record.event, events[place as usize - 1], "{what}");
        settle(engine, &delivery, Verdict::Ack).await;
    }
    eventually("the damaged event is dead-lettered", async || {
        dead_letters(engine).await.len() == 1
    })
    .await;
    let dead = dead_letters(engine).await.remove(0);
    assert_eq!(dead.record.position.place(), damaged, "{what}");
    assert_eq!(dead.failures[0].kind, FailureKind::Corrupt, "{what}");
    let wrong = wrong(engine).await;
    assert!(
        wrong.contains(&format!("1 are damaged: {damaged} (")),
        "{what}: {wrong}"
    );
    let history = engine.history().unwrap();
    let page = history
        .query(HistoryQuery::default().limit(1000))
        .await
        .unwrap();
    let read: Vec<u64> = page.items.iter().map(|r| r.position.place()).collect();
    assert!(!read.contains(&damaged), "{what}");
    let log = engine.log().unwrap();
    let (read, _) = log
        .read(Cursor::START, vec!["a.b".parse().unwrap()], 1000)
        .await
        .unwrap();
    assert!(read.iter().all(|r| r.position.place() != damaged), "{what}");
    let id = events[damaged as usize - 1].id();
    match engine.lookup().unwrap().find(id).await {
        Ok(found) => assert!(found.is_empty(), "{what}: found by an id that is damaged"),
        Err(error) => assert_eq!(error.code(), Code::Corrupt, "{what}"),
    }
}

// conformance: contract/checksum: a flipped bit in a payload is found by check and by every read of the event, and is never delivered
#[tokio::test]
async fn a_flipped_bit_is_never_delivered() {
    let dir = tempfile::tempdir().unwrap();
    let sound = dir.path().join("sound.db");
    let engine = open(&sound);
    let events = fill(&engine, 20).await;
    engine.broker.close().await.unwrap();
    let bytes = std::fs::read(&sound).unwrap();
    let places: Vec<usize> = bytes
        .windows(FILLER.len())
        .enumerate()
        .filter(|(_, window)| *window == FILLER.as_bytes())
        .map(|(at, _)| at)
        .collect();
    assert_eq!(places.len(), events.len());
    let mut random = Random::new(7);
    for copy in 0..30 {
        let place = places[random.below(places.len())] + random.below(FILLER.len());
        let bit = random.below(8);
        let path = dir.path().join(format!("{copy}.db"));
        let mut bytes = bytes.clone();
        bytes[place] ^= 1 << bit;
        std::fs::write(&path, bytes).unwrap();
        let engine = open(&path);
        let what = format!("bit {bit} of byte {place}");
        let found = wrong(&engine).await;
        let (_, named) = found.split_once("1 are damaged: ").expect(&what);
        let damaged = named.split(' ').next().unwrap().parse().unwrap();
        one_is_damaged(&engine, &events, damaged, &what).await;
        engine.broker.close().await.unwrap();
    }
}

// conformance: contract/checksum: every column of an event is covered, and the name of its type
#[tokio::test]
async fn every_column_is_covered() {
    for change in [
        "id = zeroblob(16)",
        "tenant = 0",
        "version = 2",
        "occurred_at = occurred_at + 1",
        "received_at = received_at + 1",
        "attrs = NULL",
        "attrs = replace(attrs, 'acme', 'acne')",
        "payload = replace(payload, '1', '2')",
        "checksum = checksum + 1",
        "checksum = 'abc'",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let engine = open(&path);
        let events = fill(&engine, 3).await;
        let conn = Connection::open(&path).unwrap();
        conn.busy_timeout(crate::PATIENCE).unwrap();
        let changed = conn.execute(&format!("UPDATE log SET {change} WHERE seq = 2"), []);
        assert_eq!(changed.unwrap(), 1);
        one_is_damaged(&engine, &events, 2, change).await;
        engine.broker.close().await.unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    fill(&engine, 2).await;
    engine.broker.close().await.unwrap();
    let conn = Connection::open(&path).unwrap();
    conn.execute("UPDATE types SET name = 'a.c'", []).unwrap();
    assert!(wrong(&open(&path)).await.contains("2 are damaged"));
    // Events of an older version have no checksum, and are believed.
    conn.execute("UPDATE log SET checksum = NULL", []).unwrap();
    assert_eq!(wrong(&open(&path)).await, "");
}

/// A copy of what a process that dies now would leave.
fn crashed(path: &Path, name: &str) -> PathBuf {
    let copy = path.with_file_name(name);
    for suffix in ["", "-wal", ".log-head"] {
        let named = |path: &Path| format!("{}{suffix}", path.display());
        std::fs::copy(named(path), named(&copy)).unwrap();
    }
    copy
}

// conformance: contract/lost-wal: a write-ahead log that was deleted, cut or altered after a crash is noticed by check
#[tokio::test]
async fn a_lost_write_ahead_log_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    let note = dir.path().join("a.db.log-head");
    eventually("the head is noted", async || {
        publish(&engine, "a.b").await;
        let note = std::fs::read_to_string(&note).unwrap_or_default();
        let noted = note.lines().find_map(|line| line.strip_prefix("head "));
        noted.is_some_and(|head| head.parse::<u64>().unwrap() >= 10)
    })
    .await;
    let whole = crashed(&path, "whole.db");
    let deleted = crashed(&path, "deleted.db");
    let cut = crashed(&path, "cut.db");
    let altered = crashed(&path, "altered.db");
    let wal = |path: &Path| PathBuf::from(format!("{}-wal", path.display()));
    std::fs::remove_file(wal(&deleted)).unwrap();
    let mut bytes = std::fs::read(wal(&whole)).unwrap();
    std::fs::write(wal(&cut), &bytes[..10_000]).unwrap();
    bytes[9_000] ^= 1;
    std::fs::write(wal(&altered), bytes).unwrap();
    assert_eq!(wrong(&open(&whole)).await, "", "all of it is there");
    for (path, what) in [(deleted, "deleted"), (cut, "cut"), (altered, "altered")] {
        // It is told now, and still after the log has grown past the note.
        for _ in 0..2 {
            let engine = open(&path);
            let found = wrong(&engine).await;
            assert!(
                found.contains("what was acknowledged is there"),
                "{what}: {found}"
            );
            fill(&engine, 2000).await;
            engine.broker.close().await.unwrap();
        }
    }
    // After an orderly close nothing is left of it.
    engine.broker.close().await.unwrap();
    assert!(!note.exists());
}

fn at(path: &Path, clock: &ManualClock) -> Engine {
    let options = Options {
        clock: std::sync::Arc::new(clock.clone()),
        ..Options::default()
    };
    everbus_sqlite::open(path, options).unwrap()
}

// conformance: contract/clock-ahead: events that a clock far ahead put into the future are told by check, and an operator who vouches for the clock brings their times back
#[tokio::test]
async fn times_from_the_future_are_told_and_brought_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let now = Timestamp::from_micros(1_700_000_000_000_000);
    let year = Duration::from_secs(365 * 86_400);
    let right = ManualClock::new(now);
    let ahead = ManualClock::new(now.plus(30 * year));
    for clock in [&right, &ahead, &right] {
        let engine = at(&path, clock);
        fill(&engine, 600).await;
        engine.broker.close().await.unwrap();
    }
    let engine = at(&path, &right);
    let found = wrong(&engine).await;
    assert!(
        found.contains("events 601 to 1800 were received"),
        "{found}"
    );
    // A file that was not used for a year is as it should be.
    right.advance(year);
    let since = |at: Timestamp| HistoryQuery::default().since(at).limit(5000);
    let history = engine.history().unwrap();
    let later = right.now();
    assert_eq!(history.query(since(later)).await.unwrap().items.len(), 1200);

    engine.maintenance().unwrap().trust_clock().await.unwrap();
    assert_eq!(wrong(&engine).await, "");
    right.advance(Duration::from_secs(60));
    fill(&engine, 1).await;
    let later = later.plus(Duration::from_secs(30));
    assert_eq!(history.query(since(later)).await.unwrap().items.len(), 1);
}
