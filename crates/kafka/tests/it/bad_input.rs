//! What is wrong with a server, a topic or an event is said in words, with a hint.

use std::time::Duration;

use everbus_core::{
    Class, Code, ConsumeOptions, Engine, Error, Event, Failure, FailureKind, Pattern, Stream,
    Streams, Timestamp, Verdict,
};
use everbus_kafka::Options;
use everbus_testkit::servers::{Kafka, KafkaOptions};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::{server, work};

pub(crate) async fn refused(url: &str, options: Options) -> Error {
    let opened = everbus_kafka::open(url, options).await;
    let error = opened.map(drop).unwrap_err();
    assert!(error.hint_text().is_some(), "{error:?}");
    assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
    error
}

pub(crate) fn host(url: &str) -> String {
    let rest = url.strip_prefix("kafka://").unwrap();
    rest.split('/').next().unwrap().to_owned()
}

/// Creates a topic of a space without Everbus.
pub(crate) async fn create(url: &str, name: &str, partitions: i32, config: &[(&str, &str)]) {
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", host(url))
        .create()
        .unwrap();
    let space = url.rsplit('/').next().unwrap();
    let name = format!("{space}.{name}");
    let mut topic = NewTopic::new(&name, partitions, TopicReplication::Fixed(1));
    for (key, value) in config {
        topic = topic.set(key, value);
    }
    let created = admin.create_topics([&topic], &AdminOptions::new()).await;
    created.unwrap().remove(0).unwrap();
}

// conformance: contract/kafka-unreachable: a server that cannot be reached is Unavailable, with a hint
#[tokio::test]
async fn nothing_listens() {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(4);
    let error = refused("kafka://me:s3cret@127.0.0.1:1", options).await;
    assert_eq!(
        (error.code(), error.class()),
        (Code::Unavailable, Class::Passing),
        "{error}"
    );
}

// conformance: contract/kafka-other-server: a port that is not Kafka's is said to be another one's
#[tokio::test]
async fn another_server_listens() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut buffer = [0; 1024];
            let _ = client.read(&mut buffer).await;
            let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    let mut options = Options::default();
    options.timeout = Duration::from_secs(4);
    let error = refused(&format!("kafka://127.0.0.1:{port}"), options).await;
    assert_eq!(error.code(), Code::InvalidUrl, "{error}");
    serving.abort();
}

// conformance: contract/kafka-wrong-password: a user that the server does not take is refused with a hint, and the password is not repeated
// needs: Kafka
#[tokio::test]
async fn wrong_credentials_are_refused() {
    let Some(server) = Kafka::start(&KafkaOptions::default().user("shop", "right")) else {
        return;
    };
    let with = |who: &str| server.url().replace("kafka://", &format!("kafka://{who}@"));
    let mut options = Options::default();
    options.timeout = Duration::from_secs(5);
    let error = refused(&with("shop:s3cret"), options.clone()).await;
    assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    let engine = everbus_kafka::open(&with("shop:right"), Options::default())
        .await
        .unwrap();
    work::publish(&engine, "order.placed").await;
    engine.broker.close().await.unwrap();
    options.mechanism = Some("GSSAPI".into());
    let error = refused(&with("shop:right"), options).await;
    assert_eq!(error.code(), Code::InvalidSetting, "{error}");
}

// conformance: contract/kafka-topic-settings: a topic that is compacted, drops events, or has fewer partitions than declared is refused with a hint
// needs: Kafka
#[tokio::test]
async fn topics_that_lose_events_are_refused() {
    let Some(url) = server::space() else {
        return;
    };
    for (name, config) in [
        ("COMPACT", ("cleanup.policy", "compact")),
        ("SHORT", ("retention.ms", "60000")),
        ("SMALL", ("retention.bytes", "1000000")),
    ] {
        create(&url, name, 2, &[config]).await;
        let engine = server::open(&url).await;
        let stream = Stream::new(name, [format!("{}.>", name.to_lowercase())]).unwrap();
        let declared = engine
            .broker
            .declare_streams(Streams::new([stream]).unwrap())
            .await;
        let error = declared.unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting, "{name}: {error}");
        assert!(
            error.message().contains(name) && error.hint_text().is_some(),
            "{error:?}"
        );
        engine.broker.close().await.unwrap();
    }
    create(&url, "FEW", 2, &[("retention.ms", "-1")]).await;
    let engine = server::open(&url).await;
    let few =
        |shards| Streams::new([Stream::new("FEW", ["few.>"]).unwrap().shards(shards)]).unwrap();
    let error = engine.broker.declare_streams(few(5)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    engine.broker.declare_streams(few(2)).await.unwrap();
    // A topic that was created anew with fewer partitions.
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", host(&url))
        .create()
        .unwrap();
    let name = format!("{}.FEW", url.rsplit('/').next().unwrap());
    admin
        .delete_topics(&[&name], &AdminOptions::new())
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    let anew = async {
        loop {
            let topic =
                NewTopic::new(&name, 1, TopicReplication::Fixed(1)).set("retention.ms", "-1");
            let created = admin
                .create_topics([&topic], &AdminOptions::new())
                .await
                .unwrap();
            if created.into_iter().all(|created| created.is_ok()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(work::DEADLINE, anew).await.unwrap();
    let fewer = async {
        loop {
            let again = server::open(&url).await;
            let declared = again.broker.declare_streams(few(1)).await;
            again.broker.close().await.unwrap();
            // The cluster may show the old topic for a moment.
            if let Err(error) = declared
                && error.code() == Code::InvalidSetting
            {
                return error;
            }
        }
    };
    let error = tokio::time::timeout(work::DEADLINE, fewer).await.unwrap();
    assert!(error.message().contains("fewer"), "{error}");
}

// conformance: contract/kafka-too-large: an event beyond the limit of its topic is refused before it is sent
// needs: Kafka
#[tokio::test]
async fn an_event_that_is_too_large_is_refused() {
    let Some(url) = server::space() else {
        return;
    };
    let engine = server::open(&url).await;
    let large = Event::builder("order.placed")
        .json(&"x".repeat(9 << 20))
        .build()
        .unwrap();
    let answers = engine.broker.append(vec![large]).await.unwrap();
    let error = answers.into_iter().next().unwrap().unwrap_err();
    assert_eq!(error.code(), Code::PayloadTooLarge);
    assert!(error.hint_text().unwrap().contains("max.message.bytes"));
    work::publish(&engine, "order.placed").await;
}

// conformance: contract/kafka-foreign: a record that is not of its topic's dialect comes with its bytes and the reason, and blocks nothing
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_records_block_nothing() {
    let Some(url) = server::space() else {
        return;
    };
    let engine = server::open(&url).await;
    engine
        .broker
        .declare(work::group("g", &["*"]))
        .await
        .unwrap();
    work::publish(&engine, "order.first").await;
    let producer: FutureProducer = ClientConfig::new()
        .set("bootstrap.servers", host(&url))
        .create()
        .unwrap();
    let topic = format!("{}.order", url.rsplit('/').next().unwrap());
    let garbage: &[u8] = b"\xff\x00 no document";
    for payload in [Some(garbage), None] {
        let mut record = FutureRecord::<str, [u8]>::to(&topic).key("k");
        record.payload = payload;
        producer.send(record, work::DEADLINE).await.unwrap();
    }
    work::publish(&engine, "order.last").await;
    let mut consumer = work::consumer(&engine, "g").await;
    let mut foreign = Vec::new();
    for delivery in work::take(&mut consumer, 4).await {
        if let Some(failure) = delivery.failures.first() {
            assert_eq!(failure.kind, FailureKind::Corrupt);
            foreign.push(delivery.record.event.payload().to_vec());
        }
        work::ack(&engine, &delivery).await;
    }
    foreign.sort();
    assert_eq!(foreign, [b"".to_vec(), garbage.to_vec()]);
}

/// Publishes, and returns the error of the event.
async fn not_published(engine: &Engine, event_type: &str) -> Error {
    let event = Event::builder(event_type).build().unwrap();
    match engine.broker.append(vec![event]).await {
        Err(error) => error,
        Ok(answers) => answers.into_iter().next().unwrap().unwrap_err(),
    }
}

// conformance: contract/kafka-own-topics: a topic of groups or of dead letters that forgets is refused with a hint
// needs: Kafka
#[tokio::test]
async fn own_topics_that_forget_are_refused() {
    let Some(url) = server::space() else {
        return;
    };
    create(&url, "everbus.groups", 1, &[("retention.ms", "604800000")]).await;
    let error = refused(&url, Options::default()).await;
    assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    assert!(error.message().contains("everbus.groups"), "{error}");
    let url = server::space().unwrap();
    create(&url, "dlq.order", 1, &[("retention.ms", "604800000")]).await;
    create(&url, "dlq.mail", 1, &[("cleanup.policy", "compact")]).await;
    let engine = server::open(&url).await;
    for domain in ["order", "mail"] {
        let error = not_published(&engine, &format!("{domain}.placed")).await;
        assert_eq!(error.code(), Code::InvalidSetting, "{error}");
        assert!(
            error.message().contains(&format!("dlq.{domain}")),
            "{error}"
        );
        assert!(error.hint_text().is_some());
    }
    work::publish(&engine, "user.created").await;
}

// conformance: contract/kafka-large-letters: the dead letter of every event that a topic takes is stored, also if it is large and the topic of dead letters was there before
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_of_large_events_are_stored() {
    let Some(url) = server::space() else {
        return;
    };
    let small = [("retention.ms", "-1"), ("max.message.bytes", "1000000")];
    create(&url, "dlq.mail", 1, &small).await;
    let engine = server::open(&url).await;
    let everything = work::group("g", &["*"]);
    engine.broker.declare(everything).await.unwrap();
    let mut consumer = work::consumer(&engine, "g").await;
    for domain in ["order", "mail"] {
        let event = Event::builder(format!("{domain}.placed"));
        let event = event.json(&"x".repeat(3 << 20)).build().unwrap();
        work::append(&engine, event).await;
        let delivery = work::take(&mut consumer, 1).await.remove(0);
        let failure = Failure::new(1, Timestamp::EPOCH, FailureKind::Error, "no");
        let dead = Verdict::Dead {
            failure: Some(failure),
        };
        work::settle(&engine, &delivery, dead).await.unwrap();
    }
}

// conformance: contract/kafka-untyped-record: a record without a type comes to groups that read its topic, with the reason
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_without_a_type_are_not_passed_over() {
    let Some(url) = server::space() else {
        return;
    };
    let engine = server::open(&url).await;
    let orders = work::group("g", &["order.*"]);
    engine.broker.declare(orders).await.unwrap();
    work::publish(&engine, "order.first").await;
    let producer: FutureProducer = ClientConfig::new()
        .set("bootstrap.servers", host(&url))
        .create()
        .unwrap();
    let topic = format!("{}.order", url.rsplit('/').next().unwrap());
    let record = FutureRecord::<str, str>::to(&topic).payload("{}");
    producer.send(record, work::DEADLINE).await.unwrap();
    let handled = ConsumeOptions::new(vec![Pattern::new("order.*").unwrap()]);
    let consumer = engine.broker.consume("g".parse().unwrap(), handled).await;
    let mut consumer = consumer.unwrap();
    let mut reasons = Vec::new();
    for delivery in work::take(&mut consumer, 2).await {
        reasons.extend(
            delivery
                .failures
                .iter()
                .map(|failure| failure.error.clone()),
        );
        work::ack(&engine, &delivery).await;
    }
    assert_eq!(reasons.len(), 1, "{reasons:?}");
    assert!(reasons[0].contains("names no type"), "{reasons:?}");
}

// conformance: contract/kafka-refused-join: a member that the server does not take into its group tells its consumers
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_join_is_told() {
    let Some(url) = server::space() else {
        return;
    };
    let mut options = server::options();
    // The server allows thirty minutes.
    options.session = Duration::from_secs(45 * 60);
    let engine = everbus_kafka::open(&url, options).await.unwrap();
    let orders = work::group("g", &["order.*"]);
    engine.broker.declare(orders).await.unwrap();
    work::publish(&engine, "order.placed").await;
    let mut consumer = work::consumer(&engine, "g").await;
    let fetched = tokio::time::timeout(work::DEADLINE, consumer.fetch(1)).await;
    let error = fetched.expect("an answer").unwrap_err();
    assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    assert!(error.hint_text().unwrap().contains("session"), "{error:?}");
}

// conformance: contract/kafka-compression: topics are read in whatever way the server compresses them
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compressed_topics_are_read() {
    let Some(url) = server::space() else {
        return;
    };
    let ways = ["gzip", "snappy", "lz4", "zstd"];
    for way in ways {
        let config = [("retention.ms", "-1"), ("compression.type", way)];
        create(&url, way, 1, &config).await;
    }
    let engine = server::open(&url).await;
    let everything = work::group("g", &["*"]);
    engine.broker.declare(everything).await.unwrap();
    for way in ways {
        work::publish(&engine, &format!("{way}.placed")).await;
    }
    let mut consumer = work::consumer(&engine, "g").await;
    let mut came = Vec::new();
    for delivery in work::take(&mut consumer, ways.len()).await {
        came.push(delivery.record.event.event_type().to_owned());
        work::ack(&engine, &delivery).await;
    }
    came.sort();
    assert_eq!(
        came,
        ["gzip.placed", "lz4.placed", "snappy.placed", "zstd.placed"]
    );
}
