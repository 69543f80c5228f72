//! What an event with attributes costs, until the history indexes have it.

use std::time::Instant;

use everbus_core::Result;

use super::data::Data;
use super::{fill, until_indexed};
use crate::sample::{self, median, micros, rate};
use crate::{Bench, Figure, Rates};

/// Measures the time from the first publish until all events are indexed, for events with tenant, app and entity and
/// for events without attributes. The target compares these two. The raw loop inserts the same number of rows.
pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let events = bench.events(400_000);
    let (mut bare, mut full, mut raws, mut published) = (vec![], vec![], vec![], vec![]);
    for round in 1..=bench.rounds() {
        bench.say(format!("round {round}, raw"));
        raws.push(rate(events, bench.raw_inserts(events).await?));
        for attributed in [false, true] {
            bench.say(format!("round {round}, attributed: {attributed}"));
            let path = bench.file("ours.db")?;
            let bus = sample::open(&path).await?;
            let began = Instant::now();
            if attributed {
                fill(&bus, Data { events }).await?;
                published.push(micros(began.elapsed()));
            } else {
                sample::fill(&bus, events).await?;
            }
            until_indexed(&path, events).await?;
            let took = micros(began.elapsed());
            let times = if attributed { &mut full } else { &mut bare };
            times.push(took);
            sample::expect_stored(&bus, events).await?;
            bus.shutdown().await?;
            bench.remove(&path);
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "a rate needs no more")]
    let count = events as f64;
    let (bare, full, published) = (median(bare), median(full), median(published));
    let cost = full / bare;
    let rates = Rates {
        ours: count / full * 1e6,
        raw: median(raws),
        cost,
    };
    Ok(Figure::target("≤ 3 × a bare event", cost <= 3.0)
        .rates(&rates)
        .detail(format!(
            "{:.2} µs per event with tenant, app and entity until it is indexed ({:.2} until published), \
             {:.2} µs bare: {cost:.2} ×",
            full / count,
            published / count,
            bare / count
        )))
}
