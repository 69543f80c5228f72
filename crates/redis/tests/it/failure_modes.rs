//! The failure modes of the specification, row by row, and what other programs do to the streams.

use std::time::Duration;

use everbus_core::{
    Class, Code, Delivery, Engine, Event, GroupSpec, Settlement, Stream, StreamLimit, Streams,
    Verdict,
};
use everbus_redis::Options;
use everbus_testkit::servers::{Flavour, Proxy, Redis, RedisOptions};

use crate::plain::{Plain, group, handle, options, publish, until};
use crate::server;

async fn open(url: &str) -> Engine {
    everbus_redis::open(url, Options::default()).await.unwrap()
}

async fn ack(engine: &Engine, delivery: Delivery) {
    let ack = Settlement::new(delivery.lease, Verdict::Ack);
    engine
        .broker
        .settle(vec![ack])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
}

async fn fetch_one(consumer: &mut Box<dyn everbus_core::Consumer>) -> Delivery {
    let fetched = tokio::time::timeout(Duration::from_secs(60), consumer.fetch(1)).await;
    fetched.unwrap().unwrap().remove(0)
}

// conformance: contract/redis-memory-full: a full memory refuses publishes, and acks and dead letters still go through
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_memory_refuses_publishes_and_not_acks() {
    let options_ = RedisOptions::default().max_memory(200 << 20, "noeviction");
    let Some(server) = Redis::start(options_) else {
        return;
    };
    let engine = open(&server.url()).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    for _ in 0..3 {
        publish(&engine, "order.placed").await;
    }
    let mut consumer = engine
        .broker
        .consume("g".parse().unwrap(), options())
        .await
        .unwrap();
    let mut held = consumer.fetch(3).await.unwrap();
    while held.len() < 3 {
        held.extend(consumer.fetch(3 - held.len()).await.unwrap());
    }
    server.command("CONFIG SET maxmemory 1");
    let event = Event::builder("order.placed").build().unwrap();
    let error = engine.broker.append(vec![event.clone()]).await.unwrap_err();
    assert_eq!(
        (error.code(), error.class()),
        (Code::DiskFull, Class::Passing),
        "{error}"
    );
    assert!(error.hint_text().unwrap().contains("maxmemory"));
    // Also what the group needs to go on: extensions, releases, and claims with an event that is due.
    let leases = vec![held[1].lease.clone()];
    let extended = engine.broker.extend(leases, Duration::from_secs(5)).await;
    extended.unwrap().remove(0).unwrap();
    let after = Duration::ZERO;
    let release = Settlement::new(held.pop().unwrap().lease, Verdict::Release { after });
    engine
        .broker
        .settle(vec![release])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    held.push(fetch_one(&mut consumer).await);
    let failure = None;
    let dead = Settlement::new(held.remove(0).lease, Verdict::Dead { failure });
    engine
        .broker
        .settle(vec![dead])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    for delivery in held {
        ack(&engine, delivery).await;
    }
    let info = engine.broker.inspect().await.unwrap().remove(0);
    assert_eq!((info.in_flight, info.dead_letters), (0, 1));
    server.command("CONFIG SET maxmemory 0");
    engine
        .broker
        .append(vec![event])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
}

// conformance: framework/redis-crash: messages that a crashed consumer left pending come again when their lease ends, also after a restart of the server; a long handler keeps its own
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_keeps_the_pending_list() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let engine = open(&server.url()).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "order.placed").await;
    publish(&engine, "order.placed").await;
    // Long enough for the restart and the extension after it.
    let brief = || options().lease(Duration::from_secs(15));
    let mut crashed = engine
        .broker
        .consume("g".parse().unwrap(), brief())
        .await
        .unwrap();
    let lost = fetch_one(&mut crashed).await;
    let kept = fetch_one(&mut crashed).await;
    server.restart();
    let other = open(&server.url()).await;
    let info = other.broker.inspect().await.unwrap().remove(0);
    assert_eq!(
        (info.in_flight, info.behind),
        (2, 0),
        "the pending list is there"
    );
    let mut consumer = other
        .broker
        .consume("g".parse().unwrap(), brief())
        .await
        .unwrap();
    // The handler of the other one takes longer than its first lease.
    let leases = vec![kept.lease.clone()];
    let hour = Duration::from_secs(3600);
    let extended = async {
        loop {
            // The connection of this engine was lost with the server.
            if let Ok(mut answers) = engine.broker.extend(leases.clone(), hour).await {
                return answers.remove(0);
            }
        }
    };
    extended.await.unwrap();
    let again = fetch_one(&mut consumer).await;
    assert_eq!(again.record.position, lost.record.position);
    assert_eq!((again.attempt, again.failures.len()), (2, 1));
    ack(&other, again).await;
    ack(&engine, kept).await;
    let info = other.broker.inspect().await.unwrap().remove(0);
    assert_eq!((info.in_flight, info.waiting, info.behind), (0, 0, 0));
    assert_eq!(info.held_back, None, "nothing was lost");
}

// conformance: contract/redis-stale-recovery: messages that another program read for the group and did not finish are taken over after the idle time, with their delivery counted, and the event of a handler that takes longer is not
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_program_left_is_taken_over() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let mut options_ = Options::default();
    assert_eq!(options_.stale_after, Duration::from_secs(300));
    assert_eq!(options_.stale_count, 100);
    options_.stale_after = Duration::from_secs(1);
    // One message in each step, so that several steps are needed.
    options_.stale_count = 1;
    let engine = everbus_redis::open(&url, options_).await.unwrap();
    engine
        .broker
        .declare(group("shared", &["order.placed"]))
        .await
        .unwrap();
    publish(&engine, "order.placed").await;
    // A handler that works for longer than the idle time.
    let long = options().lease(Duration::from_secs(3600));
    let consumer = engine.broker.consume("shared".parse().unwrap(), long);
    let mut consumer = consumer.await.unwrap();
    let slow = fetch_one(&mut consumer).await;
    consumer.pause().await.unwrap();
    publish(&engine, "order.placed").await;
    publish(&engine, "order.placed").await;
    let plain = Plain::connect(&url).await;
    let read = [
        "XREADGROUP",
        "GROUP",
        "shared",
        "python",
        "STREAMS",
        "order:placed",
        ">",
    ];
    assert!(
        plain.text(&read).await.contains("eb"),
        "another program has them"
    );
    consumer.resume(64).await.unwrap();
    for _ in 0..2 {
        let delivery = fetch_one(&mut consumer).await;
        assert_ne!(delivery.record.position, slow.record.position);
        assert_eq!(delivery.attempt, 2, "its delivery was an attempt");
        ack(&engine, delivery).await;
    }
    ack(&engine, slow).await;
    assert!(
        plain
            .text(&["XPENDING", "order:placed", "shared"])
            .await
            .starts_with("int(0)")
    );
}

// conformance: contract/redis-loss-alarm: a pending event that another program deleted is reported as lost, and blocks nothing
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_pending_event_is_reported() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    let mut spec = group("g", &["*"]);
    spec.ordered = true;
    engine.broker.declare(spec).await.unwrap();
    let keyed = || Event::builder("order.placed").key("k").build().unwrap();
    engine.broker.append(vec![keyed(), keyed()]).await.unwrap();
    let mut consumer = engine
        .broker
        .consume("g".parse().unwrap(), options())
        .await
        .unwrap();
    let first = fetch_one(&mut consumer).await;
    let plain = Plain::connect(&url).await;
    let text = plain
        .text(&["XRANGE", "order:placed", "-", "+", "COUNT", "1"])
        .await;
    let id = text.lines().next().unwrap();
    assert_eq!(plain.number(&["XDEL", "order:placed", id]).await, 1);
    let after = Duration::ZERO;
    let release = Settlement::new(first.lease, Verdict::Release { after });
    engine
        .broker
        .settle(vec![release])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    let second = fetch_one(&mut consumer).await;
    assert_ne!(
        second.record.position, first.record.position,
        "its key goes on"
    );
    let info = engine.broker.inspect().await.unwrap().remove(0);
    assert!(info.held_back.unwrap().contains("1 events were deleted"));
    ack(&engine, second).await;
}

// conformance: framework/redis-memory: a stream over its length is trimmed, and nothing that a group has not finished is trimmed with it
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trimming_takes_nothing_that_a_group_owes() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    let limited = |name: &str, types: &str| {
        let stream = Stream::new(name, [types]).unwrap();
        stream.limit(StreamLimit::new(5))
    };
    let table = Streams::new([
        limited("orders", "order.>"),
        limited("witnesses", "witness.>"),
    ]);
    let table = table.unwrap();
    engine.broker.declare_streams(table).await.unwrap();
    engine
        .broker
        .declare(group("quick", &["order.*"]))
        .await
        .unwrap();
    engine
        .broker
        .declare(group("slow", &["order.*"]))
        .await
        .unwrap();
    for _ in 0..20 {
        publish(&engine, "order.placed").await;
    }
    handle(&engine, "quick", 20).await;
    let mut slow = engine
        .broker
        .consume("slow".parse().unwrap(), options())
        .await
        .unwrap();
    let held = fetch_one(&mut slow).await;
    let plain = Plain::connect(&url).await;
    let length = async || plain.number(&["XLEN", "order:placed"]).await;
    // Two rounds of the upkeep: it looks at the streams in the order of their names, and trims the witness last.
    let witness = engine.broker.declare(group("witness", &["witness.*"]));
    witness.await.unwrap();
    for _ in 0..2 {
        for _ in 0..20 {
            publish(&engine, "witness.seen").await;
        }
        handle(&engine, "witness", 20).await;
        until("the witness is trimmed", async || {
            plain.number(&["XLEN", "witness:seen"]).await <= 6
        })
        .await;
    }
    assert_eq!(length().await, 20, "the slow group owes all of it");
    slow.close().await.unwrap();
    drop(held);
    handle(&engine, "slow", 20).await;
    until("the finished ones are gone", async || length().await <= 6).await;
    assert!(length().await >= 5);
}

// conformance: contract/redis-failover: after a failover to a replica that trails, what it had not received is gone, and everything else goes on
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_loses_what_the_replica_had_not_received() {
    let Some(primary) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let between = Proxy::start(primary.port()).await;
    let options_ = RedisOptions::default().replica_of(between.port());
    let Some(replica) = Redis::start(options_) else {
        return;
    };
    replica.wait_for_primary();
    let engine = open(&primary.url()).await;
    assert!(
        engine
            .weaknesses
            .iter()
            .any(|w| w.setting == "min-replicas-to-write")
    );
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "order.placed").await;
    let copy = Plain::connect(&replica.url()).await;
    until("the replica has the event", async || {
        copy.number(&["XLEN", "order:placed"]).await == 1
    })
    .await;
    between.black_hole();
    publish(&engine, "order.paid").await;
    primary.kill();
    replica.command("REPLICAOF NO ONE");
    let engine = open(&replica.url()).await;
    assert_eq!(
        handle(&engine, "g", 1).await,
        ["order.placed"],
        "the group is there"
    );
    let received = copy.number(&["EXISTS", "order:paid"]).await;
    assert_eq!(
        received, 0,
        "acknowledged and lost: replication does not wait"
    );
    publish(&engine, "order.paid").await;
    assert_eq!(handle(&engine, "g", 1).await, ["order.paid"]);
}

// conformance: contract/redis-few-replicas: a server with fewer replicas than min-replicas-to-write refuses publishes and verdicts without storing anything, and the bus goes on once the replicas are back
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_with_too_few_replicas_is_waited_for() {
    let Some(primary) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let engine = open(&primary.url()).await;
    let weak = |engine: &Engine, setting: &str| {
        let mut weaknesses = engine.weaknesses.iter();
        weaknesses.any(|weakness| weakness.setting == setting)
    };
    assert!(weak(&engine, "replicas"));
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "order.placed").await;
    // Longer than the publish that is refused again and again.
    let long = options().lease(Duration::from_secs(3600));
    let consumer = engine.broker.consume("g".parse().unwrap(), long);
    let mut consumer = consumer.await.unwrap();
    let held = fetch_one(&mut consumer).await;
    primary.command("CONFIG SET min-replicas-to-write 1");
    let done = Settlement::new(held.lease.clone(), Verdict::Ack);
    let refused = match engine.broker.settle(vec![done]).await {
        Ok(mut answers) => answers.remove(0).unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    assert!(refused.message().contains("min-replicas-to-write"));
    let event = Event::builder("order.paid").build().unwrap();
    let error = engine.broker.append(vec![event.clone()]).await.unwrap_err();
    assert_eq!(
        (error.code(), error.class()),
        (Code::Unavailable, Class::Passing),
        "it is known that nothing is stored: {error}"
    );
    let plain = Plain::connect(&primary.url()).await;
    assert_eq!(plain.number(&["EXISTS", "order:paid"]).await, 0);
    let options_ = RedisOptions::default().replica_of(primary.port());
    let Some(replica) = Redis::start(options_) else {
        return;
    };
    replica.wait_for_primary();
    let mut answers = engine.broker.append(vec![event.clone()]).await.unwrap();
    assert!(!answers.remove(0).unwrap().duplicate);
    ack(&engine, held).await;
    let paid = fetch_one(&mut consumer).await;
    assert_eq!(paid.record.event.id(), event.id());
    ack(&engine, paid).await;
    let again = open(&primary.url()).await;
    for setting in ["replicas", "min-replicas-to-write"] {
        assert!(!weak(&again, setting), "{:?}", again.weaknesses);
    }
}

// conformance: contract/redis-order-streams: in an ordered group the events of a key come in order, also from several streams and with a backlog
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_in_order_over_several_streams() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    let ordered = GroupSpec {
        ordered: true,
        ..group("ordered", &["*"])
    };
    engine.broker.declare(ordered).await.unwrap();
    for n in 0..300usize {
        let event_type = ["order.placed", "order.paid", "user.created"][n * n % 3];
        let event = Event::builder(event_type)
            .key(format!("k{}", n % 4))
            .json(&n);
        let event = event.build().unwrap();
        engine
            .broker
            .append(vec![event])
            .await
            .unwrap()
            .remove(0)
            .unwrap();
    }
    let mut consumers = Vec::new();
    for _ in 0..2 {
        let few = options().prefetch(5);
        consumers.push(
            engine
                .broker
                .consume("ordered".parse().unwrap(), few)
                .await
                .unwrap(),
        );
    }
    let mut last = [None; 4];
    let mut count = 0;
    while count < 300 {
        for consumer in &mut consumers {
            let brief = Duration::from_millis(20);
            let Ok(batch) = tokio::time::timeout(brief, consumer.fetch(5)).await else {
                continue;
            };
            for delivery in batch.unwrap() {
                let n: usize = delivery.record.event.json().unwrap();
                assert!(last[n % 4] < Some(n), "{n} after {:?}", last[n % 4]);
                last[n % 4] = Some(n);
                ack(&engine, delivery).await;
                count += 1;
            }
        }
    }
}

// conformance: contract/engine-redis-wildcards: a stream that appears later joins a wildcard group from its beginning, also in a process that knew nothing of it
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_stream_joins_from_its_beginning() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let reader = open(&url).await;
    let mut spec = group("g", &["*"]);
    spec.start_from = everbus_core::StartFrom::New;
    reader.broker.declare(spec).await.unwrap();
    let mut consumer = reader
        .broker
        .consume("g".parse().unwrap(), options())
        .await
        .unwrap();
    let writer = open(&url).await;
    for event_type in ["a.b", "c.d", "e"] {
        publish(&writer, event_type).await;
        let delivery = fetch_one(&mut consumer).await;
        assert_eq!(delivery.record.event.event_type(), event_type);
        ack(&reader, delivery).await;
    }
    // A stream that was removed is a new one.
    let plain = Plain::connect(&url).await;
    plain.ask(&["DEL", "a:b"]).await.unwrap();
    publish(&writer, "a.b").await;
    assert_eq!(
        fetch_one(&mut consumer).await.record.event.event_type(),
        "a.b"
    );
}

// conformance: contract/redis-spaces: two spaces in one database see nothing of each other
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spaces_are_apart() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let (one, two) = (open(&url).await, open(&format!("{url}/shop")).await);
    for engine in [&one, &two] {
        engine.broker.declare(group("g", &["*"])).await.unwrap();
    }
    publish(&one, "a.b").await;
    publish(&two, "c.d").await;
    assert_eq!(handle(&one, "g", 1).await, ["a.b"]);
    assert_eq!(handle(&two, "g", 1).await, ["c.d"]);
    for engine in [&one, &two] {
        assert_eq!(engine.broker.inspect().await.unwrap()[0].behind, 0);
    }
    let plain = Plain::connect(&url).await;
    assert_eq!(plain.number(&["XLEN", "shop/c:d"]).await, 1);
}

// conformance: framework/dlq-fields: on Redis a dead letter has the specified fields, the stream among them
// conformance: framework/dlq-stream-names: a dead letter is an entry of dlq:{stream} with original_event, error, attempts, failed_at and original_stream
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_has_the_specified_fields() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    engine
        .broker
        .declare(group("notification-service", &["*"]))
        .await
        .unwrap();
    let event = Event::builder("orders:order-placed").json(&serde_json::json!({"order": 7}));
    let event = event.source("shop").build().unwrap();
    engine.broker.append(vec![event.clone()]).await.unwrap();
    let group = "notification-service".parse().unwrap();
    let mut consumer = engine.broker.consume(group, options()).await.unwrap();
    let after = Duration::ZERO;
    for attempt in 1..=2 {
        let delivery = fetch_one(&mut consumer).await;
        let now = everbus_core::Timestamp::from_micros(1_700_000_000_000_000);
        let text = format!("failure {attempt}");
        let kind = everbus_core::FailureKind::Error;
        let failure = everbus_core::Failure::new(attempt, now, kind, text);
        let verdict = match attempt {
            1 => Verdict::Retry { after, failure },
            _ => Verdict::Dead {
                failure: Some(failure),
            },
        };
        let settled = engine
            .broker
            .settle(vec![Settlement::new(delivery.lease, verdict)]);
        settled.await.unwrap().remove(0).unwrap();
    }
    let plain = Plain::connect(&url).await;
    let mut range = redis::cmd("XRANGE");
    range.arg("dlq:orders:order-placed").arg("-").arg("+");
    let letters: Vec<(String, Vec<(String, String)>)> =
        range.query_async(&mut plain.0.clone()).await.unwrap();
    assert_eq!(letters.len(), 1);
    let field = |name: &str| {
        let mut fields = letters[0].1.iter();
        fields.find(|(of, _)| of == name).unwrap().1.as_str()
    };
    let original: serde_json::Value = serde_json::from_str(field("original_event")).unwrap();
    assert_eq!(original["event_id"], event.id().to_string());
    assert_eq!(original["payload"], serde_json::json!({"order": 7}));
    assert_eq!((field("error"), field("attempts")), ("failure 2", "2"));
    assert_eq!(field("original_stream"), "orders:order-placed");
    assert!(
        field("failed_at").starts_with("2023-11-14T22:13:20"),
        "{}",
        field("failed_at")
    );
    assert_eq!(field("group"), "notification-service");
    assert!(field("failures").contains("failure 1"));
    let info = engine.broker.inspect().await.unwrap().remove(0);
    assert_eq!((info.dead_letters, info.in_flight), (1, 0));
    // A program that replays it takes it out of the stream.
    assert_eq!(
        plain
            .number(&["XDEL", "dlq:orders:order-placed", &letters[0].0])
            .await,
        1
    );
    assert_eq!(engine.broker.inspect().await.unwrap()[0].dead_letters, 0);
}

// conformance: contract/redis-retried-key: a dead letter that is retried while a later event of its key is handled comes when that one ends
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retried_letter_waits_for_a_later_event_of_its_key() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    let ordered = GroupSpec {
        ordered: true,
        ..group("g", &["*"])
    };
    engine.broker.declare(ordered).await.unwrap();
    let keyed = || Event::builder("order.placed").key("k").build().unwrap();
    engine.broker.append(vec![keyed(), keyed()]).await.unwrap();
    let mut consumer = engine
        .broker
        .consume("g".parse().unwrap(), options())
        .await
        .unwrap();
    let first = fetch_one(&mut consumer).await;
    let failure = None;
    let dead = Settlement::new(first.lease, Verdict::Dead { failure });
    engine
        .broker
        .settle(vec![dead])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    let second = fetch_one(&mut consumer).await;
    let letters = engine.dead_letters().unwrap();
    assert_eq!(letters.retry(Default::default()).await.unwrap(), 1);
    let brief = Duration::from_millis(300);
    let nothing = tokio::time::timeout(brief, consumer.fetch(10)).await;
    assert!(
        nothing.is_err(),
        "the later one is being handled: {nothing:?}"
    );
    ack(&engine, second).await;
    let again = fetch_one(&mut consumer).await;
    assert_eq!(again.record.position, first.record.position);
    assert!(again.retried);
    ack(&engine, again).await;
}

// conformance: contract/redis-foreign-ids: a stream with an id far in the future refuses events, alone and in a whole batch, and no other stream follows it
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_of_the_future_stays_in_its_stream() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    let plain = Plain::connect(&url).await;
    let of = |event_type: &str| Event::builder(event_type).build().unwrap();
    for id in [
        "1763320000123456-0",
        "1763320000123456789-0",
        "18446744073709551614-7",
    ] {
        plain.ask(&["DEL", "odd:ids"]).await.unwrap();
        plain.ask(&["XADD", "odd:ids", id, "f", "v"]).await.unwrap();
        let before = plain.number(&["EXISTS", "c:d"]).await;
        let error = engine
            .broker
            .append(vec![of("c.d"), of("odd.ids")])
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting, "{error}");
        assert!(error.message().contains("odd:ids"), "{error}");
        let length = plain.number(&["XLEN", "c:d"]).await;
        assert_eq!((before, length), (0, 0), "nothing of the batch is stored");
        plain.ask(&["DEL", "c:d"]).await.unwrap();
    }
    let appended = engine
        .broker
        .append(vec![of("a.b")])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    assert!(
        appended.position.place() < u64::MAX / 2,
        "{}",
        appended.position
    );
    // A follow-up into that stream is refused with its verdict, and the lease is kept.
    let mut consumer = engine
        .broker
        .consume("g".parse().unwrap(), options())
        .await
        .unwrap();
    let delivery = fetch_one(&mut consumer).await;
    let mut done = Settlement::new(delivery.lease.clone(), Verdict::Ack);
    done.follow_ups = vec![of("e.f"), of("odd.ids")];
    let refused = engine.broker.settle(vec![done]).await.unwrap().remove(0);
    assert_eq!(refused.unwrap_err().code(), Code::InvalidSetting);
    assert_eq!(plain.number(&["XLEN", "e:f"]).await, 0);
    ack(&engine, delivery).await;
}

// conformance: contract/redis-refused-letter: a dead letter that the server refuses leaves its event with the group
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_dead_letter_leaves_its_event() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let engine = open(&server.url()).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "order.placed").await;
    server.command("ACL SETUSER low on >low ~* &* +@all -xadd");
    let low = open(&server.plain_url().replace("redis://", "redis://low:low@")).await;
    let mut consumer = low
        .broker
        .consume("g".parse().unwrap(), options())
        .await
        .unwrap();
    let delivery = fetch_one(&mut consumer).await;
    let failure = None;
    let dead = Settlement::new(delivery.lease.clone(), Verdict::Dead { failure });
    let refused = low.broker.settle(vec![dead]).await.unwrap().remove(0);
    assert_eq!(refused.unwrap_err().code(), Code::InvalidSetting);
    let info = engine.broker.inspect().await.unwrap().remove(0);
    assert_eq!(
        (info.in_flight, info.dead_letters),
        (1, 0),
        "it is still owed"
    );
    ack(&low, delivery).await;
}

// conformance: contract/redis-went-back: an open engine goes on after the server has gone back to an older state; an ack never ends another event
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_engine_follows_a_server_that_went_back() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    let plain = Plain::connect(&url).await;
    let before = plain.text(&["GET", "everbus:registry"]).await;
    let record = plain.text(&["HGET", "everbus:groups", "g"]).await;
    for event_type in ["a.b", "c.d"] {
        publish(&engine, event_type).await;
    }
    let mut consumer = engine
        .broker
        .consume("g".parse().unwrap(), options())
        .await
        .unwrap();
    let first = fetch_one(&mut consumer).await;
    // The counters of a replica that trailed.
    let registry = before.trim().replace("nil", "0");
    plain
        .ask(&["SET", "everbus:registry", &registry])
        .await
        .unwrap();
    plain
        .ask(&["HSET", "everbus:groups", "g", record.trim_end()])
        .await
        .unwrap();
    plain.ask(&["SET", "everbus:token", "0"]).await.unwrap();
    let second = fetch_one(&mut consumer).await;
    ack(&engine, first).await;
    ack(&engine, second).await;
    publish(&engine, "e.f").await;
    let third = fetch_one(&mut consumer).await;
    assert_eq!(third.record.event.event_type(), "e.f");
    ack(&engine, third).await;
    let info = engine.broker.inspect().await.unwrap().remove(0);
    assert_eq!((info.in_flight, info.waiting, info.behind), (0, 0, 0));
}

// conformance: contract/redis-drop-foreign: dropping the oldest counts entries of other programs whatever fields they have
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_counts_entries_of_other_programs() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    engine
        .broker
        .declare(group("g", &["mail.sent"]))
        .await
        .unwrap();
    publish(&engine, "mail.sent").await;
    let plain = Plain::connect(&url).await;
    for _ in 0..20 {
        plain
            .ask(&["XADD", "mail:sent", "*", "to", "u1@x", "k", "odd"])
            .await
            .unwrap();
    }
    let depth = engine.depth().unwrap();
    let pattern = crate::plain::pattern("mail.sent");
    assert_eq!(depth.depth(pattern.clone(), 100).await.unwrap(), 21);
    assert_eq!(depth.drop_oldest(pattern.clone(), 15).await.unwrap(), 6);
    assert_eq!(depth.depth(pattern, 100).await.unwrap(), 15);
    assert_eq!(handle(&engine, "g", 15).await.len(), 15);
}
