//! Tests of the NATS engine against a real server.

mod beside;
mod conformance;
mod server;
