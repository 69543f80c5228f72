//! Tests of the NATS engine against real servers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a surprise here is a failed test"
)]

mod bad_input;
mod beside;
mod changes;
mod conformance;
mod dialects;
mod drops;
mod faults;
mod ordered;
mod server;
mod streams;
