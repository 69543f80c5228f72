//! A route: a handler with its settings, before it is mounted on a bus.

use std::sync::Arc;

use crate::handler::extract::Needs;
use crate::handler::outcome::Returns;
use crate::handler::{Handler, Run};
use crate::runtime::subscription::settings::{Settings, setters};

/// A handler with its settings; made by [`to`].
#[derive(Clone)]
#[must_use = "a route takes effect in a router"]
pub struct Route {
    pub(crate) run: Run,
    pub(crate) needs: Needs,
    pub(crate) returns: Returns,
    pub(crate) settings: Settings,
}

/// Begins a route to a handler: `on("user.*", to(greet).timeout(…))`.
pub fn to<Args, H: Handler<Args>>(handler: H) -> Route {
    Route::new(handler)
}

impl Route {
    pub(crate) fn new<Args, H: Handler<Args>>(handler: H) -> Self {
        Self {
            run: Arc::new(move |message, slot| handler.call(message, slot)),
            needs: H::needs(),
            returns: H::returns(),
            settings: Settings::default(),
        }
    }

    setters!();

    /// The name of the subscription in its group. It identifies the subscription after a restart, and logs
    /// and dead letters use it for the handler. The default is the pattern, with `#2`, `#3` added where the
    /// group has the pattern already.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.settings.name = Some(name.into());
        self
    }
}

impl std::fmt::Debug for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Route")
            .field("name", &self.settings.name)
            .finish_non_exhaustive()
    }
}

/// The argument of [`Router::on`](crate::Router::on): a handler, or a [`Route`] to one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler",
    label = "neither an async function of extractors nor a route made by `to`",
    note = "a handler is an async function of up to eight extractors (Payload<T>, Json<T>, Envelope, State<S>, Context, Meta, Message, Option<…>, serde_json::Value)",
    note = "it returns (), an event, several events, or a Result of those with any error type",
    note = "a closure that ends in Ok(()) does not say its error type: end it with everbus::handled()",
    note = "`#[everbus::debug_handler]` on the function says which part of it is at fault"
)]
pub trait IntoRoute<Args> {
    /// The route.
    fn into_route(self) -> Route;
}

impl<Args, H: Handler<Args>> IntoRoute<(Args,)> for H {
    fn into_route(self) -> Route {
        Route::new(self)
    }
}

/// Marks a [`Route`] as the argument of `Router::on`.
#[derive(Debug)]
pub struct Ready;

impl IntoRoute<Ready> for Route {
    fn into_route(self) -> Route {
        self
    }
}
