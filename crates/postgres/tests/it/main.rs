//! The PostgreSQL engine against real servers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    reason = "tests"
)]

mod conformance;
mod horizon;
mod model;
mod support;
