//! The checker: every acknowledged event is where it must be, in every group.
//!
//! It compares what victims said with what was observed, and knows no engine. An acknowledged event is
//! in exactly one of {waiting, in flight, handled, dead-lettered, skipped with a reason} for every
//! group that wants it; a dead letter carries everything needed to understand it; *handled* is believed
//! only if a handler said so.

use std::collections::HashSet;

use everbus_core::{DEAD_LETTER_EVENT, EventId, FailureKind, GroupName};

use super::content::Content;
use super::ledger::Ledger;
use super::observe::{Dead, Observed, Place, Stored};
use super::{GROUPS, PREFETCH};

/// After so many attempts a victim's handlers give up.
pub const MAX_ATTEMPTS: u32 = 4;

/// When a check is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Between two victims: work may be under way.
    Interrupted,
    /// After a process was left alone until nothing was owed: nothing may be.
    Drained,
}

/// What a check found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Acknowledged events that are gone, altered, or passed over without being handled.
    pub lost: Vec<String>,
    /// Whatever else is wrong.
    pub faults: Vec<String>,
    /// How often a group finished an event that it had finished before.
    pub duplicates: u64,
}

impl Report {
    /// Whether nothing was found.
    pub fn is_clean(&self) -> bool {
        self.lost.is_empty() && self.faults.is_empty()
    }
}

/// Compares what victims said with what is stored. `interruptions` is how often one was killed or
/// stopped so far: only what was in flight then may have been handled twice.
pub fn check(ledger: &Ledger, observed: &Observed, stage: Stage, interruptions: u64) -> Report {
    let mut report = Report {
        faults: ledger.faults(),
        duplicates: ledger.duplicates(),
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
    for (id, position) in ledger.acked() {
        match observed.events.get(id) {
            None => report.lost.push(format!(
                "{id}, acknowledged at {position}, is not in the log"
            )),
            Some(stored) if stored.position != *position => report.faults.push(format!(
                "{id}, acknowledged at {position}, is at {}",
                stored.position
            )),
            Some(_) => {}
        }
    }
    for (id, stored) in &observed.events {
        if stored.event_type != DEAD_LETTER_EVENT {
            check_event(*id, stored, ledger, stage, &mut report);
        }
    }
    check_notices(observed, &mut report);
    report
}

/// Every dead letter is told of, and nothing else is.
fn check_notices(observed: &Observed, report: &mut Report) {
    let notices = observed
        .events
        .iter()
        .filter(|(_, stored)| stored.event_type == DEAD_LETTER_EVENT);
    let mut told = HashSet::new();
    for (id, stored) in notices {
        match read_notice(&stored.payload, observed) {
            None => report.faults.push(format!(
                "{id} at {} tells of no dead letter",
                stored.position
            )),
            Some(known) if !told.insert(known) => report.faults.push(format!(
                "{id} at {} tells of a dead letter a second time",
                stored.position
            )),
            Some(_) => {}
        }
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
}

/// The dead letter that a notice tells of, if all it says is so.
fn read_notice(payload: &[u8], observed: &Observed) -> Option<(EventId, usize)> {
    let notice: serde_json::Value = serde_json::from_slice(payload).ok()?;
    let id: EventId = notice["eventId"].as_str()?.parse().ok()?;
    // The unnamed group has a name for people.
    let named = |name: &str| {
        name.parse()
            .is_ok_and(|name: GroupName| notice["group"] == name.to_string())
    };
    let group = GROUPS.iter().position(|group| named(group.name))?;
    let event = observed.events.get(&id)?;
    let told = |place: &Place| match place {
        Place::Dead(dead) => {
            let last = dead
                .failures
                .last()
                .map_or("", |failure| failure.error.as_str());
            notice["attempts"] == dead.attempts && notice["error"] == last
        }
        _ => false,
    };
    let so = notice["eventType"] == event.event_type && event.places[group].iter().any(told);
    so.then_some((id, group))
}

fn check_event(id: EventId, stored: &Stored, ledger: &Ledger, stage: Stage, report: &mut Report) {
    let content = Content::of(id);
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
            Place::Skipped(reason) if reason.is_empty() || !content.may_be_skipped_by(index) => {
                report
                    .lost
                    .push(told(format!("was skipped with the reason {reason:?}")));
            }
            Place::Skipped(_) => {}
            Place::Dead(dead) => report.faults.extend(
                flaws(dead, stored, &content, index)
                    .into_iter()
                    .map(|flaw| told(format!("is a dead letter {flaw}"))),
            ),
        }
    }
}

/// What a dead letter lacks.
fn flaws(dead: &Dead, stored: &Stored, content: &Content, group: usize) -> Vec<String> {
    let mut flaws = Vec::new();
    let failures = &dead.failures;
    let Some(last) = failures.last() else {
        return vec!["without errors".into()];
    };
    let numbers: Vec<u32> = failures.iter().map(|f| f.attempt).collect();
    if !numbers.iter().copied().eq(1..=failures.len() as u32) {
        flaws.push(format!("whose errors are of the attempts {numbers:?}"));
    }
    if failures.iter().any(|f| f.error.is_empty()) {
        flaws.push("with an error that says nothing".into());
    }
    if failures.windows(2).any(|pair| pair[0].at > pair[1].at) {
        flaws.push("whose errors are not in the order of time".into());
    }
    // An event that was alone at its last crash is given up instead of run: one attempt more than
    // errors.
    let begun = failures.len() as u32;
    let given_up_unrun = last.kind == FailureKind::Crash && last.alone;
    if dead.attempts != begun && !(given_up_unrun && dead.attempts == begun + 1) {
        flaws.push(format!("of {} attempts with {begun} errors", dead.attempts));
    }
    if last.kind != FailureKind::Permanent && dead.attempts < MAX_ATTEMPTS {
        flaws.push(format!("after only {} attempts", dead.attempts));
    }
    for failure in failures {
        let kind = failure.kind;
        if !content.may_fail_with(group, kind) {
            flaws.push(format!("with {kind:?}, which no handler caused"));
        }
        let ran = kind != FailureKind::Crash;
        let known = |name: &str| GROUPS[group].handlers.contains(&name);
        if ran && !failure.handler.as_deref().is_some_and(known) {
            flaws.push(format!("whose error is of handler {:?}", failure.handler));
        }
    }
    let last_handler = failures.iter().rev().find_map(|f| f.handler.as_deref());
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
