//! The command line on a file of a million events: from starting the process to a durable publish.

use std::time::Instant;

use everbus_core::Result;

use crate::sample::{self, Maker, TYPE, median, micros, percentile};
use crate::{Bench, Figure, children};

const STARTS: usize = 20;
const LIMIT_US: f64 = 20_000.0;

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let events = bench.scaled(1_000_000);
    let path = bench.file("cold.db")?;
    bench.say(format!("publishing {events}"));
    let bus = sample::open(&path).await?;
    sample::fill(&bus, events).await?;
    bus.shutdown().await?;
    bench.say("starting");
    let (mut durable, mut exit, mut inside) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..STARTS {
        let began = Instant::now();
        let mut child = children::spawn_publish(&path)?;
        let line = child.wait_for_line().await?;
        durable.push(began.elapsed());
        child.wait()?;
        exit.push(began.elapsed());
        if !line.contains("\"seq\"") {
            return Err(sample::wrong("the publish did not print its id"));
        }
        let began = Instant::now();
        let bus = sample::open(&path).await?;
        bus.publish(Maker::new(TYPE).event()?).await?;
        inside.push(micros(began.elapsed()));
        bus.shutdown().await?;
    }
    bench.remove(&path);
    let p50 = percentile(&mut durable, 0.5);
    Ok(Figure::target("p50 < 20000 µs", p50 < LIMIT_US)
        .latencies(p50, percentile(&mut durable, 0.99))
        .detail(format!(
            "from start to exit of the process {:.0} µs, open and publish without a new process \
             {:.0} µs (medians)",
            percentile(&mut exit, 0.5),
            median(inside)
        )))
}
