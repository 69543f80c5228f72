//! Publishing alone: from tasks that await each event, and in batches.

use std::time::{Duration, Instant};

use everbus::Bus;
use everbus_core::Result;

use crate::sample::{self, Maker, TYPE, percentile};
use crate::{Bench, Figure, raw};

/// `publish` from a number of tasks, beside bare group commit with as many.
pub(crate) async fn from_tasks(
    bench: &Bench,
    tasks: u64,
    usual: u64,
    at_least: f64,
) -> Result<Figure> {
    let events = bench.events(usual).next_multiple_of(tasks);
    let mut took = Vec::new();
    let raw = async || {
        let commit = async |path| raw::group_commit(path, tasks, events).await;
        bench.on_file("raw.db", commit).await
    };
    let ours = async || {
        let publish = async |bus: &Bus| publish_from(bus, tasks, events, &mut took).await;
        bench.on_bus(publish).await
    };
    let rates = bench.turns(events, raw, ours).await?;
    let target = format!("≥ {at_least} × bare group commit");
    Ok(Figure::target(target, rates.ours >= at_least * rates.raw)
        .rates(&rates)
        .latencies(percentile(&mut took, 0.5), percentile(&mut took, 0.99)))
}

async fn publish_from(
    bus: &Bus,
    tasks: u64,
    events: u64,
    took: &mut Vec<Duration>,
) -> Result<Duration> {
    let maker = Maker::new(TYPE);
    let began = Instant::now();
    let each = sample::from_tasks(tasks, || {
        let (bus, maker) = (bus.clone(), maker.clone());
        async move {
            let mut took = Vec::new();
            for _ in 0..events / tasks {
                let before = Instant::now();
                bus.publish(maker.event()?).await?;
                took.push(before.elapsed());
            }
            Ok(took)
        }
    });
    let each = each.await?;
    let all = began.elapsed();
    took.extend(each.concat());
    sample::expect_stored(bus, events).await?;
    Ok(all)
}

/// `publish_batch` of 1000, beside raw batched inserts.
pub(crate) async fn in_batches(bench: &Bench) -> Result<Figure> {
    let events = bench.events(500_000);
    let mut took = Vec::new();
    let ours = async || {
        let publish = async |bus: &Bus| {
            let maker = Maker::new(TYPE);
            let began = Instant::now();
            let mut left = events;
            while left > 0 {
                let before = Instant::now();
                bus.publish_batch(maker.batch(left.min(1000))?).await?;
                took.push(before.elapsed());
                left -= left.min(1000);
            }
            let all = began.elapsed();
            sample::expect_stored(bus, events).await?;
            Ok(all)
        };
        bench.on_bus(publish).await
    };
    let raw = async || bench.raw_inserts(events).await;
    let rates = bench.turns(events, raw, ours).await?;
    let met = rates.ours >= 0.6 * rates.raw;
    Ok(Figure::target("≥ 0.6 × raw batched insert", met)
        .rates(&rates)
        .latencies(percentile(&mut took, 0.5), percentile(&mut took, 0.99))
        .detail("p50 and p99 are those of one batch of 1000"))
}
