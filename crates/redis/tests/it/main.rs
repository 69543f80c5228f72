//! Tests of the Redis engine against real servers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a surprise here is a failed test"
)]

mod beside;
mod conformance;
mod server;
mod valkey;
