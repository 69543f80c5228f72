//! The layers before the handlers: inbox, crash, staleness, circuit breaker. They decide which handlers may
//! run.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Delivery, EDIT_OF, FailureKind, REPLAY_OF, Verdict};
use smallvec::SmallVec;

use super::{Counted, Judged, Pipeline, millis};
use crate::breaker::{BreakerState, Criticality, Ticket};
use crate::guard;
use crate::handler::Registered;
use crate::runtime::dispatch::Matched;
use crate::stats::Skip;

/// One entry for each handler. Most events have one or two handlers.
pub(super) type Passes = SmallVec<[Pass; 2]>;

/// Whether a handler runs.
pub(super) enum Pass {
    /// It runs, with a ticket of its breaker if it has one.
    Run(Option<Ticket>),
    /// It is skipped, for this reason.
    Skip(&'static str, Skip),
}

impl Pass {
    /// Why the handler is skipped, if it is.
    pub(super) fn skipped(&self) -> Option<(&'static str, Skip)> {
        match self {
            Self::Run(_) => None,
            Self::Skip(reason, skip) => Some((reason, *skip)),
        }
    }
}

impl Pipeline {
    /// Applies the layers before the handlers. Returns which handlers run (`None`: all of them), or as the
    /// error a verdict that ends the delivery without running a handler.
    pub(super) fn enter(
        &self,
        delivery: &Delivery,
        matched: &Matched,
        already_handled: bool,
    ) -> Result<Option<Passes>, Box<Judged>> {
        if already_handled {
            return Err(found_in_inbox().into());
        }
        if let Some(last) = delivery.failures.last()
            && matches!(last.kind, FailureKind::Corrupt | FailureKind::NoHandler)
            && !delivery.retried
        {
            // Either the engine could not read the event, so no handler can; or no process has a handler for
            // the event.
            return Err(Judged {
                verdict: Verdict::Dead { failure: None },
                counted: Counted::Failed { retried: false },
            }
            .into());
        }
        if let Some(crash) = delivery.failures.last()
            && crash.kind == FailureKind::Crash
            && let Some(handler) = most_patient(&matched.handlers)
            && let Some(judged) = self.judge(delivery).after_crash(handler, crash)
        {
            return Err(judged.into());
        }
        if !matched.guarded {
            return Ok(None);
        }
        self.admit(delivery, matched).map(Some)
    }

    /// Checks staleness, then the breaker, of every handler. All handlers are checked before the first one
    /// runs, because one of them may end the delivery: no handler must have run then.
    fn admit(&self, delivery: &Delivery, matched: &Matched) -> Result<Passes, Box<Judged>> {
        let mut passes = Passes::new();
        for handler in &matched.handlers {
            if handler.is_removed() {
                passes.push(Pass::Run(None));
                continue;
            }
            let stale = self.is_stale(delivery, handler, matched);
            passes.push(match &handler.traits.breaker {
                _ if stale => Pass::Skip("stale", Skip::Stale),
                None => Pass::Run(None),
                Some(breaker) => match breaker.try_begin() {
                    Ok(ticket) => {
                        if ticket.is_probe() {
                            let gauge = self.shared.stats.breaker(breaker.name());
                            gauge.set(BreakerState::HalfOpen);
                        }
                        Pass::Run(Some(ticket))
                    }
                    Err(rejected) => {
                        matched.meter.rejected();
                        self.rejected(delivery, handler, rejected.retry_in)?
                    }
                },
            });
        }
        Ok(passes)
    }

    /// Whether the event is older than the limit of the handler, or else of the event type. Never for an event
    /// that was retried, replayed or edited.
    fn is_stale(&self, delivery: &Delivery, handler: &Registered, matched: &Matched) -> bool {
        let most = handler.traits.max_staleness.or(matched.max_staleness);
        let Some(most) = most.filter(|most| !most.is_zero()) else {
            return false;
        };
        let event = &delivery.record.event;
        // The age of an event that was published for a later time is counted from that time.
        let from = event.attributes().and_then(|a| a.not_before);
        let from = from.map_or(event.occurred_at(), |at| at.max(event.occurred_at()));
        let age = self.shared.options.clock.now().since(from);
        let asked_for = |mark| event.metadata().contains_key(mark);
        let wanted = delivery.retried || asked_for(REPLAY_OF) || asked_for(EDIT_OF);
        let stale = age > most && !wanted;
        if stale {
            guard::log(|| {
                tracing::warn!(
                    target: "everbus::dispatch",
                    handler = handler.name,
                    event_age_ms = millis(age),
                    max_staleness_ms = millis(most),
                    reason = "stale",
                    "skipping a stale event"
                );
            });
        }
        stale
    }

    /// Decides what happens when the breaker of a handler is open, by its criticality: best effort skips the
    /// handler, standard makes the event a dead letter, critical releases the event. No attempt is counted.
    fn rejected(
        &self,
        delivery: &Delivery,
        handler: &Registered,
        retry_in: Duration,
    ) -> Result<Pass, Box<Judged>> {
        let dependency = handler.traits.breaker.as_ref().map_or("", |b| b.name());
        let criticality = handler.traits.criticality;
        guard::log(|| {
            tracing::warn!(
                target: "everbus::dispatch",
                resilience_event = "circuit_breaker_rejected",
                dependency,
                handler = handler.name,
                %criticality,
                "the circuit breaker is open; the event cannot be processed"
            );
        });
        match criticality {
            Criticality::BestEffort => Ok(Pass::Skip(
                "the circuit breaker was open (best effort)",
                Skip::BestEffort,
            )),
            Criticality::Standard => Err(self.judge(delivery).rejected(handler, dependency).into()),
            Criticality::Critical => Err(Judged::released(retry_in).into()),
        }
    }
}

fn found_in_inbox() -> Judged {
    guard::log(|| {
        tracing::info!(
            target: "everbus::dispatch",
            "already handled by this group; not handled again"
        );
    });
    Judged {
        verdict: Verdict::Ack,
        counted: Counted::AlreadyHandled,
    }
}

/// The handler whose retry policy allows the most attempts. `None` if all handlers were removed.
pub(super) fn most_patient(handlers: &[Arc<Registered>]) -> Option<&Registered> {
    handlers
        .iter()
        .filter(|handler| !handler.is_removed())
        .max_by_key(|handler| handler.retry.max_attempts())
        .map(|handler| &**handler)
}
