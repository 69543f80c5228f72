//! User middleware: tower layers around a handler, inside its timeout.
//!
//! A layer sees the [`Message`] before the handler does and its [`Outcome`] or error after. It cannot
//! change the order of the pipeline around it.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use everbus_core::BoxFuture;
use tower_layer::Layer;
use tower_service::Service;

use crate::handler::message::Message;
use crate::handler::outcome::Outcome;
use crate::handler::{BoxError, HandlerError, HandlerOutcome, Run, Slot};

/// The innermost service: the handler itself, which the layers wrap.
///
/// Its error type is [`BoxError`], as in tower's own middleware. A [`HandlerError`] such as
/// [`permanent`](crate::permanent) passes through it unchanged.
#[derive(Clone)]
pub struct HandlerService {
    run: Run,
}

impl Service<Message> for HandlerService {
    type Response = Outcome;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Outcome, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, message: Message) -> Self::Future {
        let mut slot = Slot::default();
        (self.run)(message, &mut slot);
        Box::pin(async move { slot.await.map_err(BoxError::from) })
    }
}

/// A type-erased layer, kept until the handler is known.
#[derive(Clone)]
pub(crate) struct AnyLayer(Arc<dyn Fn(Run) -> Run + Send + Sync>);

impl AnyLayer {
    pub(crate) fn new<L>(layer: L) -> Self
    where
        L: Layer<HandlerService> + Send + Sync + 'static,
        L::Service: Service<Message, Response = Outcome> + Clone + Send + Sync + 'static,
        <L::Service as Service<Message>>::Error: Into<BoxError>,
        <L::Service as Service<Message>>::Future: Send,
    {
        Self(Arc::new(move |run| {
            around(layer.layer(HandlerService { run }))
        }))
    }

    pub(crate) fn wrap(&self, run: Run) -> Run {
        (self.0)(run)
    }
}

fn around<S>(service: S) -> Run
where
    S: Service<Message, Response = Outcome> + Clone + Send + Sync + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
{
    Arc::new(move |message, slot| {
        // A tower service is called through `&mut`, so each call uses a clone.
        let mut service = service.clone();
        slot.put(async move {
            let outcome: Result<Outcome, S::Error> = async {
                poll_fn(|cx| service.poll_ready(cx)).await?;
                service.call(message).await
            }
            .await;
            from_layer(outcome.map_err(Into::into))
        });
    })
}

pub(super) fn from_layer(outcome: Result<Outcome, BoxError>) -> HandlerOutcome {
    outcome.map_err(|error| HandlerError::from_box(&*error))
}
