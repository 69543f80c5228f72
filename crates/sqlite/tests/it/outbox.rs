//! The outbox: its tables, what may stand in them, and who relays.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Clock as _, Code, Engine, Event, EventId, ManualClock, OutboxRow, OutboxSource, RelayLease,
    RowOutcome, Timestamp, TraceContext, Verdict,
};
use everbus_sqlite::outbox::{Outbox, OutboxOptions, forget_sent};
use rusqlite::Connection;
use serde_json::json;

use crate::{PATIENCE, clock, consume, declare, eventually, failure, fetch, open, settle};

const LEASE: Duration = Duration::from_secs(10);

/// A database of another program, with an outbox.
pub(crate) struct Shop {
    path: PathBuf,
    pub(crate) db: Connection,
    pub(crate) clock: ManualClock,
    _dir: tempfile::TempDir,
}

impl Shop {
    pub(crate) fn new() -> Self {
        Self::with_journal("DELETE")
    }

    fn with_journal(mode: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shop.db");
        let db = Connection::open(&path).unwrap();
        db.pragma_update(None, "journal_mode", mode).unwrap();
        db.execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY, status TEXT)")
            .unwrap();
        Outbox::create_tables(&db).unwrap();
        Self {
            path,
            db,
            clock: clock().0,
            _dir: dir,
        }
    }

    pub(crate) fn source(&self) -> Arc<dyn OutboxSource> {
        let options = OutboxOptions {
            clock: Arc::new(self.clock.clone()),
            ..OutboxOptions::default()
        };
        Outbox::open_with(&self.path, options).unwrap()
    }

    pub(crate) fn text(&self, sql: &str) -> String {
        text(&self.db, sql)
    }
}

pub(crate) fn text(db: &Connection, sql: &str) -> String {
    db.query_row(sql, [], |r| {
        Ok(match r.get_ref(0)? {
            rusqlite::types::ValueRef::Null => "NULL".to_owned(),
            rusqlite::types::ValueRef::Integer(n) => n.to_string(),
            other => String::from_utf8_lossy(other.as_bytes().unwrap()).into_owned(),
        })
    })
    .unwrap_or_else(|e| panic!("{sql}: {e}"))
}

pub(crate) fn event(key: Option<&str>, n: u32) -> Event {
    let builder = Event::builder("order.placed").json(&json!({ "n": n }));
    match key {
        Some(key) => builder.key(key),
        None => builder,
    }
    .build()
    .unwrap()
}

pub(crate) async fn lease(source: &Arc<dyn OutboxSource>, holder: &str) -> RelayLease {
    let lease = source.acquire(holder.into(), LEASE).await.unwrap();
    lease.expect("the lease is free")
}

pub(crate) async fn ready(source: &Arc<dyn OutboxSource>) -> Vec<OutboxRow> {
    source.claim(0, 1000).await.unwrap().rows
}

fn numbers(rows: &[OutboxRow]) -> Vec<u64> {
    let number = |row: &OutboxRow| {
        let value: serde_json::Value = row.event.as_ref().unwrap().json().unwrap();
        value["n"].as_u64().unwrap()
    };
    rows.iter().map(number).collect()
}

fn rejected(row: OutboxRow, seconds: u64) -> (OutboxRow, RowOutcome) {
    let outcome = RowOutcome::Rejected {
        error: "no".into(),
        after: Duration::from_secs(seconds),
    };
    (row, outcome)
}

// conformance: outbox/2-table: table event_outbox with id, event_id, event_type, payload, status, attempts, created_at, sent_at
// conformance: framework/outbox-table: the outbox table of the specification, its names in a view
#[test]
fn the_table_has_the_columns_of_both_specifications_and_their_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("bus.db"));
    let own = Connection::open(dir.path().join("bus.db")).unwrap();
    let shop = Shop::new();
    for db in [&own, &shop.db] {
        let columns = |table: &str| {
            text(
                db,
                &format!("SELECT group_concat(name, ' ') FROM pragma_table_info('{table}')"),
            )
        };
        assert!(
            columns("event_outbox").starts_with(
                "id event_id event_type payload status attempts created_at sent_at correlation_id \
                 trace_id last_error"
            ),
            "{}",
            columns("event_outbox")
        );
        assert_eq!(
            columns("event_outbox_framework"),
            "id event_type event_payload created_at published_at correlation_id trace_id attempts \
             last_error"
        );
        // As the framework writes it, with SQLite's word for now.
        db.execute_batch(
            "INSERT INTO event_outbox (event_type, payload, created_at)
               VALUES ('order.confirmed', '{\"order_id\": 123}', datetime('now'));",
        )
        .unwrap();
        let row = "SELECT status || ' ' || attempts || ' ' || length(id) || ' ' || length(event_id)
                   || ' ' || (id <> event_id) FROM event_outbox";
        assert_eq!(text(db, row), "pending 0 36 36 1");
        let unpublished = "SELECT count(*) FROM event_outbox_framework
                           WHERE published_at IS NULL AND attempts < 5";
        assert_eq!(text(db, unpublished), "1");
        let status = db.execute("UPDATE event_outbox SET status = 'lost'", []);
        assert!(status.is_err(), "there are three states");
    }
    drop(engine);
}

#[test]
fn tables_are_made_once_and_only_where_they_are_missing() {
    let shop = Shop::new();
    Outbox::new().enqueue(&shop.db, event(None, 1)).unwrap();
    Outbox::create_tables(&shop.db).unwrap();
    assert_eq!(shop.text("SELECT count(*) FROM event_outbox"), "1");
    assert_eq!(shop.text("SELECT count(*) FROM dead_letter_events"), "0");
    let empty = Connection::open_in_memory().unwrap();
    let error = Outbox::new().enqueue(&empty, event(None, 1)).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.hint_text().unwrap().contains("create_tables"));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("empty.db");
    Connection::open(&path)
        .unwrap()
        .execute_batch("CREATE TABLE t (x)")
        .unwrap();
    let Err(error) = Outbox::open(&path) else {
        panic!("there is no outbox");
    };
    assert_eq!(error.code(), Code::NotFound);
    let Err(error) = Outbox::open(dir.path().join("none.db")) else {
        panic!("there is no file");
    };
    assert_eq!(error.code(), Code::NoSuchFile);
}

// conformance: outbox/2-after-write: events are persisted to the outbox with the business write, in one transaction
// conformance: framework/outbox-transaction: business data and event are written in a single transaction
#[tokio::test]
async fn an_event_is_there_if_and_only_if_the_transaction_committed() {
    for mode in ["DELETE", "WAL"] {
        let mut shop = Shop::with_journal(mode);
        let source = shop.source();
        let tx = shop.db.transaction().unwrap();
        tx.execute("INSERT INTO orders VALUES (1, 'confirmed')", [])
            .unwrap();
        Outbox::new().enqueue(&tx, event(None, 1)).unwrap();
        tx.rollback().unwrap();
        assert!(ready(&source).await.is_empty());
        let tx = shop.db.transaction().unwrap();
        tx.execute("INSERT INTO orders VALUES (2, 'confirmed')", [])
            .unwrap();
        let ids = Outbox::new()
            .enqueue_batch(&tx, [event(None, 2), event(None, 3)])
            .unwrap();
        tx.commit().unwrap();
        let rows = ready(&source).await;
        assert_eq!(numbers(&rows), [2, 3]);
        let found = rows.iter().map(|row| row.event.as_ref().unwrap().id());
        assert_eq!(found.collect::<Vec<_>>(), ids);
    }
}

// conformance: outbox/6-stored: the correlation id is stored in the envelope, and defaults to the event_id
#[test]
fn the_envelope_and_the_columns_carry_correlation_and_trace() {
    let shop = Shop::new();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let related = Event::builder("order.placed")
        .correlation_id("request-7")
        .trace(TraceContext::parse(trace, None).unwrap())
        .tenant("acme")
        .build()
        .unwrap();
    let id = Outbox::new().enqueue(&shop.db, related).unwrap();
    let row = |what: &str| {
        shop.text(&format!(
            "SELECT {what} FROM event_outbox WHERE event_id = '{id}'"
        ))
    };
    assert_eq!(row("payload ->> '$.correlation_id'"), "request-7");
    assert_eq!(row("payload ->> '$.tenant_id'"), "acme");
    assert_eq!(row("correlation_id"), "request-7");
    assert_eq!(row("trace_id"), "0af7651916cd43dd8448eb211c80319c");
    let id = Outbox::new().enqueue(&shop.db, event(None, 1)).unwrap();
    assert_eq!(
        shop.text("SELECT payload ->> '$.correlation_id' FROM event_outbox ORDER BY row DESC"),
        id.to_string()
    );
}

#[test]
fn the_same_event_waits_once_and_another_body_is_refused() {
    let shop = Shop::new();
    let first = event(None, 1);
    for _ in 0..2 {
        Outbox::new().enqueue(&shop.db, first.clone()).unwrap();
    }
    assert_eq!(shop.text("SELECT count(*) FROM event_outbox"), "1");
    let other = Event::builder("order.placed")
        .id(first.id())
        .json(&2)
        .build();
    let error = Outbox::new().enqueue(&shop.db, other.unwrap()).unwrap_err();
    assert_eq!(error.code(), Code::IdReused);
    // Ids are unique per tenant.
    let other = Event::builder("order.placed")
        .id(first.id())
        .tenant("acme")
        .build();
    Outbox::new().enqueue(&shop.db, other.unwrap()).unwrap();
    assert_eq!(shop.text("SELECT count(*) FROM event_outbox"), "2");
    shop.db
        .execute("DELETE FROM event_outbox WHERE row > 1", [])
        .unwrap();
    // Once it has had its turn, it may go again.
    shop.db
        .execute("UPDATE event_outbox SET status = 'sent', sent_at = 'x'", [])
        .unwrap();
    Outbox::new().enqueue(&shop.db, first).unwrap();
    assert_eq!(
        shop.text("SELECT group_concat(status) FROM event_outbox"),
        "pending"
    );
}

// conformance: memory/outbox-raw: an object with event_id, occurred_at and payload is an envelope, any other JSON is the payload itself
// conformance: memory/outbox-foreign-ids: an event_id that is no UUID is mapped, and shown again
#[tokio::test]
async fn rows_of_other_programs_are_read_as_they_mean_it() {
    let shop = Shop::new();
    let insert = |event_id: &str, payload: &str| {
        shop.db
            .execute(
                "INSERT INTO event_outbox (event_id, event_type, payload, created_at, correlation_id, trace_id, ordering_key)
                 VALUES (?1, 'TelemetryWindowClosed', ?2, '2026-03-01 12:00:00', 'c-1', '0AF7651916CD43DD8448EB211C80319C', 'k')",
                [event_id, payload],
            )
            .unwrap();
    };
    let uuid = EventId::new().to_string();
    insert(&uuid, r#" {"order_id": 123} "#);
    insert("order-1", "[1,2,3]");
    insert("order-2", r#"{"event_id":"order-2","payload":1}"#);
    insert(
        "order-3",
        r#"{"event_id":"order-3","occurred_at":"2026-02-01T00:00:00Z","correlation_id":"c-9","tenant_id":"t","station_id":"s","schema_version":2,"payload":{"a":1},"more":true}"#,
    );
    insert(
        "order-4",
        r#"{"event_id":"order-4","occurred_at":"2026-02-01T00:00:00Z","payload":null}"#,
    );
    let rows = ready(&shop.source()).await;
    let events: Vec<&Event> = rows.iter().map(|r| r.event.as_ref().unwrap()).collect();
    assert_eq!(events[0].id().to_string(), uuid);
    assert_eq!(&events[0].payload()[..], br#" {"order_id": 123} "#);
    let at: Timestamp = "2026-03-01T12:00:00Z".parse().unwrap();
    assert_eq!(events[0].occurred_at(), at);
    assert_eq!(events[0].correlation_id(), "c-1");
    for event in &events {
        let trace = event.attributes().unwrap().trace.as_ref().unwrap();
        assert_eq!(trace.trace_id(), Some("0af7651916cd43dd8448eb211c80319c"));
        assert_eq!(event.ordering_key().as_deref(), Some("k"));
        assert_eq!(event.event_type(), "TelemetryWindowClosed");
    }
    assert_eq!(&events[1].payload()[..], b"[1,2,3]");
    assert_eq!(events[1].id(), EventId::from_foreign("", "order-1"));
    assert_eq!(events[1].display_id(), "order-1");
    assert_eq!(
        &events[2].payload()[..],
        br#"{"event_id":"order-2","payload":1}"#
    );
    assert_eq!(&events[3].payload()[..], br#"{"a":1}"#);
    assert_eq!((events[3].version(), events[3].tenant()), (2, Some("t")));
    assert_eq!(events[3].correlation_id(), "c-9");
    assert_eq!(events[3].metadata()["station_id"], "s");
    assert_eq!(events[4].correlation_id(), "c-1", "the envelope says none");
    assert_eq!(&events[4].payload()[..], b"null");
}

// conformance: memory/outbox-bad-row: a row whose payload does not parse is that row's trouble: it has an error, the others go on
#[tokio::test]
async fn a_row_that_cannot_be_read_stops_no_other_row() {
    let shop = Shop::new();
    let bad: [(&str, &dyn rusqlite::ToSql, &str); 8] = [
        ("a.b", &"{\"a\":", "2026-03-01 12:00:00"),
        ("a.b", &"", "2026-03-01 12:00:00"),
        ("a.b", &vec![0xff_u8, 0xfe], "2026-03-01 12:00:00"),
        (
            "a.b",
            &"{\"event_id\":\"\",\"occurred_at\":\"x\",\"payload\":1}",
            "2026-03-01 12:00:00",
        ),
        ("a.*", &"1", "2026-03-01 12:00:00"),
        ("", &"1", "2026-03-01 12:00:00"),
        ("a.b", &"1", "soon"),
        (
            "a.b",
            &"{\"event_id\":\"e\",\"occurred_at\":\"2026-03-01T12:00:00Z\",\"event_id\":\"f\",\"payload\":1}",
            "2026-03-01 12:00:00",
        ),
    ];
    for (event_type, payload, created_at) in bad {
        shop.db
            .execute(
                "INSERT INTO event_outbox (event_type, payload, created_at) VALUES (?1, ?2, ?3)",
                rusqlite::params![event_type, payload, created_at],
            )
            .unwrap();
    }
    let good = Outbox::new().enqueue(&shop.db, event(None, 1)).unwrap();
    let mut changed = event(None, 2);
    changed = Event::builder("a.b")
        .key("k")
        .id(changed.id())
        .build()
        .unwrap();
    Outbox::new().enqueue(&shop.db, changed).unwrap();
    shop.db
        .execute(
            "UPDATE event_outbox SET attributes = '{' WHERE ordering_key = 'k'",
            [],
        )
        .unwrap();
    let rows = ready(&shop.source()).await;
    assert_eq!(rows.len(), 10);
    for row in &rows[..8] {
        let error = row.event.as_ref().unwrap_err();
        assert!(
            matches!(
                error.code(),
                Code::InvalidPayloadError | Code::InvalidAttribute | Code::InvalidType
            ),
            "{error}"
        );
    }
    assert_eq!(rows[8].event.as_ref().unwrap().id(), good);
    assert_eq!(
        rows[9].event.as_ref().unwrap_err().code(),
        Code::InvalidPayloadError
    );
}

// conformance: memory/outbox-key-order: a rejected row holds back later rows of its key and no others
#[tokio::test]
async fn a_row_that_waits_holds_back_its_key_only() {
    let shop = Shop::new();
    for (n, key) in [
        (1, Some("a")),
        (2, Some("a")),
        (3, Some("b")),
        (4, None),
        (5, Some("a")),
    ] {
        Outbox::new().enqueue(&shop.db, event(key, n)).unwrap();
    }
    let source = shop.source();
    let lease = lease(&source, "me").await;
    let rows = ready(&source).await;
    assert_eq!(numbers(&rows), [1, 2, 3, 4, 5]);
    let waits = rejected(rows[1].clone(), 4);
    source.settle(lease.clone(), vec![waits]).await.unwrap();
    let claimed = source.claim(0, 100).await.unwrap();
    assert_eq!(numbers(&claimed.rows), [1, 3, 4]);
    let due = shop.clock.now().plus(Duration::from_secs(4));
    assert_eq!(claimed.next_due, Some(due));
    assert_eq!(
        shop.text("SELECT attempts || last_error || status FROM event_outbox WHERE row = 2"),
        "1nopending"
    );
    shop.clock.advance(Duration::from_secs(4));
    assert_eq!(numbers(&ready(&source).await), [1, 2, 3, 4, 5]);
    assert_eq!(ready(&source).await[1].attempts, 1);
    let page = source.claim(2, 2).await.unwrap();
    assert_eq!(numbers(&page.rows), [3, 4]);
    assert!(page.more);
}

// conformance: memory/outbox-clock-back: a clock that jumps back stalls neither rows that wait nor the lease
#[tokio::test]
async fn a_clock_that_jumps_back_stalls_nothing() {
    let shop = Shop::new();
    Outbox::new()
        .enqueue(&shop.db, event(Some("a"), 1))
        .unwrap();
    Outbox::new()
        .enqueue(&shop.db, event(Some("a"), 2))
        .unwrap();
    let source = shop.source();
    let first = lease(&source, "one").await;
    let row = ready(&source).await.remove(0);
    source
        .settle(first.clone(), vec![rejected(row, 8)])
        .await
        .unwrap();
    assert!(ready(&source).await.is_empty());
    assert!(source.acquire("two".into(), LEASE).await.unwrap().is_none());
    shop.clock
        .set(shop.clock.now().minus(Duration::from_secs(3600)));
    assert_eq!(
        numbers(&ready(&source).await),
        [1, 2],
        "an hour is no wait of ours"
    );
    let second = lease(&source, "two").await;
    assert_ne!(first.token, second.token);
    // A short way back only makes it a little longer.
    source.release(second).await.unwrap();
    let third = lease(&source, "three").await;
    shop.clock
        .set(shop.clock.now().minus(Duration::from_secs(5)));
    assert!(
        source
            .acquire("four".into(), LEASE)
            .await
            .unwrap()
            .is_none()
    );
    shop.clock.advance(Duration::from_secs(16));
    assert_ne!(lease(&source, "four").await.token, third.token);
}

// conformance: memory/outbox-lease: one relay holds the lease, others stand by; whoever lost it changes nothing
// conformance: framework/outbox-skip-locked: one relay holds the lease, others stand by; whoever lost it changes nothing
#[tokio::test]
async fn a_relay_that_lost_its_lease_changes_nothing() {
    let shop = Shop::new();
    Outbox::new().enqueue(&shop.db, event(None, 1)).unwrap();
    let (one, two) = (shop.source(), shop.source());
    let old = lease(&one, "one").await;
    assert_eq!(lease(&one, "one").await, old, "renewed");
    assert!(two.acquire("two".into(), LEASE).await.unwrap().is_none());
    assert_eq!(one.status().await.unwrap().relay.as_deref(), Some("one"));
    let row = ready(&one).await.remove(0);
    shop.clock.advance(LEASE);
    // It is over, but no other relay has it.
    let later = rejected(row.clone(), 0);
    one.settle(old.clone(), vec![later]).await.unwrap();
    let new = lease(&two, "two").await;
    for outcome in [RowOutcome::Sent, RowOutcome::Failed { error: "x".into() }] {
        let late = one.settle(old.clone(), vec![(row.clone(), outcome)]).await;
        assert_eq!(late.unwrap_err().code(), Code::LeaseLost);
    }
    assert_eq!(
        shop.text("SELECT status || attempts FROM event_outbox"),
        "pending1"
    );
    one.release(old).await.unwrap();
    assert!(
        one.acquire("one".into(), LEASE).await.unwrap().is_none(),
        "only its own is given back"
    );
    two.settle(new.clone(), vec![(row, RowOutcome::Sent)])
        .await
        .unwrap();
    assert_eq!(
        shop.text("SELECT status || (sent_at IS NOT NULL) FROM event_outbox"),
        "sent1"
    );
    two.release(new).await.unwrap();
    assert_eq!(two.status().await.unwrap().relay, None);
    lease(&one, "one").await;
    let endless = one.acquire("one".into(), Duration::from_secs(61)).await;
    assert_eq!(endless.unwrap_err().code(), Code::InvalidSetting);
}

// conformance: outbox/2-status: pending, sent and failed are the states of a row
// conformance: outbox/4-fields: a dead letter of the outbox has event_id, event_type, payload, error, first_seen_at, last_seen_at, attempts
// conformance: outbox/4-attempts: a row that fails again adds its attempts to the dead letter
#[tokio::test]
async fn a_row_that_fails_has_a_dead_letter_and_can_be_retried() {
    let shop = Shop::new();
    let id = Outbox::new().enqueue(&shop.db, event(None, 1)).unwrap();
    Outbox::new().enqueue(&shop.db, event(None, 2)).unwrap();
    let source = shop.source();
    let lease = lease(&source, "me").await;
    let fail = async || {
        let row = ready(&source).await.remove(0);
        let failed = RowOutcome::Failed {
            error: "no schema".into(),
        };
        source
            .settle(lease.clone(), vec![(row, failed)])
            .await
            .unwrap();
    };
    fail().await;
    let letter = || {
        shop.text(
            "SELECT event_id || '|' || event_type || '|' || (payload ->> '$.payload.n') || '|' || error
             || '|' || attempts || '|' || (first_seen_at < last_seen_at) || '|' || (retried_at IS NULL)
             FROM dead_letter_events",
        )
    };
    assert_eq!(letter(), format!("{id}|order.placed|1|no schema|1|0|1"));
    let status = source.status().await.unwrap();
    assert_eq!((status.pending, status.failed, status.sent), (1, 1, 0));
    assert_eq!(status.last_error.as_deref(), Some("no schema"));
    let failed = source.failed(10).await.unwrap();
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0].event_id, id.to_string());

    shop.clock.advance(Duration::from_secs(5));
    let none = source.retry(Some(vec!["nobody".into()])).await.unwrap();
    assert_eq!(none, 0);
    assert_eq!(source.retry(Some(vec![id.to_string()])).await.unwrap(), 1);
    assert!(letter().ends_with("|0"), "it was retried: {}", letter());
    assert_eq!(numbers(&ready(&source).await), [1, 2], "in its old place");
    fail().await;
    assert_eq!(letter(), format!("{id}|order.placed|1|no schema|2|1|1"));
    assert_eq!(source.retry(None).await.unwrap(), 1);
    let row = ready(&source).await.remove(0);
    source
        .settle(lease.clone(), vec![(row, RowOutcome::Sent)])
        .await
        .unwrap();
    assert!(letter().ends_with("|0"));
}

// conformance: outbox/5-replay: a dead letter is re-inserted into the outbox by the SQL of the specification
#[tokio::test]
async fn the_replay_of_the_specification_works_on_a_database_of_ones_own() {
    let shop = Shop::new();
    let id = Outbox::new()
        .enqueue(&shop.db, event(Some("k"), 1))
        .unwrap();
    let source = shop.source();
    let lease = lease(&source, "me").await;
    for round in 1..=2 {
        let row = ready(&source).await.remove(0);
        let failed = RowOutcome::Failed { error: "no".into() };
        source
            .settle(lease.clone(), vec![(row, failed)])
            .await
            .unwrap();
        assert!(ready(&source).await.is_empty());
        // Twice: the second finds that it waits already.
        for _ in 0..2 {
            shop.db.execute_batch(&replay(&id.to_string())).unwrap();
        }
        let rows = ready(&source).await;
        assert_eq!(rows.len(), 1, "round {round}");
        assert_eq!(rows[0].id, format!("{id}-replay"));
        let event = rows[0].event.as_ref().unwrap();
        assert_eq!(event.id(), id);
        assert_eq!(&event.payload()[..], br#"{"n":1}"#);
    }
}

/// The example of the specification, as it stands there.
fn replay(id: &str) -> String {
    "INSERT INTO event_outbox (id, event_id, event_type, payload, status, attempts)
SELECT event_id || '-replay', event_id, event_type, payload, 'pending', 0
FROM dead_letter_events
WHERE event_id = '...';"
        .replace("...", id)
}

async fn die(engine: &Engine, groups: &[&str]) {
    for group in groups {
        let mut consumer = consume(engine, group).await;
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        let dead = Verdict::Dead {
            failure: Some(failure("no stock")),
        };
        settle(engine, &delivery, dead).await;
        consumer.close().await.unwrap();
    }
}

// conformance: outbox/4-marks-failed: when a handler fails for good, the outbox record is marked as failed
// conformance: memory/outbox-dead-letter-fails: a dead letter that appears later in the same database sets failed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_in_the_same_file_shows_in_the_outbox() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bus.db");
    let engine = open(&path);
    let db = Connection::open(&path).unwrap();
    let source = engine.outbox().unwrap();
    let lease = lease(&source, "me").await;
    declare(&engine, "g", "order.*").await;
    let status = || {
        text(
            &db,
            "SELECT status || ' ' || coalesce(last_error, '') FROM event_outbox",
        )
    };
    let relay = async |marked: bool| {
        let row = ready(&source).await.remove(0);
        let event = row.event.clone().unwrap();
        engine.broker.append(vec![event]).await.unwrap();
        if marked {
            source
                .settle(lease.clone(), vec![(row, RowOutcome::Sent)])
                .await
                .unwrap();
            None
        } else {
            Some(row)
        }
    };
    // After the row was marked.
    Outbox::new().enqueue(&db, event(None, 1)).unwrap();
    relay(true).await;
    assert_eq!(status(), "sent ");
    die(&engine, &["g"]).await;
    assert_eq!(status(), "failed no stock");
    // Again, when it is retried and dies again.
    db.execute(
        "UPDATE event_outbox SET status = 'sent', last_error = NULL",
        [],
    )
    .unwrap();
    let letters = engine.dead_letters().unwrap();
    letters.retry(Default::default()).await.unwrap();
    assert_eq!(status(), "sent ");
    die(&engine, &["g"]).await;
    assert_eq!(status(), "failed no stock");
    // Before the row was marked.
    db.execute("DELETE FROM event_outbox", []).unwrap();
    Outbox::new().enqueue(&db, event(None, 2)).unwrap();
    let row = relay(false).await.unwrap();
    die(&engine, &["g"]).await;
    assert_eq!(status(), "pending ");
    source
        .settle(lease.clone(), vec![(row, RowOutcome::Sent)])
        .await
        .unwrap();
    assert_eq!(status(), "failed no stock");
    // Under the id that the row came with.
    db.execute("DELETE FROM event_outbox", []).unwrap();
    let foreign = Event::builder("order.placed")
        .source("s")
        .foreign_id("o-1")
        .build();
    Outbox::new().enqueue(&db, foreign.unwrap()).unwrap();
    relay(true).await;
    die(&engine, &["g"]).await;
    assert_eq!(status(), "failed no stock");
    engine.broker.close().await.unwrap();
}

#[tokio::test]
async fn sent_rows_are_forgotten_by_their_age_and_no_others() {
    let shop = Shop::new();
    let source = shop.source();
    let lease = lease(&source, "me").await;
    for n in 0..6 {
        Outbox::new().enqueue(&shop.db, event(None, n)).unwrap();
    }
    let mut rows = ready(&source).await.into_iter();
    for _ in 0..4 {
        let row = rows.next().unwrap();
        source
            .settle(lease.clone(), vec![(row, RowOutcome::Sent)])
            .await
            .unwrap();
        shop.clock.advance(Duration::from_secs(1));
    }
    let failed = RowOutcome::Failed { error: "no".into() };
    source
        .settle(lease.clone(), vec![(rows.next().unwrap(), failed)])
        .await
        .unwrap();
    let before = shop.clock.now().minus(Duration::from_secs(1));
    assert_eq!(forget_sent(&shop.db, before, 2).unwrap(), 2);
    assert_eq!(forget_sent(&shop.db, before, 2).unwrap(), 1);
    assert_eq!(forget_sent(&shop.db, before, 2).unwrap(), 0);
    assert_eq!(
        shop.text("SELECT group_concat(status) FROM event_outbox"),
        "sent,failed,pending"
    );
    let plan = shop
        .db
        .prepare("EXPLAIN QUERY PLAN SELECT row FROM event_outbox WHERE status = 'sent' AND sent_at < ?1 ORDER BY sent_at LIMIT ?2")
        .unwrap()
        .query_map(("x", 1), |r| r.get::<_, String>(3))
        .unwrap()
        .map(Result::unwrap)
        .collect::<Vec<_>>()
        .join("; ");
    assert!(plan.contains("event_outbox_sent"), "{plan}");
}

// conformance: memory/outbox-wake: an enqueue in this process wakes the relay, a commit of another is noticed by polling
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_ends_with_a_commit_here_or_elsewhere() {
    for mode in ["DELETE", "WAL"] {
        let shop = Shop::with_journal(mode);
        let source = shop.source();
        let long = Duration::from_secs(3600);
        let woken = async |what: &str| {
            let wait = tokio::time::timeout(PATIENCE, source.wait(long));
            assert!(wait.await.is_ok(), "{what}");
        };
        assert!(ready(&source).await.is_empty());
        Outbox::new().enqueue(&shop.db, event(None, 1)).unwrap();
        woken("an enqueue").await;
        assert_eq!(ready(&source).await.len(), 1);
        shop.db
            .execute(
                "INSERT INTO event_outbox (event_type, payload) VALUES ('a.b', '1')",
                [],
            )
            .unwrap();
        woken("a row by hand").await;
        assert_eq!(ready(&source).await.len(), 2);
        let clock = shop.clock.clone();
        let jump = tokio::spawn(async move {
            tokio::task::yield_now().await;
            clock.advance(Duration::from_secs(1));
        });
        woken("a clock that jumps").await;
        jump.await.unwrap();
        let quiet = Duration::from_millis(20);
        eventually("nothing is left to notice", async || {
            ready(&source).await;
            tokio::time::timeout(quiet, source.wait(long))
                .await
                .is_err()
        })
        .await;
    }
}

#[tokio::test]
async fn a_batch_is_bounded_by_its_bytes() {
    let shop = Shop::new();
    let large = "x".repeat(3 << 20);
    for _ in 0..5 {
        let event = Event::builder("a.b").json(&large).build().unwrap();
        Outbox::new().enqueue(&shop.db, event).unwrap();
    }
    let claimed = shop.source().claim(0, 100).await.unwrap();
    assert_eq!(claimed.rows.len(), 3);
    assert!(claimed.more);
}

// conformance: operations/relay-dead-holder: the lease of a relay whose process is gone is taken over at once; that of one that lives is not
#[tokio::test]
async fn the_lease_of_a_dead_relay_is_not_waited_for() {
    let shop = Shop::new();
    let (dead, next) = (shop.source(), shop.source());
    let first = dead.acquire("one".into(), LEASE).await.unwrap().unwrap();
    assert!(next.acquire("two".into(), LEASE).await.unwrap().is_none());
    // Its process ends without a word: the operating system frees its lock.
    drop(dead);
    let second = next.acquire("two".into(), LEASE).await.unwrap().unwrap();
    assert!(second.token > first.token);
    let late = shop.source();
    assert!(late.acquire("three".into(), LEASE).await.unwrap().is_none());
}
