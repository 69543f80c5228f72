//! From a failure to a verdict, with a line in the log for every failed attempt.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Clock, Effect, Failure, FailureKind, GroupName, Recorded, RetryPolicy, Verdict,
};
use parking_lot::Mutex;

use super::{Counted, Judged, millis, skipped_as};
use crate::breaker::{Breaker, Ticket};
use crate::guard;
use crate::handler::{Answer, Decode, HandlerError, Registered};
use crate::runtime::options::BusOptions;
use crate::stats::Skip;

/// An event that was the probe is due again this much after the breaker may be tried.
const AFTER_PROBE: Duration = Duration::from_secs(1);

/// A critical event is given this long after its publish; then its failed probes are attempts like any
/// others, so that a bad one does not keep a breaker open, or its key waiting, for ever.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// An attempt to be judged.
pub(super) struct Judge<'a> {
    pub(super) clock: &'a dyn Clock,
    pub(super) record: &'a Recorded,
    pub(super) attempt: u32,
    /// The name of this worker.
    pub(super) worker: &'a str,
    /// How long the attempt ran, once a handler ran.
    pub(super) took: Option<Duration>,
}

/// An attempt that may still be judged after its handler is done: the engine may refuse the events or
/// the effect it came up with.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) handler: Arc<Registered>,
    pub(crate) record: Arc<Recorded>,
    pub(crate) attempt: u32,
    pub(crate) retried: bool,
    pub(crate) took: Option<Duration>,
    pub(crate) deferred: Arc<Mutex<Vec<Deferred>>>,
    pub(crate) culprit: Option<Culprit>,
    pub(crate) in_effect: Option<InEffect>,
}

/// Whose effect ran last: if the effects of an event fail, it is theirs.
#[derive(Clone, Default)]
pub(crate) struct Culprit(Arc<Mutex<Option<Arc<Registered>>>>);

impl Culprit {
    /// The effect of a handler, watched.
    pub(super) fn watch(&self, handler: &Arc<Registered>, effect: Effect) -> Effect {
        let (last, handler) = (self.0.clone(), handler.clone());
        Effect::new(effect.engine(), move |transaction| {
            // Before it runs: it may panic.
            *last.lock() = Some(handler.clone());
            effect.run(transaction)
        })
    }

    fn get(&self) -> Option<Arc<Registered>> {
        self.0.lock().clone()
    }
}

/// The types of the events that an effect published when it ran last.
#[derive(Clone, Default)]
pub(crate) struct InEffect(Arc<Mutex<Vec<Arc<str>>>>);

impl InEffect {
    /// The effect, watched.
    pub(super) fn watch(&self, effect: Effect) -> Effect {
        let types = self.0.clone();
        Effect::new(effect.engine(), move |transaction| {
            let events = effect.run(transaction)?;
            let each = events.iter().map(|event| event.type_arc().clone());
            *types.lock() = each.collect();
            Ok(events)
        })
    }

    pub(crate) fn types(&self) -> Vec<Arc<str>> {
        self.0.lock().clone()
    }
}

/// The breaker of a handler with an effect learns how the attempt ended when the effect has.
pub(crate) struct Deferred {
    pub(crate) handler: Arc<Registered>,
    pub(crate) ticket: Ticket,
}

impl Case {
    /// Whose breakers have not been told yet.
    pub(crate) fn take_deferred(&self) -> Vec<Deferred> {
        std::mem::take(&mut self.deferred.lock())
    }

    /// Whose effect failed, or whose events were refused.
    pub(crate) fn culprit(&self) -> Arc<Registered> {
        let culprit = self.culprit.as_ref().and_then(Culprit::get);
        culprit.unwrap_or_else(|| self.handler.clone())
    }

    /// The engine refused; what is to happen instead.
    pub(crate) fn refused(
        &self,
        group: &GroupName,
        options: &BusOptions,
        handler: &Registered,
        probing: bool,
        error: HandlerError,
    ) -> (Verdict, Counted) {
        let judge = Judge {
            clock: &*options.clock,
            record: &self.record,
            attempt: self.attempt,
            worker: &options.worker_name,
            took: self.took,
        };
        // The handler and its span have ended: what is logged here has a span of its own.
        let judged =
            crate::runtime::trace::span(group, &self.record, self.attempt).in_scope(|| {
                if probing && judge.waits(handler, &error) {
                    judge.probe_failed(handler, &error)
                } else {
                    judge.failed(handler, Some(&handler.name), error)
                }
            });
        (judged.verdict, judged.counted)
    }
}

impl Judge<'_> {
    /// The same, of an attempt in which handlers ran for this long.
    pub(super) fn ran_for(self, took: Duration) -> Self {
        Self {
            took: Some(took),
            ..self
        }
    }

    /// A handler failed, or skips the event.
    pub(super) fn failed(
        &self,
        handler: &Registered,
        name: Option<&str>,
        error: HandlerError,
    ) -> Judged {
        let policy = &handler.retry;
        let (text, kind, answer, place) = error.into_parts();
        let policy_says = || policy.after_failure(self.attempt, fastrand::f64());
        let delay = match answer {
            Answer::Skip => return skipped_as(text, Skip::Handler),
            Answer::GiveUp => None,
            Answer::Decode if handler.traits.decode == Decode::DeadLetter => None,
            Answer::Decode | Answer::Retry => policy_says(),
            Answer::RetryAfter(after) => policy_says().map(|_| after),
        };
        self.report(name, policy, self.attempt, delay, &text);
        if delay.is_none() && handler.traits.drop_failed {
            let reason = format!("dropped after {} attempts: {text}", self.attempt);
            return skipped_as(reason, Skip::BestEffort);
        }
        let mut failure = Failure::new(self.attempt, self.clock.now(), kind, text)
            .on_worker(self.took, self.worker);
        failure.handler = name.map(str::to_owned);
        if let Some(place) = place {
            failure = failure.with_backtrace(place);
        }
        Judged {
            counted: Counted::Failed {
                retried: delay.is_some(),
            },
            verdict: match delay {
                Some(after) => Verdict::Retry { after, failure },
                None => Verdict::Dead {
                    failure: Some(failure),
                },
            },
        }
    }

    /// Whether an event whose probe failed waits for the breaker, without an attempt counted: the
    /// handler is critical, trying again may help, and it has not waited too long already.
    pub(super) fn waits(&self, handler: &Registered, error: &HandlerError) -> bool {
        let waited = self.clock.now().since(self.record.received_at);
        waited < LONGEST_WAIT && handler.waits_after(error)
    }

    /// The probe of a critical handler failed: what it depends on is still down, and that is not the
    /// event's fault. It waits, without an attempt counted, a little longer than the breaker stays open,
    /// so that the next probe is another event if there is one.
    pub(super) fn probe_failed(&self, handler: &Registered, error: &HandlerError) -> Judged {
        let open_for = handler.traits.breaker.as_ref().map(Breaker::open_for);
        let after = open_for.unwrap_or_default() + AFTER_PROBE;
        guard::log(|| {
            tracing::warn!(
                target: "everbus::dispatch",
                handler = handler.name,
                attempt = self.attempt,
                delay_ms = millis(after),
                %error,
                dead_lettered = false,
                "the probe of a circuit breaker failed; the event waits, no attempt is counted"
            );
        });
        Judged {
            verdict: Verdict::Release { after },
            counted: Counted::ProbeFailed,
        }
    }

    /// The breaker of a standard handler is open: the event waits in the dead letters.
    pub(super) fn rejected(&self, handler: &Registered, dependency: &str) -> Judged {
        let text =
            format!("the circuit breaker of {dependency:?} was open; the handler did not run");
        let mut failure = Failure::new(self.attempt, self.clock.now(), FailureKind::Rejected, text)
            .on_worker(None, self.worker);
        failure.handler = Some(handler.name.clone());
        Judged {
            verdict: Verdict::Dead {
                failure: Some(failure),
            },
            counted: Counted::Rejected,
        }
    }

    /// The last attempt ended with its process or its lease, so nobody was there to log it: that is
    /// done here, when the event comes again.
    ///
    /// If that used up the attempts, with no other event in flight that could be to blame, it is not
    /// tried again: the failures already recorded say why. In every other case it runs once more and its
    /// own outcome decides: another event may have been the culprit, or the policy was tightened
    /// meanwhile.
    pub(super) fn after_crash(&self, handler: &Registered, crash: &Failure) -> Option<Judged> {
        let policy = &handler.retry;
        let used_up = crash.alone && self.attempt > policy.max_attempts();
        let delay = (!used_up).then_some(Duration::ZERO);
        self.report(None, policy, crash.attempt, delay, &crash.error);
        used_up.then_some(Judged {
            verdict: Verdict::Dead { failure: None },
            counted: Counted::Failed { retried: false },
        })
    }

    /// The structured log entry of a failed attempt, the last included.
    fn report(
        &self,
        handler: Option<&str>,
        policy: &RetryPolicy,
        attempt: u32,
        delay: Option<Duration>,
        error: &str,
    ) {
        let max_attempts = policy.max_attempts();
        guard::log(|| match delay {
            Some(delay) => tracing::warn!(
                target: "everbus::dispatch",
                handler,
                attempt,
                max_attempts,
                delay_ms = millis(delay),
                error,
                dead_lettered = false,
                "an attempt failed and will be repeated"
            ),
            None => tracing::error!(
                target: "everbus::dispatch",
                handler,
                attempt,
                max_attempts,
                error,
                dead_lettered = true,
                "the last attempt failed"
            ),
        });
    }
}
