//! One file per schema version is kept, and every later build opens it.

use std::collections::BTreeSet;

use everbus_core::{DeadLetterFilter, EventId, GroupName, PageRequest, Settlement, Verdict};

use crate::{consume, declare, failure, fetch, open, publish, settle};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
/// The first version that is read.
const OLDEST: i32 = 7;

// conformance: bus/golden-files: the golden file of every schema version opens, migrates and answers
// conformance: embedded/store: a file of an older version is brought up to date by itself
#[tokio::test]
async fn every_golden_file_still_answers() {
    let mut versions = 0;
    for version in OLDEST..=everbus_sqlite::SCHEMA_VERSION {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("golden.db");
        std::fs::copy(format!("{GOLDEN}/v{version}.db"), &path)
            .unwrap_or_else(|e| panic!("the golden file of version {version}: {e}"));
        let engine = open(&path);
        let report = engine.maintenance().unwrap().check().await.unwrap();
        assert!(report.is_ok(), "{report:?}");
        let first: EventId = "01900000-0000-7000-8000-000000000001".parse().unwrap();
        let found = engine.lookup().unwrap().find(first).await.unwrap();
        assert_eq!(&found[0].event.payload()[..], br#"{"golden":1}"#);
        assert_eq!(found[0].event.metadata()["k"], "v");
        let inbox = engine.inbox().unwrap();
        let handled = inbox.handled(GroupName::unnamed(), found).await.unwrap();
        assert_eq!(handled, [true]);
        let dead = engine
            .dead_letters()
            .unwrap()
            .list(DeadLetterFilter::default(), PageRequest::default())
            .await
            .unwrap();
        assert_eq!(dead.items.len(), 1);
        assert_eq!(dead.items[0].last_error(), "hopeless");
        let mut consumer = consume(&engine, "").await;
        let waiting = fetch(&mut consumer, 2).await;
        let mut attempts: Vec<u32> = waiting.iter().map(|d| d.attempt).collect();
        attempts.sort_unstable();
        assert_eq!(
            attempts,
            [1, 2],
            "one was never begun, one waits for its second attempt"
        );
        let next = publish(&engine, "after.migration").await;
        // The fifth event tells of the dead letter.
        assert_eq!(next.position.place(), 6);
        versions += 1;
    }
    assert!(versions > 0);
}

/// The schema of a file, without comments and line breaks.
fn schema(path: &std::path::Path) -> BTreeSet<(String, String, String, Option<String>)> {
    let conn = rusqlite::Connection::open(path).unwrap();
    let mut statement = conn
        .prepare("SELECT type, name, tbl_name, sql FROM sqlite_schema")
        .unwrap();
    let plain = |sql: Option<String>| {
        sql.map(|sql| {
            let lines = sql
                .lines()
                .map(|line| line.split("--").next().unwrap_or(""));
            let words: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
            words.join(" ")
        })
    };
    let rows = statement.query_map([], |r| {
        Ok((r.get(0)?, r.get(1)?, r.get(2)?, plain(r.get(3)?)))
    });
    rows.unwrap().collect::<Result<_, _>>().unwrap()
}

// conformance: bus/migrated-schema: a file of an older version has, once opened, the schema of a new one
#[tokio::test]
async fn a_migrated_file_has_the_schema_of_a_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let fresh = dir.path().join("fresh.db");
    open(&fresh).broker.close().await.unwrap();
    let expected = schema(&fresh);
    assert!(expected.iter().any(|(_, name, _, _)| name == "inbox"));
    for version in OLDEST..=everbus_sqlite::SCHEMA_VERSION {
        let path = dir.path().join(format!("v{version}.db"));
        std::fs::copy(format!("{GOLDEN}/v{version}.db"), &path).unwrap();
        open(&path).broker.close().await.unwrap();
        assert_eq!(schema(&path), expected, "from version {version}");
    }
}

/// Writes the golden file of the current version; run once when the version changes, with
/// `EVERBUS_WRITE_GOLDEN=1`.
#[tokio::test]
async fn the_golden_file_of_this_version_can_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("golden.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let events = (1..=4u8).map(|n| {
        let id: EventId = format!("01900000-0000-7000-8000-00000000000{n}")
            .parse()
            .unwrap();
        let payload = format!("{{\"golden\":{n}}}");
        everbus_core::Event::builder("golden.made")
            .id(id)
            .payload(payload)
            .meta("k", "v")
            .build()
            .unwrap()
    });
    engine.broker.append(events.collect()).await.unwrap();
    let mut consumer = consume(&engine, "").await;
    let deliveries = fetch(&mut consumer, 3).await;
    let mut handled = Settlement::new(deliveries[0].lease.clone(), Verdict::Ack);
    handled.inbox = true;
    let mut answers = engine.broker.settle(vec![handled]).await.unwrap();
    answers.remove(0).unwrap();
    let zero = std::time::Duration::ZERO;
    settle(
        &engine,
        &deliveries[1],
        Verdict::Dead {
            failure: Some(failure("hopeless")),
        },
    )
    .await;
    consumer.close().await.unwrap();
    settle(
        &engine,
        &deliveries[2],
        Verdict::Retry {
            after: zero,
            failure: failure("once"),
        },
    )
    .await;
    engine.broker.close().await.unwrap();
    let size = std::fs::metadata(&path).unwrap().len();
    assert!(size > 0);
    if std::env::var_os("EVERBUS_WRITE_GOLDEN").is_some() {
        let target = format!("{GOLDEN}/v{}.db", everbus_sqlite::SCHEMA_VERSION);
        std::fs::create_dir_all(GOLDEN).unwrap();
        std::fs::copy(&path, target).unwrap();
    }
}
