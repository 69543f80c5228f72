//! Subscriptions, from what a program asks for to what the dispatcher runs. A subscription has four forms:
//! [`Subscribe`](subscribe::Subscribe), the builder; [`Route`](crate::Route), a handler and its settings;
//! [`Subscription`](super::router::Subscription), a route with the settings of its routers; and
//! [`Registered`](crate::handler::Registered), what runs.
//!
//! - `subscribe`: the builder that a program uses.
//! - `settings`: the settings given at one level; missing ones are inherited.
//! - `prepare`: from a route of a router to a registered handler, with every setting resolved.
//! - `agreed`: the settings that all subscriptions of one group share.
//! - `registry`: the subscriptions of a bus.

mod agreed;
mod prepare;
pub(crate) mod registry;
pub(crate) mod settings;
pub(crate) mod subscribe;
