//! `--bloat N`: how large PostgreSQL's hot tables are while N events go through.
//!
//! Events are published and handled at the same time; one in a hundred fails once. After each tenth the sizes of
//! the tables that every claim and settlement writes are printed, with the rate of that tenth. Flat lines are
//! the aim: dead rows that pile up would slow every claim.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use everbus::{Bus, HandlerError, Message, RetryPolicy};
use serde::Serialize;
use tokio_postgres::NoTls;

use crate::{Outcome, Plan, ours, postgres};

/// The tables that are written for every claim and settlement.
const HOT: [&str; 3] = ["claims", "deliveries", "groups"];
/// One event in this many fails at its first attempt.
const FAILS: u64 = 100;

/// The state after some events.
#[derive(Serialize)]
pub(crate) struct Sample {
    scenario: &'static str,
    events: u64,
    events_per_s: f64,
    /// Bytes with indexes, of each hot table.
    claims: i64,
    deliveries: i64,
    groups: i64,
    /// Dead rows that are not vacuumed yet, of all hot tables.
    dead_rows: i64,
}

pub(crate) async fn measure(plan: &Plan, events: usize) -> Outcome<Vec<Sample>> {
    let url = postgres::server()?.fresh_database();
    let bus = Bus::open(&url).await?;
    let handled = Arc::<AtomicU64>::default();
    let count = handled.clone();
    bus.subscribe("bench.>")
        .group("bench")
        .retry(RetryPolicy::default().base_delay(Duration::from_millis(100)))
        .handler(move |message: Message| {
            let fails = message.attempt() == 1
                && count.fetch_add(1, Ordering::Relaxed).is_multiple_of(FAILS);
            std::future::ready(match fails {
                true => Err(HandlerError::new("the first attempt fails")),
                false => Ok(()),
            })
        })
        .await?;
    bus.start().await?;
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await?;
    tokio::spawn(connection);
    let mut samples = Vec::new();
    let part = (events / 10).next_multiple_of(crate::PUBLISHERS * crate::BATCH);
    for round in 1..=10u64 {
        let began = Instant::now();
        ours::publish(&bus, part, 256).await?;
        ours::settled(&bus).await?;
        let took = began.elapsed();
        let mut sizes = [0i64; HOT.len()];
        let mut dead_rows = 0;
        for (size, table) in sizes.iter_mut().zip(HOT) {
            let sql = "SELECT pg_total_relation_size($1::text::regclass),
                              (SELECT n_dead_tup FROM pg_stat_user_tables WHERE relid = $1::text::regclass)";
            let row = client
                .query_one(sql, &[&format!("everbus.{table}")])
                .await?;
            *size = row.get(0);
            dead_rows += row.get::<_, i64>(1);
        }
        let [claims, deliveries, groups] = sizes;
        let sample = Sample {
            scenario: "bloat",
            events: round * part as u64,
            events_per_s: (part as f64 / took.as_secs_f64()).round(),
            claims,
            deliveries,
            groups,
            dead_rows,
        };
        if !plan.json {
            print(&sample);
        }
        samples.push(sample);
    }
    bus.shutdown().await?;
    let (handled, published) = (handled.load(Ordering::Relaxed), 10 * part as u64);
    if handled < published {
        return Err(format!("{handled} events were handled instead of {published}").into());
    }
    Ok(samples)
}

fn print(sample: &Sample) {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    let kib = |bytes: i64| bytes / 1024;
    let _ = writeln!(
        out,
        "{:>10} events  {:>7}/s  claims {:>5} KiB  deliveries {:>5} KiB  groups {:>5} KiB  {:>6} dead rows",
        sample.events,
        sample.events_per_s,
        kib(sample.claims),
        kib(sample.deliveries),
        kib(sample.groups),
        sample.dead_rows
    );
}
