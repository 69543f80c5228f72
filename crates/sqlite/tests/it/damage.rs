//! Rows of the log that cannot be read: they become dead letters, and everything else goes on.

use std::path::Path;

use everbus_core::{
    Code, Cursor, DeadLetterFilter, Engine, FailureKind, PageRequest, Retention, Verdict,
};
use rusqlite::Connection;

use crate::{consume, declare, eventually, fetch, open, publish, settle};

/// Changes a file behind the engine's back.
fn change(path: &Path, sql: &str) {
    let conn = Connection::open(path).unwrap();
    conn.busy_timeout(crate::PATIENCE).unwrap();
    conn.execute_batch(sql).unwrap();
}

async fn dead_letters(engine: &Engine) -> Vec<everbus_core::DeadLetter> {
    let dead = engine.dead_letters().unwrap();
    let page = dead.list(DeadLetterFilter::default(), PageRequest::default());
    page.await.unwrap().items
}

/// What `check` finds wrong.
async fn wrong(engine: &Engine) -> String {
    let report = engine.maintenance().unwrap().check().await.unwrap();
    let wrong = report.findings.iter().filter(|f| !f.ok);
    let wrong: Vec<String> = wrong
        .map(|f| format!("{}: {}", f.check, f.detail))
        .collect();
    wrong.join("\n")
}

// conformance: contract/damaged-row: a row that cannot be read is a dead letter of kind corrupt with its bytes, and its group goes on
#[tokio::test]
async fn a_row_that_cannot_be_read_becomes_a_dead_letter_and_the_group_goes_on() {
    for damage in [
        "version = 'abc'",
        "version = -1",
        "id = x'00'",
        "occurred_at = 'abc'",
        "received_at = 'abc'",
        "attrs = '{'",
        "attrs = x'ff'",
        "type = 77",
        "type = 'abc'",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let engine = open(&path);
        for _ in 0..8 {
            publish(&engine, "a.b").await;
        }
        publish(&engine, "c.d").await;
        change(&path, &format!("UPDATE log SET {damage} WHERE seq = 5"));
        // One group that wants everything, and one that must find its events among others.
        for (group, pattern, wanted) in [("all", "*", 7 + 1), ("some", "a.b", 7)] {
            declare(&engine, group, pattern).await;
            let mut consumer = consume(&engine, group).await;
            for delivery in fetch(&mut consumer, wanted).await {
                assert_ne!(delivery.record.position.place(), 5, "{damage}");
                settle(&engine, &delivery, Verdict::Ack).await;
            }
            eventually("the damaged event is dead-lettered", async || {
                let all = dead_letters(&engine).await;
                all.iter().any(|d| d.group.as_str() == group)
            })
            .await;
        }
        let dead = dead_letters(&engine).await;
        assert_eq!(dead.len(), 2, "{damage}");
        for letter in dead {
            assert_eq!(letter.record.position.place(), 5);
            assert_eq!(&letter.event().payload()[..], br#"{"n":1}"#, "{damage}");
            assert_eq!(letter.attempts, 0, "no handler ran");
            assert_eq!(letter.failures.len(), 1);
            assert_eq!(letter.failures[0].kind, FailureKind::Corrupt);
        }
        let wrong = wrong(&engine).await;
        assert!(
            wrong.contains("every event is as it was written: 1 are damaged: 5 ("),
            "{wrong}"
        );

        // What waits can be counted, and what retention would remove.
        declare(&engine, "late", "*").await;
        let groups = engine.broker.inspect().await.unwrap();
        assert_eq!(groups.len(), 3, "{damage}");
        let maintenance = engine.maintenance().unwrap();
        let everything = Retention {
            max_len: Some(0),
            ..Retention::default()
        };
        maintenance.preview(everything).await.unwrap();
        maintenance.holdings().await.unwrap();

        // Who reads the log goes past it.
        let log = engine.log().unwrap();
        let everything = vec!["a.b".parse().unwrap()];
        let (read, _) = log.read(Cursor::START, everything, 100).await.unwrap();
        assert_eq!(read.len(), 7, "{damage}");
        engine.broker.close().await.unwrap();
    }
}

// conformance: contract/damaged-row: an event that is damaged while it waits for its retry becomes a dead letter with the failures it had
#[tokio::test]
async fn damage_found_at_a_retry_keeps_what_failed_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    publish(&engine, "a.b").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    change(&path, "UPDATE log SET payload = 12 WHERE seq = 1");
    settle(&engine, &delivery, crate::retry_at_once("first")).await;
    eventually("it is dead-lettered", async || {
        !dead_letters(&engine).await.is_empty()
    })
    .await;
    let dead = dead_letters(&engine).await.remove(0);
    assert_eq!(dead.attempts, 1);
    let kinds: Vec<FailureKind> = dead.failures.iter().map(|f| f.kind).collect();
    assert_eq!(kinds, [FailureKind::Error, FailureKind::Corrupt]);
    // Put back, it dies at once, and nothing loops.
    let dead = engine.dead_letters().unwrap();
    assert_eq!(dead.retry(DeadLetterFilter::default()).await.unwrap(), 1);
    eventually("it is dead-lettered again", async || {
        let dead = dead_letters(&engine).await;
        dead.first().is_some_and(|d| d.failures.len() == 3)
    })
    .await;
    // A publisher that repeats it is refused, and the engine goes on.
    let event = delivery.record.event.clone();
    let refused = engine.broker.append(vec![event]).await.unwrap_err();
    assert_eq!(refused.code(), Code::IdReused);
    let next = publish(&engine, "a.b").await;
    let got = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(got.record.position, next.position);
}

/// Gives a row of the log another number, where it stands.
fn misplace(path: &Path, seq: u8, number: u8) {
    let conn = Connection::open(path).unwrap();
    let page: u32 = conn
        .query_row(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'log'",
            [],
            |r| r.get(0),
        )
        .unwrap();
    let size: u32 = conn
        .query_row("PRAGMA page_size", [], |r| r.get(0))
        .unwrap();
    drop(conn);
    let (page, size) = (page as usize, size as usize);
    let mut bytes = std::fs::read(path).unwrap();
    let leaf = &mut bytes[(page - 1) * size..page * size];
    assert_eq!(leaf[0], 13, "a leaf of a table");
    let pointer = 8 + 2 * (usize::from(seq) - 1);
    let cell = usize::from(leaf[pointer]) << 8 | usize::from(leaf[pointer + 1]);
    // The length of the row, in one byte as long as it is short, and then its number.
    let at = cell + 1 + usize::from(leaf[cell] >= 0x80);
    assert_eq!(leaf[at], seq);
    leaf[at] = number;
    std::fs::write(path, bytes).unwrap();
}

// conformance: contract/out-of-order: a log whose rows are out of order is an error for its readers, never a loop
#[tokio::test]
async fn rows_out_of_order_end_a_reading() {
    for number in [1, 2, 3] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let engine = open(&path);
        for _ in 0..6 {
            publish(&engine, "a.b").await;
        }
        engine.broker.close().await.unwrap();
        misplace(&path, 4, number);
        let engine = open(&path);
        let log = engine.log().unwrap();
        let mut cursor = Cursor::START;
        let ended = async {
            loop {
                let (_, next) = log
                    .read(cursor.clone(), vec!["*".parse().unwrap()], 2)
                    .await?;
                if next.reaches(&cursor) && cursor.reaches(&next) {
                    return Ok::<_, everbus_core::Error>(());
                }
                cursor = next;
            }
        };
        let ended = tokio::time::timeout(crate::PATIENCE, ended).await;
        let error = ended.expect("an end").expect_err("damage");
        assert_eq!(error.code(), Code::Corrupt, "{number}: {error}");
        assert!(!wrong(&engine).await.is_empty());
    }
}
