//! The memory engine against the conformance suite and the model.
#![allow(
    clippy::unwrap_used,
    reason = "this is test code: a surprise is a failed test"
)]

mod conformance;
mod false_claims;
mod leases;
mod model;
mod real_time;
