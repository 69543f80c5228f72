//! The end of a process. The wait does not reap the process, so that its process group can still be killed safely.

use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};

use rustix::process::{Pid, Signal, kill_process_group};

use super::orphans::Watched;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The process ended by itself, with this code.
    Code(i32),
    /// The process was ended by this signal.
    Signal(i32),
}

impl Exit {
    /// The exit code, if it ended by itself.
    pub fn code(self) -> Option<i32> {
        match self {
            Self::Code(code) => Some(code),
            Self::Signal(_) => None,
        }
    }
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Self {
        match status.signal() {
            Some(signal) => Self::Signal(signal),
            None => Self::Code(status.code().unwrap_or(-1)),
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => match signal_name(*signal) {
                Some(name) => f.write_str(name),
                None => write!(f, "signal {signal}"),
            },
        }
    }
}

/// The name of a signal that ends processes.
fn signal_name(signal: i32) -> Option<&'static str> {
    let known = [
        (Signal::HUP, "SIGHUP"),
        (Signal::INT, "SIGINT"),
        (Signal::QUIT, "SIGQUIT"),
        (Signal::ILL, "SIGILL"),
        (Signal::ABORT, "SIGABRT"),
        (Signal::BUS, "SIGBUS"),
        (Signal::FPE, "SIGFPE"),
        (Signal::KILL, "SIGKILL"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::PIPE, "SIGPIPE"),
        (Signal::ALARM, "SIGALRM"),
        (Signal::TERM, "SIGTERM"),
        (Signal::XCPU, "SIGXCPU"),
        (Signal::XFSZ, "SIGXFSZ"),
        (Signal::SYS, "SIGSYS"),
    ];
    let found = known.iter().find(|(known, _)| known.as_raw() == signal);
    found.map(|(_, name)| *name)
}

/// A started process that has not been reaped: no other process can have its id yet.
pub(super) struct Process {
    child: Child,
    pid: Pid,
    reaped: bool,
    /// `None` once it was reaped.
    watched: Option<Watched>,
    /// `None` until the descriptor of the process is opened.
    #[cfg(target_os = "linux")]
    ended: Option<tokio::io::unix::AsyncFd<rustix::fd::OwnedFd>>,
}

impl Process {
    /// Begins to supervise a child. If that fails, the child is killed: no child runs without supervision.
    pub(super) fn new(mut child: Child, mut watched: Watched) -> io::Result<Self> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let Some(pid) = pid else {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::other("a child without a process id"));
        };
        watched.running(pid);
        // From here on, an early return drops `this`, which kills and reaps the child.
        #[allow(unused_mut, reason = "it is complete on other systems than Linux")]
        let mut this = Self {
            child,
            pid,
            reaped: false,
            watched: Some(watched),
            #[cfg(target_os = "linux")]
            ended: None,
        };
        #[cfg(target_os = "linux")]
        {
            use rustix::process::{PidfdFlags, pidfd_open};
            let fd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
            // The function is deprecated because some types may change their descriptor. An `OwnedFd` does not, and the
            // replacement is unsafe.
            #[allow(deprecated)]
            let fd = tokio::io::unix::AsyncFd::with_interest(fd, tokio::io::Interest::READABLE)?;
            this.ended = Some(fd);
        }
        Ok(this)
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits until the process has ended, without reaping it. The future may be dropped at any time.
    #[cfg(target_os = "linux")]
    pub(super) async fn ended(&self) -> io::Result<()> {
        // A pidfd becomes readable when the process ends, and stays readable.
        match &self.ended {
            Some(ended) => ended.readable().await.map(drop),
            None => Err(io::Error::other("a child that is not supervised")),
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) async fn ended(&self) -> io::Result<()> {
        use rustix::process::{WaitId, WaitIdOptions, waitid};
        let pid = self.pid;
        let wait = move || {
            waitid(
                WaitId::Pid(pid),
                WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
            )
        };
        let waited = tokio::task::spawn_blocking(wait).await;
        waited
            .map_err(io::Error::other)?
            .map_err(io::Error::from)
            .map(drop)
    }

    /// Signals every process of the group.
    pub(super) fn signal(&self, signal: Signal) {
        // The group may have ended already: the error is ignored.
        let _ = kill_process_group(self.pid, signal);
    }

    /// Kills the rest of the group and reaps the process. Blocks if the process has not [`ended`](Self::ended).
    pub(super) fn reap(&mut self) -> io::Result<Exit> {
        // The kill comes before the reaping: afterwards the id may belong to another group.
        self.signal(Signal::KILL);
        self.watched = None;
        self.reaped = true;
        self.child.wait().map(Exit::from)
    }
}

impl Drop for Process {
    /// Kills and reaps the process if the supervision ended early, for example with the runtime.
    fn drop(&mut self) {
        if !self.reaped {
            // SIGKILL cannot be ignored, so the wait is short.
            let _ = self.reap();
        }
    }
}
