//! The history in the file: runs, their merging, what crashes and other processes leave, old files.

use std::path::Path;
use std::sync::Arc;

use everbus_core::{
    Clock, Engine, Event, HistoryQuery, Order, Pattern, Retention, Shard, Timestamp,
};
use everbus_sqlite::{HistoryTuning, Options};
use everbus_testkit::conformance::Harness;
use everbus_testkit::model::Random;
use rusqlite::Connection;

use crate::{eventually, open};

const SMALL: HistoryTuning = HistoryTuning {
    run: 8,
    fan: 3,
    block: 60,
};

/// A file whose index has many small runs on several levels.
#[derive(Debug)]
struct SmallRuns(tempfile::TempDir);

impl SmallRuns {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }
}

impl Harness for SmallRuns {
    async fn open(&self, clock: Arc<dyn Clock>) -> Engine {
        let options = Options {
            clock,
            history: SMALL,
            ..Options::default()
        };
        everbus_sqlite::open(&self.0.path().join("test.db"), options).unwrap()
    }

    fn survives_restart(&self) -> bool {
        true
    }
}

/// The scenarios of the suite again, with runs that are cut and merged all the time.
mod in_small_runs {
    everbus_testkit::history_tests!(super::SmallRuns::new());
}

fn open_small(path: &Path) -> Engine {
    let options = Options {
        history: SMALL,
        ..Options::default()
    };
    everbus_sqlite::open(path, options).unwrap()
}

fn event(n: usize) -> Event {
    Event::builder(["order.placed", "order.paid"][n % 2])
        .tenant(["acme", "other", "third"][n % 3])
        .app(["shop", "mail"][n / 2 % 2])
        .entity("ORDER", (n % 7).to_string())
        .payload("{}")
        .build()
        .unwrap()
}

async fn append(engine: &Engine, numbers: std::ops::Range<usize>) {
    let batch: Vec<Event> = numbers.map(event).collect();
    for answer in engine.broker.append(batch).await.unwrap() {
        answer.unwrap();
    }
}

fn number(path: &Path, sql: &str) -> i64 {
    let conn = Connection::open(path).unwrap();
    conn.busy_timeout(std::time::Duration::from_secs(5))
        .unwrap();
    conn.query_row(sql, [], |row| row.get::<_, Option<i64>>(0))
        .unwrap()
        .unwrap_or(0)
}

/// Waits until less than a run is without index, no merge is due and nothing is left to sweep. All of it is
/// asked at once: between two questions the first run may have come.
async fn indexed(path: &Path, tuning: HistoryTuning) {
    let sql = format!(
        "SELECT count(*) > 0 AND count(*) = total(state = 1)
           AND (SELECT max(seq) FROM log) - max(hi) < {}
           AND (SELECT max(n) FROM (SELECT count(*) AS n FROM history_runs GROUP BY level)) < {}
         FROM history_runs",
        tuning.run, tuning.fan
    );
    eventually("everything is indexed, merged and swept", async || {
        number(path, &sql) == 1
    })
    .await;
}

fn checked_queries() -> Vec<HistoryQuery> {
    let all = HistoryQuery::default();
    let placed: Pattern = "order.placed".parse().unwrap();
    vec![
        all.clone().tenant("acme"),
        all.clone().entity("ORDER", "3"),
        all.clone().app("shop"),
        all.clone().app("shop").entity("ORDER", "3"),
        all.clone().types(placed.clone()).tenant("acme"),
        all.clone()
            .types(placed.clone())
            .tenant("acme")
            .entity("ORDER", "4"),
        all.clone().types(placed.clone()).tenant("acme").app("shop"),
        all.clone()
            .types(placed.clone())
            .tenant("acme")
            .app("shop")
            .entity("ORDER", "0"),
        all.clone().tenant("acme").app("mail"),
        all.clone().tenant("acme").entity("ORDER", "2"),
        all.types(placed),
    ]
}

/// Every query finds what a scan of the numbers finds.
async fn answers_right(engine: &Engine, kept: impl Fn(u64) -> bool, upto: usize) {
    for query in checked_queries() {
        for order in [Order::Newest, Order::Oldest] {
            let query = query.clone().order(order).limit(5000);
            let mut expected: Vec<u64> = (0..upto)
                .filter(|n| query.matches(&event(*n)))
                .map(|n| n as u64 + 1)
                .filter(|position| kept(*position))
                .collect();
            if order == Order::Newest {
                expected.reverse();
            }
            let page = engine
                .history()
                .unwrap()
                .query(query.clone())
                .await
                .unwrap();
            let found: Vec<u64> = page.items.iter().map(|r| r.position.place()).collect();
            assert_eq!(found, expected, "{query:?}");
        }
    }
}

// conformance: memory/history-merge: runs are merged level by level, and answer the same before and after
#[tokio::test]
async fn runs_are_cut_merged_and_swept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open_small(&path);
    for n in 0..60 {
        append(&engine, n * 10..(n + 1) * 10).await;
        if n % 20 == 7 {
            answers_right(&engine, |_| true, (n + 1) * 10).await;
        }
    }
    indexed(&path, SMALL).await;
    assert!(number(&path, "SELECT max(level) FROM history_runs") >= 3);
    assert_eq!(
        number(
            &path,
            "SELECT count(*) FROM history_blocks WHERE run NOT IN (SELECT id FROM history_runs)"
        ),
        0
    );
    let report = engine.maintenance().unwrap().check().await.unwrap();
    assert!(report.is_ok(), "{report:?}");
    answers_right(&engine, |_| true, 600).await;
    // With the log left out of it, the index alone has every posting once.
    let events = number(
        &path,
        "SELECT sum(events) FROM history_runs WHERE state = 1",
    );
    assert!(events >= 592, "{events}");
}

// conformance: memory/history-trailing: queries add what the index does not have yet
#[tokio::test]
async fn the_tail_is_found_without_an_index() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    append(&engine, 0..100).await;
    answers_right(&engine, |_| true, 100).await;
    assert_eq!(number(&path, "SELECT count(*) FROM history_runs"), 0);
    append(&engine, 100..5000).await;
    indexed(&path, HistoryTuning::default()).await;
    assert_eq!(number(&path, "SELECT max(hi) FROM history_runs"), 4096);
    answers_right(&engine, |_| true, 5000).await;
}

// conformance: memory/history-bare-cost: events without names write nothing into the indexes
#[tokio::test]
async fn bare_events_write_no_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open_small(&path);
    for _ in 0..100 {
        crate::publish(&engine, "order.placed").await;
    }
    indexed(&path, SMALL).await;
    assert_eq!(number(&path, "SELECT count(*) FROM history_blocks"), 0);
}

// conformance: memory/history-pruned: entries of removed events are skipped, runs whose events are gone are dropped, half-empty ones written again
#[tokio::test]
async fn runs_follow_what_retention_removes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open_small(&path);
    append(&engine, 0..500).await;
    indexed(&path, SMALL).await;
    let retention = |max_len| Retention {
        max_len: Some(max_len),
        ..Retention::default()
    };
    let maintenance = engine.maintenance().unwrap();
    assert_eq!(maintenance.prune(retention(60)).await.unwrap().removed, 440);
    answers_right(&engine, |position| position > 440, 500).await;
    eventually(
        "runs without events are gone, half-empty ones written again",
        async || {
            let gone = number(
                &path,
                "SELECT count(*) FROM history_runs WHERE hi <= 440 OR state <> 1",
            );
            let stale = number(
                &path,
                "SELECT count(*) FROM history_runs WHERE lo <= 440
            AND events > 2 * (SELECT count(*) FROM log WHERE seq BETWEEN lo AND hi)",
            );
            gone == 0 && stale == 0
        },
    )
    .await;
    answers_right(&engine, |position| position > 440, 500).await;
    // All of it goes; positions are never given again, and the index goes on where it was.
    assert_eq!(maintenance.prune(retention(0)).await.unwrap().removed, 60);
    answers_right(&engine, |_| false, 500).await;
    append(&engine, 500..600).await;
    indexed(&path, SMALL).await;
    answers_right(&engine, |position| position > 500, 600).await;
}

// conformance: memory/history-processes: several processes on one file share the work and see the same history
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_engines_share_one_index() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (first, second) = (open_small(&path), open_small(&path));
    for n in 0..40 {
        let engine = if n % 2 == 0 { &first } else { &second };
        append(engine, n * 10..(n + 1) * 10).await;
    }
    indexed(&path, SMALL).await;
    let overlapping = "SELECT count(*) FROM (SELECT lo - lag(hi) OVER (ORDER BY lo) AS step
        FROM history_runs WHERE state = 1) WHERE step <> 1";
    assert_eq!(number(&path, overlapping), 0, "no gaps, no overlaps");
    answers_right(&first, |_| true, 400).await;
    answers_right(&second, |_| true, 400).await;
    // The other one goes on when the first is gone.
    first.broker.close().await.unwrap();
    append(&second, 400..500).await;
    indexed(&path, SMALL).await;
    answers_right(&second, |_| true, 500).await;
}

// conformance: memory/history-crash: what a crash leaves of a run is never seen, and swept away
#[tokio::test]
async fn half_written_runs_are_swept_away() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open_small(&path);
    append(&engine, 0..100).await;
    indexed(&path, SMALL).await;
    engine.broker.close().await.unwrap();
    drop(engine);
    let conn = Connection::open(&path).unwrap();
    // A run begun and one replaced, both as a dead process leaves them, with postings that are wrong.
    conn.execute_batch(
        "INSERT INTO history_runs (id, level, lo, hi, events, state)
           VALUES (1000, 0, 97, 104, 8, 0), (1001, 1, 1, 24, 24, 2);
         INSERT INTO history_blocks (run, scope, seq, block)
           SELECT 1000, scope, seq + 50, block FROM history_blocks LIMIT 20;
         INSERT INTO history_blocks (run, scope, seq, block)
           SELECT 1001, scope, seq + 50, block FROM history_blocks WHERE run < 1000 LIMIT 200;",
    )
    .unwrap();
    drop(conn);
    let engine = open_small(&path);
    answers_right(&engine, |_| true, 100).await;
    append(&engine, 100..140).await;
    indexed(&path, SMALL).await;
    assert_eq!(
        number(
            &path,
            "SELECT count(*) FROM history_blocks WHERE run >= 1000 AND run <= 1001"
        ),
        0
    );
    answers_right(&engine, |_| true, 140).await;
}

// conformance: memory/history-migrated: a file that has lost its index is indexed in the background
#[tokio::test]
async fn a_file_without_an_index_gets_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    append(&engine, 0..3000).await;
    engine.broker.close().await.unwrap();
    drop(engine);
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("DELETE FROM history_runs; DELETE FROM history_blocks")
        .unwrap();
    drop(conn);
    let engine = open_small(&path);
    indexed(&path, SMALL).await;
    assert_eq!(number(&path, "SELECT min(lo) FROM history_runs"), 1);
    let history = engine.history().unwrap();
    for query in checked_queries() {
        let found = history.query(query.clone().limit(5000)).await.unwrap();
        let expected = (0..3000).filter(|n| query.matches(&event(*n))).count();
        assert_eq!(found.items.len(), expected, "{query:?}");
    }
}

// conformance: memory/history-gaps: cursors hold while runs are merged and events removed in the middle
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn pages_hold_while_runs_merge_under_them() {
    let seed = Random::seed_from_env().unwrap_or(5);
    let mut random = Random::new(seed);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open_small(&path);
    append(&engine, 0..300).await;
    for order in [Order::Newest, Order::Oldest] {
        let head = async || {
            engine
                .log()
                .unwrap()
                .head()
                .await
                .unwrap()
                .place(Shard::ONLY)
        };
        let first_head = head().await;
        let query = HistoryQuery::default().tenant("acme").order(order).limit(5);
        let (mut asked, mut found) = (query.clone(), Vec::new());
        loop {
            let page = engine
                .history()
                .unwrap()
                .query(asked.clone())
                .await
                .unwrap();
            found.extend(page.items.iter().map(|r| r.position.place()));
            let n = usize::try_from(head().await).unwrap();
            append(&engine, n..n + random.below(40) + 1).await;
            match page.next {
                Some(next) if found.last() < Some(&first_head) || order == Order::Newest => {
                    asked = query.clone().after(next);
                }
                _ => break,
            }
        }
        let expected: Vec<u64> = (0..first_head as usize)
            .filter(|n| query.matches(&event(*n)))
            .map(|n| n as u64 + 1)
            .collect();
        found.retain(|position| *position <= first_head);
        if order == Order::Newest {
            found.reverse();
        }
        assert_eq!(found, expected, "seed {seed}, {order:?}");
    }
}

#[tokio::test]
async fn a_damaged_block_is_a_clear_error_and_no_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open_small(&path);
    append(&engine, 0..100).await;
    indexed(&path, SMALL).await;
    let conn = Connection::open(&path).unwrap();
    conn.busy_timeout(std::time::Duration::from_secs(5))
        .unwrap();
    conn.execute(
        "UPDATE history_blocks SET block = x'ffffffffffffffffffffffff'",
        [],
    )
    .unwrap();
    let query = HistoryQuery::default().tenant("acme");
    let error = engine.history().unwrap().query(query).await.unwrap_err();
    assert_eq!(error.code(), everbus_core::Code::Corrupt);
    // Everything else goes on.
    append(&engine, 100..200).await;
    let all = HistoryQuery::default().since(Timestamp::EPOCH).limit(1000);
    let page = engine.history().unwrap().query(all).await.unwrap();
    assert_eq!(page.items.len(), 200);
}
