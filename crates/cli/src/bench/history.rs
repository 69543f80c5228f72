//! The history: the first page of each of the eight patterns at two sizes, and what its indexes cost.

use std::path::Path;
use std::time::{Duration, Instant};

use everbus::Bus;
use everbus_core::{Code, Error, Event, HistoryQuery, Pattern, Result};
use rusqlite::Connection;

use super::report::Figure;
use super::sample::{self, Maker, TYPE, median, micros, percentile, rate};
use super::{Bench, Scenario, raw};
use crate::open::blocking;
use crate::stop::Outcome;

const TENANTS: u64 = 20;
const APPS: u64 = 10;
/// For each app of each tenant: 100,000 in all.
const ENTITIES: u64 = 500;
const TYPES: [&str; 5] = [
    "Task Pending",
    "Task Processing Started",
    "Task Heartbeat",
    "Task Completed",
    "Task Failed",
];
const PATTERNS: [&str; 8] = [
    "tenant",
    "entity",
    "app",
    "app+entity",
    "type+tenant",
    "type+tenant+entity",
    "type+tenant+app",
    "all four",
];
const QUERIES: u64 = 200;
const LIMIT_US: f64 = 5000.0;

/// Numbers that look random and are the same every time.
fn scattered(n: u64) -> u64 {
    let mut x = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn tenant(n: u64) -> String {
    format!("tenant-{}", n % TENANTS)
}

fn app(n: u64) -> String {
    format!("app-{}", n % APPS)
}

fn entity(tenant: u64, app: u64, n: u64) -> String {
    format!("req-{}-{}-{}", tenant % TENANTS, app % APPS, n % ENTITIES)
}

fn event(n: u64, payload: &bytes::Bytes) -> Result<Event> {
    let random = scattered(n);
    let (t, a) = (random % TENANTS, random / TENANTS % APPS);
    // Some entities have many events, most have few.
    let share = random / 1000 % 1000;
    let number = share * share * ENTITIES / 1_000_000;
    let kind = usize::try_from(random / 7 % TYPES.len() as u64).unwrap_or(0);
    Event::builder(TYPES[kind])
        .payload(payload.clone())
        .tenant(tenant(t))
        .app(app(a))
        .entity("TASK", entity(t, a, number))
        .build()
}

async fn fill(bus: &Bus, events: u64) -> Outcome {
    let payload = sample::payload();
    let mut done = 0;
    while done < events {
        let upto = events.min(done + 1000);
        let batch: Result<Vec<Event>> = (done..upto).map(|n| event(n, &payload)).collect();
        bus.publish_batch(batch?).await?;
        done = upto;
    }
    Ok(())
}

/// Waits until the indexes have everything but the last few thousand, and are merged as far as they get.
async fn until_indexed(path: &Path, events: u64) -> Outcome {
    let path = path.to_owned();
    let to_cover = i64::try_from(events).unwrap_or(i64::MAX);
    let wait = move || -> rusqlite::Result<bool> {
        let conn = Connection::open(&path)?;
        conn.busy_timeout(Duration::from_secs(5))?;
        let give_up = Instant::now() + Duration::from_secs(600);
        let mut statement = conn.prepare(
            "SELECT coalesce(max(hi), 0), count(*) FROM history_runs WHERE state = 1
             UNION ALL SELECT max(n), 0 FROM
               (SELECT count(*) AS n FROM history_runs WHERE state = 1 GROUP BY level)",
        )?;
        while Instant::now() < give_up {
            let rows = statement.query_map([], |r| r.get::<_, Option<i64>>(0))?;
            let rows: Vec<Option<i64>> = rows.collect::<rusqlite::Result<_>>()?;
            let covered = rows.first().copied().flatten().unwrap_or(0);
            let most = rows.get(1).copied().flatten().unwrap_or(0);
            if covered + 4096 > to_cover && most < 16 {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(false)
    };
    let done = blocking(move || {
        wait().map_err(|e| Error::new(Code::StorageFailed, format!("watching the index: {e}")))
    });
    if done.await? {
        return Ok(());
    }
    Err(sample::wrong(
        "the indexes were not done in ten minutes".into(),
    ))
}

/// The query of a pattern; which names it has differs from one to the next.
fn query(pattern: usize, n: u64) -> Result<HistoryQuery> {
    let (t, a) = (n % TENANTS, n / 3 % APPS);
    // Every other one asks for an entity with many events.
    let number = if n.is_multiple_of(2) { n % 5 } else { n * 7 };
    let all = HistoryQuery::default();
    let (tenant, app, entity) = (tenant(t), app(a), entity(t, a, number));
    let kind = usize::try_from(n % TYPES.len() as u64).unwrap_or(0);
    let typed = all.clone().types(Pattern::new(TYPES[kind])?);
    Ok(match pattern {
        0 => all.tenant(tenant),
        1 => all.entity("TASK", entity),
        2 => all.app(app),
        3 => all.app(app).entity("TASK", entity),
        4 => typed.tenant(tenant),
        5 => typed.tenant(tenant).entity("TASK", entity),
        6 => typed.tenant(tenant).app(app),
        _ => typed.tenant(tenant).app(app).entity("TASK", entity),
    })
}

/// The median and the 99th percentile of the first page, for each pattern.
async fn pages(bench: &Bench, events: u64) -> Outcome<Vec<(f64, f64)>> {
    let scenario = Scenario::History;
    let path = bench.file("history.db")?;
    let bus = sample::open(&path).await?;
    bench.say(scenario, format!("making {events} events"));
    fill(&bus, events).await?;
    sample::expect_stored(&bus, events).await?;
    bench.say(scenario, "waiting for the indexes");
    until_indexed(&path, events).await?;
    let mut figures = Vec::new();
    for (index, name) in PATTERNS.iter().enumerate() {
        bench.say(scenario, format!("{name} out of {events}"));
        let mut took = Vec::new();
        for n in 0..QUERIES {
            let query = query(index, n)?;
            let began = Instant::now();
            let page = bus.history()?.query(query.clone()).await?;
            took.push(began.elapsed());
            let right = page.items.iter().all(|r| query.matches(&r.event));
            if !right || !page.plan.starts_with("index ") {
                return Err(sample::wrong(format!("{query:?} was not answered right")));
            }
        }
        figures.push((percentile(&mut took, 0.5), percentile(&mut took, 0.99)));
    }
    bus.shutdown().await?;
    bench.remove(&path);
    Ok(figures)
}

/// The first page of 100, by each pattern, out of 50,000 and out of 5,000,000 events.
pub(super) async fn measure(bench: &Bench) -> Outcome<Figure> {
    let large = bench.events(5_000_000);
    let small = (large / 100).max(1);
    let few = pages(bench, small).await?;
    let many = pages(bench, large).await?;
    let ms = |us: f64| us / 1000.0;
    let lines: Vec<String> = PATTERNS
        .iter()
        .zip(few.iter().zip(&many))
        .map(|(name, (few, many))| format!("{name} {:.2} → {:.2} ms", ms(few.0), ms(many.0)))
        .collect();
    let worst = many.iter().map(|(p50, _)| *p50).fold(0.0, f64::max);
    let worst99 = many.iter().map(|(_, p99)| *p99).fold(0.0, f64::max);
    Ok(Figure::new(Scenario::History)
        .latencies(worst, worst99)
        .target("each pattern < 5000 µs", worst < LIMIT_US)
        .detail(format!(
            "median of the first page of 100 out of {small} → {large} events: {}; above is the slowest pattern",
            lines.join(", ")
        )))
}

/// Inserting attributed events until they are indexed, beside bare ones and the raw loop.
pub(super) async fn measure_insert(bench: &Bench) -> Outcome<Figure> {
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
        fill(&bus, events).await?;
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
