//! Several processes of a group, each an engine of its own here: partitions move between them in the middle of
//! work, and nothing is lost.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus_core::{
    Code, Engine, Event, EventId, Failure, FailureKind, Settlement, Timestamp, Verdict,
};

use crate::server;
use crate::work::{DEADLINE, ack, append, consumer, everything, group, publish, settle, take};

fn event(n: usize) -> Event {
    let builder = Event::builder("order.placed")
        .json(&n)
        .key(format!("k{}", n % 7));
    builder.build().unwrap()
}

/// A worker that acks what it gets, until it is told to end.
fn worker(
    engine: Engine,
    group: &str,
    seen: Arc<Mutex<HashMap<EventId, u32>>>,
) -> tokio::task::JoinHandle<()> {
    let name = group.parse().unwrap();
    tokio::spawn(async move {
        let mut consumer = engine
            .broker
            .consume(name, everything().concurrency(8))
            .await
            .unwrap();
        loop {
            let Ok(batch) = consumer.fetch(16).await else {
                return;
            };
            for delivery in batch {
                tokio::time::sleep(Duration::from_millis(1)).await;
                let ack = Settlement::new(delivery.lease.clone(), Verdict::Ack);
                // Its engine may have been closed, and then another worker gets the event.
                let Ok(answers) = engine.broker.settle(vec![ack]).await else {
                    return;
                };
                match answers.into_iter().next().unwrap() {
                    Ok(()) => {}
                    // The partition moved.
                    Err(error) if error.code() == Code::LeaseLost => continue,
                    Err(error) => panic!("{error}"),
                }
                *seen
                    .lock()
                    .unwrap()
                    .entry(delivery.record.event.id())
                    .or_default() += 1;
            }
        }
    })
}

// conformance: contract/kafka-rebalance: members that join and leave in the middle of work lose nothing
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_come_and_go_in_the_middle_of_work() {
    const EVENTS: usize = 600;
    let Some(url) = server::space() else {
        return;
    };
    let publisher = server::open(&url).await;
    publisher
        .broker
        .declare(group("g", &["order.*"]))
        .await
        .unwrap();
    let seen = Arc::new(Mutex::new(HashMap::new()));
    let first = server::open(&url).await;
    let running = worker(first.clone(), "g", seen.clone());
    let mut ids = HashSet::new();
    let mut others: Vec<Engine> = Vec::new();
    for n in 0..EVENTS {
        ids.insert(append(&publisher, event(n)).await.id);
        match n {
            150 => {
                let other = server::open(&url).await;
                drop(worker(other.clone(), "g", seen.clone()));
                others.push(other);
            }
            300 => {
                let gone = others.pop().unwrap();
                gone.broker.close().await.unwrap();
                let other = server::open(&url).await;
                drop(worker(other.clone(), "g", seen.clone()));
                others.push(other);
            }
            450 => first.broker.close().await.unwrap(),
            _ => {}
        }
    }
    let all = async {
        while !ids.iter().all(|id| seen.lock().unwrap().contains_key(id)) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let in_time = tokio::time::timeout(DEADLINE, all).await;
    let missing = ids
        .iter()
        .filter(|id| !seen.lock().unwrap().contains_key(id))
        .count();
    assert!(in_time.is_ok(), "{missing} of {EVENTS} were not handled");
    running.await.unwrap();
    let done = async {
        loop {
            let groups = publisher.broker.inspect().await.unwrap();
            if groups[0].lag().unsettled() == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(DEADLINE, done)
        .await
        .expect("the group has settled everything");
}

// conformance: contract/kafka-done-above: what is done above an unfinished event is not delivered again after the process has gone, and what waits keeps its attempts
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_above_the_floor_outlives_its_process() {
    let Some(url) = server::space() else {
        return;
    };
    for crash in [false, true] {
        let engine = server::open(&url).await;
        let name = if crash { "crash" } else { "close" };
        engine
            .broker
            .declare(group(name, &[&format!("{name}.*")]))
            .await
            .unwrap();
        let mut ids = Vec::new();
        for n in 0..10 {
            let event = Event::builder(format!("{name}.x"))
                .json(&n)
                .key("k")
                .build()
                .unwrap();
            ids.push(append(&engine, event).await.id);
        }
        let mut first = consumer(&engine, name).await;
        let got = take(&mut first, 10).await;
        for n in [1, 2, 5, 8, 9] {
            ack(&engine, &got[n]).await;
        }
        let failure = Failure::new(1, Timestamp::EPOCH, FailureKind::Error, "it broke");
        let after = Duration::ZERO;
        settle(&engine, &got[0], Verdict::Retry { after, failure })
            .await
            .unwrap();
        settle(&engine, &got[4], Verdict::Release { after })
            .await
            .unwrap();
        if crash {
            drop(first);
        } else {
            drop(first);
            engine.broker.close().await.unwrap();
        }
        drop(engine);
        let engine = server::open(&url).await;
        let mut second = consumer(&engine, name).await;
        let mut attempts = HashMap::new();
        // Those that were in flight when a process died come one at a time.
        while attempts.len() < 5 {
            for delivery in take(&mut second, 1).await {
                attempts.insert(
                    delivery.record.event.id(),
                    (delivery.attempt, delivery.failures.len()),
                );
                ack(&engine, &delivery).await;
            }
        }
        let of = |n: usize| attempts[&ids[n]];
        assert_eq!(of(0), (2, 1), "it failed once");
        assert_eq!(of(4), (1, 0), "it was given back");
        for n in [3, 6, 7] {
            assert_eq!(of(n), (2, 1), "its first attempt was lost");
        }
        let more = tokio::time::timeout(Duration::from_millis(300), second.fetch(10)).await;
        assert!(more.is_err(), "nothing is delivered twice");
        engine.broker.close().await.unwrap();
    }
}

// conformance: contract/kafka-fenced: a member that lost its partition cannot settle what another one has
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_moved_fences_its_old_leases() {
    let Some(url) = server::space() else {
        return;
    };
    let mut options = server::options();
    options.partitions = 1;
    let old = everbus_kafka::open(&url, options.clone()).await.unwrap();
    old.broker.declare(group("g", &["order.*"])).await.unwrap();
    publish(&old, "order.placed").await;
    let mut first = consumer(&old, "g").await;
    let held = take(&mut first, 1).await.remove(0);
    // The member leaves, as it does when it is closed; its lease is over with its partition.
    let new = everbus_kafka::open(&url, options).await.unwrap();
    let mut second = consumer(&new, "g").await;
    first.close().await.unwrap();
    // Sticky: the partition stays with the old member as long as that is there.
    old.broker.close().await.unwrap();
    let again = take(&mut second, 1).await.remove(0);
    assert_eq!(
        (again.record.event.id(), again.attempt),
        (held.record.event.id(), 2)
    );
    let late = old.broker.settle(vec![]).await;
    assert_eq!(late.unwrap_err().code(), Code::EventBusShutdownError);
    ack(&new, &again).await;
}

// conformance: contract/engine-kafka-later-topics: a topic that appears later is read from its earliest event
// conformance: contract/kafka-new-topics: topics that appear later are read from their first event, by groups that were declared before
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topics_that_appear_later_are_read_from_their_beginning() {
    let Some(url) = server::space() else {
        return;
    };
    let (one, two) = (server::open(&url).await, server::open(&url).await);
    let mut spec = group("g", &["*"]);
    spec.start_from = everbus_core::StartFrom::New;
    one.broker.declare(spec).await.unwrap();
    let mut consumer = consumer(&one, "g").await;
    let mut expected = HashSet::new();
    for domain in ["order", "mail", "user"] {
        expected.insert(publish(&two, &format!("{domain}.first")).await.id);
        expected.insert(publish(&two, &format!("{domain}.second")).await.id);
    }
    let mut got = HashSet::new();
    for delivery in take(&mut consumer, 6).await {
        got.insert(delivery.record.event.id());
        ack(&one, &delivery).await;
    }
    assert_eq!(got, expected);
}

// conformance: contract/kafka-declared-at-once: processes that declare a group at the same time add up, and its start is the earliest one
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn declarations_at_the_same_time_add_up() {
    let Some(url) = server::space() else {
        return;
    };
    let mut engines = Vec::new();
    for _ in 0..3 {
        engines.push(server::open(&url).await);
    }
    publish(&engines[0], "order.old").await;
    let declared =
        engines
            .iter()
            .zip(["order.a", "order.b", "order.c"])
            .map(|(engine, pattern)| {
                let mut spec = group("g", &[pattern]);
                spec.start_from = everbus_core::StartFrom::New;
                engine.broker.declare(spec)
            });
    futures_util::future::try_join_all(declared).await.unwrap();
    for pattern in ["order.a", "order.b", "order.c", "order.d"] {
        publish(&engines[1], pattern).await;
    }
    let infos = engines[2].broker.inspect().await.unwrap();
    assert_eq!(infos[0].patterns, ["order.a", "order.b", "order.c"]);
    let mut consumer = consumer(&engines[0], "g").await;
    let mut types = Vec::new();
    for delivery in take(&mut consumer, 3).await {
        types.push(delivery.record.event.event_type().to_owned());
        ack(&engines[0], &delivery).await;
    }
    types.sort();
    assert_eq!(types, ["order.a", "order.b", "order.c"]);
}

// conformance: contract/kafka-removed-group: a group that is created again under the name of a removed one does not use its offsets
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_of_a_removed_name_begins_anew() {
    let Some(url) = server::space() else {
        return;
    };
    let (one, two) = (server::open(&url).await, server::open(&url).await);
    one.broker.declare(group("g", &["order.*"])).await.unwrap();
    publish(&one, "order.placed").await;
    // A member of another process keeps the group from being deleted on the server at once.
    let mut elsewhere = consumer(&two, "g").await;
    ack(&two, &take(&mut elsewhere, 1).await[0]).await;
    one.broker.remove_group("g".parse().unwrap()).await.unwrap();
    let gone = tokio::time::timeout(DEADLINE, elsewhere.fetch(1))
        .await
        .unwrap();
    assert_eq!(gone.unwrap_err().code(), Code::GroupNotFound);
    one.broker.declare(group("g", &["order.*"])).await.unwrap();
    let mut anew = consumer(&one, "g").await;
    assert_eq!(take(&mut anew, 1).await[0].attempt, 1);
}
