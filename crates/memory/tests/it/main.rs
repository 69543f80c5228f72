//! The memory engine against the conformance suite and the model.

mod conformance;
mod false_claims;
mod model;
mod real_time;
