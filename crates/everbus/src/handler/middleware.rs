//! Middleware as a function: code that runs around a handler, in a few lines.
//!
//! ```
//! use std::time::Instant;
//! use everbus::{Context, Router, middleware};
//!
//! async fn charge(context: Context) { /* … */ }
//!
//! let timed = middleware::from_fn(|message, next| async move {
//!     let (began, name) = (Instant::now(), message.handler_name().to_owned());
//!     let outcome = next.run(message).await;
//!     println!("{name} took {:?}", began.elapsed());
//!     outcome
//! });
//! let router = Router::new().on("order.placed", charge).layer(timed);
//! # let _ = router;
//! ```
//!
//! The function may inspect the [`Message`], return without running the handler, and inspect or change the
//! outcome of the handler. Any tower layer works too; see `layer` of [`Router`](crate::Router),
//! [`Route`](crate::Route) and [`Subscribe`](crate::Subscribe).

use std::future::Future;
use std::task::{Context, Poll, ready};

use everbus_core::BoxFuture;
use tower_layer::Layer;
use tower_service::Service;

use crate::handler::layers::from_layer;
use crate::handler::message::Message;
use crate::handler::outcome::Outcome;
use crate::handler::{BoxError, HandlerOutcome};

/// Makes middleware of an async function or closure of a [`Message`] and [`Next`].
pub fn from_fn<F, Fut>(function: F) -> FromFn<F>
where
    F: Fn(Message, Next) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = HandlerOutcome> + Send + 'static,
{
    FromFn { function }
}

/// The inner service: the next middleware, or the handler itself.
pub struct Next {
    run: Box<dyn FnOnce(Message) -> BoxFuture<'static, HandlerOutcome> + Send>,
}

impl Next {
    /// Runs the inner service. If it is not called, the handler does not run, and the return value of the
    /// middleware is the outcome.
    pub async fn run(self, message: Message) -> HandlerOutcome {
        (self.run)(message).await
    }
}

impl std::fmt::Debug for Next {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Next").finish_non_exhaustive()
    }
}

/// The layer that [`from_fn`] makes.
#[derive(Clone, Debug)]
pub struct FromFn<F> {
    function: F,
}

impl<F: Clone, S> Layer<S> for FromFn<F> {
    type Service = FromFnService<F, S>;

    fn layer(&self, inner: S) -> Self::Service {
        FromFnService {
            function: self.function.clone(),
            inner,
        }
    }
}

/// The service that [`FromFn`] makes of another one.
#[derive(Clone, Debug)]
pub struct FromFnService<F, S> {
    function: F,
    inner: S,
}

impl<F, Fut, S> Service<Message> for FromFnService<F, S>
where
    F: Fn(Message, Next) -> Fut,
    Fut: Future<Output = HandlerOutcome> + Send + 'static,
    S: Service<Message, Response = Outcome> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
{
    type Response = Outcome;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Outcome, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(ready!(self.inner.poll_ready(cx)).map_err(Into::into))
    }

    fn call(&mut self, message: Message) -> Self::Future {
        // The ready service is used; a clone takes its place.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let run = Box::new(move |message| -> BoxFuture<'static, HandlerOutcome> {
            Box::pin(async move { from_layer(inner.call(message).await.map_err(Into::into)) })
        });
        let outcome = (self.function)(message, Next { run });
        Box::pin(async move { outcome.await.map_err(BoxError::from) })
    }
}
