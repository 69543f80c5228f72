//! Tests of the NATS engine against real servers.

mod bad_input;
mod beside;
mod conformance;
mod dialects;
mod faults;
mod server;
mod streams;
