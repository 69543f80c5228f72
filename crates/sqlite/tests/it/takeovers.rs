//! Leases of others, leavers that cannot leave, and groups that change while they are read.

use std::time::Duration;

use everbus_core::{
    ConsumeOptions, Event, GroupSpec, Settlement, StartFrom, SubscriptionSpec, Verdict,
};
use everbus_sqlite::Options;
use rusqlite::Connection;

use crate::{PATIENCE, clock, consume, declare, eventually, fetch, open, publish, settle};

fn event(event_type: &str) -> Event {
    Event::builder(event_type).build().unwrap()
}

// conformance: rule-4/foreign-leases: every lease of a process that does nothing more is ended, not only the first
#[tokio::test]
async fn every_lease_of_another_process_ends_in_its_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (clock, shared) = clock();
    let options = || Options {
        clock: shared.clone(),
        ..Options::default()
    };
    let idle = everbus_sqlite::open(&path, options()).unwrap();
    declare(&idle, "g", "*").await;
    let mut consumer = consume(&idle, "g").await;
    let lease = ConsumeOptions::default().lease;
    publish(&idle, "a.b").await;
    fetch(&mut consumer, 1).await;
    clock.advance(lease / 2);
    publish(&idle, "a.b").await;
    fetch(&mut consumer, 1).await;
    consumer.close().await.unwrap();
    let other = everbus_sqlite::open(&path, options()).unwrap();
    let mut rival = consume(&other, "g").await;
    clock.advance(lease / 2 + Duration::from_secs(1));
    let first = fetch(&mut rival, 1).await.remove(0);
    assert_eq!((first.record.position.place(), first.attempt), (1, 2));
    settle(&other, &first, Verdict::Ack).await;
    clock.advance(lease);
    let second = fetch(&mut rival, 1).await.remove(0);
    assert_eq!((second.record.position.place(), second.attempt), (2, 2));
}

// conformance: fault-5/retract: taking a pattern away while the group is fed does not move it back
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pattern_taken_away_while_the_group_is_fed_delivers_nothing_twice() {
    for _ in 0..10 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let engine = open(&path);
        let subscriptions = ["a.*", "b.*"].map(|pattern| SubscriptionSpec {
            name: pattern.into(),
            pattern: pattern.parse().unwrap(),
        });
        let declared = engine.broker.declare(GroupSpec {
            name: "g".parse().unwrap(),
            start_from: StartFrom::First,
            ordered: false,
            ephemeral: false,
            subscriptions: subscriptions.to_vec(),
        });
        let declared = declared.await.unwrap();
        let backlog = (0..50).map(|n| event(if n % 2 == 0 { "a.x" } else { "b.x" }));
        engine.broker.append(backlog.collect()).await.unwrap();
        let mut consumer = consume(&engine, "g").await;
        // The writer waits while the feeder reads, so that both come in one transaction.
        let other = Connection::open(&path).unwrap();
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        let publish = engine.broker.append(vec![event("z.z")]);
        tokio::time::sleep(Duration::from_millis(5)).await;
        let retract = engine.broker.retract(declared[1].id);
        tokio::time::sleep(Duration::from_millis(5)).await;
        other.execute_batch("COMMIT").unwrap();
        publish.await.unwrap();
        retract.await.unwrap();
        let mut seen = Vec::new();
        eventually("the group is through", async || {
            let more = tokio::time::timeout(Duration::from_millis(50), consumer.fetch(100)).await;
            seen.extend(
                more.into_iter()
                    .flat_map(Result::unwrap)
                    .map(|d| d.record.position.place()),
            );
            let info = engine.broker.inspect().await.unwrap().remove(0);
            info.behind == 0 && info.in_flight == seen.len() as u64
        })
        .await;
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count, "none is in flight twice");
        assert!(
            count >= 25,
            "every event of the pattern that stays: {count}"
        );
    }
}

// conformance: bus/no-handler-here: among many events without a handler, one that has one is found
#[tokio::test]
async fn a_handler_is_found_for_an_event_behind_thousands_without_one() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("a.db"));
    declare(&engine, "g", "*").await;
    let options = ConsumeOptions::new(vec!["none.*".parse().unwrap()]);
    let mut consumer = engine
        .broker
        .consume("g".parse().unwrap(), options)
        .await
        .unwrap();
    for _ in 0..6 {
        let events = (0..2000).map(|_| event("x.y"));
        engine.broker.append(events.collect()).await.unwrap();
    }
    let wanted = publish(&engine, "wanted.now").await;
    eventually("all are set aside", async || {
        engine.broker.inspect().await.unwrap()[0].waiting == 12_001
    })
    .await;
    consumer.set_handled(vec!["wanted.*".parse().unwrap()]);
    let found = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(found.record.position, wanted.position);
}

// conformance: fault-10/close: an engine whose consumer cannot be written off closes all the same, and loses nothing
#[tokio::test]
async fn an_engine_closes_although_a_consumer_cannot_leave() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "g", "*").await;
    let consumer = consume(&engine, "g").await;
    let published = publish(&engine, "a.b").await;
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch(
        "CREATE TRIGGER sabotage BEFORE INSERT ON deliveries
         BEGIN SELECT RAISE(ABORT, 'sabotaged'); END",
    )
    .unwrap();
    drop(consumer);
    let closed = tokio::time::timeout(PATIENCE, engine.broker.close()).await;
    closed.expect("it closes").unwrap();
    conn.execute_batch("DROP TRIGGER sabotage").unwrap();
    let engine = open(&path);
    let mut consumer = consume(&engine, "g").await;
    let again = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(again.record.position, published.position);
}

// conformance: fault-3/rollback-order: a row that was given back and taken again in a failed transaction keeps its first lease
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_taken_twice_in_a_failed_transaction_keeps_its_first_lease() {
    // The engine may also find the other group's event in a transaction of its own, before the
    // one with the settlement; such a round shows nothing and is run again.
    let mut rolled_back = 0;
    for _ in 0..300 {
        if rolled_back == 3 {
            break;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let engine = open(&path);
        declare(&engine, "g", "a.*").await;
        declare(&engine, "h", "b.*").await;
        let (mut g, mut h) = (consume(&engine, "g").await, consume(&engine, "h").await);
        publish(&engine, "a.x").await;
        publish(&engine, "b.x").await;
        let retry = |after| Verdict::Retry {
            after,
            failure: crate::failure("x"),
        };
        let first = fetch(&mut g, 1).await.remove(0);
        settle(&engine, &first, retry(Duration::ZERO)).await;
        let held = fetch(&mut g, 1).await.remove(0);
        let other = fetch(&mut h, 1).await.remove(0);
        settle(&engine, &other, retry(Duration::from_secs(600))).await;
        // The other group's event becomes one that must run alone, and giving back fails. The
        // writer waits for the file meanwhile, with the settlement in its queue.
        let conn = Connection::open(&path).unwrap();
        conn.execute_batch(
            "BEGIN IMMEDIATE;
             UPDATE deliveries SET suspect = 1, crashes = 3, due = 0
               WHERE group_id = (SELECT id FROM groups WHERE name = 'h');
             CREATE TRIGGER sabotage BEFORE UPDATE ON deliveries WHEN NEW.attempt < OLD.attempt
             BEGIN SELECT RAISE(ABORT, 'sabotaged'); END",
        )
        .unwrap();
        let again = Settlement::new(held.lease.clone(), retry(Duration::ZERO));
        let broker = engine.broker.clone();
        let settling = tokio::spawn(async move { broker.settle(vec![again]).await });
        tokio::time::sleep(Duration::from_millis(30)).await;
        conn.execute_batch("COMMIT").unwrap();
        if settling.await.unwrap().is_ok() {
            continue;
        }
        rolled_back += 1;
        conn.execute_batch("DROP TRIGGER sabotage").unwrap();
        settle(&engine, &held, Verdict::Ack).await;
    }
    assert_eq!(rolled_back, 3, "too few transactions failed");
}
