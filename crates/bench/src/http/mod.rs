//! The server under load: publishing over HTTP beside a bare handler, fan-out over WebSockets, pages of a large store.
//!
//! Clients and server share the process and the machine, in the raw loop as well.

mod client;
mod listen;
mod pages;
mod raw;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use everbus::Bus;
use everbus_core::Result;
use everbus_server::{Server, ServerOptions};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::sample::{self, Maker, TYPE, percentile, wrong};
use crate::{Bench, Figure};
use client::Client;

pub(crate) use listen::measure as measure_listen;
pub(crate) use pages::measure as measure_pages;

const CONNECTIONS: u64 = 64;
/// Events in one request of the batch scenario.
const BATCH: u64 = 1000;
/// Connections that send batches.
const SENDERS: u64 = 4;
const PATH: &str = "/v1/events";
const JSON: &str = "application/json";

/// A server on a bus.
struct Serving {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<()>>,
}

impl Serving {
    async fn start(bus: &Bus) -> Result<Self> {
        let mut options = ServerOptions::default();
        options.listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = Server::bind(bus.clone(), None, options).await?;
        let address = server.address();
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async move {
            let _ = stopped.await;
        };
        let running = tokio::spawn(async move { server.run(stopped).await.map(drop) });
        Ok(Self {
            address,
            stop,
            running,
        })
    }

    /// Stops the server and its bus.
    async fn end(self) -> Result<()> {
        let _ = self.stop.send(());
        match self.running.await {
            Ok(ended) => ended,
            Err(_) => Err(wrong("the server ended early")),
        }
    }
}

/// One event as the JSON of a request.
fn document() -> String {
    let payload = String::from_utf8_lossy(&sample::payload()).into_owned();
    format!("{{\"type\":\"{TYPE}\",\"payload\":{payload}}}")
}

/// Single events from 64 connections, beside a bare handler that parses the same JSON and awaits a bare group commit.
pub(crate) async fn measure_publish(bench: &Bench) -> Result<Figure> {
    let events = bench.events(100_000).next_multiple_of(CONNECTIONS);
    let mut took = Vec::new();
    let bare = async || {
        let serve = async |path| {
            let bare = raw::Bare::start(path).await?;
            let spent = post_all(bare.address(), events, &mut Vec::new()).await?;
            bare.end(events).await?;
            Ok(spent)
        };
        bench.on_file("raw.db", serve).await
    };
    let ours = async || {
        let publish = async |bus: &Bus| {
            let serving = Serving::start(bus).await?;
            let spent = post_all(serving.address, events, &mut took).await?;
            sample::expect_stored(bus, events).await?;
            serving.end().await?;
            Ok(spent)
        };
        bench.on_bus(publish).await
    };
    let rates = bench.turns(events, bare, ours).await?;
    let met = rates.ours >= 0.7 * rates.raw;
    let target = "≥ 0.7 × a bare axum handler with a bare group commit";
    Ok(Figure::target(target, met)
        .rates(&rates)
        .latencies(percentile(&mut took, 0.5), percentile(&mut took, 0.99)))
}

async fn post_all(address: SocketAddr, events: u64, took: &mut Vec<Duration>) -> Result<Duration> {
    let request = client::request("POST", PATH, JSON, document().as_bytes());
    let began = Instant::now();
    let each = sample::from_tasks(CONNECTIONS, || {
        let request = request.clone();
        async move {
            let mut client = Client::connect(address).await?;
            let mut took = Vec::new();
            for _ in 0..events / CONNECTIONS {
                let before = Instant::now();
                client.expect(&request, 201).await?;
                took.push(before.elapsed());
            }
            Ok(took)
        }
    });
    let each = each.await?;
    let all = began.elapsed();
    took.extend(each.concat());
    Ok(all)
}

/// Batches of 1000 from 4 connections, as a JSON array and as lines, beside `publish_batch` of the library from 4
/// tasks.
pub(crate) async fn measure_batch(bench: &Bench) -> Result<Figure> {
    let events = bench.events(400_000).next_multiple_of(BATCH * SENDERS);
    let library = async || {
        let publish = async |bus: &Bus| {
            let maker = Maker::new(TYPE);
            let began = Instant::now();
            let sending = sample::from_tasks(SENDERS, || {
                let (bus, maker) = (bus.clone(), maker.clone());
                async move {
                    for _ in 0..events / BATCH / SENDERS {
                        bus.publish_batch(maker.batch(BATCH)?).await?;
                    }
                    Ok(())
                }
            });
            sending.await?;
            let spent = began.elapsed();
            sample::expect_stored(bus, events).await?;
            Ok(spent)
        };
        bench.on_bus(publish).await
    };
    let one = document();
    let many = |separator: &str| {
        let all = (0..BATCH).map(|_| one.as_str());
        all.collect::<Vec<_>>().join(separator)
    };
    let array = client::request("POST", PATH, JSON, format!("[{}]", many(",")).as_bytes());
    let lines = client::request("POST", PATH, "application/x-ndjson", many("\n").as_bytes());
    let over = async |request: &[u8]| {
        let publish = async |bus: &Bus| {
            let serving = Serving::start(bus).await?;
            let address = serving.address;
            let began = Instant::now();
            let sending = sample::from_tasks(SENDERS, || {
                let request = request.to_vec();
                async move {
                    let mut client = Client::connect(address).await?;
                    for _ in 0..events / BATCH / SENDERS {
                        client.expect(&request, 201).await?;
                    }
                    Ok(())
                }
            });
            sending.await?;
            let spent = began.elapsed();
            sample::expect_stored(bus, events).await?;
            serving.end().await?;
            Ok(spent)
        };
        bench.on_bus(publish).await
    };
    let arrays = bench
        .turns(events, &library, async || over(&array).await)
        .await?;
    let ndjson = bench
        .turns(events, &library, async || over(&lines).await)
        .await?;
    let ratio = |rates: &crate::Rates| rates.ours / rates.raw;
    // Either form is enough for a client that wants speed.
    let best = if ratio(&ndjson) > ratio(&arrays) {
        &ndjson
    } else {
        &arrays
    };
    let detail = format!(
        "batches of {BATCH}: as an array {:.3}, as lines {:.3} × the library",
        ratio(&arrays),
        ratio(&ndjson)
    );
    Ok(
        Figure::target("≥ 0.5 × publish_batch of the library", ratio(best) >= 0.5)
            .rates(best)
            .detail(detail),
    )
}
