//! Who a sender is.

use everbus::Event;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ChannelType;

/// The sender of a message was identified.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "identity.resolved", key = "person_id")]
pub struct IdentityResolved {
    /// The message that led to this.
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

/// Two persons turned out to be the same person, and were merged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "identity.merged", key = "target_person_id")]
pub struct IdentityMerged {
    /// The person that remains.
    pub target_person_id: String,
    /// The person that was merged into it.
    pub source_person_id: String,
    /// The accounts that moved.
    pub merged_identity_ids: Vec<String>,
    /// Why.
    pub reason: MergeReason,
    /// The evidence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Map<String, Value>>,
    /// The user id of an administrator, or `system`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged_by: Option<String>,
}

/// Why two persons were merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum MergeReason {
    SamePhone,
    SameEmail,
    AdminLinked,
    UserClaimed,
}

/// The profile of an account has changed.
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

/// One changed field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProfileChange {
    /// Its name.
    pub field: String,
    /// The old value; null if it was unknown.
    pub old_value: Value,
    /// The new value.
    pub new_value: Value,
}
