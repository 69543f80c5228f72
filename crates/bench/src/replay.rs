//! A replay into a function that does nothing, beside a plain `SELECT` over the same rows.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus::{Bus, Recorded};
use everbus_core::Result;
use rusqlite::{Connection, OpenFlags};

use crate::sample::{self, Maker, TYPE};
use crate::{Bench, Figure, Rates, raw};

const TARGET: f64 = 200_000.0;
const SELECT: &str = "SELECT seq, id, type, version, occurred_at, received_at, attrs, payload \
                      FROM log ORDER BY seq";

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let events = bench.events(1_000_000);
    let bare = both(bench, events, false).await?;
    let full = both(bench, events / 2, true).await?;
    let met = bare.ours.min(full.ours) >= TARGET;
    Ok(Figure::target("≥ 200000/s", met)
        .rates(&bare)
        .detail(format!(
            "{events} bare events; with tenant, app, entity, ids and metadata {:.0}/s, raw {:.0}/s",
            full.ours, full.raw
        )))
}

/// Everbus and raw SQLite, in turns on one file.
async fn both(bench: &Bench, events: u64, attributes: bool) -> Result<Rates> {
    let path = bench.file("replay.db")?;
    let bus = sample::open(&path).await?;
    bench.say(format!("publishing {events}"));
    if attributes {
        fill_attributed(&bus, events).await?;
    } else {
        sample::fill(&bus, events).await?;
    }
    sample::expect_stored(&bus, events).await?;
    let raw = async || {
        let path = path.clone();
        let (took, read) = raw::run(move || read_all(&path)).await?;
        sample::expect(read, events, "rows were read").map(|()| took)
    };
    let ours = async || replay(&bus, events).await;
    let rates = bench.turns(events, raw, ours).await?;
    bus.shutdown().await?;
    bench.remove(&path);
    Ok(rates)
}

async fn replay(bus: &Bus, events: u64) -> Result<Duration> {
    let began = Instant::now();
    let nothing = |_: Arc<Recorded>| std::future::ready(Ok::<(), String>(()));
    let report = bus.replay().into_function(nothing).await?;
    let took = began.elapsed();
    sample::expect(report.processed, events, "events were replayed").map(|()| took)
}

async fn fill_attributed(bus: &Bus, events: u64) -> Result<()> {
    let maker = Maker::new(TYPE);
    let make = |n| {
        let event = maker.builder();
        event
            .tenant(format!("tenant-{}", n % 20))
            .app(format!("app-{}", n % 10))
            .entity("ORDER", format!("order-{}", n % 100))
            .source("bench")
            .correlation_id("0190163d-8694-739b-aea5-966c26f8ad91")
            .meta("region", "eu")
            .build()
    };
    sample::fill_with(bus, events, make).await
}

/// Reads every column of every row and does nothing with them.
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
