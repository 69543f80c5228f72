//! The pipeline: what happens to one delivery between the queue and its settlement.
//!
//! The order of the layers is fixed here and nowhere else:
//!
//! ```text
//! trace + log + metrics → inbox → staleness → circuit breaker → overflow → timeout → user layers → handler → settle
//! ```
//!
//! [`deliver`] runs once per delivery. The inbox is read when deliveries are fetched, for a whole batch at
//! once; the result comes with the delivery. Metrics are counted when the outcome is settled.

mod admit;
mod attempt;
mod effects;
mod follow_ups;
mod judge;

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use everbus_core::{
    Code, Delivery, Error, Event, GroupName, ManualClock, Ran as LastRun, Settlement, Verdict,
};
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::Instrument;

use crate::ambient;
use crate::breaker::Ticket;
use crate::guard;
use crate::handler::message::Message;
use crate::handler::outcome::Outcome;
use crate::handler::{HandlerError, Registered, Slot};
use crate::overflow;
use crate::runtime::bus::Shared;
use crate::runtime::dispatch::Matched;
use crate::stats::Skip;

use admit::{Pass, most_patient};
use attempt::Begun;
pub(crate) use effects::EffectsRun;
use effects::OfHandler;
pub(crate) use follow_ups::FailedAttempt;
use judge::Judge;
pub(crate) use judge::{Case, Deferred};

/// State that all deliveries of a group share.
pub(crate) struct Pipeline {
    pub(crate) shared: Arc<Shared>,
    pub(crate) group: GroupName,
}

/// Memory that a worker reuses from one delivery to the next, to allocate less.
#[derive(Default)]
pub(crate) struct Spare {
    /// The message of the last delivery.
    message: Option<Message>,
    slot: Slot,
}

/// The result of a delivery: the outcome to make durable, and what to count afterwards.
pub(crate) struct Finished {
    pub(crate) settlement: Settlement,
    pub(crate) counted: Counted,
    pub(crate) received_at: everbus_core::Timestamp,
    pub(crate) matched: Arc<Matched>,
    /// For an attempt with events or an effect: what is needed to judge it again if the engine refuses them.
    pub(crate) case: Option<Box<Case>>,
}

impl Finished {
    /// A copy to send again.
    pub(crate) fn again(&self) -> Finished {
        Finished {
            settlement: self.settlement.clone(),
            counted: self.counted,
            received_at: self.received_at,
            matched: self.matched.clone(),
            case: self.case.clone(),
        }
    }
}

/// How a delivery is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    Handled {
        took: Duration,
    },
    AlreadyHandled,
    Skipped(Skip),
    Failed {
        retried: bool,
    },
    /// Failed as the probe of a breaker, and released.
    ProbeFailed,
    /// Dead-lettered without an attempt, by an open breaker.
    Rejected,
    /// Released; nothing is counted.
    Nothing,
}

/// A verdict and how it is counted.
struct Judged {
    verdict: Verdict,
    counted: Counted,
}

impl Judged {
    fn released(after: Duration) -> Self {
        Self {
            verdict: Verdict::Release { after },
            counted: Counted::Nothing,
        }
    }
}

/// The result of running the handlers. It is returned through every layer, so it is kept small: nearly all
/// deliveries are handled without events and effects.
enum Ran {
    /// Handled without events and effects.
    Handled { took: Duration },
    /// Every other result.
    Otherwise(Box<Done>),
}

impl Ran {
    /// How long the handlers ran, if they handled the event.
    fn took(&self) -> Option<Duration> {
        match self {
            Self::Handled { took } => Some(*took),
            Self::Otherwise(done) => match done.judged.counted {
                Counted::Handled { took } => Some(took),
                _ => None,
            },
        }
    }
}

impl From<Done> for Ran {
    fn from(done: Done) -> Self {
        Self::Otherwise(Box::new(done))
    }
}

impl From<Judged> for Ran {
    fn from(judged: Judged) -> Self {
        Done::from(judged).into()
    }
}

/// The result of a delivery that was not simply handled: any verdict, with the events and effects of the
/// handlers.
struct Done {
    judged: Judged,
    /// How long the handlers ran. `None` if no handler ran, or if the attempt failed.
    took: Option<Duration>,
    events: Vec<Event>,
    effects: Vec<OfHandler>,
    /// The handler of the events and effects; if several handlers have some, the last of these.
    author: Option<Arc<Registered>>,
    /// The reports to the breakers of the handlers with effects.
    deferred: Vec<Deferred>,
}

impl From<Judged> for Done {
    fn from(judged: Judged) -> Self {
        Self {
            judged,
            took: None,
            events: Vec::new(),
            effects: Vec::new(),
            author: None,
            deferred: Vec::new(),
        }
    }
}

/// The target of the log line of each handled event.
const HANDLED: &str = "everbus::handled";

impl Pipeline {
    /// Takes one delivery through all layers. A panic on the way is a failure of the attempt.
    pub(crate) async fn deliver(
        &self,
        delivery: Delivery,
        matched: Arc<Matched>,
        already_handled: bool,
        spare: &mut Spare,
    ) -> Finished {
        let span = crate::runtime::trace::span(&self.group, &delivery.record, delivery.attempt);
        let result = {
            let run = pin!(self.run(&delivery, &matched, already_handled, spare));
            let run = guard::contained(run);
            if span.is_disabled() {
                run.await
            } else {
                run.instrument(span.clone()).await
            }
        };
        let ran = result.unwrap_or_else(|said| match most_patient(&matched.handlers) {
            Some(handler) => span.in_scope(|| {
                // The clock is user code and may have caused the panic. If it panics again, the time of the
                // publish stands in for the time of the failure.
                let now = guard::contain(|| self.shared.options.clock.now());
                let judge = Judge {
                    clock: &ManualClock::new(now.unwrap_or(delivery.record.received_at)),
                    ..self.judge(&delivery)
                };
                let error = HandlerError::panicked(said.into());
                judge.failed(handler, None, error).into()
            }),
            None => Judged::released(Duration::ZERO).into(),
        });
        if tracing::enabled!(target: HANDLED, tracing::Level::DEBUG)
            && let Some(took) = ran.took()
        {
            let duration_ms = took.as_secs_f64() * 1000.0;
            guard::log(|| {
                span.in_scope(|| tracing::debug!(target: HANDLED, duration_ms, "event handled"));
            });
        }
        let last = (delivery.retried || !delivery.failures.is_empty())
            .then(|| &*self.shared.options.worker_name);
        match ran {
            Ran::Handled { took } => {
                let mut settlement = Settlement::new(delivery.lease, Verdict::Ack);
                settlement.inbox = matched.idempotent;
                settlement.ran = last.map(|worker| Box::new(LastRun::new(Some(took), worker)));
                Finished {
                    settlement,
                    counted: Counted::Handled { took },
                    received_at: delivery.record.received_at,
                    matched,
                    case: None,
                }
            }
            Ran::Otherwise(done) => {
                let ran = last.map(|worker| Box::new(LastRun::new(done.took, worker)));
                self.finish(delivery, matched, *done, ran)
            }
        }
    }

    /// Builds the settlement of a delivery that was not simply handled.
    fn finish(
        &self,
        delivery: Delivery,
        matched: Arc<Matched>,
        done: Done,
        ran: Option<Box<LastRun>>,
    ) -> Finished {
        let acked = done.judged.verdict == Verdict::Ack;
        let took = done.took;
        let mut settlement = Settlement::new(delivery.lease, done.judged.verdict);
        settlement.follow_ups = done.events;
        settlement.ran = ran;
        let mut last_run = None;
        if acked {
            settlement.inbox = matched.idempotent && done.judged.counted != Counted::AlreadyHandled;
            let joined = effects::join(done.effects, &self.shared, &delivery.record, &self.group);
            (settlement.effect, last_run) = joined.unzip();
        }
        let case = done.author.map(|handler| {
            Box::new(Case {
                handler,
                record: delivery.record.clone(),
                attempt: delivery.attempt,
                retried: delivery.retried,
                took,
                deferred: Arc::new(Mutex::new(done.deferred)),
                effects: last_run,
            })
        });
        Finished {
            settlement,
            counted: done.judged.counted,
            received_at: delivery.record.received_at,
            matched,
            case,
        }
    }

    fn judge<'a>(&'a self, delivery: &'a Delivery) -> Judge<'a> {
        Judge {
            clock: &*self.shared.options.clock,
            record: &delivery.record,
            attempt: delivery.attempt,
            worker: &self.shared.options.worker_name,
            took: None,
        }
    }

    /// Runs the layers before the handlers, then the handlers.
    ///
    /// The handlers run one after another. The first failure ends the attempt, and the retry policy of the
    /// failed handler decides. If one handler skips the event, the others still run; the event counts as
    /// skipped if no handler handled it.
    ///
    /// One long function on purpose: each async function that awaits another one copies its future.
    async fn run(
        &self,
        delivery: &Delivery,
        matched: &Matched,
        already_handled: bool,
        spare: &mut Spare,
    ) -> Ran {
        let mut passes = match self.enter(delivery, matched, already_handled) {
            Ok(passes) => passes,
            Err(judged) => return (*judged).into(),
        };
        let whole;
        let delivery = if !overflow::is_apart(&delivery.record.event) {
            delivery
        } else {
            match Box::pin(self.whole(delivery)).await {
                Ok(delivery) => {
                    whole = delivery;
                    &whole
                }
                Err(error) => return self.unreadable(delivery, matched, &error).into(),
            }
        };
        let (mut events, mut effects) = (Vec::new(), Vec::new());
        let mut author = None;
        let mut deferred = Vec::new();
        let mut handled = false;
        let mut skipped = None;
        let started = Instant::now();
        for (index, handler) in matched.handlers.iter().enumerate() {
            if handler.is_removed() {
                continue;
            }
            let ticket = match &mut passes {
                None => None,
                Some(passes) => match passes.get_mut(index) {
                    Some(Pass::Run(ticket)) => ticket.take(),
                    _ => continue,
                },
            };
            let began = if index == 0 { started } else { Instant::now() };
            let (shared, group) = (&self.shared, &self.group);
            let message = Message::reusing(
                spare.message.take(),
                &shared.environment,
                delivery,
                group,
                handler,
                began,
            );
            let result = match matched.check(&delivery.record.event, handler) {
                Ok(()) => {
                    // Most handlers finish in the first poll.
                    let begun = poll_fn(|cx| {
                        Poll::Ready(attempt::begin(handler, &message, &mut spare.slot, cx))
                    });
                    match begun.await {
                        Begun::Ended(result) => result,
                        Begun::Running(run) => attempt::finish(run, handler, &message).await,
                    }
                }
                Err(error) => Err(error.into()),
            };
            let staged = message.take_follow_ups();
            let result = match result {
                Ok(outcome) if staged.is_empty() && outcome.is_plain() => Ok(outcome),
                Ok(outcome) => {
                    match follow_ups::complete(&self.shared, &message, staged, outcome) {
                        Ok(outcome) => follow_ups::offload(&self.shared, outcome).await,
                        Err(error) => Err(error),
                    }
                }
                Err(error) => Err(error),
            };
            spare.message = Some(message);
            let probing = ticket.as_ref().is_some_and(Ticket::is_probe);
            if let Some(ticket) = ticket {
                match &result {
                    // The breaker is told after the effect has run.
                    Ok(part) if !part.effects.is_empty() => {
                        let handler = handler.clone();
                        deferred.push(Deferred { handler, ticket });
                    }
                    _ => self.tell_breaker(handler, ticket, &result),
                }
            }
            match result {
                Ok(outcome) => {
                    handled = true;
                    if !outcome.is_plain() {
                        author = Some(handler.clone());
                        events.extend(outcome.events);
                        if !outcome.effects.is_empty() {
                            let source = self.shared.options.source.as_ref();
                            effects.push(OfHandler {
                                handler: handler.clone(),
                                inherited: ambient::emitted_by(&delivery.record, source),
                                effects: outcome.effects,
                            });
                        }
                    }
                }
                Err(error) if probing && self.judge(delivery).waits(handler, &error) => {
                    return self.judge(delivery).probe_failed(handler, &error).into();
                }
                Err(mut error) => {
                    let failed = FailedAttempt {
                        record: &delivery.record,
                        group: &self.group,
                        handler: &handler.name,
                        attempt: delivery.attempt,
                        retried: delivery.retried,
                    };
                    let of_failure = failed.take_events(&self.shared, &mut error);
                    let judge = self.judge(delivery).ran_for(started.elapsed());
                    let judged = judge.failed(handler, Some(&handler.name), error);
                    let Verdict::Skip { reason } = judged.verdict else {
                        let done = Done {
                            events: of_failure,
                            ..Done::from(judged)
                        };
                        return done.into();
                    };
                    skipped = skipped.or(Some(reason));
                    if !of_failure.is_empty() {
                        author = Some(handler.clone());
                        events.extend(of_failure);
                    }
                }
            }
        }
        let took = started.elapsed();
        if handled && author.is_none() {
            return Ran::Handled { took };
        }
        let judged = match skipped {
            _ if handled => Judged {
                verdict: Verdict::Ack,
                counted: Counted::Handled { took },
            },
            Some(reason) => skipped_as(reason, Skip::Handler),
            // No handler ran. Either a layer skipped a handler (stale, or an open breaker), or all handlers
            // were unsubscribed after the event was queued.
            None => match passes.iter().flatten().find_map(Pass::skipped) {
                Some((reason, skip)) => skipped_as(reason, skip),
                None => Judged::released(Duration::ZERO),
            },
        };
        Done {
            judged,
            took: Some(took),
            events,
            effects,
            author,
            deferred,
        }
        .into()
    }

    /// Reads the moved part of the event from the object store, and returns the delivery with the complete
    /// event. Fails if this takes longer than the default timeout of handlers.
    async fn whole(&self, delivery: &Delivery) -> Result<Delivery, Error> {
        let limit = self.shared.options.timeout;
        let whole = tokio::time::timeout(limit, self.shared.whole(&delivery.record)).await;
        let record = whole.unwrap_or_else(|_| {
            Err(Error::new(
                Code::ObjectStoreError,
                format!("the object store did not answer within {limit:?}"),
            ))
        })?;
        let mut whole = delivery.clone();
        whole.record = record;
        Ok(whole)
    }

    /// The verdict for an event whose moved part cannot be read: a failure of the handler with the most
    /// attempts, or a release if there is no handler any more.
    fn unreadable(&self, delivery: &Delivery, matched: &Matched, error: &Error) -> Judged {
        match most_patient(&matched.handlers) {
            Some(handler) => {
                let error = HandlerError::unreadable(error);
                self.judge(delivery).failed(handler, None, error)
            }
            None => Judged::released(Duration::ZERO),
        }
    }

    /// Reports the result of an attempt to the breaker of its handler. Failures that say nothing about the
    /// dependency end the ticket without a result: an event that cannot be decoded, a handler that skips the
    /// event.
    fn tell_breaker(
        &self,
        handler: &Registered,
        ticket: Ticket,
        result: &Result<Outcome, HandlerError>,
    ) {
        let change = match result {
            Ok(_) => ticket.succeeded(),
            Err(error) if error.is_about_the_event() => ticket.abandon(),
            Err(_) => ticket.failed(),
        };
        if let Some(change) = change {
            self.shared.circuit_changed(&self.group, handler, change);
        }
    }
}

fn skipped_as(reason: impl Into<String>, skip: Skip) -> Judged {
    Judged {
        verdict: Verdict::Skip {
            reason: reason.into(),
        },
        counted: Counted::Skipped(skip),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
