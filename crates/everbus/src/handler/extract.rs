//! Extractors: the parameter types of handlers.

use std::any::{Any, TypeId, type_name};
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    AuditEntry, Code, Error, Event, Failure, GroupName, IntoEvent, Recorded, Timestamp,
    TraceContext, TypedEvent,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::Instant;

use crate::audit::no_trail;
use crate::environment::watch::LeaseExtensions;
use crate::handler::HandlerError;
use crate::handler::message::Message;
use crate::payloads::StoreStage;

/// An extractor: a type that a handler can take as a parameter.
///
/// Implement this trait for your own extractors. If an extractor returns an error, the attempt fails.
///
/// ```
/// use everbus::{FromMessage, HandlerError, Message, permanent};
///
/// struct Tenant(String);
///
/// impl FromMessage for Tenant {
///     fn from_message(message: &Message) -> Result<Self, HandlerError> {
///         let tenant = message.tenant().ok_or_else(|| permanent("no tenant"))?;
///         Ok(Self(tenant.to_owned()))
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be taken from an event",
    label = "not an extractor",
    note = "parameters of handlers are Payload<T>, Json<T>, Envelope, State<S>, Context, Meta, Message, Option<…> or serde_json::Value",
    note = "for a payload of your own type say Payload<{Self}> (it derives everbus::Event) or Json<{Self}> (any serde type)"
)]
pub trait FromMessage: Sized + Send {
    /// Extracts the value from a delivery.
    fn from_message(message: &Message) -> Result<Self, HandlerError>;

    /// Extracts the value for an `Option`: `None` if it is absent. A value that is present and cannot be
    /// decoded is still a failure.
    fn optional(message: &Message) -> Result<Option<Self>, HandlerError> {
        Self::from_message(message).map(Some)
    }

    /// Declares what the extractor needs, so that wrong wiring is found at start.
    fn needs(needs: &mut Needs) {
        let _ = needs;
    }
}

/// What the parameters of a handler need.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Needs {
    /// The typed payloads that it reads.
    pub payloads: Vec<PayloadNeed>,
    /// The states that it takes.
    pub states: Vec<StateNeed>,
}

/// A typed payload that a handler reads.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PayloadNeed {
    /// The event type.
    pub event_type: &'static str,
    /// The version.
    pub version: u32,
    /// The Rust type.
    pub rust_type: &'static str,
    /// The schema, if the Rust type has one.
    pub schema: Option<Value>,
    /// Events of other types are accepted too.
    pub optional: bool,
}

/// A state that a handler takes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StateNeed {
    /// The type id of the state.
    pub id: TypeId,
    /// The Rust type.
    pub rust_type: &'static str,
}

/// The payload, decoded into the Rust type of the event: the current version, or an older one through an
/// upcast. A payload of another type or an unknown version is never parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload<T>(pub T);

impl<T: TypedEvent + DeserializeOwned + Send + 'static> FromMessage for Payload<T> {
    fn from_message(message: &Message) -> Result<Self, HandlerError> {
        let upcasts = &message.handler().traits.upcasts;
        Ok(Self(upcasts.read::<T>(message.event())?))
    }

    fn optional(message: &Message) -> Result<Option<Self>, HandlerError> {
        if message.event_type() == T::TYPE {
            Self::from_message(message).map(Some)
        } else {
            Ok(None)
        }
    }

    fn needs(needs: &mut Needs) {
        needs.payloads.push(PayloadNeed {
            event_type: T::TYPE,
            version: T::VERSION,
            rust_type: type_name::<T>(),
            schema: T::schema(),
            optional: false,
        });
    }
}

/// The payload as JSON, decoded into any serde type, whatever the type and version of the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned + Send> FromMessage for Json<T> {
    fn from_message(message: &Message) -> Result<Self, HandlerError> {
        Ok(Self(message.json()?))
    }
}

impl FromMessage for Value {
    fn from_message(message: &Message) -> Result<Self, HandlerError> {
        Ok(message.json()?)
    }
}

impl FromMessage for Message {
    fn from_message(message: &Message) -> Result<Self, HandlerError> {
        Ok(message.clone())
    }
}

impl<T: FromMessage> FromMessage for Option<T> {
    fn from_message(message: &Message) -> Result<Self, HandlerError> {
        T::optional(message)
    }

    fn needs(needs: &mut Needs) {
        let mut inner = Needs::default();
        T::needs(&mut inner);
        // An optional state may be missing.
        needs
            .payloads
            .extend(inner.payloads.into_iter().map(|payload| PayloadNeed {
                optional: true,
                ..payload
            }));
    }
}

/// The whole event: id, type, times, attributes, payload. It derefs to the [`Event`].
#[derive(Clone, Debug)]
pub struct Envelope(Arc<Recorded>);

impl Deref for Envelope {
    type Target = Event;

    fn deref(&self) -> &Event {
        &self.0.event
    }
}

impl Envelope {
    /// When the bus received the event.
    pub fn received_at(&self) -> Timestamp {
        self.0.received_at
    }
}

impl FromMessage for Envelope {
    fn from_message(message: &Message) -> Result<Self, HandlerError> {
        Ok(Self(message.record().clone()))
    }
}

/// The metadata of the event: its free key-value pairs.
#[derive(Clone, Debug)]
pub struct Meta(Arc<Recorded>);

impl Meta {
    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.event.metadata().get(key).map(String::as_str)
    }

    /// All pairs, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let pairs = self.0.event.metadata().iter();
        pairs.map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

impl FromMessage for Meta {
    fn from_message(message: &Message) -> Result<Self, HandlerError> {
        Ok(Self(message.record().clone()))
    }
}

/// The limit of a progress report, in bytes: reports are kept in memory and logged.
const MOST_PROGRESS: usize = 4096;

/// The state of this delivery, and the requests that a handler can make.
#[derive(Clone, Debug)]
pub struct Context(Message);

impl Context {
    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.0.attempt()
    }

    /// After how many attempts the event fails for good.
    pub fn max_attempts(&self) -> u32 {
        self.0.max_attempts()
    }

    /// The failed attempts so far, in order.
    pub fn failures(&self) -> &[Failure] {
        self.0.failures()
    }

    /// The group that the handler belongs to.
    pub fn group(&self) -> &GroupName {
        self.0.group()
    }

    /// The key for an effect in another system (a bank, a mail service), so that the other system does it
    /// once. It is the same in every attempt, for a corrected event (`dlq edit`) and for a replayed one,
    /// although these have different ids; see [`Event::idempotency_key`](crate::Event::idempotency_key). A
    /// handler with two effects adds a suffix to tell them apart.
    pub fn idempotency_key(&self) -> String {
        self.0.idempotency_key().into_owned()
    }

    /// The correlation id; events published here carry it.
    pub fn correlation_id(&self) -> String {
        self.0.correlation_id().into_owned()
    }

    /// The trace the event belongs to.
    pub fn trace(&self) -> Option<&TraceContext> {
        self.0.attributes()?.trace.as_ref()
    }

    /// When this attempt times out.
    pub fn deadline(&self) -> Instant {
        self.0.deadline()
    }

    /// How long this attempt may still take.
    pub fn remaining(&self) -> Duration {
        self.deadline().saturating_duration_since(Instant::now())
    }

    /// Sets the time limit of this attempt to `by` from now. The lease is extended meanwhile.
    pub fn extend(&self, by: Duration) {
        self.0.extend(by);
    }

    /// Waits until the lease of this delivery is lost: the lease ended because the process stood still or
    /// the engine was not available, and the event is delivered again. The result of this attempt no longer
    /// counts, so stop work that is expensive or must not run twice at once. Waits for ever while the lease
    /// is kept.
    ///
    /// ```
    /// use everbus::{Context, HandlerError};
    ///
    /// # async fn transcode() {}
    /// async fn convert(context: Context) -> Result<(), HandlerError> {
    ///     tokio::select! {
    ///         () = transcode() => Ok(()),
    ///         () = context.lease_lost() => Err(HandlerError::new("another worker has it now")),
    ///         () = context.shutting_down() => Err(HandlerError::new("interrupted by a shutdown")),
    ///     }
    /// }
    /// # let _ = everbus::Router::new().on("media.uploaded", convert);
    /// ```
    pub async fn lease_lost(&self) {
        self.0.watch().lost().await;
    }

    /// Waits until the bus begins to shut down. From then on the handler has the time that
    /// [`Bus::shutdown_within`](crate::Bus::shutdown_within) gives; an unfinished event is delivered again.
    pub async fn shutting_down(&self) {
        match self.0.environment() {
            Some(environment) => environment.shutdown_begun().await,
            None => std::future::pending().await,
        }
    }

    /// A stream of lease extensions from now on: the runtime extends the lease three times per lease
    /// duration while the handler runs. For heartbeats that other systems watch.
    ///
    /// ```
    /// use everbus::{Context, HandlerError};
    ///
    /// # async fn transcode() {}
    /// async fn convert(context: Context) -> Result<(), HandlerError> {
    ///     let mut extensions = context.extensions();
    ///     let mut work = std::pin::pin!(transcode());
    ///     loop {
    ///         tokio::select! {
    ///             () = &mut work => return Ok(()),
    ///             next = extensions.next() => match next {
    ///                 Some(extension) => println!("mine until {}", extension.until),
    ///                 None => return Err(HandlerError::new("the lease was lost")),
    ///             },
    ///         }
    ///     }
    /// }
    /// # let _ = everbus::Router::new().on("media.uploaded", convert);
    /// ```
    pub fn extensions(&self) -> LeaseExtensions {
        LeaseExtensions::of(self.0.watch().clone())
    }

    /// Reports the progress of the handler: a short text or a small JSON value, at most 4 KiB. The last
    /// report is kept while the handler runs. It is shown by [`Bus::activities`](crate::Bus::activities),
    /// sent with each extension of the lease, and part of the error if the attempt times out.
    pub fn progress<T: Serialize + ?Sized>(&self, activity: &T) -> Result<(), Error> {
        let value = serde_json::to_value(activity).map_err(|error| {
            Error::new(Code::InvalidPayloadError, "the progress is no JSON").caused_by(error)
        })?;
        let bytes = value.to_string().len();
        if bytes > MOST_PROGRESS {
            let what = format!("the progress has {bytes} bytes, the limit is {MOST_PROGRESS}");
            return Err(Error::new(Code::PayloadTooLarge, what)
                .hint("store more than that with Context::store_payload"));
        }
        self.0.watch().report(value, self.0.now());
        Ok(())
    }

    /// Stores a payload stage of this event for debugging: the request sent, the answer received. It is
    /// kept even if the attempt fails, so that the stages of failed attempts can be inspected.
    ///
    /// ```
    /// use everbus::payloads::Stage;
    /// use everbus::{Context, HandlerResult, Json};
    /// use serde_json::{Value, json};
    ///
    /// async fn ask_agent(Json(question): Json<Value>, context: Context) -> HandlerResult {
    ///     context.store_payload(Stage::AGENT_REQUEST, &question).await?;
    ///     let (status, answer) = (200, json!({ "answer": 42 }));
    ///     context
    ///         .store_payload(Stage::AGENT_RESPONSE, &answer)
    ///         .status_code(status)
    ///         .await?;
    ///     Ok(())
    /// }
    /// ```
    pub fn store_payload<T: Serialize + ?Sized>(&self, stage: &str, value: &T) -> StoreStage {
        self.0.store_payload(stage, value)
    }

    /// Publishes an event in the same step as the ack if this attempt succeeds, and not at all otherwise.
    /// Events returned by the handler are published the same way, after these.
    pub fn publish(&self, event: impl IntoEvent) -> Result<(), Error> {
        self.0.publish(event)
    }

    /// Adds an entry to the audit trail, with the correlation id, the trace and the tenant of the handled
    /// event. It is recorded at once, even if this attempt fails; a further attempt adds it again. Without
    /// an actor ([`AuditEntry::of`]) the actor is the service, or else this handler.
    pub async fn audit(&self, mut entry: AuditEntry) -> Result<u64, Error> {
        let message = &self.0;
        let trail = message.handler().traits.audit.as_ref();
        if entry.correlation_id.is_none() {
            entry.correlation_id = Some(self.correlation_id());
        }
        if entry.trace_id.is_none() {
            entry.trace_id = self.trace().and_then(|t| t.trace_id().map(str::to_owned));
        }
        if entry.tenant.is_none() {
            entry.tenant = message.tenant().map(str::to_owned);
        }
        let trail = trail.ok_or_else(no_trail)?;
        trail.record_for(message.handler_name(), entry).await
    }
}

impl FromMessage for Context {
    fn from_message(message: &Message) -> Result<Self, HandlerError> {
        Ok(Self(message.clone()))
    }
}

/// A value that all handlers of a router share: a connection pool, a client, settings. Given with
/// [`Router::with_state`](crate::Router::with_state); a handler that takes a missing state is refused when
/// the router is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State<S>(pub S);

impl<S: Clone + Send + Sync + 'static> FromMessage for State<S> {
    fn from_message(message: &Message) -> Result<Self, HandlerError> {
        Self::optional(message)?.ok_or_else(|| {
            HandlerError::permanent(format!("there is no state of type {}", type_name::<S>()))
        })
    }

    fn optional(message: &Message) -> Result<Option<Self>, HandlerError> {
        Ok(message
            .handler()
            .traits
            .states
            .get::<S>()
            .cloned()
            .map(Self))
    }

    fn needs(needs: &mut Needs) {
        needs.states.push(StateNeed {
            id: TypeId::of::<S>(),
            rust_type: type_name::<S>(),
        });
    }
}

/// One value of each type.
#[derive(Clone, Default)]
pub(crate) struct States {
    by_type: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
}

impl States {
    pub(crate) fn insert<S: Send + Sync + 'static>(&mut self, state: S) {
        self.by_type.insert(TypeId::of::<S>(), Arc::new(state));
    }

    pub(crate) fn get<S: 'static>(&self) -> Option<&S> {
        self.by_type.get(&TypeId::of::<S>())?.downcast_ref()
    }

    pub(crate) fn has(&self, id: TypeId) -> bool {
        self.by_type.contains_key(&id)
    }

    /// Adds the states of `outer` whose types are missing here.
    pub(crate) fn adopt(&mut self, outer: &States) {
        for (id, state) in &outer.by_type {
            self.by_type.entry(*id).or_insert_with(|| state.clone());
        }
    }
}
