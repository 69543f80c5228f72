//! What `sqlite3 file.db 'select … from events'` answers.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use everbus_core::{DeadLetterFilter, Verdict};
use rusqlite::Connection;

use crate::{consume, declare, failure, fetch, open, publish, settle};

/// One row of the view: status, retry_count, last_error.
type Row = (String, i64, Option<String>);

fn row(path: &Path, id: &str) -> Row {
    let conn = Connection::open(path).unwrap();
    conn.query_row(
        "SELECT status, retry_count, last_error FROM events WHERE id = ?1",
        [id],
        |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)),
    )
    .unwrap()
}

fn shown(status: &str, retries: i64, errors: Option<&str>) -> Row {
    (status.into(), retries, errors.map(Into::into))
}

// conformance: embedded/events-view: events has the columns of the specification, and each status shows in its time
// conformance: embedded/view-retry-shows-processing: an event that waits for a retry shows processing
// conformance: embedded/event-fields: id, type, payload, creation time, status, retry count, errors and metadata are there
// conformance: embedded/status-values: pending, processing, done and dlq
#[tokio::test]
async fn the_view_follows_an_event_through_its_life() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    let waiting = publish(&engine, "user.created").await;
    let id = waiting.id.to_string();
    assert_eq!(
        row(&path, &id),
        shown("pending", 0, None),
        "nobody has subscribed"
    );
    declare(&engine, "", "*").await;
    assert_eq!(row(&path, &id), shown("pending", 0, None));
    let mut consumer = consume(&engine, "").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(row(&path, &id), shown("processing", 0, None));
    let retry = Verdict::Retry {
        after: Duration::ZERO,
        failure: failure("first"),
    };
    settle(&engine, &delivery, retry).await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(
        row(&path, &id),
        shown("processing", 1, Some(r#"["first"]"#))
    );
    let later = Duration::from_secs(3600);
    let retry = Verdict::Retry {
        after: later,
        failure: failure("second \"quoted\""),
    };
    settle(&engine, &delivery, retry).await;
    let errors = r#"["first","second \"quoted\""]"#;
    assert_eq!(
        row(&path, &id),
        shown("processing", 2, Some(errors)),
        "a retry that waits"
    );

    let dead = publish(&engine, "user.created").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    settle(
        &engine,
        &delivery,
        Verdict::Dead {
            failure: Some(failure("hopeless")),
        },
    )
    .await;
    let dead_id = dead.id.to_string();
    assert_eq!(
        row(&path, &dead_id),
        shown("dlq", 1, Some(r#"["hopeless"]"#))
    );
    let filter = DeadLetterFilter {
        id: Some(dead.id),
        ..Default::default()
    };
    consumer.close().await.unwrap();
    engine.dead_letters().unwrap().retry(filter).await.unwrap();
    assert_eq!(
        row(&path, &dead_id),
        shown("pending", 0, None),
        "a full reset"
    );
    let mut consumer = consume(&engine, "").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    settle(&engine, &delivery, Verdict::Ack).await;
    assert_eq!(row(&path, &dead_id), shown("done", 0, None));
}

// conformance: embedded/atomic-transitions: whatever happens to its neighbours, every event is in the view exactly once
#[tokio::test]
async fn every_event_is_shown_exactly_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    let mut published = Vec::new();
    for _ in 0..40 {
        published.push(publish(&engine, "a.b").await.position);
    }
    let deliveries = fetch(&mut consumer, 40).await;
    for (n, delivery) in deliveries.iter().enumerate() {
        let verdict = match n % 5 {
            0 => Verdict::Ack,
            1 => Verdict::Retry {
                after: Duration::from_secs(3600),
                failure: failure("x"),
            },
            2 => Verdict::Dead {
                failure: Some(failure("x")),
            },
            3 => Verdict::Skip {
                reason: "stale".into(),
            },
            _ => continue,
        };
        settle(&engine, delivery, verdict).await;
    }
    for _ in 0..5 {
        // Nobody handles this one: it is skipped, which is done.
        publish(&engine, "system.x").await;
    }
    let conn = Connection::open(&path).unwrap();
    let mut statement = conn
        .prepare("SELECT status, count(*), count(DISTINCT id) FROM events GROUP BY status")
        .unwrap();
    crate::eventually("the skipped ones are written down", async || {
        let counts: Vec<(String, i64, i64)> = statement
            .query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))
            .unwrap()
            .map(Result::unwrap)
            .collect();
        // With an event for each dead letter.
        assert_eq!(counts.iter().map(|c| c.1).sum::<i64>(), 45 + 8);
        assert!(counts.iter().all(|c| c.1 == c.2));
        counts
            == [
                ("dlq".into(), 8, 8),
                ("done".into(), 21 + 8, 21 + 8),
                ("processing".into(), 16, 16),
            ]
    })
    .await;
}

// conformance: issue-2/spec-sql: the sqlite3 shell answers the specification's columns from events and subscriptions
// conformance: embedded/subscriptions-table: subscriptions has id, event_type, created_at
// conformance: embedded/payload-json: the payload is JSON text in the view
#[tokio::test]
async fn the_shell_answers_as_the_specification_says() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "user.*").await;
    let event = everbus_core::Event::builder("user.created")
        .payload("{\"name\": \"Ünal\",\"n\":1.50}")
        .meta("k", "v")
        .build()
        .unwrap();
    let id = event.id().to_string();
    engine.broker.append(vec![event]).await.unwrap();
    engine.broker.close().await.unwrap();
    let shell = |sql: &str| -> String {
        let output = Command::new("sqlite3")
            .arg(&path)
            .arg(sql)
            .output()
            .expect("the sqlite3 shell; `cargo xtask test` installs it");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout)
            .unwrap()
            .trim_end()
            .to_owned()
    };
    let all =
        "select id, type, payload, status, retry_count, last_error is null, metadata from events";
    let expected =
        format!("{id}|user.created|{{\"name\": \"Ünal\",\"n\":1.50}}|pending|0|1|{{\"k\":\"v\"}}");
    assert_eq!(shell(all), expected);
    let times = shell("select created_at || ' ' || updated_at from events");
    for time in times.split(' ') {
        assert!(
            time.parse::<everbus_core::Timestamp>().is_ok(),
            "{time} is ISO 8601"
        );
    }
    assert_eq!(shell("select event_type from subscriptions"), "user.*");
    assert_eq!(
        shell("select length(id), created_at like '20%Z' from subscriptions"),
        "36|1"
    );
}

// conformance: embedded/status-fast: a filter on status reads only what has that status, whatever the size of the log
// conformance: embedded/type-fast: a filter on type compares interned numbers
#[tokio::test]
async fn a_filter_on_status_does_not_read_the_whole_log() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    for _ in 0..30 {
        let events = (0..100).map(|_| everbus_core::Event::builder("a.b").build().unwrap());
        engine.broker.append(events.collect()).await.unwrap();
        for delivery in fetch(&mut consumer, 100).await {
            settle_later(&engine, delivery).await;
        }
    }
    let last = publish(&engine, "a.b").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    settle(
        &engine,
        &delivery,
        Verdict::Dead {
            failure: Some(failure("x")),
        },
    )
    .await;
    let conn = Connection::open(&path).unwrap();
    let steps = |sql: &str| {
        let mut statement = conn.prepare(sql).unwrap();
        let rows = statement
            .query_map([], |r| r.get::<_, String>(0))
            .unwrap()
            .count();
        (
            rows,
            statement.get_status(rusqlite::StatementStatus::VmStep),
        )
    };
    let (rows, dlq) = steps("SELECT id FROM events WHERE status = 'dlq'");
    assert_eq!(rows, 1);
    let (rows, done) = steps("SELECT id FROM events WHERE status = 'done'");
    assert_eq!(rows, 3000 + 1, "and the notice of the dead letter");
    assert!(
        dlq * 20 < done,
        "{dlq} steps for one dead letter, {done} for all that is done"
    );
    let (rows, _) = steps("SELECT id FROM events WHERE type = 'a.b' AND status = 'dlq'");
    assert_eq!(rows, 1);
    assert_eq!(last.position.place(), 3001);
}

async fn settle_later(engine: &everbus_core::Engine, delivery: everbus_core::Delivery) {
    settle(engine, &delivery, Verdict::Ack).await;
}
