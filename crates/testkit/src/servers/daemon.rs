//! The process of a server: signals to it and its children, and a watchdog that ends it with the test process.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use std::os::unix::process::CommandExt as _;

use rustix::process::{Pid, Signal, kill_process};

use super::PATIENCE;

/// Waits for the end of its input, then ends the server and removes its directory.
///
/// The usual way, a signal when the parent dies (`PR_SET_PDEATHSIG`), does not work here: the signal comes when the
/// thread ends that started the server, and each test has a thread of its own.
const WATCHDOG: &str = r#"
read -r _
kill -CONT "$1"; kill -"$2" "$1"
n=0; while kill -0 "$1" && [ $n -lt 60 ]; do sleep 0.1; n=$((n + 1)); done
kill -KILL "$1"
rm -rf -- "$3"
"#;

/// A running server. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Daemon {
    child: Child,
    watchdog: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts a server whose data is in `directory`. Its output goes to a file there. `end` is the signal with
    /// which it ends at once, together with its children.
    pub(super) fn spawn(mut command: Command, directory: &Path, end: &str) -> Self {
        let log = directory.join("server.log");
        let output = || {
            let file = File::options().create(true).append(true).open(&log);
            file.expect("a file for the server's output")
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(output())
            .stderr(output())
            // Ctrl-C is for the test process; the watchdog does the rest.
            .process_group(0)
            .current_dir("/")
            .spawn()
            .unwrap_or_else(|e| panic!("cannot start {command:?}: {e}"));
        let watchdog = Command::new("sh")
            .args(["-c", WATCHDOG, "watchdog", &child.id().to_string(), end])
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .current_dir("/")
            .spawn()
            .expect("a shell");
        Self {
            child,
            watchdog,
            log,
        }
    }

    /// Waits until `answers` is true. Returns false if the server ended before that.
    pub(super) fn wait_until(&mut self, mut answers: impl FnMut() -> bool) -> bool {
        let begin = Instant::now();
        loop {
            let answered = answers();
            // Another program may answer in the place of a server that ended.
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return false;
            }
            if answered {
                return true;
            }
            assert!(begin.elapsed() < PATIENCE, "no answer: {}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The end of the server's log.
    pub(super) fn said(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(20).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    /// Stops the server and its children (SIGSTOP). Connections stay open, and nothing is answered.
    pub(super) fn pause(&self) {
        // The parent first, so that no child is added.
        signal(self.child.id(), Signal::STOP);
        let all = children(self.child.id());
        for child in &all {
            signal(*child, Signal::STOP);
        }
        wait_until_stopped(self.child.id());
        all.into_iter().for_each(wait_until_stopped);
    }

    /// Continues the server and its children (SIGCONT).
    pub(super) fn resume(&self) {
        for child in children(self.child.id()) {
            signal(child, Signal::CONT);
        }
        signal(self.child.id(), Signal::CONT);
    }

    /// Kills the server and its children, and waits until all of them are gone.
    pub(super) fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.watchdog.kill();
        let _ = self.watchdog.wait();
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        signal(self.child.id(), Signal::STOP);
        let family = children(self.child.id());
        let _ = self.child.kill();
        for child in &family {
            signal(*child, Signal::KILL);
        }
        let _ = self.child.wait();
        let begin = Instant::now();
        while family.iter().any(|child| is_alive(*child)) && begin.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The methods that every type of server has for its process, which is in the field `running`.
macro_rules! controls {
    ($server:ident) => {
        impl $server {
            /// Kills the server and all its processes (SIGKILL), and waits until they are gone.
            pub fn kill(&self) {
                let daemon = self.lock().take();
                daemon.into_iter().for_each(Daemon::kill);
            }

            /// Stops the server (SIGSTOP): connections stay open, and nothing is answered.
            pub fn pause(&self) {
                self.lock().iter().for_each(Daemon::pause);
            }

            /// Continues the server (SIGCONT).
            pub fn resume(&self) {
                self.lock().iter().for_each(Daemon::resume);
            }

            /// The end of its log.
            pub fn log(&self) -> String {
                self.lock().as_ref().map_or_else(String::new, Daemon::said)
            }

            fn lock(&self) -> std::sync::MutexGuard<'_, Option<Daemon>> {
                let running = self.running.lock();
                running.unwrap_or_else(std::sync::PoisonError::into_inner)
            }
        }

        impl Drop for $server {
            fn drop(&mut self) {
                self.kill();
            }
        }
    };
}
pub(super) use controls;

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end();
    }
}

fn signal(process: u32, signal: Signal) {
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
    // A process that has ended needs no signal.
    let _ = pid.map(|pid| kill_process(pid, signal));
}

/// The state and the parent of a process.
fn state_of(process: u32) -> Option<(char, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program is in parentheses and may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

fn is_alive(process: u32) -> bool {
    state_of(process).is_some_and(|(state, _)| !matches!(state, 'Z' | 'X'))
}

/// Waits until every thread of a process has stopped. Shortly after the signal, threads may still run and answer.
fn wait_until_stopped(process: u32) {
    let stands = || {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else {
            return true;
        };
        threads.flatten().all(|thread| {
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // The state follows the name, which is in parentheses.
            let state = stat
                .rsplit_once(") ")
                .and_then(|(_, rest)| rest.chars().next());
            state.is_none_or(|state| "TtZX".contains(state))
        })
    };
    let begun = Instant::now();
    while !stands() && begun.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Children of PostgreSQL lead process groups of their own, so a signal to the group does not reach them.
fn children(parent: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    processes
        .filter(|process| state_of(*process).is_some_and(|(_, of)| of == parent))
        .collect()
}
