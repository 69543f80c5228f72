//! Recovery: the time from opening the file to the first redelivery, after a process was killed (kill -9)
//! with 100,000 events in flight.

use std::time::{Duration, Instant};

use everbus::Message;
use everbus_core::{Code, Error, Result, StartFrom};
use tokio::sync::mpsc;

use crate::sample::{self, median, micros};
use crate::{Bench, Figure, children};

const LIMIT_US: f64 = 50_000.0;

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let events = bench.scaled(100_000);
    let mut firsts = Vec::new();
    for round in 1..=bench.rounds().min(3) {
        bench.say(format!("round {round}: {events} in flight"));
        let path = bench.file("recovery.db")?;
        let mut child = children::spawn(children::HOLD, &path, events)?;
        child.wait_for_line().await?;
        child.kill()?;
        bench.say(format!("round {round}: recovering"));
        firsts.push(micros(Box::pin(first_redelivery(&path)).await?));
        bench.remove(&path);
    }
    let worst = firsts.iter().copied().fold(0.0, f64::max);
    let middle = median(firsts);
    Ok(
        Figure::target("first redelivery < 50000 µs", middle < LIMIT_US)
            .latencies(middle, worst)
            .detail(format!(
                "{events} in flight when killed; p50 is the median of the rounds, p99 the worst"
            )),
    )
}

async fn first_redelivery(path: &std::path::Path) -> Result<Duration> {
    let (to, mut first) = mpsc::channel(1);
    let began = Instant::now();
    let bus = sample::open(path).await?;
    bus.subscribe("bench.>")
        .group("bench")
        .start_from(StartFrom::First)
        .handler(move |m: Message| {
            let _ = to.try_send((Instant::now(), m.attempt()));
            std::future::ready(())
        })
        .await?;
    bus.start().await?;
    let at = tokio::time::timeout(Duration::from_secs(60), first.recv()).await;
    bus.shutdown().await?;
    match at {
        Ok(Some((at, attempt))) if attempt > 1 => Ok(at.saturating_duration_since(began)),
        Ok(Some(_)) => Err(sample::wrong("the first delivery was no redelivery")),
        _ => Err(Error::new(
            Code::Timeout,
            "nothing was delivered again for 60 s",
        )),
    }
}
