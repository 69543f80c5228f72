//! What breaks under the engine: the server, the connection, the process.

use std::sync::Arc;
use std::time::Duration;

use everbus::{Bus, BusOptions};
use everbus_core::{
    Class, Code, Engine, Event, Failure, FailureKind, Result, Settlement, SystemClock, Timestamp,
    Verdict,
};
use everbus_nats::Options;
use everbus_testkit::faults::{OneOfThree, Place, Plan, Subject, campaign, late_ack};
use everbus_testkit::servers::{Nats, NatsCluster, NatsOptions, Proxy};
use serde_json::json;

use crate::streams::{Plain, group, handle, options, publish};

/// With a SQLite file beside it, as it is meant to run.
async fn beside(place: Place) -> Result<Engine> {
    let mut options = Options::default();
    options.synced = true;
    if place.url.contains(',') {
        options.replicas = 3;
    }
    let broker = everbus_nats::open(&place.url, options).await?;
    let file = place.folder.join("store.db");
    let store = everbus_sqlite::open(&file, everbus_sqlite::Options::default())?;
    everbus::compose(broker, store, Arc::new(SystemClock)).await
}

const SUBJECT: Subject = Subject {
    open: |place| Box::pin(beside(place)),
    worker: "faults::worker",
};

fn seed() -> u64 {
    everbus_testkit::model::Random::seed_from_env().unwrap_or(12)
}

#[test]
#[ignore = "a process of the campaign"]
fn worker() {
    SUBJECT.work();
}

// conformance: contract/nats-never-lost: through kills of the server and of workers, connections cut before the reply, a paused server and stopped workers no acknowledged event is lost
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost() {
    let Some(server) = Nats::start(NatsOptions::default()) else {
        return;
    };
    let url = server.url();
    let figures = campaign(&SUBJECT, &server, &url, Plan::from_env(), seed()).await;
    figures.assert_clean();
}

// conformance: contract/nats-never-lost-cluster: with three nodes, one of which is killed or paused at a time, no acknowledged event is lost
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_in_a_cluster() {
    let Some(cluster) = NatsCluster::start() else {
        return;
    };
    let plan = Plan {
        server_kills: 3,
        worker_kills: 1,
        cuts: 4,
        pauses: 1,
        pause: Duration::from_secs(2),
        stops: 0,
    };
    let one = OneOfThree::new(&cluster);
    let figures = campaign(&SUBJECT, &one, &cluster.url(), plan, seed()).await;
    figures.assert_clean();
}

// conformance: contract/nats-zombie: a worker that slept past its lease knows it, and its verdict is not sent
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_slept_refuses_its_own_verdict() {
    let Some(server) = Nats::start(NatsOptions::default()) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let place = Place {
        url: server.url(),
        folder: folder.path().to_owned(),
    };
    let (said, applied) = late_ack(&SUBJECT, &place).await;
    assert_eq!(said, "REFUSED LeaseLost");
    assert!(applied);
}

fn event(n: u64) -> Event {
    Event::builder("order.placed").json(&n).build().unwrap()
}

// conformance: contract/nats-unknown-outcome: a publish whose answer is lost is repeated under its id, and is stored once
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_without_an_answer_is_stored_once() {
    let Some(server) = Nats::start(NatsOptions::default()) else {
        return;
    };
    let proxy = Proxy::start(server.port()).await;
    let engine = everbus_nats::open(&proxy.through(&server.url()), Options::default()).await;
    let engine = engine.unwrap();
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "order.first").await;
    for n in 0..5 {
        proxy.cut_before_reply_to(b"events.order.placed", 1);
        let batch = if n % 2 == 0 {
            vec![event(n)]
        } else {
            vec![event(n), event(n + 100)]
        };
        let expected = batch.len();
        let answers = engine.broker.append(batch).await.unwrap();
        assert_eq!(
            answers.iter().filter(|answer| answer.is_ok()).count(),
            expected
        );
    }
    assert!(proxy.cuts() >= 5, "the cuts met their requests");
    let head = engine.log().unwrap().head().await.unwrap();
    assert_eq!(head.to_string(), "EVERBUS:8", "each event once");
}

// conformance: contract/nats-known-id-cluster: on a stream with three copies a batch with a known and a new id stores the new event, and the stream lives
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_with_a_known_id_leaves_a_cluster_alive() {
    let Some(cluster) = NatsCluster::start() else {
        return;
    };
    let mut three = Options::default();
    three.replicas = 3;
    let engine = everbus_nats::open(&cluster.url(), three).await.unwrap();
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    let known = event(1);
    let append = async |batch: Vec<Event>| {
        let answers = engine.broker.append(batch).await.unwrap();
        let answers = answers.into_iter().map(|answer| answer.unwrap());
        answers
            .map(|appended| (appended.position.place(), appended.duplicate))
            .collect::<Vec<_>>()
    };
    assert_eq!(append(vec![known.clone()]).await, [(1, false)]);
    let mixed = vec![event(2), known.clone(), event(3)];
    assert_eq!(
        append(mixed).await,
        [(2, false), (1, true), (3, false)],
        "the new ones are stored"
    );
    assert_eq!(append(vec![event(4)]).await, [(4, false)]);
    assert_eq!(handle(&engine, "g", 4).await.len(), 4);
}

// conformance: contract/nats-away: a server that is away is Unavailable and says whether the publish may have taken effect; the bus goes on by itself
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_away_is_waited_for() {
    let Some(server) = Nats::start(NatsOptions::default()) else {
        return;
    };
    let mut brief = Options::default();
    brief.timeout = Duration::from_secs(1);
    let engine = everbus_nats::open(&server.url(), brief).await.unwrap();
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
            // An error is reported once, and the reader goes on. The server may have forgotten the ack before
            // its end.
            let batch = consumer.fetch(10).await.unwrap_or_default();
            let types = batch
                .iter()
                .map(|delivery| delivery.record.event.event_type());
            if types
                .into_iter()
                .any(|event_type| event_type == "order.placed")
            {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), came)
        .await
        .unwrap();
    server.pause();
    let error = engine.broker.append(vec![event(3)]).await.unwrap_err();
    assert_eq!(
        (error.code(), error.class()),
        (Code::Unavailable, Class::Unknown)
    );
    server.resume();
    let answers = engine.broker.append(vec![event(3)]).await.unwrap();
    assert!(answers.into_iter().all(|answer| answer.is_ok()));
}

// conformance: contract/health: while the server is away or stands still, bus.health() says Unavailable, and nothing is wrong again once it is back
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_says_that_the_server_is_away() {
    let Some(server) = Nats::start(NatsOptions::default()) else {
        return;
    };
    let engine = everbus_nats::open(&server.url(), Options::default()).await;
    let bus = Bus::with_engine(engine.unwrap(), BusOptions::default()).unwrap();
    let well = async || {
        let well = async {
            while bus.health().await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let well = tokio::time::timeout(Duration::from_secs(60), well);
        well.await.expect("it goes on by itself");
    };
    bus.health().await.unwrap();
    server.pause();
    let error = bus.health().await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
    server.resume();
    well().await;
    server.kill();
    let error = bus.health().await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
    assert!(error.hint_text().is_some(), "{error:?}");
    server.restart();
    well().await;
    bus.shutdown().await.unwrap();
}

// conformance: omni/nats-close: a close waits for running publishes, and gives events that no handler has begun to other processes at once
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_close_loses_nothing_and_holds_nothing() {
    let Some(server) = Nats::start(NatsOptions::default()) else {
        return;
    };
    let url = server.url();
    let engine = everbus_nats::open(&url, Options::default()).await.unwrap();
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    for _ in 0..10 {
        publish(&engine, "a.b").await;
    }
    // Longer than the test waits: what is not given back would not come in time.
    let long = options().lease(Duration::from_secs(600));
    let consumer = engine.broker.consume("g".parse().unwrap(), long);
    let mut consumer = consumer.await.unwrap();
    let first = consumer.fetch(1).await.unwrap().remove(0);
    let ack = Settlement::new(first.lease, Verdict::Ack);
    let acked = engine.broker.settle(vec![ack]).await.unwrap();
    assert!(acked[0].is_ok(), "{acked:?}");
    let append = |n: u64| {
        let broker = engine.broker.clone();
        async move { broker.append(vec![event(n)]).await }
    };
    let running = futures_util::future::join_all((0..20).map(append));
    let running = tokio::spawn(running);
    let polled = async {
        // The publishes have begun when the first of them is stored.
        let log = engine.log().unwrap();
        while log.head().await.unwrap().to_string() == "EVERBUS:10" {
            tokio::task::yield_now().await;
        }
    };
    polled.await;
    engine.broker.close().await.unwrap();
    let published = running.await.unwrap();
    let stored = published.iter().filter(|answer| answer.is_ok()).count();
    for late in published.into_iter().filter_map(Result::err) {
        assert_eq!(late.code(), Code::EventBusShutdownError, "{late:?}");
    }
    let refused = engine.broker.append(vec![event(99)]).await.unwrap_err();
    assert_eq!(refused.code(), Code::EventBusShutdownError);
    drop(consumer);
    let other = everbus_nats::open(&url, Options::default()).await.unwrap();
    assert_eq!(handle(&other, "g", 9 + stored).await.len(), 9 + stored);
    let info = other.broker.inspect().await.unwrap().remove(0);
    assert_eq!((info.behind, info.in_flight), (0, 0));
    assert_eq!(
        info.position.to_string(),
        format!("EVERBUS:{}", 10 + stored)
    );
}

// conformance: contract/nats-dead-letter-repeated: a dead letter whose end is repeated after a lost answer is stored once, with its failures once
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_dead_letter_is_stored_once() {
    let Some(server) = Nats::start(NatsOptions::default()) else {
        return;
    };
    let proxy = Proxy::start(server.port()).await;
    let engine = everbus_nats::open(&proxy.through(&server.url()), Options::default()).await;
    let engine = engine.unwrap();
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "a.b").await;
    let consumer = engine.broker.consume("g".parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    let delivery = consumer.fetch(1).await.unwrap().remove(0);
    let failure = Failure::new(1, Timestamp::from_micros(7), FailureKind::Error, "it broke");
    let dead = Settlement::new(
        delivery.lease,
        Verdict::Dead {
            failure: Some(failure),
        },
    );
    proxy.cut_before_reply_to(b"+TERM", 1);
    let first = engine
        .broker
        .settle(vec![dead.clone()])
        .await
        .unwrap()
        .remove(0);
    assert_eq!(first.unwrap_err().class(), Class::Unknown);
    let second = engine.broker.settle(vec![dead]).await.unwrap().remove(0);
    second.unwrap();
    let groups = engine.broker.inspect().await.unwrap();
    assert_eq!((groups[0].dead_letters, groups[0].in_flight), (1, 0));
    let plain = Plain::connect(&server.url()).await;
    let last = json!({"last_by_subj": "dlq.>"});
    let letter = plain.api("STREAM.MSG.GET.DLQ", last).await;
    let headers = letter["message"]["hdrs"].as_str().unwrap();
    let headers = data_encoding::BASE64.decode(headers.as_bytes()).unwrap();
    let headers = String::from_utf8(headers).unwrap();
    assert_eq!(headers.matches("it broke").count(), 1, "{headers}");
    // Event, notice: the notice was published once as well.
    let head = engine.log().unwrap().head().await.unwrap();
    assert_eq!(head.to_string(), "EVERBUS:2");
}
