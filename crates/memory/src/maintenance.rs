//! Retention and a consistency check. There is no file, so there is nothing to back up.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use everbus_core::{
    BoxFuture, CheckReport, ClockDoubt, ClockRecord, Code, Error, GroupName, Held, Holdings,
    Maintenance, Pruned, Recorded, Result, Retention, Timestamp, TypeHoldings, letter_kept_for,
};

use crate::broker::Memory;
use crate::records::Seq as _;
use crate::state::State;

impl Memory {
    fn prune_records(&self, retention: &Retention) -> Result<Pruned> {
        let mut state = self.open_state()?;
        let now = self.now();
        let (mut pruned, positions) = old_dead(&state, retention, now);
        for (position, group) in positions {
            let was_open = state.dead.is_open(position, &group);
            state.dead.remove(position, &group);
            if let Some(age) = retention.dead_letters.filter(|_| was_open) {
                // The group never handled the event. The event itself is removed when it is old enough.
                state.skip(position, &group, &letter_kept_for(age));
            }
            state.wake_waiters(position);
        }
        for record in over_limits(&state, retention, now) {
            if remove_unneeded(&mut state, &record, now) {
                pruned.removed += 1;
            } else {
                pruned.kept += 1;
            }
        }
        if let Some(age) = retention.audit {
            pruned.audit = state.audit.forget(now.minus(age));
        }
        Ok(pruned)
    }

    fn preview_records(&self, retention: &Retention) -> Result<Pruned> {
        let state = self.open_state()?;
        let now = self.now();
        let (mut pruned, positions) = old_dead(&state, retention, now);
        let gone: BTreeSet<(u64, GroupName)> = positions.into_iter().collect();
        let needed = |record: &Recorded| {
            let position = record.seq();
            state.is_needed_but_for(record, |group| gone.contains(&(position, group.clone())))
        };
        for record in over_limits(&state, retention, now) {
            if needed(&record) {
                pruned.kept += 1;
            } else {
                pruned.removed += 1;
            }
        }
        if let Some(age) = retention.audit {
            pruned.audit = state.audit.older(now.minus(age)) as u64;
        }
        Ok(pruned)
    }

    fn count_records(&self) -> Result<Holdings> {
        let state = self.open_state()?;
        let mut types: BTreeMap<&str, TypeHoldings> = BTreeMap::new();
        let mut expiring = Held::default();
        for record in state.records.after(0) {
            let event_type = record.event.event_type();
            let entry = types.entry(event_type).or_insert_with(|| TypeHoldings {
                event_type: event_type.to_owned(),
                events: 0,
                oldest: record.received_at,
            });
            entry.events += 1;
            if let Some(at) = expiry(record) {
                expiring.count += 1;
                expiring.oldest = Some(expiring.oldest.map_or(at, |first| first.min(at)));
            }
        }
        Ok(Holdings {
            types: types.into_values().collect(),
            dead_letters: state.dead.held(),
            audit: state.audit.held(),
            expiring,
            clock: look_at_clock(&state, self.now()).doubt,
            ..Holdings::default()
        })
    }

    fn check_rules(&self) -> Result<CheckReport> {
        let state = self.open_state()?;
        let mut report = CheckReport::default();
        for group in state.groups.values() {
            let wrong = group.contradiction(|position| state.dead.is_open(position, &group.name));
            let check = format!("every event of group {} is in one state", group.name);
            let ok = wrong.is_none();
            report.add(check, ok, wrong.unwrap_or_else(|| "it is".to_string()));
        }
        if let Some(known) = &state.clock {
            report.note_clock(known);
        }
        Ok(report)
    }
}

impl Maintenance for Memory {
    fn check(&self) -> BoxFuture<'_, Result<CheckReport>> {
        Box::pin(async move { self.check_rules() })
    }

    fn backup(
        &self,
        _target: PathBuf,
        _progress: Box<dyn FnMut(u64, u64) + Send>,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            drop(self.open_state()?);
            let what = "the memory engine has no file to back up";
            Err(Error::new(Code::Unsupported, what)
                .hint("open the bus on a file: sqlite:events.db"))
        })
    }

    fn prune_watched(
        &self,
        retention: Retention,
        mut progress: Box<dyn FnMut(Pruned) + Send>,
    ) -> BoxFuture<'_, Result<Pruned>> {
        Box::pin(async move {
            let pruned = self.prune_records(&retention)?;
            progress(pruned);
            Ok(pruned)
        })
    }

    fn preview(&self, retention: Retention) -> BoxFuture<'_, Result<Pruned>> {
        Box::pin(async move { self.preview_records(&retention) })
    }

    fn holdings(&self) -> BoxFuture<'_, Result<Holdings>> {
        Box::pin(async move { self.count_records() })
    }

    fn look_at_clock(&self) -> BoxFuture<'_, Result<Option<ClockDoubt>>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            let record = look_at_clock(&state, self.now());
            Ok(state.clock.insert(record).doubt.clone())
        })
    }

    fn trust_clock(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.open_state()?.clock = Some(ClockRecord::certain(self.now()));
            Ok(())
        })
    }
}

/// Checks the clock, and returns the new record of the check.
fn look_at_clock(state: &State, now: Timestamp) -> ClockRecord {
    let newest = state
        .records
        .after(0)
        .next_back()
        .map(|record| record.received_at);
    ClockRecord::look(state.clock.clone(), newest, now)
}

/// The expiry time of an event.
fn expiry(record: &Recorded) -> Option<Timestamp> {
    record.event.attributes().and_then(|a| a.expires_at)
}

/// Dead letters that are too old and whose event is neither waiting nor in flight.
fn old_dead(
    state: &State,
    retention: &Retention,
    now: Timestamp,
) -> (Pruned, Vec<(u64, GroupName)>) {
    let Some(age) = retention.dead_letters else {
        return (Pruned::default(), Vec::new());
    };
    let old = state.dead.died_before(now.minus(age));
    let old: Vec<_> = old.filter(|(p, group)| !state.has_row(*p, group)).collect();
    let pruned = Pruned {
        dead_letters: old.len() as u64,
        ..Pruned::default()
    };
    (pruned, old)
}

/// Events that have expired, are too old or exceed the length.
fn over_limits(state: &State, retention: &Retention, now: Timestamp) -> Vec<Arc<Recorded>> {
    let too_many = retention
        .max_len
        .map_or(0, |max| state.records.len().saturating_sub(max));
    let over = (0u64..)
        .zip(state.records.after(0))
        .filter(|(index, record)| {
            let age = retention.age_of(record.event.event_type());
            *index < too_many
                || age.is_some_and(|age| record.received_at.plus(age) < now)
                || expiry(record).is_some_and(|at| at < now)
        });
    over.map(|(_, record)| record.clone()).collect()
}

fn remove_unneeded(state: &mut State, record: &Recorded, now: Timestamp) -> bool {
    if state.is_needed(record) {
        return false;
    }
    state.remove(record.seq(), now);
    true
}
