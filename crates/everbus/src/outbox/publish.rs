//! Publishing a batch of rows, with an answer for each.
//!
//! An engine may refuse a batch as a whole for the sake of one event in it. Then the batch is halved
//! until the one is found. What follows a refused event under the same key is left for later.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;

use everbus_core::{
    Appended, Code, DeadLetterFilter, Deduplication, Error, Event, OutboxRow, Result,
};

use super::stats::Counters;
use crate::bus::Bus;

/// What the broker said about a row.
pub(super) enum Answer {
    /// It has it.
    Sent,
    /// It does not want it.
    Rejected(Error),
    /// Nobody is to blame: it is tried again as if nothing had been.
    Later,
}

/// What one pass over the outbox remembers.
#[derive(Default)]
pub(super) struct Held {
    /// Keys with a row that was refused or left for later: what follows waits.
    keys: HashSet<String>,
    /// Types whose stream has no room.
    full: HashSet<String>,
}

impl Held {
    pub(super) fn holds(&self, row: &OutboxRow) -> bool {
        row.key.as_ref().is_some_and(|key| self.keys.contains(key))
            || self.full.contains(&row.event_type)
    }

    pub(super) fn hold(&mut self, row: &OutboxRow) {
        if let Some(key) = &row.key {
            self.keys.insert(key.clone());
        }
    }

    pub(super) fn is_full(&self) -> bool {
        !self.full.is_empty()
    }
}

/// Whether an error is about the event itself. Everything else is an outage, which is never an attempt.
pub(super) fn blames_event(error: &Error) -> bool {
    matches!(
        error.code(),
        Code::InvalidPayload
            | Code::PayloadTooLarge
            | Code::InvalidType
            | Code::InvalidId
            | Code::InvalidAttribute
            | Code::IdReused
            | Code::SchemaViolation
            | Code::InvalidSchema
            | Code::UnknownVersion
            | Code::Unsupported
            | Code::InvalidSetting
            | Code::NotFound
    )
}

/// Whether it may be one event of a batch that is to blame.
fn may_be_one(error: &Error) -> bool {
    blames_event(error) || matches!(error.code(), Code::Backpressure | Code::Internal)
}

/// Publishes rows through a bus.
pub(super) struct Publisher<'a> {
    bus: &'a Bus,
    counters: &'a Counters,
    rows: &'a [OutboxRow],
    answers: Vec<Answer>,
    /// Whether the broker has given a sensible answer.
    lives: bool,
    /// Whether there are open dead letters, once somebody has looked.
    letters: Option<bool>,
}

impl<'a> Publisher<'a> {
    pub(super) fn new(bus: &'a Bus, counters: &'a Counters, rows: &'a [OutboxRow]) -> Self {
        Self {
            bus,
            counters,
            rows,
            answers: rows.iter().map(|_| Answer::Later).collect(),
            lives: false,
            letters: None,
        }
    }

    /// Publishes the rows in their order. An error is an outage; what was answered before it counts.
    pub(super) async fn publish(mut self, held: &mut Held) -> (Vec<Answer>, Option<Error>) {
        let mut parts = VecDeque::from([0..self.rows.len()]);
        while let Some(part) = parts.pop_front() {
            match self.part(part.clone(), held).await {
                Ok(None) => {}
                Ok(Some(middle)) => {
                    parts.push_front(middle..part.end);
                    parts.push_front(part.start..middle);
                }
                Err(error) => return (self.answers, Some(error)),
            }
        }
        (self.answers, None)
    }

    /// Publishes a part of the rows; if it was refused as a whole, where to cut it in two.
    async fn part(&mut self, part: Range<usize>, held: &mut Held) -> Result<Option<usize>> {
        let (mut chosen, mut events) = (Vec::new(), Vec::new());
        for index in part {
            let row = &self.rows[index];
            if !matches!(self.answers[index], Answer::Later) {
                continue;
            }
            if held.holds(row) {
                held.hold(row);
                continue;
            }
            match self.checked(row) {
                Ok(event) => {
                    chosen.push(index);
                    events.push(event);
                }
                Err(error) if blames_event(&error) => {
                    self.answers[index] = Answer::Rejected(error);
                    held.hold(row);
                }
                Err(error) => return Err(error),
            }
        }
        if self.must_look_first() {
            self.take_retries(&mut chosen, &mut events).await?;
        }
        if chosen.is_empty() {
            return Ok(None);
        }
        match self.bus.append_as_is(events).await {
            Ok(answers) if answers.len() == chosen.len() => {
                self.lives = true;
                for (index, answer) in chosen.into_iter().zip(answers) {
                    self.answer(index, answer, held).await?;
                }
                Ok(None)
            }
            Ok(_) => Err(Error::new(
                Code::Internal,
                "the engine did not answer for every event",
            )),
            Err(error) if chosen.len() > 1 && may_be_one(&error) => {
                Ok(Some(chosen[chosen.len() / 2]))
            }
            Err(error) => {
                self.answer(chosen[0], Err(error), held).await?;
                Ok(None)
            }
        }
    }

    /// The event of a row, if the bus would publish it.
    fn checked(&self, row: &OutboxRow) -> Result<Event> {
        let event = row.event.clone()?;
        self.bus.check_relayed(&event)?;
        Ok(event)
    }

    /// Writes down what was said about one row. An error is an outage.
    async fn answer(
        &mut self,
        index: usize,
        answer: Result<Appended>,
        held: &mut Held,
    ) -> Result<()> {
        let row = &self.rows[index];
        let answer = match answer {
            Ok(appended) => {
                if appended.duplicate {
                    Counters::add(&self.counters.duplicates, 1);
                    self.retried(row).await?;
                }
                Answer::Sent
            }
            // Whatever the row says: its event is known, and somebody wants it handled again.
            Err(error) if error.code() == Code::IdReused && self.retried(row).await? => {
                Answer::Sent
            }
            Err(error) if error.code() == Code::Backpressure => {
                held.full.insert(row.event_type.clone());
                Answer::Later
            }
            // An engine that took others and stumbles over this one alone means this one.
            Err(error) if blames_event(&error) => Answer::Rejected(error),
            Err(error) if error.code() == Code::Internal && self.lives => Answer::Rejected(error),
            Err(error) => return Err(error),
        };
        self.lives |= !matches!(answer, Answer::Later);
        if !matches!(answer, Answer::Sent) {
            held.hold(row);
        }
        self.answers[index] = answer;
        Ok(())
    }

    /// Whether an event that is known would not be recognised by its id.
    fn must_look_first(&self) -> bool {
        let engine = self.bus.engine();
        engine.dead_letters.is_some()
            && engine.broker.capabilities().deduplication != Deduplication::WhileRetained
    }

    async fn take_retries(
        &mut self,
        chosen: &mut Vec<usize>,
        events: &mut Vec<Event>,
    ) -> Result<()> {
        let mut left = (Vec::new(), Vec::new());
        for (index, event) in chosen.drain(..).zip(events.drain(..)) {
            if self.retried(&self.rows[index]).await? {
                self.answers[index] = Answer::Sent;
            } else {
                left.0.push(index);
                left.1.push(event);
            }
        }
        (*chosen, *events) = left;
        Ok(())
    }

    /// Sends the open dead letters of a row's event back, if there are any: that is what somebody wants
    /// who puts it into the outbox again.
    async fn retried(&mut self, row: &OutboxRow) -> Result<bool> {
        let Some(letters) = self.bus.engine().dead_letters.clone() else {
            return Ok(false);
        };
        let any = match self.letters {
            Some(any) => any,
            None => letters.count(DeadLetterFilter::default()).await? > 0,
        };
        self.letters = Some(any);
        let Ok(event) = &row.event else {
            return Ok(false);
        };
        if !any {
            return Ok(false);
        }
        let found = letters.get(event.id()).await?;
        let open = found.iter().any(|letter| {
            letter.retried_at.is_none() && letter.event.event.tenant() == event.tenant()
        });
        if !open {
            return Ok(false);
        }
        let filter = DeadLetterFilter {
            id: Some(event.id()),
            tenant: event.tenant().map(str::to_owned),
            ..DeadLetterFilter::default()
        };
        let sent_back = letters.retry(filter).await?;
        Counters::add(&self.counters.retried, u64::from(sent_back > 0));
        Ok(true)
    }
}
