//! How fast retention removes bare and fully attributed events while others publish, and how much slower the
//! publishes become. Beside it, a raw loop that only deletes.
//!
//! Machines are noisy even without retention. So short windows with and without retention take turns in one
//! run, under one publisher, and the latencies of each kind are put together.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use everbus::Bus;
use everbus_core::{Pruned, Result, Retention};

use crate::pacer::{Kind, Pacer};
use crate::sample::{self, Maker, TYPE, median, percentile, rate};
use crate::{Bench, Figure, Rates, raw};

/// How long a window is, and the pause between two windows, in which nothing is counted.
const WINDOW: Duration = Duration::from_millis(250);
const BETWEEN: Duration = Duration::from_millis(20);
/// How long the publisher runs before the first window.
const WARM_UP: Duration = Duration::from_secs(1);
/// This many windows are enough to measure what giving space back costs; a file in use gives it back slowly.
const SHRINKING: u32 = 20;
const BARE: f64 = 100_000.0;
const ATTRIBUTED: f64 = 10_000.0;

/// The result of one round.
struct Round {
    rate: f64,
    freed: u64,
    /// Latencies by [`Kind`].
    took: [Vec<Duration>; 3],
}

/// All rounds of one sort of events.
struct Rounds(Vec<Round>);

/// Quantiles of the latencies of one kind.
struct Felt {
    count: usize,
    p50: f64,
    p99: f64,
}

impl Rounds {
    fn rate(&self) -> f64 {
        median(self.0.iter().map(|round| round.rate).collect())
    }

    fn freed(&self) -> u64 {
        self.0.iter().map(|round| round.freed).min().unwrap_or(0)
    }

    /// The latencies of all rounds together.
    fn felt(&self, kind: Kind) -> Felt {
        let all = self.0.iter().flat_map(|r| r.took[kind as usize].clone());
        let mut all: Vec<Duration> = all.collect();
        Felt {
            count: all.len(),
            p50: percentile(&mut all, 0.5),
            p99: percentile(&mut all, 0.99),
        }
    }

    /// The p99 of a kind as a multiple of the p99 without retention.
    fn times(&self, kind: Kind) -> f64 {
        self.felt(kind).p99 / self.felt(Kind::Quiet).p99
    }

    /// The minimum and the maximum of the rounds.
    fn spread(&self) -> (f64, f64) {
        let one = |r: &Round| {
            let [quiet, removing, _] = &mut r.took.clone();
            percentile(removing, 0.99) / percentile(quiet, 0.99)
        };
        let all = self.0.iter().map(one);
        all.fold((f64::INFINITY, 0.0), |(least, most), times| {
            (least.min(times), most.max(times))
        })
    }

    /// Whether publishers hardly noticed. A round without space to give back counts as unnoticed.
    fn unnoticed(&self) -> bool {
        let shrinking = self.times(Kind::Shrinking);
        self.times(Kind::Removing) < 3.0 && (shrinking.is_nan() || shrinking < 3.0)
    }

    fn describe(&self) -> String {
        let quiet = self.felt(Kind::Quiet);
        let (busy, shrinking) = (self.felt(Kind::Removing), self.felt(Kind::Shrinking));
        let (least, most) = self.spread();
        format!(
            "p50/p99 of a publish in quiet {:.0}/{:.0} µs ({} publishes), while they go {:.0}/{:.0} µs \
             ({}; {:.2} ×, rounds {least:.2}–{most:.2}), while space is given back {:.0}/{:.0} µs \
             ({}; {:.2} ×)",
            quiet.p50,
            quiet.p99,
            quiet.count,
            busy.p50,
            busy.p99,
            busy.count,
            self.times(Kind::Removing),
            shrinking.p50,
            shrinking.p99,
            shrinking.count,
            self.times(Kind::Shrinking),
        )
    }
}

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let events = bench.events(500_000);
    let (mut raws, mut bare, mut attributed) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=bench.rounds().min(3) {
        bench.say(format!("round {round}, raw"));
        let deletes = async |path| raw::range_deletes(path, events).await;
        raws.push(rate(events, bench.on_file("raw.db", deletes).await?));
        for (with, all) in [(false, &mut bare), (true, &mut attributed)] {
            bench.say(format!("round {round}, attributed: {with}"));
            let run = async |bus: &Bus| one(bench, bus, events, with).await;
            all.push(bench.on_bus(run).await?);
        }
    }
    let (bare, attributed) = (Rounds(bare), Rounds(attributed));
    let (rate, full) = (bare.rate(), attributed.rate());
    let during = bare.felt(Kind::Removing);
    let fast = rate >= BARE && full >= ATTRIBUTED;
    let met = fast && bare.unnoticed() && attributed.unnoticed();
    let rates = Rates {
        ours: rate,
        raw: median(raws),
        cost: f64::NAN,
    };
    let target = "≥ 100,000/s bare, ≥ 10,000/s attributed; publish p99 < 3 × quiet";
    Ok(Figure::target(target, met)
        .rates(&rates)
        .latencies(during.p50, during.p99)
        .detail(format!(
            "publishing {}/s; bare events: {}; {} MiB given back; fully attributed events: {full:.0}/s, {}",
            Pacer::RATE,
            bare.describe(),
            bare.freed() >> 20,
            attributed.describe(),
        )))
}

async fn one(bench: &Bench, bus: &Bus, events: u64, attributed: bool) -> Result<Round> {
    if attributed {
        fill_attributed(bus, events).await?;
    } else {
        sample::fill(bus, events).await?;
    }
    let pacer = Pacer::start(bus);
    tokio::time::sleep(if bench.quick { WARM_UP / 10 } else { WARM_UP }).await;
    let (mut removed, mut took, mut freed) = (0, Duration::ZERO, 0);
    let mut shrinking_windows = 0;
    loop {
        pacer.count_as(Some(Kind::Quiet));
        tokio::time::sleep(WINDOW).await;
        pacer.count_as(None);
        tokio::time::sleep(BETWEEN).await;
        let window = prune_for(bus, &pacer, WINDOW).await?;
        pacer.count_as(None);
        removed += window.done.removed;
        took += window.removing;
        freed += window.done.freed_bytes;
        shrinking_windows += u32::from(window.done.freed_bytes > 0);
        if window.complete || shrinking_windows == SHRINKING {
            break;
        }
        tokio::time::sleep(BETWEEN).await;
    }
    let latencies = pacer.stop().await?;
    // The last step of a window may be done and not reported, so the check counts the events that are left.
    let left = bus.engine().maintenance()?.holdings().await?;
    let left: u64 = left.types.iter().map(|held| held.events).sum();
    let published = bus.log()?.head().await?.progress();
    if left + events > published {
        return Err(sample::wrong(format!("{left} events were not removed")));
    }
    Ok(Round {
        rate: rate(removed, took),
        freed,
        took: latencies,
    })
}

/// The result of one window.
#[derive(Default)]
struct Window {
    done: Pruned,
    /// Time until the last event was removed.
    removing: Duration,
    /// Whether everything was done.
    complete: bool,
}

/// Runs retention for this long, or until everything is removed.
async fn prune_for(bus: &Bus, pacer: &Pacer, time: Duration) -> Result<Window> {
    let everything = Retention {
        max_age: Some(Duration::from_micros(1)),
        ..Retention::default()
    };
    let window = Arc::new(Mutex::new(Window::default()));
    let began = Instant::now();
    pacer.count_as(Some(Kind::Removing));
    let watch = {
        let (window, switch) = (window.clone(), pacer.switch());
        move |done: Pruned| {
            if let Ok(mut window) = window.lock() {
                if done.removed > window.done.removed {
                    window.removing = began.elapsed();
                }
                if done.freed_bytes > 0 {
                    switch.count_as(Some(Kind::Shrinking));
                }
                window.done = done;
            }
        }
    };
    let maintenance = bus.engine().maintenance()?;
    let run = pin!(maintenance.prune_watched(everything, Box::new(watch)));
    let complete = match tokio::time::timeout(time, run).await {
        Ok(pruned) => pruned.map(|_| true)?,
        Err(_) => false,
    };
    let mut window = window
        .lock()
        .map(|mut w| std::mem::take(&mut *w))
        .unwrap_or_default();
    window.complete = complete;
    if !complete && window.done.freed_bytes == 0 {
        window.removing = began.elapsed();
    }
    Ok(window)
}

async fn fill_attributed(bus: &Bus, events: u64) -> Result<()> {
    let maker = Maker::new(TYPE);
    let make = |n| {
        let event = maker.builder();
        event
            .tenant(format!("tenant-{}", n % 20))
            .app(format!("app-{}", n % 10))
            .entity("order", format!("{}", n / 5))
            .source("bench")
            .key(format!("{}", n / 5))
            .correlation_id(format!("request-{}", n / 3))
            .meta("region", "north")
            .build()
    };
    sample::fill_with(bus, events, make).await
}
