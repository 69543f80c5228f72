//! A seeded random plan of operations on an engine, compared step by step with a plain model of the
//! delivery rules.
//!
//! [`run_seeds`] is what an engine's tests call. A failure prints its seed and the last steps;
//! `EVERBUS_SEED=…` runs that plan alone.

mod compare;
mod dead;
mod drops;
mod oracle;
mod plan;
pub mod random;
mod redeliver;

pub use plan::run_model;
pub use random::Random;

use crate::conformance::{Harness, Outcome};

/// Runs plans of `steps` steps for each seed, each on a fresh harness. `EVERBUS_SEED` runs only that.
pub async fn run_seeds<H: Harness>(
    make: impl Fn() -> H,
    seeds: impl IntoIterator<Item = u64>,
    steps: usize,
) -> Outcome {
    let seeds = match Random::seed_from_env() {
        Some(seed) => vec![seed],
        None => seeds.into_iter().collect(),
    };
    let mut outcome = None;
    for seed in seeds {
        outcome = Some(Box::pin(run_model(make(), seed, steps)).await?);
    }
    Ok(outcome.expect("a seed"))
}
