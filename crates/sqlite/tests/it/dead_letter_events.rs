//! What `sqlite3 file.db 'select … from dead_letter_events'` answers.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use everbus_core::{
    ADDRESSED, Clock, DeadLetter, DeadLetterFilter, Engine, Event, EventState, Failure,
    FailureKind, ManualClock, Verdict,
};
use everbus_dialects::{Beside, Dialect};
use everbus_sqlite::Options;
use rusqlite::Connection;
use rusqlite::types::Value;
use serde_json::json;

use crate::{consume, declare, fetch, open, publish, settle};

/// All rows of the view, each by the names of its columns.
fn rows(path: &Path) -> Vec<BTreeMap<String, Value>> {
    let conn = Connection::open(path).unwrap();
    let mut statement = conn
        .prepare("SELECT * FROM dead_letter_events ORDER BY created_at, id")
        .unwrap();
    let names: Vec<String> = statement.column_names().map(Into::into).collect();
    let rows = statement.query_map([], |row| {
        let columns = names.iter().enumerate();
        columns
            .map(|(n, name)| Ok((name.clone(), row.get(n)?)))
            .collect()
    });
    rows.unwrap().map(Result::unwrap).collect()
}

fn text(row: &BTreeMap<String, Value>, column: &str) -> String {
    match &row[column] {
        Value::Text(text) => text.clone(),
        other => panic!("{column} is {other:?}"),
    }
}

fn millis(at: everbus_core::Timestamp) -> String {
    let full = at.to_string();
    format!("{}Z", &full[..23])
}

async fn kill(engine: &Engine, group: &str, failures: Vec<Failure>) {
    let mut consumer = consume(engine, group).await;
    let last = failures.len() - 1;
    for (n, failure) in failures.into_iter().enumerate() {
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        let verdict = if n == last {
            Verdict::Dead {
                failure: Some(failure),
            }
        } else {
            Verdict::Retry {
                after: Duration::ZERO,
                failure,
            }
        };
        settle(engine, &delivery, verdict).await;
    }
    consumer.close().await.unwrap();
}

fn failure(attempt: u32, at: &ManualClock, error: &str) -> Failure {
    Failure::new(attempt, at.now(), FailureKind::Panic, error).in_handler("charge")
}

fn at(clock: &ManualClock) -> Options {
    Options {
        clock: std::sync::Arc::new(clock.clone()),
        ..Options::default()
    }
}

// conformance: memory/dlq-view: dead_letter_events has first and last seen, attempts, every error, the stack, group, handler, the original envelope and retried_at
// conformance: outbox/4-table: dead_letter_events has event_id, event_type, payload, error, first_seen_at, last_seen_at, attempts
// conformance: outbox/4-attempts: a record that fails again is updated and its attempts add up
// conformance: framework/dlq-fields: attempts, error, failed_at, original event and original stream
// conformance: omni/dlq-table: a dead letter has eventId, eventType, the event, error, stack, createdAt, and retriedAt once retried
// conformance: omni/dlq-retry: a retried dead letter is marked with retried_at
#[tokio::test]
async fn the_view_tells_the_whole_story() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let clock = ManualClock::new("2026-03-01T12:00:00.123456Z".parse().unwrap());
    let engine = everbus_sqlite::open(&path, at(&clock)).unwrap();
    declare(&engine, "billing", "*").await;
    let event = Event::builder("order.placed")
        .json(&json!({"note": "it's \"quoted\"\n", "amount": 1.50}))
        .version(2)
        .occurred_at("2026-02-28T23:59:59.98765Z".parse().unwrap())
        .tenant("o'Neill \"& sons\"")
        .correlation_id("request \"7\"")
        .meta("station_id", "s'7")
        .build()
        .unwrap();
    let appended = engine.broker.append(vec![event.clone()]).await.unwrap();
    let received = appended[0].as_ref().unwrap().received_at;
    clock.advance(Duration::from_millis(1500));
    let first_death = clock.now();
    let first = failure(1, &clock, "it's down: \"no\"");
    let second = failure(2, &clock, "still 'down'").with_backtrace("at src/lib.rs:1:2\n  0: main");
    kill(&engine, "billing", vec![first.clone(), second.clone()]).await;
    let row = rows(&path).remove(0);
    assert_eq!(text(&row, "event_id"), event.id().to_string());
    assert_eq!(text(&row, "uuid"), event.id().to_string());
    assert_eq!(text(&row, "event_type"), "order.placed");
    assert_eq!(text(&row, "error"), "still 'down'");
    assert_eq!(text(&row, "stack"), "at src/lib.rs:1:2\n  0: main");
    let errors: Vec<Failure> = serde_json::from_str(&text(&row, "errors")).unwrap();
    assert_eq!(errors, [first, second]);
    assert_eq!(row["attempts"], Value::Integer(2));
    assert_eq!(text(&row, "consumer_name"), "billing");
    assert_eq!(text(&row, "handler"), "charge");
    assert_eq!(text(&row, "first_seen_at"), millis(first_death));
    assert_eq!(text(&row, "last_seen_at"), millis(first_death));
    assert_eq!(text(&row, "created_at"), millis(received));
    for column in ["retried_at", "replaced_by", "foreign_id"] {
        assert_eq!(row[column], Value::Null, "{column}");
    }
    // The envelope is that of the specification, to the byte.
    let envelope = everbus_dialects::encode(&event, Dialect::Outbox).unwrap();
    assert_eq!(
        text(&row, "payload"),
        String::from_utf8(envelope.clone()).unwrap()
    );
    let beside = Beside {
        event_type: Some("order.placed"),
        ..Beside::default()
    };
    let read = everbus_dialects::decode_beside(&envelope, Dialect::Outbox, &beside).unwrap();
    assert!(read.payload() == event.payload() && read.id() == event.id());
    // Retried, and dead once more: the same row.
    clock.advance(Duration::from_secs(60));
    let dead = engine.dead_letters().unwrap();
    assert_eq!(dead.retry(DeadLetterFilter::default()).await.unwrap(), 1);
    let row = rows(&path).remove(0);
    assert_eq!(text(&row, "retried_at"), millis(clock.now()));
    clock.advance(Duration::from_secs(60));
    kill(&engine, "billing", vec![failure(1, &clock, "again")]).await;
    let all = rows(&path);
    assert_eq!(all.len(), 1);
    let row = &all[0];
    assert_eq!(row["retried_at"], Value::Null);
    assert_eq!(row["stack"], Value::Null, "the last one had none");
    assert_eq!(row["attempts"], Value::Integer(3));
    assert_eq!(text(row, "error"), "again");
    assert_eq!(text(row, "first_seen_at"), millis(first_death));
    assert_eq!(text(row, "last_seen_at"), millis(clock.now()));
}

// conformance: memory/dlq-view-payloads: payloads that are no JSON, no text, or belong to foreign ids are shown as they are
#[tokio::test]
async fn any_payload_makes_a_valid_envelope() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "g", "*").await;
    let of_type = |kind: &str, payload: &[u8]| {
        let event = Event::builder("a.x")
            .content_type(kind)
            .payload(payload.to_vec());
        event.build().unwrap()
    };
    let deep = format!("{}{}", "[".repeat(1500), "]".repeat(1500));
    let cases = [
        (
            of_type("text/plain", b"say \"hi\"\\ \x07 \xc3\xa4"),
            json!("say \"hi\"\\ \u{7} ä"),
            None,
        ),
        (
            of_type("application/octet-stream", b"\xff\x00\x01"),
            json!(null),
            Some("ff0001"),
        ),
        // JSON to the eye of SQLite, and no text.
        (
            of_type("application/octet-stream", b"\"\xff\""),
            json!(null),
            Some("22ff22"),
        ),
        (of_type("text/plain", b"a\0b"), json!(null), Some("610062")),
        (of_type("text/plain", b""), json!(""), None),
        (
            of_type("application/json", b" {\"a\" : 1} "),
            json!({"a": 1}),
            None,
        ),
        (of_type("text/plain", deep.as_bytes()), json!(deep), None),
        (
            Event::builder("a.x")
                .source("shop")
                .foreign_id("te'st-\"1\"")
                .payload("7")
                .build()
                .unwrap(),
            json!(7),
            None,
        ),
        (
            Event::builder("a.x")
                .occurred_at("1969-12-31T23:59:59.5Z".parse().unwrap())
                .payload("8")
                .build()
                .unwrap(),
            json!(8),
            None,
        ),
    ];
    for (n, (event, payload, hex)) in cases.iter().enumerate() {
        engine.broker.append(vec![event.clone()]).await.unwrap();
        kill(&engine, "g", vec![crate::failure("x")]).await;
        let of_event = |row: &BTreeMap<String, Value>| text(row, "uuid") == event.id().to_string();
        let row = rows(&path).into_iter().find(of_event).unwrap();
        let shown = text(&row, "payload");
        let shown: serde_json::Value =
            serde_json::from_str(&shown).unwrap_or_else(|e| panic!("{n}: {e}: {shown}"));
        assert_eq!(&shown["payload"], payload, "{n}");
        assert_eq!(
            shown.get("payload_hex").and_then(|h| h.as_str()),
            *hex,
            "{n}"
        );
        assert_eq!(shown["event_id"], *event.display_id());
        assert_eq!(text(&row, "event_id"), event.display_id());
        let at: everbus_core::Timestamp = shown["occurred_at"].as_str().unwrap().parse().unwrap();
        assert_eq!(at, event.occurred_at(), "{n}");
        let foreign = event.attributes().and_then(|a| a.foreign_id.clone());
        assert_eq!(row["foreign_id"], foreign.map_or(Value::Null, Value::Text));
    }
}

// conformance: memory/dlq-view-fast: a filter on event_id reads that event alone
#[tokio::test]
async fn a_filter_on_the_event_uses_the_index() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "g", "*").await;
    let mut last = None;
    let mut consumer = consume(&engine, "g").await;
    for _ in 0..500 {
        last = Some(publish(&engine, "a.x").await.id);
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        let failure = Some(crate::failure("x"));
        settle(&engine, &delivery, Verdict::Dead { failure }).await;
    }
    let conn = Connection::open(&path).unwrap();
    let one = format!(
        "SELECT payload FROM dead_letter_events WHERE event_id = '{}'",
        last.unwrap()
    );
    let plan: Vec<String> = conn
        .prepare(&format!("EXPLAIN QUERY PLAN {one}"))
        .unwrap()
        .query_map([], |r| r.get(3))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let plan = plan.join("\n");
    assert!(plan.contains("dead_event"), "{plan}");
    let scans = plan.lines().filter(|step| step.starts_with("SCAN"));
    // The view itself is all that is read from end to end.
    let scans: Vec<&str> = scans.filter(|s| *s != "SCAN dead_letter_events").collect();
    assert!(scans.is_empty(), "{plan}");
    let steps = |sql: &str| {
        let mut statement = conn.prepare(sql).unwrap();
        let rows = statement.query_map([], |_| Ok(())).unwrap().count();
        (
            rows,
            statement.get_status(rusqlite::StatementStatus::VmStep),
        )
    };
    let (rows, few) = steps(&one);
    assert_eq!(rows, 1);
    let (rows, many) = steps("SELECT payload FROM dead_letter_events");
    assert_eq!(rows, 500);
    assert!(few * 50 < many, "{few} steps for one, {many} for all");
}

// conformance: memory/dlq-edit-view: the view links a dead letter to the event that replaced it
// conformance: memory/dlq-edit-skips: the other groups pass a corrected event by, and nothing is written for them
#[tokio::test]
async fn a_replaced_dead_letter_is_linked_in_the_view() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "g", "*").await;
    declare(&engine, "other", "*").await;
    declare(&engine, "", "*").await;
    publish(&engine, "a.x").await;
    kill(&engine, "g", vec![crate::failure("x")]).await;
    let dead = engine.dead_letters().unwrap();
    let page = dead.list(DeadLetterFilter::default(), Default::default());
    let letter: DeadLetter = page.await.unwrap().items.remove(0);
    let corrected = letter.corrected("2").unwrap();
    let appended = dead.replace(letter.key(), corrected.clone()).await.unwrap();
    let row = rows(&path).remove(0);
    assert_eq!(text(&row, "replaced_by"), corrected.id().to_string());
    assert!(matches!(row["retried_at"], Value::Text(_)));
    let conn = Connection::open(&path).unwrap();
    let skips: i64 = conn
        .query_row("SELECT count(*) FROM skips", [], |r| r.get(0))
        .unwrap();
    assert_eq!(skips, 0);
    let states = engine.lookup().unwrap().states(appended.position);
    for state in states.await.unwrap() {
        let skipped = state.skipped.as_deref();
        match state.group.as_str() {
            "g" => assert_eq!((state.state, skipped), (EventState::Pending, None)),
            _ => assert_eq!((state.state, skipped), (EventState::Done, Some(ADDRESSED))),
        }
    }
}
