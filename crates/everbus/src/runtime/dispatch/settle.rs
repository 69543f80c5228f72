//! The settler: sends all finished outcomes as one batch, and takes the next batch when that one is
//! durable.
//!
//! While one batch is being committed, the next one fills; there is no timer.

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

/// A lasting problem with settling: the state that the settler keeps between batches.
struct Trouble {
    outage: Outage,
    /// The outcomes to send again were finished at this time or earlier.
    since: Instant,
    /// How many outcomes are to be sent again.
    waiting: usize,
    /// A settlement that is sent again may have taken effect already.
    unknown: bool,
}

impl Runner {
    pub(super) async fn settle_loop(self: Arc<Self>) {
        let mut trouble = Trouble {
            outage: Outage::none(&self.group, "settling", FIRST_PAUSE, LONGEST_PAUSE),
            since: Instant::now(),
            waiting: 0,
            unknown: false,
        };
        loop {
            match self.queue.take_outcomes() {
                Outcomes::Send(batch) => self.settle(&batch, &mut trouble).await,
                Outcomes::Wait => {
                    self.depth.set(self.queue.depth());
                    self.queue.outcomes().await;
                }
                Outcomes::End => return,
            }
        }
    }

    /// Settles a batch. Outcomes that the engine could not take now are sent again with the next batch,
    /// until the engine takes them or their lease has ended: an outage must not make the handlers repeat
    /// their work.
    async fn settle(&self, batch: &[Finished], trouble: &mut Trouble) {
        if batch.len() > trouble.waiting {
            // Some outcomes are new, with leases that may last longer.
            trouble.since = Instant::now();
        }
        let settlements = batch.iter().map(|f| f.settlement.clone()).collect();
        let (again, error) = match self.shared.engine.broker.settle(settlements).await {
            Ok(answers) if answers.len() != batch.len() => {
                let error = Error::new(Code::Internal, "not every outcome was answered");
                return self.settling_failed(batch, &error);
            }
            Ok(answers) => self.sort_out(batch, answers, trouble),
            Err(error) if error.class().may_repeat() => {
                trouble.unknown |= error.class() == Class::Unknown;
                (batch.iter().map(Finished::again).collect(), Some(error))
            }
            Err(error) => {
                trouble.outage.forget();
                return self.settling_failed(batch, &error);
            }
        };
        let Some(error) = error else {
            (trouble.waiting, trouble.unknown) = (0, false);
            trouble.outage.is_over();
            if !again.is_empty() {
                self.queue.send_again(again);
            }
            return;
        };
        let pause = trouble.outage.goes_on(&error);
        let give_up = self.queue.finish_by();
        let no_time_left = give_up.is_some_and(|by| Instant::now() + pause > by);
        if no_time_left || self.leases_are_over(trouble.since) {
            (trouble.waiting, trouble.unknown) = (0, false);
            trouble.outage.forget();
            return self.settling_failed(&again, &given_up(&error, no_time_left));
        }
        trouble.waiting = again.len();
        self.queue.send_again(again);
        tokio::time::sleep(pause).await;
    }

    /// Counts the durable outcomes and returns those to send again: outcomes that the engine could not
    /// take, with the reason, and new verdicts for outcomes that it refused.
    fn sort_out(
        &self,
        batch: &[Finished],
        answers: Vec<Result<(), Error>>,
        trouble: &mut Trouble,
    ) -> (Vec<Finished>, Option<Error>) {
        // The clock and the metrics recorder are user code: a panic in them must not end the settler.
        let now = guard::contain(|| self.shared.options.clock.now()).ok();
        let (mut again, mut passing) = (Vec::new(), None);
        // Read before the answers of this batch change it.
        let sent_before = trouble.unknown;
        for (finished, answer) in batch.iter().zip(answers) {
            let error = match answer {
                Ok(()) => {
                    self.settled(finished, now);
                    continue;
                }
                Err(error) => error,
            };
            match error.class() {
                Class::Passing | Class::Unknown => {
                    trouble.unknown |= error.class() == Class::Unknown;
                    again.push(finished.again());
                    passing.get_or_insert(error);
                }
                // The first settlement may have ended the lease, or the lease was lost since. The two cases
                // cannot be told apart, and neither needs an action.
                Class::Conflict if sent_before && error.code() == Code::LeaseLost => {
                    self.settled(finished, now);
                }
                Class::Final => self.settling_failed(std::slice::from_ref(finished), &error),
                _ => again.extend(self.refused(finished, &error)),
            }
        }
        (again, passing)
    }

    /// An outcome is durable.
    fn settled(&self, finished: &Finished, now: Option<Timestamp>) {
        drop(guard::contain(|| self.count(finished, now)));
        let case = finished.case.as_ref();
        let deferred = case.map(|case| case.take_deferred());
        for Deferred { handler, ticket } in deferred.unwrap_or_default() {
            self.tell_breaker(&handler, ticket, Ticket::succeeded);
        }
    }

    /// The engine refused this outcome. If the handler's events or effect caused it, the attempt has
    /// failed; otherwise the event is delivered again when its lease ends.
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
        // Only the handler whose effect failed has failed. The effects of the others were rolled back too.
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

    /// Counts an outcome that is durable, and the events that were published with it.
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

    /// Reports the end of an attempt with an effect to the breaker of its handler.
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

    /// Acks nothing: the events are delivered again when their leases end.
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

/// Turns a refusal of the engine into a failure of the handler: an effect that failed, with its error, or
/// events that cannot be published and that another run would publish again.
fn why_refused(error: &Error) -> HandlerError {
    match error.code() {
        Code::EffectFailed => HandlerError::from_box(error),
        _ => HandlerError::permanent(error.clone()),
    }
}

/// The same outcome without the refused events; its failure or reason mentions them.
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

/// Why outcomes are not sent again after an outage.
fn given_up(outage: &Error, no_time_left: bool) -> Error {
    if no_time_left {
        let what = format!("no time left before the shutdown: {}", outage.message());
        return outage.clone().with_message(what);
    }
    let what = format!("the leases ended before the engine was available again: {outage}");
    Error::new(Code::LeaseLost, what)
}
