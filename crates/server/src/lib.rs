//! The Everbus server: HTTP API, consumers without Rust, WebSocket, dashboard and metrics.
//!
//! [`Server`] is opened on a [`Bus`](everbus::Bus) and serves until it is told to stop. `routes` is the one list
//! of routes: the router, the OpenAPI document and the security tests are made from it, and it checks the scope of
//! the caller before a handler runs. `auth` knows who calls, `api` has the handlers of `/v1`, a file per topic,
//! `listen` accepts connections within their limits.

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
