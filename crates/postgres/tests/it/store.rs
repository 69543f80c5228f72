//! What people and other programs see of the store in SQL, and what a hand that changes it is told.

use std::time::Duration;

use everbus_core::{
    AuditEntry, Clock as _, ConsumeOptions, Consumer, Delivery, Engine, Event, Failure,
    FailureKind, GroupName, GroupSpec, HistoryQuery, Order, Pattern, Retention, Settlement,
    StartFrom, SubscriptionSpec, SystemClock, Verdict,
};
use everbus_postgres::tokio_postgres::{Client, NoTls};

use crate::support::{fresh_schema, open};

/// An engine, a plain connection to its database, and its schema.
async fn set_up() -> Option<(Engine, Client, String)> {
    let url = fresh_schema()?;
    let engine = open(&url).await;
    let (base, query) = url.split_once('?').unwrap();
    let schema = query
        .split('&')
        .find_map(|pair| pair.strip_prefix("schema="))
        .unwrap();
    let (client, connection) = everbus_postgres::tokio_postgres::connect(base, NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    client
        .batch_execute(&format!("SET search_path = {schema}"))
        .await
        .unwrap();
    Some((engine, client, schema.to_owned()))
}

async fn text(db: &Client, sql: &str) -> String {
    let sql = format!("SELECT coalesce(({sql})::text, 'NULL')");
    let row = db
        .query_one(&sql, &[])
        .await
        .unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    row.get(0)
}

async fn publish(engine: &Engine, event: Event) -> everbus_core::Appended {
    engine
        .broker
        .append(vec![event])
        .await
        .unwrap()
        .remove(0)
        .unwrap()
}

fn event(event_type: &str) -> Event {
    Event::builder(event_type)
        .json(&1)
        .meta("channel", "web")
        .build()
        .unwrap()
}

async fn declare(engine: &Engine, name: &str) {
    let group = if name.is_empty() {
        GroupName::unnamed()
    } else {
        GroupName::new(name).unwrap()
    };
    let mut spec = GroupSpec::new(group);
    spec.start_from = StartFrom::First;
    let pattern = Pattern::new("*").unwrap();
    spec.subscriptions.push(SubscriptionSpec {
        name: "all".into(),
        pattern,
    });
    engine.broker.declare(spec).await.unwrap();
}

async fn consume(engine: &Engine, name: &str) -> Box<dyn Consumer> {
    let group = if name.is_empty() {
        GroupName::unnamed()
    } else {
        GroupName::new(name).unwrap()
    };
    let options = ConsumeOptions::new(vec![Pattern::new("*").unwrap()]);
    engine.broker.consume(group, options).await.unwrap()
}

async fn settle(engine: &Engine, delivery: &Delivery, verdict: Verdict) {
    let settlement = Settlement::new(delivery.lease.clone(), verdict);
    engine
        .broker
        .settle(vec![settlement])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
}

fn failure(text: &str) -> Failure {
    Failure::new(1, SystemClock.now(), FailureKind::Error, text)
}

// conformance: engines/postgres-events-view: the view events of a PostgreSQL schema has the columns of the specification, and each status shows in its time
// needs: PostgreSQL
#[tokio::test]
async fn the_view_follows_an_event_through_its_life() {
    let Some((engine, db, _)) = set_up().await else {
        return;
    };
    let waiting = publish(&engine, event("user.created")).await;
    let row = |id: &everbus_core::EventId| {
        format!(
            "SELECT status || ' ' || retry_count || ' ' || coalesce(last_error, '') FROM events WHERE id = '{id}'"
        )
    };
    assert_eq!(
        text(&db, &row(&waiting.id)).await,
        "pending 0 ",
        "nobody has subscribed"
    );
    let columns = "SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute WHERE attrelid = 'events'::regclass";
    assert_eq!(
        text(&db, columns).await,
        "id type payload status retry_count last_error metadata created_at updated_at"
    );
    let shown = format!(
        "SELECT type || ' ' || payload || ' ' || metadata FROM events WHERE id = '{}'",
        waiting.id
    );
    assert_eq!(
        text(&db, &shown).await,
        r#"user.created 1 {"channel":"web"}"#
    );
    declare(&engine, "").await;
    let mut consumer = consume(&engine, "").await;
    let delivery = consumer.fetch(1).await.unwrap().remove(0);
    assert_eq!(text(&db, &row(&waiting.id)).await, "processing 0 ");
    let after = Duration::from_secs(3600);
    let retry = Verdict::Retry {
        after,
        failure: failure("first \"quoted\""),
    };
    settle(&engine, &delivery, retry).await;
    let retrying = text(&db, &row(&waiting.id)).await;
    assert_eq!(retrying, r#"processing 1 ["first \"quoted\""]"#);
    let dead = publish(&engine, event("user.created")).await;
    let delivery = consumer.fetch(1).await.unwrap().remove(0);
    settle(
        &engine,
        &delivery,
        Verdict::Dead {
            failure: Some(failure("hopeless")),
        },
    )
    .await;
    assert_eq!(text(&db, &row(&dead.id)).await, r#"dlq 1 ["hopeless"]"#);
    let done = publish(&engine, event("user.created")).await;
    let delivery = consumer.fetch(1).await.unwrap().remove(0);
    settle(&engine, &delivery, Verdict::Ack).await;
    assert_eq!(text(&db, &row(&done.id)).await, "done 0 ");
    // Every event is shown exactly once.
    let twice = "SELECT count(*) FROM (SELECT id FROM events GROUP BY id HAVING count(*) <> 1) x";
    assert_eq!(text(&db, twice).await, "0");
    assert_eq!(
        text(
            &db,
            "SELECT (SELECT count(*) FROM events) - (SELECT count(*) FROM log)"
        )
        .await,
        "0"
    );
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-history-index: each history query begins with its index on PostgreSQL, however long the names are
// needs: PostgreSQL
#[tokio::test]
async fn history_queries_use_their_indexes() {
    let Some((engine, db, schema)) = set_up().await else {
        return;
    };
    let long = "x".repeat(10_000);
    let mut batch = Vec::new();
    for n in 0..2000 {
        let tenant = if n == 1000 {
            long.clone()
        } else {
            format!("t{}", n % 100)
        };
        let event = Event::builder("a.b")
            .app(format!("app{}", n % 100))
            .entity("ORDER", tenant.clone());
        // The tenant is part of a unique index and cannot be this long.
        let event = if n == 1000 {
            event
        } else {
            event.tenant(tenant)
        };
        batch.push(event.json(&n).build().unwrap());
    }
    engine.broker.append(batch).await.unwrap();
    db.batch_execute("ANALYZE log").await.unwrap();
    let history = engine.history().unwrap();
    let of = HistoryQuery::default()
        .entity("ORDER", long)
        .order(Order::Oldest);
    assert_eq!(history.query(of).await.unwrap().items.len(), 1);
    for (index, condition) in [
        (
            "log_tenant",
            "hashtextextended(log.tenant, 0) = hashtextextended('t7', 0) AND log.tenant = 't7' AND log.tenant <> ''",
        ),
        (
            "log_tenant",
            "hashtextextended(log.tenant, 0) = hashtextextended('t7', 0) AND log.tenant = 't7' AND log.tenant <> '' AND log.type = 12345",
        ),
        (
            "log_app",
            "hashtextextended(log.app, 0) = hashtextextended('app7', 0) AND log.app = 'app7'",
        ),
        (
            "log_entity",
            "hashtextextended(log.entity_id, 0) = hashtextextended('t7', 0) AND log.entity_id = 't7'",
        ),
    ] {
        let sql = format!(
            "EXPLAIN SELECT * FROM {schema}.log log WHERE {condition} ORDER BY log.seq DESC LIMIT 10"
        );
        let plan: Vec<String> = db
            .query(&sql, &[])
            .await
            .unwrap()
            .iter()
            .map(|row| row.get(0))
            .collect();
        let plan = plan.join("\n");
        assert!(plan.contains(&format!(" {index}")), "{index}: {plan}");
    }
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-audit-tamper: the audit trail of a PostgreSQL schema refuses changes, and verification names what was changed past the triggers
// needs: PostgreSQL
#[tokio::test]
async fn a_trail_that_was_changed_is_noticed() {
    let Some((engine, db, _)) = set_up().await else {
        return;
    };
    let audit = engine.audit().unwrap();
    for n in 0..5 {
        audit
            .record(AuditEntry::new("alice", format!("a.{n}")))
            .await
            .unwrap();
    }
    for refused in [
        "UPDATE audit_log SET actor = 'bob' WHERE seq = 2",
        "DELETE FROM audit_log WHERE seq = 5",
        "TRUNCATE audit_log",
        "INSERT INTO audit_log SELECT 9, at, actor, action, NULL, NULL, NULL, NULL, NULL, NULL, hash FROM audit_log WHERE seq = 1",
        "INSERT INTO audit_anchor (seq, hash, at) VALUES (2, '\\x00', 0)",
        "UPDATE audit_head SET seq = 3",
        "DELETE FROM audit_head",
    ] {
        assert!(db.batch_execute(refused).await.is_err(), "{refused}");
    }
    assert!(audit.verify(None).await.unwrap().is_ok());
    let head = audit.head().await.unwrap();
    let broken = async |change: &str| {
        let tables = ["audit_log", "audit_anchor", "audit_head"];
        let set = |what: &str| {
            tables
                .map(|table| format!("ALTER TABLE {table} {what} TRIGGER USER;"))
                .join(" ")
        };
        let back = "DELETE FROM audit_log; INSERT INTO audit_log SELECT * FROM audit_copy;
                    DELETE FROM audit_head; INSERT INTO audit_head SELECT * FROM head_copy;";
        let sql = format!("{} {change}; {}", set("DISABLE"), set("ENABLE"));
        db.batch_execute(&sql).await.unwrap();
        let verdict = audit.verify(head).await.unwrap();
        let sql = format!("{} {back} {}", set("DISABLE"), set("ENABLE"));
        db.batch_execute(&sql).await.unwrap();
        assert!(audit.verify(head).await.unwrap().is_ok(), "as it was");
        verdict
            .broken
            .unwrap_or_else(|| panic!("{change} was not noticed"))
    };
    db.batch_execute(
        "CREATE TABLE audit_copy AS TABLE audit_log; CREATE TABLE head_copy AS TABLE audit_head",
    )
    .await
    .unwrap();
    assert_eq!(
        broken("UPDATE audit_log SET actor = 'bob' WHERE seq = 2")
            .await
            .seq,
        Some(2)
    );
    assert_eq!(
        broken("DELETE FROM audit_log WHERE seq = 3").await.seq,
        Some(3)
    );
    assert_eq!(
        broken("DELETE FROM audit_log WHERE seq = 5").await.seq,
        Some(5)
    );
    // The head was changed too: only the one that was kept elsewhere tells.
    let both = "DELETE FROM audit_log WHERE seq = 5;
                UPDATE audit_head h SET seq = 4, hash = (SELECT hash FROM audit_log WHERE seq = 4)";
    assert_eq!(broken(both).await.seq, Some(5));
    db.batch_execute("ALTER TABLE audit_log DISABLE TRIGGER audit_log_only_grows")
        .await
        .unwrap();
    let verdict = audit.verify(None).await.unwrap();
    assert!(
        verdict
            .broken
            .unwrap()
            .problem
            .contains("audit_log_only_grows")
    );
    db.batch_execute("ALTER TABLE audit_log ENABLE TRIGGER audit_log_only_grows")
        .await
        .unwrap();
    db.batch_execute(
        "CREATE OR REPLACE FUNCTION audit_head_moves_on() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
    )
    .await
    .unwrap();
    let verdict = audit.verify(None).await.unwrap();
    assert!(verdict.broken.unwrap().problem.contains("was changed"));
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-retention-race: retention on PostgreSQL removes nothing that a group gets again at the same moment
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retention_and_redelivery_do_not_miss_each_other() {
    let Some((engine, _, _)) = set_up().await else {
        return;
    };
    declare(&engine, "g").await;
    let mut consumer = consume(&engine, "g").await;
    let group = GroupName::new("g").unwrap();
    let all = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    for _ in 0..10 {
        let batch: Vec<Event> = (0..30).map(|_| event("a.b")).collect();
        let published = engine.broker.append(batch).await.unwrap();
        let positions: Vec<_> = published.into_iter().map(|a| a.unwrap().position).collect();
        let mut left = positions.len();
        while left > 0 {
            for delivery in consumer.fetch(left).await.unwrap() {
                settle(&engine, &delivery, Verdict::Ack).await;
                left -= 1;
            }
        }
        let redeliver = engine
            .redeliver()
            .unwrap()
            .redeliver(group.clone(), positions);
        let prune = engine.maintenance().unwrap().prune(all.clone());
        let (answers, pruned) = tokio::join!(redeliver, prune);
        let queued = answers
            .unwrap()
            .iter()
            .filter(|a| **a == everbus_core::Redelivery::Queued)
            .count();
        assert_eq!(
            pruned.unwrap().removed as usize + queued,
            30,
            "each is there or gone"
        );
        let mut left = queued;
        while left > 0 {
            let some = tokio::time::timeout(Duration::from_secs(60), consumer.fetch(left)).await;
            for delivery in some.expect("what was queued comes").unwrap() {
                settle(&engine, &delivery, Verdict::Ack).await;
                left -= 1;
            }
        }
        engine
            .maintenance()
            .unwrap()
            .prune(all.clone())
            .await
            .unwrap();
    }
    let report = engine.maintenance().unwrap().check().await.unwrap();
    assert!(report.is_ok(), "{report:?}");
    engine.broker.close().await.unwrap();
}
