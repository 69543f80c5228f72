//! Who may write to whom.

use everbus::Event;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::AccessRule;

/// The access rules were checked for a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "access.checked", key = "message_id")]
pub struct AccessChecked {
    /// The message.
    pub message_id: String,
    /// The person who wrote it.
    pub person_id: String,
    /// The account of this person.
    pub identity_id: String,
    /// The instance it came in on.
    pub instance_id: String,
    /// Whether it may pass.
    pub decision: Decision,
    /// The rule that decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<MatchedRule>,
    /// Why.
    pub reason: String,
}

/// Whether a message may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum Decision {
    Allow,
    Deny,
}

/// Whether a rule allows or denies.
pub type RuleType = Decision;

/// The rule that decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatchedRule {
    /// Its id.
    pub id: String,
    /// Whether it allows or denies.
    #[serde(rename = "type")]
    pub rule_type: RuleType,
    /// The senders to which it applies.
    pub criteria: Value,
}

/// A rule was created, changed or deleted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "access.rule_changed", key = "rule_id")]
pub struct AccessRuleChanged {
    /// The rule.
    pub rule_id: String,
    /// What happened to it.
    pub action: RuleAction,
    /// The rule after the change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<AccessRule>,
    /// Who did it.
    pub changed_by: String,
}

/// What happened to a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum RuleAction {
    Created,
    Updated,
    Deleted,
}
