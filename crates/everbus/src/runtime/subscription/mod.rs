//! Subscriptions, from what a program asks for to what the dispatcher runs.
//!
//! - `subscribe`: the builder that a program uses.
//! - `settings`: what was said at one level; what was not said is inherited.
//! - `request`: a subscription with everything decided.
//! - `agreed`: what all subscriptions of one group have in common.
//! - `registry`: the subscriptions of a bus.

mod agreed;
pub(crate) mod registry;
mod request;
pub(crate) mod settings;
pub(crate) mod subscribe;
