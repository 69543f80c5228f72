//! The memory engine against the conformance suite and the model.

mod conformance;
mod model;
