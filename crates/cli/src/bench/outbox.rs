//! The outbox: what an enqueue costs beside the same insert by hand, and how fast a relay is.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use everbus::outbox::{Outbox, Relay};
use everbus::{Bus, Event};
use everbus_core::{Clock as _, Code, Error, EventId, Result, SystemClock};
use rusqlite::{Connection, params};

use super::report::Figure;
use super::sample::{self, Maker, TYPE, median, rate, wrong};
use super::{Bench, Scenario, raw};
use crate::open::blocking;
use crate::stop::Outcome;

/// Rows in one transaction.
const CHUNK: u64 = 1000;

fn failed(error: rusqlite::Error) -> Error {
    Error::new(Code::StorageFailed, format!("the raw loop failed: {error}")).caused_by(error)
}

fn open(path: &Path) -> Result<Connection> {
    let db = Connection::open(path).map_err(failed)?;
    db.pragma_update(None, "journal_mode", "WAL")
        .map_err(failed)?;
    db.pragma_update(None, "synchronous", "FULL")
        .map_err(failed)?;
    Outbox::create_tables(&db)?;
    Ok(db)
}

/// Runs a statement for every event, [`CHUNK`] in one transaction.
fn in_transactions(
    path: &Path,
    events: u64,
    each: impl Fn(&Connection) -> Result<()>,
) -> Result<Duration> {
    let mut db = open(path)?;
    let began = Instant::now();
    let mut left = events;
    while left > 0 {
        let tx = db.transaction().map_err(failed)?;
        for _ in 0..left.min(CHUNK) {
            each(&tx)?;
        }
        tx.commit().map_err(failed)?;
        left -= left.min(CHUNK);
    }
    Ok(began.elapsed())
}

/// The same row, as a program without this library would write it.
fn by_hand(path: &Path, events: u64) -> Result<Duration> {
    let payload = sample::payload();
    let payload = String::from_utf8_lossy(&payload).into_owned();
    in_transactions(path, events, |tx| {
        let id = EventId::new().to_string();
        let now = SystemClock.now().to_string();
        let envelope = format!(
            "{{\"event_id\":\"{id}\",\"occurred_at\":\"{now}\",\"correlation_id\":\"{id}\",\
             \"tenant_id\":\"\",\"station_id\":\"\",\"schema_version\":1,\"payload\":{payload}}}"
        );
        let insert = "INSERT INTO event_outbox (id, event_id, event_type, payload, created_at)
                      VALUES (?1, ?2, ?3, ?4, ?5)";
        tx.prepare_cached(insert)
            .and_then(|mut s| s.execute(params![id, id, TYPE, envelope, now]))
            .map(drop)
            .map_err(failed)
    })
}

fn enqueue(path: &Path, events: u64) -> Result<Duration> {
    let (outbox, payload) = (Outbox::new(), sample::payload());
    in_transactions(path, events, |tx| {
        let event = Event::builder(TYPE).payload(payload.clone());
        outbox.enqueue(tx, event).map(drop)
    })
}

/// `enqueue` inside a transaction, beside the same insert by hand.
pub(super) async fn measure_enqueue(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::OutboxEnqueue;
    let events = bench.events(100_000);
    let (mut ours, mut hand, mut costs) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=bench.rounds() {
        bench.say(scenario, format!("round {round}"));
        let path = bench.file("outbox-hand.db")?;
        let one = path.clone();
        let raw = blocking(move || by_hand(&one, events)).await?;
        bench.remove(&path);
        let path = bench.file("outbox.db")?;
        let one = path.clone();
        let took = blocking(move || enqueue(&one, events)).await?;
        bench.remove(&path);
        costs.push(took.as_secs_f64() / raw.as_secs_f64());
        ours.push(rate(events, took));
        hand.push(rate(events, raw));
    }
    let cost = median(costs);
    Ok(Figure::new(scenario)
        .rates(median(ours), median(hand))
        .target("≤ 1.3 × the insert by hand", cost <= 1.3)
        .detail(format!(
            "an enqueue costs {cost:.2} × the same insert by hand, in transactions of {CHUNK}"
        )))
}

/// A database with this many waiting rows.
async fn filled(bench: &Bench, name: &str, events: u64) -> Outcome<PathBuf> {
    let path = bench.file(name)?;
    let one = path.clone();
    blocking(move || {
        let mut db = open(&one)?;
        let (outbox, maker) = (Outbox::new(), Maker::new(TYPE));
        let mut left = events;
        while left > 0 {
            let tx = db.transaction().map_err(failed)?;
            outbox.enqueue_batch(&tx, maker.batch(left.min(CHUNK))?)?;
            tx.commit().map_err(failed)?;
            left -= left.min(CHUNK);
        }
        Ok(())
    })
    .await?;
    Ok(path)
}

async fn relay(bus: &Bus, outbox: &Path, events: u64) -> Outcome<Duration> {
    let path = outbox.to_path_buf();
    let source = blocking(move || Outbox::open(&path)).await?;
    let relay = Relay::new(bus, source);
    let began = Instant::now();
    let stats = relay.run_until_empty().await?;
    let took = began.elapsed();
    if stats.sent != events || stats.duplicates > 0 {
        return Err(wrong(format!("{} of {events} rows were sent", stats.sent)));
    }
    Ok(took)
}

/// From a separate database into the memory engine.
pub(super) async fn measure_memory(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::OutboxMemory;
    let events = bench.events(200_000);
    let mut rates = Vec::new();
    for round in 1..=bench.rounds() {
        bench.say(scenario, format!("round {round}"));
        let path = filled(bench, "outbox.db", events).await?;
        let bus = Bus::open("memory:").await?;
        rates.push(rate(events, relay(&bus, &path, events).await?));
        bus.shutdown().await?;
        bench.remove(&path);
    }
    let ours = median(rates);
    let mut figure = Figure::new(scenario).target("≥ 50,000 events/s", ours >= 50_000.0);
    figure.events_per_s = Some(ours.round());
    Ok(figure)
}

/// From a separate database into an Everbus file, beside a raw batched insert.
pub(super) async fn measure_relay(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::OutboxRelay;
    let events = bench.events(200_000);
    let (mut ours, mut raws) = (Vec::new(), Vec::new());
    for round in 1..=bench.rounds() {
        bench.say(scenario, format!("round {round}"));
        let path = bench.file("raw.db")?;
        raws.push(rate(events, raw::batched(path.clone(), events).await?));
        bench.remove(&path);
        let outbox = filled(bench, "outbox.db", events).await?;
        let path = bench.file("ours.db")?;
        let bus = sample::open(&path).await?;
        ours.push(rate(events, relay(&bus, &outbox, events).await?));
        sample::expect_stored(&bus, events).await?;
        bus.shutdown().await?;
        bench.remove(&path);
        bench.remove(&outbox);
    }
    let (ours, raw) = (median(ours), median(raws));
    Ok(Figure::new(scenario)
        .rates(ours, raw)
        .target("≥ 0.25 × raw batched insert", ours >= 0.25 * raw))
}
