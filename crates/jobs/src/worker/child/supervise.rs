//! Runs a child to its end: writes its input, reads its output, and stops it on an order or at a limit.

use std::io;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe::Receiver;
use tokio::process::{ChildStderr, ChildStdin, ChildStdout};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::ChildLimits;
use super::collect::{Output, OutputKind, Tail};
use super::exit::{Exit, Process};
use super::orphans::Watched;
use super::report::{ReportedActivity, ReportedError};
use super::status::Memory;
use crate::events::{Json, Usage};

/// The first and the longest interval between two readings of the memory of a child.
const FIRST_LOOK: Duration = Duration::from_millis(10);
const LONGEST_LOOK: Duration = Duration::from_secs(10);
/// The memory is also read when the child writes output, which is often just before its end; but not more often than
/// this.
const LOOK_AT_OUTPUT: Duration = Duration::from_millis(20);
/// How long the pipes may stay open after the child has ended and its group was killed. Only a process that left the
/// group can keep them open.
const DRAIN: Duration = Duration::from_millis(500);
const CHUNK: usize = 16 * 1024;

/// Why a child was stopped before it ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stopped {
    /// It ran for too long.
    Timeout,
    /// It wrote too much to standard output.
    TooMuchOutput,
    /// The lease of the task was lost: another worker may run the task already.
    LeaseLost,
    /// Its task was cancelled.
    Cancelled,
    /// The worker stops, and the task goes back to the group.
    Shutdown,
}

/// The last signal that was sent to a stopped child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// The child ended in time after SIGTERM.
    Term,
    /// The child was killed with SIGKILL.
    Kill,
}

impl StopSignal {
    /// The name of the signal.
    pub fn name(self) -> &'static str {
        match self {
            Self::Term => "SIGTERM",
            Self::Kill => "SIGKILL",
        }
    }
}

/// A child that has ended.
#[derive(Debug)]
pub struct Ended {
    /// How it ended.
    pub exit: Exit,
    /// The reason and the last signal, if the child was stopped.
    pub stopped: Option<(Stopped, StopSignal)>,
    /// How long it ran.
    pub elapsed: Duration,
    /// The output of the task, or why there is none.
    pub output: Result<Json, String>,
    /// The tokens that the child reported as used.
    pub usage: Option<Usage>,
    /// The last error that it reported.
    pub error: Option<ReportedError>,
    /// The end of its standard error.
    pub stderr: String,
    /// The peak memory that was read, in bytes; 0 on systems without `/proc`.
    pub peak_memory: u64,
}

/// The last activity that a child reported, and when.
pub(crate) type LastActivity = Option<(ReportedActivity, SystemTime)>;

/// A running child. Dropping it kills the child.
#[derive(Debug)]
pub struct Running {
    pid: u32,
    orders: watch::Sender<Option<Order>>,
    shared: Arc<Shared>,
    /// `None` once the result was taken.
    task: Option<JoinHandle<io::Result<Ended>>>,
}

/// The state that the supervising task and the handle share.
#[derive(Debug, Default)]
struct Shared {
    activity: Mutex<LastActivity>,
    resident: AtomicU64,
    peak: AtomicU64,
}

impl Shared {
    fn look(&self, pid: Pid) {
        if let Some(memory) = Memory::of(pid) {
            self.resident.store(memory.resident, Ordering::Relaxed);
            self.peak.fetch_max(memory.peak, Ordering::Relaxed);
        }
    }
}

/// An order to stop the child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Order {
    why: Stopped,
    /// The time between SIGTERM and SIGKILL. Zero: SIGKILL at once.
    grace: Duration,
}

impl Running {
    pub(super) fn start(
        command: &mut Command,
        watched: Watched,
        limits: ChildLimits,
        kind: OutputKind,
        input: Vec<u8>,
    ) -> io::Result<Self> {
        #[cfg(not(target_os = "linux"))]
        if limits.memory.is_some() {
            let what = "the memory of a child can be limited on Linux only";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        let started = Instant::now();
        let (mut child, apart) = super::descriptor::spawn(command, kind)?;
        let (stdin, stdout, stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let process = Process::new(child, watched)?;
        #[cfg(target_os = "linux")]
        if let Some(bytes) = limits.memory {
            limit_memory(process.pid(), bytes)?;
        }
        let pipes = Pipes {
            stdin: stdin.map(ChildStdin::from_std).transpose()?,
            stdout: stdout.map(ChildStdout::from_std).transpose()?,
            stderr: stderr.map(ChildStderr::from_std).transpose()?,
            apart,
            input,
        };
        let (orders, orders_of_child) = watch::channel(None);
        let shared = Arc::new(Shared::default());
        let pid = process.pid().as_raw_nonzero().get().unsigned_abs();
        let supervision = Supervision {
            started,
            limits,
            shared: shared.clone(),
            output: Mutex::new(Output::new(kind, limits.output)),
            stderr: Mutex::new(Tail::new(limits.stderr_tail)),
            too_much: Notify::new(),
            pid: process.pid(),
        };
        let task = tokio::spawn(supervision.run(process, pipes, orders_of_child));
        Ok(Self {
            pid,
            orders,
            shared,
            task: Some(task),
        })
    }

    /// Its process id, which is the id of its process group too.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The resident memory of the child, in bytes. It is read now; for a child that has ended it is the last value.
    pub fn resident_memory(&self) -> u64 {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            self.shared.look(pid);
        }
        self.shared.resident.load(Ordering::Relaxed)
    }

    /// The last activity that it reported.
    pub(crate) fn activity(&self) -> LastActivity {
        self.shared.activity.lock().clone()
    }

    /// Stops the child and its group: SIGTERM, then SIGKILL after `grace`. A second call can only shorten the grace;
    /// the reason of the first call is kept.
    pub fn stop(&self, why: Stopped, grace: Duration) {
        self.orders.send_if_modified(|order| match order {
            None => {
                *order = Some(Order { why, grace });
                true
            }
            Some(given) if grace < given.grace => {
                given.grace = grace;
                true
            }
            Some(_) => false,
        });
    }

    /// Kills it and its group at once.
    pub fn kill(&self, why: Stopped) {
        self.stop(why, Duration::ZERO);
    }

    /// Waits for the end of the child. The future may be dropped at any time. The result is returned once.
    pub async fn ended(&mut self) -> io::Result<Ended> {
        let Some(task) = &mut self.task else {
            return Err(io::Error::other("the end of this child was taken already"));
        };
        let ended = task.await;
        self.task = None;
        ended.map_err(io::Error::other)?
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.task.is_some() {
            self.kill(Stopped::Shutdown);
        }
    }
}

#[cfg(target_os = "linux")]
fn limit_memory(pid: Pid, bytes: u64) -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, prlimit};
    let limit = Rlimit {
        current: Some(bytes),
        maximum: Some(bytes),
    };
    match prlimit(Some(pid), Resource::Data, limit) {
        // `SRCH`: the process has ended already.
        Ok(_) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

struct Pipes {
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    /// The separate descriptor for the output.
    apart: Option<Receiver>,
    input: Vec<u8>,
}

/// The stop of a child that is under way.
struct Stopping {
    why: Stopped,
    signal: StopSignal,
    /// When SIGKILL is sent.
    kill_at: Instant,
}

struct Supervision {
    started: Instant,
    limits: ChildLimits,
    shared: Arc<Shared>,
    output: Mutex<Output>,
    stderr: Mutex<Tail>,
    too_much: Notify,
    pid: Pid,
}

impl Supervision {
    async fn run(
        self,
        mut process: Process,
        pipes: Pipes,
        mut orders: watch::Receiver<Option<Order>>,
    ) -> io::Result<Ended> {
        let mut stopping = None::<Stopping>;
        let (elapsed, exit) = {
            let mut transfer = std::pin::pin!(self.transfer(pipes));
            let mut transferred = false;
            let deadline = self.started + self.limits.timeout;
            let mut look = FIRST_LOOK;
            let mut look_at = self.started + look;
            loop {
                let next = match &stopping {
                    None => deadline,
                    Some(stopping) => stopping.kill_at,
                };
                let due = stopping
                    .as_ref()
                    .is_none_or(|s| s.signal == StopSignal::Term);
                tokio::select! {
                    biased;
                    ended = process.ended() => {
                        ended?;
                        break;
                    }
                    () = tokio::time::sleep_until(next), if due => match &mut stopping {
                        None => {
                            let grace = self.limits.grace;
                            let order = Order { why: Stopped::Timeout, grace };
                            stopping = Some(self.begin_stop(&process, order));
                        }
                        Some(stopping) => {
                            process.signal(Signal::KILL);
                            stopping.signal = StopSignal::Kill;
                        }
                    },
                    Ok(()) = orders.changed() => {
                        let order = *orders.borrow_and_update();
                        match (order, &mut stopping) {
                            (Some(order), None) => {
                                stopping = Some(self.begin_stop(&process, order));
                            }
                            // A later order can only make the kill earlier.
                            (Some(order), Some(stopping)) => {
                                let at = Instant::now() + order.grace;
                                stopping.kill_at = stopping.kill_at.min(at);
                            }
                            (None, _) => {}
                        }
                    }
                    () = self.too_much.notified(), if stopping.is_none() => {
                        let order = Order { why: Stopped::TooMuchOutput, grace: Duration::ZERO };
                        stopping = Some(self.begin_stop(&process, order));
                    }
                    () = &mut transfer, if !transferred => transferred = true,
                    () = tokio::time::sleep_until(look_at) => {
                        self.shared.look(self.pid);
                        look = (look * 3).min(LONGEST_LOOK);
                        look_at = Instant::now() + look;
                    }
                }
            }
            let elapsed = self.started.elapsed();
            // This also kills the rest of the group, so that the pipes end.
            let exit = process.reap()?;
            if !transferred {
                let _ = tokio::time::timeout(DRAIN, transfer).await;
            }
            (elapsed, exit)
        };
        let mut output = self.output.into_inner();
        output.finish();
        Ok(Ended {
            exit,
            stopped: stopping.map(|stopping| (stopping.why, stopping.signal)),
            elapsed,
            output: output.value(),
            usage: output.usage.take(),
            error: output.error.take(),
            stderr: self.stderr.into_inner().text(),
            peak_memory: self.shared.peak.load(Ordering::Relaxed),
        })
    }

    fn begin_stop(&self, process: &Process, order: Order) -> Stopping {
        self.shared.look(self.pid);
        let signal = match order.grace.is_zero() {
            true => (Signal::KILL, StopSignal::Kill),
            false => (Signal::TERM, StopSignal::Term),
        };
        process.signal(signal.0);
        Stopping {
            why: order.why,
            signal: signal.1,
            kill_at: Instant::now() + order.grace,
        }
    }

    /// Writes the input and reads all outputs, until all pipes have ended.
    async fn transfer(&self, pipes: Pipes) {
        let Pipes {
            stdin,
            stdout,
            stderr,
            apart,
            input,
        } = pipes;
        let feed = async {
            if let Some(mut stdin) = stdin {
                // A child does not have to read its input: the error is ignored.
                let _ = stdin.write_all(&input).await;
            }
        };
        tokio::join!(
            feed,
            self.read_output(stdout),
            self.read_errors(stderr),
            self.read_apart(apart)
        );
    }

    async fn read_output(&self, stdout: Option<ChildStdout>) {
        let Some(mut stdout) = stdout else { return };
        let mut chunk = Vec::with_capacity(CHUNK);
        let mut looked = self.started;
        while read(&mut stdout, &mut chunk).await {
            let now = Instant::now();
            if now.duration_since(looked) >= LOOK_AT_OUTPUT {
                looked = now;
                self.shared.look(self.pid);
            }
            let mut output = self.output.lock();
            if output.add(&chunk) {
                self.too_much.notify_one();
            }
            if let Some(activity) = output.activity.take() {
                *self.shared.activity.lock() = Some((activity, SystemTime::now()));
            }
        }
    }

    async fn read_errors(&self, stderr: Option<ChildStderr>) {
        let Some(mut stderr) = stderr else { return };
        let mut chunk = Vec::with_capacity(CHUNK);
        while read(&mut stderr, &mut chunk).await {
            self.stderr.lock().add(&chunk);
        }
    }

    async fn read_apart(&self, apart: Option<Receiver>) {
        let Some(mut apart) = apart else { return };
        let mut chunk = Vec::with_capacity(CHUNK);
        while read(&mut apart, &mut chunk).await {
            if self.output.lock().add_apart(&chunk) {
                self.too_much.notify_one();
            }
        }
    }
}

/// Reads the next piece into `chunk`. Returns false at the end.
async fn read(pipe: &mut (impl AsyncReadExt + Unpin), chunk: &mut Vec<u8>) -> bool {
    chunk.clear();
    matches!(pipe.read_buf(chunk).await, Ok(read) if read > 0)
}
