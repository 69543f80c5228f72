//! Publishing alone: from tasks that await each event, and in batches.

use std::time::{Duration, Instant};

use super::report::Figure;
use super::sample::{self, Maker, TYPE, median, percentile, rate};
use super::{Bench, Scenario, raw};
use crate::stop::Outcome;

/// `publish` from a number of tasks, beside bare group commit with as many.
pub(super) async fn from_tasks(
    bench: &Bench,
    tasks: u64,
    usual: u64,
    at_least: f64,
) -> Outcome<Figure> {
    let scenario = if tasks == 1 {
        Scenario::Publish1
    } else {
        Scenario::Publish64
    };
    let events = bench.events(usual).next_multiple_of(tasks);
    let (mut ours, mut bare, mut took) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=bench.rounds() {
        bench.say(scenario, format!("round {round}, raw"));
        let path = bench.file("raw.db")?;
        let raw = raw::group_commit(path.clone(), tasks, events).await?;
        bare.push(rate(events, raw));
        bench.remove(&path);
        bench.say(scenario, format!("round {round}"));
        let (all, mut each) = publish_from(bench, tasks, events).await?;
        ours.push(rate(events, all));
        took.append(&mut each);
    }
    let (ours, bare) = (median(ours), median(bare));
    Ok(Figure::new(scenario)
        .rates(ours, bare)
        .latencies(percentile(&mut took, 0.5), percentile(&mut took, 0.99))
        .target(
            format!("≥ {at_least} × bare group commit"),
            ours >= at_least * bare,
        ))
}

async fn publish_from(
    bench: &Bench,
    tasks: u64,
    events: u64,
) -> Outcome<(Duration, Vec<Duration>)> {
    let path = bench.file("ours.db")?;
    let bus = sample::open(&path).await?;
    let each = events / tasks;
    let maker = Maker::new(TYPE);
    let began = Instant::now();
    let mut publishers = tokio::task::JoinSet::new();
    for _ in 0..tasks {
        let (bus, maker) = (bus.clone(), maker.clone());
        publishers.spawn(async move {
            let mut took = Vec::new();
            for _ in 0..each {
                let before = Instant::now();
                bus.publish(maker.event()?).await?;
                took.push(before.elapsed());
            }
            Ok::<_, everbus_core::Error>(took)
        });
    }
    let outcomes = publishers.join_all().await;
    let all = began.elapsed();
    let mut took = Vec::new();
    for outcome in outcomes {
        took.append(&mut outcome?);
    }
    sample::expect_stored(&bus, events).await?;
    bus.shutdown().await?;
    bench.remove(&path);
    Ok((all, took))
}

/// `publish_batch` of 1000, beside raw batched inserts.
pub(super) async fn in_batches(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::PublishBatch;
    let events = bench.events(500_000);
    let (mut ours, mut raws, mut took) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=bench.rounds() {
        bench.say(scenario, format!("round {round}, raw"));
        let path = bench.file("raw.db")?;
        raws.push(rate(events, raw::batched(path.clone(), events).await?));
        bench.remove(&path);
        bench.say(scenario, format!("round {round}"));
        let path = bench.file("ours.db")?;
        let bus = sample::open(&path).await?;
        let maker = Maker::new(TYPE);
        let began = Instant::now();
        let mut left = events;
        while left > 0 {
            let before = Instant::now();
            bus.publish_batch(maker.batch(left.min(1000))?).await?;
            took.push(before.elapsed());
            left -= left.min(1000);
        }
        ours.push(rate(events, began.elapsed()));
        sample::expect_stored(&bus, events).await?;
        bus.shutdown().await?;
        bench.remove(&path);
    }
    let (ours, raw) = (median(ours), median(raws));
    Ok(Figure::new(scenario)
        .rates(ours, raw)
        .latencies(percentile(&mut took, 0.5), percentile(&mut took, 0.99))
        .target("≥ 0.6 × raw batched insert", ours >= 0.6 * raw)
        .detail("p50 and p99 are those of one batch of 1000"))
}
