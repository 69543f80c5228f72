//! The shapes of what the API answers, for the OpenAPI document. The values themselves are those of the library.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

/// An event in the log.
#[derive(Serialize, JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct EventShape {
    /// A UUID.
    id: String,
    /// Its place in the log: a number, or a text on an engine with several logs.
    seq: Value,
    /// `domain.entity.action`.
    #[serde(rename = "type")]
    event_type: String,
    /// The version of the payload.
    version: u32,
    /// When it happened.
    occurred_at: String,
    /// When it was stored.
    received_at: String,
    /// Who emitted it.
    source: Option<String>,
    /// The tenant.
    tenant: Option<String>,
    /// The app.
    app: Option<String>,
    /// What it is about.
    entity: Option<EntityShape>,
    /// Links everything that one request caused.
    correlation_id: String,
    /// The event that caused it.
    causation_id: Option<String>,
    /// Texts beside the payload.
    metadata: Option<BTreeMap<String, String>>,
    /// The payload, if it is JSON.
    payload: Value,
}

/// What an event is about.
#[derive(Serialize, JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct EntityShape {
    #[serde(rename = "type")]
    kind: String,
    id: String,
}

/// The state of an event in a group.
#[derive(Serialize, JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct GroupStateShape {
    group: String,
    /// `pending`, `processing`, `done` or `dlq`.
    state: String,
    attempts: u32,
    failures: Vec<FailureShape>,
    /// When the next attempt is due.
    due_at: Option<String>,
    /// Why the group skipped it.
    skipped: Option<String>,
}

/// A failed attempt.
#[derive(Serialize, JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(crate) struct FailureShape {
    attempt: u32,
    at: String,
    /// `error`, `permanent`, `timeout`, `panic`, `crash`, `decode` and others.
    kind: String,
    handler: Option<String>,
    error: String,
    took_us: Option<u64>,
    worker: Option<String>,
}
