//! The audit trail of a file under attack: whatever is done to it by hand is found, and where.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use everbus_core::{
    AuditContent, AuditEntry, AuditHash, AuditHead, AuditQuery, AuditVerdict, Clock as _, Code,
    Engine, ManualClock, Timestamp,
};
use everbus_sqlite::Options;
use rusqlite::{Connection, params};
use serde_json::json;

use crate::open;

const RECORDS: u64 = 40;

/// Numbers that a seed gives again.
struct Dice(u64);

impl Dice {
    fn new() -> Self {
        let seed = std::env::var("EVERBUS_SEED")
            .ok()
            .and_then(|s| s.parse().ok());
        let seed = seed.unwrap_or_else(|| {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap()
                .as_nanos() as u64
        });
        eprintln!("EVERBUS_SEED={seed}");
        Self(seed | 1)
    }

    /// Between two numbers, both included.
    fn between(&mut self, low: u64, high: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        low + self.0 % (high - low + 1)
    }
}

fn entry(n: u64) -> AuditEntry {
    let entry =
        AuditEntry::new(format!("actor-{}", n % 3), "order.refund").details(json!({ "n": n }));
    // Every other column is there in some records and not in others.
    match n % 4 {
        0 => entry.entity("ORDER", n.to_string()),
        1 => entry.tenant("acme").correlation_id(format!("c-{n}")),
        2 => entry.trace_id(format!("t-{n}")),
        _ => entry,
    }
}

/// A trail of 40 records; of the second kind, retention has removed the first ten.
struct Trails {
    dir: tempfile::TempDir,
    cases: u32,
}

impl Trails {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (name, shortened) in [("whole.db", false), ("shortened.db", true)] {
            let clock = ManualClock::new(Timestamp::from_micros(1_000_000_000));
            let options = Options {
                clock: std::sync::Arc::new(clock.clone()),
                ..Options::default()
            };
            let engine = everbus_sqlite::open(&dir.path().join(name), options).unwrap();
            let audit = engine.audit().unwrap();
            for n in 1..=RECORDS {
                audit.record(entry(n)).await.unwrap();
                if n == 10 {
                    clock.advance(Duration::from_secs(60));
                }
            }
            if shortened {
                assert_eq!(audit.forget(clock.now()).await.unwrap(), 10);
            }
            assert!(audit.verify(None).await.unwrap().is_ok());
            engine.broker.close().await.unwrap();
        }
        Self { dir, cases: 0 }
    }

    /// A copy, with the head that is kept beside it.
    fn copy(&mut self, name: &str) -> PathBuf {
        self.cases += 1;
        let to = self.dir.path().join(format!("case-{}.db", self.cases));
        let from = self.dir.path().join(name);
        std::fs::copy(&from, &to).unwrap();
        std::fs::copy(beside(&from), beside(&to)).unwrap();
        to
    }
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".audit-head");
    name.into()
}

/// Changes the file by hand, without the triggers, which are there again afterwards.
fn tamper(path: &Path, change: impl FnOnce(&Connection)) {
    let conn = Connection::open(path).unwrap();
    let triggers: Vec<(String, String)> = conn
        .prepare(
            "SELECT name, sql FROM sqlite_schema WHERE type = 'trigger' AND tbl_name LIKE 'audit%'",
        )
        .and_then(|mut s| s.query_map([], |r| Ok((r.get(0)?, r.get(1)?)))?.collect())
        .unwrap();
    assert_eq!(triggers.len(), 6);
    for (name, _) in &triggers {
        conn.execute_batch(&format!("DROP TRIGGER {name}")).unwrap();
    }
    change(&conn);
    for (_, sql) in &triggers {
        conn.execute_batch(sql).unwrap();
    }
}

async fn verify(path: &Path) -> AuditVerdict {
    verify_with(path, None).await
}

async fn verify_with(path: &Path, known: Option<AuditHead>) -> AuditVerdict {
    let engine = open(path);
    let verdict = engine.audit().unwrap().verify(known).await.unwrap();
    engine.broker.close().await.unwrap();
    verdict
}

async fn assert_broken(path: &Path, seq: Option<u64>, what: &str) {
    let verdict = verify(path).await;
    let broken = verdict.broken.clone();
    let broken = broken.unwrap_or_else(|| panic!("{what}: not found: {verdict:?}"));
    assert_eq!(broken.seq, seq, "{what}: {verdict:?}");
    if let Some(seq) = seq {
        let named = format!("record {seq}");
        assert!(
            broken.problem.contains(&named),
            "{what}: {}",
            broken.problem
        );
    }
}

// conformance: memory/audit-edit: verify names the first bad row after an edit of any column of any row, also with the triggers dropped and made again
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edit_of_any_column_is_found() {
    let mut trails = Trails::new().await;
    let mut dice = Dice::new();
    for (file, first) in [("whole.db", 1), ("shortened.db", 11)] {
        for change in [
            "at = at + 1",
            "at = at + 0.5",
            "actor = 'mallory'",
            "actor = CAST(actor AS BLOB)",
            "actor = actor || ' '",
            "action = 'order.refunds'",
            "entity_type = iif(entity_type IS NULL, '', NULL)",
            "entity_id = iif(entity_id IS NULL, '', 'other')",
            "tenant = iif(tenant IS NULL, '', NULL)",
            "correlation_id = iif(correlation_id IS NULL, 'c', 'd')",
            "trace_id = iif(trace_id IS NULL, '', trace_id || '0')",
            "trace_id = iif(trace_id IS NULL, x'', CAST(trace_id AS BLOB))",
            "details = replace(details, '\"n\"', '\"m\"')",
            "details = ' ' || details",
            "details = NULL",
            "hash = randomblob(32)",
            "hash = x'00'",
            "hash = zeroblob(0)",
            "hash = 'text'",
        ] {
            for _ in 0..2 {
                let seq = dice.between(first, RECORDS);
                let path = trails.copy(file);
                tamper(&path, |conn| {
                    let sql = format!("UPDATE audit_log SET {change} WHERE seq = ?1");
                    assert_eq!(conn.execute(&sql, [seq as i64]).unwrap(), 1);
                });
                assert_broken(&path, Some(seq), change).await;
            }
        }
    }
}

// conformance: memory/audit-deletion: verify names the first missing row after a deletion at the beginning, in the middle or at the end
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_anywhere_is_found() {
    let mut trails = Trails::new().await;
    let mut dice = Dice::new();
    for (file, first) in [("whole.db", 1), ("shortened.db", 11)] {
        let middle = dice.between(first + 1, RECORDS - 1);
        let to = dice.between(middle, RECORDS);
        for (from, to) in [
            (first, first),
            (first, middle),
            (middle, middle),
            (middle, to),
            (RECORDS, RECORDS),
            (middle, RECORDS),
            (first, RECORDS),
        ] {
            let path = trails.copy(file);
            tamper(&path, |conn| {
                let sql = "DELETE FROM audit_log WHERE seq BETWEEN ?1 AND ?2";
                let removed = conn.execute(sql, [from as i64, to as i64]).unwrap();
                assert_eq!(removed as u64, to - from + 1);
            });
            assert_broken(
                &path,
                Some(from),
                &format!("{file}: {from} to {to} deleted"),
            )
            .await;
        }
    }
}

// conformance: memory/audit-insertion: verify names the first bad row after an insertion or an exchange
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_insertion_and_an_exchange_are_found() {
    let mut trails = Trails::new().await;
    let mut dice = Dice::new();
    for (file, first) in [("whole.db", 1), ("shortened.db", 11)] {
        let at = dice.between(first, RECORDS);
        let path = trails.copy(file);
        tamper(&path, |conn| {
            let sql = "UPDATE audit_log SET seq = -seq - 1 WHERE seq >= ?1";
            conn.execute(sql, [at as i64]).unwrap();
            conn.execute_batch("UPDATE audit_log SET seq = -seq WHERE seq < 0")
                .unwrap();
            let sql = "INSERT INTO audit_log (seq, at, actor, action, hash)
                       SELECT ?1, at, 'mallory', 'x', hash FROM audit_log WHERE seq = ?1 + 1";
            assert_eq!(conn.execute(sql, [at as i64]).unwrap(), 1);
        });
        assert_broken(&path, Some(at), &format!("{file}: inserted at {at}")).await;

        let path = trails.copy(file);
        tamper(&path, |conn| {
            let sql = "INSERT INTO audit_log (seq, at, actor, action, hash)
                       SELECT seq + 1, at, actor, action, hash FROM audit_log WHERE seq = ?1";
            assert_eq!(conn.execute(sql, [RECORDS as i64]).unwrap(), 1);
        });
        assert_broken(
            &path,
            Some(RECORDS + 1),
            &format!("{file}: added at the end"),
        )
        .await;

        let one = dice.between(first, RECORDS - 1);
        let other = dice.between(one + 1, RECORDS);
        let path = trails.copy(file);
        tamper(&path, |conn| {
            let moved = |from: i64, to: i64| {
                let sql = "UPDATE audit_log SET seq = ?2 WHERE seq = ?1";
                assert_eq!(conn.execute(sql, [from, to]).unwrap(), 1);
            };
            moved(one as i64, -1);
            moved(other as i64, one as i64);
            moved(-1, other as i64);
        });
        assert_broken(
            &path,
            Some(one),
            &format!("{file}: {one} and {other} exchanged"),
        )
        .await;
    }
    // Before the beginning, where the walk does not come by.
    for seq in [0i64, -3] {
        let path = trails.copy("whole.db");
        tamper(&path, |conn| {
            let sql = "INSERT INTO audit_log (seq, at, actor, action, hash) VALUES (?1, 1, 'm', 'x', x'00')";
            conn.execute(sql, [seq]).unwrap();
        });
        let broken = verify(&path).await.broken.unwrap();
        assert!(
            broken
                .problem
                .contains(&format!("record {seq} was inserted")),
            "{broken:?}"
        );
    }
    let path = trails.copy("shortened.db");
    tamper(&path, |conn| {
        let sql =
            "INSERT INTO audit_log (seq, at, actor, action, hash) VALUES (7, 1, 'm', 'x', x'00')";
        conn.execute(sql, []).unwrap();
    });
    assert_broken(&path, Some(7), "inserted before the anchor").await;
}

/// Gives every record from one on the hash that its content and the one before it ask for.
fn rehash(conn: &Connection, from: u64) {
    let mut previous: AuditHash = conn
        .query_row(
            "SELECT hash FROM audit_log WHERE seq = ?1",
            [from as i64 - 1],
            |r| Ok(AuditHash::from_bytes(r.get_ref(0)?.as_blob()?).unwrap()),
        )
        .unwrap_or(AuditHash::ORIGIN);
    for seq in from..=RECORDS {
        let hash = conn
            .query_row(
                "SELECT at, actor, action, entity_type, entity_id, tenant, correlation_id, trace_id,
                   details FROM audit_log WHERE seq = ?1",
                [seq as i64],
                |r| {
                    let text = |n| r.get_ref(n).unwrap().as_str_or_null().unwrap();
                    let content = AuditContent {
                        seq,
                        at: Timestamp::from_micros(r.get(0)?),
                        actor: text(1).unwrap(),
                        action: text(2).unwrap(),
                        entity_type: text(3),
                        entity_id: text(4),
                        tenant: text(5),
                        correlation_id: text(6),
                        trace_id: text(7),
                        details: text(8),
                    };
                    Ok(content.hash(&previous))
                },
            )
            .unwrap();
        let sql = "UPDATE audit_log SET hash = ?2 WHERE seq = ?1";
        conn.execute(sql, params![seq as i64, hash.as_bytes()])
            .unwrap();
        previous = hash;
    }
}

// conformance: memory/audit-rehash: an edit after which all hashes were made anew contradicts the head kept outside
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_that_was_made_anew_contradicts_the_head_outside() {
    let mut trails = Trails::new().await;
    let mut dice = Dice::new();
    let seq = dice.between(1, RECORDS);
    let path = trails.copy("whole.db");
    tamper(&path, |conn| {
        let sql = "UPDATE audit_log SET actor = 'mallory' WHERE seq = ?1";
        conn.execute(sql, [seq as i64]).unwrap();
        rehash(conn, seq);
    });
    assert_broken(&path, Some(RECORDS), "rehashed").await;
    // Recording goes on, and does not cover it up.
    let engine = open(&path);
    engine.audit().unwrap().record(entry(41)).await.unwrap();
    engine.broker.close().await.unwrap();
    assert_broken(&path, Some(RECORDS), "rehashed, and gone on").await;

    // With the head outside gone too, one that was kept elsewhere still tells, and where it lies.
    std::fs::remove_file(beside(&path)).unwrap();
    let known = everbus_sqlite::kept_head(&trails.dir.path().join("whole.db")).unwrap();
    let broken = verify_with(&path, Some(known)).await.broken.unwrap();
    assert_eq!(broken.seq, Some(RECORDS));
    let verdict = verify(&path).await;
    assert!(verdict.is_ok() && verdict.notes.len() == 1, "{verdict:?}");
}

// conformance: memory/audit-anchor: an anchor that was replaced, moved or removed is found
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forged_anchor_is_found() {
    let mut trails = Trails::new().await;
    let mut dice = Dice::new();
    // As retention would leave it: only what is kept outside knows that it was not retention.
    for (file, first) in [("whole.db", 1), ("shortened.db", 11)] {
        let to = dice.between(first, RECORDS);
        let path = trails.copy(file);
        tamper(&path, |conn| {
            let sql = "INSERT OR REPLACE INTO audit_anchor
                       SELECT 1, seq, hash, at FROM audit_log WHERE seq = ?1";
            conn.execute(sql, [to as i64]).unwrap();
            conn.execute("DELETE FROM audit_log WHERE seq <= ?1", [to as i64])
                .unwrap();
        });
        assert_broken(&path, Some(first), &format!("{file}: anchored at {to}")).await;
    }
    for (change, seq) in [
        ("UPDATE audit_anchor SET hash = randomblob(32)", 10),
        ("UPDATE audit_anchor SET hash = x''", 10),
        ("UPDATE audit_anchor SET seq = 9", 10),
        ("DELETE FROM audit_anchor", 1),
    ] {
        let path = trails.copy("shortened.db");
        tamper(&path, |conn| conn.execute_batch(change).unwrap());
        assert_broken(&path, Some(seq), change).await;
    }
}

// conformance: memory/audit-old-copy: an old copy of the file in the place of the new one is found, also after it has gone on
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_copy_of_the_file_is_found() {
    let mut trails = Trails::new().await;
    let path = trails.copy("whole.db");
    let engine = open(&path);
    for n in 41..=45 {
        engine.audit().unwrap().record(entry(n)).await.unwrap();
    }
    engine.broker.close().await.unwrap();
    assert!(verify(&path).await.is_ok());
    std::fs::copy(trails.dir.path().join("whole.db"), &path).unwrap();
    assert_broken(&path, Some(41), "an old copy").await;
    let engine = open(&path);
    for n in 0..4 {
        engine.audit().unwrap().record(entry(n)).await.unwrap();
    }
    engine.broker.close().await.unwrap();
    assert_broken(&path, Some(45), "an old copy that has gone on").await;
    let engine = open(&path);
    for n in 0..4 {
        engine.audit().unwrap().record(entry(n)).await.unwrap();
    }
    engine.broker.close().await.unwrap();
    assert_broken(&path, Some(45), "an old copy that has overtaken the head").await;
}

// conformance: memory/audit-triggers: the table refuses updates, deletes and inserts elsewhere than at the end
// conformance: framework/audit-append-only: audit records are never updated and never deleted
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_triggers_refuse_what_is_not_an_append() {
    let mut trails = Trails::new().await;
    for file in ["whole.db", "shortened.db"] {
        let path = trails.copy(file);
        let conn = Connection::open(&path).unwrap();
        for statement in [
            "UPDATE audit_log SET actor = 'x' WHERE seq = 20",
            "UPDATE audit_log SET details = NULL",
            "UPDATE OR REPLACE audit_log SET seq = 21 WHERE seq = 20",
            "DELETE FROM audit_log WHERE seq = 20",
            "DELETE FROM audit_log WHERE seq = 40",
            "DELETE FROM audit_log",
            "INSERT OR REPLACE INTO audit_log (seq, at, actor, action, hash) VALUES (20, 1, 'm', 'x', x'00')",
            "INSERT INTO audit_log (seq, at, actor, action, hash) VALUES (42, 1, 'm', 'x', x'00')",
            "INSERT INTO audit_log (seq, at, actor, action, hash) VALUES (0, 1, 'm', 'x', x'00')",
            "INSERT INTO audit_log (at, actor, action, hash) VALUES (1, 'm', 'x', x'00')",
            "INSERT OR REPLACE INTO audit_anchor VALUES (1, 20, x'00', 1)",
            "INSERT OR REPLACE INTO audit_anchor VALUES (1, 99, zeroblob(32), 1)",
            "INSERT INTO audit_anchor VALUES (2, 20, x'00', 1)",
        ] {
            assert!(
                conn.execute_batch(statement).is_err(),
                "{file}: {statement}"
            );
        }
        if file == "shortened.db" {
            for statement in [
                "DELETE FROM audit_anchor",
                "UPDATE audit_anchor SET seq = 30",
                "UPDATE audit_anchor SET seq = 5",
                "UPDATE audit_anchor SET hash = zeroblob(32)",
                "INSERT OR REPLACE INTO audit_anchor SELECT 1, seq, hash, at FROM audit_log WHERE seq = 20",
            ] {
                assert!(
                    conn.execute_batch(statement).is_err(),
                    "{file}: {statement}"
                );
            }
        }
        drop(conn);
        assert!(verify(&path).await.is_ok());
    }
}

// conformance: memory/audit-trigger-gone: a trigger that is gone, was changed or was added is found
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trigger_that_is_not_as_it_was_is_found() {
    let mut trails = Trails::new().await;
    for (change, named) in [
        ("DROP TRIGGER audit_log_no_update", "audit_log_no_update"),
        ("DROP TRIGGER audit_anchor_update", "audit_anchor_update"),
        (
            "DROP TRIGGER audit_log_no_delete;
             CREATE TRIGGER audit_log_no_delete BEFORE DELETE ON audit_log WHEN 0
             BEGIN SELECT RAISE(ABORT, 'no'); END",
            "audit_log_no_delete",
        ),
        (
            "CREATE TRIGGER mine AFTER INSERT ON AUDIT_LOG BEGIN SELECT 1; END",
            "mine",
        ),
    ] {
        let path = trails.copy("whole.db");
        Connection::open(&path)
            .unwrap()
            .execute_batch(change)
            .unwrap();
        let broken = verify(&path).await.broken.unwrap();
        assert_eq!(broken.seq, None);
        assert!(broken.problem.contains(named), "{broken:?}");
    }
    let path = trails.copy("whole.db");
    let drop = "DROP TRIGGER audit_log_no_update; UPDATE audit_log SET actor = 'm' WHERE seq = 5";
    Connection::open(&path)
        .unwrap()
        .execute_batch(drop)
        .unwrap();
    let verdict = verify(&path).await;
    assert_eq!(verdict.broken.unwrap().seq, Some(5), "the row comes first");
    assert!(verdict.notes[0].contains("audit_log_no_update"));
    let path = trails.copy("whole.db");
    Connection::open(&path)
        .unwrap()
        .execute_batch("DROP TABLE audit_log")
        .unwrap();
    let broken = verify(&path).await.broken.unwrap();
    assert!(broken.problem.contains("audit_log"), "{broken:?}");
}

// conformance: memory/audit-head-missing: a head outside that is gone, unreadable or began late is said, and no failure by itself
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_that_is_not_there_is_said() {
    let mut trails = Trails::new().await;
    let path = trails.copy("whole.db");
    let known = everbus_sqlite::kept_head(&path).unwrap();
    std::fs::remove_file(beside(&path)).unwrap();
    assert_eq!(everbus_sqlite::kept_head(&path), None);
    let verdict = verify(&path).await;
    assert!(verdict.is_ok(), "{verdict:?}");
    assert!(verdict.notes[0].contains("no head"), "{verdict:?}");
    assert!(!beside(&path).exists(), "verification does not cover it up");
    assert!(verify_with(&path, Some(known)).await.notes.is_empty());
    std::fs::write(beside(&path), "nonsense").unwrap();
    let verdict = verify(&path).await;
    assert!(
        verdict.is_ok() && verdict.notes[0].contains("cannot be read"),
        "{verdict:?}"
    );

    let engine = open(&path);
    engine.audit().unwrap().record(entry(41)).await.unwrap();
    engine.broker.close().await.unwrap();
    let verdict = verify(&path).await;
    assert!(
        verdict.is_ok() && verdict.notes[0].contains("since record 41"),
        "{verdict:?}"
    );
    assert!(
        verify_with(&path, Some(known)).await.notes.is_empty(),
        "that closes the gap"
    );
}

// conformance: memory/audit-head-behind: a crash between the commit and the head outside is accepted and mended
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_that_a_crash_left_behind_is_mended() {
    let mut trails = Trails::new().await;
    let path = trails.copy("whole.db");
    let old = std::fs::read(beside(&path)).unwrap();
    let engine = open(&path);
    for n in 41..=43 {
        engine.audit().unwrap().record(entry(n)).await.unwrap();
    }
    engine.broker.close().await.unwrap();
    std::fs::write(beside(&path), &old).unwrap();
    let verdict = verify(&path).await;
    assert!(verdict.is_ok() && verdict.notes.is_empty(), "{verdict:?}");
    assert_eq!(verdict.mended, Some(3));
    assert_eq!(verify(&path).await.mended, None);
    // The next record mends it too.
    std::fs::write(beside(&path), &old).unwrap();
    let engine = open(&path);
    engine.audit().unwrap().record(entry(44)).await.unwrap();
    engine.broker.close().await.unwrap();
    assert_eq!(everbus_sqlite::kept_head(&path).unwrap().seq, 44);
    assert_eq!(verify(&path).await.mended, None);
}

// conformance: memory/audit-retention-crash: a crash between the word given outside and the removal is no forgery
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retention_that_crashed_before_it_removed_anything_is_no_forgery() {
    let mut trails = Trails::new().await;
    let path = trails.copy("whole.db");
    std::fs::copy(
        beside(&trails.dir.path().join("shortened.db")),
        beside(&path),
    )
    .unwrap();
    let verdict = verify(&path).await;
    assert!(
        verdict.is_ok(),
        "the same records, the same hashes: {verdict:?}"
    );
    assert_eq!((verdict.verified, verdict.first), (40, Some(1)));
    // And retention may be run again.
    let engine = open(&path);
    let audit = engine.audit().unwrap();
    let before = Timestamp::from_micros(1_030_000_000);
    assert_eq!(audit.forget(before).await.unwrap(), 10);
    let verdict = audit.verify(None).await.unwrap();
    assert!(verdict.is_ok() && verdict.first == Some(11), "{verdict:?}");
}

async fn record_some(engine: &Engine, who: &str, count: u64) {
    for n in 0..count {
        let entry = AuditEntry::new(who, "x").details(json!(n));
        engine.audit().unwrap().record(entry).await.unwrap();
    }
}

// conformance: memory/audit-shared: several processes write one trail, and an older head never replaces a newer one
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_share_a_file_share_its_trail() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engines = [open(&path), open(&path), open(&path)];
    let mut writers = Vec::new();
    for (n, engine) in engines.iter().cloned().enumerate() {
        writers.push(tokio::spawn(async move {
            record_some(&engine, &format!("process-{n}"), 30).await;
        }));
    }
    // Verification goes on meanwhile, and finds nothing wrong.
    let watcher = engines[0].clone();
    let watching = tokio::spawn(async move {
        for _ in 0..20 {
            let verdict = watcher.audit().unwrap().verify(None).await.unwrap();
            assert!(verdict.is_ok(), "{verdict:?}");
        }
    });
    for writer in writers {
        writer.await.unwrap();
    }
    watching.await.unwrap();
    let head = engines[1].audit().unwrap().head().await.unwrap().unwrap();
    assert_eq!(head.seq, 90);
    assert_eq!(everbus_sqlite::kept_head(&path), Some(head));
    let verdict = engines[2].audit().unwrap().verify(None).await.unwrap();
    assert_eq!((verdict.verified, verdict.mended), (90, None));
    assert!(verdict.notes.is_empty(), "whoever came first: {verdict:?}");
}

/// Writes many records at once, as no bus would.
fn fill(path: &Path, count: u64) {
    let mut conn = Connection::open(path).unwrap();
    let transaction = conn.transaction().unwrap();
    let mut previous = AuditHash::ORIGIN;
    for seq in 1..=count {
        let content = AuditContent {
            seq,
            at: Timestamp::from_micros(seq as i64),
            actor: "a",
            action: "b",
            entity_type: None,
            entity_id: None,
            tenant: None,
            correlation_id: None,
            trace_id: None,
            details: None,
        };
        previous = content.hash(&previous);
        transaction
            .prepare_cached("INSERT INTO audit_log (seq, at, actor, action, hash) VALUES (?1, ?1, 'a', 'b', ?2)")
            .and_then(|mut s| s.execute(params![seq as i64, previous.as_bytes()]))
            .unwrap();
    }
    transaction.commit().unwrap();
}

// conformance: memory/audit-retention-live: retention and verification of a long trail go on beside each other and beside new records
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_trail_is_verified_while_it_is_shortened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    fill(&path, 6000);
    let audit = engine.audit.clone().unwrap();
    let forgetting = {
        let audit = audit.clone();
        tokio::spawn(async move { audit.forget(Timestamp::from_micros(5500)).await.unwrap() })
    };
    let recording = {
        let engine = engine.clone();
        tokio::spawn(async move { record_some(&engine, "meanwhile", 50).await })
    };
    while !forgetting.is_finished() || !recording.is_finished() {
        let verdict = audit.verify(None).await.unwrap();
        assert!(verdict.is_ok(), "{verdict:?}");
    }
    assert_eq!(forgetting.await.unwrap(), 5499);
    recording.await.unwrap();
    let verdict = audit.verify(None).await.unwrap();
    assert!(verdict.is_ok(), "{verdict:?}");
    assert_eq!((verdict.verified, verdict.first), (551, Some(5500)));
}

// conformance: memory/audit-restore: the trail of a restored backup verifies, and the head of the file it replaced is put aside
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_trail_of_a_restored_backup_verifies() {
    let mut trails = Trails::new().await;
    for file in ["whole.db", "shortened.db"] {
        let path = trails.copy(file);
        let backup = path.with_extension("backup");
        let engine = open(&path);
        let maintenance = engine.maintenance().unwrap();
        maintenance
            .backup(backup.clone(), Box::new(|_, _| {}))
            .await
            .unwrap();
        record_some(&engine, "later", 3).await;
        engine.broker.close().await.unwrap();
        let newer = std::fs::read(beside(&path)).unwrap();

        let elsewhere = path.with_extension("restored");
        everbus_sqlite::restore(&backup, &elsewhere, false, Box::new(|_, _| {})).unwrap();
        let verdict = verify(&elsewhere).await;
        assert!(verdict.is_ok() && verdict.notes.is_empty(), "{verdict:?}");

        everbus_sqlite::restore(&backup, &path, true, Box::new(|_, _| {})).unwrap();
        let verdict = verify(&path).await;
        assert!(verdict.is_ok() && verdict.notes.is_empty(), "{verdict:?}");
        assert_eq!(verdict.head.unwrap().seq, RECORDS);
        let name = beside(&path)
            .file_name()
            .unwrap()
            .to_string_lossy()
            .into_owned();
        let aside: Vec<_> = std::fs::read_dir(trails.dir.path())
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|p| {
                p.to_string_lossy()
                    .contains(&format!("{name}.before-restore-"))
            })
            .collect();
        assert_eq!(aside.len(), 1);
        assert_eq!(std::fs::read(&aside[0]).unwrap(), newer);
    }
}

// conformance: memory/audit-check: a check of the file verifies the trail too
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_of_the_file_verifies_the_trail() {
    let mut trails = Trails::new().await;
    let path = trails.copy("whole.db");
    let check = async |path: &Path| {
        let engine = open(path);
        let report = engine.maintenance().unwrap().check().await.unwrap();
        engine.broker.close().await.unwrap();
        report
    };
    let report = check(&path).await;
    assert!(report.is_ok(), "{report:?}");
    tamper(&path, |conn| {
        conn.execute_batch("UPDATE audit_log SET actor = 'm' WHERE seq = 7")
            .unwrap();
    });
    let report = check(&path).await;
    let bad: Vec<_> = report.findings.iter().filter(|f| !f.ok).collect();
    assert_eq!(bad.len(), 1, "{report:?}");
    assert_eq!(bad[0].check, "audit trail");
    assert!(bad[0].detail.contains("record 7"));
}

// conformance: memory/audit-tampered-read: a trail that was tampered with can still be read
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trail_that_was_tampered_with_can_still_be_read() {
    let mut trails = Trails::new().await;
    let path = trails.copy("whole.db");
    tamper(&path, |conn| {
        conn.execute_batch(
            "UPDATE audit_log SET details = '{not json' WHERE seq = 40;
             UPDATE audit_log SET actor = x'ff00', hash = 'text', at = 'soon' WHERE seq = 39",
        )
        .unwrap();
    });
    let engine = open(&path);
    let audit = engine.audit().unwrap();
    let items = audit.query(AuditQuery::default()).await.unwrap().items;
    assert_eq!(items.len(), 40);
    assert_eq!(items[0].entry.details, json!("{not json"));
    assert_eq!(audit.record(entry(41)).await.unwrap(), 41, "and goes on");
}

// conformance: memory/audit-refused: a trail whose tables refuse a record fails whoever records, and no publish beside it
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trail_that_refuses_records_does_no_harm_to_others() {
    let mut trails = Trails::new().await;
    let path = trails.copy("whole.db");
    let engine = open(&path);
    Connection::open(&path)
        .unwrap()
        .execute_batch(
            "CREATE TRIGGER mine BEFORE INSERT ON audit_log BEGIN SELECT RAISE(ABORT, 'mine'); END;
             CREATE TRIGGER mine_too BEFORE DELETE ON audit_log BEGIN SELECT RAISE(ABORT, 'mine'); END",
        )
        .unwrap();
    let audit = engine.audit().unwrap();
    for _ in 0..20 {
        // Queued together, so that they meet in one transaction.
        let (recorded, forgotten, _) = tokio::join!(
            audit.record(entry(1)),
            audit.forget(Timestamp::from_micros(1_030_000_000)),
            crate::publish(&engine, "a.b"),
        );
        for error in [recorded.unwrap_err(), forgotten.unwrap_err()] {
            assert_eq!(error.code(), Code::InvalidSetting, "{error}");
            assert!(error.hint_text().unwrap().contains("audit verify"));
        }
    }
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("DROP TRIGGER mine; DROP TRIGGER mine_too")
        .unwrap();
    let verdict = audit.verify(None).await.unwrap();
    assert!(verdict.is_ok() && verdict.verified == 40, "{verdict:?}");
}
