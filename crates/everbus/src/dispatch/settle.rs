//! The settler: sends every outcome there is as one batch, and takes the next when that is durable.
//!
//! While one batch is being committed the next one gathers by itself; there is no timer.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Error, Settlement, Timestamp};
use tokio::time::Instant;

use super::Runner;
use super::queue::Outcomes;
use crate::breaker::{Change, Ticket};
use crate::guard;
use crate::handler::{HandlerError, Registered};
use crate::pipeline::{Counted, Deferred, Finished, InEffect};

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl Runner {
    pub(super) async fn settle_loop(self: Arc<Self>) {
        loop {
            match self.queue.take_outcomes() {
                Outcomes::Send(batch) => self.settle(batch).await,
                Outcomes::Wait => {
                    self.depth.set(self.queue.depth());
                    self.queue.outcomes().await;
                }
                Outcomes::End => return,
            }
        }
    }

    /// Settles a batch, again and again as long as the engine is only too busy. A lease that ends
    /// meanwhile is answered as lost.
    async fn settle(&self, mut batch: Arc<Vec<Finished>>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let settlements = batch.iter().map(|f| f.settlement.clone()).collect();
            let mut busy = true;
            match self.shared.engine.broker.settle(settlements).await {
                Ok(answers) if answers.len() != batch.len() => {
                    let error = Error::new(Code::Internal, "not every outcome was answered");
                    return self.settling_failed(&batch, &error);
                }
                Ok(answers) => {
                    let again = self.sort_out(&batch, answers, &mut busy);
                    if again.is_empty() {
                        return;
                    }
                    batch = Arc::new(again);
                    self.queue.still_sending(batch.clone());
                }
                Err(error) if is_passing(&error) => {}
                Err(error) => return self.settling_failed(&batch, &error),
            }
            if !busy {
                continue;
            }
            let give_up = self.queue.finish_by();
            if give_up.is_some_and(|by| Instant::now() + pause > by) {
                let error = Error::new(Code::Busy, "no time left before the shutdown");
                return self.settling_failed(&batch, &error);
            }
            guard::log(|| {
                tracing::warn!(
                    target: "everbus::dispatch",
                    group = %self.group,
                    outcomes = batch.len(),
                    "the engine is too busy to settle; trying again"
                );
            });
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Counts what is durable and returns what is to be sent again: what the engine had no time for,
    /// and new verdicts on what it refused. `busy` says whether some of it was the former.
    fn sort_out(
        &self,
        batch: &[Finished],
        answers: Vec<Result<(), Error>>,
        busy: &mut bool,
    ) -> Vec<Finished> {
        *busy = false;
        // The clock and the recorder of metrics are other people's code: they must not end the settler.
        let now = guard::contain(|| self.shared.options.clock.now()).ok();
        let mut again = Vec::new();
        for (finished, answer) in batch.iter().zip(answers) {
            match answer {
                Ok(()) => {
                    drop(guard::contain(|| self.count(finished, now)));
                    let case = finished.case.as_ref();
                    let deferred = case.map(|case| case.take_deferred());
                    for Deferred { handler, ticket } in deferred.unwrap_or_default() {
                        self.tell_breaker(&handler, ticket, Ticket::succeeded);
                    }
                }
                Err(error) if is_passing(&error) => {
                    *busy = true;
                    again.push(finished.again());
                }
                Err(error) => again.extend(self.refused(finished, &error)),
            }
        }
        again
    }

    /// The engine will not have this outcome. If that is because of what the handler came up with, the
    /// attempt has failed; otherwise the event comes again by itself.
    fn refused(&self, finished: &Finished, error: &Error) -> Option<Finished> {
        let (group, seq) = (&self.group, finished.settlement.lease.position);
        if error.code() == Code::LeaseLost {
            self.shared.count_lost_lease();
            guard::log(|| {
                tracing::warn!(target: "everbus::dispatch", %group, seq, "the lease was lost before the outcome was settled; the event is delivered again");
            });
            return None;
        }
        let Some(case) = &finished.case else {
            self.queue.count_unsettled(std::slice::from_ref(finished));
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", %group, seq, %error, "an outcome could not be settled; the event is delivered again");
            });
            return None;
        };
        let culprit = case.culprit();
        let mut probing = false;
        // Only whose effect failed has failed; what the others wanted done was not done either.
        for Deferred { handler, ticket } in case.take_deferred() {
            if error.code() == Code::EffectFailed && Arc::ptr_eq(&handler, &culprit) {
                probing = ticket.is_probe();
                self.tell_breaker(&handler, ticket, Ticket::failed);
            }
        }
        let options = &self.shared.options;
        let why = why_refused(error);
        let (verdict, counted) = case.refused(group, options, &culprit, probing, why);
        Some(Finished {
            settlement: Settlement::new(finished.settlement.lease.clone(), verdict),
            counted,
            received_at: finished.received_at,
            route: finished.route.clone(),
            case: None,
        })
    }

    /// Counts an outcome that is durable, and the events that were published with it.
    fn count(&self, finished: &Finished, now: Option<Timestamp>) {
        let settlement = &finished.settlement;
        for event in &settlement.follow_ups {
            self.shared.stats.publishing(event.type_arc()).published(1);
        }
        let in_effect = finished
            .case
            .as_ref()
            .and_then(|case| case.in_effect.as_ref());
        for event_type in in_effect.map(InEffect::types).unwrap_or_default() {
            self.shared.stats.publishing(&event_type).published(1);
        }
        let meter = &finished.route.meter;
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

    /// The attempt of a handler with an effect has ended.
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

    /// Nothing is acked by this: the events are delivered again when their leases end.
    fn settling_failed(&self, batch: &[Finished], error: &Error) {
        self.queue.count_unsettled(batch);
        self.shared.fail_if_fatal(error);
        let (group, outcomes) = (&self.group, batch.len());
        guard::log(|| {
            tracing::error!(target: "everbus::dispatch", %group, outcomes, %error, "outcomes could not be settled; their events are delivered again");
        });
    }
}

/// What the engine refused is the handler's failure: an effect that failed, with the answer it gave, or
/// events that cannot be published, which another run would publish again.
fn why_refused(error: &Error) -> HandlerError {
    match error.code() {
        Code::EffectFailed => HandlerError::from_box(error),
        _ => HandlerError::permanent(error.clone()),
    }
}

/// Whether the same call may well succeed a little later.
fn is_passing(error: &Error) -> bool {
    matches!(error.code(), Code::Busy | Code::DiskFull)
}
