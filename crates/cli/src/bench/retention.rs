//! How fast retention removes bare and fully attributed events while a publisher works at a steady
//! rate, and what the publisher feels of it. Beside it, a raw loop that only deletes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use everbus::Bus;
use everbus_core::{Event, Pruned, Result, Retention};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use super::report::Figure;
use super::sample::{self, Maker, TYPE, median, percentile, rate};
use super::{Bench, Scenario, raw};
use crate::stop::Outcome;

/// How often the publisher publishes.
const PERIOD: Duration = Duration::from_millis(2);
/// How long it is watched in quiet.
const QUIET: Duration = Duration::from_secs(3);
const BARE: f64 = 100_000.0;
const ATTRIBUTED: f64 = 10_000.0;

/// What one round gave.
struct Round {
    rate: f64,
    quiet99: f64,
    during50: f64,
    during99: f64,
    freed: u64,
}

pub(super) async fn measure(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::Retention;
    let events = bench.events(500_000);
    let (mut raws, mut bare, mut attributed) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=bench.rounds().min(3) {
        bench.say(scenario, format!("round {round}, raw"));
        let path = bench.file("raw.db")?;
        raws.push(rate(
            events,
            raw::range_deletes(path.clone(), events).await?,
        ));
        bench.remove(&path);
        for (with, all) in [(false, &mut bare), (true, &mut attributed)] {
            bench.say(scenario, format!("round {round}, attributed: {with}"));
            let path = bench.file("ours.db")?;
            all.push(Box::pin(one(bench, &path, events, with)).await?);
            bench.remove(&path);
        }
    }
    let of =
        |rounds: &[Round], value: fn(&Round) -> f64| median(rounds.iter().map(value).collect());
    let (rate, full) = (of(&bare, |r| r.rate), of(&attributed, |r| r.rate));
    let worse = |r: &Round| r.during99 / r.quiet99;
    let (times, full_times) = (of(&bare, worse), of(&attributed, worse));
    let freed = bare.iter().map(|r| r.freed).min().unwrap_or(0);
    Ok(Figure::new(scenario)
        .rates(rate, median(raws))
        .latencies(of(&bare, |r| r.during50), of(&bare, |r| r.during99))
        .target(
            "≥ 100,000/s bare, ≥ 10,000/s attributed; publish p99 < 3 × quiet",
            rate >= BARE && full >= ATTRIBUTED && times < 3.0 && full_times < 3.0,
        )
        .detail(format!(
            "fully attributed {full:.0}/s; p99 of a publish at 500/s: quiet {:.0} µs, while bare events \
             go {:.0} µs ({times:.2} ×), while attributed ones go {:.0} µs ({full_times:.2} ×); {} MiB \
             given back",
            of(&bare, |r| r.quiet99),
            of(&bare, |r| r.during99),
            of(&attributed, |r| r.during99),
            freed >> 20,
        )))
}

async fn one(bench: &Bench, path: &Path, events: u64, attributed: bool) -> Outcome<Round> {
    let bus = sample::open(path).await?;
    if attributed {
        fill_attributed(&bus, events).await?;
    } else {
        sample::fill(&bus, events).await?;
    }
    let quiet = Publisher::start(&bus);
    tokio::time::sleep(if bench.quick { QUIET / 3 } else { QUIET }).await;
    let mut quiet = quiet.stop().await?;
    let publisher = Publisher::start(&bus);
    let everything = Retention {
        // Whatever is there when it begins.
        max_age: Some(Duration::from_micros(1)),
        ..Retention::default()
    };
    let began = Instant::now();
    // The deletion ends with the last event; giving the room back follows.
    let last = Arc::new(std::sync::Mutex::new((0, Duration::ZERO)));
    let watch = {
        let last = last.clone();
        move |done: Pruned| {
            if let Ok(mut last) = last.lock()
                && done.removed > last.0
            {
                *last = (done.removed, began.elapsed());
            }
        }
    };
    let maintenance = bus.engine().maintenance()?;
    let pruned = maintenance
        .prune_watched(everything, Box::new(watch))
        .await?;
    let mut during = publisher.stop().await?;
    if pruned.removed < events {
        return Err(sample::wrong(format!(
            "{} of {events} events were removed",
            pruned.removed
        )));
    }
    bus.shutdown().await?;
    let (removed, took) = last.lock().map_or((0, Duration::ZERO), |last| *last);
    Ok(Round {
        rate: rate(removed, took),
        quiet99: percentile(&mut quiet, 0.99),
        during50: percentile(&mut during, 0.5),
        during99: percentile(&mut during, 0.99),
        freed: pruned.freed_bytes,
    })
}

async fn fill_attributed(bus: &Bus, events: u64) -> Outcome {
    let payload = sample::payload();
    let mut n = 0;
    while n < events {
        let batch: Result<Vec<Event>> = (n..events.min(n + 1000))
            .map(|n| {
                Event::builder(TYPE)
                    .payload(payload.clone())
                    .tenant(format!("tenant-{}", n % 20))
                    .app(format!("app-{}", n % 10))
                    .entity("order", format!("{}", n / 5))
                    .source("bench")
                    .key(format!("{}", n / 5))
                    .correlation_id(format!("request-{}", n / 3))
                    .meta("region", "north")
                    .build()
            })
            .collect();
        let batch = batch?;
        n += batch.len() as u64;
        bus.publish_batch(batch).await?;
    }
    Ok(())
}

/// Publishes one event after another at a steady rate and notes how long each took.
struct Publisher {
    stop: Arc<AtomicBool>,
    task: JoinHandle<Result<Vec<Duration>>>,
}

impl Publisher {
    fn start(bus: &Bus) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (bus, stopped, maker) = (bus.clone(), stop.clone(), Maker::new(TYPE));
        let task = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(PERIOD);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut took = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                ticks.tick().await;
                let event = maker.event()?;
                let began = Instant::now();
                bus.publish(event).await?;
                took.push(began.elapsed());
            }
            Ok(took)
        });
        Self { stop, task }
    }

    async fn stop(self) -> Outcome<Vec<Duration>> {
        self.stop.store(true, Ordering::Relaxed);
        match self.task.await {
            Ok(took) => Ok(took?),
            Err(error) => Err(sample::wrong(format!("the publisher ended early: {error}"))),
        }
    }
}
