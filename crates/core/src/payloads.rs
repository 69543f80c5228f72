//! Payload stages: the payload of an event at each step of its way, kept beside it for debugging.
//!
//! The raw body of a webhook, the request to an agent, its answer: each is a *stage* of an event. A stage
//! is stored compressed, kept for a shorter time than the event, and deleted with it.

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;
use serde::{Serialize, Serializer};

use crate::broker::BoxFuture;
use crate::error::{Code, Error, Result};
use crate::event::Event;
use crate::id::EventId;
use crate::time::Timestamp;

/// A stage name has at most this many characters.
pub const MAX_STAGE_CHARS: usize = 50;
/// A payload over this many bytes counts as large by default.
pub const LARGE_PAYLOAD: u64 = 50_000;

/// The name of a stage: one of the five known names, or any other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stage(String);

impl Stage {
    /// The raw webhook payload from a channel.
    pub const WEBHOOK_RAW: &str = "webhook_raw";
    /// The request sent to an agent.
    pub const AGENT_REQUEST: &str = "agent_request";
    /// The response of an agent.
    pub const AGENT_RESPONSE: &str = "agent_response";
    /// The request sent to a channel for delivery.
    pub const CHANNEL_SEND: &str = "channel_send";
    /// The error.
    pub const ERROR: &str = "error";
    /// The known stages.
    pub const KNOWN: [&str; 5] = [
        Self::WEBHOOK_RAW,
        Self::AGENT_REQUEST,
        Self::AGENT_RESPONSE,
        Self::CHANNEL_SEND,
        Self::ERROR,
    ];

    /// A stage: 1 to 50 printable characters.
    pub fn new(name: &str) -> Result<Self> {
        let bad = name.is_empty()
            || name.chars().count() > MAX_STAGE_CHARS
            || name.chars().any(char::is_control);
        if bad {
            return Err(Error::new(
                Code::InvalidAttribute,
                format!("{name:?} is not the name of a stage"),
            )
            .hint(format!(
                "a stage is 1 to {MAX_STAGE_CHARS} printable characters, for example {}",
                Self::KNOWN.join(", ")
            )));
        }
        Ok(Self(name.to_owned()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Stage {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::new(s)
    }
}

impl Serialize for Stage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// Identifies an event in a store: ids are unique per tenant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct EventKey {
    /// The id.
    pub id: EventId,
    /// The tenant, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
}

impl EventKey {
    /// The key of this event.
    pub fn of(event: &Event) -> Self {
        Self {
            id: event.id(),
            tenant: event.tenant().map(str::to_owned),
        }
    }
}

impl From<&Event> for EventKey {
    fn from(event: &Event) -> Self {
        Self::of(event)
    }
}

impl From<EventId> for EventKey {
    /// An event without a tenant.
    fn from(id: EventId) -> Self {
        Self { id, tenant: None }
    }
}

/// The metadata of a stored stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StageInfo {
    /// Which stage.
    pub stage: Stage,
    /// When it was stored.
    pub timestamp: Timestamp,
    /// The size before compression, in bytes.
    pub payload_size_original: u64,
    /// The size as stored, in bytes.
    pub payload_size_compressed: u64,
    /// The HTTP status, where there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status_code: Option<u16>,
    /// The error text, if there was an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_details: Option<String>,
    /// Whether the payload contains the address of a picture, film, sound or document.
    pub contains_media: bool,
    /// Whether the payload contains the word base64, or is long enough to contain base64 data.
    pub contains_base64: bool,
}

/// One stored stage of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredStage {
    /// Its metadata.
    pub info: StageInfo,
    /// The content, compressed with gzip.
    pub compressed: Bytes,
}

/// A store that keeps payload stages.
pub trait Payloads: Send + Sync + 'static {
    /// Stores a stage of an event. The event keeps its earlier stages, also those of the same name.
    /// [`Code::NotFound`] without the event.
    fn store(&self, event: EventKey, stage: StoredStage) -> BoxFuture<'_, Result<()>>;

    /// The stages of an event, oldest first; those of one name, or all.
    fn stages(
        &self,
        event: EventKey,
        stage: Option<Stage>,
    ) -> BoxFuture<'_, Result<Vec<StoredStage>>>;

    /// The largest stages of all events, largest first: those of more than `over` bytes before
    /// compression, at most `limit`.
    fn largest(&self, over: u64, limit: usize)
    -> BoxFuture<'_, Result<Vec<(EventKey, StageInfo)>>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: omni/payload-stage-names: the five stages are known, names have up to 50 characters
    #[test]
    fn stages_have_names_of_up_to_fifty_characters() {
        for known in Stage::KNOWN {
            assert_eq!(Stage::new(known).unwrap().as_str(), known);
        }
        assert!(Stage::new(&"ä".repeat(50)).is_ok());
        for bad in ["", "a\nb", &"x".repeat(51)] {
            let error = Stage::new(bad).unwrap_err();
            assert_eq!(error.code(), Code::InvalidAttribute);
        }
    }
}
