//! What the outbox knows of its rows: whose dead letter is whose, what was claimed, and since when it is wanted.

use std::time::Duration;

use everbus_core::{Clock as _, Event, EventId, RowOutcome, Timestamp, Verdict};
use everbus_sqlite::outbox::Outbox;
use rusqlite::Connection;

use crate::outbox::{Shop, event, lease, ready, text};
use crate::{consume, declare, failure, fetch, open, settle};

// conformance: memory/outbox-dead-letter-tenants: rows with one event id and different tenants each have their own dead letter, and a retry finds the right one
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_of_one_id_are_kept_apart_by_tenant() {
    let shop = Shop::new();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bus.db");
    let engine = open(&path);
    let own = Connection::open(&path).unwrap();
    for (db, source) in [(&shop.db, shop.source()), (&own, engine.outbox().unwrap())] {
        let id = EventId::new();
        for tenant in [None, Some("acme"), Some("umbrella")] {
            let mut event = Event::builder("order.placed").id(id).json(&tenant);
            if let Some(tenant) = tenant {
                event = event.tenant(tenant);
            }
            Outbox::new().enqueue(db, event).unwrap();
        }
        // Of this one nothing can be read but its row.
        db.execute(
            "UPDATE event_outbox SET payload = '{' WHERE id LIKE '%@umbrella'",
            [],
        )
        .unwrap();
        let lease = lease(&source, "me").await;
        let outcomes = ready(&source).await.into_iter().map(|row| {
            let error = format!("no {}", row.tenant.as_deref().unwrap_or("tenant"));
            (row, RowOutcome::Failed { error })
        });
        source
            .settle(lease.clone(), outcomes.collect())
            .await
            .unwrap();
        let letters = |condition: &str| {
            text(
                db,
                &format!(
                    "SELECT group_concat(error) FROM (SELECT error FROM dead_letter_events
                     WHERE event_id = '{id}' AND {condition} ORDER BY error)"
                ),
            )
        };
        assert_eq!(letters("1"), "no acme,no tenant,no umbrella");
        let acme = source.retry(Some(vec![format!("{id}@acme")])).await;
        assert_eq!(acme.unwrap(), 1);
        assert_eq!(letters("retried_at IS NULL"), "no tenant,no umbrella");
        let row = ready(&source).await.remove(0);
        assert_eq!(row.tenant.as_deref(), Some("acme"));
        let again = RowOutcome::Failed {
            error: "no acme again".into(),
        };
        source
            .settle(lease.clone(), vec![(row, again)])
            .await
            .unwrap();
        assert_eq!(letters("attempts = 2"), "no acme again");
        // The id of the event means all of them.
        let all = source.retry(Some(vec![id.to_string()])).await;
        assert_eq!(all.unwrap(), 3);
        assert_eq!(letters("retried_at IS NULL"), "NULL");
    }
    let names = "SELECT count(DISTINCT id) FROM dead_letter_events";
    assert_eq!(text(&own, names), "3");
    engine.broker.close().await.unwrap();
}

#[tokio::test]
async fn a_row_that_could_not_be_read_closes_its_dead_letter_when_it_was_corrected() {
    let shop = Shop::new();
    let insert =
        "INSERT INTO event_outbox (event_id, event_type, payload) VALUES ('e-1', 'a.b', '{')";
    shop.db.execute_batch(insert).unwrap();
    let source = shop.source();
    let lease = lease(&source, "me").await;
    let row = ready(&source).await.remove(0);
    let failed = RowOutcome::Failed { error: "no".into() };
    source
        .settle(lease.clone(), vec![(row, failed)])
        .await
        .unwrap();
    // It is an event of a tenant after all.
    let correct = r#"UPDATE event_outbox SET payload = '{"event_id":"e-1","occurred_at":"2026-02-01T00:00:00Z",
        "tenant_id":"acme","payload":1}'"#;
    shop.db.execute_batch(correct).unwrap();
    assert_eq!(source.retry(None).await.unwrap(), 1);
    let open = "SELECT count(*) FROM dead_letter_events WHERE retried_at IS NULL";
    assert_eq!(shop.text(open), "0");
}

// conformance: memory/outbox-dead-letter-fails-tenant: a dead letter shows in the outbox row of its own tenant only
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_shows_in_the_row_of_its_tenant() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bus.db");
    let engine = open(&path);
    let db = Connection::open(&path).unwrap();
    let source = engine.outbox().unwrap();
    let lease = lease(&source, "me").await;
    declare(&engine, "g", "order.*").await;
    for marked_first in [true, false] {
        db.execute("DELETE FROM event_outbox", []).unwrap();
        let id = EventId::new();
        for tenant in [Some("acme"), None, Some("umbrella")] {
            let mut event = Event::builder("order.placed").id(id).json(&1);
            if let Some(tenant) = tenant {
                event = event.tenant(tenant);
            }
            Outbox::new().enqueue(&db, event).unwrap();
        }
        let rows = ready(&source).await;
        let events = rows.iter().map(|row| row.event.clone().unwrap()).collect();
        engine.broker.append(events).await.unwrap();
        let outcomes: Vec<_> = rows
            .into_iter()
            .map(|row| (row, RowOutcome::Sent))
            .collect();
        if marked_first {
            let marked = source.settle(lease.clone(), outcomes.clone());
            marked.await.unwrap();
        }
        // The first dies, the others are handled.
        let mut consumer = consume(&engine, "g").await;
        let mut deliveries = Vec::new();
        while deliveries.len() < 3 {
            deliveries.extend(fetch(&mut consumer, 3).await);
        }
        for delivery in &deliveries {
            let verdict = match delivery.record.event.tenant() {
                Some("acme") => Verdict::Dead {
                    failure: Some(failure("no stock")),
                },
                _ => Verdict::Ack,
            };
            settle(&engine, delivery, verdict).await;
        }
        consumer.close().await.unwrap();
        if !marked_first {
            source.settle(lease.clone(), outcomes).await.unwrap();
        }
        let statuses =
            "SELECT group_concat(status) FROM (SELECT status FROM event_outbox ORDER BY row)";
        assert_eq!(text(&db, statuses), "failed,sent,sent", "{marked_first}");
    }
    engine.broker.close().await.unwrap();
}

// conformance: memory/outbox-settles-what-was-claimed: a row that was changed after it was claimed is left as it is, whatever became of what it was
#[tokio::test]
async fn only_what_was_claimed_is_settled() {
    let changes = [
        "payload = json_set(payload, '$.payload.n', 9)",
        "event_type = 'order.changed'",
        "event_id = 'another'",
        "ordering_key = 'k'",
        "attributes = NULL",
        "correlation_id = 'c'",
        "trace_id = 't'",
        "created_at = '2020-01-01'",
    ];
    let outcomes = [
        RowOutcome::Sent,
        RowOutcome::Failed { error: "no".into() },
        RowOutcome::Rejected {
            error: "no".into(),
            after: Duration::from_secs(1),
        },
    ];
    for change in changes {
        for outcome in &outcomes {
            let shop = Shop::new();
            for n in 1..=3 {
                Outbox::new().enqueue(&shop.db, event(None, n)).unwrap();
            }
            let source = shop.source();
            let lease = lease(&source, "me").await;
            let rows = ready(&source).await;
            let sql = format!("UPDATE event_outbox SET {change} WHERE row = 2");
            shop.db.execute(&sql, []).unwrap();
            // This changes nothing.
            let same =
                "UPDATE event_outbox SET payload = payload, event_type = event_type WHERE row = 3";
            shop.db.execute(same, []).unwrap();
            let all = rows.into_iter().map(|row| (row, outcome.clone()));
            source.settle(lease.clone(), all.collect()).await.unwrap();
            let untouched = "SELECT group_concat(row) FROM event_outbox
                             WHERE status = 'pending' AND attempts = 0 AND last_error IS NULL AND due = 0";
            assert_eq!(shop.text(untouched), "2", "{change}, {outcome:?}");
            // As it is now, it is settled.
            let row = ready(&source).await.remove(0);
            source
                .settle(lease, vec![(row, RowOutcome::Sent)])
                .await
                .unwrap();
            let status = "SELECT status FROM event_outbox WHERE row = 2";
            assert_eq!(shop.text(status), "sent", "{change}");
        }
    }
}

// conformance: memory/outbox-wanted: a row knows when it was last wanted: when it was written, or made to wait again by whatever means
#[tokio::test]
async fn a_row_knows_when_it_was_last_wanted() {
    let shop = Shop::new();
    for n in 1..=3 {
        Outbox::new().enqueue(&shop.db, event(None, n)).unwrap();
    }
    shop.db
        .execute(
            "UPDATE event_outbox SET created_at = '2020-01-01 00:00:00'",
            [],
        )
        .unwrap();
    let source = shop.source();
    let first = lease(&source, "me").await;
    assert_eq!(first.since, 3);
    let rows = ready(&source).await;
    let written: Timestamp = "2020-01-01T00:00:00.999999Z".parse().unwrap();
    assert!(rows.iter().all(|row| row.wanted_at == Some(written)));
    let failed = RowOutcome::Failed { error: "no".into() };
    let outcomes = [RowOutcome::Sent, failed, RowOutcome::Sent];
    source
        .settle(first.clone(), rows.into_iter().zip(outcomes).collect())
        .await
        .unwrap();
    // By hand, with nothing but the status, and by us.
    shop.db
        .execute(
            "UPDATE event_outbox SET status = 'pending' WHERE row = 1",
            [],
        )
        .unwrap();
    shop.clock.advance(Duration::from_secs(3600));
    source.retry(None).await.unwrap();
    let wanted: Vec<_> = ready(&source).await.iter().map(|r| r.wanted_at).collect();
    assert_eq!(wanted.len(), 2);
    assert!(wanted[0] > Some(written));
    assert_eq!(wanted[1], Some(shop.clock.now()));
    // The lease tells what was there when it changed hands, and renewing it changes nothing.
    Outbox::new().enqueue(&shop.db, event(None, 4)).unwrap();
    assert_eq!(lease(&source, "me").await.since, 3);
    source.release(first).await.unwrap();
    assert_eq!(lease(&source, "you").await.since, 4);
}
