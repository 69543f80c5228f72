//! The SQLite engine against the conformance suite, the model, and bad luck.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    reason = "a test fails by panicking, and says what it skips"
)]

mod attempts;
mod audit;
mod bench_shape;
mod checksums;
mod conformance;
mod damage;
mod dead_letter_events;
mod direct;
mod disk;
mod effects;
mod ephemeral;
mod faults;
mod files;
mod follow_ups;
mod golden;
mod gone;
mod history;
mod locked;
mod model;
mod outbox;
mod outbox_over;
mod outbox_rows;
mod payloads;
mod regressions;
mod retention;
mod rollback;
mod sharing;
mod streams;
mod takeovers;
mod upkeep;
mod view;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{
    Appended, ConsumeOptions, Consumer, Delivery, Engine, Event, Failure, FailureKind, GroupName,
    GroupSpec, Result, Settlement, StartFrom, SubscriptionSpec, Timestamp, Verdict,
};
use everbus_sqlite::Options;

/// Long enough for a machine that stalls; a test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(120);

/// Opens a file with the defaults.
fn open(path: &Path) -> Engine {
    everbus_sqlite::open(path, Options::default()).expect("the file opens")
}

async fn publish(engine: &Engine, event_type: &str) -> Appended {
    let event = Event::builder(event_type)
        .json(&serde_json::json!({ "n": 1 }))
        .build()
        .unwrap();
    engine
        .broker
        .append(vec![event])
        .await
        .unwrap()
        .remove(0)
        .unwrap()
}

async fn declare(engine: &Engine, group: &str, pattern: &str) {
    let spec = GroupSpec {
        name: group.parse().unwrap(),
        start_from: StartFrom::First,
        ordered: false,
        ephemeral: false,
        subscriptions: vec![SubscriptionSpec {
            name: pattern.into(),
            pattern: pattern.parse().unwrap(),
        }],
    };
    engine.broker.declare(spec).await.unwrap();
}

fn options() -> ConsumeOptions {
    ConsumeOptions::new(vec!["*".parse().unwrap()])
}

async fn consume(engine: &Engine, group: &str) -> Box<dyn Consumer> {
    let group: GroupName = group.parse().unwrap();
    engine.broker.consume(group, options()).await.unwrap()
}

/// Consumes with handlers for these patterns only, and so much in flight at most.
async fn consume_some(
    engine: &Engine,
    group: &str,
    handled: &[&str],
    prefetch: usize,
) -> Result<Box<dyn Consumer>> {
    let handled = handled.iter().map(|p| p.parse().unwrap()).collect();
    let options = ConsumeOptions::new(handled).prefetch(prefetch);
    engine.broker.consume(group.parse().unwrap(), options).await
}

/// Waits for deliveries, not for ever.
async fn fetch(consumer: &mut Box<dyn Consumer>, count: usize) -> Vec<Delivery> {
    let mut got = Vec::new();
    while got.len() < count {
        let more = tokio::time::timeout(PATIENCE, consumer.fetch(count - got.len()));
        got.extend(more.await.expect("a delivery in time").unwrap());
    }
    got
}

async fn settle(engine: &Engine, delivery: &Delivery, verdict: Verdict) {
    try_settle(engine, delivery, verdict).await.unwrap();
}

async fn try_settle(engine: &Engine, delivery: &Delivery, verdict: Verdict) -> Result<()> {
    let settlement = Settlement::new(delivery.lease.clone(), verdict);
    engine.broker.settle(vec![settlement]).await?.remove(0)
}

fn retry_at_once(text: &str) -> Verdict {
    Verdict::Retry {
        after: Duration::ZERO,
        failure: failure(text),
    }
}

fn failure(text: &str) -> Failure {
    Failure::new(
        1,
        Timestamp::from_micros(1_700_000_000_000_000),
        FailureKind::Error,
        text,
    )
}

/// Waits until something holds, not for ever.
async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let give_up = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < give_up, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A clock of one's own, for several engines.
fn clock() -> (everbus_core::ManualClock, Arc<everbus_core::ManualClock>) {
    let clock = everbus_core::ManualClock::default();
    (clock.clone(), Arc::new(clock))
}
