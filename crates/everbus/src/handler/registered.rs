//! A registered handler: the user's function with the settings of its subscription.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus_core::{BoxFuture, Pattern, RetryPolicy};

use super::SubscriptionId;
use super::{Decode, HandlerError, HandlerOutcome};
use crate::audit::AuditTrail;
use crate::breaker::{Breaker, Criticality};
use crate::guard;
use crate::handler::extract::States;
use crate::handler::message::Message;
use crate::handler::upcast::Upcasts;
use crate::schema::Schema;

/// The user's function, with the layers around it.
pub(crate) type Run = Box<dyn Fn(Message) -> BoxFuture<'static, HandlerOutcome> + Send + Sync>;

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
    /// The audit trail of the bus it runs on.
    pub(crate) audit: Option<AuditTrail>,
}

/// A registered handler with the settings of its subscription.
pub(crate) struct Registered {
    pub(crate) id: SubscriptionId,
    pub(crate) name: String,
    pub(crate) pattern: Pattern,
    pub(crate) retry: RetryPolicy,
    pub(crate) timeout: Duration,
    pub(crate) traits: Traits,
    run: Run,
    removed: AtomicBool,
}

impl Registered {
    pub(crate) fn new(
        id: SubscriptionId,
        name: String,
        pattern: Pattern,
        retry: RetryPolicy,
        timeout: Duration,
        traits: Traits,
        run: Run,
    ) -> Self {
        Self {
            id,
            name,
            pattern,
            retry,
            timeout,
            traits,
            run,
            removed: AtomicBool::new(false),
        }
    }

    pub(crate) fn call(&self, message: Message) -> BoxFuture<'static, HandlerOutcome> {
        (self.run)(message)
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
        let nothing: Run = Box::new(|_| Box::pin(std::future::pending()));
        let run = std::mem::replace(&mut self.run, nothing);
        if let Err(error) = guard::contain(|| drop(run)) {
            let handler = self.name.as_str();
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", handler, error, "a handler panicked while it was dropped");
            });
        }
    }
}
