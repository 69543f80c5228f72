//! The scenarios of `everbus bench`: Everbus beside raw SQLite, in the same run on the same disk.
//!
//! Machines are noisy, so raw and Everbus take turns for several rounds and the median counts. The raw loops
//! are in `raw`; they are fixed, so that a ratio means the same everywhere. The command line parses the
//! options and prints the figures.

pub mod children;
mod cold_start;
mod cross_process;
mod dead_letters;
mod end_to_end;
mod figure;
mod history;
mod http;
mod jobs;
mod latency;
mod memory;
mod outbox;
mod pacer;
mod publish;
mod raw;
mod recovery;
mod replay;
mod retention;
mod sample;
mod sparse_group;
mod supervision;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use everbus::Bus;
use everbus_core::{Code, Error, Result};

pub use figure::{Figure, Part};
use sample::{median, rate};

type Measuring<'a> = Pin<Box<dyn Future<Output = Result<Figure>> + 'a>>;

/// What can be measured.
pub struct Scenario {
    /// The name on the command line and in the figures.
    pub name: &'static str,
    /// One line of help.
    pub about: &'static str,
    measure: for<'a> fn(&'a Bench) -> Measuring<'a>,
}

macro_rules! scenarios {
    ($($name:literal: $about:literal, $measure:expr;)*) => {
        /// All scenarios, in the order in which they run.
        pub const SCENARIOS: &[Scenario] = &[$(Scenario {
            name: $name,
            about: $about,
            measure: |bench| Box::pin(($measure)(bench)),
        }),*];
    };
}

scenarios! {
    "publish-1": "One task that awaits each publish", |b| publish::from_tasks(b, 1, 10_000, 0.9);
    "publish-64": "64 tasks that await each publish", |b| publish::from_tasks(b, 64, 200_000, 0.8);
    "publish-batch": "Batches of 1000", publish::in_batches;
    "end-to-end": "512 publishers; until every event is handled and settled", end_to_end::measure;
    "inbox": "The same with the inbox, beside the same without it", end_to_end::measure_inbox;
    "latency": "From commit to the start of the handler, at 1,000 events per second",
        latency::measure;
    "cross-process": "From a commit in another process to the start of the handler in this one",
        cross_process::measure;
    "dead-letters": "A page of 100 dead letters out of a million", dead_letters::measure;
    "history": "The first page of 100 by each of the eight patterns, out of 50,000 and of 5,000,000 events",
        history::measure;
    "history-insert": "What the indexes of the history cost: events with tenant, app and entity beside bare ones",
        history::measure_insert;
    "recovery": "The first redelivery after a process died with 100,000 events in flight",
        recovery::measure;
    "memory": "Resident memory with a million events", memory::measure;
    "sparse-group": "A group that wants one event in 10,000 catches up over a million",
        sparse_group::measure;
    "retention": "Retention removes half a million events while others publish", retention::measure;
    "cold-start": "The command line until its first publish is durable, on a file of a million events",
        cold_start::measure;
    "replay": "A replay into a function that does nothing", replay::measure;
    "outbox-enqueue": "An enqueue inside a transaction, beside the same insert by hand",
        outbox::measure_enqueue;
    "outbox-memory": "A relay from a separate database into the memory engine",
        outbox::measure_memory;
    "outbox": "A relay from a separate database into a file, beside a raw batched insert",
        outbox::measure_relay;
    "http-publish": "Single events over HTTP from 64 connections, beside a bare axum handler", http::measure_publish;
    "http-batch": "Batches of 1000 over HTTP, as an array and as lines, beside publish_batch", http::measure_batch;
    "http-websocket": "1,000 events per second to 500 clients of the WebSocket", http::measure_listen;
    "http-pages": "The dashboard and lists of a server with 5,000,000 events", http::measure_pages;
    "jobs": "Tasks that do nothing, from submit to completed, with all their events stored", jobs::measure;
    "jobs-dispatch": "A job of 10,000 tasks in layers of 100: what the dispatcher costs",
        jobs::measure_dispatch;
    "jobs-child": "A supervised child process beside a bare one", supervision::measure_child;
    "jobs-heartbeats": "The heartbeats of 200 children that run", supervision::measure_heartbeats;
    "jobs-list": "Tasks by state, one task, a job and a history, among a million tasks", jobs::measure_list;
}

/// What every scenario needs to know.
pub struct Bench {
    /// An empty directory for the files, removed by the caller.
    pub directory: PathBuf,
    /// Runs with a twentieth of everything, in one round.
    pub quick: bool,
    /// How many events the throughput scenarios use in each round, if not their usual number.
    pub events: Option<u64>,
    /// Called with messages about the progress.
    pub say: Box<dyn Fn(String)>,
    /// The scenario that is measured.
    pub scenario: Cell<&'static str>,
}

/// The rates of raw and Everbus, in events per second: medians of the rounds.
struct Rates {
    ours: f64,
    raw: f64,
    /// The time of Everbus divided by the time of raw: the median of the rounds.
    cost: f64,
}

impl Bench {
    /// Measures a scenario.
    pub async fn measure(&self, scenario: &Scenario) -> Result<Figure> {
        self.scenario.set(scenario.name);
        self.say("…");
        let mut figure = (scenario.measure)(self).await?;
        figure.scenario = scenario.name;
        Ok(figure)
    }

    /// How many rounds raw and Everbus run.
    fn rounds(&self) -> usize {
        if self.quick { 1 } else { 5 }
    }

    /// How many events a throughput scenario uses in one round.
    fn events(&self, usual: u64) -> u64 {
        self.events.unwrap_or_else(|| self.scaled(usual))
    }

    /// A number that belongs to the definition of a scenario, or a twentieth of it if the run is quick.
    fn scaled(&self, n: u64) -> u64 {
        if self.quick { (n / 20).max(1) } else { n }
    }

    /// The path of a new file, in a directory of its own.
    fn file(&self, name: &str) -> Result<PathBuf> {
        let directory = self.directory.join(format!("{name}.d"));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir(&directory).map_err(failed)?;
        Ok(directory.join(name))
    }

    fn remove(&self, path: &Path) {
        // The directory is removed at the end in any case; this only keeps it small.
        let _ = path.parent().map(std::fs::remove_dir_all);
    }

    fn say(&self, what: impl std::fmt::Display) {
        (self.say)(format!("{}: {what}", self.scenario.get()));
    }

    /// Calls `work` with a new file, and removes the file.
    async fn on_file<T>(
        &self,
        name: &str,
        work: impl AsyncFnOnce(PathBuf) -> Result<T>,
    ) -> Result<T> {
        let path = self.file(name)?;
        let done = Box::pin(work(path.clone())).await?;
        self.remove(&path);
        Ok(done)
    }

    /// Calls `work` with a bus on a new file.
    async fn on_bus<T>(&self, work: impl AsyncFnOnce(&Bus) -> Result<T>) -> Result<T> {
        self.on_file("ours.db", async |path| {
            let bus = sample::open(&path).await?;
            let done = work(&bus).await?;
            bus.shutdown().await?;
            Ok(done)
        })
        .await
    }

    /// Raw and Everbus take turns: each returns how long the events took.
    async fn turns(
        &self,
        events: u64,
        raw: impl AsyncFn() -> Result<Duration>,
        mut ours: impl AsyncFnMut() -> Result<Duration>,
    ) -> Result<Rates> {
        let (mut rates, mut raws, mut costs) = (Vec::new(), Vec::new(), Vec::new());
        for round in 1..=self.rounds() {
            self.say(format!("round {round}, raw"));
            let bare = Box::pin(raw()).await?;
            self.say(format!("round {round}"));
            let took = Box::pin(ours()).await?;
            raws.push(rate(events, bare));
            rates.push(rate(events, took));
            costs.push(took.as_secs_f64() / bare.as_secs_f64());
        }
        Ok(Rates {
            ours: median(rates),
            raw: median(raws),
            cost: median(costs),
        })
    }

    /// The usual raw loop: inserts in transactions of 1000.
    async fn raw_inserts(&self, events: u64) -> Result<Duration> {
        let insert = async |path| raw::batched(path, events).await;
        self.on_file("raw.db", insert).await
    }
}

/// An error of this process or of its files.
fn failed(error: std::io::Error) -> Error {
    Error::new(Code::Internal, format!("the bench failed: {error}")).caused_by(error)
}

/// Runs blocking work off the executor.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(Error::new(Code::Internal, "a task ended early").caused_by(error)),
    }
}
