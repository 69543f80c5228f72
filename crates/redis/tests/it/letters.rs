//! Dead letters, and events that a user may not read.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Clock as _, DeadLetterFilter, Delivery, Engine, Event, Failure, FailureKind, ManualClock,
    PageRequest, PurgeBasis, Retention, Settlement, Stream, StreamLimit, Streams, Timestamp,
    Verdict,
};
use everbus_redis::Options;
use everbus_testkit::servers::{Flavour, Redis, RedisOptions};
use serde_json::{Value, json};

use crate::plain::{Plain, group, handle, options, publish, until};
use crate::server;

async fn open(url: &str) -> Engine {
    everbus_redis::open(url, Options::default()).await.unwrap()
}

async fn fetch_one(consumer: &mut Box<dyn everbus_core::Consumer>) -> Delivery {
    let fetched = tokio::time::timeout(Duration::from_secs(60), consumer.fetch(1)).await;
    fetched.unwrap().unwrap().remove(0)
}

async fn settle(engine: &Engine, delivery: Delivery, verdict: Verdict) {
    let settlement = Settlement::new(delivery.lease, verdict);
    let answers = engine.broker.settle(vec![settlement]).await.unwrap();
    answers.into_iter().next().unwrap().unwrap();
}

fn failure(attempt: u32, text: &str) -> Failure {
    let at = Timestamp::from_micros(1_700_000_000_000_000);
    Failure::new(attempt, at, FailureKind::Error, text)
}

// conformance: contract/redis-unreadable: an event that the user may not read is not taken for a deleted one: it waits
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_cannot_be_read_is_kept() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let engine = open(&server.url()).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "order.placed").await;
    server.command("ACL SETUSER low on >low ~* &* +@all -xrange");
    let low = open(&server.plain_url().replace("redis://", "redis://low:low@")).await;
    let consumer = low.broker.consume("g".parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    let delivery = fetch_one(&mut consumer).await;
    let after = Duration::ZERO;
    let failure = failure(1, "it broke");
    settle(&low, delivery, Verdict::Retry { after, failure }).await;
    // The claim that meets it gets no answer from XRANGE.
    let brief = Duration::from_secs(2);
    let nothing = tokio::time::timeout(brief, consumer.fetch(1)).await;
    assert!(nothing.is_err() || nothing.unwrap().is_err());
    consumer.close().await.unwrap();
    let info = engine.broker.inspect().await.unwrap().remove(0);
    assert_eq!(
        (info.waiting, info.held_back),
        (1, None),
        "it is still owed"
    );
    let consumer = engine.broker.consume("g".parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    let again = fetch_one(&mut consumer).await;
    assert_eq!(again.attempt, 2);
    settle(&engine, again, Verdict::Ack).await;
}

/// Lets the next event of the group die.
async fn kill_one(engine: &Engine, name: &str, text: &str) {
    let consumer = engine.broker.consume(name.parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    let delivery = fetch_one(&mut consumer).await;
    let failure = Some(failure(delivery.attempt, text));
    settle(engine, delivery, Verdict::Dead { failure }).await;
    consumer.close().await.unwrap();
}

// conformance: contract/redis-reading-user: a user that may not read the dead letters is told so, and takes none of them away
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_that_may_not_read_letters_removes_none() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let engine = open(&server.url()).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "order.placed").await;
    kill_one(&engine, "g", "it broke").await;
    server.command("ACL SETUSER low on >low ~everbus:* ~order:* &* +@all");
    let low = open(&server.plain_url().replace("redis://", "redis://low:low@")).await;
    let info = low.broker.inspect().await.unwrap().remove(0);
    assert_eq!(info.dead_letters, 1, "it is known, if not readable");
    let letters = low.dead_letters().unwrap();
    let refused = letters.count(DeadLetterFilter::default()).await;
    assert!(refused.is_err(), "no permission is not an empty list");
    let letters = engine.dead_letters().unwrap();
    assert_eq!(letters.count(DeadLetterFilter::default()).await.unwrap(), 1);
    assert_eq!(letters.retry(DeadLetterFilter::default()).await.unwrap(), 1);
    assert_eq!(handle(&engine, "g", 1).await, ["order.placed"]);
}

// conformance: contract/redis-letter-unhandled: a retried dead letter that no process handles dies as the same letter, with its earlier failures
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retried_letter_that_no_process_handles_keeps_its_history() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "order.placed").await;
    kill_one(&engine, "g", "it broke").await;
    let letters = engine.dead_letters().unwrap();
    let page = || PageRequest::default();
    let first = letters.list(DeadLetterFilter::default(), page()).await;
    let first = first.unwrap().items.remove(0);
    assert_eq!(letters.retry(DeadLetterFilter::default()).await.unwrap(), 1);
    // No process has a handler for orders.
    let mails = everbus_core::ConsumeOptions::new(vec![crate::plain::pattern("mail.*")]);
    let mails = mails.no_handler_after(Duration::from_millis(100));
    let consumer = engine.broker.consume("g".parse().unwrap(), mails);
    let mut consumer = consumer.await.unwrap();
    let again = loop {
        let brief = Duration::from_millis(100);
        let _ = tokio::time::timeout(brief, consumer.fetch(1)).await;
        let open = letters.list(DeadLetterFilter::default(), page()).await;
        if let Some(letter) = open.unwrap().items.pop() {
            break letter;
        }
    };
    let kinds: Vec<FailureKind> = again.failures.iter().map(|f| f.kind).collect();
    assert_eq!(kinds, [FailureKind::Error, FailureKind::NoHandler]);
    assert_eq!(again.first_seen_at, first.first_seen_at);
    consumer.close().await.unwrap();
}

// conformance: contract/redis-letter-of-trimmed: a dead letter whose event left the stream is retried from its own copy, for its group only, and dies as the same letter
// conformance: contract/redis-letter-trims: an open dead letter does not keep its stream from being trimmed
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_letter_is_retried_after_its_event_was_trimmed() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    let orders = Stream::new("orders", ["order.>"]).unwrap();
    let orders = orders.limit(StreamLimit::new(5)).dialect("framework");
    let table = Streams::new([orders]).unwrap();
    engine.broker.declare_streams(table).await.unwrap();
    for name in ["g", "other"] {
        let spec = group(name, &["order.*"]);
        engine.broker.declare(spec).await.unwrap();
    }
    let first = Event::builder("order.placed").json(&json!({"n": 1}));
    let first = first.tenant("shop").key("k").build().unwrap();
    engine.broker.append(vec![first.clone()]).await.unwrap();
    kill_one(&engine, "g", "first").await;
    for _ in 0..30 {
        publish(&engine, "order.placed").await;
    }
    handle(&engine, "g", 30).await;
    handle(&engine, "other", 31).await;
    let plain = Plain::connect(&url).await;
    until("the stream is trimmed in spite of the letter", async || {
        plain.number(&["XLEN", "order:placed"]).await <= 6
    })
    .await;
    let letters = engine.dead_letters().unwrap();
    let all = DeadLetterFilter::default;
    assert_eq!(letters.retry(all()).await.unwrap(), 1);
    assert_eq!(letters.count(all()).await.unwrap(), 0);
    let consumer = engine.broker.consume("g".parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    let again = fetch_one(&mut consumer).await;
    let event = again.record.event.clone();
    assert_eq!((event.id(), event.tenant()), (first.id(), Some("shop")));
    assert_eq!(event.json::<Value>().unwrap(), json!({"n": 1}));
    assert!(again.retried);
    let failure = Some(failure(1, "second"));
    settle(&engine, again, Verdict::Dead { failure }).await;
    consumer.close().await.unwrap();
    let page = letters.list(all(), PageRequest::default()).await.unwrap();
    assert_eq!(page.items.len(), 1);
    let texts: Vec<&str> = page.items[0]
        .failures
        .iter()
        .map(|failure| failure.error.as_str())
        .collect();
    assert_eq!(texts, ["first", "second"], "one letter, with both deaths");
    let of_other = |info: &everbus_core::GroupInfo| info.name.as_str() == "other";
    let infos = engine.broker.inspect().await.unwrap();
    let other = infos.into_iter().find(of_other).unwrap();
    assert_eq!((other.behind, other.in_flight), (0, 0), "not for this one");
    // A second retry finds the copy in its stream.
    assert_eq!(letters.retry(all()).await.unwrap(), 1);
    assert_eq!(handle(&engine, "g", 1).await, ["order.placed"]);
}

// conformance: contract/redis-letters-age: on Redis alone a bus removes open dead letters after the age of its retention, by the clock of the server; events that are still in their stream stay there, also for a replay
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_letters_are_removed() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    publish(&engine, "order.placed").await;
    kill_one(&engine, "g", "it broke").await;
    // A process whose clock is wrong takes nothing away.
    let clock = Arc::new(ManualClock::default());
    clock.advance(40 * DAY);
    let mut wrong = Options::default();
    wrong.clock = clock.clone();
    let wrong = everbus_redis::open(&url, wrong).await.unwrap();
    let letters = wrong.dead_letters().unwrap();
    let cutoff = clock.now().minus(30 * DAY);
    let purged = letters.purge(cutoff, PurgeBasis::Died, DeadLetterFilter::default());
    assert_eq!(purged.await.unwrap().dead_letters, 0);
    let letters = engine.dead_letters().unwrap();
    assert_eq!(letters.count(DeadLetterFilter::default()).await.unwrap(), 1);
    let retention = Retention {
        dead_letters: Some(Duration::from_millis(1)),
        ..Retention::standard()
    };
    let bus = everbus::Bus::builder()
        .retention(retention)
        .retention_delay(Duration::ZERO)
        .with_engine(engine.clone())
        .unwrap();
    bus.start().await.unwrap();
    until("the letter is removed", async || {
        letters.count(DeadLetterFilter::default()).await.unwrap() == 0
    })
    .await;
    let plain = Plain::connect(&url).await;
    assert_eq!(plain.number(&["XLEN", "dlq:order:placed"]).await, 0);
    assert_eq!(plain.number(&["XLEN", "order:placed"]).await, 1);
    let skips = plain.text(&["XRANGE", "everbus:skips", "-", "+"]).await;
    assert!(skips.contains("its dead letter was kept for 1 millisecond"));
    let later = group("later", &["order.*"]);
    engine.broker.declare(later).await.unwrap();
    assert_eq!(handle(&engine, "later", 1).await, ["order.placed"]);
    bus.shutdown().await.unwrap();
}

// conformance: contract/redis-letter-foreign: a purge removes the event of a dead letter, unless a group of another program has not finished it
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_leaves_the_event_to_other_programs() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let engine = open(&url).await;
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    let plain = Plain::connect(&url).await;
    for (event_type, key) in [
        ("order.placed", "order:placed"),
        ("order.paid", "order:paid"),
    ] {
        publish(&engine, event_type).await;
        kill_one(&engine, "g", "it broke").await;
        assert_eq!(plain.number(&["XLEN", key]).await, 1);
    }
    let create = ["XGROUP", "CREATE", "order:placed", "python", "0"];
    plain.ask(&create).await.unwrap();
    let letters = engine.dead_letters().unwrap();
    let now = Timestamp::from_micros(i64::MAX / 2);
    let purged = letters.purge(now, PurgeBasis::Died, DeadLetterFilter::default());
    let purged = purged.await.unwrap();
    assert_eq!((purged.dead_letters, purged.events), (2, 1));
    assert_eq!(plain.number(&["XLEN", "order:placed"]).await, 1);
    assert_eq!(plain.number(&["XLEN", "order:paid"]).await, 0);
}
