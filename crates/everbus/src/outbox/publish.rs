//! Publishing a batch of rows, with an answer for each.
//!
//! If an engine refuses a whole batch because of one event, the batch is split in halves until the event is
//! found. An engine that answers for each event gets one event per key at a time: when it refuses an event,
//! no later event of the same key has been published. Rows after a refused event of the same key wait.

use std::collections::{HashMap, HashSet};

use std::time::Duration;

use everbus_core::{Appended, Code, Error, Event, OutboxRow, Result};
use parking_lot::Mutex;

use tokio::time::Instant;

use super::blame::{Blame, blame};
use super::retry_requests::{RetryRequest, RetryRequests};
use super::stats::RelayStats;
use crate::runtime::bus::Bus;

/// At most this many other rows are tried to find out whether a row or the broker causes an error.
const PROBES: usize = 32;
/// For this long the broker certainly recognises an event that it has accepted.
const KNOWN_FOR: Duration = Duration::from_secs(60);

/// The broker's answer for a row.
pub(super) enum Answer {
    /// The broker has accepted it.
    Sent,
    /// The broker refuses it.
    Rejected(Error),
    /// Not tried, or no room: it is tried again, and no attempt is counted.
    Later,
}

/// The state of one pass over the outbox.
#[derive(Default)]
pub(super) struct Held {
    /// Keys with a refused or postponed row: later rows of the key wait.
    keys: HashSet<String>,
    /// Types whose stream is full.
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

/// An event that the broker accepted, and when: the broker must recognise it.
#[derive(Default)]
pub(super) struct LastSent(Mutex<Option<(Event, Instant)>>);

impl LastSent {
    fn set(&self, event: Event) {
        let mut last = self.0.lock();
        *last = Some((event, Instant::now()));
    }

    fn get(&self) -> Option<Event> {
        let last = self.0.lock();
        let (event, at) = last.as_ref()?;
        (at.elapsed() < KNOWN_FOR).then(|| event.clone())
    }
}

/// Rows by index in the batch.
type Part = Vec<usize>;

/// The result of trying a single row.
enum Tried {
    /// The broker answered.
    Answered,
    /// The row was not sent, or its stream is full.
    NotNow,
    /// The row or the broker may have caused this error.
    Unclear(Error),
}

/// Publishes rows through a bus.
pub(super) struct Publisher<'a> {
    bus: &'a Bus,
    counters: &'a Mutex<RelayStats>,
    rows: &'a [OutboxRow],
    answers: Vec<Answer>,
    /// Whether a batch is accepted as a whole or not at all.
    atomic: bool,
    retry_requests: RetryRequests<'a>,
    last_sent: &'a LastSent,
}

impl<'a> Publisher<'a> {
    /// Rows up to `known` may have been published before, by this relay or by another.
    pub(super) fn new(
        bus: &'a Bus,
        counters: &'a Mutex<RelayStats>,
        rows: &'a [OutboxRow],
        known: i64,
        last_sent: &'a LastSent,
    ) -> Self {
        Self {
            bus,
            counters,
            rows,
            answers: rows.iter().map(|_| Answer::Later).collect(),
            atomic: bus.engine().broker.capabilities().atomic_batch,
            retry_requests: RetryRequests::new(bus, counters, known),
            last_sent,
        }
    }

    /// Publishes the rows, in order for each key. An error is an outage; answers before it count.
    pub(super) async fn publish(mut self, held: &mut Held) -> (Vec<Answer>, Option<Error>) {
        // The remaining parts, the next one last.
        let mut parts = self.waves();
        parts.reverse();
        let mut outage = None;
        while let Some(part) = parts.pop() {
            match self.part(part, held).await {
                Ok(again) => parts.extend(again.into_iter().rev()),
                Err(error) => {
                    outage = Some(error);
                    break;
                }
            }
        }
        if let Some(event) = self.example() {
            self.last_sent.set(event);
        }
        (self.answers, outage)
    }

    /// The parts that may be appended together: all rows, or one row per key at a time.
    fn waves(&self) -> Vec<Part> {
        if self.atomic {
            return vec![(0..self.rows.len()).collect()];
        }
        let mut waves: Vec<Part> = Vec::new();
        let mut next: HashMap<&str, usize> = HashMap::new();
        for (index, row) in self.rows.iter().enumerate() {
            let wave = match &row.key {
                Some(key) => {
                    let next = next.entry(key).or_default();
                    *next += 1;
                    *next - 1
                }
                None => 0,
            };
            match waves.get_mut(wave) {
                Some(wave) => wave.push(index),
                None => waves.push(vec![index]),
            }
        }
        waves
    }

    /// Publishes a part of the rows. Returns smaller parts to try again.
    async fn part(&mut self, part: Part, held: &mut Held) -> Result<Vec<Part>> {
        let (mut chosen, mut events) = (Vec::new(), Vec::new());
        for index in part {
            if let Some(event) = self.choose(index, held).await? {
                chosen.push(index);
                events.push(event);
            }
        }
        if let [index] = chosen[..] {
            if let Tried::Unclear(error) = self.append_alone(index, events, held).await? {
                self.find_out(index, error, held).await?;
            }
            return Ok(Vec::new());
        }
        if chosen.is_empty() {
            return Ok(Vec::new());
        }
        match self.append(events).await {
            Ok(answers) => self.answered(chosen, answers, held).await,
            Err(error) if blame(&error) == Blame::Broker => Err(error),
            Err(_) => {
                let later = chosen.split_off(chosen.len() / 2);
                Ok(vec![chosen, later])
            }
        }
    }

    /// The event of a row to publish now. An error is an outage.
    async fn choose(&mut self, index: usize, held: &mut Held) -> Result<Option<Event>> {
        let row = &self.rows[index];
        if !matches!(self.answers[index], Answer::Later) {
            return Ok(None);
        }
        if held.holds(row) {
            held.hold(row);
            return Ok(None);
        }
        let event = match self.checked(row) {
            Ok(event) => event,
            Err(error) if blame(&error) == Blame::Row => {
                self.answers[index] = Answer::Rejected(error);
                held.hold(row);
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if self.retry_requests.come_first()
            && self.retry_requests.may_have(row).await?
            && self.retry_requests.grant(row).await? != RetryRequest::None
        {
            self.answers[index] = Answer::Sent;
            return Ok(None);
        }
        Ok(Some(event))
    }

    /// The event of a row, if the bus would accept it.
    fn checked(&self, row: &OutboxRow) -> Result<Event> {
        let event = row.event.clone()?;
        self.bus.check_relayed(&event)?;
        Ok(event)
    }

    /// Appends events. If the engine accepts a batch only as a whole, one refusal is an error of the batch.
    async fn append(&self, events: Vec<Event>) -> Result<Vec<Result<Appended>>> {
        let count = events.len();
        let mut answers = self.bus.append_as_is(events).await?;
        if answers.len() != count {
            return Err(Error::new(
                Code::StorageFailed,
                "the engine did not answer for every event",
            ));
        }
        if self.atomic
            && count > 1
            && let Some(refused) = answers.iter().position(Result::is_err)
        {
            answers.swap(0, refused);
            answers.truncate(1);
            return answers.remove(0).map(|_| Vec::new());
        }
        Ok(answers)
    }

    /// Records the answers for several rows. A row with an unclear error is tried alone. An outage is
    /// returned only after all answers are recorded.
    async fn answered(
        &mut self,
        chosen: Part,
        answers: Vec<Result<Appended>>,
        held: &mut Held,
    ) -> Result<Vec<Part>> {
        let (mut again, mut outage) = (Vec::new(), None);
        for (index, answer) in chosen.into_iter().zip(answers) {
            match self.answer(index, answer, held).await {
                Ok(Tried::Unclear(_)) => again.push(vec![index]),
                Ok(_) => {}
                Err(error) => {
                    held.hold(&self.rows[index]);
                    outage.get_or_insert(error);
                }
            }
        }
        outage.map_or(Ok(again), Err)
    }

    async fn append_alone(
        &mut self,
        index: usize,
        events: Vec<Event>,
        held: &mut Held,
    ) -> Result<Tried> {
        let answer = match self.append(events).await {
            Ok(mut answers) => answers.remove(0),
            Err(error) => Err(error),
        };
        self.answer(index, answer, held).await
    }

    /// A single row gave an error that the row or the broker may have caused. If another row is accepted
    /// after it, the row is the cause. Otherwise it is an outage, and no attempt is counted.
    async fn find_out(&mut self, index: usize, error: Error, held: &mut Held) -> Result<()> {
        held.hold(&self.rows[index]);
        let outage = error.clone();
        let mut suspects = vec![(index, error)];
        for probe in self.probes(index, held) {
            let Some(event) = self.choose(probe, held).await? else {
                continue;
            };
            match self.append_alone(probe, vec![event], held).await? {
                Tried::NotNow => {}
                Tried::Unclear(error) => {
                    held.hold(&self.rows[probe]);
                    suspects.push((probe, error));
                }
                Tried::Answered => return self.reject_all(suspects),
            }
        }
        // No other row is ready. Ask the broker about an event that it has accepted before.
        if self.is_there_still().await? {
            return self.reject_all(suspects);
        }
        Err(outage)
    }

    fn reject_all(&mut self, suspects: Vec<(usize, Error)>) -> Result<()> {
        for (index, error) in suspects {
            self.answers[index] = Answer::Rejected(error);
        }
        Ok(())
    }

    /// An event of this batch that the broker has accepted, and that does not expire.
    fn example(&self) -> Option<Event> {
        let mut rows = self.rows.iter().zip(&self.answers).rev();
        rows.find_map(|(row, answer)| {
            let event = row.event.as_ref().ok()?;
            let expires = event.attributes().and_then(|a| a.expires_at);
            (matches!(answer, Answer::Sent) && expires.is_none()).then(|| event.clone())
        })
    }

    /// Whether the broker recognises an event that it has just accepted. An error is an outage.
    async fn is_there_still(&mut self) -> Result<bool> {
        if !self.retry_requests.recognises() {
            return Ok(false);
        }
        let Some(event) = self.example().or_else(|| self.last_sent.get()) else {
            return Ok(false);
        };
        let known = match self.append(vec![event]).await {
            Ok(mut answers) => answers.remove(0).map(drop),
            Err(error) => Err(error),
        };
        match known {
            Ok(()) => Ok(true),
            Err(error) => match blame(&error) {
                Blame::Row => Ok(true),
                Blame::Broker => Err(error),
                Blame::Full | Blame::Unclear => Ok(false),
            },
        }
    }

    /// Other rows that may be tried early, from the whole batch: only the first row of each key.
    fn probes(&self, suspect: usize, held: &Held) -> Part {
        let mut seen = HashSet::new();
        let mut found: Part = Vec::new();
        for (index, row) in self.rows.iter().enumerate() {
            if index == suspect || !matches!(self.answers[index], Answer::Later) {
                continue;
            }
            // A row that waits because its stream is full still blocks its key.
            let first = row.key.as_ref().is_none_or(|key| seen.insert(key));
            if first && !held.holds(row) {
                found.push(index);
            }
        }
        let step = found.len().div_ceil(PROBES).max(1);
        found.into_iter().step_by(step).collect()
    }

    /// Records the answer for one row. An error is an outage.
    async fn answer(
        &mut self,
        index: usize,
        answer: Result<Appended>,
        held: &mut Held,
    ) -> Result<Tried> {
        let row = &self.rows[index];
        let error = match answer {
            Ok(appended) => {
                if appended.duplicate {
                    self.counters.lock().duplicates += 1;
                    if self.retry_requests.any_open().await? {
                        self.retry_requests.grant(row).await?;
                    }
                }
                self.answers[index] = Answer::Sent;
                return Ok(Tried::Answered);
            }
            Err(error) => error,
        };
        match blame(&error) {
            // The broker knows this event, and the row asks for a retry of its dead letter.
            Blame::Row
                if error.code() == Code::IdReused
                    && self.retry_requests.grant(row).await? == RetryRequest::Granted =>
            {
                self.answers[index] = Answer::Sent;
                Ok(Tried::Answered)
            }
            Blame::Row => {
                self.answers[index] = Answer::Rejected(explained(row, error));
                held.hold(row);
                Ok(Tried::Answered)
            }
            Blame::Full => {
                held.full.insert(row.event_type.clone());
                held.hold(row);
                Ok(Tried::NotNow)
            }
            Blame::Broker => Err(error),
            Blame::Unclear => Ok(Tried::Unclear(error)),
        }
    }
}

/// A better message for `IdReused` if the row was changed after its event was published.
fn explained(row: &OutboxRow, error: Error) -> Error {
    if error.code() != Code::IdReused || row.revision == 0 {
        return error;
    }
    let what = format!(
        "event {} was published before with another body, and this row was changed since it was written; \
         give the changed event an event_id of its own",
        row.event_id
    );
    Error::new(Code::IdReused, what)
        .hint("an event that was published never changes")
        .caused_by(error)
}
