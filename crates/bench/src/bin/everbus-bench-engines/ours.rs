//! Everbus on an engine, by its URL. The same code for every engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use everbus::{Bus, Event};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::{BATCH, Outcome, PUBLISHERS, Plan, Round};

const TYPE: &str = "bench.event.stored";

/// Measures one round. `fresh` returns the URL of an empty place for each scenario. If not `lasting`, the group is
/// ephemeral and needs no store for dead letters, so that an engine without a store does the same work as its raw
/// client. Where the client fetches events before it is asked for them, so many more are published before `consume`: its
/// time begins when these are settled.
pub(crate) async fn round(
    plan: &Plan,
    payload: usize,
    lasting: bool,
    fetched_ahead: usize,
    fresh: impl Fn() -> String,
) -> Outcome<Round> {
    let open = async || Bus::open(fresh()).await;
    // The group is there before the events, as in production.
    let bus = open().await?;
    let handled = count(&bus, lasting).await?;
    let took = publish(&bus, plan.events, payload).await?;
    if fetched_ahead > 0 {
        publish(&bus, fetched_ahead, payload).await?;
    }
    Ok(Round {
        publish: took,
        consume: consume(&bus, &handled, fetched_ahead, plan.events).await?,
        end_to_end: end_to_end(&open().await?, plan.events, payload, lasting).await?,
        latencies: latencies(&open().await?, plan.samples, payload, lasting).await?,
    })
}

/// An event whose payload is a JSON text of this many bytes.
fn event(payload: usize) -> Outcome<Event> {
    let mut body = vec![b'x'; payload];
    (body[0], body[payload - 1]) = (b'"', b'"');
    Ok(Event::builder(TYPE).payload(body).build()?)
}

pub(crate) async fn publish(bus: &Bus, events: usize, payload: usize) -> Outcome<Duration> {
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

/// Handles the stored events, and waits until they are settled. The first `ahead` are not timed.
async fn consume(bus: &Bus, handled: &AtomicU64, ahead: usize, events: usize) -> Outcome<Duration> {
    let mut began = Instant::now();
    bus.start().await?;
    if ahead > 0 {
        while settled_here(bus) < ahead as u64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        began = Instant::now();
    }
    finished(bus, handled, ahead + events).await?;
    let took = began.elapsed();
    bus.shutdown().await?;
    Ok(took)
}

async fn end_to_end(bus: &Bus, events: usize, payload: usize, lasting: bool) -> Outcome<Duration> {
    let handled = count(bus, lasting).await?;
    bus.start().await?;
    let began = Instant::now();
    publish(bus, events, payload).await?;
    finished(bus, &handled, events).await?;
    let took = began.elapsed();
    bus.shutdown().await?;
    Ok(took)
}

async fn count(bus: &Bus, lasting: bool) -> Outcome<Arc<AtomicU64>> {
    let handled = Arc::<AtomicU64>::default();
    let count = handled.clone();
    let bench = bus.subscribe("bench.>").group("bench");
    let bench = if lasting { bench } else { bench.ephemeral() };
    bench
        .handler(move || {
            count.fetch_add(1, Ordering::Relaxed);
            std::future::ready(())
        })
        .await?;
    Ok(handled)
}

/// How many events this bus has settled. It counts an event once its settlement is durable.
fn settled_here(bus: &Bus) -> u64 {
    bus.stats().groups.values().map(|g| g.handled).sum()
}

/// Waits until everything was handled and every settlement is durable.
async fn finished(bus: &Bus, handled: &AtomicU64, events: usize) -> Outcome<()> {
    while handled.load(Ordering::Relaxed) < events as u64 || settled_here(bus) < events as u64 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let handled = handled.load(Ordering::Relaxed);
    if handled == events as u64 {
        return Ok(());
    }
    Err(format!("{handled} events were handled instead of {events}").into())
}

/// Waits until no group has anything left to do.
pub(crate) async fn settled(bus: &Bus) -> Outcome<()> {
    loop {
        let groups = bus.groups().await?;
        let open = |g: &everbus::GroupInfo| g.behind + g.in_flight + g.waiting;
        if groups.iter().all(|group| open(group) == 0) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// From the call of `publish` to the begin of the handler, one event at a time.
async fn latencies(
    bus: &Bus,
    samples: usize,
    payload: usize,
    lasting: bool,
) -> Outcome<Vec<Duration>> {
    let (arrived, mut arrivals) = mpsc::unbounded_channel::<Instant>();
    let bench = bus.subscribe("bench.>").group("bench");
    let bench = if lasting { bench } else { bench.ephemeral() };
    bench
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
