//! The bus on every embedded engine: the checklist of the specification, line by line.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

mod audit;
mod breaker;
mod bridge;
mod config;
mod configured;
mod correlation;
mod dead_letters;
mod delayed;
mod dispatch;
mod dropping;
mod duplicator;
mod edges;
mod ephemeral;
mod exactly_once;
mod faults;
mod faulty;
mod handlers;
mod killed;
mod kv;
mod layers;
mod leftovers;
mod logs;
mod middleware;
mod outage;
mod outbox;
mod outbox_blame;
mod outbox_keep;
mod outbox_replay;
mod overflow;
mod panics;
mod payloads;
mod pipeline_order;
mod publish;
mod replay;
mod retention;
mod retry;
mod reuse;
mod reviving;
mod router;
mod shutdown;
mod staleness;
mod stats;
mod streams;
mod subscribe;
mod support;
mod test_bus;
mod typed;
mod unavailable;
mod wiring;
#[cfg(feature = "workers")]
mod workers;
