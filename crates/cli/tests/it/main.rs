//! The `everbus` binary as a person or a script uses it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod addressed;
mod asyncapi;
mod audit;
mod basics;
mod bench;
mod bridge;
mod config;
mod consume;
#[cfg(any(feature = "postgres", all(feature = "redis", feature = "kafka")))]
mod cut_over;
mod demo;
mod dialects;
mod dlq;
mod dlq_bulk;
mod dlq_edit;
mod events;
mod files;
mod get;
mod groups;
mod jobs;
#[cfg(feature = "kafka")]
mod kafka;
mod limits;
mod objects;
mod outbox;
mod outbox_operators;
mod overflow;
mod payloads;
mod publish;
mod recovery;
mod replay;
mod retention;
mod serve;
mod serve_shared;
#[cfg(all(feature = "postgres", feature = "nats"))]
mod servers;
mod store;
mod streams;
mod support;
mod tail;
#[cfg(feature = "otlp")]
mod telemetry;
mod worker;
