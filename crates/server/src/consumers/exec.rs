//! Commands: a program for each event, with the event on its standard input. Only the configuration file can name
//! one: over HTTP it would be remote code execution.

use std::process::Stdio;

use everbus::config::Exec;
use everbus::dialects;
use everbus::{Dialect, HandlerError, HandlerResult, Message};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};

/// The end of what the command wrote to standard error, in the record of the failure.
const SHOWN: usize = 4096;
/// The exit code of a command that says: no retry helps (`EX_DATAERR`).
const PERMANENT: i32 = 65;

/// Runs the command for an event. It gets the event as JSON on standard input; the exit code 0 acks, 65 dead-letters
/// at once, any other is retried. The handler's timeout kills it with everything it started.
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
    let child = child.map_err(|e| HandlerError::new(format!("{program} cannot be run: {e}")))?;
    let mut running = Running(child);
    let (stdin, stderr) = (running.0.stdin.take(), running.0.stderr.take());
    let write = async {
        if let Some(mut stdin) = stdin {
            // A command that does not read its input is no failure.
            let _ = stdin.write_all(&body).await;
        }
    };
    let read = async {
        let mut text = Tail::default();
        if let Some(mut stderr) = stderr {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = stderr.read(&mut buffer).await {
                text.add(&buffer[..n]);
            }
        }
        text
    };
    let ((), text, ended) = tokio::join!(write, read, running.0.wait());
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

/// A running command. Dropping it, as the timeout does, kills its whole process group.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let id = self.0.id().and_then(|id| i32::try_from(id).ok());
        if let Some(group) = id.and_then(Pid::from_raw) {
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
