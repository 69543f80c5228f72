//! Settlements of a broker with a store beside it. Everything that belongs to a verdict is durable in the broker
//! and the store before the broker gets the verdict itself.
//!
//! A batch is settled together: its events are one append, and its inbox records are one write for each group. So
//! an ack with an inbox record costs little more than one without.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use everbus_core::{
    Appended, Burial, Code, Delivery, Error, Event, Failure, GroupName, Lease, Recorded, Result,
    Settlement, Verdict, dead_letter_notice,
};

use super::broker::{Beside, Held};
use super::dead_letters::original_of;
use crate::guard;

/// One settlement of a batch.
struct Step {
    lease: Lease,
    verdict: Verdict,
    /// The events of the verdict that are not in the broker yet.
    events: Vec<Event>,
    inbox: bool,
    /// The delivery to settle, or the error if it cannot be settled.
    held: Result<Held>,
}

impl Step {
    fn refuse(&mut self, error: Error) {
        self.held = Err(error);
    }

    /// The delivery, if the store must record before the ack that it was handled: for the inbox, or because the
    /// event has earlier failures, which must not count if the event is ever delivered again.
    fn to_record(&self) -> Option<&Held> {
        let held = self.held.as_ref().ok()?;
        let is_needed = self.inbox || !held.delivery.failures.is_empty();
        (self.verdict == Verdict::Ack && is_needed).then_some(held)
    }
}

/// What happens after the store is written.
enum Next {
    /// The broker gets this verdict.
    Tell(Verdict),
    /// The broker gets no verdict; the event waits in this process until it is due.
    Wait(Duration, Box<Delivery>),
}

/// The events that the store records as handled for one step of the batch.
struct Handled {
    index: usize,
    records: Vec<Arc<Recorded>>,
}

impl Beside {
    pub(super) async fn settle_all(&self, settlements: Vec<Settlement>) -> Result<Vec<Result<()>>> {
        let mut steps: Vec<Step> = settlements.into_iter().map(|s| self.begin(s)).collect();
        self.append_events(&mut steps).await;
        self.record_handled(&mut steps).await;
        let mut answers: Vec<Result<()>> = Vec::with_capacity(steps.len());
        let mut told = Vec::new();
        let mut tell = Vec::new();
        for (index, step) in steps.into_iter().enumerate() {
            let answer = match step.held {
                Ok(held) => match self.prepare(&held, step.verdict).await {
                    Ok(Next::Tell(verdict)) => {
                        told.push(index);
                        tell.push(Settlement::new(step.lease, verdict));
                        Ok(())
                    }
                    Ok(Next::Wait(after, delivery)) => self.wait(&held, after, *delivery).await,
                    Err(error) => Err(error),
                },
                Err(error) => Err(error),
            };
            answers.push(answer);
        }
        if tell.is_empty() {
            return Ok(answers);
        }
        let leases: Vec<Lease> = tell.iter().map(|s| s.lease.clone()).collect();
        let from_broker = match self.shared.broker.settle(tell).await {
            Ok(from_broker) => from_broker,
            Err(error) if told.len() == answers.len() => return Err(error),
            Err(error) => {
                // The other events of the batch wait in this process already and must not be settled again, so
                // the batch does not fail as a whole.
                for index in told {
                    answers[index] = Err(error.clone());
                }
                return Ok(answers);
            }
        };
        let mut held = self.shared.lock();
        for ((index, lease), answer) in told.into_iter().zip(leases).zip(from_broker) {
            let over = match &answer {
                Ok(()) => true,
                Err(error) => error.code() == Code::LeaseLost,
            };
            if over {
                held.remove(&lease);
            }
            answers[index] = answer;
        }
        Ok(answers)
    }

    fn begin(&self, settlement: Settlement) -> Step {
        let lease = settlement.lease;
        let held = match (settlement.effect, self.shared.held(&lease)) {
            (Some(_), Some(_)) => Err(Error::new(
                Code::Unsupported,
                "this broker has no transactions for effects",
            )
            .hint("do the effect in the handler, with the context's idempotency key")),
            (None, Some(held)) => Ok(held),
            // The delivery was settled already, its lease has ended, or this process never handed it out. The
            // broker must not get a verdict that the store does not have.
            (_, None) => Err(Error::new(
                Code::LeaseLost,
                format!("the lease on event {} had ended", lease.position()),
            )),
        };
        let is_new = |held: &Held| !held.appended.load(Ordering::Acquire);
        let events = match &held {
            Ok(held) if is_new(held) => settlement.follow_ups,
            _ => Vec::new(),
        };
        Step {
            lease,
            verdict: settlement.verdict,
            events,
            inbox: settlement.inbox,
            held,
        }
    }

    /// Appends the events of all verdicts to the broker, in the order of the batch. A step whose events cannot be
    /// appended is refused. A repetition uses the same ids, so the broker or the inboxes of the groups recognise
    /// duplicates.
    async fn append_events(&self, steps: &mut [Step]) {
        let mut events = Vec::new();
        let mut of_steps: Vec<(&mut Step, usize)> = Vec::new();
        for step in steps.iter_mut().filter(|step| !step.events.is_empty()) {
            events.extend(step.events.iter().cloned());
            let count = step.events.len();
            of_steps.push((step, count));
        }
        if of_steps.is_empty() {
            return;
        }
        let count = events.len();
        match self.shared.broker.append(events).await {
            Ok(answers) if answers.len() == count => {
                let mut answers = answers.into_iter();
                for (step, count) in of_steps {
                    let own: Vec<_> = answers.by_ref().take(count).collect();
                    appended(
                        step,
                        own.into_iter()
                            .try_for_each(|answer| stored(answer.map(drop))),
                    );
                }
            }
            // One event may have made the whole batch fail, so the events of each step are appended on their own.
            Err(error)
                if error.code() == Code::IdReused
                    || of_steps.len() > 1 && !error.class().may_repeat() =>
            {
                for (step, _) in of_steps {
                    let outcome = self.append_first(step.events.clone()).await;
                    appended(step, outcome);
                }
            }
            answer => {
                let none = || Error::new(Code::Internal, "not every event was answered");
                let error = answer.err().unwrap_or_else(none);
                of_steps
                    .into_iter()
                    .for_each(|(step, _)| step.refuse(error.clone()));
            }
        }
    }

    /// Appends the events of one verdict. An event that is already stored with another body counts as appended.
    async fn append_first(&self, events: Vec<Event>) -> Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        let answers = match self.shared.broker.append(events.clone()).await {
            // If the broker stores a batch as a whole, one refused event refuses the others too.
            Err(error) if error.code() == Code::IdReused && events.len() > 1 => {
                let mut answers = Vec::with_capacity(events.len());
                for event in events {
                    answers.push(self.append_one(event).await);
                }
                answers
            }
            Err(error) if error.code() == Code::IdReused => vec![Err(error)],
            answers => answers?,
        };
        let mut answers = answers.into_iter();
        answers.try_for_each(|answer| stored(answer.map(drop)))
    }

    async fn append_one(&self, event: Event) -> Result<Appended> {
        let answers = self.shared.broker.append(vec![event]).await?;
        let missing = || Err(Error::new(Code::Internal, "an append was not answered"));
        answers.into_iter().next().unwrap_or_else(missing)
    }

    /// Records handled events in the store, with one write for each group. A step whose record cannot be written is
    /// refused.
    async fn record_handled(&self, steps: &mut [Step]) {
        let mut groups: Vec<(GroupName, Vec<Handled>)> = Vec::new();
        for (index, step) in steps.iter_mut().enumerate() {
            let Some(held) = step.to_record() else {
                continue;
            };
            let (group, record) = (held.group.clone(), held.delivery.record.clone());
            let records = match original_of(&*self.letters, &record, &group).await {
                Ok(original) if original.event.id() == record.event.id() => vec![record],
                // The original is recorded too, because the broker may deliver it once more.
                Ok(original) => vec![record, original],
                Err(error) => {
                    step.refuse(error);
                    continue;
                }
            };
            let handled = Handled { index, records };
            match groups.iter_mut().find(|(name, _)| *name == group) {
                Some((_, all)) => all.push(handled),
                None => groups.push((group, vec![handled])),
            }
        }
        for (group, all) in groups {
            let records = all.iter().flat_map(|handled| &handled.records);
            let records = records.cloned().collect();
            let store = &self.shared.store;
            let Err(error) = store.record_handled(group.clone(), records).await else {
                continue;
            };
            // One record may have made the whole write fail, so each step is written on its own.
            let one_by_one = all.len() > 1 && !error.class().may_repeat();
            for Handled { index, records } in all {
                let told = match one_by_one {
                    true => store.record_handled(group.clone(), records).await,
                    false => Err(error.clone()),
                };
                if let Err(error) = told {
                    steps[index].refuse(error);
                }
            }
        }
    }

    /// Records a skip, a failure or a dead letter in the store, and returns what happens next. An ack needs
    /// nothing here: [`record_handled`](Self::record_handled) has recorded it.
    async fn prepare(&self, held: &Held, verdict: Verdict) -> Result<Next> {
        let store = &self.shared.store;
        let (group, record) = (held.group.clone(), held.delivery.record.clone());
        match verdict {
            Verdict::Ack => Ok(Next::Tell(Verdict::Ack)),
            Verdict::Skip { reason } => {
                store.record_skip(group, record, reason).await?;
                Ok(Next::Tell(Verdict::Ack))
            }
            Verdict::Retry { after, failure } => {
                store.record_failure(group, record, failure.clone()).await?;
                let mut again = held.delivery.clone();
                again.attempt += 1;
                again.held_for = Duration::ZERO;
                again.failures.push(failure.clone());
                let verdict = Verdict::Retry { after, failure };
                Ok(self.later(after, again, verdict))
            }
            Verdict::Dead { failure } if self.ephemeral().contains(&group) => {
                Ok(Next::Tell(Verdict::Dead { failure }))
            }
            Verdict::Dead { failure } => {
                self.bury(held, failure).await?;
                Ok(Next::Tell(Verdict::Ack))
            }
            Verdict::Release { after } => {
                let again = held.delivery.clone();
                Ok(self.later(after, again, Verdict::Release { after }))
            }
        }
    }

    /// Whether the broker can delay a delivery by this time.
    fn can_delay(&self, after: Duration) -> bool {
        self.shared.offers.native_delay || after.is_zero()
    }

    /// Lets the broker delay the event if it can; otherwise the event waits in this process.
    fn later(&self, after: Duration, again: Delivery, verdict: Verdict) -> Next {
        if self.can_delay(after) {
            Next::Tell(verdict)
        } else {
            Next::Wait(after, Box::new(again))
        }
    }

    /// Stores the dead letter, then publishes the notice about it. Repeating both is harmless.
    async fn bury(&self, held: &Held, failure: Option<Failure>) -> Result<()> {
        let Held {
            group, delivery, ..
        } = held;
        let mut failures = delivery.failures.clone();
        // Without a new failure, the event is given up because of earlier failures: this delivery was no attempt.
        let was_none = failure.is_none() && !failures.is_empty();
        let attempts = delivery.attempt.saturating_sub(u32::from(was_none));
        failures.extend(failure);
        let died_at = failures
            .last()
            .map_or_else(|| self.shared.clock.now(), |f| f.at);
        // If the delivery is the copy of a retry, the dead letter is that of the original event.
        let record = original_of(&*self.letters, &delivery.record, group).await?;
        let mut letter = Burial::new(record.clone(), group.clone(), attempts, failures, died_at);
        if record.event.id() != delivery.record.event.id() {
            letter = letter.of_sent_back();
        }
        self.shared.store.bury(letter).await?;
        // Read again, because the store adds the attempts of earlier deaths.
        let known = self.letters.get(record.event.id()).await?;
        let tenant = record.event.tenant();
        let letter = known
            .iter()
            .find(|l| l.group == *group && l.record.event.tenant() == tenant)
            .ok_or_else(|| Error::new(Code::Internal, "a dead letter was put and is not there"))?;
        let last = letter.failures.last();
        let notice = dead_letter_notice(&record, group, letter.attempts, last, died_at);
        self.append_first(notice.into_iter().collect()).await
    }

    /// Keeps an event in this process until it is due, and extends its lease past the wait at once. If this
    /// extension fails because the lease was lost, the settlement fails. After any other error, the task that
    /// extends the leases of waiting events extends it later.
    async fn wait(&self, held: &Held, after: Duration, again: Delivery) -> Result<()> {
        let lease = again.lease.clone();
        let by = after.saturating_add(held.lease);
        let extended = self.shared.broker.extend(vec![lease.clone()], by).await;
        self.shared.lock().remove(&lease);
        if let Ok(answers) = extended
            && let Some(Err(lost)) = answers.into_iter().next()
            && lost.code() == Code::LeaseLost
        {
            return Err(lost);
        }
        let due = self.shared.clock.now().plus(after);
        if held.waiting.add(due, again) {
            return Ok(());
        }
        // The consumer has closed, so this process would never hand out the event. It is released, and the
        // broker may deliver it to another consumer before it is due.
        let after = Duration::ZERO;
        let release = Settlement::new(lease, Verdict::Release { after });
        let answers = self.shared.broker.settle(vec![release]).await?;
        answers.into_iter().next().unwrap_or(Ok(()))
    }
}

/// Notes that the events of a step are in the broker, so that repeating the verdict does not append them again. If
/// they could not be appended, refuses the step.
fn appended(step: &mut Step, outcome: Result<()>) {
    match (&step.held, outcome) {
        (Ok(held), Ok(())) => held.appended.store(true, Ordering::Release),
        (_, Err(error)) => step.refuse(error),
        (Err(_), Ok(())) => {}
    }
}

/// Turns the error `IdReused` into a success: an earlier run has appended the event, perhaps with another time in
/// its body. The first one counts.
fn stored(answer: Result<()>) -> Result<()> {
    match answer {
        Err(error) if error.code() == Code::IdReused => {
            guard::log(|| {
                tracing::warn!(target: "everbus::beside", %error, "an event that belongs to an outcome is stored already with another body");
            });
            Ok(())
        }
        answer => answer,
    }
}
