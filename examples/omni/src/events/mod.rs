//! The nineteen events of the system, with every field of their specification.
//!
//! Field names are camelCase in JSON. A field that may be missing is left out when it is `None`. Times are RFC
//! 3339 texts. What the specification leaves open is decided here:
//!
//! | type | choice |
//! |---|---|
//! | [`ChannelType`] | a text in kebab-case (`whatsapp-baileys`, `discord`, …): a new channel needs no new build |
//! | [`MediaAttachment`] | the fields of `media.received`, with a file name and a caption |
//! | [`AgentAction`] | a kind and its parameters |
//! | [`AccessRule`] | the rule of `access.checked`, with priority, instance and expiry |

mod access;
mod agent;
mod channel;
mod identity;
mod media;
mod message;
mod shared;

pub use access::{AccessChecked, AccessRuleChanged, Decision, MatchedRule, RuleAction, RuleType};
pub use agent::{
    AgentConfig, AgentError, AgentMetadata, AgentReply, AgentRequest, AgentResponse, Role, Turn,
};
pub use channel::{
    ChannelConnected, ChannelDisconnected, ChannelQrCode, ConnectionInfo, DisconnectReason,
};
pub use identity::{IdentityMerged, IdentityResolved, IdentityUpdated, MergeReason, ProfileChange};
pub use media::{
    MediaFailed, MediaProcessed, MediaProcessing, MediaReceived, MediaResult, MediaType,
    ProcessorType,
};
pub use message::{
    Contact, ContentType, DeliveryStatus, Location, MessageContent, MessageReceived,
    MessageSending, MessageSent, MessageStatus, Poll, Protocol, ProtocolAction, Reaction,
    Recipient, Sender, SentMetadata, SentStatus,
};
pub use shared::{AccessRule, AgentAction, ChannelType, Dimensions, MediaAttachment};

use everbus::TypedEvent;

/// The types of all events.
pub const TYPES: [&str; 19] = [
    MessageReceived::TYPE,
    MessageSending::TYPE,
    MessageSent::TYPE,
    MessageStatus::TYPE,
    IdentityResolved::TYPE,
    IdentityMerged::TYPE,
    IdentityUpdated::TYPE,
    MediaReceived::TYPE,
    MediaProcessing::TYPE,
    MediaProcessed::TYPE,
    MediaFailed::TYPE,
    AgentRequest::TYPE,
    AgentResponse::TYPE,
    AgentError::TYPE,
    AccessChecked::TYPE,
    AccessRuleChanged::TYPE,
    ChannelConnected::TYPE,
    ChannelDisconnected::TYPE,
    ChannelQrCode::TYPE,
];
