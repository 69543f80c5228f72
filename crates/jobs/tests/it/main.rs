//! Tests of tasks and jobs.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "this is test code: a surprise is a failed test"
)]

mod alerts;
#[cfg(any(feature = "kafka", feature = "nats", feature = "redis"))]
mod beside;
mod crash;
mod dispatching;
mod golden;
mod halves;
mod health;
mod keeping;
mod narrow;
#[cfg(feature = "postgres")]
mod postgres;
mod producing;
mod random_jobs;
mod schedule;
mod states;
mod support;
mod worker;
