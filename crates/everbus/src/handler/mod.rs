//! Handlers: plain async functions and closures, whatever they take and return.
//!
//! A function is a handler if each of its parameters can be taken from a delivery ([`FromMessage`])
//! and what it returns says what is to happen ([`IntoOutcome`]).

pub(crate) mod debug;
mod decode;
mod error;
pub(crate) mod extract;
pub(crate) mod layers;
pub(crate) mod message;
pub mod middleware;
pub(crate) mod outcome;
mod registered;
mod slot;
mod subscription_id;
pub(crate) mod upcast;

use std::future::Future;

use crate::handler::extract::{FromMessage, Needs};
use crate::handler::message::Message;
use crate::handler::outcome::{IntoOutcome, Outcome, Returns};

pub use decode::Decode;
pub(crate) use error::{Answer, MOST_EVENTS, unpublished};
pub use error::{BoxError, HandlerError, HandlerResult, handled, permanent, retry_after, skip};
pub(crate) use registered::{DEFAULT_TIMEOUT, Registered, Run, Traits};
pub use slot::Slot;
pub use subscription_id::SubscriptionId;

/// The result of a run of a handler.
pub type HandlerOutcome = Result<Outcome, HandlerError>;

/// An async function or closure that handles events.
///
/// Implemented for functions of up to eight parameters that can each be taken from a delivery
/// ([`FromMessage`]) and whose result says what is to happen ([`IntoOutcome`]).
///
/// ```
/// use everbus::{Context, Event, HandlerError, Payload, State, permanent};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, Event)]
/// #[event(type = "orders.order.placed")]
/// struct OrderPlaced { order: u64, total: u64 }
///
/// #[derive(Serialize, Deserialize, Event)]
/// #[event(type = "billing.invoice.sent")]
/// struct InvoiceSent { order: u64 }
///
/// #[derive(Clone)]
/// struct Mailer;
///
/// // The event it returns is appended in the same step as the ack.
/// async fn invoice(
///     Payload(order): Payload<OrderPlaced>,
///     State(mailer): State<Mailer>,
///     context: Context,
/// ) -> Result<InvoiceSent, HandlerError> {
///     if order.total == 0 {
///         return Err(permanent("nothing to pay")); // a dead letter at once
///     }
///     println!("attempt {}", context.attempt());
///     Ok(InvoiceSent { order: order.order })
/// }
/// # let _ = everbus::Router::new().on("orders.order.placed", invoice);
/// ```
///
/// [`#[debug_handler]`](crate::debug_handler) on a function makes the compiler say why it is not a handler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler",
    label = "not an async function of things that can be taken from an event",
    note = "a handler is an async function of up to eight extractors (Payload<T>, Json<T>, Envelope, State<S>, Context, Meta, Message, Option<…>, serde_json::Value)",
    note = "it returns (), an event, several events, or a Result of those with any error type",
    note = "a closure that ends in Ok(()) does not say its error type: end it with everbus::handled()",
    note = "`#[everbus::debug_handler]` on the function says which part of it is at fault"
)]
pub trait Handler<Args>: Send + Sync + 'static {
    /// Begins a run for one delivery: its future is put into the slot.
    #[doc(hidden)]
    fn call(&self, message: Message, slot: &mut Slot);

    /// What it takes.
    #[doc(hidden)]
    fn needs() -> Needs;

    /// What it returns.
    #[doc(hidden)]
    fn returns() -> Returns;
}

macro_rules! functions {
    ($($arg:ident)*) => {
        impl<F, Fut, R, $($arg,)*> Handler<($($arg,)*)> for F
        where
            F: Fn($($arg,)*) -> Fut + Send + Sync + 'static,
            Fut: Future<Output = R> + Send + 'static,
            R: IntoOutcome + 'static,
            $($arg: FromMessage + 'static,)*
        {
            #[allow(non_snake_case, unused_variables, reason = "named after the parameters; one arity has none")]
            fn call(&self, message: Message, slot: &mut Slot) {
                $(
                    let $arg = match $arg::from_message(&message) {
                        Ok(value) => value,
                        Err(error) => return slot.put(std::future::ready(Err(error))),
                    };
                )*
                let run = self($($arg,)*);
                slot.put(async move { run.await.into_outcome() });
            }

            #[allow(unused_mut, reason = "one arity has no parameters")]
            fn needs() -> Needs {
                let mut needs = Needs::default();
                $($arg::needs(&mut needs);)*
                needs
            }

            fn returns() -> Returns {
                let mut returns = Returns::default();
                R::returns(&mut returns);
                returns
            }
        }
    };
}

functions!();
functions!(A);
functions!(A B);
functions!(A B C);
functions!(A B C D);
functions!(A B C D E);
functions!(A B C D E G);
functions!(A B C D E G H);
functions!(A B C D E G H I);
