//! Transactions that fail: what they changed in memory goes with them, and what they were asked to
//! do is still owed. A trigger makes a statement fail at a known place; a small disk fails in earnest.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use everbus_core::{
    Code, Consumer, DeadLetterFilter, Delivery, Engine, Event, EventState, PageRequest, Position,
    Settlement, Verdict,
};
use everbus_sqlite::Options;
use rusqlite::Connection;

use crate::disk::SmallDisk;
use crate::locked::Lock;
use crate::{
    clock, consume, consume_some, declare, eventually, failure, fetch, open, publish,
    retry_at_once, settle, try_settle,
};

/// Makes a kind of statement fail, `UPDATE ON groups` for example, until it is lifted.
struct Sabotage(Connection);

impl Sabotage {
    fn plant(path: &Path, statement: &str) -> Self {
        let conn = Connection::open(path).unwrap();
        conn.execute_batch(&format!(
            "CREATE TRIGGER sabotage BEFORE {statement}
             BEGIN SELECT RAISE(ABORT, 'sabotaged'); END"
        ))
        .unwrap();
        Self(conn)
    }

    fn lift(self) {
        self.0.execute_batch("DROP TRIGGER sabotage").unwrap();
    }
}

fn event(event_type: &str, bytes: usize) -> Event {
    let payload = "x".repeat(bytes);
    Event::builder(event_type).json(&payload).build().unwrap()
}

fn dead(text: &str) -> Verdict {
    Verdict::Dead {
        failure: Some(failure(text)),
    }
}

async fn state_of(engine: &Engine, position: Position) -> EventState {
    let states = engine.lookup().unwrap().states(position).await.unwrap();
    states[0].state
}

/// An event in flight whose retry, with a follow-up, was rolled back after all of it was written.
async fn with_a_verdict_rolled_back(path: &Path) -> (Engine, Box<dyn Consumer>, Settlement) {
    let engine = open(path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    publish(&engine, "a.b").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    // The follow-up is claimed at once, so the group moves: the last thing the transaction writes.
    let mut settlement = Settlement::new(delivery.lease, retry_at_once("x"));
    settlement.follow_ups = vec![event("a.c", 1)];
    let sabotage = Sabotage::plant(path, "UPDATE ON groups");
    let refused = engine.broker.settle(vec![settlement.clone()]).await;
    refused.expect_err("the transaction failed");
    sabotage.lift();
    (engine, consumer, settlement)
}

// conformance: rule-1/rolled-back-verdict: a verdict that was not stored leaves the event in flight, to be settled again
#[tokio::test]
async fn a_verdict_that_was_rolled_back_can_be_given_again() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, mut consumer, settlement) =
        with_a_verdict_rolled_back(&dir.path().join("a.db")).await;
    let mut answers = engine.broker.settle(vec![settlement]).await.unwrap();
    answers.remove(0).expect("the lease is still held");
    let mut got: Vec<_> = fetch(&mut consumer, 2)
        .await
        .iter()
        .map(|d| (d.record.position.place(), d.attempt))
        .collect();
    got.sort_unstable();
    assert_eq!(got, [(1, 2), (2, 1)], "the retry and one follow-up");
}

// conformance: fault-5/rolled-back-verdict: an event whose verdict was rolled back is still owed after an orderly end
#[tokio::test]
async fn an_event_whose_verdict_was_rolled_back_outlives_an_orderly_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (engine, consumer, settlement) = with_a_verdict_rolled_back(&path).await;
    drop(consumer);
    engine.broker.close().await.unwrap();
    let engine = open(&path);
    let mut consumer = consume(&engine, "").await;
    let again = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(again.record.position, settlement.lease.position());
    assert_eq!(again.attempt, 2);
}

// conformance: rule-4/rolled-back-extension: a lease whose extension was rolled back ends when it would have ended without it
#[tokio::test]
async fn an_extension_that_was_rolled_back_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (clock, shared) = clock();
    let options = Options {
        clock: shared,
        ..Options::default()
    };
    let engine = everbus_sqlite::open(&path, options).unwrap();
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    let extend = async |delivery: &Delivery, by: u64| {
        let leases = vec![delivery.lease.clone()];
        let extended = engine.broker.extend(leases, Duration::from_secs(by)).await;
        extended?.remove(0)
    };
    for extended_before in [false, true] {
        publish(&engine, "a.b").await;
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        if extended_before {
            extend(&delivery, 600).await.unwrap();
        }
        let sabotage = Sabotage::plant(&path, "UPDATE ON claims");
        extend(&delivery, 3_600)
            .await
            .expect_err("it was rolled back");
        sabotage.lift();
        // A lease lasts 40 seconds if it is not extended.
        clock.advance(Duration::from_secs(120));
        let acked = try_settle(&engine, &delivery, Verdict::Ack).await;
        match extended_before {
            true => acked.expect("the first extension holds"),
            false => {
                assert_eq!(acked.unwrap_err().code(), Code::LeaseLost);
                let again = fetch(&mut consumer, 1).await.remove(0);
                settle(&engine, &again, Verdict::Ack).await;
            }
        }
    }
}

// conformance: rule-4/rolled-back-renewal: a delivery that waits to be fetched is not handed out after its lease, if the extension was rolled back
#[tokio::test]
async fn a_renewal_that_was_rolled_back_hands_nothing_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (clock, shared) = clock();
    let options = Options {
        clock: shared,
        ..Options::default()
    };
    let engine = everbus_sqlite::open(&path, options).unwrap();
    declare(&engine, "", "a.b").await;
    let mut consumer = consume(&engine, "").await;
    publish(&engine, "a.b").await;
    // The event waits in the mailbox. Its lease of 40 seconds is more than half over, so the next
    // transaction extends it, and fails.
    let sabotage = Sabotage::plant(&path, "UPDATE ON claims");
    clock.advance(Duration::from_secs(25));
    let refused = engine.broker.append(vec![event("other", 1)]).await;
    refused.expect_err("the transaction was rolled back");
    clock.advance(Duration::from_secs(20));
    tokio::select! {
        biased;
        got = consumer.fetch(1) => panic!("its lease is over: {got:?}"),
        () = std::future::ready(()) => {}
    }
    sabotage.lift();
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(delivery.attempt, 1, "no handler has seen it");
    settle(&engine, &delivery, Verdict::Ack).await;
}

// conformance: bus/full-disk: a verdict that finds the disk full can be given again once there is room
// needs: a file system that it may mount
#[tokio::test]
async fn a_retry_verdict_survives_a_full_disk() {
    for give_again in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let Some(disk) = SmallDisk::mount(dir.path(), 8) else {
            return;
        };
        let path = disk.0.join("a.db");
        let engine = open(&path);
        declare(&engine, "", "*").await;
        let mut consumer = consume(&engine, "").await;
        let published = publish(&engine, "a.b").await;
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        disk.fill(0);
        let long = "y".repeat(60_000);
        let refused = try_settle(&engine, &delivery, retry_at_once(&long)).await;
        assert_eq!(refused.unwrap_err().code(), Code::DiskFull);
        disk.free();
        if give_again {
            settle(&engine, &delivery, retry_at_once(&long)).await;
        }
        drop(consumer);
        engine.broker.close().await.unwrap();
        let engine = open(&path);
        let mut consumer = consume(&engine, "").await;
        let again = fetch(&mut consumer, 1).await.remove(0);
        assert_eq!(again.record.position, published.position);
        assert_eq!(again.attempt, 2);
        assert_eq!(again.failures.len(), 1, "{:?}", again.failures);
    }
}

// conformance: fault-3/second-attempt: a dead letter that cannot be written after a retry leaves the event in flight
#[tokio::test]
async fn a_dead_letter_that_was_rolled_back_after_a_retry_can_be_given_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    let published = publish(&engine, "a.b").await;
    let first = fetch(&mut consumer, 1).await.remove(0);
    settle(&engine, &first, retry_at_once("first")).await;
    let second = fetch(&mut consumer, 1).await.remove(0);
    let sabotage = Sabotage::plant(&path, "INSERT ON dead_letters");
    let refused = try_settle(&engine, &second, dead("second")).await;
    refused.expect_err("the dead letter cannot be written");
    let state = state_of(&engine, published.position).await;
    assert_eq!(state, EventState::Processing, "still owed");
    sabotage.lift();
    settle(&engine, &second, dead("second")).await;
    let letters = engine.dead_letters().unwrap();
    let page = letters
        .list(DeadLetterFilter::default(), PageRequest::default())
        .await
        .unwrap();
    assert_eq!(page.items.len(), 1);
    assert_eq!(
        (page.items[0].attempts, page.items[0].failures.len()),
        (2, 2)
    );
}

// conformance: rule-1/rolled-back-ack: an ack that was not stored leaves the event in flight, to be settled again
#[tokio::test]
async fn an_ack_that_was_rolled_back_after_a_retry_can_be_given_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    let published = publish(&engine, "a.b").await;
    let first = fetch(&mut consumer, 1).await.remove(0);
    settle(&engine, &first, retry_at_once("x")).await;
    let second = fetch(&mut consumer, 1).await.remove(0);
    let sabotage = Sabotage::plant(&path, "DELETE ON deliveries");
    let refused = try_settle(&engine, &second, Verdict::Ack).await;
    refused.expect_err("the row stays");
    sabotage.lift();
    settle(&engine, &second, Verdict::Ack).await;
    let state = state_of(&engine, published.position).await;
    assert_eq!(state, EventState::Done);
}

// conformance: fault-5/full-disk: a group does not pass events that were read for it in a transaction that found the disk full
// conformance: bus/full-disk: while publishes find the disk full, groups get what was stored before
// needs: a file system that it may mount
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_is_handed_out_whole_while_publishes_find_the_disk_full() {
    const BACKLOG: usize = 20;
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path(), 12) else {
        return;
    };
    let options = Options {
        disk_headroom: 0,
        ..Options::default()
    };
    let engine = everbus_sqlite::open(&disk.0.join("a.db"), options).unwrap();
    declare(&engine, "", "*").await;
    let backlog = (0..BACKLOG).map(|_| event("a.b", 1)).collect();
    engine.broker.append(backlog).await.unwrap();
    disk.fill(4 << 20);
    let stop = Arc::new(AtomicBool::new(false));
    let refused = Arc::new(AtomicU64::new(0));
    let mut publishers = Vec::new();
    for _ in 0..4 {
        let (broker, stop, refused) = (engine.broker.clone(), stop.clone(), refused.clone());
        let too_large = event("a.b", 5 << 20);
        publishers.push(tokio::spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                let answer = broker.append(vec![too_large.clone()]).await;
                assert_eq!(answer.unwrap_err().code(), Code::DiskFull);
                refused.fetch_add(1, Ordering::SeqCst);
            }
        }));
    }
    eventually("publishes are refused", async || {
        refused.load(Ordering::SeqCst) > 0
    })
    .await;
    // One at a time, so that every event is read for the group by itself.
    let mut consumer = consume_some(&engine, "", &["*"], 1).await.unwrap();
    let mut seen = BTreeSet::new();
    while seen.len() < BACKLOG {
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        settle(&engine, &delivery, Verdict::Ack).await;
        seen.insert(delivery.record.position.place());
        let expected = seen.len() as u64;
        assert_eq!(
            delivery.record.position.place(),
            expected,
            "none is passed over"
        );
    }
    stop.store(true, Ordering::SeqCst);
    for publisher in publishers {
        publisher.await.unwrap();
    }
}

/// An engine whose first attempt to consume was rolled back after it had registered as an owner.
async fn with_a_registration_rolled_back(path: &Path) -> Engine {
    let gone = open(path);
    declare(&gone, "", "*").await;
    let _ = consume(&gone, "").await;
    drop(gone);
    // The one that died is struck from the list when the next one begins; that fails.
    eventually("the process is gone", async || {
        std::fs::read_dir(path.parent().unwrap())
            .unwrap()
            .all(|f| !f.unwrap().file_name().to_string_lossy().contains("owner"))
    })
    .await;
    let engine = open(path);
    let sabotage = Sabotage::plant(path, "DELETE ON owners");
    let refused = consume_some(&engine, "", &["*"], 10).await;
    assert!(refused.is_err(), "the transaction failed");
    sabotage.lift();
    engine
}

// conformance: bus/several-processes: a process whose registration was rolled back registers again, and its work is inherited when it dies
#[tokio::test]
async fn a_process_whose_registration_was_rolled_back_is_inherited_from() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = with_a_registration_rolled_back(&path).await;
    let mut consumer = consume(&engine, "").await;
    let published = publish(&engine, "a.b").await;
    fetch(&mut consumer, 1).await;
    drop(consumer);
    drop(engine);
    let heir = open(&path);
    let mut consumer = consume(&heir, "").await;
    let again = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(
        (again.record.position, again.attempt),
        (published.position, 2)
    );
}

// conformance: bus/several-processes: two processes never hold work under one name
#[tokio::test]
async fn a_process_whose_registration_was_rolled_back_does_not_end_the_work_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let first = with_a_registration_rolled_back(&path).await;
    let idle = consume(&first, "").await;
    let second = open(&path);
    declare(&second, "other", "other.*").await;
    let mut busy = consume(&second, "other").await;
    let published = publish(&second, "other.x").await;
    let delivery = fetch(&mut busy, 1).await.remove(0);
    drop(idle);
    first.broker.close().await.unwrap();
    settle(&second, &delivery, retry_at_once("x")).await;
    let again = fetch(&mut busy, 1).await.remove(0);
    assert_eq!(
        (again.record.position, again.attempt),
        (published.position, 2)
    );
}

// conformance: fault-2/neighbours: a publish is told the truth although a command in its transaction failed
#[tokio::test]
async fn a_publish_beside_a_command_that_fails_is_told_the_truth() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    publish(&engine, "a.b").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    let sabotage = Sabotage::plant(&path, "INSERT ON dead_letters");
    // Whatever the writer takes first, the verdict shares a transaction with a publish.
    let lock = Lock::take(&path);
    let events = [event("a.b", 1), event("a.b", 1)];
    let before = engine.broker.append(vec![events[0].clone()]);
    let verdict = Settlement::new(delivery.lease.clone(), dead("x"));
    let verdict = engine.broker.settle(vec![verdict]);
    let after = engine.broker.append(vec![events[1].clone()]);
    lock.release();
    verdict
        .await
        .expect_err("the dead letter cannot be written");
    for (answer, event) in [before.await, after.await].into_iter().zip(&events) {
        let stored = engine
            .lookup()
            .unwrap()
            .find(event.id())
            .await
            .unwrap()
            .len();
        match answer {
            Ok(_) => assert_eq!(stored, 1),
            Err(e) => {
                assert_ne!(e.code(), Code::StorageFailed, "storage is well: {e}");
                assert!(!e.outcome_unknown(), "{e}");
                assert_eq!(stored, 0);
            }
        }
    }
    sabotage.lift();
    settle(&engine, &delivery, dead("x")).await;
    publish(&engine, "a.b").await;
}

#[tokio::test]
async fn a_group_whose_removal_was_rolled_back_is_served_as_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    publish(&engine, "a.b").await;
    let first = fetch(&mut consumer, 1).await.remove(0);
    let unfetched = publish(&engine, "a.b").await;
    let sabotage = Sabotage::plant(&path, "DELETE ON groups");
    let refused = engine.broker.remove_group("".parse().unwrap()).await;
    refused.expect_err("the group stays");
    sabotage.lift();
    settle(&engine, &first, Verdict::Ack).await;
    let second = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(second.record.position, unfetched.position);
    settle(&engine, &second, Verdict::Ack).await;
}

// conformance: fault-10/leaving: what a consumer had not fetched is given back although its leaving failed at first
#[tokio::test]
async fn a_consumer_whose_leaving_was_rolled_back_still_gives_back_what_it_had_not_fetched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let consumer = consume(&engine, "").await;
    let published = publish(&engine, "a.b").await;
    let sabotage = Sabotage::plant(&path, "INSERT ON deliveries");
    let closing = consumer.close();
    let blocked = tokio::time::timeout(Duration::from_millis(100), closing).await;
    assert!(
        !matches!(blocked, Ok(Ok(()))),
        "it cannot be given back yet"
    );
    sabotage.lift();
    let mut next = consume(&engine, "").await;
    let delivery = fetch(&mut next, 1).await.remove(0);
    assert_eq!(
        (delivery.record.position, delivery.attempt),
        (published.position, 1)
    );
}
