//! A page of 100 dead letters out of a million: the first, and deep ones by keyset.

use std::time::{Duration, Instant};

use everbus::{Bus, HandlerError};
use everbus_core::{DeadLetterFilter, DeadLetterKey, PageRequest, Result, StartFrom};

use crate::end_to_end::until_idle;
use crate::sample::{self, percentile};
use crate::{Bench, Figure};

const PAGES: usize = 200;
const LIMIT_US: f64 = 5000.0;

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let letters = bench.scaled(1_000_000);
    let path = bench.file("dead.db")?;
    let bus = sample::open(&path).await?;
    bench.say(format!("making {letters}"));
    bus.subscribe("bench.>")
        .group("bench")
        .start_from(StartFrom::First)
        .handler(|| std::future::ready(Err::<(), _>(HandlerError::permanent("not today"))))
        .await?;
    bus.start().await?;
    sample::fill(&bus, letters).await?;
    until_idle(&bus).await?;
    let count = bus
        .dead_letters()
        .count(DeadLetterFilter::default())
        .await?;
    bench.say("reading pages");
    let mut first = Vec::new();
    for _ in 0..PAGES {
        first.push(page(&bus, 100, 0, None).await?.0);
    }
    // From four places deep in the list, so that most pages are not in the cache.
    let mut deep = Vec::new();
    for quarter in [1, 2, 3, 4] {
        let skip = usize::try_from(letters / 5 * quarter).unwrap_or(usize::MAX);
        let (_, mut after) = page(&bus, 1, skip, None).await?;
        for _ in 0..PAGES / 4 {
            let (took, next) = page(&bus, 100, 0, after).await?;
            deep.push(took);
            after = next;
        }
    }
    bus.shutdown().await?;
    bench.remove(&path);
    let (first99, deep99) = (percentile(&mut first, 0.99), percentile(&mut deep, 0.99));
    let mut all = [first, deep].concat();
    let p99 = first99.max(deep99);
    let met = p99 < LIMIT_US && count == letters;
    Ok(Figure::target("p99 < 5000 µs", met)
        .latencies(percentile(&mut all, 0.5), p99)
        .detail(format!(
            "{count} dead letters; p99 of the first page {first99:.0} µs, of deep pages {deep99:.0} µs"
        )))
}

async fn page(
    bus: &Bus,
    limit: usize,
    offset: usize,
    after: Option<DeadLetterKey>,
) -> Result<(Duration, Option<DeadLetterKey>)> {
    let request = PageRequest {
        limit,
        offset,
        after,
    };
    let began = Instant::now();
    let letters = bus.dead_letters();
    let page = letters.list_page(DeadLetterFilter::default(), request);
    let page = page.await?;
    Ok((began.elapsed(), page.next))
}
