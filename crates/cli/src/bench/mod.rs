//! `everbus bench`: measures Everbus beside raw SQLite, in the same run on the same disk.
//!
//! Machines are noisy, so raw and Everbus take turns for several rounds and the median counts. The raw loops
//! are in `raw`; they are fixed, so that a ratio means the same everywhere.

mod children;
mod cold_start;
mod cross_process;
mod dead_letters;
mod end_to_end;
mod history;
mod latency;
mod memory;
mod outbox;
mod pacer;
mod publish;
mod raw;
mod recovery;
mod replay;
mod report;
mod retention;
mod sample;
mod sparse_group;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use indicatif::ProgressBar;

use crate::args::BenchArgs;
use crate::output::Output;
use crate::progress;
use crate::stop::{Outcome, Stop};

use report::Figure;

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scenario {
    /// One task that awaits each publish
    #[value(name = "publish-1")]
    Publish1,
    /// 64 tasks that await each publish
    #[value(name = "publish-64")]
    Publish64,
    /// Batches of 1000
    #[value(name = "publish-batch")]
    PublishBatch,
    /// 512 publishers; until every event is handled and settled
    #[value(name = "end-to-end")]
    EndToEnd,
    /// The same with the inbox, beside the same without it
    #[value(name = "inbox")]
    Inbox,
    /// From commit to the start of the handler, at 1,000 events per second
    #[value(name = "latency")]
    Latency,
    /// From a commit in another process to the start of the handler in this one
    #[value(name = "cross-process")]
    CrossProcess,
    /// A page of 100 dead letters out of a million
    #[value(name = "dead-letters")]
    DeadLetters,
    /// The first page of 100 by each of the eight patterns, out of 50,000 and of 5,000,000 events
    #[value(name = "history")]
    History,
    /// What the indexes of the history cost: events with tenant, app and entity beside bare ones
    #[value(name = "history-insert")]
    HistoryInsert,
    /// The first redelivery after a process died with 100,000 events in flight
    #[value(name = "recovery")]
    Recovery,
    /// Resident memory with a million events
    #[value(name = "memory")]
    Memory,
    /// A group that wants one event in 10,000 catches up over a million
    #[value(name = "sparse-group")]
    SparseGroup,
    /// Retention removes half a million events while others publish
    #[value(name = "retention")]
    Retention,
    /// The command line until its first publish is durable, on a file of a million events
    #[value(name = "cold-start")]
    ColdStart,
    /// A replay into a function that does nothing
    #[value(name = "replay")]
    Replay,
    /// An enqueue inside a transaction, beside the same insert by hand
    #[value(name = "outbox-enqueue")]
    OutboxEnqueue,
    /// A relay from a separate database into the memory engine
    #[value(name = "outbox-memory")]
    OutboxMemory,
    /// A relay from a separate database into a file, beside a raw batched insert
    #[value(name = "outbox")]
    OutboxRelay,
}

impl Scenario {
    fn name(self) -> &'static str {
        match self {
            Self::Publish1 => "publish-1",
            Self::Publish64 => "publish-64",
            Self::PublishBatch => "publish-batch",
            Self::EndToEnd => "end-to-end",
            Self::Inbox => "inbox",
            Self::Latency => "latency",
            Self::CrossProcess => "cross-process",
            Self::DeadLetters => "dead-letters",
            Self::History => "history",
            Self::HistoryInsert => "history-insert",
            Self::Recovery => "recovery",
            Self::Memory => "memory",
            Self::SparseGroup => "sparse-group",
            Self::Retention => "retention",
            Self::ColdStart => "cold-start",
            Self::Replay => "replay",
            Self::OutboxEnqueue => "outbox-enqueue",
            Self::OutboxMemory => "outbox-memory",
            Self::OutboxRelay => "outbox",
        }
    }

    async fn measure(self, bench: &Bench) -> Outcome<Figure> {
        match self {
            Self::Publish1 => publish::from_tasks(bench, 1, 10_000, 0.9).await,
            Self::Publish64 => publish::from_tasks(bench, 64, 200_000, 0.8).await,
            Self::PublishBatch => publish::in_batches(bench).await,
            Self::EndToEnd => end_to_end::measure(bench).await,
            Self::Inbox => end_to_end::measure_inbox(bench).await,
            Self::Latency => latency::measure(bench).await,
            Self::CrossProcess => cross_process::measure(bench).await,
            Self::DeadLetters => dead_letters::measure(bench).await,
            Self::History => history::measure(bench).await,
            Self::HistoryInsert => history::measure_insert(bench).await,
            Self::Recovery => recovery::measure(bench).await,
            Self::Memory => memory::measure(bench).await,
            Self::SparseGroup => sparse_group::measure(bench).await,
            Self::Retention => retention::measure(bench).await,
            Self::ColdStart => cold_start::measure(bench).await,
            Self::Replay => replay::measure(bench).await,
            Self::OutboxEnqueue => outbox::measure_enqueue(bench).await,
            Self::OutboxMemory => outbox::measure_memory(bench).await,
            Self::OutboxRelay => outbox::measure_relay(bench).await,
        }
    }
}

/// What every scenario needs to know.
struct Bench {
    directory: PathBuf,
    quick: bool,
    events: Option<u64>,
    bar: ProgressBar,
}

impl Bench {
    /// How many rounds raw and Everbus run.
    fn rounds(&self) -> usize {
        if self.quick { 1 } else { 5 }
    }

    /// How many events a throughput scenario uses in one round.
    fn events(&self, usual: u64) -> u64 {
        self.events.unwrap_or_else(|| self.scaled(usual))
    }

    /// A twentieth of a number that belongs to the definition of a scenario, if it is quick.
    fn scaled(&self, n: u64) -> u64 {
        if self.quick { (n / 20).max(1) } else { n }
    }

    /// A new file for one round.
    fn file(&self, name: &str) -> Outcome<PathBuf> {
        let path = self.directory.join(name);
        crate::files::remove(&path)?;
        Ok(path)
    }

    fn remove(&self, path: &Path) {
        // The directory is removed at the end in any case; this only keeps it small.
        let _ = crate::files::remove(path);
    }

    fn say(&self, scenario: Scenario, what: impl std::fmt::Display) {
        self.bar.set_message(format!("{}: {what}", scenario.name()));
    }
}

pub(crate) async fn run(
    args: BenchArgs,
    target: &crate::open::Target,
    output: &mut Output,
) -> Outcome {
    if let Some(part) = &args.only_child {
        let events = args.events.unwrap_or(1000);
        return children::run(part, target.path()?, events, output).await;
    }
    let scenarios = if args.scenarios.is_empty() {
        Scenario::value_variants().to_vec()
    } else {
        args.scenarios
    };
    // Not the directory for temporary files: that is memory on many machines, where nothing is durable.
    let beside = args.dir.unwrap_or_else(|| PathBuf::from("."));
    let directory = tempfile::Builder::new()
        .prefix("everbus-bench-")
        .tempdir_in(&beside)
        .map_err(|e| Stop::from(crate::files::io_error("cannot write to", &beside, e)))?;
    let bench = Bench {
        directory: directory.path().to_path_buf(),
        quick: args.quick,
        events: args.events,
        bar: progress::spinner("starting"),
    };
    if cfg!(debug_assertions) {
        tracing::warn!("this is a debug build; its figures mean little");
    }
    let mut figures = Vec::new();
    for scenario in scenarios {
        bench.say(scenario, "…");
        figures.push(Box::pin(scenario.measure(&bench)).await?);
    }
    bench.bar.finish_and_clear();
    report::print(&figures, args.quick, output)
}
