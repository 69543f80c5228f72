//! A file that another program locks for longer than the engine waits: calls are refused as busy, and
//! afterwards everything goes on as if the lock had never been.

use std::path::Path;
use std::time::Duration;

use everbus_core::{Code, Consumer, Engine, Event, Settlement, Verdict};
use everbus_sqlite::Options;
use rusqlite::Connection;

use crate::{consume, consume_some, declare, eventually, fetch, open, publish, settle};

/// Keeps everybody else from writing until it is released.
pub(crate) struct Lock(Connection);

impl Lock {
    pub(crate) fn take(path: &Path) -> Self {
        let lock = Self::prepare(path);
        lock.again();
        lock
    }

    fn prepare(path: &Path) -> Self {
        let conn = Connection::open(path).unwrap();
        conn.busy_timeout(Duration::from_secs(20)).unwrap();
        Self(conn)
    }

    fn again(&self) {
        self.0.execute_batch("BEGIN IMMEDIATE").unwrap();
    }

    pub(crate) fn release(&self) {
        self.0.execute_batch("ROLLBACK").unwrap();
    }
}

/// An engine that soon gives up waiting for a lock.
fn open_impatient(path: &Path) -> Engine {
    let options = Options {
        busy_timeout: Duration::from_millis(50),
        ..Options::default()
    };
    everbus_sqlite::open(path, options).unwrap()
}

/// Waits until everything that was under way has met the lock and given up.
async fn everything_meets_the_lock(engine: &Engine) {
    for _ in 0..2 {
        let event = Event::builder("never.stored").build().unwrap();
        let refused = engine.broker.append(vec![event]).await.unwrap_err();
        assert_eq!(refused.code(), Code::Busy);
    }
}

async fn publish_many(engine: &Engine, count: usize) {
    let events = (0..count).map(|_| Event::builder("a.b").build().unwrap());
    let answers = engine.broker.append(events.collect()).await.unwrap();
    assert!(answers.iter().all(Result::is_ok));
}

async fn settle_all(engine: &Engine, consumer: &mut Box<dyn Consumer>, count: usize) {
    let mut done = 0;
    while done < count {
        let batch = fetch(consumer, 1).await;
        for delivery in &batch {
            settle(engine, delivery, Verdict::Ack).await;
        }
        done += batch.len();
    }
}

// conformance: fault-10/busy: what was read for a group while the file was locked is handed out afterwards
#[tokio::test]
async fn a_group_that_is_behind_goes_on_after_the_file_was_locked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open_impatient(&path);
    // Enough that reading it takes longer than taking the lock.
    publish_many(&engine, 1000).await;
    let lock = Lock::prepare(&path);
    for round in 0..3 {
        let group = format!("g{round}");
        declare(&engine, &group, "*").await;
        let mut consumer = consume(&engine, &group).await;
        lock.again();
        everything_meets_the_lock(&engine).await;
        lock.release();
        let got = fetch(&mut consumer, 1000).await;
        let acks = got
            .iter()
            .map(|d| Settlement::new(d.lease.clone(), Verdict::Ack))
            .collect();
        let answers = engine.broker.settle(acks).await.unwrap();
        assert!(answers.iter().all(Result::is_ok));
        consumer.close().await.unwrap();
    }
}

// conformance: fault-10/busy-leaving: a consumer that leaves while the file is locked takes nothing with it
#[tokio::test]
async fn a_consumer_that_leaves_while_the_file_is_locked_keeps_nothing() {
    for closes in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let engine = open_impatient(&path);
        declare(&engine, "", "*").await;
        let consumer = consume(&engine, "").await;
        publish_many(&engine, 10).await;
        let lock = Lock::take(&path);
        // Whether it is told at once or once it is done is left open.
        let closing = closes.then(|| consumer.close());
        everything_meets_the_lock(&engine).await;
        lock.release();
        if let Some(closing) = closing {
            let answer = closing.await;
            let busy = |e: &everbus_core::Error| e.code() == Code::Busy;
            assert!(answer.as_ref().err().is_none_or(busy), "{answer:?}");
        }
        let mut next = consume(&engine, "").await;
        for _ in 0..10 {
            publish(&engine, "a.b").await;
        }
        settle_all(&engine, &mut next, 20).await;
        let info = engine.broker.inspect().await.unwrap().remove(0);
        assert_eq!((info.behind, info.in_flight, info.waiting), (0, 0, 0));
    }
}

#[tokio::test]
async fn a_change_of_handlers_while_the_file_is_locked_takes_effect() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open_impatient(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume_some(&engine, "", &["x.*"], 10).await.unwrap();
    let lock = Lock::take(&path);
    consumer.set_handled(vec!["y.*".parse().unwrap()]);
    everything_meets_the_lock(&engine).await;
    lock.release();
    let published = publish(&engine, "y.1").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(delivery.record.position, published.position);
}

// conformance: fault-10/feed-and-leave: what is handed out in the very transaction in which its consumer leaves is given back
#[tokio::test]
async fn nothing_stays_in_flight_with_a_consumer_that_has_left() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    publish_many(&engine, 50).await;
    let lock = Lock::prepare(&path);
    for _ in 0..10 {
        let consumer = consume(&engine, "").await;
        lock.again();
        // What is read for the consumer may come before its leaving, or after it.
        tokio::time::sleep(Duration::from_millis(10)).await;
        let closing = consumer.close();
        lock.release();
        closing.await.unwrap();
        let info = engine.broker.inspect().await.unwrap().remove(0);
        assert_eq!(info.in_flight, 0, "nobody is there to have it");
    }
    let mut consumer = consume(&engine, "").await;
    settle_all(&engine, &mut consumer, 50).await;
    eventually("nothing is owed", async || {
        let info = engine.broker.inspect().await.unwrap().remove(0);
        info.behind + info.in_flight + info.waiting == 0
    })
    .await;
}

// conformance: contract/busy-close: an engine that has nothing to write closes at once, also while another program holds the file
#[tokio::test]
async fn closing_does_not_wait_if_there_is_nothing_to_write() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let options = Options {
        // Far longer than a test lasts.
        busy_timeout: Duration::from_secs(3600),
        ..Options::default()
    };
    let engine = everbus_sqlite::open(&path, options).unwrap();
    publish(&engine, "a.b").await;
    let lock = Lock::take(&path);
    let closed = tokio::time::timeout(crate::PATIENCE, engine.broker.close());
    closed.await.expect("it closes").unwrap();
    lock.release();
}
