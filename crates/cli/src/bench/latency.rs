//! From commit to the start of the handler, at a steady 1,000 events per second, beside the time one
//! raw commit takes at the same rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use everbus::Message;
use everbus_core::{Event, StartFrom};
use tokio::time::MissedTickBehavior;

use super::end_to_end::until_idle;
use super::report::Figure;
use super::sample::{self, TYPE, median, number_in, numbered_payload, percentile};
use super::{Bench, Scenario, raw};
use crate::stop::Outcome;

const PERIOD: Duration = Duration::from_millis(1);

pub(super) async fn measure(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::Latency;
    let events = bench.events(5000);
    let mut commits = Vec::new();
    let (mut after50, mut after99, mut whole99) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=bench.rounds().min(3) {
        bench.say(scenario, format!("round {round}, raw"));
        let path = bench.file("raw.db")?;
        let mut raw = raw::paced_commits(path.clone(), events, PERIOD).await?;
        commits.push(percentile(&mut raw, 0.99));
        bench.remove(&path);
        bench.say(scenario, format!("round {round}"));
        let mut times = Box::pin(paced(bench, events)).await?;
        after50.push(percentile(&mut times.after_commit, 0.5));
        after99.push(percentile(&mut times.after_commit, 0.99));
        whole99.push(percentile(&mut times.whole, 0.99));
    }
    let (p50, p99) = (median(after50), median(after99));
    let (raw, whole) = (median(commits), median(whole99));
    Ok(Figure::new(scenario)
        .latencies(p50, p99)
        .target(
            format!("p99 ≤ 2 × {raw:.0} µs (raw commit)"),
            p99 <= 2.0 * raw,
        )
        .detail(format!(
            "from the call of publish, commit included, p99 {whole:.0} µs; p99 of a raw commit \
             {raw:.0} µs"
        )))
}

struct Times {
    /// From the return of publish to the start of the handler; zero if the handler was first.
    after_commit: Vec<Duration>,
    /// From the call of publish to the start of the handler.
    whole: Vec<Duration>,
}

/// When something happened to each event, in nanoseconds since the round began.
#[derive(Clone)]
struct Moments {
    began: Instant,
    at: Arc<[AtomicU64]>,
}

impl Moments {
    fn new(began: Instant, events: u64) -> Self {
        Self {
            began,
            at: (0..events).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn mark(&self, index: usize) {
        if let Some(moment) = self.at.get(index) {
            let nanos = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            // The first time counts.
            let _ = moment.compare_exchange(0, nanos, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    fn since(&self, other: &Moments) -> Vec<Duration> {
        let pairs = self.at.iter().zip(other.at.iter());
        pairs
            .map(|(late, early)| {
                let late = late.load(Ordering::Relaxed);
                Duration::from_nanos(late.saturating_sub(early.load(Ordering::Relaxed)))
            })
            .collect()
    }
}

async fn paced(bench: &Bench, events: u64) -> Outcome<Times> {
    let path = bench.file("ours.db")?;
    let bus = sample::open(&path).await?;
    let began = Instant::now();
    let called = Moments::new(began, events);
    let committed = Moments::new(began, events);
    let started = Moments::new(began, events);
    let marks = started.clone();
    bus.subscribe("bench.>")
        .group("bench")
        .start_from(StartFrom::First)
        .handler(move |m: Message| {
            if let Some(index) = number_in(m.payload()) {
                marks.mark(index);
            }
            std::future::ready(())
        })
        .await?;
    bus.start().await?;
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut publishers = tokio::task::JoinSet::new();
    for (index, n) in (0..events).enumerate() {
        ticks.tick().await;
        let (bus, called, committed) = (bus.clone(), called.clone(), committed.clone());
        publishers.spawn(async move {
            let event = Event::builder(TYPE).payload(numbered_payload(n)).build()?;
            called.mark(index);
            bus.publish(event).await?;
            committed.mark(index);
            Ok::<_, everbus_core::Error>(())
        });
    }
    for outcome in publishers.join_all().await {
        outcome?;
    }
    until_idle(&bus).await?;
    bus.shutdown().await?;
    bench.remove(&path);
    Ok(Times {
        after_commit: started.since(&committed),
        whole: started.since(&called),
    })
}
