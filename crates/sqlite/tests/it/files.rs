//! Files that cannot be a bus, and what is said about them.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Barrier;
use std::time::Duration;

use everbus_core::{Code, Error};
use everbus_sqlite::{Durable, Options, SCHEMA_VERSION};
use rusqlite::Connection;

use crate::{PATIENCE, open, publish};

fn refused(path: &Path) -> Error {
    let error = everbus_sqlite::open(path, Options::default())
        .map(drop)
        .unwrap_err();
    assert!(error.hint_text().is_some(), "{error} has a hint");
    error
}

// conformance: embedded/store: a new file is in WAL mode, has its tables, and keeps events and subscriptions
// conformance: embedded/wal: the file is in WAL mode
// conformance: embedded/auto-create: the tables are there after the first open
#[tokio::test]
async fn a_new_file_gets_its_tables_in_wal_mode() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new.db");
    let engine = open(&path);
    publish(&engine, "user.created").await;
    crate::declare(&engine, "", "user.*").await;
    let conn = Connection::open(&path).unwrap();
    let mode: String = conn
        .query_row("PRAGMA journal_mode", [], |r| r.get(0))
        .unwrap();
    assert_eq!(mode, "wal");
    let count = |sql: &str| conn.query_row(sql, [], |r| r.get::<_, i64>(0)).unwrap();
    assert_eq!(count("SELECT count(*) FROM events"), 1);
    assert_eq!(count("SELECT count(*) FROM subscriptions"), 1);
    // A reader that stays does not hold the writer up.
    conn.execute_batch("BEGIN; SELECT count(*) FROM log")
        .unwrap();
    publish(&engine, "user.created").await;
    assert_eq!(
        count("SELECT count(*) FROM log"),
        1,
        "it sees its own moment"
    );
    conn.execute_batch("ROLLBACK").unwrap();
    assert_eq!(count("SELECT count(*) FROM log"), 2);
}

// conformance: embedded/shutdown-closes: closing leaves one file with everything in it, and a second close is harmless
#[tokio::test]
async fn closing_leaves_one_complete_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    crate::declare(&engine, "", "*").await;
    let mut consumer = crate::consume(&engine, "").await;
    publish(&engine, "a.b").await;
    let delivery = crate::fetch(&mut consumer, 1).await.remove(0);
    crate::settle(&engine, &delivery, everbus_core::Verdict::Ack).await;
    engine.log().unwrap().head().await.unwrap();
    engine.broker.close().await.unwrap();
    engine.broker.close().await.unwrap();
    let names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["a.db"], "no write-ahead log, no lock is left");
}

// conformance: contract/new-file-race: many who open one new file at the same moment all get it, and each event is there
#[test]
fn many_may_open_a_new_file_at_once() {
    const STARTERS: usize = 8;
    let dir = tempfile::tempdir().unwrap();
    for round in 0..25 {
        let path = dir.path().join(format!("{round}.db"));
        let together = Barrier::new(STARTERS);
        std::thread::scope(|scope| {
            for starter in 0..STARTERS {
                let (path, together) = (&path, &together);
                scope.spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread()
                        .enable_all()
                        .build()
                        .unwrap();
                    together.wait();
                    let engine = everbus_sqlite::open(path, Options::default())
                        .unwrap_or_else(|e| panic!("starter {starter} of round {round}: {e}"));
                    runtime.block_on(async {
                        publish(&engine, "a.b").await;
                        engine.broker.close().await.unwrap();
                    });
                });
            }
        });
        let conn = Connection::open(&path).unwrap();
        let stored: u32 = conn
            .query_row("SELECT count(*) FROM log", [], |r| r.get(0))
            .unwrap();
        assert_eq!(stored as usize, STARTERS);
    }
}

// conformance: bus/not-a-file: a directory where a file should be is NotAFile
#[test]
fn a_directory_is_not_a_file() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(refused(dir.path()).code(), Code::NotAFile);
    assert_eq!(refused(Path::new("/dev/null")).code(), Code::NotAFile);
    assert_eq!(
        refused(&dir.path().join("missing/a.db")).code(),
        Code::NoSuchFile
    );
}

#[test]
fn a_missing_file_is_not_created_unasked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let options = Options {
        create: false,
        ..Options::default()
    };
    let error = everbus_sqlite::open(&path, options).map(drop).unwrap_err();
    assert_eq!(error.code(), Code::NoSuchFile);
    assert!(!path.exists());
}

// conformance: bus/corrupt: a damaged file is CorruptFile and is not touched
#[tokio::test]
async fn damaged_files_are_named_as_such() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("noise.db");
    let noise: Vec<u8> = (0..20_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    std::fs::write(&path, &noise).unwrap();
    assert_eq!(refused(&path).code(), Code::NotEverbus);
    assert_eq!(std::fs::read(&path).unwrap(), noise, "not touched");

    // Damage inside: the check finds it, and reading it is an error, not a panic.
    let path = dir.path().join("hurt.db");
    let engine = open(&path);
    for _ in 0..50 {
        publish(&engine, "a.b").await;
    }
    engine.broker.close().await.unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2 / 4096 * 4096;
    bytes[middle..].fill(0x5a);
    std::fs::write(&path, &bytes).unwrap();
    match everbus_sqlite::open(&path, Options::default()) {
        Err(e) => assert_eq!(e.code(), Code::Corrupt),
        Ok(engine) => match engine.maintenance().unwrap().check().await {
            Ok(report) => assert!(!report.is_ok(), "{report:?}"),
            Err(e) => assert_eq!(e.code(), Code::Corrupt),
        },
    }
}

// conformance: bus/newer-schema-refused: a file from a newer version is NewerSchema and keeps every byte
#[tokio::test]
async fn a_newer_file_is_refused_and_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    publish(&engine, "a.b").await;
    engine.broker.close().await.unwrap();
    let conn = Connection::open(&path).unwrap();
    conn.pragma_update(None, "user_version", SCHEMA_VERSION + 1)
        .unwrap();
    conn.close().unwrap();
    let before = std::fs::read(&path).unwrap();
    let error = refused(&path);
    assert_eq!(error.code(), Code::NewerSchema);
    assert!(
        error
            .message()
            .contains(&format!("version {}", SCHEMA_VERSION + 1)),
        "{error}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[tokio::test]
async fn a_file_that_is_upgraded_under_way_stops_the_engine_cleanly() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    publish(&engine, "a.b").await;
    let conn = Connection::open(&path).unwrap();
    conn.pragma_update(None, "user_version", SCHEMA_VERSION + 1)
        .unwrap();
    let event = everbus_core::Event::builder("a.b").build().unwrap();
    let error = engine.broker.append(vec![event]).await.unwrap_err();
    assert_eq!(error.code(), Code::NewerSchema);
    let events: i64 = conn
        .query_row("SELECT count(*) FROM log", [], |r| r.get(0))
        .unwrap();
    assert_eq!(events, 1);
}

#[test]
fn a_database_of_another_program_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("theirs.db");
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("CREATE TABLE theirs (x)").unwrap();
    conn.close().unwrap();
    let before = std::fs::read(&path).unwrap();
    assert_eq!(refused(&path).code(), Code::NotEverbus);
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

// conformance: bus/read-only: a file or directory that may not be written is ReadOnly
#[test]
fn what_may_not_be_written_is_read_only() {
    // Root may write everything; a file system mounted read-only stops it too.
    let root = rustix::process::geteuid().is_root();
    let proc = Path::new("/proc/self");
    assert_eq!(refused(&proc.join("a.db")).code(), Code::ReadOnly);
    if root {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    drop(open(&path));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
    assert_eq!(refused(&path).code(), Code::ReadOnly);
}

// conformance: bus/locked: a file held by another program is FileBusy after a bounded wait
// conformance: embedded/sqlite-lock: a lock is waited for with backoff before it is an error
#[tokio::test]
async fn a_locked_file_is_waited_for_and_then_busy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let waiting_for = |busy_timeout| Options {
        busy_timeout,
        ..Options::default()
    };
    let impatient = waiting_for(Duration::from_millis(300));
    let engine = everbus_sqlite::open(&path, impatient.clone()).unwrap();
    let patient = everbus_sqlite::open(&path, waiting_for(PATIENCE)).unwrap();
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let event = || everbus_core::Event::builder("a.b").build().unwrap();
    let error = engine.broker.append(vec![event()]).await.unwrap_err();
    assert_eq!(error.code(), Code::Busy);
    // Freed while a publish waits: the publish goes through.
    let mut waiting = patient.broker.append(vec![event()]);
    // Longer than SQLite itself waits for a lock.
    let early = tokio::time::timeout(Duration::from_millis(600), &mut waiting).await;
    assert!(early.is_err(), "the file is locked: {early:?}");
    other.execute_batch("ROLLBACK").unwrap();
    waiting.await.unwrap();
    engine.broker.close().await.unwrap();
    patient.broker.close().await.unwrap();
    // At open: an exclusive lock keeps everybody out.
    other
        .pragma_update(None, "locking_mode", "EXCLUSIVE")
        .unwrap();
    other.execute_batch("BEGIN EXCLUSIVE").unwrap();
    let error = everbus_sqlite::open(&path, impatient)
        .map(drop)
        .unwrap_err();
    assert_eq!(error.code(), Code::Busy);
}

// conformance: bus/full-sync-verified: FULL is the default and what is set is what capabilities say
// conformance: fault-1/synchronous: the writing connection really runs with synchronous FULL; NORMAL is a choice that says so
#[tokio::test]
async fn full_durability_is_the_default_and_normal_says_so() {
    use everbus_core::Durability;
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("full.db"));
    assert_eq!(
        engine.broker.capabilities().durability,
        Durability::PowerLoss
    );
    let options = Options {
        durability: Durable::Normal,
        ..Options::default()
    };
    let engine = everbus_sqlite::open(&dir.path().join("normal.db"), options).unwrap();
    assert_eq!(engine.broker.capabilities().durability, Durability::Process);
}
