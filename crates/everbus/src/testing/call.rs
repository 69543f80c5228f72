//! One call of one handler: no bus, no engine, no pipeline.

use std::sync::Arc;

use everbus_core::{
    Delivery, Event, GroupName, IntoEvent, Lease, Pattern, Position, Recorded, TypedEvent,
};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::ambient;
use crate::handler::extract::States;
use crate::handler::message::Message;
use crate::handler::upcast::Upcasts;
use crate::handler::{Handler, HandlerOutcome, Registered, Slot};
use crate::runtime::router::Route;

/// The name of a directly called handler in logs and in [`Message::handler_name`].
const NAME: &str = "(called directly)";

/// Begins a call of a handler: its parameters are extracted from the event given to [`with`](Call::with),
/// and the result is what the bus would get.
///
/// Nothing is published, retried or recorded, and there is no timeout; a panic reaches the test. A function
/// whose parameters can all be built by hand does not need this:
/// `confirm(Payload(order), State(mailer)).await` is a normal call.
///
/// ```
/// use everbus::testing::call;
/// use everbus::{Context, Event, HandlerError, Payload, State, permanent};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, Event)]
/// #[event(type = "orders.order.placed")]
/// struct OrderPlaced { total: u64 }
///
/// #[derive(Serialize, Deserialize, Event)]
/// #[event(type = "billing.invoice.sent")]
/// struct InvoiceSent { amount: u64 }
///
/// #[derive(Clone)]
/// struct Rate(u64);
///
/// async fn invoice(
///     Payload(order): Payload<OrderPlaced>,
///     State(rate): State<Rate>,
///     context: Context,
/// ) -> Result<InvoiceSent, HandlerError> {
///     if order.total == 0 {
///         return Err(permanent(format!("nothing to pay, attempt {}", context.attempt())));
///     }
///     Ok(InvoiceSent { amount: order.total * rate.0 })
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), HandlerError> {
/// let outcome = call(invoice).state(Rate(2)).with(OrderPlaced { total: 21 }).await?;
/// assert_eq!(outcome.events()[0].typed::<InvoiceSent>()?.amount, 42);
///
/// let refused = call(invoice).state(Rate(2)).attempt(3).with(OrderPlaced { total: 0 }).await;
/// assert_eq!(refused.unwrap_err().to_string(), "nothing to pay, attempt 3");
/// # Ok(())
/// # }
/// ```
pub fn call<Args, H: Handler<Args>>(handler: H) -> Call {
    Call {
        route: Route::new(handler),
        states: States::default(),
        upcasts: Upcasts::new(),
        group: GroupName::unnamed(),
        attempt: 1,
    }
}

/// A call that is being built; see [`call`].
#[must_use = "the handler is called by `with`"]
pub struct Call {
    route: Route,
    states: States,
    upcasts: Upcasts,
    group: GroupName,
    attempt: u32,
}

impl Call {
    /// A value that the handler takes as [`State<S>`](crate::State).
    pub fn state<S: Clone + Send + Sync + 'static>(mut self, state: S) -> Self {
        self.states.insert(state);
        self
    }

    /// Converts an older version of an event to a newer one, as [`Router::upcast`](crate::Router::upcast)
    /// does.
    pub fn upcast<Old, New, F>(mut self, upcast: F) -> Self
    where
        Old: TypedEvent + DeserializeOwned + 'static,
        New: TypedEvent + DeserializeOwned + 'static,
        F: Fn(Old) -> New + Send + Sync + 'static,
    {
        self.upcasts.add(upcast);
        self
    }

    /// The group of the handler; by default the unnamed one.
    pub fn group(mut self, group: GroupName) -> Self {
        self.group = group;
        self
    }

    /// The attempt number; by default the first.
    pub fn attempt(mut self, attempt: u32) -> Self {
        self.attempt = attempt.max(1);
        self
    }

    /// Calls the handler with an event and returns its outcome. [`Outcome::events`](crate::Outcome::events)
    /// are the events it staged with [`Context::publish`](crate::Context::publish) and those it returned.
    pub async fn with(self, event: impl IntoEvent) -> HandlerOutcome {
        let event = event.into_event()?;
        let (record, message) = self.message(event)?;
        let mut slot = Slot::default();
        message.handler().call(message.clone(), &mut slot);
        let outcome = ambient::handling(record.clone(), slot).await;
        let staged = message.take_follow_ups();
        let mut outcome = outcome?;
        let events = staged
            .into_iter()
            .chain(std::mem::take(&mut outcome.events));
        outcome.events = events
            .map(|event| event.inheriting(ambient::caused_by(&record)))
            .collect();
        Ok(outcome)
    }

    fn message(self, event: Event) -> Result<(Arc<Recorded>, Message), everbus_core::Error> {
        self.upcasts.check()?;
        let received_at = event.occurred_at();
        let record = Arc::new(Recorded::new(event, Position::seq(1), received_at));
        let pattern = Pattern::new(record.event.event_type())?;
        let mut handler = Registered::new(NAME, pattern, self.route.run);
        handler.traits.states = Arc::new(self.states);
        handler.traits.upcasts = Arc::new(self.upcasts);
        let lease = Lease::new(record.position, [0, 0]);
        let delivery = Delivery::new(record.clone(), lease).after(self.attempt, Vec::new());
        let message = Message::new(
            None,
            &delivery,
            &self.group,
            &Arc::new(handler),
            Instant::now(),
        );
        Ok((record, message))
    }
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call")
            .field("group", &self.group)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}
