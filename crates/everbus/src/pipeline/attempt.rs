//! One call of one handler: its timeout, and the panics that stay inside.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

use everbus_core::BoxFuture;
use tokio::time::Instant;

use crate::handler::{HandlerError, HandlerOutcome, Registered};
use crate::message::Message;
use crate::{ambient, guard};

/// Calls one handler under its timeout. What it publishes inherits from the event.
pub(super) async fn attempt(handler: &Registered, message: &Message) -> HandlerOutcome {
    let call = async {
        let mut run = match guard::traced(|| handler.call(message.clone())) {
            Ok(future) => Unpanicked(Some(future)),
            Err(panic) => return Err(HandlerError::panicked(panic)),
        };
        // Most handlers are ready at once; those never touch the timer.
        match poll_fn(|cx| Poll::Ready(Pin::new(&mut run).poll(cx))).await {
            Poll::Ready(result) => result,
            Poll::Pending => until_deadline(run, handler, message).await,
        }
    };
    ambient::handling(message.record().clone(), call).await
}

/// The handler may move its deadline while it runs.
async fn until_deadline(
    mut run: Unpanicked,
    handler: &Registered,
    message: &Message,
) -> HandlerOutcome {
    let began = Instant::now();
    loop {
        let deadline = message.deadline();
        if let Ok(result) = tokio::time::timeout_at(deadline, &mut run).await {
            return result;
        }
        if message.deadline() <= deadline {
            let extended = deadline.saturating_duration_since(began) > handler.timeout;
            let allowed = if extended {
                began.elapsed()
            } else {
                handler.timeout
            };
            return Err(HandlerError::timed_out(
                allowed,
                message.activity().as_ref(),
            ));
        }
    }
}

/// A handler's future whose panics, in `poll` and in `drop`, stay inside.
struct Unpanicked(Option<BoxFuture<'static, HandlerOutcome>>);

impl Future for Unpanicked {
    type Output = HandlerOutcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<HandlerOutcome> {
        let Some(future) = &mut self.0 else {
            return Poll::Pending;
        };
        match guard::traced(|| future.as_mut().poll(cx)) {
            Ok(poll) => poll,
            Err(panic) => Poll::Ready(Err(HandlerError::panicked(panic))),
        }
    }
}

impl Drop for Unpanicked {
    fn drop(&mut self) {
        let future = self.0.take();
        if let Err(said) = guard::contain(|| drop(future)) {
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", error = said, "a handler panicked while it was dropped");
            });
        }
    }
}
