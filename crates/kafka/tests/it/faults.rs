//! What breaks under the engine: the server, the connection, the process.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Class, Code, Durability, Engine, Event, Result, SystemClock};
use everbus_testkit::faults::{OneOfThree, Place, Plan, Subject, campaign, late_ack};
use everbus_testkit::servers::{Kafka, KafkaCluster, KafkaOptions};

use crate::server;
use crate::work::{DEADLINE, ack, consumer, group, publish, take};

/// With a SQLite file beside it, as it is meant to run.
async fn beside(place: Place) -> Result<Engine> {
    let mut options = server::options();
    if place.url.contains(',') {
        options.copies = Some(3);
    }
    let broker = everbus_kafka::open(&place.url, options).await?;
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

// conformance: contract/kafka-never-lost: through kills of the server and of workers, connections cut before the reply, a paused server and stopped workers no acknowledged event is lost
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost() {
    let Some(server) = Kafka::start(&KafkaOptions::default().behind_proxy()) else {
        return;
    };
    let url = server.url();
    let figures = campaign(&SUBJECT, &server, &url, Plan::from_env(), seed()).await;
    figures.assert_clean();
}

// conformance: contract/kafka-never-lost-cluster: with three brokers, one of which is killed or paused at a time, no acknowledged event is lost
// needs: three Kafka servers, by hand
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_in_a_cluster() {
    let Some(cluster) = KafkaCluster::start(&KafkaOptions::default().behind_proxy()) else {
        return;
    };
    let mut plan = Plan {
        server_kills: 2,
        worker_kills: 1,
        cuts: 3,
        pauses: 1,
        pause: Duration::from_secs(2),
        stops: 0,
    };
    if Plan::from_env() == Plan::FULL {
        plan = Plan {
            server_kills: 6,
            worker_kills: 5,
            cuts: 20,
            pauses: 1,
            pause: Duration::from_secs(30),
            stops: 1,
        };
    }
    let one = OneOfThree::new(&cluster);
    let figures = campaign(&SUBJECT, &one, &cluster.url(), plan, seed()).await;
    figures.assert_clean();
}

// conformance: contract/kafka-in-sync: topics with copies are created so that an event is acknowledged by two brokers
// needs: three Kafka servers, by hand
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topics_with_copies_are_acknowledged_by_two_brokers() {
    let options = KafkaOptions::default().config("min.insync.replicas=1");
    let Some(cluster) = KafkaCluster::start(&options) else {
        return;
    };
    for copies in [None, Some(3)] {
        let mut options = server::options();
        options.copies = copies;
        let space = format!("{}/c{}", cluster.url(), copies.unwrap_or(0));
        let engine = everbus_kafka::open(&space, options).await.unwrap();
        publish(&engine, "order.placed").await;
        let durability = engine.broker.capabilities().durability;
        assert_eq!(durability, Durability::Replicated, "{copies:?}");
        let again = everbus_kafka::open(&space, server::options())
            .await
            .unwrap();
        assert_eq!(again.weaknesses, [], "{copies:?}");
    }
}

// conformance: contract/kafka-zombie: a worker that was stopped past its session cannot ack what another one has
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_slept_is_refused() {
    let Some(url) = server::space() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let place = Place {
        url,
        folder: folder.path().to_owned(),
    };
    let (said, applied) = late_ack(&SUBJECT, &place).await;
    assert_eq!(said, "REFUSED LeaseLost");
    assert!(applied);
}

fn event() -> Event {
    Event::builder("order.placed").build().unwrap()
}

// conformance: contract/kafka-away: a server that is away is Unavailable, and the publish may have taken effect; the bus goes on by itself
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_away_is_waited_for() {
    let Some(server) = Kafka::start(&KafkaOptions::default()) else {
        return;
    };
    let mut brief = server::options();
    brief.timeout = Duration::from_secs(3);
    let engine = everbus_kafka::open(&server.url(), brief).await.unwrap();
    engine
        .broker
        .declare(group("g", &["order.*"]))
        .await
        .unwrap();
    publish(&engine, "order.first").await;
    let mut consumer = consumer(&engine, "g").await;
    ack(&engine, &take(&mut consumer, 1).await[0]).await;
    server.kill();
    let error = engine.broker.append(vec![event()]).await.unwrap_err();
    assert_eq!(
        (error.code(), error.class()),
        (Code::Unavailable, Class::Unknown)
    );
    server.restart();
    // The first publishes may come while the server has no leader yet.
    let stored = async {
        loop {
            if let Ok(answers) = engine.broker.append(vec![event()]).await
                && answers.iter().all(std::result::Result::is_ok)
            {
                return;
            }
        }
    };
    tokio::time::timeout(DEADLINE, stored)
        .await
        .expect("publishes go on");
    let came = async {
        loop {
            // An error is reported once, and the member goes on.
            let batch = consumer.fetch(10).await.unwrap_or_default();
            if let Some(delivery) = batch.first() {
                return delivery.clone();
            }
        }
    };
    let delivery = tokio::time::timeout(DEADLINE, came)
        .await
        .expect("the consumer goes on");
    assert_eq!(delivery.record.event.event_type(), "order.placed");
    ack(&engine, &delivery).await;
}
