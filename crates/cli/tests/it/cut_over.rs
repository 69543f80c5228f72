//! A cut-over: publishers move to another engine while they publish, and a bridge carries what is behind them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus::{Bus, Event, EventId};
use serde_json::json;
use tokio::sync::watch;

use crate::bridge::{all, caught_up, open, publish, start};
use crate::support::{Shop, on_runtime};

/// Publishes until told to stop, to whichever bus is the current one. Returns what was acknowledged.
async fn publisher(
    number: u64,
    current: watch::Receiver<Bus>,
    stop: Arc<AtomicBool>,
) -> Vec<EventId> {
    let mut acknowledged = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let n = acknowledged.len() as u64;
        let event = Event::builder("order.placed").json(&json!({ "n": n }));
        let event = event.key(format!("publisher-{number}")).build().unwrap();
        // The bus is chosen anew for each try: an unknown outcome at the source is repeated at the target.
        loop {
            let bus = current.borrow().clone();
            match bus.publish(event.clone()).await {
                Ok(_) => break,
                Err(error) => assert!(error.class().may_repeat(), "{error:?}"),
            }
        }
        acknowledged.push(event.id());
        tokio::task::yield_now().await;
    }
    acknowledged
}

/// Moves four publishers from one engine to the other.
fn publishers_move(from: impl Fn(&Shop) -> String, to: &str) {
    let shop = Shop::new();
    let from = from(&shop);
    on_runtime(async {
        let (source, target) = (open(&from).await, open(to).await);
        publish(&source, 0..3000).await;
        let (switch, current) = watch::channel(source.clone());
        let stop = Arc::new(AtomicBool::new(false));
        let publishers: Vec<_> = (0..4)
            .map(|n| tokio::spawn(publisher(n, current.clone(), stop.clone())))
            .collect();
        // 1. The bridge runs while everybody publishes to the source.
        let mut bridge = start(&shop, &from, to, &["--until", "caught-up"]);
        let before = all(&source).await.len();
        while all(&target).await.len() < before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // 2. The publishers switch over, with publishes under way.
        switch.send_replace(target.clone());
        // 3. The bridge carries the rest: this run, or one after it.
        tokio::task::block_in_place(|| assert!(bridge.wait().unwrap().success()));
        let moved = all(&source).await.len();
        while all(&target).await.len() < moved + 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let rest = caught_up(&shop, &from, to, &[]).json();
        assert_eq!(
            (&rest["caught_up"], &rest["refused"]),
            (&json!(true), &json!(0))
        );
        stop.store(true, Ordering::Relaxed);
        let mut acknowledged: Vec<EventId> = all(&source).await.iter().map(Event::id).collect();
        assert!(acknowledged.len() > 3000, "they published to the source");
        for publisher in publishers {
            acknowledged.extend(publisher.await.unwrap());
        }
        acknowledged.sort();
        acknowledged.dedup();
        let mut arrived: Vec<EventId> = all(&target).await.iter().map(Event::id).collect();
        arrived.sort();
        assert_eq!(arrived.len(), acknowledged.len(), "lost or doubled");
        assert_eq!(arrived, acknowledged, "lost or doubled");
        source.shutdown().await.unwrap();
        target.shutdown().await.unwrap();
    });
}

// conformance: engines/bridge-cut-over: publishers move from a file to PostgreSQL while they publish; every acknowledged event is in the target's log exactly once
// needs: PostgreSQL
#[cfg(feature = "postgres")]
#[test]
fn publishers_move_to_postgres_while_they_publish() {
    let Some(server) = everbus_testkit::servers::Postgres::shared() else {
        return;
    };
    let file = |shop: &Shop| shop.path("shop.db").display().to_string();
    publishers_move(file, &server.fresh_database());
}

// conformance: engines/bridge-cut-over-kafka: publishers move from Redis to Kafka while they publish; every acknowledged event is in the target's log exactly once
// needs: redis-server
// needs: Kafka
#[cfg(all(feature = "redis", feature = "kafka"))]
#[test]
fn publishers_move_to_kafka_while_they_publish() {
    use everbus_testkit::servers::{Flavour, Kafka, Redis};
    let (Some(kafka), Some(redis)) = (Kafka::shared(), Redis::shared(Flavour::Redis)) else {
        return;
    };
    publishers_move(|_| redis.fresh_database(), &kafka.fresh_space());
}
