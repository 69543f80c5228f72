//! End to end: published by 512 tasks, handled by a group, settled.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use everbus::Bus;
use everbus_core::{Result, StartFrom};

use crate::sample::{self, Maker, TYPE};
use crate::{Bench, Figure};

const PUBLISHERS: u64 = 512;

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let events = bench.events(300_000).next_multiple_of(PUBLISHERS);
    let raw = async || bench.raw_inserts(events).await;
    let ours = async || {
        let run = async |bus: &Bus| through(bus, events, false).await;
        bench.on_bus(run).await
    };
    let rates = bench.turns(events, raw, ours).await?;
    let met = rates.ours >= 0.65 * rates.raw;
    Ok(Figure::target("≥ 0.65 × raw batched insert", met).rates(&rates))
}

/// The cost of the inbox: the raw figure is Everbus without it.
pub(crate) async fn measure_inbox(bench: &Bench) -> Result<Figure> {
    let events = bench.events(300_000).next_multiple_of(PUBLISHERS);
    let run = async |idempotent| {
        let run = async |bus: &Bus| through(bus, events, idempotent).await;
        bench.on_bus(run).await
    };
    let rates = bench.turns(events, async || run(false).await, async || run(true).await);
    let rates = rates.await?;
    let factor = rates.raw / rates.ours;
    Ok(Figure::target("≤ 1.6 × the time without", factor <= 1.6)
        .rates(&rates)
        .detail(format!(
            "{factor:.2} × the time per event without the inbox"
        )))
}

/// Publishes single events from 512 tasks and waits until the group has settled all of them.
pub(crate) async fn through(bus: &Bus, events: u64, idempotent: bool) -> Result<Duration> {
    let handled = Arc::new(AtomicU64::new(0));
    let count = handled.clone();
    let mut subscribe = bus.subscribe("bench.>").group("bench");
    if idempotent {
        subscribe = subscribe.idempotent();
    }
    subscribe
        .start_from(StartFrom::First)
        .handler(move || {
            count.fetch_add(1, Ordering::Relaxed);
            std::future::ready(())
        })
        .await?;
    bus.start().await?;
    let maker = Maker::new(TYPE);
    let each = events.div_ceil(PUBLISHERS);
    let began = Instant::now();
    let publishing = sample::from_tasks(PUBLISHERS, || {
        let (bus, maker) = (bus.clone(), maker.clone());
        async move {
            for _ in 0..each {
                bus.publish(maker.event()?).await?;
            }
            Ok(())
        }
    });
    publishing.await?;
    until_idle(bus).await?;
    let took = began.elapsed();
    // A rate counts only if every event was stored and handled.
    sample::expect_stored(bus, each * PUBLISHERS).await?;
    let handled = handled.load(Ordering::Relaxed);
    sample::expect(handled, each * PUBLISHERS, "events were handled")?;
    Ok(took)
}

/// Waits until every group has caught up.
pub(crate) async fn until_idle(bus: &Bus) -> Result<()> {
    loop {
        let groups = bus.groups().await?;
        if groups
            .iter()
            .all(|g| g.behind + g.in_flight + g.waiting == 0)
        {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
