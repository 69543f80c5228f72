//! What happens to one delivery between the queue and its settlement.
//!
//! The order of the layers is fixed here and nowhere else:
//! `trace → inbox → staleness → breaker → timeout → handler → settle`.
//! Of these, the trace of failures, the timeout and the handler exist so far; a further layer goes
//! into [`deliver`] (once per delivery) or [`attempt`] (once per handler) at its place in that order.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use everbus_core::{
    BoxFuture, Clock, Delivery, Failure, FailureKind, GroupName, RetryPolicy, Verdict,
};

use crate::guard;
use crate::handler::{Answer, Handler, HandlerError, HandlerResult};
use crate::message::Message;

/// Runs the handlers of a delivery one after another and says what became of it. The first failure
/// ends the attempt, and the policy of the handler that failed decides.
///
/// A handler that skips does not keep the others from running; the event counts as skipped if no
/// handler handled it. Whatever panics on the way is a failure of the attempt.
pub(crate) async fn deliver(
    group: &GroupName,
    clock: &dyn Clock,
    delivery: &Delivery,
    handlers: &[Arc<Handler>],
) -> Verdict {
    match guard::contained(run_handlers(group, clock, delivery, handlers)).await {
        Ok(verdict) => verdict,
        Err(said) => match most_patient(handlers) {
            Some(Handler { retry, .. }) => {
                let error = HandlerError::panicked(&said);
                judge(group, clock, delivery, retry, None, error)
            }
            None => released(),
        },
    }
}

async fn run_handlers(
    group: &GroupName,
    clock: &dyn Clock,
    delivery: &Delivery,
    handlers: &[Arc<Handler>],
) -> Verdict {
    if let Some(crash) = delivery.failures.last()
        && crash.kind == FailureKind::Crash
        && let Some(verdict) = after_crash(group, delivery, crash, handlers)
    {
        return verdict;
    }
    let mut handled = false;
    let mut skipped = None;
    for handler in handlers.iter().filter(|handler| !handler.is_removed()) {
        let message = Message::new(delivery, group, handler.retry.max_attempts());
        match attempt(handler, message).await {
            Ok(()) => handled = true,
            Err(error) => match judge(
                group,
                clock,
                delivery,
                &handler.retry,
                Some(&handler.name),
                error,
            ) {
                Verdict::Skip { reason } => skipped = skipped.or(Some(reason)),
                verdict => return verdict,
            },
        }
    }
    match skipped {
        _ if handled => Verdict::Ack,
        Some(reason) => Verdict::Skip { reason },
        // Every handler it was queued for has been unsubscribed since.
        None => released(),
    }
}

fn released() -> Verdict {
    Verdict::Release {
        after: Duration::ZERO,
    }
}

/// The handler that would try most often.
fn most_patient(handlers: &[Arc<Handler>]) -> Option<&Handler> {
    handlers
        .iter()
        .filter(|handler| !handler.is_removed())
        .max_by_key(|handler| handler.retry.max_attempts())
        .map(|handler| &**handler)
}

/// Calls one handler under its timeout.
async fn attempt(handler: &Handler, message: Message) -> HandlerResult {
    let mut run = match guard::contain(|| handler.call(message)) {
        Ok(future) => Unpanicked(Some(future)),
        Err(said) => return Err(HandlerError::panicked(&said)),
    };
    // Most handlers are ready at once; those never touch the timer.
    match poll_fn(|cx| Poll::Ready(Pin::new(&mut run).poll(cx))).await {
        Poll::Ready(result) => result,
        Poll::Pending => match tokio::time::timeout(handler.timeout, run).await {
            Ok(result) => result,
            Err(_) => Err(HandlerError::timed_out(handler.timeout)),
        },
    }
}

/// A handler's future whose panics, in `poll` and in `drop`, stay inside.
struct Unpanicked(Option<BoxFuture<'static, HandlerResult>>);

impl Future for Unpanicked {
    type Output = HandlerResult;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<HandlerResult> {
        let Some(future) = &mut self.0 else {
            return Poll::Pending;
        };
        match guard::contain(|| future.as_mut().poll(cx)) {
            Ok(poll) => poll,
            Err(said) => Poll::Ready(Err(HandlerError::panicked(&said))),
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

/// From a handler's error to a verdict, with a line in the log for every failed attempt.
fn judge(
    group: &GroupName,
    clock: &dyn Clock,
    delivery: &Delivery,
    policy: &RetryPolicy,
    handler: Option<&str>,
    error: HandlerError,
) -> Verdict {
    let (text, kind, answer) = error.into_parts();
    let attempt = delivery.attempt;
    let policy_says = || policy.after_failure(attempt, random());
    let delay = match answer {
        Answer::Skip => return Verdict::Skip { reason: text },
        Answer::GiveUp => None,
        Answer::Retry => policy_says(),
        Answer::RetryAfter(after) => policy_says().map(|_| after),
    };
    report(group, delivery, handler, policy, attempt, delay, &text);
    let mut failure = Failure::new(attempt, clock.now(), kind, text);
    failure.handler = handler.map(str::to_owned);
    match delay {
        Some(after) => Verdict::Retry { after, failure },
        None => Verdict::Dead {
            failure: Some(failure),
        },
    }
}

/// The last attempt ended with its process or its lease, so nobody was there to log it: that is done
/// here, when the event comes again.
///
/// If that used up the attempts, with no other event in flight that could be to blame, it is not tried
/// again: the failures already recorded say why. In every other case it runs once more and its own
/// outcome decides: another event may have been the culprit, or the policy was tightened meanwhile.
fn after_crash(
    group: &GroupName,
    delivery: &Delivery,
    crash: &Failure,
    handlers: &[Arc<Handler>],
) -> Option<Verdict> {
    let policy = &most_patient(handlers)?.retry;
    let used_up = crash.alone && delivery.attempt > policy.max_attempts();
    let delay = (!used_up).then_some(Duration::ZERO);
    let (attempt, error) = (crash.attempt, &crash.error);
    report(group, delivery, None, policy, attempt, delay, error);
    used_up.then_some(Verdict::Dead { failure: None })
}

/// The structured log entry of a failed attempt, the last included.
fn report(
    group: &GroupName,
    delivery: &Delivery,
    handler: Option<&str>,
    policy: &RetryPolicy,
    attempt: u32,
    delay: Option<Duration>,
    error: &str,
) {
    let event = &delivery.record.event;
    let max_attempts = policy.max_attempts();
    guard::log(|| match delay {
        Some(delay) => tracing::warn!(
            target: "everbus::dispatch",
            event_id = %event.id(),
            event_type = event.event_type(),
            %group,
            handler,
            attempt,
            max_attempts,
            delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX),
            error,
            dead_lettered = false,
            "an attempt failed and will be repeated"
        ),
        None => tracing::error!(
            target: "everbus::dispatch",
            event_id = %event.id(),
            event_type = event.event_type(),
            %group,
            handler,
            attempt,
            max_attempts,
            error,
            dead_lettered = true,
            "the last attempt failed"
        ),
    });
}

/// Between 0 and 1, for the jitter of a retry.
fn random() -> f64 {
    // The lower 48 bits of a version 4 UUID are random.
    let bits = uuid::Uuid::new_v4().as_u128() & 0xffff_ffff_ffff;
    bits as f64 / (1u64 << 48) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use everbus_core::{Event, EventId, Lease, Recorded, SystemClock, Timestamp};

    fn handler(policy: RetryPolicy, answer: fn() -> HandlerResult) -> Arc<Handler> {
        Arc::new(Handler::new(
            EventId::new().into(),
            "h".into(),
            "a".parse().unwrap(),
            policy,
            Duration::from_secs(30),
            Handler::erase(move |_| async move { answer() }),
        ))
    }

    /// A delivery after so many crashes of its process.
    fn crashed(times: u32, alone: bool) -> Delivery {
        let crash = |attempt| Failure {
            alone,
            ..Failure::new(attempt, Timestamp::EPOCH, FailureKind::Crash, "crash")
        };
        Delivery {
            record: Arc::new(Recorded {
                event: Event::builder("a").build().unwrap(),
                position: 1,
                received_at: Timestamp::EPOCH,
            }),
            attempt: times + 1,
            failures: (1..=times).map(crash).collect(),
            lease: Lease {
                position: 1,
                slot: 1,
                token: 1,
                handle: None,
            },
        }
    }

    async fn verdict(delivery: &Delivery, handlers: &[Arc<Handler>]) -> Verdict {
        deliver(&GroupName::unnamed(), &SystemClock, delivery, handlers).await
    }

    // conformance: rule-3/crash-loop: an event that was alone in flight at every crash is dead-lettered once its attempts are used up, without running again.
    #[tokio::test]
    async fn an_event_that_keeps_crashing_its_process_is_given_up() {
        let handlers = [handler(RetryPolicy::default(), || Ok(()))];
        let verdict_after = async |times| verdict(&crashed(times, true), &handlers).await;
        assert_eq!(verdict_after(3).await, Verdict::Ack);
        assert_eq!(verdict_after(4).await, Verdict::Dead { failure: None });
    }

    // conformance: rule-3/innocent: an event that was not alone in flight at a crash is never dead-lettered for it.
    #[tokio::test]
    async fn an_event_that_shared_its_crashes_with_others_runs_again() {
        let handlers = [handler(RetryPolicy::default(), || Ok(()))];
        assert_eq!(verdict(&crashed(9, false), &handlers).await, Verdict::Ack);
    }

    #[tokio::test]
    async fn an_event_whose_policy_was_tightened_runs_once_more_and_then_ends() {
        let handlers = [handler(RetryPolicy::never(), || {
            Err(HandlerError::new("still broken"))
        })];
        let mut delivery = crashed(3, true);
        delivery.failures[2].kind = FailureKind::Error;
        let verdict = verdict(&delivery, &handlers).await;
        let Verdict::Dead {
            failure: Some(last),
        } = verdict
        else {
            panic!("{verdict:?}");
        };
        assert_eq!((last.attempt, last.error.as_str()), (4, "still broken"));
    }

    #[tokio::test]
    async fn an_event_without_a_handler_left_is_released() {
        let gone = handler(RetryPolicy::default(), || Ok(()));
        gone.remove();
        let released = Verdict::Release {
            after: Duration::ZERO,
        };
        assert_eq!(verdict(&crashed(0, false), &[gone]).await, released);
        assert_eq!(verdict(&crashed(4, true), &[]).await, released);
    }

    #[tokio::test]
    async fn a_panic_outside_a_handler_is_a_failure_of_the_attempt() {
        #[derive(Debug)]
        struct Broken(std::sync::atomic::AtomicBool);
        impl Clock for Broken {
            fn now(&self) -> Timestamp {
                let was_asked = self.0.swap(true, std::sync::atomic::Ordering::SeqCst);
                assert!(was_asked, "the first answer is a panic");
                Timestamp::EPOCH
            }
        }
        let handlers = [handler(RetryPolicy::default(), || {
            Err(HandlerError::new("an error"))
        })];
        let (group, clock) = (GroupName::unnamed(), Broken(false.into()));
        let verdict = deliver(&group, &clock, &crashed(0, false), &handlers).await;
        let Verdict::Retry { failure, .. } = verdict else {
            panic!("{verdict:?}");
        };
        assert_eq!((failure.attempt, failure.kind), (1, FailureKind::Panic));
    }

    #[tokio::test]
    async fn a_panic_while_a_timed_out_handler_is_dropped_stays_inside() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("in drop");
            }
        }
        let handler = Arc::new(Handler::new(
            EventId::new().into(),
            "h".into(),
            "a".parse().unwrap(),
            RetryPolicy::never(),
            Duration::from_millis(1),
            Handler::erase(|_| async {
                let _bomb = Bomb;
                std::future::pending().await
            }),
        ));
        let verdict = verdict(&crashed(0, false), &[handler]).await;
        let Verdict::Dead {
            failure: Some(last),
        } = verdict
        else {
            panic!("{verdict:?}");
        };
        assert_eq!(last.kind, FailureKind::Timeout);
    }
}
