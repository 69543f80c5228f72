//! The campaign's side of its workers: starts them, reads their reports, stops and kills them.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use everbus_core::EventId;
use rustix::process::Signal;

use super::worker::{FOLDER, URL};
use super::{Place, Subject};
use crate::chaos::process;

/// What all workers of a campaign reported.
#[derive(Debug, Default)]
pub(super) struct Reports {
    /// How often a group finished an event.
    pub(super) handled: HashMap<(usize, EventId), u32>,
    pub(super) skipped: HashSet<(usize, EventId)>,
    /// Reports of handled events, repetitions included.
    pub(super) total: u64,
    /// Leases that were lost, by process.
    pub(super) lost_leases: HashMap<u32, u64>,
    pub(super) ready: HashSet<u32>,
    pub(super) errors: Vec<String>,
}

/// The reports, shared with the threads that read them.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedReports(Arc<Mutex<Reports>>);

impl SharedReports {
    pub(super) fn lock(&self) -> MutexGuard<'_, Reports> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reports {
    fn hear(&mut self, worker: u32, line: &str) {
        let pair = |rest: &str| {
            let (group, id) = rest.split_once(' ')?;
            Some((group.parse().ok()?, id.parse().ok()?))
        };
        let understood = match line.split_once(' ') {
            None if line == "READY" => {
                self.ready.insert(worker);
                Some(())
            }
            Some(("H", rest)) => pair(rest).map(|pair| {
                *self.handled.entry(pair).or_default() += 1;
                self.total += 1;
            }),
            Some(("S", rest)) => pair(rest).map(|pair| {
                self.skipped.insert(pair);
                self.total += 1;
            }),
            Some(("L", n)) => n.parse().ok().map(|n| {
                self.lost_leases.insert(worker, n);
            }),
            Some(("E", error)) => {
                self.errors.push(format!("worker {worker}: {error}"));
                Some(())
            }
            _ => None,
        };
        if understood.is_none() {
            self.errors.push(format!(
                "worker {worker} said {line:?}, which means nothing"
            ));
        }
    }
}

/// The command of a process that runs the subject's ignored test.
pub(super) fn command(subject: &Subject, place: &Place) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--ignored", "--exact", subject.worker, "--nocapture"])
        .env(URL, &place.url)
        .env(FOLDER, &place.folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command
}

/// A running worker. Dropping it kills it.
pub(super) struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    listener: Option<std::thread::JoinHandle<()>>,
    number: u32,
}

impl Worker {
    pub(super) fn spawn(
        subject: &Subject,
        place: &Place,
        number: u32,
        reports: &SharedReports,
    ) -> Self {
        let mut child = command(subject, place).spawn().unwrap();
        let output = child.stdout.take().unwrap();
        let reports = reports.clone();
        let listener = std::thread::spawn(move || listen(output, number, &reports));
        Self {
            input: child.stdin.take(),
            child,
            listener: Some(listener),
            number,
        }
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// The exit status of a worker that ended by itself.
    pub(super) fn ended(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok().flatten();
        status.map(|status| format!("worker {} ended by itself: {status}", self.number))
    }

    pub(super) fn stop(&self) {
        process::stop(self.child.id()).unwrap();
    }

    pub(super) fn go_on(&self) {
        process::signal(self.child.id(), Signal::CONT).unwrap();
    }

    /// Asks it to end, and says what is wrong if it does not.
    pub(super) fn end(mut self, patience: Duration) -> Option<String> {
        drop(self.input.take());
        let begin = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) if status.success() => return None,
                Ok(Some(status)) => {
                    return Some(format!("worker {} ended with {status}", self.number));
                }
                _ if begin.elapsed() > patience => {
                    return Some(format!("worker {} does not shut down", self.number));
                }
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // What it had reported before it was killed counts.
        let _ = self.listener.take().map(std::thread::JoinHandle::join);
    }
}

/// Reads reports until the pipe ends. A line that a kill cut off does not count.
fn listen(output: ChildStdout, number: u32, reports: &SharedReports) {
    let mut output = BufReader::new(output);
    let mut line = String::new();
    loop {
        line.clear();
        match output.read_line(&mut line) {
            Ok(length) if length > 0 && line.ends_with('\n') => {}
            _ => return,
        }
        if let Some(report) = line.trim_end().strip_prefix("@ ") {
            reports.lock().hear(number, report);
        }
    }
}
