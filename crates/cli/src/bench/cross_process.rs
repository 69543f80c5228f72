//! From a commit in another process to the start of the handler in this one. This process gets no message
//! about the commit: it must notice it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use everbus::Message;
use everbus_core::{Event, StartFrom};
use tokio::time::MissedTickBehavior;

use super::end_to_end::until_idle;
use super::report::Figure;
use super::sample::{self, TYPE, median, number_in, numbered_payload, percentile};
use super::{Bench, Scenario, children};
use crate::output::Output;
use crate::stop::Outcome;

/// Not a multiple of the engine's poll interval, so that commits fall anywhere in it.
const PERIOD: Duration = Duration::from_millis(7);
const LIMIT_US: f64 = 50_000.0;

pub(super) async fn measure(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::CrossProcess;
    let events = bench.events(500);
    let (mut middle, mut late) = (Vec::new(), Vec::new());
    for round in 1..=bench.rounds().min(3) {
        bench.say(scenario, format!("round {round}"));
        let path = bench.file("shared.db")?;
        let mut noticed = Box::pin(notice(&path, events)).await?;
        bench.remove(&path);
        middle.push(percentile(&mut noticed, 0.5));
        late.push(percentile(&mut noticed, 0.99));
    }
    let (p50, p99) = (median(middle), median(late));
    Ok(Figure::new(scenario)
        .latencies(p50, p99)
        .target("p99 ≤ 50000 µs", p99 <= LIMIT_US)
        .detail(format!(
            "{events} events, one every {} ms, committed by another process",
            PERIOD.as_millis()
        )))
}

/// How long after its commit in the other process each event was handled in this one.
async fn notice(path: &Path, events: u64) -> Outcome<Vec<Duration>> {
    let bus = sample::open(path).await?;
    let started: Arc<[AtomicU64]> = (0..events).map(|_| AtomicU64::new(0)).collect();
    let marks = started.clone();
    bus.subscribe("bench.>")
        .group("bench")
        .start_from(StartFrom::First)
        .handler(move |m: Message| {
            if let Some(mark) = number_in(m.payload()).and_then(|index| marks.get(index)) {
                // The first time counts.
                let _ = mark.compare_exchange(0, now(), Ordering::Relaxed, Ordering::Relaxed);
            }
            std::future::ready(())
        })
        .await?;
    bus.start().await?;
    let mut child = children::spawn(children::PACED, path, events)?;
    let line = child.wait_for_line().await?;
    child.wait()?;
    until_idle(&bus).await?;
    bus.shutdown().await?;
    let committed: Vec<u64> = line
        .split_whitespace()
        .filter_map(|number| number.parse().ok())
        .collect();
    let handled = started.iter().filter(|at| at.load(Ordering::Relaxed) > 0);
    let handled = handled.count() as u64;
    if committed.len() as u64 != events || handled != events {
        let what = format!("{handled} of {} events were handled", committed.len());
        return Err(sample::wrong(what));
    }
    let pairs = started.iter().zip(committed);
    Ok(pairs
        .map(|(at, commit)| {
            Duration::from_micros(at.load(Ordering::Relaxed).saturating_sub(commit))
        })
        .collect())
}

/// The part of the other process: publishes at a steady pace, then prints when each was committed.
pub(super) async fn publish_paced(path: &Path, events: u64, output: &mut Output) -> Outcome {
    let bus = sample::open(path).await?;
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut committed = Vec::new();
    for n in 0..events {
        ticks.tick().await;
        let event = Event::builder(TYPE).payload(numbered_payload(n)).build()?;
        bus.publish(event).await?;
        committed.push(now().to_string());
    }
    output.line(committed.join(" "))?;
    output.flush()?;
    bus.shutdown().await?;
    Ok(())
}

/// Microseconds of the clock that both processes see.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |t| u64::try_from(t.as_micros()).unwrap_or(u64::MAX))
}
