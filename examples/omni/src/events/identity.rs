//! Who a sender is.

use everbus::Event;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ChannelType;

/// The sender of a message is known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "identity.resolved", key = "person_id")]
pub struct IdentityResolved {
    /// The message that led to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<String>,
    /// The person.
    pub person_id: String,
    /// Their account on the platform.
    pub identity_id: String,
    /// The channel.
    pub channel: ChannelType,
    /// Their id on the platform.
    pub platform_user_id: String,
    /// Whether the person was unknown.
    pub is_new_person: bool,
    /// Whether the account was unknown.
    pub is_new_identity: bool,
    /// How certain it is that the account belongs to the person: 0 to 1.
    pub confidence: f64,
}

/// Two persons are one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "identity.merged", key = "target_person_id")]
pub struct IdentityMerged {
    /// The person who stays.
    pub target_person_id: String,
    /// The person who was the same one.
    pub source_person_id: String,
    /// The accounts that moved.
    pub merged_identity_ids: Vec<String>,
    /// Why.
    pub reason: MergeReason,
    /// What showed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Map<String, Value>>,
    /// The user id of an administrator, or `system`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged_by: Option<String>,
}

/// Why two persons are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum MergeReason {
    SamePhone,
    SameEmail,
    AdminLinked,
    UserClaimed,
}

/// What is known of an account has changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "identity.updated", key = "person_id")]
pub struct IdentityUpdated {
    /// The account.
    pub identity_id: String,
    /// Its person.
    pub person_id: String,
    /// What has changed.
    pub changes: Vec<ProfileChange>,
}

/// A field that has another value now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProfileChange {
    /// Its name.
    pub field: String,
    /// What it was; null if it was unknown.
    pub old_value: Value,
    /// What it is.
    pub new_value: Value,
}
