//! Parts of scenarios that need their own process: to be killed, or to measure its memory.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use everbus_core::{
    Code, ConsumeOptions, Engine, Error, GroupName, GroupSpec, Pattern, StartFrom, SubscriptionSpec,
};

use super::cross_process::publish_paced;
use super::end_to_end::{through, until_idle};
use super::sample;
use crate::open::blocking;
use crate::output::Output;
use crate::stop::{Outcome, Stop};

/// Publishes events, takes all of them in flight, says so, and waits to be killed.
pub(super) const HOLD: &str = "hold";
/// Publishes and handles events, then prints its resident memory.
pub(super) const HANDLE: &str = "handle";
/// Makes a backlog for slow handlers, then prints its resident memory.
pub(super) const BACKLOG: &str = "backlog";
/// Publishes events at a steady pace, then prints when each was committed.
pub(super) const PACED: &str = "paced";

/// A child process of the bench that reports with its first line. It is killed when dropped.
pub(super) struct Part {
    child: Child,
    output: Option<BufReader<ChildStdout>>,
}

impl Part {
    /// The first line it prints.
    pub(super) async fn wait_for_line(&mut self) -> Outcome<String> {
        let Some(mut output) = self.output.take() else {
            return Err(silent());
        };
        let (line, output) = blocking(move || {
            let mut line = String::new();
            match output.read_line(&mut line) {
                Ok(n) if n > 0 => Ok((line, output)),
                _ => Ok((String::new(), output)),
            }
        })
        .await?;
        self.output = Some(output);
        if line.is_empty() {
            return Err(silent());
        }
        Ok(line)
    }

    /// Kill -9, and wait until it is gone.
    pub(super) fn kill(&mut self) -> Outcome {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Waits for its own end.
    pub(super) fn wait(&mut self) -> Outcome {
        if self.child.wait()?.success() {
            return Ok(());
        }
        Err(Error::new(Code::Internal, "a process of the bench failed").into())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Killing what has ended is harmless.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn silent() -> Stop {
    Error::new(
        Code::Internal,
        "a process of the bench ended without a word",
    )
    .into()
}

pub(super) fn spawn(part: &str, path: &Path, events: u64) -> Outcome<Part> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .arg("--db")
        .arg(path)
        .args(["bench", "--only-child", part, "--events"])
        .arg(events.to_string());
    start(command)
}

/// `everbus publish`, as a person would type it.
pub(super) fn spawn_publish(path: &Path) -> Outcome<Part> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .arg("--db")
        .arg(path)
        .args(["-o", "json", "publish", sample::TYPE, "{\"cold\":true}"]);
    start(command)
}

fn start(mut command: Command) -> Outcome<Part> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().map(BufReader::new);
    Ok(Part { child, output })
}

/// Runs one part in this process.
pub(super) async fn run(part: &str, path: &Path, events: u64, output: &mut Output) -> Outcome {
    match part {
        HOLD => hold(path, events, output).await,
        HANDLE => handle(path, events, output).await,
        BACKLOG => backlog(path, events, output).await,
        PACED => publish_paced(path, events, output).await,
        other => Err(Stop::usage(
            format!("the bench has no part {other:?}"),
            None,
        )),
    }
}

async fn hold(path: &Path, events: u64, output: &mut Output) -> Outcome {
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
    output.line(format!("holding {}", held.len()))?;
    output.flush()?;
    std::future::pending::<()>().await;
    Ok(())
}

/// The same group and subscription that `Bus::subscribe("bench.>").group("bench")` makes.
async fn declare(engine: &Engine) -> Outcome<Vec<Pattern>> {
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

async fn handle(path: &Path, events: u64, output: &mut Output) -> Outcome {
    let bus = sample::open(path).await?;
    Box::pin(through(&bus, events)).await?;
    until_idle(&bus).await?;
    Resident::of_this_process()?.print(output)?;
    bus.shutdown().await?;
    Ok(())
}

async fn backlog(path: &Path, events: u64, output: &mut Output) -> Outcome {
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
    Resident::of_this_process()?.print(output)?;
    bus.shutdown_within(Duration::from_millis(1)).await?;
    Ok(())
}

/// How much memory a process has in use.
pub(super) struct Resident {
    pub(super) now_mib: f64,
    pub(super) peak_mib: f64,
}

impl Resident {
    /// Read from the kernel's figures for this process.
    fn of_this_process() -> Outcome<Self> {
        let status = std::fs::read_to_string("/proc/self/status").map_err(|_| {
            Stop::Failed(Error::new(
                Code::Unsupported,
                "this system does not say how much memory a process has (/proc/self/status)",
            ))
        })?;
        let kib = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse::<f64>().ok()
        };
        Ok(Self {
            now_mib: kib("VmRSS:").unwrap_or(0.0) / 1024.0,
            peak_mib: kib("VmHWM:").unwrap_or(0.0) / 1024.0,
        })
    }

    fn print(&self, output: &mut Output) -> Outcome {
        output.line(format!("{} {}", self.now_mib, self.peak_mib))?;
        output.flush()
    }

    /// Reads what `print` wrote.
    pub(super) fn parse(line: &str) -> Outcome<Self> {
        let mut numbers = line.split_whitespace().map(str::parse::<f64>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(now_mib)), Some(Ok(peak_mib))) => Ok(Self { now_mib, peak_mib }),
            _ => Err(Error::new(Code::Internal, format!("not a figure: {line:?}")).into()),
        }
    }
}
