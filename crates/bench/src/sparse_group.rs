//! How fast a group catches up that wants one event in 10,000: it must pass the other events quickly.

use std::time::{Duration, Instant};

use everbus::Message;
use everbus_core::{Code, Error, Result, StartFrom};
use tokio::sync::mpsc;

use crate::sample::{self, Maker, micros, rate};
use crate::{Bench, Figure};

const ONE_IN: u64 = 10_000;
const COMMON: [&str; 4] = [
    "bench.event.stored",
    "bench.event.moved",
    "bench.user.created",
    "bench.user.left",
];

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let events = bench.scaled(1_000_000).next_multiple_of(ONE_IN);
    let wanted = events / ONE_IN;
    let path = bench.file("sparse.db")?;
    let bus = sample::open(&path).await?;
    bench.say(format!("publishing {events}"));
    let makers = COMMON.map(Maker::new);
    let rare = Maker::new("rare.event.seen");
    for batch in 0..events / 1000 {
        // The types are mixed, as in a real log; long runs of one would be easier to skip.
        let mut all = Vec::with_capacity(1000);
        for maker in makers.iter().cycle().take(1000) {
            all.push(maker.event()?);
        }
        if batch.is_multiple_of(ONE_IN / 1000)
            && let Some(middle) = all.get_mut(500)
        {
            *middle = rare.event()?;
        }
        bus.publish_batch(all).await?;
    }
    sample::expect_stored(&bus, events).await?;
    bench.say("catching up");
    let (to, mut seen) = mpsc::unbounded_channel::<u64>();
    let mut distinct = std::collections::HashSet::new();
    let began = Instant::now();
    bus.subscribe("rare.>")
        .group("sparse")
        .start_from(StartFrom::First)
        .handler(move |m: Message| {
            let _ = to.send(m.seq());
            std::future::ready(())
        })
        .await?;
    bus.start().await?;
    while (distinct.len() as u64) < wanted {
        match tokio::time::timeout(Duration::from_secs(120), seen.recv()).await {
            Ok(Some(seq)) => distinct.insert(seq),
            _ => {
                return Err(Error::new(Code::Timeout, "no catching up in 120 s"));
            }
        };
    }
    let took = began.elapsed();
    bus.shutdown().await?;
    bench.remove(&path);
    let met = took < Duration::from_secs(1);
    let mut figure = Figure::target("caught up in < 1000000 µs", met).detail(format!(
        "{wanted} of {events} events wanted; caught up in {:.0} ms",
        took.as_secs_f64() * 1e3
    ));
    figure.events_per_s = Some(rate(events, took).round());
    figure.p50_us = Some(micros(took).round());
    Ok(figure)
}
