//! Subscriptions, from what a program asks for to what the dispatcher runs.
//!
//! - `subscribe`: the builder that a program uses.
//! - `settings`: the settings given at one level; missing ones are inherited.
//! - `request`: a subscription with every setting resolved.
//! - `agreed`: the settings that all subscriptions of one group share.
//! - `registry`: the subscriptions of a bus.

mod agreed;
pub(crate) mod registry;
mod request;
pub(crate) mod settings;
pub(crate) mod subscribe;
