//! Runs one test binary for cargo, and decides how many of its tests run at a time.
//!
//! Tests of an engine with a server mostly wait: for a retry that is due, a lease that ends, a server that restarts.
//! With one test per processor the machine would be idle for most of that time.

use std::path::Path;
use std::process::Command;

use crate::run::Failed;

/// The first argument with which cargo calls this program.
pub(crate) const TASK: &str = "run-test";
/// The number of tests at a time, for the test harness.
const THREADS: &str = "RUST_TEST_THREADS";
/// Packages whose tests mostly wait, and how many of them run at a time for each processor.
const WAITING: &[(&str, usize)] = &[
    ("everbus-cli", 2),
    ("everbus-kafka", 2),
    ("everbus-nats", 4),
    ("everbus-postgres", 2),
    ("everbus-redis", 4),
    ("everbus-testkit", 2),
];

/// The setting that makes cargo run each test binary with [`run`].
pub(crate) fn setting() -> Option<String> {
    let xtask = std::env::current_exe().ok()?;
    let xtask = xtask.to_str()?;
    // A path in a literal string of TOML cannot have a quote.
    (!xtask.contains('\'')).then(|| format!("target.'cfg(all())'.runner=['{xtask}', '{TASK}']"))
}

/// Runs a test binary; `arguments` are the binary and its arguments.
pub(crate) fn run(arguments: &[String]) -> Result<(), Failed> {
    let [program, arguments @ ..] = arguments else {
        return Err(Failed::usage(format!("{TASK} takes a program")));
    };
    let mut command = Command::new(Path::new(program));
    command.args(arguments);
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let waiting = WAITING.iter().find(|(name, _)| *name == package);
    if let (Some((_, tests)), None) = (waiting, std::env::var_os(THREADS)) {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        command.env(THREADS, (processors * tests).to_string());
    }
    let failed = |why: String| Failed::new(format!("{program}: {why}"));
    let status = command.status().map_err(|e| failed(e.to_string()))?;
    match status.success() {
        true => Ok(()),
        false => Err(failed(status.to_string())),
    }
}
