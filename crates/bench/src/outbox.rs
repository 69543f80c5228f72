//! The outbox: what an enqueue costs beside the same insert by hand, and how fast a relay is.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use everbus::Bus;
use everbus::outbox::{Outbox, Relay};
use everbus_core::{Clock as _, EventId, Result, SystemClock};
use rusqlite::{Connection, params};

use crate::raw::failed;
use crate::sample::{self, Maker, TYPE, median, rate};
use crate::{Bench, Figure, blocking};

/// Rows in one transaction.
const CHUNK: u64 = 1000;

/// Writes rows in transactions of [`CHUNK`]. `write` gets the number of rows of its transaction.
fn in_transactions(
    path: &Path,
    events: u64,
    write: impl Fn(&Connection, u64) -> Result<()>,
) -> Result<Duration> {
    let open = || {
        let db = Connection::open(path)?;
        db.pragma_update(None, "journal_mode", "WAL")?;
        db.pragma_update(None, "synchronous", "FULL")?;
        Ok(db)
    };
    let mut db = open().map_err(failed)?;
    Outbox::create_tables(&db)?;
    let began = Instant::now();
    let mut left = events;
    while left > 0 {
        let tx = db.transaction().map_err(failed)?;
        write(&tx, left.min(CHUNK))?;
        tx.commit().map_err(failed)?;
        left -= left.min(CHUNK);
    }
    Ok(began.elapsed())
}

/// Writes the same row as a program without this library would.
fn by_hand(path: &Path, events: u64) -> Result<Duration> {
    let payload = sample::payload();
    let payload = String::from_utf8_lossy(&payload).into_owned();
    let insert = |db: &Connection| {
        let id = EventId::new().to_string();
        let now = SystemClock.now().to_string();
        let envelope = format!(
            "{{\"event_id\":\"{id}\",\"occurred_at\":\"{now}\",\"correlation_id\":\"{id}\",\
             \"tenant_id\":\"\",\"station_id\":\"\",\"schema_version\":1,\"payload\":{payload}}}"
        );
        let insert = "INSERT INTO event_outbox (id, event_id, event_type, payload, created_at)
                      VALUES (?1, ?2, ?3, ?4, ?5)";
        let mut insert = db.prepare_cached(insert)?;
        insert.execute(params![id, id, TYPE, envelope, now])
    };
    in_transactions(path, events, |db, n| {
        let all = (0..n).try_for_each(|_| insert(db).map(drop));
        all.map_err(failed)
    })
}

fn enqueue(path: &Path, events: u64) -> Result<Duration> {
    let (outbox, maker) = (Outbox::new(), Maker::new(TYPE));
    in_transactions(path, events, |db, n| {
        (0..n).try_for_each(|_| outbox.enqueue(db, maker.builder()).map(drop))
    })
}

/// `enqueue` inside a transaction, beside the same insert by hand.
pub(crate) async fn measure_enqueue(bench: &Bench) -> Result<Figure> {
    let events = bench.events(100_000);
    let raw = async || {
        let run = async |path: PathBuf| blocking(move || by_hand(&path, events)).await;
        bench.on_file("outbox-hand.db", run).await
    };
    let ours = async || {
        let run = async |path: PathBuf| blocking(move || enqueue(&path, events)).await;
        bench.on_file("outbox.db", run).await
    };
    let rates = bench.turns(events, raw, ours).await?;
    let cost = rates.cost;
    Ok(Figure::target("≤ 1.3 × the insert by hand", cost <= 1.3)
        .rates(&rates)
        .detail(format!(
            "an enqueue costs {cost:.2} × the same insert by hand, in transactions of {CHUNK}"
        )))
}

/// Relays this many rows of a database that it fills first.
async fn relay(bench: &Bench, bus: &Bus, events: u64) -> Result<Duration> {
    let run = async |path: PathBuf| {
        let source = blocking(move || {
            let (outbox, maker) = (Outbox::new(), Maker::new(TYPE));
            in_transactions(&path, events, |db, n| {
                outbox.enqueue_batch(db, maker.batch(n)?).map(drop)
            })?;
            Outbox::open(&path)
        });
        let relay = Relay::new(bus, source.await?);
        let began = Instant::now();
        let stats = relay.run_until_empty().await?;
        let took = began.elapsed();
        sample::expect(stats.sent - stats.duplicates, events, "rows were sent")?;
        Ok(took)
    };
    bench.on_file("outbox.db", run).await
}

/// From a separate database into the memory engine.
pub(crate) async fn measure_memory(bench: &Bench) -> Result<Figure> {
    let events = bench.events(200_000);
    let mut rates = Vec::new();
    for round in 1..=bench.rounds() {
        bench.say(format!("round {round}"));
        let bus = Bus::open("memory:").await?;
        rates.push(rate(events, Box::pin(relay(bench, &bus, events)).await?));
        bus.shutdown().await?;
    }
    let ours = median(rates);
    let mut figure = Figure::target("≥ 50,000 events/s", ours >= 50_000.0);
    figure.events_per_s = Some(ours.round());
    Ok(figure)
}

/// From a separate database into an Everbus file, beside a raw batched insert.
pub(crate) async fn measure_relay(bench: &Bench) -> Result<Figure> {
    let events = bench.events(200_000);
    let raw = async || bench.raw_inserts(events).await;
    let ours = async || {
        let run = async |bus: &Bus| {
            let took = relay(bench, bus, events).await?;
            sample::expect_stored(bus, events).await?;
            Ok(took)
        };
        bench.on_bus(run).await
    };
    let rates = bench.turns(events, raw, ours).await?;
    let met = rates.ours >= 0.25 * rates.raw;
    Ok(Figure::target("≥ 0.25 × raw batched insert", met).rates(&rates))
}
