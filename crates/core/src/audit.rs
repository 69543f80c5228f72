//! The audit trail: who did what to which thing, when. Append-only and chained by hashes, so that a later
//! change is detected.

mod chain;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::broker::BoxFuture;
use crate::builder::MAX_ATTRIBUTE_BYTES;
use crate::error::{Code, Error, Result};
use crate::event::Entity;
use crate::history::{Order, check_range};
use crate::time::Timestamp;

pub use chain::{AuditContent, AuditHash, AuditHead};

/// The largest details of an entry, in bytes of JSON.
pub const MAX_AUDIT_DETAILS_BYTES: usize = 64 * 1024;
/// The largest page of a trail.
pub const MAX_AUDIT_PAGE: usize = 10_000;

/// One recorded action.
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
    /// The actor: a user, a service, a command.
    pub actor: String,
    /// The action, dotted: `order.refund`, `dlq.retry`.
    pub action: String,
    /// The target of the action.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entity: Option<Entity>,
    /// The tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Links everything that one request caused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correlation_id: Option<String>,
    /// The trace id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// Further details.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub details: Value,
}

impl AuditEntry {
    /// An entry with its actor and action.
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

    /// An entry without an actor: the bus that records it fills in the actor.
    pub fn of(action: impl Into<String>) -> Self {
        Self::new("", action)
    }

    /// Sets the target of the action.
    #[must_use]
    pub fn entity(mut self, kind: impl Into<String>, id: impl Into<String>) -> Self {
        self.entity = Some(Entity {
            kind: kind.into(),
            id: id.into(),
        });
        self
    }

    /// Sets the tenant.
    #[must_use]
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = Some(tenant.into());
        self
    }

    /// Links everything that one request caused.
    #[must_use]
    pub fn correlation_id(mut self, id: impl Into<String>) -> Self {
        self.correlation_id = Some(id.into());
        self
    }

    /// Sets the trace id.
    #[must_use]
    pub fn trace_id(mut self, id: impl Into<String>) -> Self {
        self.trace_id = Some(id.into());
        self
    }

    /// Sets further details.
    #[must_use]
    pub fn details(mut self, details: Value) -> Self {
        self.details = details;
        self
    }

    /// Refuses empty and too long values.
    pub fn validate(&self) -> Result<()> {
        let entity = self.entity.as_ref();
        for (name, value) in [
            ("actor", Some(&self.actor)),
            ("action", Some(&self.action)),
            ("entity type", entity.map(|e| &e.kind)),
            ("entity id", entity.map(|e| &e.id)),
            ("tenant", self.tenant.as_ref()),
            ("correlation id", self.correlation_id.as_ref()),
            ("trace id", self.trace_id.as_ref()),
        ] {
            let Some(value) = value else {
                continue;
            };
            if value.is_empty() || value.len() > MAX_ATTRIBUTE_BYTES {
                return Err(Error::new(
                    Code::InvalidAttribute,
                    format!("the {name} of an audit entry has {} bytes", value.len()),
                )
                .hint(format!("it has 1 to {MAX_ATTRIBUTE_BYTES} bytes")));
            }
        }
        let details = self.details_text().map_or(0, |text| text.len());
        if details > MAX_AUDIT_DETAILS_BYTES {
            return Err(Error::new(
                Code::InvalidAttribute,
                format!("the details of an audit entry have {details} bytes"),
            )
            .hint(format!(
                "they may have {MAX_AUDIT_DETAILS_BYTES}; store the rest elsewhere and name the place"
            )));
        }
        Ok(())
    }

    /// The details as stored: JSON text, or `None`.
    pub fn details_text(&self) -> Option<String> {
        (!self.details.is_null()).then(|| self.details.to_string())
    }

    /// The content to hash. `details` is its [`details_text`](Self::details_text).
    pub fn content<'a>(
        &'a self,
        seq: u64,
        at: Timestamp,
        details: Option<&'a str>,
    ) -> AuditContent<'a> {
        let entity = self.entity.as_ref();
        AuditContent {
            seq,
            at,
            actor: &self.actor,
            action: &self.action,
            entity_type: entity.map(|e| e.kind.as_str()),
            entity_id: entity.map(|e| e.id.as_str()),
            tenant: self.tenant.as_deref(),
            correlation_id: self.correlation_id.as_deref(),
            trace_id: self.trace_id.as_deref(),
            details,
        }
    }
}

/// An entry as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AuditRecord {
    /// Its number, from 1, without gaps.
    pub seq: u64,
    /// When it was written. Never earlier than the record before, whatever the clock does.
    pub at: Timestamp,
    /// The hash of its content and of the record before it.
    pub hash: AuditHash,
    /// The entry.
    #[serde(flatten)]
    pub entry: AuditEntry,
}

/// Selects entries. The default is the newest hundred of all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditQuery {
    /// Only by this actor.
    pub actor: Option<String>,
    /// Only this action, or with a trailing `*` those with this prefix.
    pub action: Option<String>,
    /// Only with this target.
    pub entity: Option<Entity>,
    /// Only at or after this time.
    pub since: Option<Timestamp>,
    /// Only at or before this time.
    pub until: Option<Timestamp>,
    /// The order.
    pub order: Order,
    /// At most this many, up to [`MAX_AUDIT_PAGE`]; 0 means 100.
    pub limit: usize,
    /// Where to continue: [`AuditPage::next`] of the page before.
    pub after: Option<u64>,
}

impl AuditQuery {
    /// The largest number of records in a page.
    pub fn page(&self) -> usize {
        if self.limit == 0 { 100 } else { self.limit }
    }

    /// Refuses invalid queries: a page that is too large, a range that ends before it starts.
    pub fn validate(&self) -> Result<()> {
        if self.limit > MAX_AUDIT_PAGE {
            return Err(Error::new(
                Code::InvalidSetting,
                format!("a page of {} audit records", self.limit),
            )
            .hint(format!("the limit is between 1 and {MAX_AUDIT_PAGE}")));
        }
        check_range(self.since, self.until)
    }

    /// Whether a record matches the filters, whatever its position.
    pub fn matches(&self, record: &AuditRecord) -> bool {
        let entry = &record.entry;
        let action = |wanted: &String| match wanted.strip_suffix('*') {
            Some(start) => entry.action.starts_with(start),
            None => entry.action == *wanted,
        };
        self.actor
            .as_ref()
            .is_none_or(|actor| entry.actor == *actor)
            && self.action.as_ref().is_none_or(action)
            && (self.entity.is_none() || self.entity == entry.entity)
            && self.since.is_none_or(|since| record.at >= since)
            && self.until.is_none_or(|until| record.at <= until)
    }
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

/// The result of a verification of the chain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AuditVerdict {
    /// How many records were verified.
    pub verified: u64,
    /// The first record of the chain; retention moves it forward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first: Option<u64>,
    /// The last one that was verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head: Option<AuditHead>,
    /// The first problem, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken: Option<AuditBreak>,
    /// What could not be verified, as text: for example, the head kept outside is missing.
    pub notes: Vec<String>,
    /// How many records were ahead of the head kept outside, as after a crash; that head was moved forward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mended: Option<u64>,
}

impl AuditVerdict {
    /// Whether the chain is intact.
    pub fn is_ok(&self) -> bool {
        self.broken.is_none()
    }
}

/// A break in a chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditBreak {
    /// The first bad or missing record; `None` if the problem is not a record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seq: Option<u64>,
    /// The problem.
    pub problem: String,
}

/// A store that keeps an audit trail.
pub trait Audit: Send + Sync + 'static {
    /// Adds an entry; durable on return. Returns its number.
    fn record(&self, entry: AuditEntry) -> BoxFuture<'_, Result<u64>>;

    /// One page of the trail.
    fn query(&self, query: AuditQuery) -> BoxFuture<'_, Result<AuditPage>>;

    /// The head of the chain; `None` if nothing was ever recorded.
    fn head(&self) -> BoxFuture<'_, Result<Option<AuditHead>>>;

    /// Verifies the chain from its first record, or from the anchor that retention left, to its head.
    /// Compares it with the head that the store keeps outside and with the one that the caller knows.
    fn verify(&self, known: Option<AuditHead>) -> BoxFuture<'_, Result<AuditVerdict>>;

    /// Removes the records written before a time, from the beginning only and in small steps. Returns how
    /// many. The chain stays verifiable from the anchor that is left.
    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>>;

    /// How many records [`forget`](Self::forget) would remove.
    fn forgettable(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>>;
}
