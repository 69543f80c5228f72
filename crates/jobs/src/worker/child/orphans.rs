//! No child outlives its worker. A worker that is killed cannot kill its children, and another worker starts their tasks
//! again: two children would run one task.
//!
//! A helper process, one for each worker, knows the process groups of the running children. It reads them from a pipe
//! that only the worker holds. When the pipe ends, the worker has ended, and the helper kills the groups that are left.
//!
//! A worker may be killed after it has started a child and before it has named its group. The environment of each child
//! therefore has a mark of its worker, and on Linux the helper also kills the processes that carry it.

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{LazyLock, OnceLock};

use parking_lot::Mutex;
use rustix::process::Pid;
use uuid::Uuid;

/// The variable in the environment of a child that names the process of its worker.
pub(super) const MARK: &str = "EVERBUS_WORKER_PROCESS";

/// Keeps the groups in a list with a blank before and after each, and kills those that are left at the end. Then it looks
/// for the mark `$1`, twice: a child that is being started gets its environment a moment later.
const SCRIPT: &str = r#"
groups=" "
while read -r change group; do
  case $change in
    +) groups="$groups$group " ;;
    -) groups="${groups%% $group *} ${groups#* $group }" ;;
  esac
done
for group in $groups; do kill -s KILL -- "-$group" 2>/dev/null; done
for pause in 0 1; do
  sleep $pause
  for found in $(grep -lsF -- "$1" /proc/[0-9]*/environ); do
    found=${found#/proc/}
    found=${found%/environ}
    kill -s KILL -- "-$found" "$found" 2>/dev/null
  done
done
"#;

/// The helper of this process; `None` inside if it could not be started or has ended.
static HELPER: OnceLock<Mutex<Option<Helper>>> = OnceLock::new();

/// The mark of this process. An earlier process with the same id had another one.
static OWN_MARK: LazyLock<String> = LazyLock::new(|| Uuid::new_v4().to_string());

struct Helper {
    /// Reaped if it ends too early.
    child: Child,
    pipe: ChildStdin,
}

/// A process group that the helper kills if this process dies. Dropping it says that the group has ended.
#[derive(Debug)]
pub(super) struct Watched {
    group: Pid,
}

impl Watched {
    /// Tells the helper about a group.
    pub(super) fn new(group: Pid) -> Self {
        tell('+', group);
        Self { group }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        tell('-', self.group);
    }
}

/// The value of [`MARK`] for the children of this process. The helper runs once this returns, so that a child that is
/// started afterwards has one.
pub(super) fn mark() -> &'static str {
    helper();
    &OWN_MARK
}

fn helper() -> &'static Mutex<Option<Helper>> {
    HELPER.get_or_init(|| Mutex::new(started()))
}

fn tell(change: char, group: Pid) {
    let mut helper = helper().lock();
    let Some(running) = &mut *helper else { return };
    let group = group.as_raw_nonzero();
    if let Err(error) = running
        .pipe
        .write_all(format!("{change} {group}\n").as_bytes())
    {
        tracing::warn!(target: "everbus::worker", %error, "the helper that kills the children of a dead worker has ended");
        let _ = running.child.wait();
        *helper = None;
    }
}

fn started() -> Option<Helper> {
    let started = start();
    if let Err(error) = &started {
        tracing::warn!(target: "everbus::worker", %error, "sh cannot be started: children go on if this worker is killed");
    }
    started.ok()
}

fn start() -> io::Result<Helper> {
    let mut child = Command::new("/bin/sh")
        .args(["-c", SCRIPT, "everbus-orphans", OWN_MARK.as_str()])
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // A signal of the terminal must not end it before the worker.
        .process_group(0)
        .spawn()?;
    let pipe = child.stdin.take();
    let pipe = pipe.ok_or_else(|| io::Error::other("a helper without a pipe"))?;
    Ok(Helper { child, pipe })
}
