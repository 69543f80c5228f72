//! The `everbus` binary as a person or a script uses it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod asyncapi;
mod basics;
mod bench;
mod config;
mod demo;
mod dlq;
mod dlq_bulk;
mod dlq_edit;
mod files;
mod groups;
mod publish;
mod recovery;
mod support;
mod tail;
