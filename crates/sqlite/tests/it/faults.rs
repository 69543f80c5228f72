//! Ways in which such an engine could lose events, each tried on purpose.

use std::time::Duration;

use everbus_core::{DeadLetterFilter, Event, EventState, PageRequest, Settlement, Verdict};
use everbus_sqlite::Options;
use rusqlite::Connection;

use crate::{clock, consume, declare, eventually, failure, fetch, open, publish, settle};

/// Makes every insert into a table fail until it is dropped.
fn sabotage(conn: &Connection, table: &str) {
    conn.execute_batch(&format!(
        "CREATE TRIGGER sabotage BEFORE INSERT ON {table}
         BEGIN SELECT RAISE(ABORT, 'sabotaged'); END"
    ))
    .unwrap();
}

// conformance: fault-3/dead-letter: if the dead letter cannot be written, the event is not settled
// conformance: rule-6/one-step: dead-lettering and ack are one step
// conformance: framework/dlq-exhausted: dead-lettering and ack are one step
#[tokio::test]
async fn a_dead_letter_that_cannot_be_written_leaves_the_event_owed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    let published = publish(&engine, "a.b").await;
    let neighbour = publish(&engine, "a.b").await;
    let deliveries = fetch(&mut consumer, 2).await;
    let conn = Connection::open(&path).unwrap();
    sabotage(&conn, "dead_letters");
    let dead = Verdict::Dead {
        failure: Some(failure("x")),
    };
    let settlement = Settlement::new(deliveries[0].lease.clone(), dead.clone());
    let ack = Settlement::new(deliveries[1].lease.clone(), Verdict::Ack);
    engine
        .broker
        .settle(vec![settlement, ack])
        .await
        .expect_err("the whole step fails");
    let state = |position| {
        let lookup = engine.lookup.clone().unwrap();
        async move { lookup.states(position).await.unwrap()[0].state }
    };
    assert_eq!(
        state(published.position).await,
        EventState::Processing,
        "still owed"
    );
    assert_eq!(
        state(neighbour.position).await,
        EventState::Processing,
        "rolled back with it"
    );
    // The leases are still held, so that the same verdicts may be given again.
    conn.execute_batch("DROP TRIGGER sabotage").unwrap();
    settle(&engine, &deliveries[0], dead).await;
    settle(&engine, &deliveries[1], Verdict::Ack).await;
    assert_eq!(state(published.position).await, EventState::Dlq);
    assert_eq!(state(neighbour.position).await, EventState::Done);
}

// conformance: fault-2/rollback: nobody is told that an event is stored when its transaction was rolled back
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolled_back_transaction_acknowledges_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    publish(&engine, "warm.up").await;
    let conn = Connection::open(&path).unwrap();
    sabotage(&conn, "log");
    let mut tasks = Vec::new();
    for _ in 0..50 {
        let broker = engine.broker.clone();
        tasks.push(tokio::spawn(async move {
            broker
                .append(vec![Event::builder("a.b").build().unwrap()])
                .await
        }));
    }
    for task in tasks {
        task.await.unwrap().expect_err("nothing was stored");
    }
    conn.execute_batch("DROP TRIGGER sabotage").unwrap();
    let next = publish(&engine, "a.b").await;
    assert_eq!(next.position.place(), 2, "and none of them is in the log");
}

// conformance: bus/retries-keep-due-time: a retry that waits is due at the same moment after a restart
#[tokio::test]
async fn waiting_retries_keep_their_due_times_across_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (clock, shared) = clock();
    let options = || Options {
        clock: shared.clone(),
        ..Options::default()
    };
    let engine = everbus_sqlite::open(&path, options()).unwrap();
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    let published = publish(&engine, "a.b").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    let retry = Verdict::Retry {
        after: Duration::from_secs(60),
        failure: failure("x"),
    };
    settle(&engine, &delivery, retry).await;
    let due = engine
        .lookup()
        .unwrap()
        .states(published.position)
        .await
        .unwrap()[0]
        .due_at;
    clock.advance(Duration::from_secs(30));
    drop(consumer);
    engine.broker.close().await.unwrap();

    let engine = everbus_sqlite::open(&path, options()).unwrap();
    let mut consumer = consume(&engine, "").await;
    let state = engine
        .lookup()
        .unwrap()
        .states(published.position)
        .await
        .unwrap()
        .remove(0);
    assert_eq!((state.due_at, state.attempts), (due, 1));
    clock.advance(Duration::from_secs(29));
    let early = tokio::time::timeout(Duration::from_millis(150), consumer.fetch(1)).await;
    assert!(early.is_err(), "not before it is due: {early:?}");
    clock.advance(Duration::from_secs(1));
    assert_eq!(fetch(&mut consumer, 1).await[0].attempt, 2);
}

// conformance: fault-5/cursor: whatever is settled first, an unfinished earlier event comes again after a crash
#[tokio::test]
async fn an_unfinished_event_comes_again_although_later_ones_are_done() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    for _ in 0..10 {
        publish(&engine, "a.b").await;
    }
    let deliveries = fetch(&mut consumer, 10).await;
    for delivery in deliveries
        .iter()
        .rev()
        .filter(|d| d.record.position.place() != 3)
    {
        settle(&engine, delivery, Verdict::Ack).await;
    }
    drop(consumer);
    drop(engine);
    let engine = open(&path);
    let mut consumer = consume(&engine, "").await;
    let again = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!((again.record.position.place(), again.attempt), (3, 2));
    settle(&engine, &again, Verdict::Ack).await;
    let page = engine.dead_letters().unwrap();
    let dead = page
        .list(DeadLetterFilter::default(), PageRequest::default())
        .await
        .unwrap();
    assert!(dead.items.is_empty());
}

// conformance: fault-10/cancelled: publishes and acks whose futures are dropped take effect or not, but nothing hangs or is lost
#[tokio::test]
async fn dropped_futures_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    for _ in 0..20 {
        publish(&engine, "a.b").await;
        // Dropped before it is polled, and while it waits.
        drop(consumer.fetch(1));
        let _ = tokio::time::timeout(Duration::ZERO, consumer.fetch(1))
            .await
            .map(|got| {
                got.unwrap().iter().for_each(|d| {
                    let verdict = Settlement::new(d.lease.clone(), Verdict::Ack);
                    drop(engine.broker.settle(vec![verdict]));
                });
            });
    }
    eventually("nothing is owed", async || {
        let more = tokio::time::timeout(Duration::from_millis(20), consumer.fetch(20)).await;
        for delivery in more.into_iter().flat_map(Result::unwrap) {
            settle(&engine, &delivery, Verdict::Ack).await;
        }
        let info = engine.broker.inspect().await.unwrap().remove(0);
        info.behind + info.in_flight + info.waiting == 0
    })
    .await;
}
