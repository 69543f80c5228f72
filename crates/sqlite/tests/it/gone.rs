//! Files that are deleted, moved or replaced under a running engine: nothing is acknowledged into them.

use std::path::Path;

use everbus_core::{Code, Cursor, Event};
use everbus_sqlite::Options;

use crate::{PATIENCE, consume, declare, open, publish};

fn beside(path: &Path, suffix: &str) -> std::path::PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

// conformance: contract/file-gone: a publisher whose file, or its write-ahead log, is deleted, moved or replaced gets FileGone and no acknowledgement
#[tokio::test]
async fn nothing_is_acknowledged_into_a_file_that_is_gone() {
    type Harm = fn(&Path);
    let harms: [(&str, Harm); 5] = [
        ("the file is deleted", |path| {
            std::fs::remove_file(path).unwrap();
        }),
        ("the file is moved", |path| {
            std::fs::rename(path, beside(path, ".old")).unwrap();
        }),
        ("the file is replaced by a copy", |path| {
            std::fs::copy(path, beside(path, ".copy")).unwrap();
            std::fs::rename(beside(path, ".copy"), path).unwrap();
        }),
        ("its write-ahead log is deleted", |path| {
            std::fs::remove_file(beside(path, "-wal")).unwrap();
        }),
        ("its write-ahead log is moved", |path| {
            std::fs::rename(beside(path, "-wal"), beside(path, "-old")).unwrap();
        }),
    ];
    for (what, harm) in harms {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let engine = open(&path);
        publish(&engine, "a.b").await;
        harm(&path);
        for _ in 0..2 {
            let event = Event::builder("a.b").build().unwrap();
            let refused = engine.broker.append(vec![event]).await.expect_err(what);
            assert_eq!(refused.code(), Code::FileGone, "{what}: {refused}");
            assert!(refused.outcome_unknown(), "{what}");
            assert!(refused.hint_text().is_some());
        }
        assert!(engine.broker.close().await.is_err(), "{what}");
    }
}

// conformance: contract/file-gone: who only consumes or waits for new events learns it too
#[tokio::test]
async fn who_waits_learns_that_the_file_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    std::fs::remove_file(&path).unwrap();
    let (fetched, waited) = tokio::time::timeout(PATIENCE, async {
        let waited = engine.log().unwrap().wait_beyond(Cursor::START).await;
        (consumer.fetch(1).await, waited)
    })
    .await
    .expect("an answer in time");
    assert_eq!(fetched.unwrap_err().code(), Code::FileGone);
    assert_eq!(waited.unwrap_err().code(), Code::FileGone);
}

#[tokio::test]
async fn others_that_open_and_close_the_file_are_no_reason_to_stop() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    for _ in 0..20 {
        let other = everbus_sqlite::open(&path, Options::default()).unwrap();
        publish(&other, "a.b").await;
        other.broker.close().await.unwrap();
        publish(&engine, "a.b").await;
    }
}
