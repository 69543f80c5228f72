//! The SQLite engine against the conformance suite, the model, and bad luck.

mod conformance;
mod model;
