//! The `everbus` binary as a person or a script uses it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod asyncapi;
mod basics;
mod bench;
mod config;
mod demo;
mod dlq;
mod files;
mod groups;
mod publish;
mod recovery;
mod retention;
mod support;
mod tail;
