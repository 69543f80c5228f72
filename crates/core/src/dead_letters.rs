//! The dead letters: events that a group gave up on, kept with everything needed to understand and retry
//! them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;

use crate::broker::{Appended, BoxFuture};
use crate::error::{Code, Error, Result};
use crate::event::{Attributes, Event, IDEMPOTENCY_KEY};
use crate::failure::Failure;
use crate::group::GroupName;
use crate::id::EventId;
use crate::log::Recorded;
use crate::pattern::Pattern;
use crate::position::Position;
use crate::time::Timestamp;

/// Metadata of a corrected event: the id of the original.
pub const EDIT_OF: &str = "edit_of";
/// Metadata of a replayed event: the id of the original.
pub const REPLAY_OF: &str = "replay_of";

/// The type of the event that announces a dead letter.
pub const DEAD_LETTER_EVENT: &str = "system.dead_letter";

/// Why a group skips a corrected event that [`DeadLetters::replace`] sent to another group.
pub const ADDRESSED: &str = "it is addressed to another group";
/// Why a group skips an event that none of its subscriptions matches.
pub const UNMATCHED: &str = "no subscription of the group matches it";

/// Why a group has finished an event whose dead letter was [purged](DeadLetters::purge), if another group
/// still needs the event.
pub const LETTER_PURGED: &str = "its dead letter was purged";

/// The prefix of the reasons that [`letter_kept_for`] returns.
pub const LETTER_KEPT: &str = "its dead letter was kept for";

/// Why a group has finished an event without handling it: retention removed its dead letter.
pub fn letter_kept_for(age: Duration) -> String {
    let micros = age.as_micros();
    let units = [
        (86_400_000_000, "day"),
        (3_600_000_000, "hour"),
        (60_000_000, "minute"),
        (1_000_000, "second"),
        (1000, "millisecond"),
    ];
    // The largest unit that divides it.
    let unit = units
        .into_iter()
        .find(|(unit, _)| micros.is_multiple_of(*unit));
    let (unit, name) = unit.unwrap_or((1, "microsecond"));
    let count = micros / unit;
    let plural = if count == 1 { "" } else { "s" };
    format!("{LETTER_KEPT} {count} {name}{plural}")
}

/// Longer error texts are cut in the notice of a dead letter, so that the notice stays small even after
/// escaping. The dead letter itself keeps the whole text.
const NOTICE_ERROR_BYTES: usize = 16 * 1024;

/// The event that announces a dead letter: `system.dead_letter {eventId, eventType, error}`, with the group
/// and the attempts. `None` for an event of the system itself; otherwise one dead letter could cause
/// another.
///
/// Engines append it in the step that writes the dead letter; `attempts` is the total, as in
/// [`DeadLetter::attempts`]. Its id is made from the event, the group, the time and the attempts, so that
/// appending it twice stores it once.
pub fn dead_letter_notice(
    dead: &Recorded,
    group: &GroupName,
    attempts: u32,
    failure: Option<&Failure>,
    at: Timestamp,
) -> Option<Event> {
    let event = &dead.event;
    if event.event_type().starts_with("system.") {
        return None;
    }
    let error = failure.map_or("", |f| f.error.as_str());
    let error = crate::failure::cut_at(error, NOTICE_ERROR_BYTES);
    let mut builder = Event::builder(DEAD_LETTER_EVENT)
        .id(EventId::derived(
            event.id(),
            at,
            group.as_str(),
            DEAD_LETTER_EVENT,
            attempts,
        ))
        .occurred_at(at)
        .source("everbus")
        .json(&serde_json::json!({
            "eventId": event.display_id(),
            "eventType": event.event_type(),
            "error": error,
            "group": group,
            "attempts": attempts,
        }))
        .correlation_id(event.correlation_id())
        .causation_id(event.id().to_string());
    if let Some(tenant) = event.tenant() {
        builder = builder.tenant(tenant);
    }
    builder.build().ok()
}

/// The largest number of failures that a dead letter keeps.
pub const MAX_FAILURES: usize = 200;

/// The failures of a dead letter that failed again: the earlier ones, then the new ones.
pub fn all_failures(
    mut before: Vec<Failure>,
    new: impl IntoIterator<Item = Failure>,
) -> Vec<Failure> {
    before.extend(new);
    let over = before.len().saturating_sub(MAX_FAILURES);
    before.drain(..over);
    before
}

/// For engines: what a dead letter records when a group gives an event up.
#[derive(Clone, Debug, PartialEq)]
pub struct Death {
    /// All attempts.
    pub attempts: u32,
    /// Every failed attempt, in order.
    pub failures: Vec<Failure>,
    /// The time of the final failure.
    pub died_at: Timestamp,
}

impl Death {
    /// The end of one run: `attempts` deliveries were counted, `recorded` are the failures of earlier
    /// attempts, `last` is the failure of this delivery. Without `last` the event is given up because of the
    /// recorded failures.
    ///
    /// A delivery that reached no handler was counted, but was no attempt.
    pub fn new(
        attempts: u32,
        recorded: Vec<Failure>,
        last: Option<Failure>,
        now: Timestamp,
    ) -> Self {
        let unused = last.is_none() && !recorded.is_empty();
        let died_at = last.as_ref().map_or(now, |failure| failure.at);
        let failures = all_failures(recorded, last);
        let none_ran = failures.last().is_some_and(|f| !f.kind.is_attempt());
        Self {
            attempts: attempts.saturating_sub(u32::from(unused) + u32::from(none_ran)),
            failures,
            died_at,
        }
    }

    /// Adds the attempts and failures from before a retry.
    #[must_use]
    pub fn after(self, attempts: u32, failures: Vec<Failure>) -> Self {
        Self {
            attempts: attempts.saturating_add(self.attempts),
            failures: all_failures(failures, self.failures),
            died_at: self.died_at,
        }
    }
}

/// The handler that failed last, if a handler ran.
pub fn last_handler(failures: &[Failure]) -> Option<&str> {
    failures.iter().rev().find_map(|f| f.handler.as_deref())
}

/// One event that one group gave up on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeadLetter {
    /// The group that failed.
    pub group: GroupName,
    /// The handler that failed last, if a handler ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handler: Option<String>,
    /// All attempts, those before an earlier retry included.
    pub attempts: u32,
    /// Every failed attempt, in order, including those before an earlier retry; after each retry they are
    /// numbered from 1 again. Beyond [`MAX_FAILURES`] the oldest are dropped.
    pub failures: Vec<Failure>,
    /// When the event first became a dead letter in this group.
    pub first_seen_at: Timestamp,
    /// When it last became a dead letter: the time of the final failure.
    pub died_at: Timestamp,
    /// When it was last retried, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retried_at: Option<Timestamp>,
    /// The corrected event that replaced it, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaced_by: Option<EventId>,
    /// The event itself, unchanged, with its position.
    #[serde(rename = "event")]
    pub record: Arc<Recorded>,
}

impl DeadLetter {
    /// The event itself, unchanged.
    pub fn event(&self) -> &Event {
        &self.record.event
    }

    /// Its key.
    pub fn key(&self) -> DeadLetterKey {
        DeadLetterKey {
            position: self.record.position,
            group: self.group.clone(),
        }
    }

    /// The event with another payload: under a new id, linked to the original by the metadata [`EDIT_OF`]
    /// and as its cause; everything else is unchanged.
    pub fn corrected(&self, payload: impl Into<Bytes>) -> Result<Event> {
        let original = &self.record.event;
        let mut builder = Event::builder(original.type_arc().clone())
            .version(original.version())
            .occurred_at(original.occurred_at())
            .payload(payload);
        if let Some(attributes) = original.attributes() {
            builder = builder.attributes(Attributes {
                foreign_id: None,
                overflow: None,
                ..attributes.clone()
            });
        }
        builder
            .correlation_id(original.correlation_id())
            .causation_id(original.id().to_string())
            .meta(EDIT_OF, original.display_id())
            .meta(IDEMPOTENCY_KEY, original.idempotency_key())
            .build()
    }

    /// Whether the dead letter is open: neither retried nor replaced since its final failure.
    pub const fn is_open(&self) -> bool {
        self.retried_at.is_none()
    }

    /// The last error, for a line in a list.
    pub fn last_error(&self) -> &str {
        self.failures.last().map_or("", |f| f.error.as_str())
    }
}

/// Identifies a dead letter: one event in one group. Also the cursor of a page.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeadLetterKey {
    /// The position of the event.
    pub position: Position,
    /// The group.
    pub group: GroupName,
}

/// A dead letter that was replaced by a corrected event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replaced {
    /// The dead letter.
    pub key: DeadLetterKey,
    /// The corrected event.
    pub by: EventId,
}

/// Selects dead letters. The default is all open ones.
#[derive(Clone, Debug, Default)]
pub struct DeadLetterFilter {
    /// Only events whose type matches.
    pub pattern: Option<Pattern>,
    /// Only of this group.
    pub group: Option<GroupName>,
    /// Only of this event.
    pub id: Option<EventId>,
    /// Only events received at or after this time.
    pub since: Option<Timestamp>,
    /// Only events received at or before this time.
    pub until: Option<Timestamp>,
    /// Only those whose final failure was at or before this time: events that fail again meanwhile are left
    /// out.
    pub died_until: Option<Timestamp>,
    /// Only of this tenant; an empty text means events without a tenant.
    pub tenant: Option<String>,
    /// Only those whose last failure was in this handler.
    pub handler: Option<String>,
    /// Only those whose last error contains this text.
    pub error: Option<String>,
}

impl DeadLetterFilter {
    /// Whether the filter selects a dead letter. Does not check whether the dead letter is open.
    pub fn matches(&self, letter: &DeadLetter) -> bool {
        fn fits<T>(wanted: Option<&T>, test: impl FnOnce(&T) -> bool) -> bool {
            wanted.is_none_or(test)
        }
        let (record, event) = (&letter.record, letter.event());
        fits(self.pattern.as_ref(), |p| p.matches(event.event_type()))
            && fits(self.group.as_ref(), |group| *group == letter.group)
            && fits(self.id.as_ref(), |id| *id == event.id())
            && fits(self.since.as_ref(), |since| record.received_at >= *since)
            && fits(self.until.as_ref(), |until| record.received_at <= *until)
            && fits(self.died_until.as_ref(), |until| letter.died_at <= *until)
            && fits(self.tenant.as_ref(), |tenant| {
                tenant == event.tenant().unwrap_or_default()
            })
            && (self.handler.is_none() || self.handler == letter.handler)
            && fits(self.error.as_ref(), |text| {
                letter.last_error().contains(text)
            })
    }
}

/// The number of open dead letters with the same group, type and error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeadLetterTally {
    /// The group that failed.
    pub group: GroupName,
    /// The type of the events.
    pub event_type: String,
    /// The first [`TALLY_ERROR_CHARS`] characters of their last error.
    pub error: String,
    /// How many there are.
    pub count: u64,
}

/// Errors with the same first characters, up to this number, are counted together.
pub const TALLY_ERROR_CHARS: usize = 200;

impl DeadLetterTally {
    /// The part of an error that a tally compares.
    pub fn beginning(error: &str) -> &str {
        let end = error.char_indices().nth(TALLY_ERROR_CHARS);
        end.map_or(error, |(end, _)| &error[..end])
    }
}

/// A page of a list.
#[derive(Clone, Debug)]
pub struct PageRequest {
    /// At most this many; 100 by default.
    pub limit: usize,
    /// Skip this many first. Slower the larger it is; prefer `after`.
    pub offset: usize,
    /// Begin after this one: the `next` of the page before.
    pub after: Option<DeadLetterKey>,
}

/// The largest page.
pub const MAX_PAGE: usize = 10_000;

impl Default for PageRequest {
    fn default() -> Self {
        Self {
            limit: 100,
            offset: 0,
            after: None,
        }
    }
}

impl PageRequest {
    /// Refuses invalid pages.
    pub fn validate(&self) -> Result<()> {
        if self.limit == 0 || self.limit > MAX_PAGE {
            return Err(Error::new(
                Code::InvalidSetting,
                format!("a page of {} dead letters", self.limit),
            )
            .hint(format!("the limit is between 1 and {MAX_PAGE}")));
        }
        Ok(())
    }
}

/// One page of dead letters, newest first.
#[derive(Clone, Debug)]
pub struct DeadLetterPage {
    /// The dead letters.
    pub items: Vec<DeadLetter>,
    /// Where the next page begins, if there may be one.
    pub next: Option<DeadLetterKey>,
}

/// The time that a purge compares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PurgeBasis {
    /// When the event was received, as in the specification.
    #[default]
    Created,
    /// When it became a dead letter.
    Died,
}

impl PurgeBasis {
    /// The time of a dead letter that is compared.
    pub fn time_of(self, letter: &DeadLetter) -> Timestamp {
        match self {
            Self::Created => letter.record.received_at,
            Self::Died => letter.died_at,
        }
    }
}

/// An engine that keeps dead letters. It needs no running bus.
pub trait DeadLetters: Send + Sync + 'static {
    /// Open dead letters, newest event first.
    fn list(
        &self,
        filter: DeadLetterFilter,
        page: PageRequest,
    ) -> BoxFuture<'_, Result<DeadLetterPage>>;

    /// The number of open dead letters that match.
    fn count(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>>;

    /// Counts the open dead letters by group, type and error, the most frequent first, at most `limit`
    /// entries and no more than [`MAX_PAGE`].
    fn tally(
        &self,
        filter: DeadLetterFilter,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<DeadLetterTally>>> {
        let _ = (filter, limit);
        Box::pin(std::future::ready(Err(cannot("counting dead letters"))))
    }

    /// All dead letters of an event, retried ones included.
    fn get(&self, id: EventId) -> BoxFuture<'_, Result<Vec<DeadLetter>>>;

    /// Retries dead letters in the group that failed, with a fresh set of attempts. Returns how many open
    /// ones now wait.
    fn retry(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>>;

    /// Like [`retry`](Self::retry), for at most `limit` dead letters, oldest event first: for retries at a limited
    /// rate that keep the order of keys. Set [`died_until`](DeadLetterFilter::died_until) in the filter; otherwise
    /// events that fail again are retried for ever.
    fn retry_some(&self, filter: DeadLetterFilter, limit: usize) -> BoxFuture<'_, Result<u64>> {
        let _ = (filter, limit);
        Box::pin(std::future::ready(Err(cannot(
            "retrying a few dead letters",
        ))))
    }

    /// Replaces a dead letter by a corrected event, in one step. The corrected event is
    /// [addressed](Event::addressed_to) to the group that failed, and replaces any earlier address, so no other group
    /// gets it. It is appended at the end of the log, and the group gets it in order; if the group no longer
    /// subscribes to its type, the group gets it at once. The dead letter is kept, is no longer open, and names the
    /// corrected event. [`DeadLetter::corrected`] makes the corrected event from the original.
    ///
    /// [`Code::NotFound`] if the dead letter is not open, [`Code::IdReused`] if there is an event with
    /// that id, [`Code::InvalidAttribute`] if it has another type or tenant than the original
    /// ([`check_replacement`]).
    fn replace(&self, key: DeadLetterKey, corrected: Event) -> BoxFuture<'_, Result<Appended>> {
        let _ = (key, corrected);
        Box::pin(std::future::ready(Err(cannot("replacing a dead letter"))))
    }

    /// Every dead letter that was replaced by a corrected event, oldest event first.
    fn replaced(&self) -> BoxFuture<'_, Result<Vec<Replaced>>> {
        Box::pin(std::future::ready(Err(cannot("replacing a dead letter"))))
    }

    /// Deletes open dead letters up to and including `cutoff`, and their events if no other group needs them. If
    /// another group needs the event, the failed group counts as having skipped it, with the reason
    /// [`LETTER_PURGED`].
    fn purge(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: DeadLetterFilter,
    ) -> BoxFuture<'_, Result<Purged>>;

    /// Deletes open dead letters that died at least `age` before `now`. Events that are still in the log stay there. Each
    /// failed group counts
    /// as having skipped the event, with the reason [`letter_kept_for`]. Returns how many dead letters were deleted.
    ///
    /// Only retention calls this, and only for an engine without a [`Maintenance`](crate::Maintenance).
    fn expire(&self, now: Timestamp, age: Duration) -> BoxFuture<'_, Result<u64>> {
        let _ = (now, age);
        Box::pin(std::future::ready(Err(cannot("expiring dead letters"))))
    }
}

/// The result of a purge.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Purged {
    /// How many dead letters were deleted.
    pub dead_letters: u64,
    /// How many events were removed with them, because no other group needed them.
    pub events: u64,
    /// The first [`PURGED_NAMED`] of the dead letters, for the audit record.
    pub named: Vec<PurgedLetter>,
}

/// A purged dead letter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PurgedLetter {
    /// The event.
    pub event: EventId,
    /// The group that had failed.
    pub group: GroupName,
}

/// How many purged dead letters are named.
pub const PURGED_NAMED: usize = 100;

impl Purged {
    /// Adds a dead letter, and whether its event was removed with it.
    pub fn add(&mut self, event: EventId, group: GroupName, with_event: bool) {
        self.dead_letters += 1;
        self.events += u64::from(with_event);
        if self.named.len() < PURGED_NAMED {
            self.named.push(PurgedLetter { event, group });
        }
    }

    /// Adds the result of a later step of the same purge.
    pub fn extend(&mut self, later: Self) {
        self.dead_letters += later.dead_letters;
        self.events += later.events;
        let room = PURGED_NAMED.saturating_sub(self.named.len());
        self.named.extend(later.named.into_iter().take(room));
    }
}

/// Refuses an invalid correction: it must have the type and the tenant of the original.
pub fn check_replacement(original: &Event, corrected: &Event) -> Result<()> {
    let what = if original.event_type() != corrected.event_type() {
        "type"
    } else if original.tenant() != corrected.tenant() {
        "tenant"
    } else {
        return Ok(());
    };
    let message = format!(
        "the corrected event has another {what} than {}",
        original.display_id()
    );
    Err(Error::new(Code::InvalidAttribute, message)
        .hint("make it with `DeadLetter::corrected`, or publish an event of its own"))
}

/// The error for a dead letter that cannot be replaced.
pub fn not_open(key: &DeadLetterKey) -> Error {
    let message = format!(
        "event {} has no open dead letter in the group {}",
        key.position, key.group
    );
    Error::new(Code::NotFound, message)
        .hint("it may have been retried, replaced or purged meanwhile; list shows the open ones")
}

/// The error for a corrected event whose id is already used.
pub fn id_taken(corrected: &Event) -> Error {
    let message = format!("there is an event {} already", corrected.display_id());
    Error::new(Code::IdReused, message)
        .hint("a corrected event has an id of its own; `DeadLetter::corrected` gives it a new one")
}

fn cannot(what: &str) -> Error {
    Error::new(
        Code::Unsupported,
        format!("this engine does not offer {what}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: memory/retention-letter-reason: the reason says for how long the dead letter was kept
    #[test]
    fn the_reason_names_the_age() {
        for (micros, text) in [
            (30 * 86_400_000_000, "30 days"),
            (86_400_000_000, "1 day"),
            (36 * 3_600_000_000, "36 hours"),
            (90_000_000, "90 seconds"),
            (60_000_000, "1 minute"),
            (150_000, "150 milliseconds"),
            (1, "1 microsecond"),
        ] {
            let reason = letter_kept_for(Duration::from_micros(micros));
            assert_eq!(reason, format!("its dead letter was kept for {text}"));
        }
    }
}
