//! The tests that prove Everbus's guarantees.
//!
//! - [`conformance`]: the scenarios every engine passes unchanged; an engine's crate runs them with
//!   [`conformance_tests!`].
//! - [`model`]: a seeded random plan of operations, compared step by step with a plain model.
//! - [`narrow`]: an engine that offers only the required verbs and fails on demand.
//! - [`chaos`]: the never-lost checker, and campaigns that kill a real process and cut its power.
//! - [`faults`]: the never-lost campaign for engines with a server.
//! - [`servers`]: private servers that tests start, kill and pause, and a proxy that cuts connections.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "this crate is test code: a surprise is a failed test"
)]

pub mod chaos;
pub mod conformance;
pub mod faults;
pub mod model;
pub mod narrow;
pub mod servers;
