//! Counts the instructions per event in the pipeline with callgrind: a figure that does not depend on other
//! work of the machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::Failed;

/// The modes of the bench, and what each of them includes.
const PARTS: &[(&str, &str)] = &[
    ("publish", "publish to the memory engine"),
    ("engine", "publish, fetch, bare call, settle"),
    ("plain", "the same through the pipeline"),
    ("all", "the same with inbox, staleness and breaker"),
];
/// Event counts of two runs; their difference leaves out the cost of the start.
const RUNS: (u64, u64) = (5_000, 15_000);

pub(crate) fn count(root: &Path) -> Result<(), Failed> {
    let binary = build(root)?;
    println!("instructions per event");
    for (part, meaning) in PARTS {
        let few = collected(&binary, RUNS.0, part)?;
        let many = collected(&binary, RUNS.1, part)?;
        let each = many.saturating_sub(few) / (RUNS.1 - RUNS.0);
        println!("{part:>8}  {each:>7}  {meaning}");
    }
    Ok(())
}

/// Builds the bench and finds its program.
fn build(root: &Path) -> Result<PathBuf, Failed> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let bench = [
        "bench",
        "--package",
        "everbus",
        "--bench",
        "instructions",
        "--no-run",
    ];
    let built = Command::new(cargo).args(bench).current_dir(root).output();
    let built = built.map_err(|e| Failed::new(format!("cargo does not run: {e}")))?;
    let said = String::from_utf8_lossy(&built.stderr);
    let path = said.lines().find_map(|line| {
        line.trim()
            .strip_prefix("Executable")?
            .split(['(', ')'])
            .nth(1)
    });
    match path.filter(|_| built.status.success()) {
        Some(path) => Ok(root.join(path)),
        None => Err(Failed::new(format!("the bench was not built:\n{said}"))),
    }
}

fn collected(binary: &Path, events: u64, part: &str) -> Result<u64, Failed> {
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(binary)
        .args([&events.to_string(), part])
        .output()
        .map_err(|e| Failed::new(format!("valgrind does not run: {e}; install it first")))?;
    let said = String::from_utf8_lossy(&run.stderr);
    let count = said
        .lines()
        .find_map(|line| line.split("Collected :").nth(1)?.trim().parse().ok());
    count.ok_or_else(|| Failed::new(format!("valgrind counted nothing:\n{said}")))
}
