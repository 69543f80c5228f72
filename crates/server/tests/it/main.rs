//! The tests of the server, in one binary.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod api;
mod bad_input;
mod browser;
mod consuming;
mod listening;
mod metrics;
mod publishing;
mod security;
mod served;
mod webdriver;
