//! Verdicts of a broker with a store beside it: what the store must have is durable before the broker gets
//! the verdict.
//!
//! A batch of verdicts goes through together. Its events are one append and its inbox records are one write,
//! so an ack with a record costs little more than one without.

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
    /// The delivery that it is about, or why it cannot be settled.
    held: Result<Held>,
}

impl Step {
    fn refuse(&mut self, error: Error) {
        self.held = Err(error);
    }

    /// What the store records before an ack, if it records anything. The earlier failures of an event must
    /// not count if it is ever delivered again.
    fn to_record(&self) -> Option<&Held> {
        let held = self.held.as_ref().ok()?;
        let is_needed = self.inbox || !held.delivery.failures.is_empty();
        (self.verdict == Verdict::Ack && is_needed).then_some(held)
    }
}

/// What to tell the broker after the store is written.
enum Next {
    /// This verdict.
    Tell(Verdict),
    /// Nothing: the event waits in this process until it is due.
    Wait(Duration, Box<Delivery>),
}

/// What the store records for one step of the batch.
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
                // The other events wait in this process already: they must not be settled again.
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
            // Settled already, or never handed out here. The broker must not get a verdict that the store
            // does not have.
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

    /// Appends the events of the verdicts before everything else, in the order of the batch. A repetition
    /// uses the same ids, so the broker or the inboxes of the groups recognise duplicates.
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
            // One event that cannot be stored may have failed the whole batch.
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

    /// Appends events that belong to one verdict.
    async fn append_first(&self, events: Vec<Event>) -> Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        let answers = match self.shared.broker.append(events.clone()).await {
            // Where a batch is stored as a whole, one of them refuses the others.
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

    /// Tells the store about handled events, those of a group together.
    async fn record_handled(&self, steps: &mut [Step]) {
        let mut groups: Vec<(GroupName, Vec<Handled>)> = Vec::new();
        for (index, step) in steps.iter_mut().enumerate() {
            let Some(held) = step.to_record() else {
                continue;
            };
            let (group, record) = (held.group.clone(), held.delivery.record.clone());
            let records = match original_of(&*self.letters, &record, &group).await {
                Ok(original) if original.event.id() == record.event.id() => vec![record],
                // The broker may deliver the original of a retried event once more.
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
            // One record that cannot be written may have failed them all.
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

    /// Makes everything else durable that must be durable before the broker gets the verdict.
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

    /// Whether the broker supports a delay of this length.
    fn can_delay(&self, after: Duration) -> bool {
        self.shared.offers.native_delay || after.is_zero()
    }

    /// Leaves the wait to the broker if it supports delays, and to this process otherwise.
    fn later(&self, after: Duration, again: Delivery, verdict: Verdict) -> Next {
        if self.can_delay(after) {
            Next::Tell(verdict)
        } else {
            Next::Wait(after, Box::new(again))
        }
    }

    /// Puts the dead letter into the store, then publishes its event. Repeating both is harmless.
    async fn bury(&self, held: &Held, failure: Option<Failure>) -> Result<()> {
        let Held {
            group, delivery, ..
        } = held;
        let mut failures = delivery.failures.clone();
        // The event is given up because of recorded failures: this delivery was no attempt.
        let was_none = failure.is_none() && !failures.is_empty();
        let attempts = delivery.attempt.saturating_sub(u32::from(was_none));
        failures.extend(failure);
        let died_at = failures
            .last()
            .map_or_else(|| self.shared.clock.now(), |f| f.at);
        // A copy that was sent back from the dead letters dies under the id of its original.
        let record = original_of(&*self.letters, &delivery.record, group).await?;
        let mut letter = Burial::new(record.clone(), group.clone(), attempts, failures, died_at);
        if record.event.id() != delivery.record.event.id() {
            letter = letter.of_sent_back();
        }
        self.shared.store.bury(letter).await?;
        // The store has added up the attempts of all earlier deaths.
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

    /// Keeps an event in this process until it is due. Its lease is extended past the wait at once, so that
    /// it does not depend on the next extension. If the broker does not answer, the consumer's keeper
    /// extends the lease in time.
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
        // The consumer has closed, so the event would never be handed out here: the broker may deliver it
        // early to another consumer.
        let after = Duration::ZERO;
        let release = Settlement::new(lease, Verdict::Release { after });
        let answers = self.shared.broker.settle(vec![release]).await?;
        answers.into_iter().next().unwrap_or(Ok(()))
    }
}

/// Notes whether the events of a step are in the broker: repeating the verdict does not append them again.
fn appended(step: &mut Step, outcome: Result<()>) {
    match (&step.held, outcome) {
        (Ok(held), Ok(())) => held.appended.store(true, Ordering::Release),
        (_, Err(error)) => step.refuse(error),
        (Err(_), Ok(())) => {}
    }
}

/// An event that an earlier run appended, perhaps with another time in its body, is there: the first one
/// counts.
fn stored(answer: Result<()>) -> Result<()> {
    match answer {
        Err(error) if error.code() == Code::IdReused => {
            guard::log(|| {
                tracing::warn!(target: "everbus::beside", %error, "an event that belongs to an outcome is there already with another body");
            });
            Ok(())
        }
        answer => answer,
    }
}
