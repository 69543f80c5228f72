//! Declared streams on the server: created, compared, changed, and never at the cost of events.

use std::time::Duration;

use everbus_core::{
    Code, ConsumeOptions, Cursor, Durability, Engine, Event, Failure, FailureKind, GroupSpec,
    Pattern, Settlement, StartFrom, Stream, Streams, SubscriptionSpec, Timestamp, Verdict,
};
use everbus_nats::Options;
use serde_json::{Value, json};

use crate::server;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// A plain client of the same account, without Everbus.
pub(crate) struct Plain(pub(crate) async_nats::Client);

impl Plain {
    pub(crate) async fn connect(url: &str) -> Self {
        let connect = async_nats::ConnectOptions::new();
        let (scheme, rest) = url.split_once("://").unwrap();
        let connected = match rest.split_once('@') {
            None => connect.connect(url).await,
            Some((who, host)) => {
                let (user, password) = who.split_once(':').unwrap();
                let connect = connect.user_and_password(user.to_owned(), password.to_owned());
                connect.connect(format!("{scheme}://{host}")).await
            }
        };
        Self(connected.unwrap())
    }

    pub(crate) async fn api(&self, verb: &str, body: Value) -> Value {
        let body = body.to_string().into();
        let answer = self
            .0
            .request(format!("$JS.API.{verb}"), body)
            .await
            .unwrap();
        serde_json::from_slice(&answer.payload).unwrap()
    }
}

pub(crate) async fn open(url: &str) -> Engine {
    everbus_nats::open(url, Options::default()).await.unwrap()
}

fn stream(name: &str, pattern: &str) -> Stream {
    Stream::new(name, [pattern]).unwrap()
}

fn table(streams: impl IntoIterator<Item = Stream>) -> Streams {
    Streams::new(streams).unwrap()
}

pub(crate) fn group(name: &str, patterns: &[&str]) -> GroupSpec {
    let mut spec = GroupSpec::new(name.parse().unwrap());
    spec.start_from = StartFrom::First;
    spec.subscriptions = patterns
        .iter()
        .map(|text| SubscriptionSpec {
            name: (*text).to_owned(),
            pattern: Pattern::new(text).unwrap(),
        })
        .collect();
    spec
}

pub(crate) fn options() -> ConsumeOptions {
    let patterns = ["*", "system.>"].map(|text| Pattern::new(text).unwrap());
    ConsumeOptions::new(patterns.to_vec()).lease(Duration::from_secs(5))
}

pub(crate) async fn publish(engine: &Engine, event_type: &str) -> everbus_core::Appended {
    let event = Event::builder(event_type).payload("{}").build().unwrap();
    engine
        .broker
        .append(vec![event])
        .await
        .unwrap()
        .remove(0)
        .unwrap()
}

/// Takes and acks this many, and returns their types in order.
pub(crate) async fn handle(engine: &Engine, group: &str, count: usize) -> Vec<String> {
    let consumer = engine.broker.consume(group.parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    let mut types = Vec::new();
    while types.len() < count {
        let fetched = tokio::time::timeout(Duration::from_secs(60), consumer.fetch(10));
        for delivery in fetched.await.expect("something comes").unwrap() {
            types.push(delivery.record.event.event_type().to_owned());
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
    consumer.close().await.unwrap();
    types
}

// conformance: omni/publish-subject: an event of the type message.received is the last message of that subject
// conformance: omni/nats-streams: the preset makes the six streams of the document with their subjects, ages and file storage, and SYSTEM and the dead letters of thirty days
// needs: nats-server
#[tokio::test]
async fn the_omni_table_is_made_as_written() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    engine
        .broker
        .declare_streams(Streams::omni())
        .await
        .unwrap();
    let plain = Plain::connect(&url).await;
    for (name, subject, days) in [
        ("MESSAGES", "message.>", 30),
        ("IDENTITY", "identity.>", 90),
        ("MEDIA", "media.>", 7),
        ("AGENT", "agent.>", 7),
        ("ACCESS", "access.>", 30),
        ("CHANNEL", "channel.>", 7),
        ("SYSTEM", "system.>", 30),
        ("DLQ", "dlq.>", 30),
    ] {
        let info = plain.api(&format!("STREAM.INFO.{name}"), json!({})).await;
        let config = &info["config"];
        assert_eq!(config["subjects"], json!([subject]), "{name}");
        assert_eq!(config["storage"], "file", "{name}");
        assert_eq!(
            config["max_age"],
            json!((DAY * days).as_nanos() as u64),
            "{name}"
        );
    }
    let names = plain.api("STREAM.NAMES", json!({})).await;
    assert!(
        !names["streams"]
            .as_array()
            .unwrap()
            .contains(&json!("EVERBUS"))
    );
    // The subject is the type.
    let at = publish(&engine, "message.received").await.position;
    assert_eq!(at.to_string(), "MESSAGES:1");
    let last = json!({"last_by_subj": "message.received"});
    let last = plain.api("STREAM.MSG.GET.MESSAGES", last).await;
    assert_eq!(last["message"]["seq"], 1);
    let uncovered = Event::builder("order.placed").build().unwrap();
    let answers = engine.broker.append(vec![uncovered]).await.unwrap();
    assert_eq!(answers[0].as_ref().unwrap_err().code(), Code::NoStream);
}

// conformance: contract/nats-groups-over-streams: a group consumes every stream that its patterns reach, also one that is declared later, and what an undeclared stream still has
// needs: nats-server
#[tokio::test]
async fn a_group_spans_streams_and_follows_the_table() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    let broker = &engine.broker;
    let first = table([stream("ORDERS", "order.>"), stream("MAIL", "mail.>")]);
    broker.declare_streams(first).await.unwrap();
    broker.declare(group("all", &["*"])).await.unwrap();
    broker.declare(group("paid", &["*.paid"])).await.unwrap();
    for event_type in ["order.placed", "mail.sent", "order.paid"] {
        publish(&engine, event_type).await;
    }
    let mut types = handle(&engine, "all", 3).await;
    types.sort();
    assert_eq!(types, ["mail.sent", "order.paid", "order.placed"]);
    assert_eq!(handle(&engine, "paid", 1).await, ["order.paid"]);
    publish(&engine, "mail.left").await;
    // MAIL is not declared any more, and CARTS is new.
    let second = table([stream("ORDERS", "order.>"), stream("CARTS", "cart.>")]);
    broker.declare_streams(second).await.unwrap();
    publish(&engine, "cart.filled").await;
    let mut types = handle(&engine, "all", 2).await;
    types.sort();
    assert_eq!(types, ["cart.filled", "mail.left"]);
    let groups = broker.inspect().await.unwrap();
    let all = groups.iter().find(|g| g.name.as_str() == "all").unwrap();
    assert_eq!(
        (all.behind, all.in_flight, all.waiting),
        (0, 0, 0),
        "{all:?}"
    );
}

// conformance: contract/nats-undeclared-to-declared: events of the single stream are handled after streams are declared
// needs: nats-server
#[tokio::test]
async fn the_single_stream_is_finished_after_streams_are_declared() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    engine
        .broker
        .declare(group("g", &["order.*"]))
        .await
        .unwrap();
    publish(&engine, "order.old").await;
    engine.broker.close().await.unwrap();
    let engine = open(&url).await;
    let declared = table([stream("ORDERS", "order.>")]);
    engine.broker.declare_streams(declared).await.unwrap();
    engine
        .broker
        .declare(group("g", &["order.*"]))
        .await
        .unwrap();
    publish(&engine, "order.new").await;
    let mut types = handle(&engine, "g", 2).await;
    types.sort();
    assert_eq!(types, ["order.new", "order.old"]);
}

// conformance: contract/nats-shorter-age: an update that would shorten an age is refused unless allowed; a longer one is applied
// needs: nats-server
#[tokio::test]
async fn a_shorter_age_is_refused_unless_allowed() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    let aged = |days: u32| table([stream("ORDERS", "order.>").max_age(DAY * days)]);
    engine.broker.declare_streams(aged(7)).await.unwrap();
    engine.broker.declare_streams(aged(30)).await.unwrap();
    let error = engine.broker.declare_streams(aged(7)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidSetting);
    assert!(
        error.hint_text().unwrap().contains("allow_shorter_age"),
        "{error:?}"
    );
    let plain = Plain::connect(&url).await;
    let age = async || {
        let info = plain.api("STREAM.INFO.ORDERS", json!({})).await;
        info["config"]["max_age"].as_u64().unwrap()
    };
    assert_eq!(age().await, (DAY * 30).as_nanos() as u64);
    let mut options = Options::default();
    options.allow_shorter_age = true;
    let engine = everbus_nats::open(&url, options).await.unwrap();
    engine.broker.declare_streams(aged(7)).await.unwrap();
    assert_eq!(age().await, (DAY * 7).as_nanos() as u64);
}

// conformance: contract/nats-other-settings: a stream that exists with settings that lose events, or other subjects, is a specific error; a fitting one of another program is used as it is
// needs: nats-server
#[tokio::test]
async fn a_stream_of_another_program_is_compared() {
    let Some(url) = server::account() else { return };
    let plain = Plain::connect(&url).await;
    for config in [
        json!({"name": "QUEUE", "subjects": ["queue.>"], "retention": "workqueue"}),
        json!({"name": "ORDERS", "subjects": ["order.placed"]}),
        json!({"name": "TAKEN", "subjects": ["cart.*"]}),
        json!({"name": "FULL", "subjects": ["full.>"], "max_msgs": 1000}),
        json!({"name": "BYTES", "subjects": ["bytes.>"], "max_bytes": 100_000}),
        json!({"name": "LATEST", "subjects": ["latest.>"], "max_msgs_per_subject": 1}),
        json!({"name": "MUTE", "subjects": ["mute.>"], "no_ack": true}),
        json!({"name": "BRIEF", "subjects": ["brief.>"], "max_age": 3_600_000_000_000_u64}),
        json!({"name": "FINE", "subjects": ["mail.>"], "max_msgs": 1000, "discard": "new"}),
    ] {
        let name = config["name"].as_str().unwrap().to_owned();
        let made = plain.api(&format!("STREAM.CREATE.{name}"), config).await;
        assert!(made["error"].is_null(), "{made}");
    }
    let engine = open(&url).await;
    for (name, pattern, said) in [
        ("QUEUE", "queue.>", "workqueue"),
        ("ORDERS", "order.>", "order.placed"),
        ("CARTS", "cart.>", "overlap"),
        ("FULL", "full.>", "max_msgs"),
        ("BYTES", "bytes.>", "max_bytes"),
        ("LATEST", "latest.>", "1 events of a type"),
        ("MUTE", "mute.>", "no_ack"),
        ("BRIEF", "brief.>", "3600s"),
    ] {
        let declared = engine
            .broker
            .declare_streams(table([stream(name, pattern)]));
        let error = declared.await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting, "{error}");
        assert!(error.message().contains(said), "{error}");
        assert!(error.hint_text().is_some());
    }
    let fine = table([stream("FINE", "mail.>")]);
    engine.broker.declare_streams(fine).await.unwrap();
    engine
        .broker
        .declare(group("g", &["mail.*"]))
        .await
        .unwrap();
    publish(&engine, "mail.sent").await;
    assert_eq!(handle(&engine, "g", 1).await, ["mail.sent"]);
    let info = plain.api("STREAM.INFO.FINE", json!({})).await;
    assert_eq!(info["config"]["max_msgs"], 1000, "its own settings stay");
}

// conformance: contract/nats-durability: a stream of which the server acks messages in memory has the grade memory, whatever the operator says
// needs: nats-server
#[tokio::test]
async fn a_stream_that_acks_from_memory_has_that_grade() {
    let Some(url) = server::account() else { return };
    let plain = Plain::connect(&url).await;
    for (name, domain, setting, grade) in [
        ("KEPT", "kept.>", json!({}), Durability::PowerLoss),
        (
            "QUICK",
            "quick.>",
            json!({"storage": "memory"}),
            Durability::Memory,
        ),
        (
            "LATER",
            "later.>",
            json!({"persist_mode": "async"}),
            Durability::Memory,
        ),
    ] {
        let mut config = json!({"name": name, "subjects": [domain]});
        let setting = setting.as_object().unwrap().clone();
        config.as_object_mut().unwrap().extend(setting);
        let made = plain.api(&format!("STREAM.CREATE.{name}"), config).await;
        assert!(made["error"].is_null(), "{made}");
        let mut synced = Options::default();
        synced.synced = true;
        let engine = everbus_nats::open(&url, synced).await.unwrap();
        let declared = table([stream(name, domain)]);
        engine.broker.declare_streams(declared).await.unwrap();
        assert_eq!(engine.broker.capabilities().durability, grade, "{name}");
    }
}

// conformance: contract/nats-own-streams: a stream in the place of the dead letters that would drop them is refused
// needs: nats-server
#[tokio::test]
async fn a_stream_that_drops_dead_letters_is_refused() {
    for (config, said) in [
        (json!({"retention": "interest"}), "interest"),
        (json!({"max_age": 3_600_000_000_000_u64}), "3600s"),
        (json!({"max_msgs": 10}), "max_msgs"),
        (json!({"subjects": ["dead.>"]}), "dead.>"),
    ] {
        let Some(url) = server::account() else { return };
        let plain = Plain::connect(&url).await;
        let mut whole = json!({"name": "DLQ", "subjects": ["dlq.>"]});
        let more = config.as_object().unwrap().clone();
        whole.as_object_mut().unwrap().extend(more);
        let made = plain.api("STREAM.CREATE.DLQ", whole).await;
        assert!(made["error"].is_null(), "{made}");
        let engine = open(&url).await;
        let declared = table([stream("ORDERS", "order.>")]);
        let error = engine.broker.declare_streams(declared).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting, "{error}");
        assert!(error.message().contains(said), "{error}");
    }
}

// conformance: contract/nats-foreign-consumer: a consumer of another program in the place of a group is refused, and left as it is
// needs: nats-server
#[tokio::test]
async fn a_consumer_of_another_program_is_not_adopted() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    publish(&engine, "order.placed").await;
    let plain = Plain::connect(&url).await;
    let theirs = json!({"durable_name": "g", "ack_policy": "explicit", "max_deliver": 3});
    let made = json!({"stream_name": "EVERBUS", "config": theirs});
    let made = plain.api("CONSUMER.CREATE.EVERBUS.g", made).await;
    assert!(made["error"].is_null(), "{made}");
    let error = engine.broker.declare(group("g", &["*"])).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    assert!(error.hint_text().is_some());
    let info = plain.api("CONSUMER.INFO.EVERBUS.g", json!({})).await;
    assert_eq!(info["config"]["max_deliver"], 3, "{info}");
    assert!(engine.broker.inspect().await.unwrap().is_empty());
}

// conformance: contract/nats-stale-record: a process that knows an older record of a group takes no events from its newer subscriptions
// needs: nats-server
#[tokio::test]
async fn a_stale_process_narrows_nothing() {
    let Some(url) = server::account() else { return };
    let (first, second) = (open(&url).await, open(&url).await);
    first
        .broker
        .declare(group("g", &["order.*"]))
        .await
        .unwrap();
    publish(&first, "order.a").await;
    let consumer = first.broker.consume("g".parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    let mut types = Vec::new();
    let mut take = async |count: usize| {
        while types.len() < count {
            let fetched = tokio::time::timeout(Duration::from_secs(60), consumer.fetch(10));
            for delivery in fetched.await.expect("something comes").unwrap() {
                types.push(delivery.record.event.event_type().to_owned());
                let ack = Settlement::new(delivery.lease, Verdict::Ack);
                let settled = first.broker.settle(vec![ack]).await.unwrap().remove(0);
                settled.unwrap();
            }
            if types.len() == 1 {
                // The first process looks at the consumer again, with the record that it knows.
                let wider = group("g", &["order.*", "mail.*"]);
                second.broker.declare(wider).await.unwrap();
                consumer.pause().await.unwrap();
                consumer.resume(10).await.unwrap();
                publish(&second, "order.b").await;
            } else if types.len() == 2 {
                publish(&second, "mail.sent").await;
                publish(&second, "order.c").await;
            }
        }
        types.clone()
    };
    let types = take(4).await;
    assert_eq!(types, ["order.a", "order.b", "mail.sent", "order.c"]);
}

// conformance: contract/nats-unfetched: a message that no fetch takes is given back before its lease ends, to another consumer, and counts no attempt
// needs: nats-server
#[tokio::test]
async fn a_message_that_no_fetch_takes_is_given_back() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "order.a").await;
    let consume = || {
        let wanted = options().lease(Duration::from_secs(4));
        engine.broker.consume("g".parse().unwrap(), wanted)
    };
    let mut idle = consume().await.unwrap();
    tokio::select! {
        biased;
        _ = idle.fetch(1) => panic!("the server cannot answer at once"),
        () = std::future::ready(()) => {}
    }
    let is_with_the_idle_one = async || {
        let groups = engine.broker.inspect().await.unwrap();
        groups.iter().any(|group| group.in_flight > 0)
    };
    while !is_with_the_idle_one().await {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut other = consume().await.unwrap();
    let fetched = tokio::time::timeout(Duration::from_secs(60), other.fetch(1));
    let delivery = fetched.await.expect("it comes").unwrap().remove(0);
    assert_eq!((delivery.attempt, delivery.failures.len()), (1, 0));
}

// conformance: contract/nats-moved-pattern: events that wait in a stream are handled after their pattern moved to another stream
// needs: nats-server
#[tokio::test]
async fn events_wait_where_their_pattern_was() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    let broker = &engine.broker;
    let both = Stream::new("ORDERS", ["order.>", "cart.>"]).unwrap();
    broker.declare_streams(table([both])).await.unwrap();
    let spec = group("g", &["order.*", "cart.*"]);
    broker.declare(spec.clone()).await.unwrap();
    publish(&engine, "cart.filled").await;
    let apart = table([stream("ORDERS", "order.>"), stream("CARTS", "cart.>")]);
    broker.declare_streams(apart).await.unwrap();
    broker.declare(spec).await.unwrap();
    publish(&engine, "cart.left").await;
    publish(&engine, "order.placed").await;
    let mut types = handle(&engine, "g", 3).await;
    types.sort();
    assert_eq!(types, ["cart.filled", "cart.left", "order.placed"]);
}

// conformance: contract/nats-recreated-stream: a group begins at the beginning of a stream that was removed and created again
// needs: nats-server
#[tokio::test]
async fn a_recreated_stream_is_read_from_its_beginning() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    for _ in 0..3 {
        publish(&engine, "order.old").await;
    }
    let mut spec = group("g", &["*"]);
    spec.start_from = StartFrom::New;
    engine.broker.declare(spec).await.unwrap();
    publish(&engine, "order.gone").await;
    assert_eq!(handle(&engine, "g", 1).await, ["order.gone"]);
    engine.broker.close().await.unwrap();
    let plain = Plain::connect(&url).await;
    let removed = plain.api("STREAM.DELETE.EVERBUS", json!({})).await;
    assert_eq!(removed["success"], true, "{removed}");
    let engine = open(&url).await;
    let at = publish(&engine, "order.new").await.position;
    assert_eq!(at.to_string(), "EVERBUS:1");
    assert_eq!(handle(&engine, "g", 1).await, ["order.new"]);
}

// conformance: contract/nats-unknown-streams: a group consumes streams that the process that declares it does not know
// needs: nats-server
#[tokio::test]
async fn a_group_reaches_streams_of_other_processes() {
    let Some(url) = server::account() else { return };
    let (publisher, reader) = (open(&url).await, open(&url).await);
    let declared = table([stream("ORDERS", "order.>"), stream("MAIL", "mail.>")]);
    publisher.broker.declare_streams(declared).await.unwrap();
    publish(&publisher, "order.placed").await;
    publish(&publisher, "mail.sent").await;
    reader
        .broker
        .declare(group("g", &["order.*"]))
        .await
        .unwrap();
    assert_eq!(handle(&reader, "g", 1).await, ["order.placed"]);
    let plain = Plain::connect(&url).await;
    let none = plain.api("CONSUMER.INFO.MAIL.g", json!({})).await;
    assert_eq!(none["error"]["err_code"], 10014, "nothing is wanted of it");
}

// conformance: contract/nats-no-leader: while no server answers for the stream of the groups, declaring a group waits
// needs: nats-server
#[tokio::test]
async fn declaring_a_group_waits_for_the_stream_of_the_groups() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    publish(&engine, "order.a").await;
    // A removed stream is like one without a leader: no server listens on its subject.
    let plain = Plain::connect(&url).await;
    let removed = plain.api("STREAM.DELETE.EVERBUS_GROUPS", json!({})).await;
    assert_eq!(removed["success"], true, "{removed}");
    let back = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        open(&url).await
    };
    let (declared, _) = tokio::join!(engine.broker.declare(group("g", &["*"])), back);
    assert_eq!(declared.unwrap().len(), 1);
    assert_eq!(handle(&engine, "g", 1).await, ["order.a"]);
}

// conformance: contract/nats-left-consumer: a new group does not go on where a removed one of its name was
// needs: nats-server
#[tokio::test]
async fn a_consumer_that_a_removal_left_is_not_used() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    publish(&engine, "order.a").await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    assert_eq!(handle(&engine, "g", 1).await, ["order.a"]);
    // A removal that ends after its first step.
    let plain = Plain::connect(&url).await;
    let purged = plain.api("STREAM.PURGE.EVERBUS_GROUPS", json!({})).await;
    assert_eq!(purged["success"], true, "{purged}");
    let engine = open(&url).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    assert_eq!(handle(&engine, "g", 1).await, ["order.a"]);
}

// conformance: contract/nats-large-dead-letter: a dead letter is stored whole, however much its failures say and however large its payload is
// needs: nats-server
#[tokio::test]
async fn a_large_dead_letter_is_stored() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    let plain = Plain::connect(&url).await;
    let most = plain.0.max_payload();
    for (n, length) in [(1, 10), (3, most - 300)] {
        let text = "x".repeat(length);
        let event = Event::builder("order.placed").json(&text).build();
        let appended = engine.broker.append(vec![event.unwrap()]).await.unwrap();
        assert!(appended[0].is_ok(), "{appended:?}");
        let consumer = engine.broker.consume("g".parse().unwrap(), options());
        let mut consumer = consumer.await.unwrap();
        let delivery = loop {
            let delivery = consumer.fetch(1).await.unwrap().remove(0);
            if delivery.record.event.event_type() == "order.placed" {
                break delivery;
            }
            let ack = Settlement::new(delivery.lease, Verdict::Ack);
            engine.broker.settle(vec![ack]).await.unwrap();
        };
        assert_eq!(delivery.record.position.place(), n);
        let now = Timestamp::from_micros(7);
        let failure = Failure::new(1, now, FailureKind::Error, "e".repeat(200_000));
        let dead = Verdict::Dead {
            failure: Some(failure),
        };
        let dead = Settlement::new(delivery.lease, dead);
        let settled = engine.broker.settle(vec![dead]).await.unwrap().remove(0);
        settled.unwrap();
        consumer.close().await.unwrap();
    }
    let groups = engine.broker.inspect().await.unwrap();
    assert_eq!(groups[0].dead_letters, 2);
    let large = json!({"last_by_subj": "dlq.EVERBUS.g.3.payload"});
    let large = plain.api("STREAM.MSG.GET.DLQ", large).await;
    let data = large["message"]["data"].as_str().unwrap();
    let data = data_encoding::BASE64.decode(data.as_bytes()).unwrap();
    assert_eq!(data.len(), most - 298, "with its quotes");
    engine
        .broker
        .remove_group("g".parse().unwrap())
        .await
        .unwrap();
    let dead = plain.api("STREAM.INFO.DLQ", json!({})).await;
    assert_eq!(dead["state"]["messages"], 0, "{dead}");
}

// conformance: contract/nats-replay: the log is read from the server by stream, type and time, and waited on
// needs: nats-server
#[tokio::test]
async fn the_log_is_read_from_the_server() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    let declared = table([stream("ORDERS", "order.>"), stream("MAIL", "mail.>")]);
    engine
        .broker
        .declare_streams(declared.clone())
        .await
        .unwrap();
    let log = engine.log().unwrap();
    assert!(log.head().await.unwrap().is_start());
    let mut at = Vec::new();
    for n in 0..300 {
        at.push(publish(&engine, ["order.a", "order.b", "mail.a"][n % 3]).await);
    }
    let head = log.head().await.unwrap();
    assert_eq!(head.to_string(), "MAIL:100,ORDERS:200");
    let of = |text: &str| vec![Pattern::new(text).unwrap()];
    for (patterns, expected) in [
        (of("*"), 300),
        (of("order.*"), 200),
        (of("*.a"), 200),
        (of("mail.a"), 100),
        (of("none.*"), 0),
        (vec![declared.named("ORDERS").unwrap().types().clone()], 200),
    ] {
        let (mut after, mut count) = (Cursor::START, 0);
        loop {
            let read = log.read(after.clone(), patterns.clone(), 70).await.unwrap();
            count += read.0.len();
            if read.1 == after {
                break;
            }
            after = read.1;
        }
        assert_eq!(count, expected, "{patterns:?}");
        assert_eq!(after, head, "{patterns:?}");
    }
    let time = at[150].received_at;
    let from = log.resolve(StartFrom::Time(time), of("*")).await.unwrap();
    let (read, _) = log.read(from, of("*"), 1000).await.unwrap();
    assert!(read.iter().all(|record| record.received_at >= time));
    assert_eq!(
        read.len(),
        at.iter().filter(|a| a.received_at >= time).count()
    );
    // A reader that declares nothing finds the streams.
    let other = open(&url).await;
    assert_eq!(other.log().unwrap().head().await.unwrap(), head);
    let waiting = log.wait_beyond(head);
    let (waited, _) = tokio::join!(waiting, publish(&engine, "mail.b"));
    waited.unwrap();
}
