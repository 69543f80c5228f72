//! The outbox: its tables, what may stand in them, and who relays.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Clock as _, Code, ConsumeOptions, DeadLetterFilter, Event, GroupName, GroupSpec, ManualClock,
    OutboxKeep, OutboxRow, OutboxSource, Pattern, RelayLease, Retention, RowOutcome, Settlement,
    StartFrom, SubscriptionSpec, TraceContext, Verdict,
};
use everbus_postgres::outbox::Outbox;
use everbus_postgres::tokio_postgres::{Client, NoTls};
use everbus_testkit::servers::Postgres;
use serde_json::json;

use crate::support::{fresh_schema, open, options};

const LEASE: Duration = Duration::from_secs(10);
/// For what must happen, also on a slow machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A database of another program, with an outbox.
struct Shop {
    url: String,
    db: Client,
    clock: ManualClock,
}

async fn connect(url: &str) -> Client {
    let base = url.split('?').next().unwrap();
    let (client, connection) = everbus_postgres::tokio_postgres::connect(base, NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    client
}

impl Shop {
    async fn new() -> Option<Self> {
        let url = Postgres::shared()?.fresh_database();
        let db = connect(&url).await;
        db.batch_execute("CREATE TABLE orders (id integer PRIMARY KEY, status text)")
            .await
            .unwrap();
        Outbox::create_tables(&db).await.unwrap();
        let clock = ManualClock::default();
        Some(Self { url, db, clock })
    }

    async fn source(&self) -> Arc<dyn OutboxSource> {
        Outbox::open(&self.url, options(Arc::new(self.clock.clone())))
            .await
            .unwrap()
    }

    async fn enqueue(&self, event: Event) {
        Outbox::new().enqueue(&self.db, event).await.unwrap();
    }

    async fn text(&self, sql: &str) -> String {
        text(&self.db, sql).await
    }
}

async fn text(db: &Client, sql: &str) -> String {
    let sql = format!("SELECT coalesce(({sql})::text, 'NULL')");
    let row = db
        .query_one(&sql, &[])
        .await
        .unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    row.get(0)
}

fn event(key: Option<&str>, n: u32) -> Event {
    let builder = Event::builder("order.placed").json(&json!({ "n": n }));
    match key {
        Some(key) => builder.key(key),
        None => builder,
    }
    .build()
    .unwrap()
}

async fn lease(source: &Arc<dyn OutboxSource>, holder: &str) -> RelayLease {
    let lease = source.acquire(holder.into(), LEASE).await.unwrap();
    lease.expect("the lease is free")
}

async fn ready(source: &Arc<dyn OutboxSource>) -> Vec<OutboxRow> {
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

// conformance: outbox/2-postgres: the table is in the database of the service: its inserts join a transaction with the service's own rows, and a row is pending, failed or sent
// conformance: engines/postgres-outbox-inserts: both insert statements of the specifications work as written on PostgreSQL, NOW() included
// needs: PostgreSQL
#[tokio::test]
async fn the_statements_of_the_specifications_work_as_written() {
    let Some(shop) = Shop::new().await else {
        return;
    };
    // *framework*.
    shop.db
        .batch_execute(
            r#"BEGIN;
               INSERT INTO orders VALUES (123, 'confirmed');
               INSERT INTO event_outbox (event_type, payload, created_at)
                 VALUES ('order.confirmed', '{"order_id": 123}', NOW());
               COMMIT"#,
        )
        .await
        .unwrap();
    let row = "SELECT status || ' ' || attempts || ' ' || length(id) || ' ' || length(event_id)
               || ' ' || (id <> event_id) FROM event_outbox";
    assert_eq!(shop.text(row).await, "pending 0 36 36 true");
    let unpublished = "SELECT count(*) FROM event_outbox_framework
                       WHERE published_at IS NULL AND attempts < 5 AND event_payload IS NOT NULL";
    assert_eq!(shop.text(unpublished).await, "1");
    let source = shop.source().await;
    let rows = ready(&source).await;
    let sent = rows[0].event.as_ref().unwrap();
    assert_eq!(sent.event_type(), "order.confirmed");
    assert_eq!(&sent.payload()[..], br#"{"order_id": 123}"#);
    // *outbox*: the row fails, and its dead letter is inserted again.
    let mine = lease(&source, "me").await;
    let failed = RowOutcome::Failed { error: "no".into() };
    source
        .settle(mine.clone(), vec![(rows[0].clone(), failed)])
        .await
        .unwrap();
    let id = rows[0].event_id.clone();
    let replay = format!(
        "INSERT INTO event_outbox (id, event_id, event_type, payload, status, attempts)
         SELECT event_id || '-replay', event_id, event_type, payload, 'pending', 0
         FROM dead_letter_events
         WHERE event_id = '{id}';"
    );
    shop.db.batch_execute(&replay).await.unwrap();
    let again = ready(&source).await;
    assert_eq!(
        (again.len(), again[0].id.as_str()),
        (1, format!("{id}-replay").as_str())
    );
    assert_eq!(
        again[0].event.as_ref().unwrap().id(),
        sent.id(),
        "the same event"
    );
    source
        .settle(mine, vec![(again[0].clone(), RowOutcome::Sent)])
        .await
        .unwrap();
    assert_eq!(
        source.dead_letters().await.unwrap(),
        0,
        "it was sent after all"
    );
    // Sent, it may be replayed once more under the same id.
    shop.db.batch_execute(&replay).await.unwrap();
    assert_eq!(ready(&source).await.len(), 1);
    let refused = shop
        .db
        .batch_execute("UPDATE event_outbox SET status = 'lost'")
        .await;
    assert!(refused.is_err(), "there are three states");
}

// conformance: engines/postgres-outbox-transaction: on PostgreSQL an event is relayed if and only if the transaction that enqueued it commits
// needs: PostgreSQL
#[tokio::test]
async fn an_event_is_there_if_and_only_if_the_transaction_committed() {
    let Some(mut shop) = Shop::new().await else {
        return;
    };
    let source = shop.source().await;
    let tx = shop.db.transaction().await.unwrap();
    tx.batch_execute("INSERT INTO orders VALUES (1, 'confirmed')")
        .await
        .unwrap();
    Outbox::new().enqueue(&tx, event(None, 1)).await.unwrap();
    assert!(ready(&source).await.is_empty(), "not before the commit");
    tx.rollback().await.unwrap();
    assert!(ready(&source).await.is_empty());
    let tx = shop.db.transaction().await.unwrap();
    tx.batch_execute("INSERT INTO orders VALUES (2, 'confirmed')")
        .await
        .unwrap();
    let ids = Outbox::new()
        .enqueue_batch(&tx, [event(None, 2), event(None, 3)])
        .await
        .unwrap();
    tx.commit().await.unwrap();
    let rows = ready(&source).await;
    assert_eq!(numbers(&rows), [2, 3]);
    let found = rows.iter().map(|row| row.event.as_ref().unwrap().id());
    assert_eq!(found.collect::<Vec<_>>(), ids);
}

// conformance: framework/outbox-postgres: the index of what is unpublished answers the relay and the query of the specification, however much was published
// needs: PostgreSQL
#[tokio::test]
async fn unpublished_rows_are_found_by_their_index() {
    let Some(shop) = Shop::new().await else {
        return;
    };
    let many = "INSERT INTO event_outbox (event_type, payload, status, sent_at)
                SELECT 'order.placed', '{}', 'sent', now() FROM generate_series(1, 20000);
                INSERT INTO event_outbox (event_type, payload) VALUES ('order.placed', '{}');
                ANALYZE event_outbox";
    shop.db.batch_execute(many).await.unwrap();
    assert_eq!(ready(&shop.source().await).await.len(), 1);
    for query in [
        "SELECT * FROM event_outbox WHERE status = 'pending' ORDER BY number LIMIT 100",
        "SELECT * FROM event_outbox WHERE status = 'pending' AND attempts < 5",
    ] {
        let plan = shop
            .db
            .query(&format!("EXPLAIN {query}"), &[])
            .await
            .unwrap();
        let plan: Vec<String> = plan.iter().map(|row| row.get(0)).collect();
        let plan = plan.join("\n");
        assert!(plan.contains("event_outbox_pending"), "{query}:\n{plan}");
    }
}

#[tokio::test]
async fn the_same_event_waits_once_and_another_body_is_refused() {
    let Some(shop) = Shop::new().await else {
        return;
    };
    let first = event(None, 1);
    for _ in 0..2 {
        shop.enqueue(first.clone()).await;
    }
    assert_eq!(shop.text("SELECT count(*) FROM event_outbox").await, "1");
    let other = Event::builder("order.placed")
        .id(first.id())
        .json(&2)
        .build()
        .unwrap();
    let error = Outbox::new().enqueue(&shop.db, other).await.unwrap_err();
    assert_eq!(error.code(), Code::IdReused);
    // Ids are unique per tenant.
    let other = Event::builder("order.placed")
        .id(first.id())
        .tenant("acme")
        .build()
        .unwrap();
    shop.enqueue(other).await;
    assert_eq!(shop.text("SELECT count(*) FROM event_outbox").await, "2");
    // Once it has had its turn, it may go again.
    shop.db
        .batch_execute("UPDATE event_outbox SET status = 'sent', sent_at = now()")
        .await
        .unwrap();
    shop.enqueue(first).await;
    assert_eq!(
        shop.text("SELECT string_agg(status, ' ' ORDER BY status) FROM event_outbox")
            .await,
        "pending sent"
    );
    let engine = fresh_schema().unwrap();
    let empty = connect(&Postgres::shared().unwrap().fresh_database()).await;
    let error = Outbox::new()
        .enqueue(&empty, event(None, 1))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.hint_text().unwrap().contains("create_tables"));
    drop(engine);
}

// conformance: engines/postgres-outbox-rows: rows of other programs are read on PostgreSQL as on the file; a bad row is its own trouble
// needs: PostgreSQL
#[tokio::test]
async fn rows_of_other_programs_are_read_and_bad_ones_stop_nobody() {
    let Some(shop) = Shop::new().await else {
        return;
    };
    let insert = async |event_id: &str, payload: &str, created_at: &str| {
        let sql = "INSERT INTO event_outbox
                     (event_id, event_type, payload, created_at, correlation_id, trace_id, ordering_key)
                   VALUES ($1, 'TelemetryWindowClosed', $2, $3::text::timestamptz, 'c-1',
                     '0AF7651916CD43DD8448EB211C80319C', 'k')";
        shop.db
            .execute(sql, &[&event_id, &payload, &created_at])
            .await
            .unwrap();
    };
    let at = "2026-03-01 12:00:00+00";
    insert("order-1", "[1,2,3]", at).await;
    insert("order-2", r#"{"event_id":"order-2","payload":1}"#, at).await;
    insert(
        "order-3",
        r#"{"event_id":"order-3","occurred_at":"2026-02-01T00:00:00Z","correlation_id":"c-9","tenant_id":"t","station_id":"s","schema_version":2,"payload":{"a":1},"more":true}"#,
        at,
    )
    .await;
    insert("bad-1", "{\"a\":", at).await;
    insert("bad-2", "1", "infinity").await;
    let rows = ready(&shop.source().await).await;
    assert_eq!(rows.len(), 5);
    let events: Vec<&Event> = rows[..3]
        .iter()
        .map(|r| r.event.as_ref().unwrap())
        .collect();
    assert_eq!(
        events[0].occurred_at(),
        "2026-03-01T12:00:00Z".parse().unwrap()
    );
    assert_eq!(
        (events[0].display_id(), events[0].correlation_id()),
        ("order-1".into(), "c-1".into())
    );
    assert_eq!(
        &events[1].payload()[..],
        br#"{"event_id":"order-2","payload":1}"#
    );
    assert_eq!(&events[2].payload()[..], br#"{"a":1}"#);
    assert_eq!((events[2].version(), events[2].tenant()), (2, Some("t")));
    assert_eq!(events[2].correlation_id(), "c-9");
    for event in events {
        let trace = event.attributes().unwrap().trace.as_ref().unwrap();
        assert_eq!(trace.trace_id(), Some("0af7651916cd43dd8448eb211c80319c"));
        assert_eq!(event.ordering_key().as_deref(), Some("k"));
    }
    for row in &rows[3..] {
        let error = row.event.as_ref().unwrap_err();
        let expected = [Code::InvalidPayloadError, Code::InvalidAttribute];
        assert!(expected.contains(&error.code()), "{error}");
    }
}

// conformance: engines/postgres-outbox-whole: nothing of an event is lost in the outbox on PostgreSQL, whatever its payload is
// needs: PostgreSQL
#[tokio::test]
async fn every_event_comes_back_as_it_was() {
    let Some(shop) = Shop::new().await else {
        return;
    };
    let trace = TraceContext::parse(
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        None,
    );
    let events = [
        Event::builder("a.b").payload(" \n{\"a\":1}\t").build(),
        Event::builder("a.b")
            .payload(vec![0_u8, 255, 10])
            .content_type("image/png")
            .build(),
        Event::builder("a b")
            .payload("\"\\u0000\"")
            .tenant("é\u{7f}ü")
            .meta("k", "v\u{0}")
            .build(),
        Event::builder("a.b")
            .foreign_id("test-1")
            .source("shop")
            .app("web \"front\"")
            .entity("ORDER", "7")
            .trace(trace.unwrap())
            .build(),
    ];
    let events = events.map(Result::unwrap);
    for event in &events {
        shop.enqueue(event.clone()).await;
    }
    let rows = ready(&shop.source().await).await;
    let back: Vec<&Event> = rows.iter().map(|row| row.event.as_ref().unwrap()).collect();
    assert_eq!(back, events.iter().collect::<Vec<_>>());
}

// conformance: engines/postgres-outbox-order: a rejected row holds back later rows of its key and no others on PostgreSQL
// needs: PostgreSQL
#[tokio::test]
async fn a_row_that_waits_holds_back_its_key_only() {
    let Some(shop) = Shop::new().await else {
        return;
    };
    for (n, key) in [
        (1, Some("a")),
        (2, Some("a")),
        (3, Some("b")),
        (4, None),
        (5, Some("a")),
    ] {
        shop.enqueue(event(key, n)).await;
    }
    let source = shop.source().await;
    let mine = lease(&source, "me").await;
    let rows = ready(&source).await;
    assert_eq!(numbers(&rows), [1, 2, 3, 4, 5]);
    source
        .settle(mine.clone(), vec![rejected(rows[1].clone(), 4)])
        .await
        .unwrap();
    let claimed = source.claim(0, 100).await.unwrap();
    assert_eq!(numbers(&claimed.rows), [1, 3, 4]);
    assert_eq!(
        claimed.next_due,
        Some(shop.clock.now().plus(Duration::from_secs(4)))
    );
    shop.clock.advance(Duration::from_secs(4));
    assert_eq!(numbers(&ready(&source).await), [1, 2, 3, 4, 5]);
    let page = source.claim(rows[1].row, 2).await.unwrap();
    assert_eq!((numbers(&page.rows), page.more), (vec![3, 4], true));
    // A row that was changed meanwhile is another row.
    let row = ready(&source).await.remove(0);
    shop.db
        .batch_execute("UPDATE event_outbox SET payload = replace(payload, '\"n\":1', '\"n\":9') WHERE number = 1")
        .await
        .unwrap();
    source
        .settle(mine, vec![(row, RowOutcome::Sent)])
        .await
        .unwrap();
    assert_eq!(
        numbers(&ready(&source).await)[0],
        9,
        "the outcome was about the earlier one"
    );
}

// conformance: engines/postgres-outbox-lease: of several relays at once one holds the lease; whoever lost it changes nothing
// needs: PostgreSQL
#[tokio::test]
async fn a_relay_that_lost_its_lease_changes_nothing() {
    let Some(shop) = Shop::new().await else {
        return;
    };
    shop.enqueue(event(None, 1)).await;
    let (one, two) = (shop.source().await, shop.source().await);
    let old = lease(&one, "one").await;
    assert_eq!(lease(&one, "one").await, old, "renewed");
    assert!(two.acquire("two".into(), LEASE).await.unwrap().is_none());
    assert_eq!(one.status().await.unwrap().relay.as_deref(), Some("one"));
    let row = ready(&one).await.remove(0);
    shop.clock.advance(LEASE);
    // It is over, but no other relay has it.
    one.settle(old.clone(), vec![rejected(row.clone(), 0)])
        .await
        .unwrap();
    let new = lease(&two, "two").await;
    for outcome in [RowOutcome::Sent, RowOutcome::Failed { error: "x".into() }] {
        let late = one.settle(old.clone(), vec![(row.clone(), outcome)]).await;
        assert_eq!(late.unwrap_err().code(), Code::LeaseLost);
    }
    assert_eq!(
        shop.text("SELECT status || attempts FROM event_outbox")
            .await,
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
    two.release(new).await.unwrap();
    assert_eq!(shop.text("SELECT status FROM event_outbox").await, "sent");
    lease(&one, "one").await;
    // Of many that ask at once, one gets it.
    shop.clock.advance(LEASE);
    let mut asked = Vec::new();
    for n in 0..8 {
        let source = shop.source().await;
        asked.push(tokio::spawn(async move {
            source.acquire(format!("many {n}"), LEASE).await
        }));
    }
    let mut held = 0;
    for answer in asked {
        held += usize::from(answer.await.unwrap().unwrap().is_some());
    }
    assert_eq!(held, 1);
    let endless = one.acquire("one".into(), Duration::from_secs(61)).await;
    assert_eq!(endless.unwrap_err().code(), Code::InvalidSetting);
}

// conformance: engines/postgres-outbox-notify: the commit of an enqueue wakes a waiting relay, of a user's schema and of an engine's
// needs: PostgreSQL
#[tokio::test]
async fn a_commit_wakes_the_relay() {
    let Some(shop) = Shop::new().await else {
        return;
    };
    let url = fresh_schema().unwrap();
    // Nothing is found by looking from time to time.
    let never = |clock: Arc<dyn everbus_core::Clock>| everbus_postgres::Options {
        poll: 100 * PATIENCE,
        ..options(clock)
    };
    let engine = everbus_postgres::open(&url, never(Arc::new(shop.clock.clone())));
    let engine = engine.await.unwrap();
    let schema = url.split("schema=").nth(1).unwrap();
    let schema = schema.split('&').next().unwrap();
    let own = engine.outbox().unwrap();
    let own = (own, connect(&url).await, Outbox::in_schema(schema));
    let theirs = Outbox::open(&shop.url, never(Arc::new(shop.clock.clone())));
    let theirs = (
        theirs.await.unwrap(),
        connect(&shop.url).await,
        Outbox::new(),
    );
    for (source, mut db, outbox) in [own, theirs] {
        // A relay is also woken when it begins to listen.
        let quiet = Duration::from_millis(500);
        while tokio::time::timeout(quiet, source.wait(PATIENCE))
            .await
            .is_ok()
        {
            assert!(ready(&source).await.is_empty());
        }
        let tx = db.transaction().await.unwrap();
        outbox.enqueue(&tx, event(None, 1)).await.unwrap();
        tx.commit().await.unwrap();
        let woken = tokio::time::timeout(PATIENCE, source.wait(100 * PATIENCE)).await;
        woken.expect("the commit wakes the relay");
        assert_eq!(numbers(&ready(&source).await), [1]);
    }
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-outbox-dead: a row that fails has a dead letter on PostgreSQL, can be retried, and goes with its age
// needs: PostgreSQL
#[tokio::test]
async fn a_row_that_fails_has_a_dead_letter_and_can_be_retried() {
    let Some(shop) = Shop::new().await else {
        return;
    };
    let first = event(None, 1);
    shop.enqueue(first.clone()).await;
    shop.enqueue(event(None, 2)).await;
    let source = shop.source().await;
    let mine = lease(&source, "me").await;
    let fail = async || {
        let row = ready(&source).await.remove(0);
        let failed = RowOutcome::Failed {
            error: "no \u{0}schema".into(),
        };
        source
            .settle(mine.clone(), vec![(row, failed)])
            .await
            .unwrap();
    };
    fail().await;
    let letter = async || {
        shop.text(
            "SELECT event_id || '|' || event_type || '|' || (payload::json -> 'payload' ->> 'n') || '|'
             || attempts || '|' || (first_seen_at < last_seen_at) || '|' || (retried_at IS NULL)
             FROM dead_letter_events",
        )
        .await
    };
    let id = first.id();
    assert_eq!(letter().await, format!("{id}|order.placed|1|1|false|true"));
    let status = source.status().await.unwrap();
    assert_eq!((status.pending, status.failed, status.sent), (1, 1, 0));
    assert!(status.last_error.unwrap().contains("schema"));
    let failed = source.failed(10).await.unwrap();
    assert_eq!((failed.len(), failed[0].failures.len()), (1, 1));
    assert_eq!(
        source.find_dead_letter("x".into(), id).await.unwrap(),
        Some(id.to_string())
    );
    shop.clock.advance(Duration::from_secs(5));
    assert_eq!(source.retry(Some(vec!["nobody".into()])).await.unwrap(), 0);
    assert_eq!(source.retry(Some(vec![id.to_string()])).await.unwrap(), 1);
    assert!(letter().await.ends_with("|false"), "it was retried");
    assert_eq!(numbers(&ready(&source).await), [1, 2], "in its old place");
    fail().await;
    assert_eq!(letter().await, format!("{id}|order.placed|1|2|true|true"));
    shop.clock.advance(Duration::from_secs(31 * 24 * 3600));
    let mine = lease(&source, "me").await;
    let rows = ready(&source).await;
    source
        .settle(mine.clone(), vec![(rows[0].clone(), RowOutcome::Sent)])
        .await
        .unwrap();
    shop.clock.advance(Duration::from_secs(8 * 24 * 3600));
    let mine = lease(&source, "me").await;
    let gone = source.forget(mine, OutboxKeep::default()).await.unwrap();
    assert_eq!((gone.rows, gone.dead_letters, gone.more), (2, 1, false));
    assert_eq!(shop.text("SELECT count(*) FROM event_outbox").await, "0");
}

// conformance: engines/postgres-outbox-failed: a dead letter in the database of its outbox sets the row failed, and its retry sets it sent
// needs: PostgreSQL
#[tokio::test]
async fn a_row_shows_the_dead_letter_of_its_event() {
    let Some(url) = fresh_schema() else { return };
    let engine = open(&url).await;
    let schema = url
        .split("schema=")
        .nth(1)
        .unwrap()
        .split('&')
        .next()
        .unwrap()
        .to_owned();
    let db = connect(&url).await;
    let mut spec = GroupSpec::new(GroupName::new("g").unwrap());
    spec.start_from = StartFrom::First;
    let all = Pattern::new("*").unwrap();
    spec.subscriptions.push(SubscriptionSpec {
        name: "all".into(),
        pattern: all.clone(),
    });
    engine.broker.declare(spec).await.unwrap();
    let source = engine.outbox().unwrap();
    let event = Event::builder("order.placed")
        .foreign_id("order-1")
        .tenant("acme")
        .json(&1);
    let event = event.build().unwrap();
    Outbox::in_schema(&*schema)
        .enqueue(&db, event.clone())
        .await
        .unwrap();
    let row = ready(&source).await.remove(0);
    let relayed = row.event.clone().unwrap();
    assert_eq!(relayed, event);
    engine.broker.append(vec![relayed]).await.unwrap();
    let mine = lease(&source, "me").await;
    source
        .settle(mine, vec![(row, RowOutcome::Sent)])
        .await
        .unwrap();
    let mut consumer = engine
        .broker
        .consume(GroupName::new("g").unwrap(), ConsumeOptions::new(vec![all]))
        .await
        .unwrap();
    let kill = async |consumer: &mut Box<dyn everbus_core::Consumer>| {
        let delivery = consumer.fetch(1).await.unwrap().remove(0);
        let failure = everbus_core::Failure::new(
            delivery.attempt,
            everbus_core::SystemClock.now(),
            everbus_core::FailureKind::Error,
            "broken",
        );
        let dead = Verdict::Dead {
            failure: Some(failure),
        };
        let settlement = Settlement::new(delivery.lease, dead);
        engine
            .broker
            .settle(vec![settlement])
            .await
            .unwrap()
            .remove(0)
            .unwrap();
    };
    let status =
        format!("SELECT status || ' ' || coalesce(last_error, '') FROM {schema}.event_outbox");
    kill(&mut consumer).await;
    assert_eq!(text(&db, &status).await, "failed broken");
    let letters = format!(
        "SELECT event_id || ' ' || consumer_name || ' ' || (payload::json ->> 'everbus_id')
         FROM {schema}.dead_letter_events"
    );
    assert_eq!(
        text(&db, &letters).await,
        format!("order-1 g {}", event.id())
    );
    let dead = engine.dead_letters().unwrap();
    assert_eq!(dead.retry(DeadLetterFilter::default()).await.unwrap(), 1);
    assert_eq!(text(&db, &status).await, "sent broken");
    kill(&mut consumer).await;
    assert_eq!(text(&db, &status).await, "failed broken");
    let now = everbus_core::SystemClock.now();
    dead.purge(now, Default::default(), DeadLetterFilter::default())
        .await
        .unwrap();
    assert_eq!(text(&db, &status).await, "sent broken");
    // Its row is old some day.
    let upkeep = engine.maintenance().unwrap();
    let retention = Retention {
        outbox: Some(Duration::from_nanos(1000)),
        ..Retention::default()
    };
    let foretold = upkeep.preview(retention.clone()).await.unwrap();
    assert_eq!(
        (
            foretold.outbox,
            upkeep.prune(retention).await.unwrap().outbox
        ),
        (1, 1)
    );
    engine.broker.close().await.unwrap();
}

#[tokio::test]
async fn an_outbox_that_is_none_is_refused() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let url = server.fresh_database();
    let open = async || Outbox::open(&url, everbus_postgres::Options::default()).await;
    let Err(error) = open().await else {
        panic!("there is no outbox")
    };
    assert_eq!(error.code(), Code::NotFound, "{error}");
    let db = connect(&url).await;
    db.batch_execute("CREATE TABLE event_outbox (id text)")
        .await
        .unwrap();
    let Err(error) = open().await else {
        panic!("it is of another kind")
    };
    assert_eq!(error.code(), Code::Unsupported, "{error}");
    assert!(error.hint_text().unwrap().contains("RENAME"));
    let init = async || Outbox::init(&url, everbus_postgres::Options::default()).await;
    assert_eq!(init().await.unwrap_err().code(), Code::Unsupported);
    db.batch_execute("DROP TABLE event_outbox").await.unwrap();
    assert!(init().await.unwrap(), "they were missing");
    assert!(!init().await.unwrap(), "they are there");
    assert!(open().await.is_ok());
}

// conformance: engines/postgres-outbox-sqlx: an event joins a transaction of sqlx, behind a feature
// needs: PostgreSQL
#[cfg(feature = "sqlx")]
#[tokio::test]
async fn an_event_joins_a_transaction_of_sqlx() {
    use sqlx::{Connection as _, PgConnection};

    let Some(shop) = Shop::new().await else {
        return;
    };
    let source = shop.source().await;
    let mut conn = PgConnection::connect(&shop.url).await.unwrap();
    for (n, committed) in [(1_i32, false), (2, true)] {
        let mut tx = conn.begin().await.unwrap();
        sqlx::query("INSERT INTO orders VALUES ($1, 'confirmed')")
            .bind(n)
            .execute(&mut *tx)
            .await
            .unwrap();
        let enqueued = event(Some("k"), n.unsigned_abs());
        Outbox::new().enqueue_sqlx(&mut tx, enqueued).await.unwrap();
        match committed {
            true => tx.commit().await.unwrap(),
            false => tx.rollback().await.unwrap(),
        }
    }
    let rows = ready(&source).await;
    assert_eq!(numbers(&rows), [2]);
    let again = Event::builder("order.placed")
        .id(rows[0].uuid())
        .json(&3)
        .build();
    let refused = Outbox::new()
        .enqueue_sqlx(&mut conn, again.unwrap())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::IdReused);
}

// conformance: engines/postgres-outbox-relays: several relays of one outbox at once publish every committed event, each once
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_relays_publish_every_event_once() {
    const WRITERS: u32 = 4;
    const EACH: u32 = 50;
    let Some(shop) = Shop::new().await else {
        return;
    };
    let target = fresh_schema().unwrap();
    let bus = everbus::Bus::open(&target).await.unwrap();
    let mut relays = Vec::new();
    for _ in 0..3 {
        let source = everbus::postgres::Outbox::open(&shop.url).await.unwrap();
        let relay = everbus::outbox::Relay::new(&bus, source);
        relays.push(relay.batch(7).lease(Duration::from_millis(500)).spawn());
    }
    let writers = (0..WRITERS).map(|writer| {
        let url = shop.url.clone();
        tokio::spawn(async move {
            let mut db = connect(&url).await;
            let mut ids = std::collections::BTreeSet::new();
            for n in 0..EACH {
                let tx = db.transaction().await.unwrap();
                let id = Outbox::new().enqueue(&tx, event(None, n)).await.unwrap();
                // Every fifth does not happen after all.
                if (writer + n) % 5 == 0 {
                    tx.rollback().await.unwrap();
                } else {
                    tx.commit().await.unwrap();
                    ids.insert(id);
                }
            }
            ids
        })
    });
    let writers: Vec<_> = writers.collect();
    let mut expected = std::collections::BTreeSet::new();
    for (n, writer) in writers.into_iter().enumerate() {
        expected.extend(writer.await.unwrap());
        if n == 1 {
            // The one that works may be this one: another takes over.
            let _ = relays.remove(0).stop().await.unwrap();
        }
    }
    let all_sent = async {
        while shop
            .text("SELECT count(*) FROM event_outbox WHERE status <> 'sent'")
            .await
            != "0"
        {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, all_sent).await.unwrap();
    for relay in relays {
        relay.stop().await.unwrap();
    }
    let everything = vec![Pattern::new("*").unwrap()];
    let log = bus.log().unwrap();
    let (found, _) = log
        .read(everbus_core::Cursor::START, everything, 10_000)
        .await
        .unwrap();
    let found: Vec<_> = found.iter().map(|record| record.event.id()).collect();
    assert_eq!(found.len(), expected.len(), "each once");
    assert_eq!(
        found.into_iter().collect::<std::collections::BTreeSet<_>>(),
        expected
    );
    bus.shutdown().await.unwrap();
}
