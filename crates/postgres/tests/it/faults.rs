//! What breaks under the engine: the server, the connection, the process.

use std::sync::Arc;
use std::time::Duration;

use everbus::{Bus, BusOptions};
use everbus_core::{
    Class, Code, ConsumeOptions, Consumer, Delivery, Engine, Event, GroupName, Pattern, Result,
    Settlement, SystemClock, Verdict,
};
use everbus_postgres::Options;
use everbus_testkit::faults::{Place, Plan, Subject, campaign, late_ack};
use everbus_testkit::servers::{Postgres, Proxy, free_port};

use crate::support::{event, group, options};

async fn open(place: Place) -> Result<Engine> {
    everbus_postgres::open(&place.url, Options::default()).await
}

/// Declares the group `g` and returns a consumer of it that takes every event.
async fn consumer_of(engine: &Engine) -> Box<dyn Consumer> {
    engine.broker.declare(group("g")).await.unwrap();
    let wanted = ConsumeOptions::new(vec![Pattern::new("*").unwrap()]);
    let name = GroupName::new("g").unwrap();
    engine.broker.consume(name, wanted).await.unwrap()
}

const SUBJECT: Subject = Subject {
    open: |place| Box::pin(open(place)),
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

// conformance: engines/postgres-never-lost: through kills of the server and of workers, connections cut before the reply, a paused server and stopped workers no acknowledged event is lost
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost() {
    let Some(server) = Postgres::start() else {
        return;
    };
    let url = server.fresh_database();
    let figures = campaign(&SUBJECT, &server, &url, Plan::from_env(), seed()).await;
    figures.assert_clean();
}

// conformance: engines/postgres-zombie: a worker that slept past its lease is refused, and the holder's ack is applied
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_slept_is_refused() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let place = Place {
        url: server.fresh_database(),
        folder: folder.path().to_owned(),
    };
    let (said, applied) = late_ack(&SUBJECT, &place).await;
    assert_eq!(said, "REFUSED LeaseLost");
    assert!(applied);
}

// conformance: engines/postgres-unknown-outcome: a publish whose answer is lost has an unknown outcome, and its repetition stores it once
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_without_an_answer_is_stored_once() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let url = server.fresh_database();
    let proxy = Proxy::start(server.port()).await;
    let engine = everbus_postgres::open(&proxy.through(&url), Options::default())
        .await
        .unwrap();
    engine.broker.declare(group("g")).await.unwrap();
    engine.broker.append(vec![event(0)]).await.unwrap();
    let mut unknown = 0;
    for number in 1..=6 {
        let marked = |n: u32| Event::builder("a.b").json(&format!("marked {n}")).build();
        let batch = (0..=number % 2).map(|i| marked(10 * number + i).unwrap());
        let batch: Vec<Event> = batch.collect();
        // The statement with the payloads is its own transaction.
        proxy.cut_before_reply_to(b"marked", 1);
        loop {
            match engine.broker.append(batch.clone()).await {
                Ok(answers) => {
                    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
                    break;
                }
                Err(error) => {
                    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
                    unknown += u32::from(error.class() == Class::Unknown);
                }
            }
        }
        proxy.heal();
    }
    assert!(proxy.cuts() >= 1, "a cut met its request");
    assert!(unknown >= 1, "some publish did not know its outcome");
    let (read, _) = engine
        .log()
        .unwrap()
        .read(
            everbus_core::Cursor::START,
            vec![Pattern::new("*").unwrap()],
            100,
        )
        .await
        .unwrap();
    assert_eq!(read.len(), 1 + 9, "each event once");
}

// conformance: contract/health: while the server is away, bus.health() says Unavailable, and nothing is wrong again once it is back
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_says_that_the_server_is_away() {
    let Some(server) = Postgres::start() else {
        return;
    };
    let engine = open(Place {
        url: server.fresh_database(),
        folder: std::path::PathBuf::new(),
    });
    let bus = Bus::with_engine(engine.await.unwrap(), BusOptions::default()).unwrap();
    bus.health().await.unwrap();
    server.kill();
    let error = bus.health().await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
    assert!(error.hint_text().is_some(), "{error:?}");
    server.restart();
    let well = async {
        while bus.health().await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), well)
        .await
        .unwrap();
    bus.shutdown().await.unwrap();
    let error = bus.health().await.unwrap_err();
    assert_eq!(error.code(), Code::EventBusShutdownError);
}

// conformance: engines/postgres-away: a server that is away is Unavailable; the consumer goes on by itself when it is back
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_away_is_waited_for() {
    let Some(server) = Postgres::start() else {
        return;
    };
    let url = server.fresh_database();
    let brief = Options {
        patience: Duration::from_secs(2),
        ..options(Arc::new(SystemClock))
    };
    let engine = everbus_postgres::open(&url, brief).await.unwrap();
    let mut consumer = consumer_of(&engine).await;
    engine.broker.append(vec![event(1)]).await.unwrap();
    let first = consumer.fetch(10).await.unwrap();
    // A claim is on the disk with the next commit that waits for it.
    engine.broker.append(vec![event(0)]).await.unwrap();
    server.kill();
    let error = engine.broker.append(vec![event(2)]).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
    assert!(error.class().may_repeat());
    assert!(error.hint_text().is_some());
    let ack = Settlement::new(first[0].lease.clone(), Verdict::Ack);
    let refused = engine.broker.settle(vec![ack.clone()]).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    server.restart();
    let appended = engine.broker.append(vec![event(3)]).await.unwrap();
    assert!(appended.iter().all(Result::is_ok), "{appended:?}");
    engine
        .broker
        .settle(vec![ack])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    let rest = async {
        let mut bodies = Vec::new();
        while bodies.len() < 2 {
            // An error is reported, and the next call goes on.
            if let Ok(batch) = consumer.fetch(10).await {
                let body = |d: &Delivery| d.record.event.json::<u32>().unwrap();
                bodies.extend(batch.iter().map(body));
            }
        }
        bodies
    };
    let rest = tokio::time::timeout(Duration::from_secs(60), rest);
    assert_eq!(rest.await.unwrap(), [0, 3]);
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-failover: after a failover to another host of the URL, publishers and consumers go on there, although the old server is back as a replica
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_is_waited_out() {
    let Some(server) = Postgres::start() else {
        return;
    };
    let port = free_port();
    let one = format!("127.0.0.1:{}", server.port());
    let both = format!("{one},127.0.0.1:{port}");
    let url = server.fresh_database().replace(&one, &both);
    let engine = everbus_postgres::open(&url, options(Arc::new(SystemClock)));
    let engine = engine.await.unwrap();
    let mut consumer = consumer_of(&engine).await;
    engine.broker.append(vec![event(1)]).await.unwrap();
    let next = server.fail_over(port);
    let appended = engine.broker.append(vec![event(2)]).await.unwrap();
    assert!(appended.iter().all(Result::is_ok), "{appended:?}");
    let all = async {
        let mut bodies = std::collections::BTreeSet::new();
        while bodies.len() < 2 {
            // An error is that of a connection to the server before.
            let Ok(batch) = consumer.fetch(10).await else {
                continue;
            };
            for delivery in batch {
                bodies.insert(delivery.record.event.json::<u32>().unwrap());
                let ack = Settlement::new(delivery.lease, Verdict::Ack);
                engine
                    .broker
                    .settle(vec![ack])
                    .await
                    .unwrap()
                    .remove(0)
                    .unwrap();
            }
        }
        bodies
    };
    let all = tokio::time::timeout(Duration::from_secs(60), all);
    assert_eq!(all.await.unwrap(), [1, 2].into());
    engine.broker.close().await.unwrap();
    drop(next);
}

// conformance: engines/postgres-dropped-pause: the claims of a pause or close whose future is dropped are given back at once, without an attempt
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_pause_gives_its_claims_back() {
    let Some(url) = crate::support::fresh_schema() else {
        return;
    };
    let engine = crate::support::open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    engine.broker.append(vec![event(1)]).await.unwrap();
    // Longer than the test waits.
    let wanted = ConsumeOptions::new(vec![Pattern::new("*").unwrap()]);
    let wanted = wanted.lease(Duration::from_secs(3600));
    let mut consumer = engine
        .broker
        .consume(GroupName::new("g").unwrap(), wanted)
        .await
        .unwrap();
    let (base, schema) = url.split_once("?schema=").unwrap();
    let schema = schema.split('&').next().unwrap();
    let no_tls = everbus_postgres::tokio_postgres::NoTls;
    let connected = everbus_postgres::tokio_postgres::connect(base, no_tls).await;
    let (blocker, connection) = connected.unwrap();
    tokio::spawn(connection);
    let lock = format!("BEGIN; SELECT 1 FROM {schema}.groups FOR UPDATE");
    blocker.batch_execute(&lock).await.unwrap();
    // The claim waits for the group, and with it the pause.
    let brief = Duration::from_millis(300);
    let fetched = tokio::time::timeout(brief, consumer.fetch(1)).await;
    assert!(fetched.is_err(), "{fetched:?}");
    let paused = tokio::time::timeout(brief, consumer.pause()).await;
    assert!(paused.is_err(), "{paused:?}");
    blocker.batch_execute("COMMIT").await.unwrap();
    consumer.resume(10).await.unwrap();
    let fetched = tokio::time::timeout(Duration::from_secs(60), consumer.fetch(1)).await;
    let fetched = fetched.expect("it is given back").unwrap();
    assert_eq!(fetched[0].attempt, 1, "{fetched:?}");
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-undone-claim: after a crash of the server undid a claim, its events are handed out again, and a settlement with the lease of before is refused
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_undone_claim_cannot_be_settled() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let url = server.fresh_database();
    let engine = everbus_postgres::open(&url, options(Arc::new(SystemClock)));
    let engine = engine.await.unwrap();
    let mut consumer = consumer_of(&engine).await;
    engine.broker.append(vec![event(1)]).await.unwrap();
    let before = consumer.fetch(10).await.unwrap().remove(0);
    // What a crash takes back: the claim and the cursor, whose commit did not wait for the disk.
    server.sql_at(
        &url,
        "BEGIN; DELETE FROM everbus.claims; UPDATE everbus.groups SET cursor = 0; COMMIT",
    );
    let after = consumer.fetch(10).await.unwrap().remove(0);
    assert_eq!(after.record.position, before.record.position);
    let settle = async |delivery: &Delivery| {
        let ack = Settlement::new(delivery.lease.clone(), Verdict::Ack);
        engine.broker.settle(vec![ack]).await.unwrap().remove(0)
    };
    let refused = settle(&before).await.unwrap_err();
    assert_eq!(refused.code(), Code::LeaseLost, "{refused:?}");
    settle(&after).await.unwrap();
    engine.broker.close().await.unwrap();
}
