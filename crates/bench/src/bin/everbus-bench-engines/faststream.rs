//! `--faststream`: consuming from one stream of Redis, by Everbus and by a service on FastStream, in turns on the same
//! server. Both get the same documents, in the dialect `framework`; FastStream acks each message after its handler,
//! which is its safe setting.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use everbus::core::{Stream, Streams};
use everbus::{Bus, Event};
use everbus_testkit::servers::python_packages;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;

use crate::{BATCH, Line, Outcome, Plan, median, ours, redis, round};

const TYPE: &str = "orders.order.placed";
const STREAM: &str = "orders:order-placed";
const GROUP: &str = "notification-service";
/// Everbus must consume this many times as fast.
const LEAST: f64 = 5.0;
/// A service that prints nothing for this long is stuck.
const PATIENCE: Duration = Duration::from_secs(300);

pub(crate) async fn measure(plan: &Plan) -> Outcome<Vec<Line>> {
    let packages = python_packages("faststream-latest", "faststream/redis")
        .ok_or("FastStream is not installed: cargo xtask test installs it")?;
    let mut lines = Vec::new();
    for payload in [256, 4096] {
        let (mut theirs, mut own) = (Vec::new(), Vec::new());
        for turn in 1..=plan.rounds {
            crate::say(&format!(
                "faststream, {payload} bytes, round {turn} of {}",
                plan.rounds
            ));
            let rate = |took: Duration| plan.events as f64 / took.as_secs_f64();
            let url = redis::server()?.fresh_database();
            fill(&open(&url).await?, plan.events, payload).await?;
            theirs.push(rate(python(&packages, &url, plan.events).await?));
            let url = redis::server()?.fresh_database();
            own.push(rate(everbus(&url, plan.events, payload).await?));
        }
        let (theirs, own) = (median(theirs), median(own));
        lines.push(Line {
            engine: "redis",
            scenario: "faststream",
            payload_bytes: payload,
            ours: own.round(),
            raw: theirs.round(),
            medians: None,
            spread: None,
            ratio: round(own / theirs),
            target: "≥ 5 × FastStream",
            met: own >= LEAST * theirs,
            recorded_as: None,
        });
    }
    Ok(lines)
}

/// A bus that writes and reads the documents of FastStream services.
async fn open(url: &str) -> Outcome<Bus> {
    let orders = Stream::new("orders", ["orders.>"])?.dialect("framework");
    Ok(Bus::builder()
        .streams(Streams::new([orders])?)
        .open(url)
        .await?)
}

async fn fill(bus: &Bus, events: usize, payload: usize) -> Outcome<()> {
    // The payload of a framework document is an object.
    let text = "x".repeat(payload - r#"{"text":""}"#.len());
    let body = serde_json::json!({ "text": text });
    for _ in 0..events / BATCH {
        let event = |_| {
            Event::builder(TYPE)
                .json(&body)
                .source("bench")
                .correlation_id("c")
                .build()
        };
        let batch: Result<Vec<Event>, _> = (0..BATCH).map(event).collect();
        bus.publish_batch(batch?).await?;
    }
    Ok(())
}

/// How long the service takes, from its first message to the last.
async fn python(packages: &std::path::Path, url: &str, events: usize) -> Outcome<Duration> {
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../bench/faststream_consume.py"
    );
    let mut child = Command::new("python3")
        .arg(script)
        .args([url, STREAM, GROUP, &events.to_string()])
        .env("PYTHONPATH", packages)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let out = child.stdout.take().ok_or("no output")?;
    let mut lines = BufReader::new(out).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await??;
    let seconds: f64 = line.ok_or("the service ended early")?.parse()?;
    child.wait().await?;
    Ok(Duration::try_from_secs_f64(seconds)?)
}

/// How long Everbus takes, from the start of the bus to the last settlement.
async fn everbus(url: &str, events: usize, payload: usize) -> Outcome<Duration> {
    let bus = open(url).await?;
    let handled = Arc::<AtomicU64>::default();
    let count = handled.clone();
    bus.subscribe(TYPE)
        .group(GROUP)
        .handler(move || {
            count.fetch_add(1, Ordering::Relaxed);
            std::future::ready(())
        })
        .await?;
    fill(&bus, events, payload).await?;
    let began = Instant::now();
    bus.start().await?;
    while handled.load(Ordering::Relaxed) < events as u64 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    ours::settled(&bus).await?;
    let took = began.elapsed();
    bus.shutdown().await?;
    Ok(took)
}
