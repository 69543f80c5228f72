//! The cost of child processes: a supervised one beside a bare one, and the heartbeats of 200 running ones.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use everbus::TypedEvent as _;
use everbus_core::Result;
use everbus_jobs::events::{Json, TaskHeartbeat, TaskStarted};
use everbus_jobs::worker::HEARTBEAT;
use everbus_jobs::worker::child::ChildCommand;
use everbus_jobs::{Jobs, NewTask, Worker};

use crate::sample::{self, expect, wrong};
use crate::{Bench, Figure, failed};

/// Children that run at once.
const CHILDREN: u64 = 200;
/// Linux counts processor time in ticks. There are this many in a second.
const TICKS: f64 = 100.0;

/// The memory of the process that starts children, in bytes: a worker may be a part of a large service. The cost of a
/// `fork` grows with it.
const RESIDENT: usize = 256 << 20;

/// Children that end at once, bare and supervised in turns, in a process with much memory.
pub(crate) async fn measure_child(bench: &Bench) -> Result<Figure> {
    let children = bench.scaled(1_000).max(50);
    // Not zero, which would be memory that the system has not given yet.
    let resident = vec![1_u8; RESIDENT];
    let command = ChildCommand::new("true");
    let (mut bare, mut supervised) = (Vec::new(), Vec::new());
    for _ in 0..children {
        let began = Instant::now();
        let mut child = Command::new("true")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        child.wait().map_err(failed)?;
        bare.push(began.elapsed());
        let began = Instant::now();
        let mut child = command.start([], b"{}".to_vec()).map_err(failed)?;
        let ended = child.ended().await.map_err(failed)?;
        supervised.push(began.elapsed());
        if ended.exit.code() != Some(0) {
            return Err(wrong(format!("a child ended with {}", ended.exit)));
        }
    }
    drop(std::hint::black_box(resident));
    let [bare, ours] = [bare, supervised].map(|mut times| sample::percentile(&mut times, 0.5));
    let over = ours - bare;
    let mut figure = Figure::target("≤ 1.5 ms over a bare child", over <= 1500.0).detail(format!(
        "median of {children}, µs: bare {bare:.0}, supervised {ours:.0}, over it {over:.0}"
    ));
    figure.p50_us = Some(crate::figure::round(over, 1));
    Ok(figure)
}

/// The processor time of a worker with 200 children that wait, over three heartbeats of each.
pub(crate) async fn measure_heartbeats(bench: &Bench) -> Result<Figure> {
    let beats = if bench.quick { 1 } else { 3 };
    let path = bench.file("heartbeats.db")?;
    let bus = sample::open(&path).await?;
    let jobs = Jobs::new(bus.clone())?;
    let counted = async |event_type: &'static str| {
        let count = Arc::new(AtomicU64::new(0));
        let counter = count.clone();
        let subscription = bus.subscribe(event_type).ephemeral();
        let count_one = move || {
            counter.fetch_add(1, Ordering::Relaxed);
            std::future::ready(())
        };
        subscription.handler(count_one).await?;
        Ok::<_, everbus_core::Error>(count)
    };
    let started = counted(TaskStarted::TYPE).await?;
    let heartbeats = counted(TaskHeartbeat::TYPE).await?;
    let window = HEARTBEAT * beats;
    let lifetime = (window + Duration::from_secs(300)).as_secs().to_string();
    Worker::new(jobs.clone())
        .id("bench")
        .concurrency(usize::try_from(CHILDREN).unwrap_or(1))
        .command(ChildCommand::new("sleep").args([lifetime]))
        .finish_within(Duration::ZERO)
        .mount()
        .await?;
    bus.start().await?;
    let task = NewTask::new("wait", Json::empty());
    jobs.submit_all(&vec![task; usize::try_from(CHILDREN).unwrap_or(1)])
        .await?;
    while started.load(Ordering::Relaxed) < CHILDREN {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    bench.say(format!("{CHILDREN} children, {} s", window.as_secs()));
    let (before, beats_before) = (processor_time()?, heartbeats.load(Ordering::Relaxed));
    let began = Instant::now();
    tokio::time::sleep(window).await;
    let (took, used) = (began.elapsed(), processor_time()? - before);
    let seen = heartbeats.load(Ordering::Relaxed) - beats_before;
    bus.shutdown().await?;
    bench.remove(&path);
    // The last heartbeats may not have arrived yet.
    if seen < (CHILDREN - CHILDREN / 10) * u64::from(beats) {
        expect(seen, CHILDREN * u64::from(beats), "heartbeats were seen")?;
    }
    let percent = 100.0 * used / took.as_secs_f64();
    Ok(
        Figure::target("< 1 % of a processor", percent < 1.0).detail(format!(
            "{percent:.2} % of one processor; {seen} heartbeats of {CHILDREN} children in {:.0} s",
            took.as_secs_f64()
        )),
    )
}

/// The processor time of this process in seconds, without its children.
fn processor_time() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").map_err(failed)?;
    // The name of the program comes second, in parentheses, and may contain anything.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next().and_then(|field| field.parse::<f64>().ok());
    match (ticks(), ticks()) {
        (Some(user), Some(system)) => Ok((user + system) / TICKS),
        _ => Err(wrong("/proc/self/stat has no processor time")),
    }
}
