//! Tests of tasks and jobs.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "this is test code: a surprise is a failed test"
)]

mod crash;
mod dispatching;
mod golden;
mod keeping;
mod producing;
mod states;
mod support;
