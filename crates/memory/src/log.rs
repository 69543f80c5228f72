//! Reading the log without a group, and the state of an event in each group.

use std::sync::Arc;

use everbus_core::{
    ADDRESSED, BoxFuture, Code, Cursor, Error, EventId, EventState, GroupState, Log, Lookup,
    Pattern, Position, Recorded, Result, Shard, StartFrom, UNMATCHED,
};

use crate::broker::Memory;
use crate::groups::{Group, RowState};
use crate::outcomes;
use crate::records::{Seq as _, any_matches};
use crate::state::State;

impl Log for Memory {
    fn head(&self) -> BoxFuture<'_, Result<Cursor>> {
        Box::pin(async move { Ok(Cursor::seq(self.open_state()?.records.head())) })
    }

    fn read(
        &self,
        after: Cursor,
        patterns: Vec<Pattern>,
        limit: usize,
    ) -> BoxFuture<'_, Result<(Vec<Arc<Recorded>>, Cursor)>> {
        Box::pin(async move {
            let after = after.place(Shard::ONLY);
            let state = self.open_state()?;
            let wanted = state
                .records
                .after(after)
                .filter(|record| any_matches(&patterns, record.event.event_type()));
            let found: Vec<Arc<Recorded>> = wanted.take(limit).cloned().collect();
            let reached = match found.last() {
                Some(last) if found.len() == limit => last.seq(),
                _ if limit == 0 => after,
                _ => after.max(state.records.head()),
            };
            Ok((found, Cursor::seq(reached)))
        })
    }

    fn resolve(&self, from: StartFrom, patterns: Vec<Pattern>) -> BoxFuture<'_, Result<Cursor>> {
        Box::pin(async move {
            let place = self.open_state()?.records.resolve(from, &patterns);
            Ok(Cursor::seq(place))
        })
    }

    fn wait_beyond(&self, cursor: Cursor) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            loop {
                let mut woken = std::pin::pin!(self.work.notified());
                woken.as_mut().enable();
                if self.open_state()?.records.head() > cursor.place(Shard::ONLY) {
                    return Ok(());
                }
                woken.await;
            }
        })
    }
}

impl Lookup for Memory {
    fn find(&self, id: EventId) -> BoxFuture<'_, Result<Vec<Arc<Recorded>>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let found = state.records.with_id(id).cloned().collect();
            Ok(found)
        })
    }

    fn states(&self, position: Position) -> BoxFuture<'_, Result<Vec<GroupState>>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            state.end_leases(self.now());
            let record = state
                .records
                .get(position.place())
                .ok_or_else(|| no_event(position.place()))?;
            Ok(state.states(record))
        })
    }
}

impl State {
    /// The state of an event in a group.
    pub(crate) fn state_in(&self, group: &Group, record: &Recorded) -> EventState {
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
                    // One more attempt than the failed ones: the attempt that handled the event.
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
}

pub(crate) fn no_event(position: u64) -> Error {
    let what = format!("there is no event at position {position}");
    Error::new(Code::NotFound, what)
}
