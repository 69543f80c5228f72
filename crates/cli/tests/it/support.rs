//! Runs the built binary in a directory of its own.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use everbus::{Bus, HandlerError};
use serde_json::Value;
use tempfile::TempDir;

/// A directory with the file the commands work on.
pub(crate) struct Shop {
    directory: TempDir,
}

/// What a command did.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Shop {
    pub(crate) fn new() -> Self {
        Self {
            directory: TempDir::new().unwrap(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn db(&self) -> PathBuf {
        self.path("everbus.db")
    }

    /// The binary, ready to run here and undisturbed by the environment of the tests.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_everbus"));
        command
            .current_dir(self.directory.path())
            .env_remove("EVERBUS_DB")
            .env_remove("EVERBUS_BROKER")
            .env_remove("EVERBUS_STORE")
            .env_remove("EVERBUS_CONFIG")
            .env_remove("EVERBUS_LOG")
            .env_remove("EVERBUS_ACTOR")
            .env_remove("EVERBUS_MAX_PAYLOAD")
            .env_remove("OTEL_EXPORTER_OTLP_ENDPOINT")
            .env_remove("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
            // Or suggestions would be for `cargo run`, since that is who runs the tests.
            .env_remove("CARGO_PKG_NAME")
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        Ran::from(self.command(arguments).output().unwrap())
    }

    pub(crate) fn run_with_input(&self, arguments: &[&str], input: &str) -> Ran {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_owned();
        // A command that stops early closes its end; that is its right.
        let writer = std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        Ran::from(output)
    }

    /// Publishes `n` events of the type that the group `payment` refuses for good.
    pub(crate) fn dead_letters(&self, n: u32) -> Vec<String> {
        let url = format!("sqlite:{}", self.db().display());
        on_runtime(async {
            let bus = Bus::open(&url).await.unwrap();
            bus.subscribe("order.*")
                .group("payment")
                .name("charge")
                .handler(|| {
                    std::future::ready(Err::<(), _>(HandlerError::permanent("no \u{1b}[31mmoney")))
                })
                .await
                .unwrap();
            bus.start().await.unwrap();
            let mut ids = Vec::new();
            for order in 0..n {
                let receipt = bus.publish(("order.placed", order)).await.unwrap();
                receipt.settled().await.unwrap();
                ids.push(receipt.id().to_string());
            }
            bus.shutdown().await.unwrap();
            ids
        })
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Ran {
    /// It worked; its output.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.out
    }

    /// It failed with this exit code and this error code; what it said.
    #[track_caller]
    pub(crate) fn failed(self, exit: i32, code: &str) -> String {
        assert_eq!(self.code, exit, "{self:?}");
        assert!(
            self.err.contains(&format!("error[{code}]: ")),
            "no {code} in {self:?}"
        );
        self.err
    }

    /// One JSON value per line of output.
    #[track_caller]
    pub(crate) fn lines(self) -> Vec<Value> {
        let out = self.ok();
        out.lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
            .collect()
    }

    /// The one JSON value of the output.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        let mut lines = self.lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        lines.remove(0)
    }
}

pub(crate) fn on_runtime<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(work)
}

/// Waits for a condition, for some minutes at most.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(180);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends a signal to a process that we started.
pub(crate) fn signal(child: &Child, name: &str) {
    let kill = Command::new("kill")
        .args([name, &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
}

pub(crate) fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}
