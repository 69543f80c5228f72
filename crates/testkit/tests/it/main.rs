//! The never-lost checker finds what is planted, and short campaigns find nothing.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    reason = "a surprise here is a failed test"
)]

mod beside;
mod checker;
mod conformance;
mod faults;
mod hostile;
mod kills;
mod memory;
mod narrow;
mod opening;
mod power;
mod relay;
mod servers;
mod store_first;
mod zombie;

use std::path::Path;

/// The program whose victims are killed.
fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_everbus-chaos"))
}

/// A seed of its own for each run, printed so that a failure can be repeated.
fn seed() -> u64 {
    let seed = everbus_testkit::model::Random::seed_from_env().unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.unwrap().as_micros() as u64
    });
    eprintln!("EVERBUS_SEED={seed}");
    seed
}
