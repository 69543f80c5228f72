//! A replay into a function that does nothing, beside a plain `SELECT` over the same rows.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus::{Bus, Recorded};
use everbus_core::{Code, Error, Event};
use rusqlite::{Connection, OpenFlags};

use super::report::Figure;
use super::sample::{self, TYPE, median, rate, wrong};
use super::{Bench, Scenario};
use crate::open::blocking;
use crate::stop::Outcome;

const TARGET: f64 = 200_000.0;
const SELECT: &str = "SELECT seq, id, type, version, occurred_at, received_at, attrs, payload \
                      FROM log ORDER BY seq";

pub(super) async fn measure(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::Replay;
    let events = bench.events(1_000_000);
    let bare = both(bench, "bare.db", events, false).await?;
    let full = both(bench, "attributed.db", events / 2, true).await?;
    let (ours, raw) = bare;
    let slower = ours.min(full.0);
    Ok(Figure::new(scenario)
        .rates(ours, raw)
        .target("≥ 200000/s", slower >= TARGET)
        .detail(format!(
            "{events} bare events; with tenant, app, entity, ids and metadata {:.0}/s, raw {:.0}/s",
            full.0, full.1
        )))
}

/// Everbus and raw SQLite, in turns on one file.
async fn both(bench: &Bench, name: &str, events: u64, attributes: bool) -> Outcome<(f64, f64)> {
    let scenario = Scenario::Replay;
    let path = bench.file(name)?;
    let bus = sample::open(&path).await?;
    bench.say(scenario, format!("publishing {events}"));
    if attributes {
        fill_attributed(&bus, events).await?;
    } else {
        sample::fill(&bus, events).await?;
    }
    sample::expect_stored(&bus, events).await?;
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for round in 1..=bench.rounds() {
        bench.say(scenario, format!("round {round}"));
        raw.push(rate(events, select(path.clone(), events).await?));
        ours.push(rate(events, replay(&bus, events).await?));
    }
    bus.shutdown().await?;
    bench.remove(&path);
    Ok((median(ours), median(raw)))
}

async fn replay(bus: &Bus, events: u64) -> Outcome<Duration> {
    let began = Instant::now();
    let nothing = |_: Arc<Recorded>| std::future::ready(Ok::<(), String>(()));
    let report = bus.replay().into_function(nothing).await?;
    let took = began.elapsed();
    if report.processed != events {
        return Err(wrong(format!(
            "{} of {events} events were replayed",
            report.processed
        )));
    }
    Ok(took)
}

async fn fill_attributed(bus: &Bus, events: u64) -> Outcome {
    let payload = sample::payload();
    for batch in 0..events.div_ceil(1000) {
        let size = (events - batch * 1000).min(1000);
        let all = (0..size).map(|n| {
            Event::builder(TYPE)
                .payload(payload.clone())
                .tenant(format!("tenant-{}", n % 20))
                .app(format!("app-{}", n % 10))
                .entity("ORDER", format!("order-{}", n % 100))
                .source("bench")
                .correlation_id("0190163d-8694-739b-aea5-966c26f8ad91")
                .meta("region", "eu")
        });
        bus.publish_batch(all).await?;
    }
    Ok(())
}

/// Reads every column of every row and does nothing with them.
async fn select(path: PathBuf, events: u64) -> Outcome<Duration> {
    let failed = |e: rusqlite::Error| {
        Error::new(Code::StorageFailed, format!("the raw loop failed: {e}")).caused_by(e)
    };
    let (took, read) = blocking(move || read_all(&path).map_err(failed)).await?;
    if read != events {
        return Err(wrong(format!("{read} of {events} rows were read")));
    }
    Ok(took)
}

fn read_all(path: &Path) -> rusqlite::Result<(Duration, u64)> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let began = Instant::now();
    let mut statement = connection.prepare(SELECT)?;
    let mut rows = statement.query([])?;
    let (mut read, mut bytes) = (0, 0);
    while let Some(row) = rows.next()? {
        for column in 0..6 {
            std::hint::black_box(row.get_ref(column)?);
        }
        let attributes: Option<String> = row.get(6)?;
        let payload: Vec<u8> = row.get(7)?;
        bytes += payload.len() + attributes.map_or(0, |text| text.len());
        read += 1;
    }
    std::hint::black_box(bytes);
    Ok((began.elapsed(), read))
}
