//! The configuration file of the framework specification.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use everbus::{Bus, Config, Message};
use everbus_core::Event;
use everbus_testkit::servers::Flavour;
use serde_json::{Value, json};

use crate::plain::{Plain, until};
use crate::server;

/// The block of the section Configuration, as written.
const SPECIFICATION: &str = r#"broker:
  type: "redis"                     # redis | nats | kafka
  url: "${REDIS_URL}"

streams:
  default_maxlen: 100000            # Default MAXLEN for new streams
  overrides:
    "signals:price-update":
      maxlen: 10000                 # Low for high-frequency trading data
    "orders:order-placed":
      maxlen: 500000                # High for critical business events

consumers:
  notification-service:
    stream: "orders:order-placed"
    group: "notification-service"
    criticality: standard
    circuit_breaker:
      fail_max: 5
      timeout_duration: 30
    retry:
      max_attempts: 3
      backoff_multiplier: 1
      backoff_max: 10
    processing_timeout: 30

  signal-processor:
    stream: "signals:price-update"
    group: "signal-processor"
    criticality: best_effort        # Skip stale, never block
    processing_timeout: 5

backpressure:
  max_staleness_ms:
    "signals:price-update": 5000
    "agents:task-completed": 60000
    "orders:order-placed": 0        # Never skip
"#;

// conformance: framework/config-redis: the file of the specification opens the Redis engine, without a store, and its consumers run: attempts, then a dead letter; its caps are those of the streams
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_file_of_the_specification_runs_as_written() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let config = Config::parse_with(SPECIFICATION, "events.yaml", |name| {
        (name == "REDIS_URL").then(|| url.clone())
    });
    let builder = Bus::builder().config(&config.unwrap());
    let bus = builder.open_configured().await.unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let handler = move |message: Message| {
        let noted = noted.clone();
        async move {
            let order = message.event().json::<Value>().unwrap()["order"].clone();
            noted
                .lock()
                .unwrap()
                .push((order.as_u64(), message.attempt()));
            match order == json!(2) {
                true => Err(everbus::HandlerError::new("no stock")),
                false => Ok(()),
            }
        }
    };
    bus.subscribe("orders.order.placed")
        .group("notification-service")
        .handler(handler)
        .await
        .unwrap();
    let prices = Arc::new(AtomicU64::new(0));
    let counted = prices.clone();
    bus.subscribe("signals.price.update")
        .group("signal-processor")
        .handler(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            std::future::ready(())
        })
        .await
        .unwrap();
    bus.start().await.unwrap();
    let tick = Event::builder("signals.price.update").json(&json!({"price": 1}));
    bus.publish(tick.build().unwrap()).await.unwrap();
    for order in 1..=3 {
        let event = Event::builder("orders.order.placed").json(&json!({"order": order}));
        bus.publish(event.build().unwrap()).await.unwrap();
    }
    let plain = Plain::connect(&url).await;
    let dead = "dlq:orders:order-placed";
    until("the dead letter", async || {
        plain.number(&["XLEN", dead]).await == 1
    })
    .await;
    let mut seen = seen.lock().unwrap().clone();
    seen.sort_unstable();
    let expected = [(1, 1), (2, 1), (2, 2), (2, 3), (3, 1)];
    let expected = expected.map(|(order, attempt)| (Some(order), attempt));
    assert_eq!(seen, expected, "three attempts, and the others once");
    assert_eq!(prices.load(Ordering::SeqCst), 1);
    // The upkeep trims by what it records.
    for (stream, most) in [
        ("signals:price-update", "10000"),
        ("orders:order-placed", "500000"),
    ] {
        until("the cap of a stream", async || {
            let limit = plain.text(&["HGET", "everbus:limits", stream]).await;
            limit.split(' ').next() == Some(most)
        })
        .await;
    }
    let letters = bus.engine().dead_letters().unwrap();
    assert_eq!(letters.count(Default::default()).await.unwrap(), 1);
    bus.shutdown().await.unwrap();
}

// conformance: contract/redis-settings: the settings of the engine stand in everbus.yaml, and other engines refuse them
#[test]
fn the_settings_of_the_engine_stand_in_the_file() {
    let text = "broker:\n  url: redis://localhost\n  window: 1m\n  stale_after: 10m\n  stale_count: 7\n  \
                keep_finished: 1000\n  timeout: 2s\n  allow_eviction: true\n  adopt_streams: true\n";
    let config = Config::parse(text, "events.yaml").unwrap();
    let redis = config.broker.unwrap().access.redis;
    let seconds = |n| Some(std::time::Duration::from_secs(n));
    assert_eq!(
        (redis.window, redis.stale_after, redis.timeout),
        (seconds(60), seconds(600), seconds(2))
    );
    assert_eq!(
        (redis.stale_count, redis.keep_finished),
        (Some(7), Some(1000))
    );
    assert!(redis.allow_eviction && redis.adopt_streams);
    for url in ["nats://localhost", "kafka://localhost", "sqlite:a.db"] {
        let text = format!("broker: {{url: '{url}', stale_after: 10m}}");
        let error = Config::parse(&text, "events.yaml").unwrap_err();
        assert!(
            error.to_string().contains("is for a redis broker"),
            "{error}"
        );
    }
}
