//! Commands: a program runs for each event, with the event on its standard input. Only the configuration file can name
//! a command: over HTTP this would be remote code execution.

use std::process::Stdio;
use std::time::Duration;

use everbus::config::Exec;
use everbus::dialects;
use everbus::{Dialect, HandlerError, HandlerResult, Message};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};

/// How many of the last bytes of standard error are in the record of a failure.
const SHOWN: usize = 4096;
/// How long standard error is read after the command has ended, if another process keeps it open.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// The exit code for a failure that no retry can fix (`EX_DATAERR`).
const PERMANENT: i32 = 65;

/// Runs the command for an event, which it gets as JSON on standard input. Exit code 0 acks the event, 65 dead-letters
/// it at once, and any other code is retried. If the handler times out while the command runs, the process group is
/// killed. Processes that a command leaves in the background when it ends go on.
pub(super) async fn run(exec: &Exec, message: &Message) -> HandlerResult {
    let event = message.event();
    let body = dialects::encode(event, Dialect::Native).map_err(HandlerError::permanent)?;
    let Some((program, arguments)) = exec.command.split_first() else {
        return Err(HandlerError::permanent("the command is empty"));
    };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .env("EVERBUS_EVENT_ID", event.id().to_string())
        .env("EVERBUS_EVENT_TYPE", event.event_type())
        .env("EVERBUS_GROUP", message.group().to_string())
        .env("EVERBUS_ATTEMPT", message.attempt().to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    let allowed = exec.env.iter().map(String::as_str);
    for name in std::iter::once("PATH").chain(allowed) {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    if let Some(directory) = &exec.directory {
        command.current_dir(directory);
    }
    let child = command.spawn();
    let mut child =
        child.map_err(|e| HandlerError::new(format!("{program} cannot be run: {e}")))?;
    let mut group = Group::of(&child);
    let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
    let write = async {
        if let Some(mut stdin) = stdin {
            // A command does not have to read its input: the error is ignored.
            let _ = stdin.write_all(&body).await;
        }
    };
    let mut text = Tail::default();
    let read = async {
        if let Some(mut stderr) = stderr {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = stderr.read(&mut buffer).await {
                text.add(&buffer[..n]);
            }
        }
    };
    // A process in the background may keep the pipes open, so the event does not wait for their end.
    let ended = {
        let mut pipes = std::pin::pin!(async { tokio::join!(write, read) });
        tokio::select! {
            _ = &mut pipes => {
                let ended = child.wait().await;
                group.0 = None;
                ended
            }
            ended = child.wait() => {
                group.0 = None;
                let _ = tokio::time::timeout(LAST_WORDS, &mut pipes).await;
                ended
            }
        }
    };
    let status = ended.map_err(|e| HandlerError::new(format!("{program}: {e}")))?;
    if status.success() {
        return Ok(());
    }
    let what = format!("{program}: {status}: {}", text.shown());
    match status.code() {
        Some(PERMANENT) => Err(HandlerError::permanent(what)),
        _ => Err(HandlerError::new(what)),
    }
}

/// The process group of a running command. Dropping it, as the timeout does, kills the group. `None` once the command
/// has ended: its process id may belong to another process then.
struct Group(Option<Pid>);

impl Group {
    fn of(child: &Child) -> Self {
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        Self(id.and_then(Pid::from_raw))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// The last bytes of a text.
#[derive(Default)]
struct Tail(Vec<u8>);

impl Tail {
    fn add(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
        let over = self.0.len().saturating_sub(SHOWN);
        self.0.drain(..over);
    }

    fn shown(&self) -> String {
        String::from_utf8_lossy(&self.0).trim().to_owned()
    }
}
