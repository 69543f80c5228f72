//! Claims and connections under load: large events, and a server that does not answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{Code, Event, Settlement, Verdict};
use everbus_redis::Options;
use everbus_testkit::servers::{Proxy, Redis, RedisOptions};

use crate::plain::{Plain, group, options, publish};

// conformance: contract/redis-large-claims: a claim is bounded in bytes, so that a backlog of large events is handed out in parts
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_large_events_is_bounded() {
    let Some(server) = Redis::start(RedisOptions::default().in_memory()) else {
        return;
    };
    let engine = everbus_redis::open(&server.url(), Options::default()).await;
    let engine = engine.unwrap();
    engine.broker.declare(group("g", &["*"])).await.unwrap();
    let large = "x".repeat(1 << 20);
    for _ in 0..40 {
        let event = Event::builder("order.placed").json(&large).build().unwrap();
        engine.broker.append(vec![event]).await.unwrap();
    }
    let many = options().prefetch(512).lease(Duration::from_secs(60));
    let consumer = engine.broker.consume("g".parse().unwrap(), many);
    let mut consumer = consumer.await.unwrap();
    let mut seen = 0;
    while seen < 40 {
        let batch = consumer.fetch(512).await.unwrap();
        assert!(batch.len() <= 16, "{} megabytes at once", batch.len());
        seen += batch.len();
        for delivery in batch {
            assert_eq!(delivery.attempt, 1);
            let ack = Settlement::new(delivery.lease, Verdict::Ack);
            engine.broker.settle(vec![ack]).await.unwrap();
        }
    }
    // Small ones come in large batches as before.
    for _ in 0..100 {
        publish(&engine, "order.placed").await;
    }
    let batch = consumer.fetch(512).await.unwrap();
    assert!(batch.len() > 16, "{}", batch.len());
}

// conformance: contract/redis-away-together: callers of a server that does not answer hear of it together, not one after another
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_of_a_server_that_is_away_do_not_queue() {
    let Some(server) = Redis::start(RedisOptions::default()) else {
        return;
    };
    let proxy = Proxy::start(server.port()).await;
    let mut brief = Options::default();
    brief.timeout = Duration::from_secs(1);
    let engine = everbus_redis::open(&proxy.through(&server.url()), brief).await;
    let engine = Arc::new(engine.unwrap());
    publish(&engine, "order.placed").await;
    proxy.black_hole();
    let began = Instant::now();
    let calls = (0..64u64).map(|n| {
        let engine = engine.clone();
        tokio::spawn(async move {
            let event = Event::builder("order.placed").json(&n).build().unwrap();
            engine.broker.append(vec![event]).await
        })
    });
    for call in calls.collect::<Vec<_>>() {
        let error = call.await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
    }
    // One after another they would wait for more than a minute; each alone waits for ten seconds.
    let took = began.elapsed();
    assert!(took < Duration::from_secs(40), "{took:?}");
    let plain = Plain::connect(&server.url()).await;
    assert!(plain.number(&["XLEN", "order:placed"]).await >= 1);
}
