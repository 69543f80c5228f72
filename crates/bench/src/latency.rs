//! From commit to the start of the handler, at a steady 1,000 events per second, beside the time one
//! raw commit takes at the same rate.

use std::time::Duration;

use everbus::Bus;
use everbus_core::Result;
use tokio::time::MissedTickBehavior;

use crate::end_to_end::until_idle;
use crate::sample::{Maker, Moments, median, percentile};
use crate::{Bench, Figure, raw};

const PERIOD: Duration = Duration::from_millis(1);

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let events = bench.events(5000);
    let mut commits = Vec::new();
    let (mut after50, mut after99, mut whole99) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=bench.rounds().min(3) {
        bench.say(format!("round {round}, raw"));
        let raw = async |path| raw::paced_commits(path, events, PERIOD).await;
        let mut raw = bench.on_file("raw.db", raw).await?;
        commits.push(percentile(&mut raw, 0.99));
        bench.say(format!("round {round}"));
        let paced = async |bus: &Bus| paced(bus, events).await;
        let mut times = bench.on_bus(paced).await?;
        after50.push(percentile(&mut times.after_commit, 0.5));
        after99.push(percentile(&mut times.after_commit, 0.99));
        whole99.push(percentile(&mut times.whole, 0.99));
    }
    let (p50, p99) = (median(after50), median(after99));
    let (raw, whole) = (median(commits), median(whole99));
    let target = format!("p99 ≤ 2 × {raw:.0} µs (raw commit)");
    Ok(Figure::target(target, p99 <= 2.0 * raw)
        .latencies(p50, p99)
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

async fn paced(bus: &Bus, events: u64) -> Result<Times> {
    let (called, committed) = (Moments::new(events), Moments::new(events));
    let started = Moments::of_handler(bus, events).await?;
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut publishers = tokio::task::JoinSet::new();
    for (index, n) in (0..events).enumerate() {
        ticks.tick().await;
        let (bus, called, committed) = (bus.clone(), called.clone(), committed.clone());
        publishers.spawn(async move {
            let event = Maker::numbered(n)?;
            called.mark(index);
            bus.publish(event).await?;
            committed.mark(index);
            Ok::<_, everbus_core::Error>(())
        });
    }
    for outcome in publishers.join_all().await {
        outcome?;
    }
    until_idle(bus).await?;
    Ok(Times {
        after_commit: started.since(committed.all()),
        whole: started.since(called.all()),
    })
}
