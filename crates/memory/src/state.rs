//! The whole state of the engine, under one lock. The operations that change it are in the files of their
//! roles: `declare`, `append`, `settle`, `redeliver`, `dead_letters`, …

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use everbus_core::{ClockRecord, EventState, GroupName, Recorded, Result, Timestamp, no_group};
use tokio::sync::Notify;

use crate::audit::Trail;
use crate::checkpoints::Saved;
use crate::dead_letters::DeadLetterTable;
use crate::groups::Group;
use crate::inbox::Handled;
use crate::kv::Values;
use crate::orphans::Left;
use crate::payloads::Stages;
use crate::records::{Records, Seq as _};
use crate::store::{Early, Failed};

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) closed: bool,
    pub(crate) records: Records,
    /// The groups by number. A number is never used again, so an old lease or consumer cannot refer to a new
    /// group.
    pub(crate) groups: BTreeMap<u64, Group>,
    pub(crate) names: BTreeMap<GroupName, u64>,
    pub(crate) dead: DeadLetterTable,
    pub(crate) inbox: Handled,
    pub(crate) stages: Stages,
    /// Failed attempts of events that another engine moves.
    pub(crate) failed: Failed,
    pub(crate) early: Early,
    pub(crate) orphans: Left,
    pub(crate) checkpoints: Saved,
    pub(crate) values: Values,
    pub(crate) audit: Trail,
    pub(crate) next_token: u64,
    next_number: u64,
    /// The record of the last check of the clock.
    pub(crate) clock: Option<ClockRecord>,
    /// By position: how to wake the tasks that wait until the event is settled, and how many they are.
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
            values: Values::default(),
            audit: Trail::default(),
            next_token: 0,
            next_number: 0,
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

    /// Ends every lease whose time is over, in all groups.
    pub(crate) fn end_leases(&mut self, now: Timestamp) {
        self.groups
            .values_mut()
            .for_each(|group| group.end_leases(now));
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

    /// Like [`is_needed`](Self::is_needed), but the dead letters of the groups for which `gone` is true do not
    /// count.
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
}
