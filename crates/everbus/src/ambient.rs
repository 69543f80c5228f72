//! The ambient values of a publish: the correlation id, the event being handled, the trace.
//!
//! They belong to the current task, and every event published in it inherits them. A spawned task or thread
//! does not inherit them by itself; move a [`Scope`] into it.

use std::future::Future;
use std::sync::Arc;

use everbus_core::builder::MAX_ATTRIBUTE_BYTES;
use everbus_core::{Code, Error, Event, Inherited, Recorded, Result, TraceContext};

tokio::task_local! {
    static AMBIENT: Ambient;
}

#[derive(Clone, Default)]
struct Ambient {
    correlation_id: Option<Arc<str>>,
    trace: Option<Arc<TraceContext>>,
    /// The event being handled. The other values come from it.
    handling: Option<Arc<Recorded>>,
    /// The operator for whom the bus is changed.
    operator: Option<Arc<Operator>>,
}

/// The person, service or command for whom a bus is changed, and why.
///
/// ```
/// use everbus::audit::{Operator, with_operator};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// # let bus = everbus::Bus::open("memory:").await?;
/// let alice = Operator::new("alice").reason("the mail server is back");
/// with_operator(alice, bus.dead_letters().retry_all(Default::default())).await?;
/// let page = bus.audit().query(Default::default()).await?;
/// assert_eq!(page.items[0].entry.action, "dlq.retry.done");
/// assert_eq!(page.items[1].entry.actor, "alice");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operator {
    /// The actor: a person, a service, a command.
    pub actor: String,
    /// The reason, in the actor's own words.
    pub reason: Option<String>,
}

impl Operator {
    /// An operator without a reason.
    pub fn new(actor: impl Into<String>) -> Self {
        Self {
            actor: actor.into(),
            reason: None,
        }
    }

    /// The current operator: the one of [`with_operator`](crate::audit::with_operator) around this task, or `bus`.
    pub fn current() -> Self {
        operator().unwrap_or_else(|| Self::new("bus"))
    }

    /// Adds the reason.
    #[must_use]
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = Some(reason.into());
        self
    }
}

/// The ambient values of a publish: the correlation id, the trace, the event being handled. A spawned task
/// or thread loses them unless it gets the scope.
///
/// ```
/// use everbus::{Scope, correlation_id, with_correlation_id};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// with_correlation_id("request-7", async {
///     let scope = Scope::current();
///     let id = tokio::task::spawn_blocking(move || scope.enter(correlation_id));
///     assert_eq!(id.await.unwrap().as_deref(), Some("request-7"));
///     let task = Scope::current().wrap(async { correlation_id() });
///     assert_eq!(tokio::spawn(task).await.unwrap().as_deref(), Some("request-7"));
/// })
/// .await;
/// # }
/// ```
#[derive(Clone, Default)]
pub struct Scope(Ambient);

impl Scope {
    /// The ambient values of this task; may be empty.
    pub fn current() -> Self {
        Self(AMBIENT.try_with(Clone::clone).unwrap_or_default())
    }

    /// A scope with only this correlation id, for synchronous code: a thread, a command.
    pub fn with_correlation_id(id: impl Into<String>) -> Self {
        let id: Arc<str> = id.into().into();
        Self(Ambient {
            correlation_id: Some(id),
            ..Ambient::default()
        })
    }

    /// Runs a function in this scope, for example an `enqueue` on a blocking thread.
    pub fn enter<T>(self, run: impl FnOnce() -> T) -> T {
        AMBIENT.sync_scope(self.0, run)
    }

    /// Runs a future in this scope, for example a task to spawn.
    pub fn wrap<F: Future>(self, future: F) -> impl Future<Output = F::Output> {
        AMBIENT.scope(self.0, future)
    }
}

impl std::fmt::Debug for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").finish_non_exhaustive()
    }
}

/// Runs a future; every event published in it carries this correlation id, unless the event has one.
///
/// ```
/// use everbus::{Bus, with_correlation_id};
/// use serde_json::json;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let bus = Bus::open("memory:").await?;
/// let receipt = with_correlation_id("request-7", bus.publish(("user.created", json!({})))).await?;
/// let stored = bus.lookup()?.find(receipt.id()).await?;
/// assert_eq!(stored[0].event.correlation_id(), "request-7");
/// # Ok(())
/// # }
/// ```
pub fn with_correlation_id<F: Future>(
    id: impl Into<String>,
    future: F,
) -> impl Future<Output = F::Output> {
    let id: Arc<str> = id.into().into();
    within(|ambient| ambient.correlation_id = Some(id), future)
}

/// Runs a future; every event published in it belongs to this trace, unless the event has one.
pub fn with_trace<F: Future>(trace: TraceContext, future: F) -> impl Future<Output = F::Output> {
    within(|ambient| ambient.trace = Some(Arc::new(trace)), future)
}

/// Runs a future; every change to a bus in it is recorded as done by this operator.
pub(crate) fn with_operator<F: Future>(
    operator: Operator,
    future: F,
) -> impl Future<Output = F::Output> {
    within(
        |ambient| ambient.operator = Some(Arc::new(operator)),
        future,
    )
}

/// The operator of this task, if there is one.
pub(crate) fn operator() -> Option<Operator> {
    let operator = AMBIENT.try_with(|ambient| ambient.operator.clone());
    operator.ok().flatten().map(|operator| (*operator).clone())
}

/// The trace of this task, if there is one.
pub(crate) fn trace_id() -> Option<String> {
    let trace = current_span_trace().or_else(|| {
        let inherited = AMBIENT.try_with(Ambient::inherited);
        inherited.ok().and_then(|inherited| inherited.trace)
    });
    trace.and_then(|trace| trace.trace_id().map(str::to_owned))
}

/// Changes the ambient values for a future, starting from those at its first poll.
async fn within<F: Future>(change: impl FnOnce(&mut Ambient), future: F) -> F::Output {
    let mut ambient = AMBIENT.try_with(Clone::clone).unwrap_or_default();
    change(&mut ambient);
    AMBIENT.scope(ambient, future).await
}

/// The correlation id of this task, if there is one.
pub fn correlation_id() -> Option<String> {
    AMBIENT
        .try_with(
            |ambient| match (&ambient.correlation_id, &ambient.handling) {
                (Some(id), _) => Some(id.to_string()),
                (None, Some(record)) => Some(record.event.correlation_id().into_owned()),
                (None, None) => None,
            },
        )
        .ok()
        .flatten()
}

/// Runs the handler of an event.
pub(crate) fn handling<F: Future>(
    record: Arc<Recorded>,
    future: F,
) -> impl Future<Output = F::Output> {
    let ambient = Ambient {
        handling: Some(record),
        ..Ambient::default()
    };
    AMBIENT.scope(ambient, future)
}

/// As [`handling`], for a synchronous function.
pub(crate) fn handling_now<T>(record: Arc<Recorded>, run: impl FnOnce() -> T) -> T {
    let ambient = Ambient {
        handling: Some(record),
        ..Ambient::default()
    };
    AMBIENT.sync_scope(ambient, run)
}

/// Adds the ambient values to an event. Allocates nothing if there are none.
pub(crate) fn inherit(event: Event, source: Option<&Arc<str>>) -> Result<Event> {
    let mut inherited = AMBIENT.try_with(Ambient::inherited).unwrap_or_default();
    if let Some(trace) = current_span_trace() {
        inherited.trace = Some(trace);
    }
    let has_source = |event: &Event| event.attributes().is_some_and(|a| a.source.is_some());
    if let Some(source) = source
        && !has_source(&event)
    {
        inherited.source = Some(source.to_string());
    }
    if let Some(id) = &inherited.correlation_id
        && (id.is_empty() || id.len() > MAX_ATTRIBUTE_BYTES)
    {
        return Err(Error::new(
            Code::InvalidAttribute,
            format!(
                "the correlation id around this publish has {} bytes",
                id.len()
            ),
        )
        .hint(format!("it has 1 to {MAX_ATTRIBUTE_BYTES} bytes")));
    }
    Ok(event.inheriting(inherited))
}

/// The values that an event inherits from the event whose handling caused it.
pub(crate) fn caused_by(cause: &Recorded) -> Inherited {
    let mut inherited = Inherited::default();
    inherited.correlation_id = Some(cause.event.correlation_id().into_owned());
    inherited.causation_id = Some(cause.event.id().to_string());
    inherited.trace = cause.event.attributes().and_then(|a| a.trace.clone());
    inherited
}

/// As [`caused_by`], for events that a handler emits: they belong to the span of the handler, if that is
/// part of a trace, and to the service.
pub(crate) fn emitted_by(cause: &Recorded, source: Option<&Arc<str>>) -> Inherited {
    let mut inherited = caused_by(cause);
    if let Some(trace) = current_span_trace() {
        inherited.trace = Some(trace);
    }
    inherited.source = source.map(ToString::to_string);
    inherited
}

impl Ambient {
    fn inherited(&self) -> Inherited {
        let mut inherited = match &self.handling {
            Some(cause) => caused_by(cause),
            None => Inherited::default(),
        };
        if let Some(id) = &self.correlation_id {
            inherited.correlation_id = Some(id.to_string());
        }
        if let Some(trace) = &self.trace {
            inherited.trace = Some((**trace).clone());
        }
        inherited
    }
}

#[cfg(not(feature = "otel"))]
fn current_span_trace() -> Option<TraceContext> {
    None
}

#[cfg(feature = "otel")]
fn current_span_trace() -> Option<TraceContext> {
    crate::otel::current()
}
