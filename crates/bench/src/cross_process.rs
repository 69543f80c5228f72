//! From a commit in another process to the start of the handler in this one.

use std::path::Path;
use std::time::Duration;

use everbus_core::Result;
use tokio::time::MissedTickBehavior;

use crate::children::{self, Say};
use crate::end_to_end::until_idle;
use crate::sample::{self, Maker, Moments, median, percentile};
use crate::{Bench, Figure};

/// Not a multiple of the engine's poll interval, so that commits come at any point of the interval.
const PERIOD: Duration = Duration::from_millis(7);
const LIMIT_US: f64 = 50_000.0;

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let events = bench.events(500);
    let (mut middle, mut late) = (Vec::new(), Vec::new());
    for round in 1..=bench.rounds().min(3) {
        bench.say(format!("round {round}"));
        let notice = async |path: std::path::PathBuf| notice(&path, events).await;
        let mut noticed = bench.on_file("shared.db", notice).await?;
        middle.push(percentile(&mut noticed, 0.5));
        late.push(percentile(&mut noticed, 0.99));
    }
    let (p50, p99) = (median(middle), median(late));
    Ok(Figure::target("p99 ≤ 50000 µs", p99 <= LIMIT_US)
        .latencies(p50, p99)
        .detail(format!(
            "{events} events, one every {} ms, committed by another process",
            PERIOD.as_millis()
        )))
}

/// How long after its commit in the other process each event was handled in this one.
async fn notice(path: &Path, events: u64) -> Result<Vec<Duration>> {
    let bus = sample::open(path).await?;
    let started = Moments::of_handler(&bus, events).await?;
    let mut child = children::spawn(children::PACED, path, events)?;
    let line = child.wait_for_line().await?;
    child.wait()?;
    until_idle(&bus).await?;
    bus.shutdown().await?;
    let numbers = line.split_whitespace();
    let committed: Vec<u64> = numbers.filter_map(|number| number.parse().ok()).collect();
    let handled = started.all().filter(|at| *at > 0).count() as u64;
    sample::expect(committed.len() as u64, events, "events were committed")?;
    sample::expect(handled, events, "events were handled")?;
    Ok(started.since(committed.into_iter()))
}

/// The part of the other process: publishes at a steady pace, then prints when each was committed.
pub(crate) async fn publish_paced(path: &Path, events: u64, say: &mut Say<'_>) -> Result<()> {
    let bus = sample::open(path).await?;
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut committed = Vec::new();
    for n in 0..events {
        ticks.tick().await;
        bus.publish(Maker::numbered(n)?).await?;
        committed.push(Moments::now().to_string());
    }
    say(committed.join(" "));
    bus.shutdown().await.map(drop)
}
