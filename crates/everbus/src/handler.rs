//! What a handler is to the bus, and what it may answer.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus_core::{BoxFuture, Code, FailureKind, Pattern, RetryPolicy};

use crate::guard;
use crate::message::Message;
use crate::subscribe::SubscriptionId;

/// What a handler returns.
pub type HandlerResult = Result<(), HandlerError>;

/// Why a handler did not handle an event, and what is to happen with it.
///
/// Every error converts with `?` and means "try again by the retry policy". The other answers have
/// constructors. The text that is kept contains the error and all its causes.
///
/// ```
/// use std::time::Duration;
/// use everbus::{HandlerError, HandlerResult, Message};
///
/// async fn charge(m: Message) -> HandlerResult {
///     let amount: i64 = m.json()?; // does not parse: recorded as such, retried
///     if amount < 0 {
///         return Err(HandlerError::permanent("a negative amount")); // dead letter at once
///     }
///     if amount == 0 {
///         return Err(HandlerError::skip("nothing to charge")); // done, with a recorded reason
///     }
///     Err(HandlerError::retry_after("the bank is closed", Duration::from_secs(60)))
/// }
/// ```
// It does not implement `std::error::Error`, because the conversion from every error would then
// overlap with the conversion from itself.
#[derive(Debug)]
pub struct HandlerError {
    text: String,
    kind: FailureKind,
    answer: Answer,
}

/// What the handler asks for.
#[derive(Debug)]
pub(crate) enum Answer {
    Retry,
    RetryAfter(Duration),
    GiveUp,
    Skip,
}

impl HandlerError {
    /// A failure that is tried again by the retry policy. Takes text and boxed errors, so it is also
    /// the way in for error types that `?` does not convert.
    pub fn new(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::build(error.into().as_ref(), FailureKind::Error, Answer::Retry)
    }

    /// A failure no retry can mend: the event goes to the dead letters at once.
    pub fn permanent(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::build(
            error.into().as_ref(),
            FailureKind::Permanent,
            Answer::GiveUp,
        )
    }

    /// A failure that is tried again after this long instead of what the policy says. It counts as
    /// an attempt like any other. Waits of more than a year are cut to that.
    pub fn retry_after(error: impl Into<Box<dyn StdError + Send + Sync>>, after: Duration) -> Self {
        let after = after.min(everbus_core::retry::LONGEST_DELAY);
        Self::build(
            error.into().as_ref(),
            FailureKind::Error,
            Answer::RetryAfter(after),
        )
    }

    /// Not a failure: the handler leaves the event alone, and the reason is recorded.
    pub fn skip(reason: impl Into<String>) -> Self {
        Self {
            text: reason.into(),
            kind: FailureKind::Error,
            answer: Answer::Skip,
        }
    }

    pub(crate) fn timed_out(limit: Duration) -> Self {
        Self {
            text: format!("the handler did not finish within {limit:?}"),
            kind: FailureKind::Timeout,
            answer: Answer::Retry,
        }
    }

    pub(crate) fn panicked(text: &str) -> Self {
        Self {
            text: format!("the handler panicked: {text}"),
            kind: FailureKind::Panic,
            answer: Answer::Retry,
        }
    }

    fn build(error: &(dyn StdError + 'static), kind: FailureKind, answer: Answer) -> Self {
        Self {
            text: with_causes(error),
            kind,
            answer,
        }
    }

    pub(crate) fn into_parts(self) -> (String, FailureKind, Answer) {
        (self.text, self.kind, self.answer)
    }
}

impl<E: StdError + Send + Sync + 'static> From<E> for HandlerError {
    fn from(error: E) -> Self {
        // A payload that cannot be read is worth telling apart from the handler's own errors.
        let decode = (&error as &dyn Any)
            .downcast_ref::<everbus_core::Error>()
            .is_some_and(|e| e.code() == Code::InvalidPayload);
        let kind = if decode {
            FailureKind::Decode
        } else {
            FailureKind::Error
        };
        Self::build(&error, kind, Answer::Retry)
    }
}

impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The error and its causes, joined by `: `; a cause whose text the error already ends with is not
/// repeated.
fn with_causes(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

type Run = Box<dyn Fn(Message) -> BoxFuture<'static, HandlerResult> + Send + Sync>;

/// A registered handler with the settings of its subscription.
pub(crate) struct Handler {
    pub(crate) id: SubscriptionId,
    pub(crate) name: String,
    pub(crate) pattern: Pattern,
    pub(crate) retry: RetryPolicy,
    pub(crate) timeout: Duration,
    run: Run,
    removed: AtomicBool,
}

impl Handler {
    pub(crate) fn new(
        id: SubscriptionId,
        name: String,
        pattern: Pattern,
        retry: RetryPolicy,
        timeout: Duration,
        run: Run,
    ) -> Self {
        Self {
            id,
            name,
            pattern,
            retry,
            timeout,
            run,
            removed: AtomicBool::new(false),
        }
    }

    /// Boxes a user's function.
    pub(crate) fn erase<F, Fut>(handler: F) -> Run
    where
        F: Fn(Message) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = HandlerResult> + Send + 'static,
    {
        Box::new(move |message| Box::pin(handler(message)))
    }

    pub(crate) fn call(&self, message: Message) -> BoxFuture<'static, HandlerResult> {
        (self.run)(message)
    }

    /// Deliveries that are queued with this handler will not call it any more.
    pub(crate) fn remove(&self) {
        self.removed.store(true, Ordering::Release);
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }
}

impl Drop for Handler {
    /// Whoever happens to be the last to hold it must not die of what the user's function does when
    /// it is dropped.
    fn drop(&mut self) {
        let nothing: Run = Box::new(|_| Box::pin(std::future::ready(Ok(()))));
        let run = std::mem::replace(&mut self.run, nothing);
        if let Err(error) = guard::contain(|| drop(run)) {
            let handler = self.name.as_str();
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", handler, error, "a handler panicked while it was dropped");
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_contains_every_cause_once() {
        let cause = std::io::Error::other("connection refused");
        let error = everbus_core::Error::new(Code::Busy, "cannot reach the bank").caused_by(cause);
        let text = HandlerError::from(error).to_string();
        assert_eq!(text, "FileBusy: cannot reach the bank: connection refused");
        assert_eq!(HandlerError::new("plain").to_string(), "plain");
    }

    #[test]
    fn a_payload_that_cannot_be_read_is_told_apart() {
        let event = everbus_core::Event::builder("t").build().unwrap();
        let error = event.json::<u32>().unwrap_err();
        assert_eq!(
            HandlerError::from(error).into_parts().1,
            FailureKind::Decode
        );
    }
}
