//! The checker: every acknowledged event is where it must be, in every group.
//!
//! It compares what victims reported with what the file contains, and knows no engine. An acknowledged event
//! is in exactly one of {waiting, in flight, handled, dead-lettered, skipped with a reason} for every group
//! that wants it. A dead letter carries everything needed to understand it. *Handled* counts only if a
//! handler reported it. Where retention removes events, a removed event must have ended in every group. A row
//! committed to an outbox counts as acknowledged.

use std::collections::{HashMap, HashSet};

use everbus_core::{DEAD_LETTER_EVENT, EventId, Failure, FailureKind, GroupName, LETTER_KEPT};

use super::content::Content;
use super::ledger::Ledger;
use super::observe::{Dead, Observed, Place, Stored};
use super::outboxes;
use super::retain::Policy;
use super::{GROUPS, PREFETCH};

/// The error of a bus that waited for an object as long as for a handler.
const OBJECT_TIMEOUT: &str = "the object store did not answer within";
/// After this many attempts a victim's handlers give up.
pub const MAX_ATTEMPTS: u32 = 4;

/// When a check is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Between two victims: events may be in flight.
    Interrupted,
    /// After a process ran until every group had caught up: nothing may be waiting or in flight.
    Drained,
}

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Acknowledged events that are gone, altered, or passed over without being handled.
    pub lost: Vec<String>,
    /// All other problems.
    pub faults: Vec<String>,
    /// How often a group finished an event that it had finished before.
    pub duplicates: u64,
    /// Events of outboxes that are in the log.
    pub relayed: u64,
    /// Objects that events refer to, and that were checked.
    pub objects: u64,
    /// Acknowledged events that retention was right to remove.
    pub removed: u64,
}

/// Dead letters that a notice in the log reports, by event and group.
type Told = HashSet<(EventId, usize)>;

impl Report {
    /// Whether no problem was found.
    pub fn is_clean(&self) -> bool {
        self.lost.is_empty() && self.faults.is_empty()
    }
}

/// Compares what victims reported with what is stored. `interruptions` is how often a victim was killed or
/// stopped so far: only events in flight at that time may have been handled twice.
pub fn check(ledger: &Ledger, observed: &Observed, stage: Stage, interruptions: u64) -> Report {
    let mut report = Report {
        duplicates: ledger.duplicates(),
        objects: observed.objects.len() as u64,
        ..Report::default()
    };
    report.faults.extend(observed.damage.iter().cloned());
    let most = interruptions.saturating_mul((PREFETCH * GROUPS.len()) as u64);
    if report.duplicates > most {
        report.faults.push(format!(
            "{} duplicates, and only {most} deliveries can have been in flight",
            report.duplicates
        ));
    }
    let told = check_notices(ledger, observed, &mut report);
    // A dead letter that a relay sent back comes late.
    let sent_back = |group, id| ledger.was_relayed(id) && told.contains(&(id, group));
    report.faults.extend(ledger.faults_unless(sent_back));
    let mut positions = HashMap::new();
    for (id, position) in ledger.acked() {
        if let Some(other) = positions.insert(position, id) {
            report.faults.push(format!(
                "{id} and {other} were both acknowledged at {position}"
            ));
        }
        match observed.events.get(id) {
            None => match not_ended(*id, ledger, &told) {
                Some(what) => report.lost.push(format!(
                    "{id}, acknowledged at {position}, is not in the log{what}"
                )),
                None => report.removed += 1,
            },
            Some(stored) if stored.position != *position => report.faults.push(format!(
                "{id}, acknowledged at {position}, is at {}",
                stored.position
            )),
            Some(_) => {}
        }
    }
    for (id, stored) in &observed.events {
        if stored.event_type != DEAD_LETTER_EVENT {
            check_event(*id, stored, ledger, stage, &told, &mut report);
        }
    }
    outboxes::check(ledger, observed, stage, &mut report);
    report
}

/// Why a removed event should still be there; `None` if its removal was right. Without retention no event may be
/// removed; with retention, the event must have ended in every group.
fn not_ended(id: EventId, ledger: &Ledger, told: &Told) -> Option<String> {
    ledger.retention().map_or(Some(String::new()), |_| {
        let content = Content::of(id);
        let ended = |group: usize| {
            !content.is_wanted_by(group)
                || ledger.finished(group, id) > 0
                || content.may_be_skipped_by(group)
                || told.contains(&(id, group))
        };
        let group = (0..GROUPS.len()).find(|group| !ended(*group))?;
        let name = GROUPS[group].name;
        Some(format!(", and group {name:?} never came to an end with it"))
    })
}

/// Every dead letter has a notice in the log, and nothing else has one.
fn check_notices(ledger: &Ledger, observed: &Observed, report: &mut Report) -> Told {
    let notices = observed
        .events
        .iter()
        .filter(|(_, stored)| stored.event_type == DEAD_LETTER_EVENT);
    let mut told = HashSet::new();
    for (id, stored) in notices {
        match read_notice(&stored.payload, observed, ledger) {
            None => report.faults.push(format!(
                "{id} at {} tells of no dead letter",
                stored.position
            )),
            Some(known) if !told.insert(known) && !ledger.was_relayed(known.0) => {
                report.faults.push(format!(
                    "{id} at {} tells of a dead letter a second time",
                    stored.position
                ));
            }
            Some(_) => {}
        }
    }
    // With this policy the notices are removed as well.
    if ledger.retention() == Some(Policy::Length) {
        return told;
    }
    for (id, stored) in &observed.events {
        for (group, places) in stored.places.iter().enumerate() {
            let dead = places.iter().any(|place| matches!(place, Place::Dead(_)));
            if dead && !told.contains(&(*id, group)) {
                report.faults.push(format!(
                    "{id} at {} in group {:?} is a dead letter that nothing tells of",
                    stored.position, GROUPS[group].name
                ));
            }
        }
    }
    told
}

/// The dead letter that a notice reports, if everything in the notice is true. Not everything is known about
/// a dead letter that retention removed, alone or with its event, or that a relay sent back.
fn read_notice(payload: &[u8], observed: &Observed, ledger: &Ledger) -> Option<(EventId, usize)> {
    let notice: serde_json::Value = serde_json::from_slice(payload).ok()?;
    let id: EventId = notice["eventId"].as_str()?.parse().ok()?;
    // The unnamed group has a display name.
    let named = |name: &str| {
        name.parse()
            .is_ok_and(|name: GroupName| notice["group"] == name.to_string())
    };
    let group = GROUPS.iter().position(|group| named(group.name))?;
    let forgets = ledger.retention() == Some(Policy::Age);
    let Some(event) = observed.events.get(&id) else {
        let known = notice["eventType"] == Content::of(id).event_type;
        return (forgets && known).then_some((id, group));
    };
    let told = |place: &Place| match place {
        Place::Dead(dead) => {
            let last = dead
                .failures
                .last()
                .map_or("", |failure| failure.error.as_str());
            let earlier = notice["attempts"].as_u64() < Some(dead.attempts.into());
            notice["attempts"] == dead.attempts && notice["error"] == last
                || earlier && ledger.was_relayed(id)
        }
        // The dead letter was removed by age, and the event was not.
        Place::Skipped(reason) if forgets && reason.starts_with(LETTER_KEPT) => true,
        _ => ledger.was_relayed(id),
    };
    let so = notice["eventType"] == event.event_type && event.places[group].iter().any(told);
    so.then_some((id, group))
}

fn check_event(
    id: EventId,
    stored: &Stored,
    ledger: &Ledger,
    stage: Stage,
    letters: &Told,
    report: &mut Report,
) {
    let content = Content::of(id);
    if let Some(what) = &stored.dangling {
        report
            .lost
            .push(format!("{id} at {} {what}", stored.position));
        return;
    }
    if stored.payload != content.payload || stored.event_type != content.event_type {
        report.lost.push(format!(
            "{id} at {} is not what was published",
            stored.position
        ));
        return;
    }
    for (index, group) in GROUPS.iter().enumerate() {
        let told = |what: String| {
            format!(
                "{id} at {} in group {:?} {what}",
                stored.position, group.name
            )
        };
        let places = &stored.places[index];
        if !content.is_wanted_by(index) {
            if places
                .iter()
                .any(|p| !matches!(p, Place::Waiting | Place::Handled))
            {
                report
                    .faults
                    .push(told(format!("is not wanted there, yet {places:?}")));
            }
            continue;
        }
        let [place] = places.as_slice() else {
            report.faults.push(told(format!("is in {places:?}")));
            continue;
        };
        match place {
            Place::Waiting | Place::InFlight if stage == Stage::Drained => report
                .faults
                .push(told(format!("is {place:?} after everything was drained"))),
            Place::Waiting | Place::InFlight => {}
            Place::Handled if ledger.finished(index, id) == 0 => report
                .lost
                .push(told("counts as handled, and no handler finished it".into())),
            Place::Handled => {}
            // Its dead letter was removed by age.
            Place::Skipped(reason)
                if reason.starts_with(LETTER_KEPT)
                    && ledger.retention() == Some(Policy::Age)
                    && letters.contains(&(id, index)) => {}
            Place::Skipped(reason) if reason.is_empty() || !content.may_be_skipped_by(index) => {
                report
                    .lost
                    .push(told(format!("was skipped with the reason {reason:?}")));
            }
            Place::Skipped(_) => {}
            Place::Dead(dead) => report.faults.extend(
                flaws(dead, stored, &content, index, ledger.was_relayed(id))
                    .into_iter()
                    .map(|flaw| told(format!("is a dead letter {flaw}"))),
            ),
        }
    }
}

/// What is missing in a dead letter.
fn flaws(
    dead: &Dead,
    stored: &Stored,
    content: &Content,
    group: usize,
    sent_back: bool,
) -> Vec<String> {
    let mut flaws = Vec::new();
    let failures = &dead.failures;
    let Some(last) = failures.last() else {
        return vec!["without errors".into()];
    };
    let numbers: Vec<u32> = failures.iter().map(|f| f.attempt).collect();
    // A dead letter that was sent back and died again has the errors of all its deaths.
    let lives: Vec<&[Failure]> = failures.chunk_by(|_, next| next.attempt != 1).collect();
    let counted = |life: &&[Failure]| (1..).zip(*life).all(|(n, failure)| failure.attempt == n);
    if !lives.iter().all(counted) || lives.len() > 1 && !sent_back {
        flaws.push(format!("whose errors are of the attempts {numbers:?}"));
    }
    if failures.iter().any(|f| f.error.is_empty()) {
        flaws.push("with an error that says nothing".into());
    }
    if failures.windows(2).any(|pair| pair[0].at > pair[1].at) {
        flaws.push("whose errors are not in the order of time".into());
    }
    // An event that was alone in flight at its last crash is given up instead of run again: one attempt more
    // than errors.
    let begun = failures.len() as u32;
    let given_up_unrun = |life: &&&[Failure]| {
        life.last()
            .is_some_and(|last| last.kind == FailureKind::Crash && last.alone)
    };
    let unrun = lives.iter().filter(given_up_unrun).count() as u32;
    if !(begun..=begun + unrun).contains(&dead.attempts) {
        flaws.push(format!("of {} attempts with {begun} errors", dead.attempts));
    }
    if last.kind != FailureKind::Permanent && dead.attempts < MAX_ATTEMPTS {
        flaws.push(format!("after only {} attempts", dead.attempts));
    }
    for failure in failures {
        let kind = failure.kind;
        // A timeout as well: a starved process waits too long for an object.
        if kind == FailureKind::Decode && failure.error.contains(OBJECT_TIMEOUT) {
            continue;
        }
        if !content.may_fail_with(group, kind) {
            flaws.push(format!("with {kind:?}, which no handler caused"));
        }
        let ran = kind != FailureKind::Crash;
        let known = |name: &str| GROUPS[group].handlers.contains(&name);
        if ran && !failure.handler.as_deref().is_some_and(known) {
            flaws.push(format!("whose error is of handler {:?}", failure.handler));
        }
    }
    let last_life = lives.last().copied().unwrap_or_default();
    let last_handler = last_life.iter().rev().find_map(|f| f.handler.as_deref());
    if dead.handler.as_deref() != last_handler {
        flaws.push(format!(
            "of handler {:?}, not {last_handler:?}",
            dead.handler
        ));
    }
    if dead.first_seen_at < stored.received_at || dead.died_at < dead.first_seen_at {
        flaws.push("that died before it lived".into());
    }
    flaws
}
