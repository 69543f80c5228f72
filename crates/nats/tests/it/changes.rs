//! Other programs, other versions and operators change what is on the server, or answer beside it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus::{Bus, BusOptions};
use everbus_core::{
    Code, Consumer, Cursor, DeadLetterFilter, Engine, Event, FailureKind, KvPut, ManualClock,
    Pattern, Settlement, StartFrom, Stream, Streams, SystemClock, Timestamp, Verdict,
};
use everbus_nats::Options;
use everbus_testkit::servers::{NatsCluster, Proxy};
use futures_util::StreamExt as _;
use serde_json::{Value, json};

use crate::server;
use crate::streams::{Plain, group, handle, open, options, publish};

const DEADLINE: Duration = Duration::from_secs(60);

fn table(streams: &[(&str, &[&str])]) -> Streams {
    let stream = |(name, patterns): &(&str, &[&str])| Stream::new(*name, patterns.iter()).unwrap();
    Streams::new(streams.iter().map(stream)).unwrap()
}

fn event(event_type: &str) -> Event {
    Event::builder(event_type).payload("{}").build().unwrap()
}

/// A consumer that takes and acks what comes.
struct Taking<'a> {
    engine: &'a Engine,
    consumer: Box<dyn Consumer>,
    types: Vec<String>,
}

impl<'a> Taking<'a> {
    async fn of(engine: &'a Engine, group: &str) -> Self {
        let consumer = engine.broker.consume(group.parse().unwrap(), options());
        Self {
            engine,
            consumer: consumer.await.unwrap(),
            types: Vec::new(),
        }
    }

    /// Takes until this type has come.
    async fn until(&mut self, event_type: &str) {
        let taken = async {
            while !self.types.iter().any(|known| known == event_type) {
                // An error is told once, and the reader goes on.
                let Ok(batch) = self.consumer.fetch(10).await else {
                    continue;
                };
                for delivery in batch {
                    let of_event = delivery.record.event.event_type().to_owned();
                    self.types.push(of_event);
                    let ack = Settlement::new(delivery.lease, Verdict::Ack);
                    let settled = self.engine.broker.settle(vec![ack]).await.unwrap();
                    settled.into_iter().next().unwrap().unwrap();
                }
            }
        };
        let taken = tokio::time::timeout(DEADLINE, taken).await;
        taken.unwrap_or_else(|_| panic!("{event_type} does not come"));
    }
}

// conformance: contract/nats-other-answers: the answer of another program on the subject of an event is not taken for the server's: what is acknowledged is stored, and what is not stored is not acknowledged
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_of_another_program_is_no_acknowledgement() {
    let Some(url) = server::account() else { return };
    let mut brief = Options::default();
    brief.timeout = Duration::from_secs(1);
    let plain = Plain::connect(&url).await;
    for body in [r#"{"ok":true}"#, r#"{"stream":"ELSE","seq":3}"#, "thanks"] {
        let engine = everbus_nats::open(&url, brief.clone()).await.unwrap();
        let declared = table(&[("ORDERS", &["order.>"])]);
        engine.broker.declare_streams(declared).await.unwrap();
        let mut requests = plain.0.subscribe("order.>").await.unwrap();
        let client = plain.0.clone();
        let service = tokio::spawn(async move {
            while let Some(request) = requests.next().await {
                if let Some(reply) = request.reply {
                    client.publish(reply, body.into()).await.unwrap();
                }
            }
        });
        let before = engine.log().unwrap().head().await.unwrap();
        let batches = [
            vec![event("order.placed")],
            vec![event("order.paid"), event("order.sent")],
        ];
        for batch in batches {
            for answer in engine.broker.append(batch).await.unwrap() {
                let at = answer.unwrap().position;
                assert!(at.place() > before.place(at.shard()), "{at}");
            }
        }
        let patterns = vec![Pattern::new("*").unwrap()];
        let read = engine.log().unwrap().read(before, patterns, 100).await;
        assert_eq!(read.unwrap().0.len(), 3, "each event once");
        // Without the stream only the other program answers.
        let taken = json!({"name": "ORDERS", "subjects": ["elsewhere"]});
        let changed = plain.api("STREAM.UPDATE.ORDERS", taken).await;
        assert!(changed["error"].is_null(), "{changed}");
        let error = engine.broker.append(vec![event("order.lost")]).await;
        let error = error.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error:?}");
        assert!(error.message().contains("elsewhere"), "{error}");
        service.abort();
        let removed = plain.api("STREAM.DELETE.ORDERS", json!({})).await;
        assert_eq!(removed["success"], true, "{removed}");
    }
}

// conformance: contract/nats-copies: groups, dead letters and values have as many copies as the events, also if they were made with fewer
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_has_the_copies_of_the_events() {
    let Some(cluster) = NatsCluster::start() else {
        return;
    };
    let plain = Plain::connect(&cluster.urls()[0]).await;
    let copies = async |stream: &str| {
        let info = plain.api(&format!("STREAM.INFO.{stream}"), json!({})).await;
        info["config"]["num_replicas"].as_u64()
    };
    let one = table(&[("ORDERS", &["order.>"])]);
    let engine = open(&cluster.url()).await;
    engine.broker.declare_streams(one).await.unwrap();
    let put = async |engine: &Engine| {
        let (bucket, key) = ("sessions".to_owned(), "k".to_owned());
        let kv = engine.kv.as_ref().unwrap();
        let give_up = Instant::now() + DEADLINE;
        // A new stream of a cluster elects its leader first.
        let put = || kv.put(bucket.clone(), key.clone(), "v".into(), KvPut::default());
        while let Err(error) = put().await {
            assert!(Instant::now() < give_up, "{error:?}");
        }
    };
    put(&engine).await;
    let own = ["DLQ", "EVERBUS_GROUPS", "KV_sessions"];
    for stream in own {
        assert_eq!(copies(stream).await, Some(1), "{stream}");
    }
    engine.broker.close().await.unwrap();
    let engine = open(&cluster.url()).await;
    let three = Stream::new("ORDERS", ["order.>"]).unwrap().copies(3);
    let three = Streams::new([three]).unwrap();
    engine.broker.declare_streams(three).await.unwrap();
    put(&engine).await;
    for stream in own.into_iter().chain(["ORDERS"]) {
        assert_eq!(copies(stream).await, Some(3), "{stream}");
    }
}

// conformance: contract/nats-own-streams: a stream in the place of the groups or dead letters that would lose them is refused
// needs: nats-server
#[tokio::test]
async fn a_stream_that_forgets_groups_is_refused() {
    let aged = json!({"max_age": 90 * 24 * 3_600_000_000_000_u64});
    for (more, said) in [
        (aged, "7776000s"),
        (json!({"storage": "memory"}), "memory"),
        (json!({"persist_mode": "async"}), "memory"),
    ] {
        let Some(url) = server::account() else { return };
        let plain = Plain::connect(&url).await;
        let mut config = json!({"name": "EVERBUS_GROUPS", "subjects": ["$EVERBUS.groups.*"]});
        let more = more.as_object().unwrap().clone();
        config.as_object_mut().unwrap().extend(more);
        let made = plain.api("STREAM.CREATE.EVERBUS_GROUPS", config).await;
        assert!(made["error"].is_null(), "{made}");
        let opened = everbus_nats::open(&url, Options::default()).await;
        let error = opened.map(drop).unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting, "{error}");
        assert!(error.message().contains(said), "{error}");
    }
}

// conformance: contract/nats-lost-filters: a consumer that lost the filters of a subscription gets them again, and the events that it passed over
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn filters_that_a_dead_process_took_are_repaired() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    engine.broker.declare(group("g", &["a.*"])).await.unwrap();
    publish(&engine, "a.first").await;
    let mut taking = Taking::of(&engine, "g").await;
    taking.until("a.first").await;
    let plain = Plain::connect(&url).await;
    let consumer = async || plain.api("CONSUMER.INFO.EVERBUS.g", json!({})).await;
    let before = consumer().await["config"].take();
    let wider = group("g", &["a.*", "b.*"]);
    engine.broker.declare(wider).await.unwrap();
    // Another process read the consumer before, puts it now, and dies.
    let stale = json!({"stream_name": "EVERBUS", "config": before});
    let put = plain.api("CONSUMER.CREATE.EVERBUS.g", stale).await;
    assert!(put["error"].is_null(), "{put}");
    publish(&engine, "b.passed").await;
    publish(&engine, "a.second").await;
    // The position of the group is beyond the event now.
    taking.until("a.second").await;
    taking.until("b.passed").await;
    publish(&engine, "b.next").await;
    taking.until("b.next").await;
}

// conformance: contract/nats-removed-stream: a stream that was removed from the server does not keep its groups from their other streams
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_stream_stops_no_other() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    let both = table(&[("ORDERS", &["order.>"]), ("MAIL", &["mail.>"])]);
    engine.broker.declare_streams(both).await.unwrap();
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    let mut taking = Taking::of(&engine, "g").await;
    for event_type in ["order.first", "mail.first"] {
        publish(&engine, event_type).await;
        taking.until(event_type).await;
    }
    let plain = Plain::connect(&url).await;
    let removed = plain.api("STREAM.DELETE.MAIL", json!({})).await;
    assert_eq!(removed["success"], true, "{removed}");
    // More than were asked for before.
    for n in 0..20 {
        let event_type = format!("order.n{n}");
        publish(&engine, &event_type).await;
        taking.until(&event_type).await;
    }
    // The stream comes back, made by another process.
    let other = open(&url).await;
    let mail = table(&[("MAIL", &["mail.>"])]);
    other.broker.declare_streams(mail).await.unwrap();
    publish(&other, "mail.again").await;
    taking.until("mail.again").await;
}

// conformance: contract/nats-older-table: a process with an older table takes no subjects from a stream
// needs: nats-server
#[tokio::test]
async fn an_older_table_takes_no_subjects_away() {
    let Some(url) = server::account() else { return };
    let (old, new) = (open(&url).await, open(&url).await);
    let first = || table(&[("ORDERS", &["order.>"])]);
    let second = table(&[("ORDERS", &["order.>", "invoice.>"])]);
    old.broker.declare_streams(first()).await.unwrap();
    new.broker.declare_streams(second).await.unwrap();
    new.broker.declare(group("g", &["*"])).await.unwrap();
    // The older version starts again.
    old.broker.declare_streams(first()).await.unwrap();
    publish(&new, "invoice.sent").await;
    publish(&old, "order.placed").await;
    let mut types = handle(&new, "g", 2).await;
    types.sort();
    assert_eq!(types, ["invoice.sent", "order.placed"]);
}

// conformance: contract/nats-unlimited-pending: events that wait for a handler keep no others back, however many they are
// needs: nats-server
#[tokio::test]
async fn events_without_a_handler_stop_no_others() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    engine
        .broker
        .declare(group("g", &["a.*", "b.*"]))
        .await
        .unwrap();
    publish(&engine, "a.first").await;
    assert_eq!(handle(&engine, "g", 1).await, ["a.first"]);
    // A limit, as the first version had one of a hundred thousand.
    let plain = Plain::connect(&url).await;
    let mut info = plain.api("CONSUMER.INFO.EVERBUS.g", json!({})).await;
    let mut config = info["config"].take();
    config["max_ack_pending"] = json!(5);
    let put = json!({"stream_name": "EVERBUS", "config": config});
    let put = plain.api("CONSUMER.CREATE.EVERBUS.g", put).await;
    assert!(put["error"].is_null(), "{put}");
    for _ in 0..10 {
        publish(&engine, "b.unhandled").await;
    }
    publish(&engine, "a.handled").await;
    let mut only_a = options();
    only_a.handled = vec![Pattern::new("a.*").unwrap()];
    let consumer = engine.broker.consume("g".parse().unwrap(), only_a);
    let mut consumer = consumer.await.unwrap();
    let batch = tokio::time::timeout(DEADLINE, consumer.fetch(10)).await;
    let batch = batch.expect("it is not kept back").unwrap();
    assert_eq!(batch[0].record.event.event_type(), "a.handled");
}

// conformance: contract/beside-no-handler: with a store beside the broker an event without a handler becomes a dead letter of the store after the configured time
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_without_a_handler_dies_in_the_store() {
    let Some(url) = server::account() else { return };
    let folder = tempfile::tempdir().unwrap();
    let store = everbus_sqlite::open(
        &folder.path().join("store.db"),
        everbus_sqlite::Options::default(),
    );
    let engine = everbus::compose(open(&url).await, store.unwrap(), Arc::new(SystemClock)).await;
    let mut options = BusOptions::default();
    options.no_handler_after = Duration::from_secs(2);
    let bus = Bus::with_engine(engine.unwrap(), options).unwrap();
    bus.subscribe("a.*")
        .group("g")
        .handler(|_: everbus::Message| async {})
        .await
        .unwrap();
    // A subscription whose handler is in no process any more.
    let both = group("g", &["b.*"]);
    bus.engine().broker.declare(both).await.unwrap();
    bus.start().await.unwrap();
    let unhandled = event("b.x");
    bus.publish(unhandled.clone()).await.unwrap();
    let letters = bus.dead_letters();
    let give_up = Instant::now() + DEADLINE;
    while letters.count(DeadLetterFilter::default()).await.unwrap() == 0 {
        assert!(Instant::now() < give_up, "there is no dead letter");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let letter = letters.list().await.unwrap().remove(0);
    assert_eq!(letter.record.event.id(), unhandled.id());
    let last = letter.failures.last().unwrap();
    assert_eq!(last.kind, FailureKind::NoHandler, "{last:?}");
    bus.shutdown().await.unwrap();
}

// conformance: contract/nats-lease-of-all: the lease of a group is the longest that one of its processes needs
// needs: nats-server
#[tokio::test]
async fn a_shorter_lease_of_another_process_changes_nothing() {
    let Some(url) = server::account() else { return };
    let (one, other) = (open(&url).await, open(&url).await);
    publish(&one, "a.b").await;
    one.broker.declare(group("g", &["*"])).await.unwrap();
    let plain = Plain::connect(&url).await;
    let mut seen = Vec::new();
    for (engine, seconds) in [(&one, 5), (&one, 300), (&other, 10)] {
        let options = options().lease(Duration::from_secs(seconds));
        let consumer = engine.broker.consume("g".parse().unwrap(), options);
        let consumer = consumer.await.unwrap();
        let info = plain.api("CONSUMER.INFO.EVERBUS.g", json!({})).await;
        seen.push(info["config"]["ack_wait"].as_u64().unwrap() / 1_000_000_000);
        consumer.close().await.unwrap();
    }
    assert_eq!(seen, [5, 300, 300]);
}

// conformance: contract/nats-partial-append: of a batch over several streams, each event says whether it was stored
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_over_streams_answers_for_each_event() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    let both = table(&[("ORDERS", &["order.>"]), ("MAIL", &["mail.>"])]);
    engine.broker.declare_streams(both).await.unwrap();
    let plain = Plain::connect(&url).await;
    let removed = plain.api("STREAM.DELETE.MAIL", json!({})).await;
    assert_eq!(removed["success"], true, "{removed}");
    let batch = vec![event("order.placed"), event("mail.sent")];
    let answers = engine.broker.append(batch).await.unwrap();
    let stored = answers[0].as_ref().unwrap();
    assert_eq!(stored.position.to_string(), "ORDERS:1");
    let error = answers[1].as_ref().unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("removed"), "{error}");
}

// conformance: contract/nats-no-direct: a stream of another program that allows no direct reads is read through its leader
// needs: nats-server
#[tokio::test]
async fn a_stream_without_direct_reads_is_read() {
    let Some(url) = server::account() else { return };
    let plain = Plain::connect(&url).await;
    let config = json!({"name": "ORDERS", "subjects": ["order.>"], "allow_direct": false});
    let made = plain.api("STREAM.CREATE.ORDERS", config).await;
    assert!(made["error"].is_null(), "{made}");
    let engine = open(&url).await;
    let declared = table(&[("ORDERS", &["order.>"])]);
    engine.broker.declare_streams(declared).await.unwrap();
    publish(&engine, "order.first").await;
    let second = publish(&engine, "order.second").await;
    let log = engine.log().unwrap();
    let patterns = || vec![Pattern::new("order.*").unwrap()];
    let (read, _) = log.read(Cursor::START, patterns(), 10).await.unwrap();
    assert_eq!(read.len(), 2);
    let since = StartFrom::Time(second.received_at);
    let cursor = log.resolve(since, patterns()).await.unwrap();
    let (read, _) = log.read(cursor, patterns(), 10).await.unwrap();
    assert_eq!(read[0].event.event_type(), "order.second");
    let mut spec = group("g", &["order.*"]);
    spec.start_from = since;
    engine.broker.declare(spec).await.unwrap();
    assert_eq!(handle(&engine, "g", 1).await, ["order.second"]);
}

// conformance: contract/nats-server-time: a group since a time gets the later events of a publisher whose clock is slow: a stamp far from the server's time does not count
// needs: nats-server
#[tokio::test]
async fn a_slow_clock_of_a_publisher_hides_nothing() {
    let Some(url) = server::account() else { return };
    let engine = open(&url).await;
    publish(&engine, "a.early").await;
    let since = publish(&engine, "a.b").await.received_at;
    let mut slow = Options::default();
    let hour_ago = since.minus(Duration::from_secs(3600));
    slow.clock = Arc::new(ManualClock::new(hour_ago));
    let publisher = everbus_nats::open(&url, slow).await.unwrap();
    let late: Timestamp = publish(&publisher, "a.late").await.received_at;
    assert!(late < since);
    let mut spec = group("g", &["a.*"]);
    spec.start_from = StartFrom::Time(since);
    engine.broker.declare(spec).await.unwrap();
    assert_eq!(handle(&engine, "g", 2).await, ["a.b", "a.late"]);
    let log = engine.log().unwrap();
    let patterns = || vec![Pattern::new("a.*").unwrap()];
    let cursor = log.resolve(StartFrom::Time(since), patterns()).await;
    let (read, _) = log.read(cursor.unwrap(), patterns(), 10).await.unwrap();
    assert_eq!(read.len(), 2);
}

// conformance: contract/nats-cut-declare: a declaration whose connection is cut at any of its requests can be repeated, and the group misses nothing
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_declaration_that_was_cut_is_repeated() {
    let Some(url) = server::account() else { return };
    let Some(server) = everbus_testkit::servers::Nats::shared() else {
        return;
    };
    let proxy = Proxy::start(server.port()).await;
    let engine = open(&proxy.through(&url)).await;
    publish(&engine, "a.first").await;
    let requests: [&[u8]; 5] = [
        b"$EVERBUS.groups",
        b"STREAM.LIST",
        b"STREAM.MSG.GET",
        b"CONSUMER.INFO",
        b"CONSUMER.CREATE",
    ];
    for (n, request) in requests.into_iter().enumerate() {
        let name = format!("g{n}");
        for patterns in [&["a.*"][..], &["a.*", "b.*"]] {
            proxy.cut_before_reply_to(request, 1);
            let give_up = Instant::now() + DEADLINE;
            while let Err(error) = engine.broker.declare(group(&name, patterns)).await {
                assert_eq!(error.code(), Code::Unavailable, "{error:?}");
                assert!(Instant::now() < give_up, "{error:?}");
            }
            proxy.heal();
        }
        assert!(proxy.cuts() > n as u64, "no request was cut");
    }
    publish(&engine, "b.last").await;
    for n in 0..requests.len() {
        let mut taking = Taking::of(&engine, &format!("g{n}")).await;
        taking.until("b.last").await;
        assert!(taking.types.contains(&"a.first".to_owned()));
    }
    let infos = engine.broker.inspect().await.unwrap();
    let owed: Vec<Value> = infos
        .iter()
        .map(|info| json!([info.behind, info.in_flight, info.waiting]))
        .collect();
    assert!(
        owed.iter().all(|owed| *owed == json!([0, 0, 0])),
        "{owed:?}"
    );
}
