//! A registered handler: the user's function with the settings of its subscription.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus_core::{EventId, GroupName, Pattern, RetryPolicy};

use super::SubscriptionId;
use super::{Decode, HandlerError, Slot};
use crate::audit::AuditTrail;
use crate::breaker::{Breaker, Criticality};
use crate::guard;
use crate::handler::extract::States;
use crate::handler::message::Message;
use crate::handler::upcast::Upcasts;
use crate::schema::Schema;

/// How long an attempt may take.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// The user's function, with the layers around it.
pub(crate) type Run = Arc<dyn Fn(Message, &mut Slot) + Send + Sync>;

/// The settings of a handler besides its function.
#[derive(Clone, Default)]
pub(crate) struct Traits {
    pub(crate) states: Arc<States>,
    pub(crate) upcasts: Arc<Upcasts>,
    /// The schema of the subscription.
    pub(crate) schema: Option<Arc<Schema>>,
    /// Older events are skipped.
    pub(crate) max_staleness: Option<Duration>,
    pub(crate) breaker: Option<Breaker>,
    pub(crate) criticality: Criticality,
    /// What happens to an event that cannot be decoded.
    pub(crate) decode: Decode,
    /// An event that fails for good is skipped instead of becoming a dead letter.
    pub(crate) drop_failed: bool,
    /// Handled events are recorded in the inbox and not handled again.
    pub(crate) idempotent: bool,
    /// How many events the group holds at most in this process; `None`: as the bus says.
    pub(crate) prefetch: Option<usize>,
    /// How long a delivery is leased; `None`: the timeout and a margin.
    pub(crate) lease: Option<Duration>,
    /// The audit trail of the bus it runs on.
    pub(crate) audit: Option<AuditTrail>,
}

/// A registered handler with the settings of its subscription.
pub(crate) struct Registered {
    /// The id that the engine gave the subscription.
    pub(crate) id: SubscriptionId,
    pub(crate) group: GroupName,
    pub(crate) name: String,
    pub(crate) pattern: Pattern,
    pub(crate) retry: RetryPolicy,
    pub(crate) timeout: Duration,
    pub(crate) traits: Traits,
    run: Run,
    removed: AtomicBool,
}

impl Registered {
    /// A handler of the unnamed group with the default settings, and an id of its own.
    pub(crate) fn new(name: impl Into<String>, pattern: Pattern, run: Run) -> Self {
        Self {
            id: EventId::new().into(),
            group: GroupName::unnamed(),
            name: name.into(),
            pattern,
            retry: RetryPolicy::default(),
            timeout: DEFAULT_TIMEOUT,
            traits: Traits::default(),
            run,
            removed: AtomicBool::new(false),
        }
    }

    /// Begins a run: its future is put into the slot.
    pub(crate) fn call(&self, message: Message, slot: &mut Slot) {
        (self.run)(message, slot);
    }

    /// Whether an event whose probe failed waits for the breaker: the handler is critical, and a retry may
    /// help.
    pub(crate) fn waits_after(&self, error: &HandlerError) -> bool {
        self.traits.criticality == Criticality::Critical && error.is_worth_a_retry()
    }

    /// Queued deliveries will not call this handler any more.
    pub(crate) fn remove(&self) {
        self.removed.store(true, Ordering::Release);
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }
}

impl Drop for Registered {
    /// The user's function may panic when it is dropped. This must not kill the task that holds the last
    /// reference.
    fn drop(&mut self) {
        let nothing: Run = Arc::new(|_, _| {});
        let run = std::mem::replace(&mut self.run, nothing);
        if let Err(error) = guard::contain(|| drop(run)) {
            let handler = self.name.as_str();
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", handler, error, "a handler panicked while it was dropped");
            });
        }
    }
}
