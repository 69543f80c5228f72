//! No child outlives its worker. A killed worker cannot kill its children, and another worker starts their tasks again:
//! two children would run one task.
//!
//! A helper process, one for each worker, knows the process groups of the running children. It reads them from a pipe
//! that only the worker holds. When the pipe ends, the worker has ended, and the helper kills the groups that are left.
//!
//! A worker may be killed after it has started a child and before it has told the helper the process group. So each
//! child that is being started has a mark in its environment, which the helper knows. On Linux the helper kills the
//! processes that have the mark. Once the helper knows the group, it uses only the group: a daemon that the child
//! started on purpose, in its own session, continues.

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;

use parking_lot::Mutex;
use rustix::process::Pid;
use uuid::Uuid;

/// The environment variable with the mark of a child.
pub(super) const MARK: &str = "EVERBUS_CHILD";

/// The helper. It keeps marks and groups in lists, with a blank before and after each entry. When the pipe ends, it
/// kills the remaining groups. Then it searches twice for processes with the remaining marks: a child that is being
/// started gets its environment a moment later.
const SCRIPT: &str = r#"
starts=" "
groups=" "
while read -r change first second; do
  case $change in
    starting) starts="$starts$first " ;;
    running) starts="${starts%% $first *} ${starts#* $first }" groups="$groups$second " ;;
    failed) starts="${starts%% $first *} ${starts#* $first }" ;;
    ended) groups="${groups%% $first *} ${groups#* $first }" ;;
  esac
done
for group in $groups; do kill -s KILL -- "-$group" 2>/dev/null; done
for pause in 0 1; do
  [ "$starts" = " " ] || sleep $pause
  for mark in $starts; do
    for found in $(grep -lsF -- "$mark" /proc/[0-9]*/environ); do
      found=${found#/proc/}
      found=${found%/environ}
      kill -s KILL -- "-$found" "$found" 2>/dev/null
    done
  done
done
"#;

/// The helper of this process; `None` if it could not be started or has ended.
static HELPER: OnceLock<Mutex<Option<Helper>>> = OnceLock::new();

struct Helper {
    /// Kept to reap the helper if it ends too early.
    child: Child,
    pipe: ChildStdin,
}

/// A child that the helper kills if this process dies. Dropping the value tells the helper that the child has ended.
#[derive(Debug)]
pub(super) struct Watched {
    mark: Uuid,
    /// `None` until the child runs.
    group: Option<Pid>,
}

impl Watched {
    /// Tells the helper that a child is being started. The environment of the child must have the [mark](Self::mark).
    pub(super) fn starting() -> Self {
        let mark = Uuid::new_v4();
        tell(format_args!("starting {mark}"));
        Self { mark, group: None }
    }

    /// The value of [`MARK`].
    pub(super) fn mark(&self) -> String {
        self.mark.to_string()
    }

    /// Tells the helper the process group of the child.
    pub(super) fn running(&mut self, group: Pid) {
        tell(format_args!(
            "running {} {}",
            self.mark,
            group.as_raw_nonzero()
        ));
        self.group = Some(group);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        match self.group {
            Some(group) => tell(format_args!("ended {}", group.as_raw_nonzero())),
            None => tell(format_args!("failed {}", self.mark)),
        }
    }
}

fn helper() -> &'static Mutex<Option<Helper>> {
    HELPER.get_or_init(|| Mutex::new(started()))
}

fn tell(change: std::fmt::Arguments<'_>) {
    let mut helper = helper().lock();
    let Some(running) = &mut *helper else { return };
    // The line is one write, so that the end of this process cannot cut it.
    if let Err(error) = running.pipe.write_all(format!("{change}\n").as_bytes()) {
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
        .args(["-c", SCRIPT, "everbus-orphans"])
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // A signal from the terminal must not end the helper before the worker.
        .process_group(0)
        .spawn()?;
    let pipe = child.stdin.take();
    let pipe = pipe.ok_or_else(|| io::Error::other("a helper without a pipe"))?;
    Ok(Helper { child, pipe })
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    fn child(mark: Uuid) -> Child {
        let mut command = Command::new("sleep");
        let command = command.arg("60").env(MARK, mark.to_string());
        command.process_group(0).spawn().unwrap()
    }

    #[test]
    fn a_child_without_a_name_is_killed_by_its_mark_and_an_ended_one_is_left_alone() {
        let mut helper = start().unwrap();
        let marks = [(); 3].map(|()| Uuid::new_v4());
        let [mut unnamed, mut named, mut ended] = marks.map(child);
        for (mark, group) in [(marks[1], named.id()), (marks[2], ended.id())] {
            writeln!(helper.pipe, "starting {mark}\nrunning {mark} {group}").unwrap();
        }
        writeln!(helper.pipe, "ended {}\nstarting {}", ended.id(), marks[0]).unwrap();
        drop(helper.pipe);
        for killed in [&mut unnamed, &mut named] {
            assert_eq!(killed.wait().unwrap().signal(), Some(9));
        }
        helper.child.wait().unwrap();
        assert!(ended.try_wait().unwrap().is_none(), "it was left alone");
        ended.kill().unwrap();
        ended.wait().unwrap();
    }
}
