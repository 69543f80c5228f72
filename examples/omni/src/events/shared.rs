//! Types that several events share. The specification names them and leaves their fields open.

use std::fmt;

use everbus::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::access::RuleType;
use super::media::MediaType;

/// A messaging platform: `whatsapp-baileys`, `whatsapp-cloud`, `discord`, `slack`, `telegram`, …
///
/// It is a text, because a channel is a plug-in: events of a channel that this build does not know are read,
/// kept and passed on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ChannelType(pub String);

impl From<&str> for ChannelType {
    fn from(name: &str) -> Self {
        Self(name.to_owned())
    }
}

impl fmt::Display for ChannelType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Width and height in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dimensions {
    /// Width.
    pub width: u32,
    /// Height.
    pub height: u32,
}

/// A file that belongs to a message. A choice: the fields of `media.received`, with a file name and a caption.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MediaAttachment {
    /// The id of the file, unique in the system.
    pub media_id: String,
    /// What kind of file it is.
    #[serde(rename = "type")]
    pub media_type: MediaType,
    /// Its MIME type.
    pub mime_type: String,
    /// Its size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Where it can be fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Its length in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<f64>,
    /// Its size in pixels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dimensions: Option<Dimensions>,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filename: Option<String>,
    /// The text below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caption: Option<String>,
}

/// An action that an agent asks the system to perform. A choice: a kind and its parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentAction {
    /// What to do: `handoff`, `close_conversation`, `tag`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// The parameters.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub parameters: Map<String, Value>,
}

/// Who may write to whom. A choice: the rule of `access.checked`, with what a list of rules needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AccessRule {
    /// Its id.
    pub id: String,
    /// Whether it allows or denies.
    #[serde(rename = "type")]
    pub rule_type: RuleType,
    /// The senders to which it applies.
    pub criteria: Value,
    /// The rule with the highest priority decides.
    #[serde(default)]
    pub priority: i32,
    /// The only instance to which it applies, if set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// When the rule expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
}
