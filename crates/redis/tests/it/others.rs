//! What other buses and other programs do to the streams of a bus.

use std::time::Duration;

use everbus_core::{
    Engine, Event, GroupSpec, Pattern, Settlement, StartFrom, Stream, StreamLimit, Streams,
    TypeLimits, Verdict,
};
use everbus_redis::Options;
use everbus_testkit::servers::{Flavour, Redis, RedisOptions};
use serde_json::{Value, json};

use crate::plain::{Plain, group, handle, options, pattern, publish, until};
use crate::server;

async fn open(url: &str) -> Engine {
    everbus_redis::open(url, Options::default()).await.unwrap()
}

fn table(dialect: &str) -> Streams {
    let orders = Stream::new("orders", ["order.>"]).unwrap();
    Streams::new([orders.dialect(dialect)]).unwrap()
}

fn order(n: u64) -> Event {
    let event = Event::builder("order.placed").json(&json!({"n": n}));
    let event = event.tenant("shop").key("k").meta("m", "1");
    event.build().unwrap()
}

/// Takes the next event of a group and acks it.
async fn take(engine: &Engine, name: &str) -> Event {
    let consumer = engine.broker.consume(name.parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    let fetched = tokio::time::timeout(Duration::from_secs(60), consumer.fetch(1)).await;
    let delivery = fetched.unwrap().unwrap().remove(0);
    let event = delivery.record.event.clone();
    let ack = Settlement::new(delivery.lease, Verdict::Ack);
    let answers = engine.broker.settle(vec![ack]).await.unwrap();
    answers.into_iter().next().unwrap().unwrap();
    consumer.close().await.unwrap();
    event
}

// conformance: contract/redis-dialect-kept: a bus that declares no streams leaves the dialects of others alone, and an event is read in the dialect that it was written in
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bus_without_streams_leaves_dialects_alone() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let dialects = ["cloudevents", "framework", "outbox", "omni"];
    for (n, dialect) in (0..).zip(dialects) {
        let engine = open(&url).await;
        engine.broker.declare_streams(table(dialect)).await.unwrap();
        let name = format!("reader-{dialect}");
        let mut spec = group(&name, &["order.*"]);
        spec.start_from = StartFrom::New;
        engine.broker.declare(spec).await.unwrap();
        engine.broker.append(vec![order(n)]).await.unwrap();
        // As `everbus publish` without a configuration.
        let other = open(&url).await;
        other
            .broker
            .declare_streams(Streams::single())
            .await
            .unwrap();
        other.broker.append(vec![order(n + 100)]).await.unwrap();
        let plain = Plain::connect(&url).await;
        let kept = plain
            .text(&["HGET", "everbus:streams", "order:placed"])
            .await;
        assert_eq!(kept.trim(), dialect);
        engine.broker.append(vec![order(n + 200)]).await.unwrap();
        for expected in [n, n + 100, n + 200] {
            let event = take(&engine, &name).await;
            assert_eq!(event.json::<Value>().unwrap(), json!({"n": expected}));
            assert_eq!(
                (event.tenant(), event.ordering_key().as_deref()),
                (Some("shop"), Some("k"))
            );
            assert_eq!(event.metadata()["m"], "1");
        }
        // The dialect changes while an event waits.
        engine.broker.append(vec![order(n + 300)]).await.unwrap();
        let native = Stream::new("orders", ["order.>"]).unwrap();
        let native = Streams::new([native]).unwrap();
        engine.broker.declare_streams(native).await.unwrap();
        let event = take(&engine, &name).await;
        assert_eq!(event.json::<Value>().unwrap(), json!({"n": n + 300}));
        assert_eq!(event.tenant(), Some("shop"));
        engine.broker.close().await.unwrap();
        other.broker.close().await.unwrap();
    }
}

// conformance: contract/redis-missed-alarm: events that another program trimmed before a group had read them are counted as lost, once, and reported
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_events_that_another_program_trims_are_reported() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    for _ in 0..3 {
        publish(&engine, "order.placed").await;
    }
    let plain = Plain::connect(&url).await;
    // What was trimmed before the group came was never its own.
    plain
        .ask(&["XTRIM", "order:placed", "MAXLEN", "2"])
        .await
        .unwrap();
    engine
        .broker
        .declare(group("g", &["order.*"]))
        .await
        .unwrap();
    handle(&engine, "g", 2).await;
    for _ in 0..10 {
        publish(&engine, "order.placed").await;
    }
    plain
        .ask(&["XTRIM", "order:placed", "MAXLEN", "4"])
        .await
        .unwrap();
    let reported = async || {
        let info = engine.broker.inspect().await.unwrap().remove(0);
        info.held_back.unwrap_or_default()
    };
    handle(&engine, "g", 4).await;
    let text = reported().await;
    assert!(text.starts_with("6 events were deleted"), "{text:?}");
    // Also while no process consumes the group, and nothing is counted twice.
    for _ in 0..10 {
        publish(&engine, "order.placed").await;
    }
    plain
        .ask(&["XTRIM", "order:placed", "MAXLEN", "1"])
        .await
        .unwrap();
    until("the upkeep reports them", async || {
        reported().await.starts_with("15 events")
    })
    .await;
    assert_eq!(handle(&engine, "g", 1).await, ["order.placed"]);
    let info = engine.broker.inspect().await.unwrap().remove(0);
    assert_eq!(info.behind, 0);
    assert!(info.held_back.unwrap().starts_with("15 events"));
}

// conformance: framework/backpressure-maxlen: on Redis default_maxlen and the overrides by stream bound the streams, also one that no group wants; a process without the section keeps the limits of others
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_by_type_bound_the_streams() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    let named = [("signals.price.update", 5), ("orders.order.placed", 50)];
    let named = named.map(|(name, most)| (name.to_owned(), StreamLimit::new(most)));
    let limits = TypeLimits {
        default: Some(StreamLimit::new(20)),
        by_type: named.into_iter().collect(),
    };
    let table = Streams::single().with_type_limits(limits);
    engine.broker.declare_streams(table).await.unwrap();
    for _ in 0..60 {
        for event_type in ["signals.price.update", "orders.order.placed", "users.seen"] {
            publish(&engine, event_type).await;
        }
    }
    let plain = Plain::connect(&url).await;
    let length = async |key: &str| plain.number(&["XLEN", key]).await;
    until("each stream is at its limit", async || {
        length("signals:price-update").await <= 6
            && length("orders:order-placed").await <= 51
            && length("users:seen").await <= 21
    })
    .await;
    assert!(length("orders:order-placed").await >= 50);
    engine.broker.close().await.unwrap();
    // A bus that knows nothing of the limits, and would keep only five.
    let mut few = Options::default();
    few.keep_finished = Some(5);
    let other = everbus_redis::open(&url, few).await.unwrap();
    let all = group("all", &["orders.order.*", "witness.*"]);
    other.broker.declare(all).await.unwrap();
    for _ in 0..20 {
        publish(&other, "witness.seen").await;
    }
    let kept = length("orders:order-placed").await;
    handle(&other, "all", 20 + usize::try_from(kept).unwrap()).await;
    until("the witness is trimmed", async || {
        length("witness:seen").await <= 6
    })
    .await;
    assert_eq!(length("orders:order-placed").await, kept);
}

// conformance: contract/redis-adopted-streams: with adopt_streams a wildcard group gets streams that only other programs have written, from where it begins
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wildcard_finds_streams_of_other_programs() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let plain = Plain::connect(&url).await;
    for key in ["orders:order-placed", "dlq:orders:order-placed", "a:b:c"] {
        plain.ask(&["XADD", key, "*", "order", "1"]).await.unwrap();
    }
    plain
        .ask(&["SET", "users:seen", "no stream"])
        .await
        .unwrap();
    let mut all = Options::default();
    all.adopt_streams = true;
    let engine = everbus_redis::open(&url, all).await.unwrap();
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    assert_eq!(handle(&engine, "g", 1).await, ["orders.order.placed"]);
    let streams = plain.text(&["HKEYS", "everbus:streams"]).await;
    assert_eq!(streams, "orders:order-placed\n");
}

// conformance: contract/redis-ahead: a stream whose ids are ahead of the server's clock does not keep the wake-up busy, and a reader of the log ends
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_of_the_future_keep_nothing_busy() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let url = server.url();
    let engine = open(&url).await;
    publish(&engine, "a.b").await;
    publish(&engine, "odd.ids").await;
    let plain = Plain::connect(&url).await;
    for id in ["1763320000123456-1", "1763320000123456-2"] {
        plain.ask(&["XADD", "odd:ids", id, "f", "v"]).await.unwrap();
    }
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    handle(&engine, "g", 4).await;
    let waiting = engine.broker.consume("g".parse().unwrap(), options());
    let mut waiting = waiting.await.unwrap();
    let idle = tokio::spawn(async move {
        let _ = waiting.fetch(1).await;
    });
    let reads = async || {
        let text = plain.text(&["INFO", "commandstats"]).await;
        let line = text.lines().find(|line| line.contains("cmdstat_xread:"));
        let calls = line.and_then(|line| line.split("calls=").nth(1)?.split(',').next());
        calls.map_or(0, |calls| calls.parse::<u64>().unwrap())
    };
    let before = reads().await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let busy = reads().await - before;
    assert!(busy < 50, "{busy} reads in four seconds without an event");
    idle.abort();
    // The log, from the beginning, in steps of one.
    let log = engine.log().unwrap();
    let (mut cursor, mut found) = (everbus_core::Cursor::START, 0);
    let all: Vec<Pattern> = vec![pattern("*")];
    for _ in 0..20 {
        let (events, reached) = log.read(cursor, all.clone(), 1).await.unwrap();
        found += events.len();
        cursor = reached;
    }
    assert!((3..=4).contains(&found), "{found} events of four");
}

// conformance: contract/redis-merged: a consumer that asks for it gets the events of all streams in the order of receipt, also with a backlog
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_of_several_types_comes_in_order() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    let mut batch = Vec::new();
    for n in 0..2000u64 {
        let event_type = ["order.placed", "order.paid", "user.created"][(n * n % 7 % 3) as usize];
        batch.push(Event::builder(event_type).json(&n).build().unwrap());
    }
    for part in batch.chunks(100) {
        engine.broker.append(part.to_vec()).await.unwrap();
    }
    let spec: GroupSpec = group("g", &["*"]);
    engine.broker.declare(spec).await.unwrap();
    let merged = options().prefetch(64).merged(true);
    let consumer = engine.broker.consume("g".parse().unwrap(), merged);
    let mut consumer = consumer.await.unwrap();
    let mut next = 0;
    while next < 2000 {
        for delivery in consumer.fetch(50).await.unwrap() {
            let n: u64 = delivery.record.event.json().unwrap();
            assert_eq!(n, next);
            next += 1;
            let ack = Settlement::new(delivery.lease, Verdict::Ack);
            engine.broker.settle(vec![ack]).await.unwrap();
        }
    }
}

// conformance: contract/redis-unhandled: events of a type that no running process of the group has a handler for are counted as such
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_without_a_handler_are_counted() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    let spec = group("g", &["order.*", "mail.*"]);
    engine.broker.declare(spec).await.unwrap();
    publish(&engine, "mail.sent").await;
    let unhandled = async || engine.broker.inspect().await.unwrap()[0].unhandled;
    assert_eq!(unhandled().await, 0, "no process runs");
    let orders = everbus_core::ConsumeOptions::new(vec![pattern("order.*")]);
    let orders = orders.no_handler_after(Duration::MAX);
    let consumer = engine.broker.consume("g".parse().unwrap(), orders);
    let consumer = consumer.await.unwrap();
    assert_eq!(unhandled().await, 1);
    consumer.close().await.unwrap();
}
