//! What the history indexes cost publishers.

use std::time::Instant;

use super::data::Data;
use super::{fill, until_indexed};
use crate::bench::report::Figure;
use crate::bench::sample::{self, Maker, TYPE, median, micros, rate};
use crate::bench::{Bench, Scenario, raw};
use crate::stop::Outcome;

/// Inserting attributed events until they are indexed, beside bare ones and the raw loop.
pub(in crate::bench) async fn measure(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::HistoryInsert;
    let events = bench.events(400_000);
    let (mut bare, mut full, mut raws, mut published) = (vec![], vec![], vec![], vec![]);
    for round in 1..=bench.rounds() {
        bench.say(scenario, format!("round {round}, raw"));
        let path = bench.file("raw.db")?;
        raws.push(rate(events, raw::batched(path.clone(), events).await?));
        bench.remove(&path);

        bench.say(scenario, format!("round {round}, bare"));
        let path = bench.file("bare.db")?;
        let bus = sample::open(&path).await?;
        let maker = Maker::new(TYPE);
        let began = Instant::now();
        let mut left = events;
        while left > 0 {
            bus.publish_batch(maker.batch(left.min(1000))?).await?;
            left -= left.min(1000);
        }
        until_indexed(&path, events).await?;
        bare.push(micros(began.elapsed()));
        sample::expect_stored(&bus, events).await?;
        bus.shutdown().await?;
        bench.remove(&path);

        bench.say(
            scenario,
            format!("round {round}, with tenant, app and entity"),
        );
        let path = bench.file("full.db")?;
        let bus = sample::open(&path).await?;
        let began = Instant::now();
        fill(&bus, Data { events }).await?;
        published.push(micros(began.elapsed()));
        until_indexed(&path, events).await?;
        full.push(micros(began.elapsed()));
        sample::expect_stored(&bus, events).await?;
        bus.shutdown().await?;
        bench.remove(&path);
    }
    #[allow(clippy::cast_precision_loss, reason = "a rate needs no more")]
    let count = events as f64;
    let (bare, full, published) = (median(bare), median(full), median(published));
    let cost = full / bare;
    Ok(Figure::new(scenario)
        .rates(count / full * 1e6, median(raws))
        .target("≤ 3 × a bare event", cost <= 3.0)
        .detail(format!(
            "{:.2} µs per event with tenant, app and entity until it is indexed ({:.2} until published), \
             {:.2} µs bare: {cost:.2} ×",
            full / count,
            published / count,
            bare / count
        )))
}
