//! Tests of the Kafka engine against real servers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a surprise here is a failed test"
)]

mod access;
mod bad_input;
mod beside;
mod conformance;
mod drops;
mod durability;
mod faults;
mod pressure;
mod publishing;
mod rebalance;
mod server;
mod work;
