//! One child process, from its start to its end: with its own process group, a cleared environment, limits, and a kill
//! that reaches every process of the group.
//!
//! The rules for a child, which the chapter on workers in the book explains:
//!
//! - Standard input gives the input of the task as JSON, and then ends.
//! - A line on standard output that begins with `{"everbus":` is a report; see [`Report`](report::Report).
//! - The last other line of standard output is the output of the task, as JSON. With [`OutputKind::Descriptor`] the
//!   output is what the child writes to a separate descriptor.
//! - Exit code 0 means that the task is completed.

mod collect;
mod descriptor;
mod exit;
mod orphans;
pub(crate) mod report;
mod status;
mod supervise;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use everbus::{Code, Error, Result};

pub use collect::OutputKind;
pub use exit::Exit;
pub use report::{Report, ReportedActivity, ReportedError};
pub use supervise::{Ended, Running, StopSignal, Stopped};

/// The variables that a child gets from the environment of the worker, unless set otherwise.
pub const ALLOWED: [&str; 8] = [
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "PATH", "TMPDIR", "TZ", "USER",
];

/// The limits of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChildLimits {
    /// How long it may run (200,000 ms).
    pub timeout: Duration,
    /// The time between SIGTERM and SIGKILL (5 s).
    pub grace: Duration,
    /// How many bytes the child may write to standard output, including reports, and to the separate descriptor (16
    /// MiB). A child that writes more is killed.
    pub output: usize,
    /// How many of the last bytes of standard error are kept (4 KiB). A child may write any number of them.
    pub stderr_tail: usize,
    /// How much memory each process of the child may allocate, in bytes (`RLIMIT_DATA`). On systems other than Linux a
    /// child with this limit is not started.
    pub memory: Option<u64>,
}

impl Default for ChildLimits {
    fn default() -> Self {
        Self {
            timeout: Duration::from_millis(200_000),
            grace: Duration::from_secs(5),
            output: 16 * 1024 * 1024,
            stderr_tail: 4 * 1024,
            memory: None,
        }
    }
}

impl ChildLimits {
    /// Sets how long a child may run.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets how long a child has to end by itself after SIGTERM.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Sets how many bytes a child may write to standard output.
    #[must_use]
    pub fn output(mut self, bytes: usize) -> Self {
        self.output = bytes;
        self
    }

    /// Sets how many of the last bytes of standard error are kept.
    #[must_use]
    pub fn stderr_tail(mut self, bytes: usize) -> Self {
        self.stderr_tail = bytes;
        self
    }

    /// Sets how much memory each process of a child may allocate.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    let found = path.metadata();
    found.is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// A command that runs one task per process. No shell is involved: the arguments reach the program as they are.
#[derive(Clone, Debug)]
pub struct ChildCommand {
    program: OsString,
    args: Vec<OsString>,
    directory: Option<PathBuf>,
    allowed: BTreeSet<String>,
    set: BTreeMap<String, String>,
    limits: ChildLimits,
    output: OutputKind,
}

impl ChildCommand {
    /// A program without arguments.
    pub fn new(program: impl Into<OsString>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            directory: None,
            allowed: ALLOWED.into_iter().map(str::to_owned).collect(),
            set: BTreeMap::new(),
            limits: ChildLimits::default(),
            output: OutputKind::default(),
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// The directory that the child starts in; by default that of the worker.
    #[must_use]
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }

    /// Passes on a variable of the worker's environment, in addition to [`ALLOWED`].
    #[must_use]
    pub fn allow_env(mut self, name: impl Into<String>) -> Self {
        self.allowed.insert(name.into());
        self
    }

    /// Sets a variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.set.insert(name.into(), value.into());
        self
    }

    /// Sets the limits.
    #[must_use]
    pub fn limits(mut self, limits: ChildLimits) -> Self {
        self.limits = limits;
        self
    }

    /// How the output of the task is read from standard output.
    #[must_use]
    pub fn output(mut self, output: OutputKind) -> Self {
        self.output = output;
        self
    }

    /// The limits of the children of this command.
    pub fn child_limits(&self) -> ChildLimits {
        self.limits
    }

    /// How the output of the task is read.
    pub fn output_kind(&self) -> OutputKind {
        self.output
    }

    /// The program.
    pub fn program(&self) -> &OsStr {
        &self.program
    }

    /// Checks that the program and the directory exist. A worker is refused if they do not: each of its tasks would fail
    /// for good.
    pub fn check(&self) -> Result<()> {
        let invalid = |what: String| Error::new(Code::InvalidSetting, what);
        if let Some(directory) = &self.directory
            && !directory.is_dir()
        {
            let what = format!("there is no directory {}", directory.display());
            return Err(invalid(what).hint("create it, or name another one"));
        }
        let candidates = self.candidates();
        if candidates.iter().any(|path| is_executable(path)) {
            return Ok(());
        }
        let program = self.program.display();
        let exists = candidates.iter().find(|path| path.is_file());
        Err(match exists {
            Some(path) => invalid(format!("{} may not be executed", path.display()))
                .hint("make it executable, or put its interpreter first: sh FILE"),
            None => invalid(format!("there is no program {program}"))
                .hint("check the name; without a shell, an alias or a pipe needs sh -c '…'"),
        })
    }

    /// The files that the program may be, in the order in which the system looks for it.
    fn candidates(&self) -> Vec<PathBuf> {
        let base = self.directory.clone().unwrap_or_default();
        if self.program.as_encoded_bytes().contains(&b'/') {
            return vec![base.join(&self.program)];
        }
        let path = match self.set.get("PATH") {
            Some(path) => Some(OsString::from(path)),
            None => std::env::var_os("PATH"),
        };
        let path = path.unwrap_or_else(|| "/bin:/usr/bin".into());
        let directories = std::env::split_paths(&path);
        directories
            .map(|directory| base.join(directory).join(&self.program))
            .collect()
    }

    /// Starts a child with this input. The variables are added to the others, and replace those with the same name.
    ///
    /// Must be called inside a tokio runtime. The child is killed if the returned handle is dropped.
    pub fn start<'a>(
        &self,
        variables: impl IntoIterator<Item = (&'a str, String)>,
        input: Vec<u8>,
    ) -> std::io::Result<Running> {
        self.start_within(self.limits, variables, input)
    }

    /// Like [`start`](Self::start), with other limits.
    pub(crate) fn start_within<'a>(
        &self,
        limits: ChildLimits,
        variables: impl IntoIterator<Item = (&'a str, String)>,
        input: Vec<u8>,
    ) -> std::io::Result<Running> {
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for name in &self.allowed {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        let watched = orphans::Watched::starting();
        command
            .envs(&self.set)
            .envs(variables)
            .env(orphans::MARK, watched.mark());
        if let Some(directory) = &self.directory {
            command.current_dir(directory);
        }
        // The child gets its own process group, so that a kill also reaches the processes that it starts.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        Running::start(&mut command, watched, limits, self.output, input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: workflow/worker-command-checked: a worker whose program or directory does not exist is refused before it takes a task
    #[test]
    fn a_command_that_cannot_run_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let plain = dir.path().join("plain.sh");
        std::fs::write(&plain, "#!/bin/sh\n").unwrap();
        for (command, part) in [
            (ChildCommand::new("/nonexistent/program"), "no program"),
            (ChildCommand::new("no-such-program-here"), "no program"),
            (
                ChildCommand::new("sh").directory("/nonexistent"),
                "no directory",
            ),
            (
                ChildCommand::new("sh").env("PATH", "/nonexistent"),
                "no program",
            ),
            (ChildCommand::new(&plain), "may not be executed"),
            (ChildCommand::new(dir.path()), "no program"),
        ] {
            let error = command.check().unwrap_err();
            assert_eq!(error.code(), Code::InvalidSetting);
            assert!(error.message().contains(part), "{error}");
        }
        let here = ChildCommand::new("./run.sh").directory(dir.path());
        assert!(here.check().is_err());
        let run = dir.path().join("run.sh");
        std::fs::write(&run, "#!/bin/sh\n").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&run, mode).unwrap();
        here.check().unwrap();
        ChildCommand::new("sh").check().unwrap();
        ChildCommand::new(&run).check().unwrap();
    }
}
