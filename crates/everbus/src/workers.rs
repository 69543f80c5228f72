//! Several processes of one program that share the work of its groups.
//!
//! A program that is too slow as one process runs as several: the processes compete for the events of each group, on
//! any engine that several processes can open. [`run`] starts the program again as worker processes, watches them, and
//! ends when they end.
//!
//! ```no_run
//! use everbus::{Bus, Router, workers};
//! # fn router() -> Router { Router::new() }
//!
//! #[tokio::main]
//! async fn main() -> std::process::ExitCode {
//!     let count = 4; // for example from --workers 4
//!     workers::run(count, async |worker| {
//!         let bus = Bus::open("postgres://localhost/shop").await?;
//!         bus.mount(router()).await?;
//!         bus.start().await?;
//!         worker.stopping().await; // SIGTERM, Ctrl-C, or the parent is gone
//!         bus.shutdown().await?;
//!         Ok(())
//!     })
//!     .await
//! }
//! ```
//!
//! - A worker that fails or dies is started again, after 1 second, then 2, 4, … up to 30; one that ran for a
//!   minute begins at 1 second again. What it had in flight is delivered again, as after any crash.
//! - SIGTERM and Ctrl-C are passed on. The parent waits until the workers have shut down, at most
//!   40 seconds ([`run_within`] sets another time), and then kills what is left. A second signal kills at once.
//! - The parent exits with 0 if every worker ended well, and with 1 otherwise.
//! - If the parent dies, the workers stop: their standard input ends with it. So a worker has no standard input
//!   of its own.

use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::handler::BoxError;

/// The variable that tells a process which worker it is, from 1.
pub const WORKER: &str = "EVERBUS_WORKER";

/// The first and the longest pause before a worker is started again.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A worker that ran for this long was healthy at its start: its next pause is the first one again.
const STEADY: Duration = Duration::from_secs(60);
/// How long workers may take to shut down: the 30 seconds of a bus, 5 for its outcomes, and 5 to spare.
pub const GRACE: Duration = Duration::from_secs(40);

/// Runs `work` in several processes of this program, until they must stop. With a count of 1 it runs in this process.
///
/// The workers are started with the arguments and the environment of this process, and with [`WORKER`].
pub async fn run<W>(count: usize, work: W) -> ExitCode
where
    W: AsyncFnOnce(Worker) -> Result<(), BoxError>,
{
    run_within(GRACE, count, work).await
}

/// As [`run`], with another time for workers to shut down. Workers that still run after it are killed.
pub async fn run_within<W>(grace: Duration, count: usize, work: W) -> ExitCode
where
    W: AsyncFnOnce(Worker) -> Result<(), BoxError>,
{
    let number = std::env::var(WORKER).ok();
    let number = number.and_then(|number| number.parse::<usize>().ok());
    if number.is_none() && count > 1 {
        let again = |_: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap_or_default());
            command.args(std::env::args_os().skip(1));
            command
        };
        return Supervisor::new(count, again).grace(grace).run().await;
    }
    let worker = Worker::new(number);
    match Box::pin(work(worker)).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(target: "everbus::workers", error = &*error, "the worker failed");
            ExitCode::FAILURE
        }
    }
}

/// A worker process, from its own point of view.
#[derive(Clone, Debug)]
pub struct Worker {
    number: usize,
    stop: watch::Receiver<bool>,
}

impl Worker {
    fn new(number: Option<usize>) -> Self {
        let (stop, stopping) = watch::channel(false);
        let signalled = stop.clone();
        tokio::spawn(async move {
            stop_signal().await;
            signalled.send_replace(true);
        });
        if number.is_some() {
            // A thread of its own: a blocked read must not delay the end of the runtime.
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
                stop.send_replace(true);
            });
        }
        Self {
            number: number.unwrap_or(1),
            stop: stopping,
        }
    }

    /// Its number among the workers, from 1.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Resolves when the worker is to shut down.
    pub async fn stopping(&self) {
        if self.stop.clone().wait_for(|stop| *stop).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Starts processes, starts them again when they fail, and ends when they end.
pub struct Supervisor {
    count: usize,
    command: Box<dyn Fn(usize) -> Command + Send + Sync>,
    grace: Duration,
}

impl Supervisor {
    /// A supervisor of `count` processes. `command` builds the command of a process from its number, counted from 1.
    /// The supervisor uses the standard input of the processes.
    pub fn new(count: usize, command: impl Fn(usize) -> Command + Send + Sync + 'static) -> Self {
        Self {
            count,
            command: Box::new(command),
            grace: GRACE,
        }
    }

    /// How long processes may take to end after SIGTERM before they are killed (40 s).
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Runs until SIGTERM or Ctrl-C, or until every process has ended with 0.
    pub async fn run(&self) -> ExitCode {
        let (stop, stopping) = watch::channel(Stop::No);
        let listening = tokio::spawn(async move {
            stop_signal().await;
            stop.send_replace(Stop::Asked);
            stop_signal().await;
            stop.send_replace(Stop::Now);
        });
        let slots = (1..=self.count).map(|number| self.keep(number, stopping.clone()));
        let all_well = join_all(slots).await.into_iter().all(|well| well);
        listening.abort();
        match all_well {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        }
    }

    /// Keeps one process running. Returns whether the last one ended well.
    async fn keep(&self, number: usize, mut stopping: watch::Receiver<Stop>) -> bool {
        let mut pause = FIRST_PAUSE;
        loop {
            let started = Instant::now();
            let ended = match self.start(number) {
                Ok(mut child) => {
                    // Held here, because waiting for a child closes its standard input, and the worker would stop.
                    let _stdin = child.stdin.take();
                    tokio::select! {
                        ended = child.wait() => ended,
                        () = reached(&mut stopping, Stop::Asked) => {
                            return self.end(child, &mut stopping).await;
                        }
                    }
                }
                Err(error) => Err(error),
            };
            if ended.as_ref().is_ok_and(ExitStatus::success) {
                tracing::info!(target: "everbus::workers", number, "the worker is done");
                return true;
            }
            if started.elapsed() >= STEADY {
                pause = FIRST_PAUSE;
            }
            let why = match ended {
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            };
            tracing::warn!(target: "everbus::workers", number, why, again_in = ?pause, "a worker ended");
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // The worker did not end well, and its events wait.
                () = reached(&mut stopping, Stop::Asked) => return false,
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn start(&self, number: usize) -> std::io::Result<Child> {
        (self.command)(number)
            .env(WORKER, number.to_string())
            .stdin(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
    }

    /// Asks a process to end, and kills it if it does not.
    async fn end(&self, mut child: Child, stopping: &mut watch::Receiver<Stop>) -> bool {
        terminate(&child);
        let ended = tokio::select! {
            ended = child.wait() => ended,
            () = tokio::time::sleep(self.grace) => kill(&mut child).await,
            () = reached(stopping, Stop::Now) => kill(&mut child).await,
        };
        ended.is_ok_and(|status| status.success())
    }
}

impl std::fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervisor")
            .field("count", &self.count)
            .field("grace", &self.grace)
            .finish_non_exhaustive()
    }
}

/// How urgently the processes must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stop {
    No,
    Asked,
    Now,
}

async fn reached(stopping: &mut watch::Receiver<Stop>, at: Stop) {
    if stopping.wait_for(|stop| *stop >= at).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn terminate(child: &Child) {
    use rustix::process::{Pid, Signal, kill_process};
    let pid = child.id().and_then(|id| i32::try_from(id).ok());
    if let Some(pid) = pid.and_then(Pid::from_raw) {
        // The process may have ended at this moment.
        let _ = kill_process(pid, Signal::TERM);
    }
}

async fn kill(child: &mut Child) -> std::io::Result<ExitStatus> {
    tracing::warn!(target: "everbus::workers", pid = child.id(), "a worker does not end; it is killed");
    child.start_kill()?;
    child.wait().await
}

/// Resolves at the next SIGTERM or Ctrl-C.
async fn stop_signal() {
    let signals = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    );
    let (Ok(mut terminate), Ok(mut interrupt)) = signals else {
        // Without signal handling, the system ends the process.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
