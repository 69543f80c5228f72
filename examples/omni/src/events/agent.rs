//! Questions to an agent, and its answers.

use everbus::{Event, Timestamp};
use serde::{Deserialize, Serialize};

use super::{AgentAction, MediaAttachment};

/// An agent is to answer a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "agent.request", key = "message_id")]
pub struct AgentRequest {
    /// The message.
    pub message_id: String,
    /// Who wrote it.
    pub person_id: String,
    /// The instance it came in on.
    pub instance_id: String,
    /// Its content, with transcriptions of its files.
    pub enriched_content: String,
    /// Earlier messages of the conversation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<Vec<Turn>>,
    /// Which agent answers, and how.
    pub agent_config: AgentConfig,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Who wrote it.
    pub role: Role,
    /// The text.
    pub content: String,
    /// When it was written.
    pub timestamp: Timestamp,
}

/// The author of a message in a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum Role {
    User,
    Assistant,
}

/// Which agent answers, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentConfig {
    /// Its address.
    pub api_url: String,
    /// How long to wait for it, in milliseconds.
    pub timeout: u64,
    /// Whether its answer comes in pieces.
    pub streaming: bool,
}

/// An agent answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "agent.response", key = "message_id")]
pub struct AgentResponse {
    /// The message it answers.
    pub message_id: String,
    /// The answer.
    pub response: AgentReply,
    /// Model, tokens and time of the answer.
    pub metadata: AgentMetadata,
}

/// The answer of an agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AgentReply {
    /// Its text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Its files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media: Option<Vec<MediaAttachment>>,
    /// Actions that the agent asks the system to perform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actions: Option<Vec<AgentAction>>,
}

/// Model, tokens and time of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentMetadata {
    /// How many tokens the model used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_used: Option<u64>,
    /// How long it took, in milliseconds.
    pub latency_ms: u64,
    /// The model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Whether it came in pieces.
    pub streaming: bool,
}

/// An attempt to ask an agent failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "agent.error", key = "message_id")]
pub struct AgentError {
    /// The message.
    pub message_id: String,
    /// Why.
    pub error: String,
    /// How many attempts failed before this one.
    pub retry_count: u32,
    /// Whether there is another attempt.
    pub will_retry: bool,
}
