//! The campaign's side of a victim: starts it, reads its output, stops and kills it.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use super::Broken;
use super::ledger::Ledger;
use super::observe::is_being_written;
use super::victim::Orders;

/// No victim takes longer than this for one request.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const SIGABRT: i32 = 6;

/// The ledger, shared with the threads that read the victims' output.
#[derive(Clone, Debug, Default)]
pub struct SharedLedger(Arc<Mutex<Ledger>>);

impl SharedLedger {
    /// The ledger; no thread panics while it holds the lock.
    pub fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a victim ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By the campaign's signal.
    Killed,
    /// At the failpoint it was armed with.
    Failpoint,
    /// In order.
    Orderly,
    /// In an unexpected way.
    Unexpected(ExitStatus),
}

/// A running victim. Dropping it kills it.
pub struct Victim {
    child: Child,
    input: Option<ChildStdin>,
    listener: Option<JoinHandle<()>>,
    ready: Receiver<()>,
    number: u32,
    /// The files it may hold for writing.
    files: Vec<PathBuf>,
}

impl Victim {
    /// Starts a victim. Everything it reports goes into the ledger under its number.
    pub fn spawn(
        program: &Path,
        orders: &Orders,
        failpoint: Option<&str>,
        number: u32,
        ledger: &SharedLedger,
    ) -> Result<Self, Broken> {
        let mut command = Command::new(program);
        command
            .arg("victim")
            .arg("--db")
            .arg(&orders.db)
            .args(["--seed", &orders.seed.to_string()])
            .args(["--publishes", &orders.publishes.to_string()]);
        if let Some(seed) = orders.repeat {
            command.args(["--repeat", &seed.to_string()]);
        }
        if let Some(lease) = orders.lease_ms {
            command.args(["--lease-ms", &lease.to_string()]);
        }
        if orders.normal {
            command.arg("--normal");
        }
        if let Some(n) = orders.die_between {
            command.args(["--die-between", &n.to_string()]);
        }
        for (wanted, flag) in [
            (orders.ack_first, "--ack-first"),
            (orders.overflow, "--overflow"),
            (orders.late_objects, "--late-objects"),
            (orders.unsynced_objects, "--unsynced-objects"),
            (orders.mortal, "--mortal"),
        ] {
            if wanted {
                command.arg(flag);
            }
        }
        if orders.quiet {
            command.stderr(Stdio::null());
        }
        Self::launch(command, vec![orders.db.clone()], failpoint, number, ledger)
    }

    /// Starts a process that works on these files. Everything it reports goes into the ledger under its
    /// number.
    pub fn launch(
        mut command: Command,
        files: Vec<PathBuf>,
        failpoint: Option<&str>,
        number: u32,
        ledger: &SharedLedger,
    ) -> Result<Self, Broken> {
        match failpoint {
            Some(failpoint) => command.env("EVERBUS_FAILPOINT", failpoint),
            None => command.env_remove("EVERBUS_FAILPOINT"),
        };
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Broken::at("starting a victim"))?;
        let (tell_ready, ready) = channel();
        let listener = child.stdout.take().map(|output| {
            let ledger = ledger.clone();
            std::thread::spawn(move || listen(output, number, &ledger, &tell_ready))
        });
        Ok(Self {
            input: child.stdin.take(),
            child,
            listener,
            ready,
            number,
            files,
        })
    }

    /// Its number in the ledger.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Waits until it has subscribed and started, or has ended.
    pub fn wait_until_ready(&self) -> Result<(), Broken> {
        match self.ready.recv_timeout(PATIENCE) {
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Ok(()),
            Err(RecvTimeoutError::Timeout) => Err(Broken::new(format!(
                "victim {} does not start",
                self.number
            ))),
        }
    }

    /// Whether it is still there.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits up to this long until it ends by itself, and returns whether it did.
    pub fn ends_within(&mut self, time: Duration) -> bool {
        let until = Instant::now() + time;
        while self.is_running() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Stops it between two transactions: stopped inside one, it would hold the lock of the file and every
    /// other process would wait.
    pub fn stop_between_transactions(&mut self) -> Result<bool, Broken> {
        for _ in 0..200 {
            self.stop()?;
            let mut held = false;
            for file in &self.files {
                held |= is_being_written(file)?;
            }
            if !held {
                return Ok(true);
            }
            self.go_on()?;
            if self.ends_within(Duration::from_micros(700)) {
                return Ok(false);
            }
        }
        Ok(false)
    }

    /// Stops it where it is.
    pub fn stop(&mut self) -> Result<(), Broken> {
        stop(self.child.id())
    }

    /// Lets it go on.
    pub fn go_on(&mut self) -> Result<(), Broken> {
        signal(self.child.id(), Signal::CONT)
    }

    /// Kills it and reads the rest of its output.
    pub fn kill(mut self) -> Result<End, Broken> {
        self.child.kill().map_err(Broken::at("killing a victim"))?;
        self.finish()
    }

    /// Asks it to end in order, and waits until it has.
    pub fn end_in_order(mut self) -> Result<End, Broken> {
        drop(self.input.take());
        if !self.ends_within(PATIENCE) {
            return Err(Broken::new(format!(
                "victim {} does not shut down",
                self.number
            )));
        }
        self.finish()
    }

    fn finish(&mut self) -> Result<End, Broken> {
        let status = self
            .child
            .wait()
            .map_err(Broken::at("waiting for a victim"))?;
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
        Ok(match status.signal() {
            Some(SIGABRT) => End::Failpoint,
            Some(_) => End::Killed,
            None if status.success() => End::Orderly,
            None => End::Unexpected(status),
        })
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.finish();
    }
}

/// Stops a child and waits until all of it has stopped, or it is gone.
pub fn stop(child: u32) -> Result<(), Broken> {
    signal(child, Signal::STOP)?;
    // Its exit status is left for the owner of the child to collect.
    let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(pid(child)?), options)
        .map(drop)
        .map_err(Broken::at("waiting for a process to stop"))
}

/// Sends a signal to a child; a child that has ended is ignored.
pub fn signal(child: u32, signal: Signal) -> Result<(), Broken> {
    match kill_process(pid(child)?, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(Broken(format!("sending a signal: {error}"))),
    }
}

fn pid(child: u32) -> Result<Pid, Broken> {
    i32::try_from(child)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| Broken::new("a process without a number"))
}

/// Reads lines until the pipe ends. Text after the last line break was cut off and does not count.
fn listen(output: ChildStdout, number: u32, ledger: &SharedLedger, ready: &Sender<()>) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    loop {
        line.clear();
        match output.read_until(b'\n', &mut line) {
            Ok(length) if length > 0 && line.ends_with(b"\n") => {}
            _ => return,
        }
        let text = String::from_utf8_lossy(&line[..line.len() - 1]);
        if text == "READY" {
            let _ = ready.send(());
        } else {
            ledger.lock().hear(number, &text);
        }
    }
}
