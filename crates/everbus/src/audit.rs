//! The audit trail: who did what. Programs write to it through [`Bus::audit`](crate::Bus::audit), handlers
//! through [`Context::audit`](crate::Context::audit). The bus itself records what operators do to it: once
//! before the operation, and once with its result.

use std::future::Future;
use std::sync::Arc;

use everbus_core::{
    AuditEntry, AuditHead, AuditPage, AuditQuery, AuditVerdict, Code, DeadLetterFilter, Engine,
    Entity, Error, Result,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::ambient;
pub use crate::ambient::Operator;

/// An error of an operation is recorded up to this length.
const LONGEST_ERROR: usize = 1000;

/// Runs a future; every change to a bus in it is recorded as done by this operator.
pub fn with_operator<F: Future>(operator: Operator, future: F) -> impl Future<Output = F::Output> {
    ambient::with_operator(operator, future)
}

/// An action of an operator.
///
/// ```
/// use everbus::audit::Action;
/// use serde_json::json;
/// let action = Action::new("groups.remove").on("GROUP", "mail").detail("behind", json!(12));
/// ```
#[derive(Clone, Debug)]
pub struct Action {
    name: String,
    entity: Option<Entity>,
    details: Map<String, Value>,
}

impl Action {
    /// An action, dotted: `dlq.retry`.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            entity: None,
            details: Map::new(),
        }
    }

    /// The target of the action: `("GROUP", "mail")`, `("EVENT", &id)`.
    #[must_use]
    pub fn on(mut self, kind: &str, id: &(impl ToString + ?Sized)) -> Self {
        self.entity = Some(Entity {
            kind: kind.to_owned(),
            id: id.to_string(),
        });
        self
    }

    /// Adds a detail. A null value is left out.
    #[must_use]
    pub fn detail(mut self, name: &str, value: Value) -> Self {
        if !value.is_null() {
            self.details.insert(name.to_owned(), value);
        }
        self
    }

    /// Adds the filter of the dead letters concerned.
    #[must_use]
    pub fn filter(self, filter: &DeadLetterFilter) -> Self {
        let text = |value: Option<String>| value.map_or(Value::Null, Value::String);
        self.detail(
            "type",
            text(filter.pattern.as_ref().map(ToString::to_string)),
        )
        .detail(
            "group",
            text(filter.group.as_ref().map(ToString::to_string)),
        )
        .detail("id", text(filter.id.map(|id| id.to_string())))
        .detail("since", text(filter.since.map(|t| t.to_string())))
        .detail("until", text(filter.until.map(|t| t.to_string())))
        .detail("died_until", text(filter.died_until.map(|t| t.to_string())))
        .detail("tenant", text(filter.tenant.clone()))
        .detail("handler", text(filter.handler.clone()))
        .detail("error", text(filter.error.clone()))
    }

    fn entry(&self, operator: &Operator, suffix: &str, details: Map<String, Value>) -> AuditEntry {
        let mut entry = AuditEntry::new(operator.actor.clone(), format!("{}{suffix}", self.name));
        entry.entity.clone_from(&self.entity);
        if !details.is_empty() {
            entry.details = Value::Object(details);
        }
        surrounded(entry)
    }
}

impl From<&str> for Action {
    fn from(name: &str) -> Self {
        Self::new(name)
    }
}

/// Runs an operation for an operator and records it: before it runs under the name of the action, and
/// afterwards as `….done` with its result, or `….failed` with the error.
///
/// If the first record cannot be written, the operation does not run. On an engine without an audit trail
/// the operation runs without a record.
///
/// ```
/// use everbus::audit::{Action, Operator, audited};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// # let bus = everbus::Bus::open("memory:").await?;
/// let engine = bus.engine();
/// let letters = engine.dead_letters()?;
/// let operator = Operator::new("alice");
/// audited(engine, &operator, "dlq.retry", letters.retry(Default::default())).await?;
/// # Ok(())
/// # }
/// ```
pub async fn audited<T: Serialize>(
    engine: &Engine,
    operator: &Operator,
    action: impl Into<Action>,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let Some(audit) = engine.audit.as_deref() else {
        return work.await;
    };
    let action = action.into();
    let mut details = action.details.clone();
    if let Some(reason) = &operator.reason {
        details.insert("reason".into(), reason.clone().into());
    }
    let began = match audit.record(action.entry(operator, "", details)).await {
        Err(error) if error.code() == Code::Unsupported => return work.await,
        began => began?,
    };
    let result = work.await;
    let mut details = Map::from_iter([("of".to_owned(), json!(began))]);
    let suffix = match &result {
        Ok(value) => {
            let value = serde_json::to_value(value).unwrap_or(Value::Null);
            if !value.is_null() {
                details.insert("result".into(), value);
            }
            ".done"
        }
        Err(error) => {
            let message: String = error.message().chars().take(LONGEST_ERROR).collect();
            details.insert("code".into(), error.code().as_str().into());
            details.insert("error".into(), message.into());
            ".failed"
        }
    };
    let mut entry = action.entry(operator, suffix, details);
    if entry.validate().is_err() {
        // The result is too long for the record.
        entry.details = json!({ "of": began });
    }
    if let Err(error) = audit.record(entry).await {
        tracing::warn!(target: "everbus::audit", action = action.name, %error, "the result of an operation could not be recorded");
    }
    result
}

/// Adds the ambient values of this task: the correlation id and the trace.
pub(crate) fn surrounded(mut entry: AuditEntry) -> AuditEntry {
    if entry.correlation_id.is_none() {
        entry.correlation_id = ambient::correlation_id();
    }
    if entry.trace_id.is_none() {
        entry.trace_id = ambient::trace_id();
    }
    entry
}

/// The audit trail of a bus.
///
/// ```
/// use everbus::{AuditEntry, Bus, with_correlation_id};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let bus = Bus::builder().source("shop").open("memory:").await?;
/// let refund = AuditEntry::new("alice", "order.refund").entity("ORDER", "123");
/// with_correlation_id("request-7", bus.audit().record(refund)).await?;
/// bus.audit().record(AuditEntry::of("order.archive")).await?; // by the service itself
/// let page = bus.audit().query(Default::default()).await?;
/// assert_eq!(page.items[0].entry.actor, "shop");
/// assert_eq!(page.items[1].entry.correlation_id.as_deref(), Some("request-7"));
/// assert!(bus.audit().verify().await?.is_ok());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct AuditTrail {
    engine: Engine,
    source: Option<Arc<str>>,
}

impl AuditTrail {
    pub(crate) fn new(engine: Engine, source: Option<Arc<str>>) -> Self {
        Self { engine, source }
    }

    /// The current operator: the one around this task, or the service of this bus.
    pub(crate) fn operator(&self) -> Operator {
        ambient::operator().unwrap_or_else(|| self.service("bus"))
    }

    /// The service, or `otherwise` if it has no name.
    fn service(&self, otherwise: &str) -> Operator {
        Operator::new(self.source.as_deref().unwrap_or(otherwise))
    }

    /// Adds an entry; durable on return. Returns its number.
    ///
    /// Adds the correlation id and the trace of this task, unless the entry has them. An entry without an
    /// actor ([`AuditEntry::of`]) is recorded as done by the current operator, or by the service of this
    /// bus.
    pub async fn record(&self, mut entry: AuditEntry) -> Result<u64> {
        if entry.actor.is_empty() {
            entry.actor = self.operator().actor;
        }
        self.engine.audit()?.record(surrounded(entry)).await
    }

    /// As [`record`](Self::record), for a handler.
    pub(crate) async fn record_for(&self, handler: &str, mut entry: AuditEntry) -> Result<u64> {
        if entry.actor.is_empty() {
            let operator = ambient::operator().unwrap_or_else(|| self.service(handler));
            entry.actor = operator.actor;
        }
        self.record(entry).await
    }

    /// One page of the trail.
    pub async fn query(&self, query: AuditQuery) -> Result<AuditPage> {
        self.engine.audit()?.query(query).await
    }

    /// The head of the chain. Keep a copy outside the file to prove later that nothing up to it was
    /// changed.
    pub async fn head(&self) -> Result<Option<AuditHead>> {
        self.engine.audit()?.head().await
    }

    /// Verifies the whole chain.
    pub async fn verify(&self) -> Result<AuditVerdict> {
        self.engine.audit()?.verify(None).await
    }

    /// Verifies the whole chain, and that it still contains a record that was its head before.
    pub async fn verify_against(&self, head: AuditHead) -> Result<AuditVerdict> {
        self.engine.audit()?.verify(Some(head)).await
    }
}

impl std::fmt::Debug for AuditTrail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuditTrail").finish_non_exhaustive()
    }
}

/// The error of a handler that is called without a bus.
pub(crate) fn no_trail() -> Error {
    Error::new(
        Code::Unsupported,
        "there is no bus with an audit trail here",
    )
    .hint("run the handler on a bus, or on a TestBus")
}
