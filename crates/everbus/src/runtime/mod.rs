//! The runtime: what happens to an event between `publish` and the settlement of its last delivery.
//!
//! - `bus`: the handle that programs hold; publishing, starting, shutting down.
//! - `router` and `subscription`: the handlers and their settings.
//! - `dispatch`: fetches deliveries of a group, hands them to workers, extends leases, settles outcomes.
//! - `pipeline`: takes one delivery through the layers around its handlers, and judges the outcome.

mod alert;
pub(crate) mod bus;
mod circuits;
mod dispatch;
mod drops;
mod lag;
pub(crate) mod options;
pub(crate) mod pauses;
mod pipeline;
pub(crate) mod receipt;
mod retention;
pub(crate) mod router;
pub(crate) mod shutdown;
pub(crate) mod subscription;
mod trace;
