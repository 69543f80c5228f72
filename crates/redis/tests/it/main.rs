//! Tests of the Redis engine against real servers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a surprise here is a failed test"
)]

mod bad_input;
mod beside;
mod bridge;
mod claims;
mod configured;
mod conformance;
mod failure_modes;
mod faststream;
mod faults;
mod letters;
mod others;
mod plain;
mod server;
mod valkey;
