//! Pages of a store with 5,000,000 events: the first page of the dashboard, and lists at any depth.

use std::time::{Duration, Instant};

use bytes::BytesMut;
use everbus::Bus;
use everbus_core::Result;

use super::Serving;
use super::client::Client;
use crate::sample::{self, percentile, wrong};
use crate::{Bench, Figure};

const EVENTS: u64 = 5_000_000;
/// Rows in one page of a list.
const PAGE: u64 = 1000;
const TRIES: usize = 50;
const FIRST_US: f64 = 50_000.0;
const FIRST_BYTES: usize = 100_000;
const DEEP_US: f64 = 100_000.0;
/// How often a list of the dashboard is asked for on the way.
const PLACES: u64 = 20;

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    bench.on_bus(async |bus| on(bench, bus).await).await
}

async fn on(bench: &Bench, bus: &Bus) -> Result<Figure> {
    let events = bench.events(EVENTS);
    bench.say(format!("publishing {events} events"));
    sample::fill(bus, events).await?;
    let serving = Serving::start(bus).await?;
    let mut client = Client::connect(serving.address).await?;
    bench.say("the first page");
    let mut first = Vec::new();
    let mut page = BytesMut::new();
    for _ in 0..TRIES {
        let began = Instant::now();
        page = client.get("/").await?;
        first.push(began.elapsed());
    }
    let html = page.len();
    let mut all = html;
    for asset in assets(&String::from_utf8_lossy(&page)) {
        all += client.get(&asset).await?.len();
    }
    // A fifth of the events: a million rows of five million.
    let rows = (events / 5).max(PAGE);
    bench.say(format!("a list of {rows} rows"));
    let (mut lists, mut pages) = (Vec::new(), Vec::new());
    let (mut cursor, mut seen) = (String::new(), 0);
    while seen < rows {
        let path = format!("/v1/events?limit={PAGE}&cursor={cursor}");
        let (took, body) = timed(&mut client, &path).await?;
        lists.push(took);
        if seen % (rows / PLACES).max(PAGE) < PAGE {
            let path = format!("/events?cursor={cursor}");
            pages.push(timed(&mut client, &path).await?.0);
        }
        seen += PAGE;
        cursor = next(&body).ok_or_else(|| wrong("the list ended early"))?;
    }
    bench.say("the page of the oldest event");
    let body = client.get("/v1/events?order=oldest&limit=1").await?;
    let id = oldest(&body).ok_or_else(|| wrong("there is no oldest event"))?;
    let mut tree = Vec::new();
    for path in [
        format!("/events/{id}"),
        format!("/v1/events/{id}/tree"),
        format!("/v1/events?correlation_id={id}"),
    ] {
        tree.push(timed(&mut client, &path).await?.0);
    }
    serving.end().await?;
    let most = |times: &[Duration]| times.iter().max().copied().map_or(f64::NAN, sample::micros);
    let (first_p99, list, dashboard) = (percentile(&mut first, 0.99), most(&lists), most(&pages));
    let tree = most(&tree);
    let slowest = list.max(dashboard).max(tree);
    let met = first_p99 < FIRST_US && all < FIRST_BYTES && slowest < DEEP_US;
    Ok(Figure::target("first page < 50 ms and 100 KB; lists < 100 ms at any depth", met)
        .latencies(percentile(&mut first, 0.5), first_p99)
        .detail(format!(
            "{events} events; first page {html} bytes, {all} with its assets; pages of 1000 events down to row {rows}: \
             p50 {:.0} µs, slowest {list:.0} µs; the dashboard's list: slowest {dashboard:.0} µs; an event with its tree, and a list by correlation: slowest \
             {tree:.0} µs",
            percentile(&mut lists, 0.5)
        )))
}

async fn timed(client: &mut Client, path: &str) -> Result<(Duration, BytesMut)> {
    let began = Instant::now();
    let body = client.get(path).await?;
    Ok((began.elapsed(), body))
}

/// The scripts and styles of a page.
fn assets(page: &str) -> Vec<String> {
    let parts = page.split(['"', '\'']);
    let mut found: Vec<String> = parts
        .filter(|part| part.starts_with("/assets/"))
        .map(str::to_owned)
        .collect();
    found.sort();
    found.dedup();
    found
}

/// The cursor of the next page.
fn next(body: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Page {
        next: Option<String>,
    }
    serde_json::from_slice::<Page>(body).ok()?.next
}

/// The id of the first event of a page.
fn oldest(body: &[u8]) -> Option<String> {
    let page: serde_json::Value = serde_json::from_slice(body).ok()?;
    Some(page["items"][0]["id"].as_str()?.to_owned())
}
