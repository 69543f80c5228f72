//! What `sqlite3 file.db 'select … from events'` answers.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use everbus_core::{DeadLetterFilter, Settlement, Verdict};
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
    let conn = Connection::open(&path).unwrap();
    let columns: String = conn
        .query_row(
            "SELECT group_concat(name, ' ') FROM pragma_table_info('events')",
            [],
            |r| r.get(0),
        )
        .unwrap();
    assert_eq!(
        columns,
        "id type payload status retry_count last_error metadata created_at updated_at"
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

// conformance: contract/attempts-view: a done row of the view events shows the failed attempts, their errors and when it ended
// conformance: contract/attempts-no-write: an event that works at its first attempt is not written to once more
#[tokio::test]
async fn a_done_row_shows_its_failures_and_when_it_ended() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (clock, shared) = crate::clock();
    let options = everbus_sqlite::Options {
        clock: shared,
        ..Default::default()
    };
    let engine = everbus_sqlite::open(&path, options).unwrap();
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    let conn = Connection::open(&path).unwrap();
    let kept = || -> i64 {
        conn.query_row("SELECT count(*) FROM outcomes", [], |r| r.get(0))
            .unwrap()
    };
    let times = |id: &str| -> (String, String) {
        conn.query_row(
            "SELECT created_at, updated_at FROM events WHERE id = ?1",
            [id],
            |r| Ok((r.get(0)?, r.get(1)?)),
        )
        .unwrap()
    };
    for _ in 0..3 {
        publish(&engine, "user.created").await;
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        settle(&engine, &delivery, Verdict::Ack).await;
    }
    assert_eq!(kept(), 0, "they simply worked");

    for verdict in [
        Verdict::Ack,
        Verdict::Skip {
            reason: "enough".into(),
        },
    ] {
        let id = publish(&engine, "user.created").await.id.to_string();
        for text in ["first", "second"] {
            let delivery = fetch(&mut consumer, 1).await.remove(0);
            settle(&engine, &delivery, crate::retry_at_once(text)).await;
        }
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        clock.advance(Duration::from_secs(2));
        settle(&engine, &delivery, verdict).await;
        assert_eq!(
            row(&path, &id),
            shown("done", 2, Some(r#"["first","second"]"#))
        );
        let (created, updated) = times(&id);
        let [created, updated] =
            [created, updated].map(|t| t.parse::<everbus_core::Timestamp>().unwrap());
        assert_eq!(updated.since(created), Duration::from_secs(2));
    }
    assert_eq!(kept(), 2);

    // Skipped at the first attempt: when, and nothing else.
    let id = publish(&engine, "user.created").await.id.to_string();
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    let skip = Verdict::Skip {
        reason: "not mine".into(),
    };
    settle(&engine, &delivery, skip).await;
    assert_eq!(row(&path, &id), shown("done", 0, None));
    assert_eq!(kept(), 2);
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
        // No handler takes this one: it is skipped, which is done.
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

// conformance: bus/spec-sql: the sqlite3 shell answers the specification's columns from events and subscriptions
// conformance: embedded/subscriptions-table: subscriptions has id, event_type, created_at
// conformance: embedded/payload-json: the payload is JSON text in the view
// conformance: embedded/event-fields: the sqlite3 shell answers the specification's columns
// conformance: embedded/events-view: the sqlite3 shell answers the specification's columns
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

// conformance: outbox/3-key: one record for each event and consumer; the file refuses a second
// conformance: framework/guarantee-key: one record for each event and consumer; the file refuses a second
#[tokio::test]
async fn an_event_is_on_record_once_for_each_consumer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    for group in ["mail", "stock"] {
        declare(&engine, group, "*").await;
    }
    let id = publish(&engine, "a.b").await.id.to_string();
    for group in ["mail", "stock"] {
        let mut consumer = consume(&engine, group).await;
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        let mut settlement = Settlement::new(delivery.lease, Verdict::Ack);
        settlement.inbox = true;
        let answers = engine.broker.settle(vec![settlement]).await.unwrap();
        assert!(answers[0].is_ok(), "{answers:?}");
    }
    let conn = Connection::open(&path).unwrap();
    let records = || -> Vec<(String, String)> {
        let mut all = conn
            .prepare("SELECT event_id, consumer_name FROM processed_events ORDER BY consumer_name")
            .unwrap();
        let rows = all.query_map([], |r| Ok((r.get(0)?, r.get(1)?))).unwrap();
        rows.map(Result::unwrap).collect()
    };
    let both = ["mail", "stock"].map(|group| (id.clone(), group.to_owned()));
    assert_eq!(records(), both);
    let again = conn.execute(
        "INSERT INTO inbox SELECT group_id, id, tenant, at + 1 FROM inbox LIMIT 1",
        [],
    );
    let code = again.unwrap_err().sqlite_error_code();
    assert_eq!(code, Some(rusqlite::ErrorCode::ConstraintViolation));
    assert_eq!(records(), both);
}

// conformance: embedded/status-fast: a filter on status reads only what has that status, whatever the size of the log
// conformance: embedded/type-fast: a filter on type and status reads only what has that status
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
    let (rows, both) = steps("SELECT id FROM events WHERE type = 'a.b' AND status = 'dlq'");
    assert_eq!(rows, 1);
    assert!(
        both * 20 < done,
        "{both} steps for one dead letter of a type, {done} for all that is done"
    );
    assert_eq!(last.position.place(), 3001);
}

async fn settle_later(engine: &everbus_core::Engine, delivery: everbus_core::Delivery) {
    settle(engine, &delivery, Verdict::Ack).await;
}
