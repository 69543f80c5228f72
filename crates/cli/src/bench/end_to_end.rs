//! End to end: published by 512 tasks, handled by a group, settled.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use everbus::Bus;
use everbus_core::StartFrom;

use super::report::Figure;
use super::sample::{self, Maker, TYPE, median, rate};
use super::{Bench, Scenario, raw};
use crate::stop::Outcome;

const PUBLISHERS: u64 = 512;

pub(super) async fn measure(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::EndToEnd;
    let events = bench.events(300_000).next_multiple_of(PUBLISHERS);
    let (mut ours, mut raws) = (Vec::new(), Vec::new());
    for round in 1..=bench.rounds() {
        bench.say(scenario, format!("round {round}, raw"));
        let path = bench.file("raw.db")?;
        raws.push(rate(events, raw::batched(path.clone(), events).await?));
        bench.remove(&path);
        bench.say(scenario, format!("round {round}"));
        let path = bench.file("ours.db")?;
        let bus = sample::open(&path).await?;
        ours.push(rate(events, Box::pin(through(&bus, events)).await?));
        bus.shutdown().await?;
        bench.remove(&path);
    }
    let (ours, raw) = (median(ours), median(raws));
    Ok(Figure::new(scenario)
        .rates(ours, raw)
        .target("≥ 0.6 × raw batched insert", ours >= 0.6 * raw))
}

/// The cost of the inbox: the raw figure is Everbus without it.
pub(super) async fn measure_inbox(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::Inbox;
    let events = bench.events(300_000).next_multiple_of(PUBLISHERS);
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for round in 1..=bench.rounds() {
        for (idempotent, rates) in [(false, &mut without), (true, &mut with)] {
            bench.say(scenario, format!("round {round}, inbox {idempotent}"));
            let path = bench.file("ours.db")?;
            let bus = sample::open(&path).await?;
            let took = Box::pin(run_through(&bus, events, idempotent)).await?;
            rates.push(rate(events, took));
            bus.shutdown().await?;
            bench.remove(&path);
        }
    }
    let (with, without) = (median(with), median(without));
    let factor = without / with;
    Ok(Figure::new(scenario)
        .rates(with, without)
        .target("≤ 1.6 × the time without", factor <= 1.6)
        .detail(format!(
            "{factor:.2} × the time per event without the inbox"
        )))
}

/// Publishes single events from 512 tasks and waits until the group has settled all of them.
pub(super) async fn through(bus: &Bus, events: u64) -> Outcome<Duration> {
    run_through(bus, events, false).await
}

async fn run_through(bus: &Bus, events: u64, idempotent: bool) -> Outcome<Duration> {
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
    let mut publishers = tokio::task::JoinSet::new();
    for _ in 0..PUBLISHERS {
        let (bus, maker) = (bus.clone(), maker.clone());
        publishers.spawn(async move {
            for _ in 0..each {
                bus.publish(maker.event()?).await?;
            }
            Ok::<_, everbus_core::Error>(())
        });
    }
    for outcome in publishers.join_all().await {
        outcome?;
    }
    until_idle(bus).await?;
    let took = began.elapsed();
    // A rate is worth nothing if not everything was done.
    sample::expect_stored(bus, each * PUBLISHERS).await?;
    let handled = handled.load(Ordering::Relaxed);
    if handled != each * PUBLISHERS {
        return Err(sample::wrong(format!(
            "{handled} of {} events were handled",
            each * PUBLISHERS
        )));
    }
    Ok(took)
}

/// Waits until every group has caught up.
pub(super) async fn until_idle(bus: &Bus) -> Outcome {
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
