//! The Everbus server: HTTP API, consumers without Rust, WebSocket, dashboard and metrics.
//!
//! [`Server`] is bound on a [`Bus`](everbus::Bus) and serves until it is told to stop. `routes` checks the scope of the
//! caller before a handler runs; the router, the OpenAPI document and the security tests are made from the same list of
//! routes. `auth` identifies callers, `api` has the handlers of `/v1` with a file per topic, and `listen` accepts
//! connections within limits.

mod api;
pub mod auth;
mod body;
mod consumers;
mod dashboard;
mod demo;
mod figures;
mod guard;
mod listen;
mod live;
mod metrics;
mod openapi;
mod options;
mod problem;
mod processes;
pub mod routes;
mod server;
mod sse;
mod state;
mod tasks;
mod timer;
mod ws;

pub use crate::metrics::Metrics;
pub use auth::{Caller, Scope};
pub use consumers::mount_consumer;
pub use options::{Limits, MetricsCompat, ServerOptions, Tls, WebSocketLimits};
pub use problem::Problem;
pub use server::Server;
pub use state::AppState;
