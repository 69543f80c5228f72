//! The whole state of the engine, and the operations that change it, under one lock.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use everbus_core::{
    ADDRESSED, Appended, ClockRecord, Code, Cursor, Death, DutyRecord, Error, Event, EventId,
    EventState, GroupName, GroupSpec, GroupState, Lease, Pattern, Position, Recorded, Redelivery,
    Result, SettledOutcome, Settlement, SubscriptionInfo, Timestamp, UNMATCHED, Verdict,
    dead_letter_notice, no_group,
};
use tokio::sync::Notify;

use crate::audit::Trail;
use crate::checkpoints::Saved;
use crate::dead_letters::DeadLetterTable;
use crate::group::{Group, Row, RowState};
use crate::inbox::Handled;
use crate::orphans::Left;
use crate::outcomes;
use crate::payloads::Stages;
use crate::records::{LeaseParts as _, Records, Seq as _};
use crate::store::{Early, Failed};

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) closed: bool,
    pub(crate) records: Records,
    /// By number; a number is never used again, so an old lease or consumer cannot refer to a new group.
    pub(crate) groups: BTreeMap<u64, Group>,
    pub(crate) names: BTreeMap<GroupName, u64>,
    pub(crate) dead: DeadLetterTable,
    pub(crate) inbox: Handled,
    pub(crate) stages: Stages,
    /// What the runtime reported about events that another broker moves.
    pub(crate) failed: Failed,
    pub(crate) early: Early,
    pub(crate) orphans: Left,
    pub(crate) checkpoints: Saved,
    pub(crate) audit: Trail,
    pub(crate) next_token: u64,
    next_number: u64,
    /// The last owner of each periodic duty.
    pub(crate) duties: BTreeMap<String, DutyRecord>,
    /// The last check of the clock.
    pub(crate) clock: Option<ClockRecord>,
    /// The tasks that wait for a position to be settled, and their number.
    pub(crate) waiters: HashMap<u64, (Arc<Notify>, usize)>,
}

impl State {
    pub(crate) fn new() -> Self {
        Self {
            closed: false,
            records: Records::new(),
            groups: BTreeMap::new(),
            names: BTreeMap::new(),
            dead: DeadLetterTable::default(),
            inbox: Handled::default(),
            stages: Stages::default(),
            failed: Failed::new(),
            early: Early::new(),
            orphans: Left::default(),
            checkpoints: Saved::new(),
            audit: Trail::default(),
            next_token: 0,
            next_number: 0,
            duties: BTreeMap::new(),
            clock: None,
            waiters: HashMap::new(),
        }
    }

    /// A new number for a group or a consumer.
    pub(crate) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    pub(crate) fn group_number(&self, name: &GroupName) -> Result<u64> {
        let number = self.names.get(name).copied();
        number.ok_or_else(|| no_group(name))
    }

    pub(crate) fn declare(
        &mut self,
        spec: GroupSpec,
        now: Timestamp,
    ) -> Result<Vec<SubscriptionInfo>> {
        let number = match self.names.get(&spec.name) {
            Some(&number) => {
                let group = &self.groups[&number];
                spec.check_known(group.ordered, group.ephemeral == spec.ephemeral)?;
                number
            }
            None => {
                spec.check_new()?;
                let patterns: Vec<Pattern> = spec
                    .subscriptions
                    .iter()
                    .map(|s| s.pattern.clone())
                    .collect();
                let position = self.records.resolve(spec.start_from, &patterns);
                let head = self.records.head();
                let mut group = Group::new(spec.name.clone(), spec.ordered, position, head, now);
                group.ephemeral = spec.ephemeral;
                let number = self.number();
                self.groups.insert(number, group);
                self.names.insert(spec.name.clone(), number);
                number
            }
        };
        let Some(group) = self.groups.get_mut(&number) else {
            return Err(Error::new(
                Code::Internal,
                "a group has a name and no state",
            ));
        };
        let mut declared = Vec::with_capacity(spec.subscriptions.len());
        for wanted in spec.subscriptions {
            let known = group
                .subscriptions
                .iter_mut()
                .find(|s| s.name == wanted.name);
            let info = match known {
                Some(known) => {
                    known.pattern = wanted.pattern;
                    known.clone()
                }
                None => {
                    let info = SubscriptionInfo {
                        id: EventId::new(),
                        group: spec.name.clone(),
                        name: wanted.name,
                        pattern: wanted.pattern,
                        after: Cursor::seq(group.position),
                        created_at: now,
                    };
                    group.subscriptions.push(info.clone());
                    info
                }
            };
            declared.push(info);
        }
        let is_new = |s: &&SubscriptionInfo| declared.iter().all(|info| info.name != s.name);
        let mut others: Vec<_> = group.subscriptions.iter().filter(is_new).cloned().collect();
        others.sort_by(|a, b| a.name.cmp(&b.name));
        declared.append(&mut others);
        // A subscription may have become narrower.
        group.skip_unwanted(now);
        Ok(declared)
    }

    pub(crate) fn retract(&mut self, id: EventId, now: Timestamp) -> Result<()> {
        for group in self.groups.values_mut() {
            let before = group.subscriptions.len();
            group.subscriptions.retain(|s| s.id != id);
            if group.subscriptions.len() < before {
                group.skip_unwanted(now);
                return Ok(());
            }
        }
        let what = format!("there is no subscription {id}");
        Err(Error::new(Code::SubscriptionNotFound, what))
    }

    pub(crate) fn remove_group(&mut self, name: &GroupName) -> Result<()> {
        let number = self.group_number(name)?;
        self.names.remove(name);
        self.groups.remove(&number);
        self.dead.remove_group(name);
        self.inbox.remove_group(number);
        self.failed.retain(|(group, _), _| *group != number);
        Ok(())
    }

    /// Appends all events or none.
    pub(crate) fn append(&mut self, batch: Vec<Event>, now: Timestamp) -> Result<Vec<Appended>> {
        let before = self.records.head();
        let received_at = self.records.receipt_time(now);
        let mut answers = Vec::with_capacity(batch.len());
        for event in batch {
            let (id, tenant) = (event.id(), event.tenant());
            let appended = match self.records.find(id, tenant) {
                Some(known) if known.event.same_body(&event) => {
                    Appended::new(id, known.position, known.received_at).as_duplicate()
                }
                Some(_) => {
                    self.records.truncate(before);
                    let what = format!("the event {id} exists with another body");
                    return Err(Error::new(Code::IdReused, what)
                        .hint("an id names one event for ever; give the new event a new id"));
                }
                None => {
                    let position = Position::seq(self.records.head() + 1);
                    let record = Recorded::new(event, position, received_at);
                    self.records.push(Arc::new(record));
                    Appended::new(id, position, received_at)
                }
            };
            answers.push(appended);
        }
        for position in before + 1..=self.records.head() {
            if let Some(record) = self.records.get(position) {
                self.orphans.born(&record.event);
            }
        }
        Ok(answers)
    }

    /// The group in which a lease is held now.
    fn holder(&mut self, lease: &Lease, now: Timestamp) -> Result<&mut Group> {
        let lost = || {
            let what = format!("the lease on event {} had ended", lease.seq());
            Error::new(Code::LeaseLost, what)
                .hint("the event was or will be delivered again; extend leases of long work")
        };
        let group = self.groups.get_mut(&lease.slot()).ok_or_else(lost)?;
        group.end_leases(now);
        if group.held(lease).is_none() {
            return Err(lost());
        }
        Ok(group)
    }

    pub(crate) fn extend(&mut self, lease: &Lease, until: Timestamp, now: Timestamp) -> Result<()> {
        self.holder(lease, now)?.extend(lease.seq(), until);
        Ok(())
    }

    /// Applies one settlement: all of it, or nothing.
    pub(crate) fn settle(&mut self, settlement: Settlement, now: Timestamp) -> Result<()> {
        let Settlement {
            lease,
            verdict,
            follow_ups,
            inbox,
            effect,
            ran,
            ..
        } = settlement;
        let held = self.holder(&lease, now)?.held(&lease);
        let record = held.map(|row| row.record.clone());
        let retried = held.is_some_and(|row| row.retried);
        let acked = verdict == Verdict::Ack;
        if acked && effect.is_some() {
            return Err(no_transaction());
        }
        let record = record.filter(|_| acked && inbox);
        let handled = |record: &Arc<Recorded>| self.inbox.contains(lease.slot(), &record.event);
        // An event that the inbox knows is acked without its other effects.
        let again = record.as_ref().is_some_and(handled);
        if !follow_ups.is_empty() && !again {
            self.append(follow_ups, now)?;
        }
        if let Some(record) = record.filter(|_| !again) {
            self.inbox.insert(lease.slot(), &record.event, now);
        }
        let position = lease.seq();
        let group = self.groups.get(&lease.slot()).filter(|_| retried);
        let was_dead = group.is_some_and(|g| self.dead.get(position, &g.name).is_some());
        let group = self.holder(&lease, now)?;
        group.active_at = now;
        match verdict {
            Verdict::Ack => {
                group.end(position, was_dead, ran, now);
            }
            Verdict::Skip { reason } => {
                group.end(position, was_dead, ran, now);
                group.skip(position, &reason);
            }
            Verdict::Retry { after, failure } => {
                if let Some(row) = group.rows.get_mut(&position) {
                    row.failures.push(failure);
                }
                group.put_back(position, now.plus(after), false);
            }
            Verdict::Release { after } => group.put_back(position, now.plus(after), true),
            Verdict::Dead { failure } => {
                let name = group.name.clone();
                if let Some(row) = group.finish(position) {
                    let death = Death::new(row.attempts, row.failures, failure, now);
                    self.bury(name, row.record, death, now);
                }
            }
        }
        self.wake_waiters(position);
        Ok(())
    }

    /// Makes an event a dead letter, and appends its notice.
    fn bury(&mut self, group: GroupName, record: Arc<Recorded>, death: Death, now: Timestamp) {
        let number = self.names.get(&group);
        let ephemeral = number.and_then(|number| self.groups.get_mut(number));
        if let Some(ephemeral) = ephemeral.filter(|group| group.ephemeral) {
            ephemeral.give_up(record.seq(), death, now);
            return;
        }
        let died_at = death.died_at;
        let letter = self.dead.bury(group, record, death);
        let (last, attempts) = (letter.failures.last(), letter.attempts);
        let notice = dead_letter_notice(&letter.record, &letter.group, attempts, last, died_at);
        if let Some(notice) = notice {
            // The notice was appended before, at the same time, with another text: once is enough.
            let _ = self.append(vec![notice], now);
        }
    }

    /// Moves rows that had no handler for too long to the dead letters.
    pub(crate) fn bury_orphans(&mut self, group: &GroupName, orphans: Vec<Row>, now: Timestamp) {
        for mut row in orphans {
            let (position, last) = (row.record.seq(), row.failures.pop());
            let death = Death::new(row.attempts, row.failures, last, now);
            self.bury(group.clone(), row.record, death, now);
            self.wake_waiters(position);
        }
    }

    /// Delivers an event to a group once more, if the group has finished it.
    pub(crate) fn redeliver(&mut self, group: u64, position: u64, now: Timestamp) -> Redelivery {
        let answer = self.redeliverable(group, position);
        if answer == Redelivery::Queued
            && let Some(record) = self.records.get(position)
            && let Some(group) = self.groups.get_mut(&group)
        {
            group.add_waiting(record.clone(), now);
        }
        answer
    }

    /// Whether an event could be delivered to a group once more.
    pub(crate) fn redeliverable(&self, group: u64, position: u64) -> Redelivery {
        let (Some(_), Some(group)) = (self.records.get(position), self.groups.get(&group)) else {
            return Redelivery::Gone;
        };
        let owed = position > group.position
            || group.rows.contains_key(&position)
            || self.dead.is_open(position, &group.name);
        if owed {
            Redelivery::Owed
        } else {
            Redelivery::Queued
        }
    }

    pub(crate) fn wake_waiters(&self, position: u64) {
        if let Some((waiter, _)) = self.waiters.get(&position) {
            waiter.notify_waiters();
        }
    }

    pub(crate) fn wake_all_waiters(&self) {
        self.waiters
            .values()
            .for_each(|(waiter, _)| waiter.notify_waiters());
    }

    /// Takes back every lease that ended.
    pub(crate) fn end_leases(&mut self, now: Timestamp) {
        self.groups
            .values_mut()
            .for_each(|group| group.end_leases(now));
    }

    /// The state of an event in a group.
    fn state_in(&self, group: &Group, record: &Recorded) -> EventState {
        let position = record.seq();
        match group.rows.get(&position) {
            Some(row) => {
                let in_flight = matches!(row.state, RowState::InFlight { .. });
                EventState::of_waiting(in_flight, &row.failures)
            }
            None if self.dead.is_open(position, &group.name) => EventState::Dlq,
            None if group.awaits(record) => EventState::Pending,
            None => EventState::Done,
        }
    }

    /// The state of an event in every group.
    pub(crate) fn states(&self, record: &Recorded) -> Vec<GroupState> {
        let position = record.seq();
        let states = self.names.values().filter_map(|number| {
            let group = self.groups.get(number)?;
            let mut state = self.state_in(group, record);
            let (mut attempts, mut failures, mut due_at) = (0, Vec::new(), None);
            if let Some(row) = group.rows.get(&position) {
                attempts = row.attempts;
                failures.clone_from(&row.failures);
                if let RowState::Waiting { due } = row.state {
                    due_at = Some(due);
                }
            } else if state == EventState::Dlq
                && let Some(dead) = self.dead.get(position, &group.name)
            {
                attempts = dead.attempts;
                failures.clone_from(&dead.failures);
            }
            let skipped = group.skipped.get(&position);
            let skipped = skipped.filter(|_| state == EventState::Done);
            let elsewhere = state == EventState::Done && !record.event.is_for(&group.name);
            let unmatched = state == EventState::Done
                && !group.subscriptions.is_empty()
                && !group.wants(record.event.event_type());
            let mut ended = None;
            if state == EventState::Done {
                let dead = self.dead.get(position, &group.name);
                let outcome = group.outcomes.get(&position);
                (attempts, failures) = outcomes::all(dead, outcome);
                ended = outcome.map(|outcome| outcome.ended.clone());
            }
            if state == EventState::Done
                && let Some(kept) = self.failed.get(&(*number, position))
                && let Some(last) = kept.all.last()
            {
                failures.clone_from(&kept.all);
                attempts = last.attempt;
                if !kept.current().is_empty() {
                    state = EventState::Processing;
                } else if skipped.is_none() {
                    // The attempt after the last failed one handled it.
                    attempts = attempts.saturating_add(1);
                }
            }
            let is_untouched = failures.is_empty();
            Some(GroupState {
                group: group.name.clone(),
                state,
                attempts,
                failures,
                due_at,
                skipped: skipped
                    .map(ToString::to_string)
                    .or_else(|| elsewhere.then(|| ADDRESSED.to_owned()))
                    .or_else(|| {
                        let untouched = unmatched && is_untouched && ended.is_none();
                        untouched.then(|| UNMATCHED.to_owned())
                    }),
                ended,
            })
        });
        states.collect()
    }

    /// Removes an event and everything stored with it.
    pub(crate) fn remove(&mut self, position: u64, now: Timestamp) {
        if let Some(record) = self.records.get(position) {
            self.orphans.note(&record.event, now);
        }
        self.records.remove(position);
        self.dead.forget(position);
        self.stages.forget(position);
        self.failed.retain(|(_, event), _| *event != position);
        for group in self.groups.values_mut() {
            group.skipped.remove(&position);
            group.outcomes.remove(&position);
        }
    }

    /// Records why a group skipped an event, if the group exists.
    pub(crate) fn skip(&mut self, position: u64, group: &GroupName, reason: &str) {
        let number = self.names.get(group);
        if let Some(group) = number.and_then(|number| self.groups.get_mut(number)) {
            group.skip(position, reason);
        }
    }

    /// Whether an event is pending in a group or is a dead letter.
    pub(crate) fn is_needed(&self, record: &Recorded) -> bool {
        self.is_needed_but_for(record, |_| false)
    }

    /// The same, without the dead letters of some groups.
    pub(crate) fn is_needed_but_for(
        &self,
        record: &Recorded,
        gone: impl Fn(&GroupName) -> bool,
    ) -> bool {
        let mut groups = self.groups.values();
        groups.any(|group| match self.state_in(group, record) {
            EventState::Done => false,
            // Events that an ephemeral group has not reached are not kept for it.
            _ if group.ephemeral && !group.rows.contains_key(&record.seq()) => false,
            EventState::Dlq => !gone(&group.name),
            EventState::Pending | EventState::Processing => true,
        })
    }

    /// Whether a group has an event waiting or in flight.
    pub(crate) fn has_row(&self, position: u64, group: &GroupName) -> bool {
        let number = self.names.get(group);
        let group = number.and_then(|number| self.groups.get(number));
        group.is_some_and(|group| group.rows.contains_key(&position))
    }

    /// The result of an event in the groups that existed when it was appended; `None` if it is not settled.
    pub(crate) fn outcome(&self, position: u64) -> Result<Option<SettledOutcome>> {
        let Some(record) = self.records.get(position) else {
            return Err(no_event(position));
        };
        let mut outcome = SettledOutcome::default();
        for number in self.names.values() {
            let group = &self.groups[number];
            if group.declared_at >= position {
                continue;
            }
            match self.state_in(group, record) {
                EventState::Done => {}
                EventState::Dlq => outcome.dead_lettered.push(group.name.clone()),
                EventState::Pending | EventState::Processing => return Ok(None),
            }
        }
        Ok(Some(outcome))
    }
}

fn no_transaction() -> Error {
    let what = "the memory engine has no transactions in which an effect could run";
    Error::new(Code::Unsupported, what)
        .hint("open the bus on a file (sqlite:events.db), or make the handler idempotent")
}

pub(crate) fn no_event(position: u64) -> Error {
    let what = format!("there is no event at position {position}");
    Error::new(Code::NotFound, what)
}
