//! Redelivery: a group gets events again that it has finished.

use everbus_core::{BoxFuture, GroupName, Position, Redeliver, Redelivery, Result, Timestamp};

use crate::broker::Memory;
use crate::state::State;

impl State {
    /// Redelivers an event to a group that has finished it.
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

    /// What a redelivery of an event to a group would do.
    pub(crate) fn redeliverable(&self, group: u64, position: u64) -> Redelivery {
        let (Some(_), Some(group)) = (self.records.get(position), self.groups.get(&group)) else {
            return Redelivery::Gone;
        };
        let owed = position > group.cursor
            || group.rows.contains_key(&position)
            || self.dead.is_open(position, &group.name);
        if owed {
            Redelivery::Owed
        } else {
            Redelivery::Queued
        }
    }
}

impl Redeliver for Memory {
    fn redeliver(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            let (group, now) = (state.group_number(&group)?, self.now());
            let each = positions.into_iter();
            let answers = each.map(|position| state.redeliver(group, position.place(), now));
            let answers = answers.collect();
            drop(state);
            self.work.notify_waiters();
            Ok(answers)
        })
    }

    fn redeliverable(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let group = state.group_number(&group)?;
            let each = positions.into_iter();
            Ok(each
                .map(|at| state.redeliverable(group, at.place()))
                .collect())
        })
    }
}
