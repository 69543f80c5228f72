//! The dialects from outside: golden documents, the identity, bad input, and what is dropped.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod address;
mod cloudevents;
mod documents;
mod dropped;
mod events;
mod framework;
mod hostile;
mod http;
mod identity;
mod native;
mod omni;
mod outbox;
mod spelling;
mod stored;
mod support;
mod workflow;
mod workflow_queries;
