//! One call of one handler: applies its timeout and catches its panics.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use everbus_core::BoxFuture;
use tokio::time::Instant;

use crate::ambient;
use crate::guard;
use crate::handler::message::Message;
use crate::handler::{HandlerError, HandlerOutcome, Registered, Slot};

/// The result of the first poll of a handler.
pub(super) enum Begun {
    Ended(HandlerOutcome),
    Running(Unpanicked),
}

/// Calls one handler and polls its future once. Events that it publishes inherit from the handled event. If
/// the future is ready, no timer is set, and its memory goes back to `slot` for the next call.
pub(super) fn begin(
    handler: &Registered,
    message: &Message,
    slot: &mut Slot,
    cx: &mut Context<'_>,
) -> Begun {
    ambient::handling_now(message.record().clone(), || {
        let mut run = Unpanicked(std::mem::take(slot));
        if let Err(panic) = guard::traced(|| handler.call(message.clone(), &mut run.0)) {
            return Begun::Ended(Err(HandlerError::panicked(panic)));
        }
        match Pin::new(&mut run).poll(cx) {
            Poll::Ready(result) => {
                *slot = std::mem::take(&mut run.0);
                Begun::Ended(result)
            }
            Poll::Pending => Begun::Running(run),
        }
    })
}

/// Waits for a handler that was not ready in the first poll, until its deadline.
pub(super) fn finish<'a>(
    run: Unpanicked,
    handler: &'a Registered,
    message: &'a Message,
) -> BoxFuture<'a, HandlerOutcome> {
    let record = message.record().clone();
    Box::pin(ambient::handling(
        record,
        until_deadline(run, handler, message),
    ))
}

/// Waits for the handler until its deadline, which the handler may move while it runs. After the deadline
/// the attempt has failed with a timeout.
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

/// A handler's future that catches panics in `poll` and in `drop`.
pub(super) struct Unpanicked(Slot);

impl Future for Unpanicked {
    type Output = HandlerOutcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<HandlerOutcome> {
        match guard::traced(|| Pin::new(&mut self.0).poll(cx)) {
            Ok(poll) => poll,
            Err(panic) => Poll::Ready(Err(HandlerError::panicked(panic))),
        }
    }
}

impl Drop for Unpanicked {
    fn drop(&mut self) {
        let slot = std::mem::take(&mut self.0);
        if let Err(said) = guard::contain(|| drop(slot)) {
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", error = said, "a handler panicked while it was dropped");
            });
        }
    }
}
