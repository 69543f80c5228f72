//! The tests of the server, in one binary.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    clippy::large_futures,
    reason = "a test may panic, says what it skips, and runs its futures once"
)]

mod api;
mod bad_input;
mod browser;
mod clients;
mod consuming;
mod hardened;
mod jobs;
mod listening;
mod metrics;
mod publishing;
mod retention;
mod security;
mod served;
mod tenants;
mod tls;
mod webdriver;
