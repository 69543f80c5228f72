//! The audit trail: who did what to which thing, when. Append-only and chained by hashes, so that what
//! was written cannot be changed without somebody noticing.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::broker::BoxFuture;
use crate::error::Result;
use crate::event::Entity;
use crate::history::Order;
use crate::time::Timestamp;

/// Something that somebody did.
///
/// ```
/// use everbus_core::AuditEntry;
/// let entry = AuditEntry::new("alice", "order.refund")
///     .entity("ORDER", "123")
///     .details(serde_json::json!({ "amount": 20 }));
/// assert_eq!(entry.action, "order.refund");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// Who did it: a user, a service, a command.
    pub actor: String,
    /// What was done, dotted: `order.refund`, `dlq.retry`.
    pub action: String,
    /// To which thing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entity: Option<Entity>,
    /// For which tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Ties together everything that one request caused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correlation_id: Option<String>,
    /// The trace it happened in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// Anything else worth knowing.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub details: Value,
}

impl AuditEntry {
    /// An entry: who, and what.
    pub fn new(actor: impl Into<String>, action: impl Into<String>) -> Self {
        Self {
            actor: actor.into(),
            action: action.into(),
            entity: None,
            tenant: None,
            correlation_id: None,
            trace_id: None,
            details: Value::Null,
        }
    }

    /// To which thing.
    #[must_use]
    pub fn entity(mut self, kind: impl Into<String>, id: impl Into<String>) -> Self {
        self.entity = Some(Entity {
            kind: kind.into(),
            id: id.into(),
        });
        self
    }

    /// For which tenant.
    #[must_use]
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = Some(tenant.into());
        self
    }

    /// Ties together everything that one request caused.
    #[must_use]
    pub fn correlation_id(mut self, id: impl Into<String>) -> Self {
        self.correlation_id = Some(id.into());
        self
    }

    /// The trace it happened in.
    #[must_use]
    pub fn trace_id(mut self, id: impl Into<String>) -> Self {
        self.trace_id = Some(id.into());
        self
    }

    /// Anything else worth knowing.
    #[must_use]
    pub fn details(mut self, details: Value) -> Self {
        self.details = details;
        self
    }
}

/// An entry as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AuditRecord {
    /// Its number, from 1, without gaps.
    pub seq: u64,
    /// When it was written.
    pub at: Timestamp,
    /// The hash of the record before it and of its own content, in hex.
    pub hash: String,
    /// What was done.
    #[serde(flatten)]
    pub entry: AuditEntry,
}

/// Which entries. The default is the newest hundred of all.
#[derive(Clone, Debug, Default)]
pub struct AuditQuery {
    /// Only by this actor.
    pub actor: Option<String>,
    /// Only this action, or with a trailing `*` those that begin so.
    pub action: Option<String>,
    /// Only on this thing.
    pub entity: Option<Entity>,
    /// Only at or after this time.
    pub since: Option<Timestamp>,
    /// Only at or before this time.
    pub until: Option<Timestamp>,
    /// Which way to read.
    pub order: Order,
    /// At most this many; 0 means 100.
    pub limit: usize,
    /// Where to go on: [`AuditPage::next`] of the page before.
    pub after: Option<u64>,
}

/// One page of the trail.
#[derive(Clone, Debug, Serialize)]
pub struct AuditPage {
    /// The records.
    pub items: Vec<AuditRecord>,
    /// Where the next page begins, if there may be one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

/// What a verification of the chain found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditVerdict {
    /// How many records were verified.
    pub verified: u64,
    /// The first record of the chain; retention moves it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first: Option<u64>,
    /// The last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<u64>,
    /// The first thing that is wrong, if something is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken: Option<AuditBreak>,
    /// What could not be verified, for people: the head kept outside is missing, for example.
    pub notes: Vec<String>,
}

impl AuditVerdict {
    /// Whether the chain is whole.
    pub fn is_ok(&self) -> bool {
        self.broken.is_none()
    }
}

/// Where a chain is broken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditBreak {
    /// The first bad record, or the first that is missing.
    pub seq: u64,
    /// What is wrong with it.
    pub problem: String,
}

/// A store that keeps an audit trail.
pub trait Audit: Send + Sync + 'static {
    /// Adds an entry; durable on return. Returns its number.
    fn record(&self, entry: AuditEntry) -> BoxFuture<'_, Result<u64>>;

    /// One page of the trail.
    fn query(&self, query: AuditQuery) -> BoxFuture<'_, Result<AuditPage>>;

    /// Verifies the chain from its first record, or the anchor retention left, to its head, and the
    /// head against the one kept outside.
    fn verify(&self) -> BoxFuture<'_, Result<AuditVerdict>>;
}
