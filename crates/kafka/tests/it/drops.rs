//! Events that the server removes by their age. The tests remove them at once, as a server does after hours.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Clock as _, Cursor, Engine, GroupInfo, ManualClock, Pattern, Stream, Streams, SystemClock,
};
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use crate::{bad_input, server, work};

const DAY: Duration = Duration::from_secs(24 * 3600);

fn table() -> Streams {
    let of = |name: &str, pattern: &str| Stream::new(name, [pattern]).unwrap();
    Streams::new([
        of("LONG", "long.>").max_age(30 * DAY),
        of("SHORT", "short.>").max_age(60 * DAY),
        of("SYSTEM", "system.>"),
    ])
    .unwrap()
}

/// Removes all events of a topic.
async fn empty(url: &str, topic: &str) {
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", bad_input::host(url))
        .create()
        .unwrap();
    let name = format!("{}.{topic}", url.rsplit('/').next().unwrap());
    let mut before = TopicPartitionList::new();
    for partition in 0..2 {
        before
            .add_partition_offset(&name, partition, Offset::End)
            .unwrap();
    }
    let removed = admin.delete_records(&before, &AdminOptions::new());
    removed.await.unwrap();
}

async fn slow(engine: &Engine) -> GroupInfo {
    let groups = engine.broker.inspect().await.unwrap();
    let mut groups = groups.into_iter();
    groups.find(|g| g.name.as_str() == "slow").unwrap()
}

// conformance: omni/nats-drops: on Kafka as well, the capabilities say that the server drops by age, a lag of 80 % of the age raises an alert, and dropped events are counted
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_that_get_too_old_are_reported() {
    let Some(url) = server::space() else { return };
    // The server refuses records from the future.
    let clock = Arc::new(ManualClock::new(SystemClock.now().minus(24 * DAY)));
    let mut options = server::options();
    options.clock = clock.clone();
    let engine = everbus_kafka::open(&url, options).await.unwrap();
    assert!(!engine.broker.capabilities().drops_by_age);
    engine.broker.declare_streams(table()).await.unwrap();
    assert!(engine.broker.capabilities().drops_by_age);
    let group = work::group("slow", &["long.*", "short.*"]);
    engine.broker.declare(group).await.unwrap();
    let builder = everbus::Bus::builder().streams(table());
    let bus = builder.with_engine(engine).unwrap();
    bus.publish(("long.one", 1)).await.unwrap();
    for n in 0..4 {
        bus.publish(("short.one", n)).await.unwrap();
    }
    let groups = bus.groups().await.unwrap();
    let known = groups.iter().find(|g| g.name.as_str() == "slow").unwrap();
    assert_eq!((known.behind, known.lag().dropped), (5, 0));
    clock.advance(24 * DAY);
    empty(&url, "SHORT").await;
    let reported = async {
        let system = vec![Pattern::new("system.>").unwrap()];
        loop {
            let groups = bus.groups().await.unwrap();
            let log = bus.engine().log().unwrap();
            let (found, _) = log.read(Cursor::START, system.clone(), 100).await.unwrap();
            let mut told: Vec<(String, serde_json::Value)> = Vec::new();
            for record in found {
                let body: serde_json::Value = record.event.json().unwrap();
                assert_eq!(body["group"], "slow");
                told.push((record.event.event_type().to_owned(), body));
            }
            told.sort_by(|a, b| a.0.cmp(&b.0));
            if told.len() >= 2 {
                return (groups, told);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let reported = tokio::time::timeout(work::DEADLINE, reported).await;
    let (groups, told) = reported.expect("it is reported");
    assert_eq!(told[0].0, "system.events_at_risk", "{told:?}");
    assert_eq!(told[0].1["stream"], "LONG", "{told:?}");
    assert_eq!(told[1].0, "system.events_dropped", "{told:?}");
    assert_eq!(told[1].1["stream"], "SHORT", "{told:?}");
    assert_eq!(told[1].1["dropped"], 4, "{told:?}");
    let slow = groups.iter().find(|g| g.name.as_str() == "slow").unwrap();
    assert_eq!((slow.behind, slow.lag().dropped), (1, 4));
    bus.shutdown().await.unwrap();
}

// conformance: omni/nats-drops: a consumer that comes back after the server removed events counts them; a new group misses none
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_counts_what_was_removed_before_it_came() {
    let Some(url) = server::space() else { return };
    let engine = server::open(&url).await;
    engine.broker.declare_streams(table()).await.unwrap();
    let declare = |name: &str| engine.broker.declare(work::group(name, &["short.*"]));
    declare("slow").await.unwrap();
    for _ in 0..3 {
        work::publish(&engine, "short.one").await;
    }
    empty(&url, "SHORT").await;
    declare("new").await.unwrap();
    // A key for each partition.
    for _ in 0..8 {
        work::publish(&engine, "short.two").await;
    }
    let mut consumer = work::consumer(&engine, "slow").await;
    for delivery in work::take(&mut consumer, 8).await {
        assert_eq!(delivery.record.event.event_type(), "short.two");
        work::ack(&engine, &delivery).await;
    }
    assert_eq!(slow(&engine).await.lag().dropped, 3);
    let groups = engine.broker.inspect().await.unwrap();
    let new = groups.iter().find(|g| g.name.as_str() == "new").unwrap();
    assert_eq!((new.behind, new.lag().dropped), (8, 0));
}
