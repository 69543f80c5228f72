//! A page of 100 dead letters out of a million: the first, and deep ones by keyset.

use std::time::{Duration, Instant};

use everbus::{Bus, HandlerError};
use everbus_core::{DeadLetterFilter, DeadLetterKey, PageRequest, StartFrom};

use super::end_to_end::until_idle;
use super::report::Figure;
use super::sample::{self, percentile};
use super::{Bench, Scenario};
use crate::stop::Outcome;

const PAGES: usize = 200;
const LIMIT_US: f64 = 5000.0;

pub(super) async fn measure(bench: &Bench) -> Outcome<Figure> {
    let scenario = Scenario::DeadLetters;
    let letters = bench.scaled(1_000_000);
    let path = bench.file("dead.db")?;
    let bus = sample::open(&path).await?;
    bench.say(scenario, format!("making {letters}"));
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
    bench.say(scenario, "reading pages");
    let mut first = Vec::new();
    for _ in 0..PAGES {
        first.push(page(&bus, None).await?.0);
    }
    // From four places far in, so that no page is in the cache because of the one before.
    let mut deep = Vec::new();
    for quarter in [1, 2, 3, 4] {
        let skip = usize::try_from(letters / 5 * quarter).unwrap_or(usize::MAX);
        let request = PageRequest {
            limit: 1,
            offset: skip,
            after: None,
        };
        let start = bus
            .dead_letters()
            .list_page(DeadLetterFilter::default(), request)
            .await?;
        let mut after = start.next;
        for _ in 0..PAGES / 4 {
            let (took, next) = page(&bus, after).await?;
            deep.push(took);
            after = next;
        }
    }
    bus.shutdown().await?;
    bench.remove(&path);
    let (first99, deep99) = (percentile(&mut first, 0.99), percentile(&mut deep, 0.99));
    let mut all = [first, deep].concat();
    let p99 = first99.max(deep99);
    Ok(Figure::new(scenario)
        .latencies(percentile(&mut all, 0.5), p99)
        .target("p99 < 5000 µs", p99 < LIMIT_US && count == letters)
        .detail(format!(
            "{count} dead letters; p99 of the first page {first99:.0} µs, of deep pages {deep99:.0} µs"
        )))
}

async fn page(
    bus: &Bus,
    after: Option<DeadLetterKey>,
) -> Outcome<(Duration, Option<DeadLetterKey>)> {
    let request = PageRequest {
        limit: 100,
        offset: 0,
        after,
    };
    let began = Instant::now();
    let page = bus
        .dead_letters()
        .list_page(DeadLetterFilter::default(), request)
        .await?;
    Ok((began.elapsed(), page.next))
}
