//! The system on a file, and with the feature `nats` the same on a real NATS server.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod events;
mod flow;
#[cfg(feature = "nats")]
mod interop;
mod support;
