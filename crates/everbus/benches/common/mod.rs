//! What the measurements of the pipeline share: events that wait, and a group that handles them.

#![allow(dead_code, reason = "each measurement uses its part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use everbus::core::{ConsumeOptions, Settlement, Verdict};
use everbus::{BreakerPolicy, Bus, Event, GroupName, Message, Receipt, Router, to};
use tokio::runtime::Runtime;

/// A runtime with one thread, so that everything that happens is counted and nothing else.
pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap()
}

/// Which layers of the pipeline are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layers {
    /// None but those that are always there: span, metrics, timeout.
    Plain,
    /// The inbox, the limit on age and the circuit breaker too.
    All,
}

/// A bus on the memory engine whose group owes `events` events (thousands) and has not begun.
pub(crate) struct Prepared {
    pub(crate) bus: Bus,
    done: Arc<AtomicU64>,
    events: u64,
    last: Receipt,
}

impl Prepared {
    pub(crate) async fn new(events: u64, layers: Layers) -> Self {
        let bus = Bus::builder().prefetch(4096).open("memory:").await.unwrap();
        let done = Arc::new(AtomicU64::new(0));
        let counter = done.clone();
        let mut route = to(move |_: Message| {
            counter.fetch_add(1, Ordering::Relaxed);
            std::future::ready(())
        })
        .group("bench");
        if layers == Layers::All {
            route = route
                .idempotent()
                .max_staleness(Duration::from_secs(3600))
                .breaker(BreakerPolicy::default());
        }
        bus.mount(Router::new().on("bench.event", route))
            .await
            .unwrap();
        let mut last = None;
        for _ in 0..events.div_ceil(1000) {
            let receipts = bus.publish_batch((0..1000).map(|_| event())).await.unwrap();
            last = receipts.into_iter().next_back();
        }
        Self {
            bus,
            done,
            events,
            last: last.unwrap(),
        }
    }

    /// Handles everything, until the last outcome is settled.
    pub(crate) async fn run(&self) {
        self.bus.start().await.unwrap();
        self.last.settled().await.unwrap();
        assert_eq!(self.done.load(Ordering::Relaxed), self.events);
    }

    /// The same without the pipeline: fetches from the engine, calls the handler, settles.
    pub(crate) async fn run_without_pipeline(&self) {
        let broker = &self.bus.engine().broker;
        let handled = vec!["bench.event".parse().unwrap()];
        let options = ConsumeOptions::new(handled).prefetch(4096);
        let group = GroupName::new("bench").unwrap();
        let mut consumer = broker.consume(group, options).await.unwrap();
        let mut left = self.events;
        while left > 0 {
            let batch = consumer.fetch(256).await.unwrap();
            left -= batch.len() as u64;
            let mut settlements = Vec::with_capacity(batch.len());
            for delivery in batch {
                self.done.fetch_add(1, Ordering::Relaxed);
                std::hint::black_box(std::future::ready(())).await;
                settlements.push(Settlement::new(delivery.lease, Verdict::Ack));
            }
            let answers = broker.settle(settlements).await.unwrap();
            assert!(answers.iter().all(Result::is_ok));
        }
        assert_eq!(self.done.load(Ordering::Relaxed), self.events);
    }
}

pub(crate) fn event() -> Event {
    Event::builder("bench.event")
        .payload(&b"{\"order\":42}"[..])
        .build()
        .unwrap()
}

/// Calls the same handler `events` times and does nothing else.
pub(crate) async fn bare(events: u64) {
    let done = AtomicU64::new(0);
    let handler = || {
        done.fetch_add(1, Ordering::Relaxed);
        std::future::ready(())
    };
    for _ in 0..events {
        std::hint::black_box(handler()).await;
    }
    assert_eq!(done.load(Ordering::Relaxed), events);
}
