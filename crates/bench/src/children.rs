//! Parts of scenarios that need their own process: to be killed, or to measure its memory.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use everbus_core::{
    Code, ConsumeOptions, Engine, Error, GroupName, GroupSpec, Pattern, Result, StartFrom,
    SubscriptionSpec,
};

use crate::cross_process::publish_paced;
use crate::end_to_end::{through, until_idle};
use crate::{blocking, failed, sample};

/// Prints a line at once.
pub type Say<'a> = dyn FnMut(String) + 'a;

/// Publishes events, fetches all of them, prints a line, and waits to be killed.
pub(crate) const HOLD: &str = "hold";
/// Publishes and handles events, then prints its resident memory.
pub(crate) const HANDLE: &str = "handle";
/// Makes a backlog for slow handlers, then prints its resident memory.
pub(crate) const BACKLOG: &str = "backlog";
/// Publishes events at a steady pace, then prints when each was committed.
pub(crate) const PACED: &str = "paced";

/// A child process of the bench that reports with its first line. It is killed when dropped.
pub(crate) struct Part {
    child: Child,
    output: Option<BufReader<ChildStdout>>,
}

impl Part {
    /// The first line it prints.
    pub(crate) async fn wait_for_line(&mut self) -> Result<String> {
        let silent = || sample::wrong("a process of the bench ended without a word");
        let mut output = self.output.take().ok_or_else(silent)?;
        let (line, output) = blocking(move || {
            let mut line = String::new();
            output.read_line(&mut line).map_err(failed)?;
            Ok((line, output))
        })
        .await?;
        self.output = Some(output);
        match line.is_empty() {
            true => Err(silent()),
            false => Ok(line),
        }
    }

    /// Kill -9, and wait until it is gone.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill().map_err(failed)?;
        self.child.wait().map_err(failed).map(drop)
    }

    /// Waits for its own end.
    pub(crate) fn wait(&mut self) -> Result<()> {
        match self.child.wait().map_err(failed)?.success() {
            true => Ok(()),
            false => Err(sample::wrong("a process of the bench failed")),
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Killing a process that has ended is harmless.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn spawn(part: &str, path: &Path, events: u64) -> Result<Part> {
    let events = events.to_string();
    start(path, &["bench", "--only-child", part, "--events", &events])
}

/// `everbus publish`, as a person would type it.
pub(crate) fn spawn_publish(path: &Path) -> Result<Part> {
    let payload = "{\"cold\":true}";
    start(path, &["-o", "json", "publish", sample::TYPE, payload])
}

fn start(path: &Path, arguments: &[&str]) -> Result<Part> {
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.arg("--db").arg(path).args(arguments);
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    let output = child.stdout.take().map(BufReader::new);
    Ok(Part { child, output })
}

/// Runs one part in this process. `say` prints a line for the process that waits for it.
pub async fn run(part: &str, path: &Path, events: u64, say: &mut Say<'_>) -> Result<()> {
    match part {
        HOLD => hold(path, events, say).await,
        HANDLE => handle(path, events, say).await,
        BACKLOG => backlog(path, events, say).await,
        PACED => publish_paced(path, events, say).await,
        other => {
            let what = format!("the bench has no part {other:?}");
            Err(Error::new(Code::InvalidSetting, what))
        }
    }
}

async fn hold(path: &Path, events: u64, say: &mut Say<'_>) -> Result<()> {
    let bus = sample::open(path).await?;
    sample::fill(&bus, events).await?;
    let engine = bus.engine();
    let handled = declare(engine).await?;
    let all = usize::try_from(events).unwrap_or(usize::MAX);
    let options = ConsumeOptions::new(handled)
        .prefetch(all)
        .lease(Duration::from_secs(3600));
    let group = GroupName::new("bench")?;
    let mut consumer = engine.broker.consume(group, options).await?;
    let mut held = Vec::with_capacity(all);
    while held.len() < all {
        held.extend(consumer.fetch(all - held.len()).await?);
    }
    say(format!("holding {}", held.len()));
    std::future::pending::<()>().await;
    Ok(())
}

/// The same group and subscription that `Bus::subscribe("bench.>").group("bench")` makes.
async fn declare(engine: &Engine) -> Result<Vec<Pattern>> {
    let pattern = Pattern::new("bench.>")?;
    let spec = GroupSpec {
        name: GroupName::new("bench")?,
        start_from: StartFrom::First,
        ordered: false,
        ephemeral: false,
        subscriptions: vec![SubscriptionSpec {
            name: pattern.to_string(),
            pattern: pattern.clone(),
        }],
    };
    engine.broker.declare(spec).await?;
    Ok(vec![pattern])
}

async fn handle(path: &Path, events: u64, say: &mut Say<'_>) -> Result<()> {
    let bus = sample::open(path).await?;
    Box::pin(through(&bus, events, false)).await?;
    until_idle(&bus).await?;
    say(Resident::of_this_process()?);
    bus.shutdown().await.map(drop)
}

async fn backlog(path: &Path, events: u64, say: &mut Say<'_>) -> Result<()> {
    let bus = sample::open(path).await?;
    declare(bus.engine()).await?;
    sample::fill(&bus, events).await?;
    let (to, mut began) = tokio::sync::mpsc::channel(1);
    bus.subscribe("bench.>")
        .group("bench")
        .handler(move || {
            let _ = to.try_send(());
            std::future::pending::<()>()
        })
        .await?;
    bus.start().await?;
    began.recv().await;
    // Prefetched events arrive within this time or not at all.
    tokio::time::sleep(Duration::from_secs(2)).await;
    say(Resident::of_this_process()?);
    let ended = bus.shutdown_within(Duration::from_millis(1)).await;
    ended.map(drop)
}

/// How much memory a process has in use.
pub(crate) struct Resident {
    pub(crate) now_mib: f64,
    pub(crate) peak_mib: f64,
}

impl Resident {
    /// The line that [`parse`](Self::parse) reads, from the kernel's figures for this process.
    fn of_this_process() -> Result<String> {
        let status = std::fs::read_to_string("/proc/self/status").map_err(|e| {
            let what = "this system does not say how much memory a process has (/proc/self/status)";
            Error::new(Code::Unsupported, what).caused_by(e)
        })?;
        let mib = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name))?;
            let kib = line.split_whitespace().nth(1)?.parse::<f64>().ok()?;
            Some(kib / 1024.0)
        };
        let of = |name| mib(name).unwrap_or(0.0);
        Ok(format!("{} {}", of("VmRSS:"), of("VmHWM:")))
    }

    pub(crate) fn parse(line: &str) -> Result<Self> {
        let mut numbers = line.split_whitespace().map(str::parse::<f64>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(now_mib)), Some(Ok(peak_mib))) => Ok(Self { now_mib, peak_mib }),
            _ => Err(sample::wrong(format!("not a figure: {line:?}"))),
        }
    }
}
