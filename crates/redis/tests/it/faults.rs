//! What breaks under the engine: the server, the connection, the process.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Class, Code, Engine, Event, Failure, FailureKind, Result, Settlement, SystemClock, Timestamp,
    Verdict,
};
use everbus_redis::Options;
use everbus_testkit::faults::{Place, Plan, Subject, campaign, late_ack};
use everbus_testkit::servers::{Proxy, Redis, RedisOptions};

use crate::plain::{Plain, group, handle, options, publish};

/// With a SQLite file beside it.
async fn beside(place: Place) -> Result<Engine> {
    let broker = everbus_redis::open(&place.url, Options::default()).await?;
    let file = place.folder.join("store.db");
    let store = everbus_sqlite::open(&file, everbus_sqlite::Options::default())?;
    everbus::compose(broker, store, Arc::new(SystemClock)).await
}

const SUBJECT: Subject = Subject {
    open: |place| Box::pin(beside(place)),
    worker: "faults::worker",
};

/// Without a store: its own dead letters, follow-ups and inbox.
const ALONE: Subject = Subject {
    open: |place| {
        Box::pin(async move { everbus_redis::open(&place.url, Options::default()).await })
    },
    worker: "faults::worker_alone",
};

#[test]
#[ignore = "a process of the campaign"]
fn worker_alone() {
    ALONE.work();
}

// conformance: contract/redis-never-lost-alone: the same holds without a store, with the dead letters and follow-ups of the scripts
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_without_a_store() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let url = server.url();
    let figures = campaign(&ALONE, &server, &url, Plan::from_env(), seed()).await;
    figures.assert_clean();
}

fn seed() -> u64 {
    everbus_testkit::model::Random::seed_from_env().unwrap_or(13)
}

#[test]
#[ignore = "a process of the campaign"]
fn worker() {
    SUBJECT.work();
}

// conformance: contract/redis-never-lost: through kills of the server and of workers, connections cut before the reply, a paused server and stopped workers no acknowledged event is lost
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let url = server.url();
    let figures = campaign(&SUBJECT, &server, &url, Plan::from_env(), seed()).await;
    figures.assert_clean();
}

// conformance: contract/redis-zombie: a verdict of a worker that slept past its lease is refused by the server
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_verdict_of_a_worker_that_slept_is_refused() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let place = Place {
        url: server.url(),
        folder: folder.path().to_owned(),
    };
    // With a store beside it, the process refuses its own verdict; without one, only the server can.
    for subject in [&ALONE, &SUBJECT] {
        let (said, applied) = late_ack(subject, &place).await;
        assert_eq!(said, "REFUSED LeaseLost", "{}", subject.worker);
        assert!(applied);
        server.command("FLUSHALL");
    }
}

fn event(n: u64) -> Event {
    Event::builder("order.placed").json(&n).build().unwrap()
}

// conformance: contract/redis-unknown-outcome: a publish whose answer is lost is repeated under its id, and is stored once
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_without_an_answer_is_stored_once() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let proxy = Proxy::start(server.port()).await;
    let engine = everbus_redis::open(&proxy.through(&server.url()), Options::default()).await;
    let engine = engine.unwrap();
    publish(&engine, "order.placed").await;
    for n in 0..5 {
        proxy.cut_before_reply_to(b"order:placed", 1);
        let batch = match n % 2 {
            0 => vec![event(n)],
            _ => vec![event(n), event(n + 100)],
        };
        let expected = batch.len();
        let answers = engine.broker.append(batch).await.unwrap();
        let stored = answers.iter().filter(|answer| answer.is_ok());
        assert_eq!(stored.count(), expected);
    }
    assert!(proxy.cuts() >= 5, "the cuts met their requests");
    let plain = Plain::connect(&server.url()).await;
    assert_eq!(
        plain.number(&["XLEN", "order:placed"]).await,
        8,
        "each event once"
    );
}

// conformance: contract/redis-lost-claim: events of a claim whose answer was lost come at once, and the lost hand-out is no attempt
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_without_an_answer_is_undone() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let proxy = Proxy::start(server.port()).await;
    let engine = everbus_redis::open(&proxy.through(&server.url()), Options::default()).await;
    let engine = engine.unwrap();
    engine
        .broker
        .declare(group("lost-claims", &["*"]))
        .await
        .unwrap();
    publish(&engine, "order.placed").await;
    let long = options().lease(Duration::from_secs(600));
    let mut consumer = engine
        .broker
        .consume("lost-claims".parse().unwrap(), long)
        .await
        .unwrap();
    // The claim is the first request that names the stream after the group.
    proxy.cut_before_reply_to(b"order:placed", 1);
    let came = async {
        loop {
            // The error is reported once, and the consumer goes on.
            if let Ok(batch) = consumer.fetch(10).await {
                return batch;
            }
        }
    };
    let batch = tokio::time::timeout(Duration::from_secs(60), came)
        .await
        .unwrap();
    assert!(proxy.cuts() >= 1, "the cut met the claim");
    assert_eq!((batch.len(), batch[0].attempt), (1, 1));
    assert!(batch[0].failures.is_empty());
    let ack = Settlement::new(batch[0].lease.clone(), Verdict::Ack);
    engine
        .broker
        .settle(vec![ack])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
}

// conformance: contract/redis-settled-once: a verdict whose answer was lost is applied once: one dead letter, one notice, its failures once
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_verdict_without_an_answer_is_applied_once() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let proxy = Proxy::start(server.port()).await;
    let engine = everbus_redis::open(&proxy.through(&server.url()), Options::default()).await;
    let engine = engine.unwrap();
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "a.b").await;
    // The server knows the script from here on.
    assert_eq!(handle(&engine, "g", 1).await, ["a.b"]);
    publish(&engine, "a.b").await;
    let consumer = engine.broker.consume("g".parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    let delivery = consumer.fetch(1).await.unwrap().remove(0);
    let failure = Failure::new(1, Timestamp::from_micros(7), FailureKind::Error, "it broke");
    let failure = Some(failure);
    let mut dead = Settlement::new(delivery.lease, Verdict::Dead { failure });
    dead.follow_ups = vec![event(1)];
    proxy.cut_before_reply_to(b"it broke", 1);
    let first = engine.broker.settle(vec![dead.clone()]).await.unwrap_err();
    assert_eq!(first.class(), Class::Unknown);
    let second = engine.broker.settle(vec![dead]).await.unwrap().remove(0);
    assert_eq!(second.unwrap_err().code(), Code::LeaseLost, "it is settled");
    let groups = engine.broker.inspect().await.unwrap();
    assert_eq!((groups[0].dead_letters, groups[0].in_flight), (1, 0));
    let plain = Plain::connect(&server.url()).await;
    assert_eq!(plain.number(&["XLEN", "dlq:a:b"]).await, 1);
    assert_eq!(plain.number(&["XLEN", "system:dead_letter"]).await, 1);
    assert_eq!(plain.number(&["XLEN", "order:placed"]).await, 1);
    let letter = plain.text(&["XRANGE", "dlq:a:b", "-", "+"]).await;
    assert!(
        letter.contains("original_stream") && letter.contains("failed_at"),
        "{letter}"
    );
}

// conformance: contract/redis-away: a server that is away is Unavailable and says whether the publish may have taken effect; the bus goes on by itself
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_away_is_waited_for() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let mut brief = Options::default();
    brief.timeout = Duration::from_secs(1);
    let engine = everbus_redis::open(&server.url(), brief).await.unwrap();
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "a.b").await;
    assert_eq!(handle(&engine, "g", 1).await, ["a.b"]);
    let consumer = engine.broker.consume("g".parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    server.kill();
    let error = engine.broker.append(vec![event(1)]).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(matches!(error.class(), Class::Passing | Class::Unknown));
    server.restart();
    let answers = engine.broker.append(vec![event(2)]).await.unwrap();
    assert!(answers.into_iter().all(|answer| answer.is_ok()));
    // The consumer resumes without being opened again.
    let came = async {
        loop {
            let batch = consumer.fetch(10).await.unwrap_or_default();
            if let Some(delivery) = batch.into_iter().next() {
                return delivery;
            }
        }
    };
    let came = tokio::time::timeout(Duration::from_secs(60), came)
        .await
        .unwrap();
    assert_eq!(
        came.record.event.event_type(),
        "order.placed",
        "the ack before is kept"
    );
    server.pause();
    let error = engine.broker.append(vec![event(3)]).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert_eq!(error.class(), Class::Unknown);
    server.resume();
    let answers = engine.broker.append(vec![event(3)]).await.unwrap();
    assert!(answers.into_iter().all(|answer| answer.is_ok()));
}
