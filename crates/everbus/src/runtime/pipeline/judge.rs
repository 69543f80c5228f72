//! Turns a failure into a verdict, and logs every failed attempt.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Clock, Failure, FailureKind, GroupName, Recorded, RetryPolicy, Verdict};
use parking_lot::Mutex;

use super::effects::EffectsRun;
use super::{Counted, Judged, millis, skipped_as};
use crate::breaker::{Breaker, Ticket};
use crate::guard;
use crate::handler::{Answer, Decode, HandlerError, Registered};
use crate::runtime::options::BusOptions;
use crate::stats::Skip;

/// After a failed probe, the event is due this long after the breaker allows the next probe.
const AFTER_PROBE: Duration = Duration::from_secs(1);

/// For this long after the publish, a failed probe of a critical handler counts no attempt. Later it counts,
/// so that a poison event cannot keep a breaker open, or its key waiting, for ever.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// An attempt to judge.
pub(super) struct Judge<'a> {
    pub(super) clock: &'a dyn Clock,
    pub(super) record: &'a Recorded,
    pub(super) attempt: u32,
    /// The name of this worker.
    pub(super) worker: &'a str,
    /// How long the handlers ran, if any ran.
    pub(super) took: Option<Duration>,
}

/// An attempt with events or effects. Its verdict may still change, because the engine may refuse them.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) handler: Arc<Registered>,
    pub(crate) record: Arc<Recorded>,
    pub(crate) attempt: u32,
    pub(crate) retried: bool,
    pub(crate) took: Option<Duration>,
    pub(crate) deferred: Arc<Mutex<Vec<Deferred>>>,
    /// What the effects of the attempt did, if it has effects.
    pub(crate) effects: Option<EffectsRun>,
}

/// A report to the breaker of a handler with an effect. It is made only after the effect has run.
pub(crate) struct Deferred {
    pub(crate) handler: Arc<Registered>,
    pub(crate) ticket: Ticket,
}

impl Case {
    /// Takes the reports to breakers that have not been made yet.
    pub(crate) fn take_deferred(&self) -> Vec<Deferred> {
        std::mem::take(&mut self.deferred.lock())
    }

    /// The handler whose effect failed, or whose events were refused.
    pub(crate) fn culprit(&self) -> Arc<Registered> {
        let culprit = self.effects.as_ref().and_then(EffectsRun::handler);
        culprit.unwrap_or_else(|| self.handler.clone())
    }

    /// Judges the attempt again after the engine refused its outcome, as a failure of `handler`. Returns the
    /// verdict that replaces the refused one.
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
        // The span of the handler has ended, so the log line of the failure gets a new span.
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
    /// Sets how long the handlers ran.
    pub(super) fn ran_for(self, took: Duration) -> Self {
        Self {
            took: Some(took),
            ..self
        }
    }

    /// The verdict after an error of a handler: skip or release if the error asks for it, retry while the
    /// retry policy allows, or else dead. With `drop_failed`, a skip in place of a dead letter.
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
            Answer::GiveBack => return Judged::released(Duration::ZERO),
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

    /// Whether an event whose probe failed waits for the breaker without counting an attempt: the handler is
    /// critical, a retry may help, and the event was published less than [`LONGEST_WAIT`] ago.
    pub(super) fn waits(&self, handler: &Registered, error: &HandlerError) -> bool {
        let waited = self.clock.now().since(self.record.received_at);
        waited < LONGEST_WAIT && handler.waits_after(error)
    }

    /// The verdict for a failed probe of a critical handler: its dependency is still down, and the event is
    /// not the cause. The event waits, without counting an attempt, a little longer than the breaker stays
    /// open, so that the next probe is another event if there is one.
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

    /// The verdict when the breaker of a standard handler is open: dead, for a later retry.
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

    /// Handles the crash of the previous attempt: its process died or its lease ended before it was settled.
    /// Logs that attempt, because the crashed process could not.
    ///
    /// Returns the verdict *dead* if that was the last allowed attempt and no other event in flight could
    /// have caused the crash. Otherwise returns `None`: the event runs again, because another event may have
    /// been the cause, or an attempt is left.
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

    /// Logs a failed attempt, the last one included.
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
