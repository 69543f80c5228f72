//! Everbus on an engine, by its URL. The same code for every engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use everbus::{Bus, Event, StartFrom};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::{BATCH, Outcome, PUBLISHERS, Plan, Round};

const TYPE: &str = "bench.event.stored";

/// One round; `fresh` gives an empty place for each scenario.
pub(crate) async fn round(
    plan: &Plan,
    payload: usize,
    fresh: impl Fn() -> String,
) -> Outcome<Round> {
    let stored = Bus::open(fresh()).await?;
    declare(&stored).await?;
    let publish = publish(&stored, plan.events, payload).await?;
    stored.shutdown().await?;
    let began_with = fresh();
    let filled = Bus::open(&began_with).await?;
    declare(&filled).await?;
    self::publish(&filled, plan.events, payload).await?;
    filled.shutdown().await?;
    Ok(Round {
        publish,
        consume: consume(&Bus::open(&began_with).await?, plan.events).await?,
        end_to_end: end_to_end(&Bus::open(fresh()).await?, plan.events, payload).await?,
        latencies: latencies(&Bus::open(fresh()).await?, plan.samples, payload).await?,
    })
}

/// The group is there before the events, as in production.
async fn declare(bus: &Bus) -> Outcome<()> {
    let _ = bus
        .subscribe("bench.>")
        .group("bench")
        .start_from(StartFrom::First)
        .handler(|| std::future::ready(()))
        .await?;
    Ok(())
}

fn event(payload: usize) -> Outcome<Event> {
    Ok(Event::builder(TYPE).payload(vec![b'x'; payload]).build()?)
}

async fn publish(bus: &Bus, events: usize, payload: usize) -> Outcome<Duration> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..PUBLISHERS {
        let bus = bus.clone();
        tasks.spawn(async move {
            for _ in 0..events / PUBLISHERS / BATCH {
                let batch: Outcome<Vec<Event>> = (0..BATCH).map(|_| event(payload)).collect();
                bus.publish_batch(batch?).await?;
            }
            Outcome::Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(began.elapsed())
}

/// Handles what is stored, and waits until it is settled.
async fn consume(bus: &Bus, events: usize) -> Outcome<Duration> {
    let handled = count(bus).await?;
    let began = Instant::now();
    bus.start().await?;
    finished(bus, &handled, events).await?;
    let took = began.elapsed();
    bus.shutdown().await?;
    Ok(took)
}

async fn end_to_end(bus: &Bus, events: usize, payload: usize) -> Outcome<Duration> {
    let handled = count(bus).await?;
    bus.start().await?;
    let began = Instant::now();
    publish(bus, events, payload).await?;
    finished(bus, &handled, events).await?;
    let took = began.elapsed();
    bus.shutdown().await?;
    Ok(took)
}

async fn count(bus: &Bus) -> Outcome<Arc<AtomicU64>> {
    let handled = Arc::<AtomicU64>::default();
    let count = handled.clone();
    bus.subscribe("bench.>")
        .group("bench")
        .start_from(StartFrom::First)
        .handler(move || {
            count.fetch_add(1, Ordering::Relaxed);
            std::future::ready(())
        })
        .await?;
    Ok(handled)
}

/// Waits until everything was handled and every settlement is durable.
async fn finished(bus: &Bus, handled: &AtomicU64, events: usize) -> Outcome<()> {
    while handled.load(Ordering::Relaxed) < events as u64 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    loop {
        let groups = bus.groups().await?;
        let open = |g: &everbus::GroupInfo| g.behind + g.in_flight + g.waiting;
        if groups.iter().all(|group| open(group) == 0) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let handled = handled.load(Ordering::Relaxed);
    if handled == events as u64 {
        return Ok(());
    }
    Err(format!("{handled} events were handled instead of {events}").into())
}

/// From the call of `publish` to the begin of the handler, one event at a time.
async fn latencies(bus: &Bus, samples: usize, payload: usize) -> Outcome<Vec<Duration>> {
    let (arrived, mut arrivals) = mpsc::unbounded_channel::<Instant>();
    bus.subscribe("bench.>")
        .group("bench")
        .handler(move || {
            let _ = arrived.send(Instant::now());
            std::future::ready(())
        })
        .await?;
    bus.start().await?;
    let mut took = Vec::with_capacity(samples);
    for sample in 0..samples + samples / 10 {
        let event = event(payload)?;
        let began = Instant::now();
        bus.publish(event).await?;
        let arrival = arrivals.recv().await.ok_or("the handler is gone")?;
        // The first tenth warms up.
        if sample >= samples / 10 {
            took.push(arrival.saturating_duration_since(began));
        }
    }
    bus.shutdown().await?;
    Ok(took)
}
