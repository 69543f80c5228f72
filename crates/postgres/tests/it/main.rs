//! The PostgreSQL engine against real servers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    reason = "tests"
)]

mod append;
mod bad_input;
mod bounds;
mod conformance;
mod effects;
mod faults;
mod horizon;
mod odd_values;
mod outbox;
mod pooler;
mod store;
mod support;
mod wake;
