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

/// Whether this user may execute the file.
fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
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
        let environment = self.environment();
        let path = environment.get(OsStr::new("PATH"));
        let candidates = self.candidates(path.map(OsString::as_os_str));
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

    /// The variables of every child: those that are allowed, and those that are set.
    fn environment(&self) -> BTreeMap<OsString, OsString> {
        let allowed = self.allowed.iter();
        let allowed =
            allowed.filter_map(|name| Some((OsString::from(name), std::env::var_os(name)?)));
        let set = self.set.iter();
        let set = set.map(|(name, value)| (OsString::from(name), OsString::from(value)));
        allowed.chain(set).collect()
    }

    /// The files that the program may be, in the order in which the system looks for it.
    fn candidates(&self, path: Option<&OsStr>) -> Vec<PathBuf> {
        let base = self.directory.clone().unwrap_or_default();
        if self.has_path() {
            return vec![base.join(&self.program)];
        }
        let directories = std::env::split_paths(path.unwrap_or(OsStr::new("/bin:/usr/bin")));
        directories
            .map(|directory| base.join(directory).join(&self.program))
            .collect()
    }

    /// Whether the program is named by a path, so that it is not searched for.
    fn has_path(&self) -> bool {
        self.program.as_encoded_bytes().contains(&b'/')
    }

    /// The file of a program without a path; `None` if it is not found, and for a program with a path.
    ///
    /// The standard library starts a program with a path with `posix_spawn`. One without a path and with its own `PATH`
    /// is searched for after a `fork`, which copies the page tables of this process: milliseconds in a large one.
    fn file(&self, path: Option<&OsStr>) -> Option<PathBuf> {
        if self.has_path() {
            return None;
        }
        let candidates = self.candidates(path);
        let found = candidates.into_iter().find(|path| is_executable(path))?;
        std::path::absolute(found).ok()
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
        let watched = orphans::Watched::starting();
        let mut environment = self.environment();
        let variables = variables.into_iter();
        environment.extend(variables.map(|(name, value)| (name.into(), value.into())));
        environment.insert(orphans::MARK.into(), watched.mark().into());
        let path = environment.get(OsStr::new("PATH"));
        let file = self.file(path.map(OsString::as_os_str));
        let program = file.as_deref().map_or(self.program(), Path::as_os_str);
        let mut command = Command::new(program);
        command
            .args(&self.args)
            .env_clear()
            .envs(environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // The program sees the name that the command has.
        std::os::unix::process::CommandExt::arg0(&mut command, &self.program);
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

    // conformance: workflow/task-child: a program without a path is searched for in the PATH of the child, and sees its name
    #[tokio::test]
    async fn a_program_is_found_on_the_search_path_of_its_child() {
        let dir = tempfile::tempdir().unwrap();
        for (folder, mode) in [("first", 0o644), ("second", 0o755)] {
            let program = dir.path().join(folder).join("greet");
            std::fs::create_dir(program.parent().unwrap()).unwrap();
            let text = format!("#!/bin/sh\necho '\"from {folder}\"'\n");
            std::fs::write(&program, text).unwrap();
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(&program, mode).unwrap();
        }
        let output = async |command: ChildCommand| {
            let mut child = command.start([], Vec::new()).unwrap();
            child.ended().await.unwrap().output.unwrap()
        };
        let greet = ChildCommand::new("greet").directory(dir.path());
        let greet = greet.env("PATH", "first:second");
        assert_eq!(output(greet).await.get(), "\"from second\"");
        let name = ChildCommand::new("sh").args(["-c", r#"printf '"%s"' "$0""#]);
        assert_eq!(output(name).await.get(), "\"sh\"");
        let missing = ChildCommand::new("no-such-program-here").start([], Vec::new());
        assert_eq!(missing.unwrap_err().kind(), std::io::ErrorKind::NotFound);
    }
}
