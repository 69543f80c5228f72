//! Messages that came in and go out.

use everbus::{Event, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{ChannelType, MediaAttachment};

/// A message came in from a channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "message.received", key = "external_conversation_id")]
pub struct MessageReceived {
    /// The id of the message in this system.
    pub message_id: String,
    /// Its id on the platform.
    pub external_message_id: String,
    /// The channel.
    pub channel: ChannelType,
    /// The instance of the channel: one account on the platform.
    pub instance_id: String,
    /// Who sent it, before the identity is resolved.
    pub sender: Sender,
    /// The conversation in this system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conversation_id: Option<String>,
    /// The conversation on the platform.
    pub external_conversation_id: String,
    /// What it says.
    pub content: MessageContent,
    /// When the platform received it.
    pub platform_timestamp: Timestamp,
    /// What the platform sent, for debugging.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raw_payload: Option<Value>,
}

/// The sender of a message, as the platform names them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Sender {
    /// Their id on the platform.
    pub platform_user_id: String,
    /// Their name on the platform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform_username: Option<String>,
    /// Profile data from the platform: `phone`, `email`, `name`, …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile_data: Option<Map<String, Value>>,
}

/// The content of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MessageContent {
    /// Which of the fields below is used.
    #[serde(rename = "type")]
    pub content_type: ContentType,
    /// Its text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Its files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media: Option<Vec<MediaAttachment>>,
    /// A reaction to another message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reaction: Option<Reaction>,
    /// A poll, or the answer to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll: Option<Poll>,
    /// A place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<Location>,
    /// A contact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contact: Option<Contact>,
    /// An edit, a deletion, …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
}

impl MessageContent {
    /// A plain text.
    pub fn text(text: impl Into<String>) -> Self {
        Self {
            content_type: ContentType::Text,
            text: Some(text.into()),
            media: None,
            reaction: None,
            poll: None,
            location: None,
            contact: None,
            protocol: None,
        }
    }
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum ContentType {
    Text,
    Image,
    Audio,
    Video,
    Document,
    Sticker,
    Reaction,
    Poll,
    Location,
    Contact,
    Protocol,
}

/// A reaction to another message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reaction {
    /// The emoji.
    pub emoji: String,
    /// The message it is about.
    pub target_message_id: String,
}

/// A poll, or the answer to one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Poll {
    /// The question.
    pub question: String,
    /// The possible answers.
    pub options: Vec<String>,
    /// The chosen ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selected_options: Option<Vec<String>>,
}

/// A place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Location {
    /// Degrees north.
    pub latitude: f64,
    /// Degrees east.
    pub longitude: f64,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A contact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contact {
    /// Their name.
    pub name: String,
    /// Their phone number.
    pub phone: String,
}

/// A message about another message: an edit, a deletion, …
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Protocol {
    /// What happened.
    pub action: ProtocolAction,
    /// More about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Value>,
}

/// What happened to another message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum ProtocolAction {
    Edit,
    Delete,
    Revoke,
    Ephemeral,
}

/// A message is to be sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "message.sending", key = "message_id")]
pub struct MessageSending {
    /// The id of the message in this system.
    pub message_id: String,
    /// The instance that sends it.
    pub instance_id: String,
    /// The channel.
    pub channel: ChannelType,
    /// Who gets it.
    pub recipient: Recipient,
    /// What it says.
    pub content: MessageContent,
    /// The message it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply_to: Option<String>,
}

/// Who gets a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Recipient {
    /// Their id on the platform.
    pub platform_user_id: String,
    /// The conversation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conversation_id: Option<String>,
}

/// A message was handed to the platform.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "message.sent", key = "message_id")]
pub struct MessageSent {
    /// The id of the message in this system.
    pub message_id: String,
    /// Its id on the platform.
    pub external_message_id: String,
    /// The result of sending.
    pub status: SentStatus,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// How long it took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<SentMetadata>,
}

/// The result of sending a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum SentStatus {
    Sent,
    Delivered,
    Read,
    Failed,
}

/// How long the platform took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SentMetadata {
    /// In milliseconds.
    pub latency_ms: u64,
}

/// The platform reports the delivery status of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "message.status", key = "message_id")]
pub struct MessageStatus {
    /// The id of the message in this system.
    pub message_id: String,
    /// Its id on the platform.
    pub external_message_id: String,
    /// The delivery status.
    pub status: DeliveryStatus,
    /// Since when it has this status.
    pub timestamp: Timestamp,
}

/// The delivery status of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum DeliveryStatus {
    Pending,
    Sent,
    Delivered,
    Read,
    Failed,
}
