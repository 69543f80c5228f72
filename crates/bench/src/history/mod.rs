//! The history: the first page by each of the eight patterns, out of a small log and a large one, each
//! beside the same page from plain SQLite.

mod data;
mod insert;
mod raw;

use std::path::Path;
use std::time::{Duration, Instant};

use everbus::Bus;
use everbus_core::{HistoryQuery, Order, Pattern, Result, Timestamp};
use rusqlite::Connection;

use crate::sample::{self, percentile};
use crate::{Bench, Figure, Part};
use data::{Data, ENOUGH, Kind};
use raw::Raw;

pub(crate) use insert::measure as measure_insert;

/// The patterns: their names, and the columns of the raw table that they filter by.
const PATTERNS: [(&str, &[&str]); 8] = [
    ("tenant", &["tenant"]),
    ("entity", &["entity"]),
    ("app", &["app"]),
    ("app+entity", &["app", "entity"]),
    ("type+tenant", &["type", "tenant"]),
    ("type+tenant+entity", &["type", "tenant", "entity"]),
    ("type+tenant+app", &["type", "tenant", "app"]),
    ("all four", &["type", "tenant", "app", "entity"]),
];

const PAGE: usize = 100;
const QUERIES: u64 = 200;
/// Everbus and raw SQLite take turns.
const TURNS: u64 = 4;
const LIMIT_US: f64 = 5000.0;

/// What is measured: a pattern, the kind of entities that it asks for, and whether the query has an end time.
#[derive(Clone, Copy)]
struct Case {
    pattern: usize,
    kind: Kind,
    until: bool,
}

impl Case {
    fn all() -> Vec<Self> {
        let case = |pattern, kind, until| Self {
            pattern,
            kind,
            until,
        };
        let mut cases = Vec::new();
        for pattern in 0..PATTERNS.len() {
            cases.push(case(pattern, Kind::Busy, false));
            if cases[cases.len() - 1].has("entity") {
                cases.push(case(pattern, Kind::Scattered, false));
                cases.push(case(pattern, Kind::Single, false));
            }
        }
        cases.push(case(0, Kind::Busy, true));
        cases
    }

    /// Whether its pattern filters by this column.
    fn has(self, column: &str) -> bool {
        PATTERNS[self.pattern].1.contains(&column)
    }

    fn name(self) -> String {
        let name = PATTERNS[self.pattern].0;
        match (self.has("entity"), self.until) {
            (true, _) => format!("{name}, {}", self.kind.name()),
            (false, true) => format!("{name}, until"),
            (false, false) => name.to_owned(),
        }
    }

    /// Every other query asks for the oldest events first, unless it has an end time.
    fn order(self, n: u64) -> Order {
        match n.is_multiple_of(2) || self.until {
            true => Order::Newest,
            false => Order::Oldest,
        }
    }

    /// How far into the log the end time is, in thousandths.
    fn share(self, n: u64) -> Option<i64> {
        let share = i64::try_from(n * 389 % 900 + 100).unwrap_or(1000);
        self.until.then_some(share)
    }

    fn query(
        self,
        data: Data,
        n: u64,
        (first, last): (Timestamp, Timestamp),
    ) -> Result<HistoryQuery> {
        let names = data.asked(self.kind, n);
        let mut query = HistoryQuery::default().order(self.order(n)).limit(PAGE);
        if self.has("type") {
            query = query.types(Pattern::new(names.event_type)?);
        }
        if self.has("tenant") {
            query = query.tenant(names.tenant);
        }
        if self.has("app") {
            query = query.app(names.app);
        }
        if self.has("entity") {
            query = query.entity("TASK", names.entity);
        }
        if let Some(share) = self.share(n) {
            let length = last.as_micros() - first.as_micros();
            query = query.until(Timestamp::from_micros(
                first.as_micros() + length / 1000 * share,
            ));
        }
        Ok(query)
    }

    /// How many events the page must have.
    fn expected(self, data: Data) -> Option<usize> {
        match self.kind {
            // The number of events before a given time is not known.
            _ if data.events < ENOUGH || self.until => None,
            Kind::Single => Some(1),
            Kind::Busy | Kind::Scattered => Some(PAGE),
        }
    }
}

async fn fill(bus: &Bus, data: Data) -> Result<()> {
    let payload = sample::payload();
    sample::fill_with(bus, data.events, |n| data.event(n, &payload)).await
}

/// Waits until the indexes cover all but the last few thousand events, the merges are done, and replaced runs
/// are swept.
async fn until_indexed(path: &Path, events: u64) -> Result<()> {
    let path = path.to_owned();
    let tuning = everbus_sqlite::HistoryTuning::default();
    let uncovered = i64::try_from(tuning.run * 2).unwrap_or(i64::MAX);
    let fan = i64::try_from(tuning.fan).unwrap_or(i64::MAX);
    let to_cover = i64::try_from(events).unwrap_or(i64::MAX);
    let done = crate::raw::run(move || {
        let conn = Connection::open(&path)?;
        conn.busy_timeout(Duration::from_secs(5))?;
        let give_up = Instant::now() + Duration::from_secs(1200);
        let mut statement = conn.prepare(
            "SELECT (SELECT coalesce(max(hi), 0) FROM history_runs WHERE state = 1),
               (SELECT coalesce(max(n), 0) FROM
                 (SELECT count(*) AS n FROM history_runs WHERE state = 1 GROUP BY level)),
               (SELECT count(*) FROM history_runs WHERE state <> 1)",
        )?;
        while Instant::now() < give_up {
            let (covered, most, rest): (i64, i64, i64) =
                statement.query_row([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))?;
            if covered + uncovered > to_cover && most < fan && rest == 0 {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(false)
    });
    match done.await? {
        true => Ok(()),
        false => Err(sample::wrong("the indexes were not done in twenty minutes")),
    }
}

/// When the first and the last event were received.
async fn span(bus: &Bus) -> Result<(Timestamp, Timestamp)> {
    let mut ends = Vec::new();
    for order in [Order::Oldest, Order::Newest] {
        let query = HistoryQuery::default().order(order).limit(1);
        let page = bus.history()?.query(query).await?;
        ends.extend(page.items.first().map(|record| record.received_at));
    }
    match ends[..] {
        [first, last] => Ok((first, last)),
        _ => Err(sample::wrong("the log is empty")),
    }
}

/// How long the pages of a case take.
struct Took {
    ours: Vec<Duration>,
    raw: Vec<Duration>,
}

/// The first pages of each case, in a log of the given size.
async fn pages(bench: &Bench, data: Data) -> Result<Vec<Took>> {
    let events = data.events;
    let path = bench.file("history.db")?;
    let bus = sample::open(&path).await?;
    bench.say(format!("making {events} events"));
    fill(&bus, data).await?;
    sample::expect_stored(&bus, events).await?;
    bench.say("making a raw table with eight indexes");
    let raw_path = bench.file("raw.db")?;
    let mut raw = Raw::make(raw_path.clone(), data).await?;
    bench.say("waiting for the indexes");
    until_indexed(&path, events).await?;
    let ends = span(&bus).await?;
    let mut figures = Vec::new();
    for case in Case::all() {
        bench.say(format!("{} out of {events}", case.name()));
        let (mut ours, mut raws) = (Vec::new(), Vec::new());
        for turn in 0..TURNS {
            let queries = QUERIES / TURNS * turn..QUERIES / TURNS * (turn + 1);
            for n in queries.clone() {
                let query = case.query(data, n, ends)?;
                let began = Instant::now();
                let page = bus.history()?.query(query.clone()).await?;
                ours.push(began.elapsed());
                let right = page.items.iter().all(|r| query.matches(&r.event));
                let full = case.expected(data).is_none_or(|n| page.items.len() == n);
                if !right || !full || !page.plan.starts_with("index ") {
                    let found = page.items.len();
                    return Err(sample::wrong(format!(
                        "{query:?} was not answered right: {found} events, {}",
                        page.plan
                    )));
                }
            }
            let (back, took) = raw.pages(case, queries).await?;
            raw = back;
            raws.extend(took);
        }
        figures.push(Took { ours, raw: raws });
    }
    bus.shutdown().await?;
    drop(raw);
    bench.remove(&path);
    bench.remove(&raw_path);
    Ok(figures)
}

/// The first page of 100, by each pattern, out of 50,000 and out of 5,000,000 events.
pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let large = bench.events(5_000_000);
    let small = (large / 100).max(1);
    let mut parts = Vec::new();
    let few = pages(bench, Data { events: small }).await?;
    let many = pages(bench, Data { events: large }).await?;
    let (mut worst, mut worst99, mut ratio) = (0.0_f64, 0.0_f64, f64::INFINITY);
    for ((case, mut few), mut many) in Case::all().into_iter().zip(few).zip(many) {
        let part = Part {
            name: case.name(),
            small_p50_us: percentile(&mut few.ours, 0.5),
            large_p50_us: percentile(&mut many.ours, 0.5),
            large_p99_us: percentile(&mut many.ours, 0.99),
            raw_small_p50_us: percentile(&mut few.raw, 0.5),
            raw_large_p50_us: percentile(&mut many.raw, 0.5),
            raw_large_p99_us: percentile(&mut many.raw, 0.99),
        };
        worst = worst.max(part.large_p50_us);
        worst99 = worst99.max(part.large_p99_us);
        ratio = ratio.min(part.ratio());
        parts.push(part);
    }
    let mut figure = Figure::target("each pattern < 5000 µs", worst < LIMIT_US)
        .latencies(worst, worst99)
        .detail(format!(
            "the first page of 100 out of {small} and out of {large} events, medians in µs; above are the \
             slowest pattern and the least ratio of raw to ours"
        ));
    figure.ratio = Some(ratio);
    figure.parts = parts;
    Ok(figure)
}
