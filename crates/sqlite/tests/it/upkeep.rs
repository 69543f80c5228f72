//! Backup, restore and retention.

use std::time::Duration;

use everbus_core::{Code, Retention, Verdict};
use everbus_sqlite::Options;
use rusqlite::Connection;

use crate::{clock, consume, declare, failure, fetch, open, publish, settle};

// conformance: bus/backup: a backup taken while publishes go on holds everything acknowledged before it began
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_under_load_is_complete_and_stands_alone() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("a.db"));
    declare(&engine, "", "*").await;
    let mut before = Vec::new();
    for _ in 0..200 {
        before.push(publish(&engine, "a.b").await.id);
    }
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let load = {
        let (engine, stop) = (engine.clone(), stop.clone());
        tokio::spawn(async move {
            while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                publish(&engine, "a.b").await;
            }
        })
    };
    let copy = dir.path().join("backup.db");
    let maintenance = engine.maintenance().unwrap();
    maintenance
        .backup(copy.clone(), Box::new(|done, all| assert!(done <= all)))
        .await
        .unwrap();
    stop.store(true, std::sync::atomic::Ordering::SeqCst);
    load.await.unwrap();
    let again = maintenance
        .backup(copy.clone(), Box::new(|_, _| {}))
        .await
        .unwrap_err();
    assert_eq!(again.code(), Code::InvalidSetting, "nothing is overwritten");

    let target = dir.path().join("restored.db");
    everbus_sqlite::restore(&copy, &target, false, Box::new(|_, _| {})).unwrap();
    let restored = open(&target);
    for id in before {
        assert_eq!(restored.lookup().unwrap().find(id).await.unwrap().len(), 1);
    }
    let mut consumer = consume(&restored, "").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(delivery.attempt, 1, "groups and positions came along");
    assert!(
        restored
            .maintenance()
            .unwrap()
            .check()
            .await
            .unwrap()
            .is_ok()
    );
}

// conformance: bus/restore: a restore refuses to overwrite, refuses a file in use and refuses a damaged backup
#[tokio::test]
async fn a_restore_replaces_only_when_told_and_never_what_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let (path, copy) = (dir.path().join("a.db"), dir.path().join("b.db"));
    let engine = open(&path);
    let old = publish(&engine, "a.b").await;
    engine
        .maintenance()
        .unwrap()
        .backup(copy.clone(), Box::new(|_, _| {}))
        .await
        .unwrap();
    let newer = publish(&engine, "a.b").await;
    let restore = |force| everbus_sqlite::restore(&copy, &path, force, Box::new(|_, _| {}));
    assert_eq!(restore(false).unwrap_err().code(), Code::InvalidSetting);
    assert_eq!(
        restore(true).unwrap_err().code(),
        Code::Busy,
        "it is in use"
    );
    engine.broker.close().await.unwrap();
    restore(true).unwrap();
    let engine = open(&path);
    let lookup = engine.lookup().unwrap();
    assert_eq!(lookup.find(old.id).await.unwrap().len(), 1);
    assert!(lookup.find(newer.id).await.unwrap().is_empty());
    engine.broker.close().await.unwrap();
    std::fs::write(&copy, "not a backup").unwrap();
    assert_eq!(restore(true).unwrap_err().code(), Code::NotEverbus);
    assert_eq!(
        open(&path)
            .lookup()
            .unwrap()
            .find(old.id)
            .await
            .unwrap()
            .len(),
        1,
        "unharmed"
    );
}

// conformance: bus/check: the check says what is wrong with the tables
#[tokio::test]
async fn the_check_finds_broken_rules() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    publish(&engine, "a.b").await;
    let report = engine.maintenance().unwrap().check().await.unwrap();
    assert!(report.is_ok(), "{report:?}");
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("DELETE FROM types; INSERT INTO claims (group_id, lo, hi, owner, token, until, attempt) VALUES (1, 1, 9, 1, 1, 1, 1)").unwrap();
    let report = engine.maintenance().unwrap().check().await.unwrap();
    let broken: Vec<&str> = report
        .findings
        .iter()
        .filter(|f| !f.ok)
        .map(|f| f.check.as_str())
        .collect();
    assert_eq!(
        broken,
        [
            "every event has a type",
            "no claim lies beyond its group",
            "every event is as it was written"
        ]
    );
}

// conformance: bus/retention-age: what is older than the limit goes, except what is owed or dead
// conformance: bus/retention-length: the newest stay, and everything that is owed
// conformance: rule-7/retention: retention never removes what a group owes work on
// conformance: fault-9/retention: pruning spares waiting, leased, unclaimed and dead-lettered events
#[tokio::test]
async fn retention_spares_what_is_owed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (clock, shared) = clock();
    let engine = everbus_sqlite::open(
        &path,
        Options {
            clock: shared,
            ..Options::default()
        },
    )
    .unwrap();
    declare(&engine, "fast", "*").await;
    let mut fast = consume(&engine, "fast").await;
    for _ in 0..700 {
        publish(&engine, "a.b").await;
    }
    let mut deliveries = fetch(&mut fast, 700).await;
    let (waits, runs, dead) = (
        deliveries.remove(10),
        deliveries.remove(20),
        deliveries.remove(30),
    );
    let hour = Duration::from_secs(30);
    settle(
        &engine,
        &waits,
        Verdict::Retry {
            after: hour,
            failure: failure("x"),
        },
    )
    .await;
    settle(
        &engine,
        &dead,
        Verdict::Dead {
            failure: Some(failure("x")),
        },
    )
    .await;
    for delivery in &deliveries {
        settle(&engine, delivery, Verdict::Ack).await;
    }
    clock.advance(Duration::from_secs(20));
    for _ in 0..10 {
        publish(&engine, "a.b").await;
    }
    let maintenance = engine.maintenance().unwrap();
    let by_age = Retention {
        max_age: Some(Duration::from_secs(10)),
        max_len: None,
        ..Retention::default()
    };
    let pruned = maintenance.prune(by_age).await.unwrap();
    // All but three, and the notice of the dead letter.
    assert_eq!((pruned.removed, pruned.kept), (698, 3));
    let conn = Connection::open(&path).unwrap();
    let left: Vec<i64> = conn
        .prepare("SELECT seq FROM log WHERE seq <= 700")
        .unwrap()
        .query_map([], |r| r.get(0))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let mut kept = [&waits, &runs, &dead].map(|d| d.record.position.place() as i64);
    kept.sort_unstable();
    assert_eq!(left, kept);
    // A group that has seen nothing yet owes everything.
    declare(&engine, "late", "*").await;
    let by_length = Retention {
        max_age: None,
        max_len: Some(0),
        ..Retention::default()
    };
    let pruned = maintenance.prune(by_length.clone()).await.unwrap();
    assert_eq!((pruned.removed, pruned.kept), (0, 13));
    // A position is never given twice, even when the newest events are gone.
    engine
        .broker
        .remove_group("late".parse().unwrap())
        .await
        .unwrap();
    let new = fetch(&mut fast, 10).await;
    for delivery in &new {
        settle(&engine, delivery, Verdict::Ack).await;
    }
    maintenance.prune(by_length).await.unwrap();
    engine.broker.close().await.unwrap();
    let engine = open(&path);
    // After 710 events and the notice of the dead letter.
    assert_eq!(publish(&engine, "a.b").await.position.place(), 712);
}
