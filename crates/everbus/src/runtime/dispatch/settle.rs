//! The settler: sends all finished outcomes to the engine as one batch, and takes the next batch when the
//! engine has answered.
//!
//! While the engine works on one batch, workers fill the next one; there is no timer.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Class, Code, Error, Settlement, Timestamp, Verdict};
use tokio::time::Instant;

use super::Runner;
use super::outage::Outage;
use super::queue::Outcomes;
use crate::breaker::{Change, Ticket};
use crate::guard;
use crate::handler::{HandlerError, Registered, unpublished};
use crate::runtime::pipeline::{Counted, Deferred, EffectsRun, FailedAttempt, Finished};

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What the settler remembers from one batch to the next, to repeat settlements that failed.
struct RetryState {
    outage: Outage,
    /// When the last batch with a new outcome was sent. No outcome that is sent again is newer, so all its
    /// leases were held at this time.
    since: Instant,
    /// How many outcomes the next batch repeats after an error. The rest of the batch is new.
    resent: usize,
    /// Whether the engine may have applied a settlement that is sent again. Holds for all repeated outcomes: the
    /// settler does not remember which one.
    maybe_applied: bool,
}

impl RetryState {
    /// Nothing is repeated: the settler gave up on the batch.
    fn give_up(&mut self) {
        (self.resent, self.maybe_applied) = (0, false);
        self.outage.forget();
    }
}

impl Runner {
    /// Settles batches until the queue says that nothing is left and no more outcomes will come.
    pub(super) async fn settle_loop(self: Arc<Self>) {
        let mut retry = RetryState {
            outage: Outage::none(&self.group, "settling", FIRST_PAUSE, LONGEST_PAUSE),
            since: Instant::now(),
            resent: 0,
            maybe_applied: false,
        };
        loop {
            match self.queue.take_outcomes() {
                Outcomes::Send(batch) => self.settle(&batch, &mut retry).await,
                Outcomes::Wait => {
                    self.depth.set(self.queue.depth());
                    self.queue.outcomes().await;
                }
                Outcomes::End => return,
            }
        }
    }

    /// Settles a batch.
    ///
    /// Outcomes with an error that may pass are sent again with the next batch, after a pause: an outage
    /// must not make the handlers repeat their work. The settler gives up on them when their leases have
    /// ended, or when a shutdown leaves no time for another try. If the engine refuses the whole batch for
    /// good, or answers with the wrong number of answers, the settler gives up at once.
    async fn settle(&self, batch: &[Finished], retry: &mut RetryState) {
        if batch.len() > retry.resent {
            // Some outcomes are new; their leases may last longer than those of the repeated ones.
            retry.since = Instant::now();
        }
        let settlements = batch.iter().map(|f| f.settlement.clone()).collect();
        let (again, error) = match self.shared.engine.broker.settle(settlements).await {
            Ok(answers) if answers.len() != batch.len() => {
                let error = Error::new(Code::Internal, "not every outcome was answered");
                retry.give_up();
                return self.settling_failed(batch, &error);
            }
            Ok(answers) => self.sort_out(batch, answers, retry),
            Err(error) if error.class().may_repeat() => {
                retry.maybe_applied |= error.class() == Class::Unknown;
                (batch.iter().map(Finished::again).collect(), Some(error))
            }
            Err(error) => {
                retry.give_up();
                return self.settling_failed(batch, &error);
            }
        };
        let Some(error) = error else {
            (retry.resent, retry.maybe_applied) = (0, false);
            retry.outage.is_over();
            if !again.is_empty() {
                self.queue.send_again(again);
            }
            return;
        };
        let pause = retry.outage.goes_on(&error);
        let give_up = self.queue.finish_by();
        let no_time_left = give_up.is_some_and(|by| Instant::now() + pause > by);
        if no_time_left || self.leases_are_over(retry.since) {
            retry.give_up();
            return self.settling_failed(&again, &given_up(&error, no_time_left));
        }
        retry.resent = again.len();
        self.queue.send_again(again);
        tokio::time::sleep(pause).await;
    }

    /// Handles the answer to each outcome of a batch: counts settled ones, and gives up on those with a
    /// final error. Returns the outcomes to send in the next batch: those with an error that may pass, with
    /// the first such error, and new verdicts for outcomes that the engine refused.
    fn sort_out(
        &self,
        batch: &[Finished],
        answers: Vec<Result<(), Error>>,
        retry: &mut RetryState,
    ) -> (Vec<Finished>, Option<Error>) {
        // The clock and the metrics recorder are user code: a panic in them must not end the settler.
        let now = guard::contain(|| self.shared.options.clock.now()).ok();
        let (mut again, mut passing) = (Vec::new(), None);
        // The first outcomes of the batch are the repeated ones: an earlier batch may have applied them. The loop
        // below changes the flag for the next batch.
        let sent_before = if retry.maybe_applied { retry.resent } else { 0 };
        for (n, (finished, answer)) in batch.iter().zip(answers).enumerate() {
            let error = match answer {
                Ok(()) => {
                    self.settled(finished, now);
                    continue;
                }
                Err(error) => error,
            };
            match error.class() {
                Class::Passing | Class::Unknown => {
                    retry.maybe_applied |= error.class() == Class::Unknown;
                    again.push(finished.again());
                    passing.get_or_insert(error);
                }
                // Either an earlier try was applied, which ended the lease, or the lease was lost. The two
                // cases cannot be told apart. The outcome is counted as settled and not sent again: if the
                // lease was lost, the event is delivered again in any case.
                Class::Conflict if n < sent_before && error.code() == Code::LeaseLost => {
                    self.settled(finished, now);
                }
                Class::Final => self.settling_failed(std::slice::from_ref(finished), &error),
                _ => again.extend(self.refused(finished, &error)),
            }
        }
        (again, passing)
    }

    /// Counts a settled outcome, and reports success to the breakers that waited for an effect. A panic of
    /// user code (clock, metrics recorder) is ignored.
    fn settled(&self, finished: &Finished, now: Option<Timestamp>) {
        drop(guard::contain(|| self.count(finished, now)));
        let case = finished.case.as_ref();
        let deferred = case.map(|case| case.take_deferred());
        for Deferred { handler, ticket } in deferred.unwrap_or_default() {
            self.tell_breaker(&handler, ticket, Ticket::succeeded);
        }
    }

    /// Handles an outcome that the engine refused. Returns the outcome to settle instead, if there is one:
    ///
    /// - The lease was lost: `None`. The event is delivered again.
    /// - The verdict is not an ack and publishes events: the same verdict without the events.
    /// - The attempt has events or an effect: these made the engine refuse, so the attempt has failed. The
    ///   retry policy of the handler gives the new verdict.
    /// - Otherwise: `None`. The event is delivered again when its lease ends.
    fn refused(&self, finished: &Finished, error: &Error) -> Option<Finished> {
        let (group, seq) = (&self.group, finished.settlement.lease.position());
        if error.code() == Code::LeaseLost {
            self.shared.count_lost_lease();
            guard::log(|| {
                tracing::warn!(target: "everbus::dispatch", %group, %seq, "the lease was lost before the outcome was settled; the event is delivered again");
            });
            return None;
        }
        let settlement = &finished.settlement;
        if settlement.verdict != Verdict::Ack && !settlement.follow_ups.is_empty() {
            guard::log(|| {
                tracing::warn!(target: "everbus::dispatch", %group, %seq, %error, "events of a failed attempt were refused; the failure is recorded without them");
            });
            return Some(without_events(finished, error));
        }
        let Some(case) = &finished.case else {
            self.queue.count_unsettled(std::slice::from_ref(finished));
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", %group, %seq, %error, "an outcome could not be settled; the event is delivered again");
            });
            return None;
        };
        let culprit = case.culprit();
        let mut probing = false;
        // Only the handler whose effect failed reports a failure to its breaker. The effects of the other
        // handlers were rolled back, which says nothing about their dependencies.
        for Deferred { handler, ticket } in case.take_deferred() {
            if error.code() == Code::EffectFailed && Arc::ptr_eq(&handler, &culprit) {
                probing = ticket.is_probe();
                self.tell_breaker(&handler, ticket, Ticket::failed);
            }
        }
        let mut why = why_refused(error);
        let failed = FailedAttempt {
            record: &case.record,
            group,
            handler: &culprit.name,
            attempt: case.attempt,
            retried: case.retried,
        };
        let events = failed.take_events(&self.shared, &mut why);
        let options = &self.shared.options;
        let (verdict, counted) = case.refused(group, options, &culprit, probing, why);
        let mut settlement = Settlement::new(finished.settlement.lease.clone(), verdict);
        if counted != Counted::ProbeFailed {
            settlement.follow_ups = events;
        }
        Some(Finished {
            settlement,
            counted,
            received_at: finished.received_at,
            matched: finished.matched.clone(),
            case: None,
        })
    }

    /// Counts a settled outcome and the events that were published with it.
    fn count(&self, finished: &Finished, now: Option<Timestamp>) {
        let settlement = &finished.settlement;
        for event in &settlement.follow_ups {
            self.shared.stats.publishing(event.type_arc()).published(1);
        }
        let case = finished.case.as_ref();
        let effects = case.and_then(|case| case.effects.as_ref());
        for event_type in effects.map(EffectsRun::types).unwrap_or_default() {
            self.shared.stats.publishing(&event_type).published(1);
        }
        let meter = &finished.matched.meter;
        match finished.counted {
            Counted::Handled { took } => {
                let now = now.unwrap_or(finished.received_at);
                meter.handled(now.since(finished.received_at), took);
            }
            Counted::AlreadyHandled => meter.inbox_hit(),
            Counted::Skipped(skip) => meter.skipped(skip),
            Counted::Failed { retried: true } => {
                meter.failed();
                meter.retried();
            }
            Counted::Failed { retried: false } => {
                meter.failed();
                meter.dead_lettered();
            }
            Counted::ProbeFailed => meter.failed(),
            Counted::Rejected => meter.dead_lettered(),
            Counted::Nothing => {}
        }
    }

    /// Reports the result of an attempt with an effect to the breaker of its handler. `tell` is
    /// [`Ticket::succeeded`] or [`Ticket::failed`].
    fn tell_breaker(
        &self,
        handler: &Registered,
        ticket: Ticket,
        tell: fn(Ticket) -> Option<Change>,
    ) {
        if let Ok(Some(change)) = guard::contain(|| tell(ticket)) {
            self.shared.circuit_changed(&self.group, handler, change);
        }
    }

    /// Gives up on these outcomes: counts and logs them, and fails the bus if the error is fatal. Their
    /// events are delivered again when the leases end.
    fn settling_failed(&self, batch: &[Finished], error: &Error) {
        self.queue.count_unsettled(batch);
        self.shared.fail_if_fatal(error);
        if error.code() == Code::LeaseLost {
            batch.iter().for_each(|_| self.shared.count_lost_lease());
        }
        let (group, outcomes) = (&self.group, batch.len());
        guard::log(|| {
            tracing::error!(target: "everbus::dispatch", %group, outcomes, %error, "outcomes could not be settled; their events are delivered again");
        });
    }
}

/// Turns a refusal of the engine into a failure of the handler. If an effect failed, the failure is the
/// error of the effect. Otherwise the events were refused, and the failure is permanent: another run would
/// return the same events.
fn why_refused(error: &Error) -> HandlerError {
    match error.code() {
        Code::EffectFailed => HandlerError::from_box(error),
        _ => HandlerError::permanent(error.clone()),
    }
}

/// Copies an outcome without its refused events. The text of its failure, or of its skip reason, mentions
/// them.
fn without_events(finished: &Finished, error: &Error) -> Finished {
    let mut again = finished.again();
    again.settlement.follow_ups.clear();
    let text = match &mut again.settlement.verdict {
        Verdict::Retry { failure, .. } => Some(&mut failure.error),
        Verdict::Dead { failure } => failure.as_mut().map(|failure| &mut failure.error),
        Verdict::Skip { reason } => Some(reason),
        Verdict::Ack | Verdict::Release { .. } => None,
    };
    if let Some(text) = text {
        text.push_str(&unpublished(error));
    }
    again
}

/// The error for outcomes that the settler gives up on after an outage: no time is left before the shutdown,
/// or the leases have ended.
fn given_up(outage: &Error, no_time_left: bool) -> Error {
    if no_time_left {
        let what = format!("no time left before the shutdown: {}", outage.message());
        return outage.clone().with_message(what);
    }
    let what = format!("the leases ended before the engine was available again: {outage}");
    Error::new(Code::LeaseLost, what)
}
