//! Counts the pending events of a stream, and drops the oldest when the stream is full.

use std::collections::BTreeSet;
use std::sync::Arc;

use everbus_core::{BoxFuture, DROPPED, Depth, Pattern, Recorded, Result, Timestamp};

use crate::broker::Memory;
use crate::groups::{Group, RowState};
use crate::records::{Records, Seq as _};

impl Group {
    /// Whether the group will get an event that it has not reached: it is for the group and was not dropped.
    pub(crate) fn awaits(&self, record: &Recorded) -> bool {
        record.seq() > self.cursor
            && self.is_due(&record.event)
            && !self.dropped.contains(&record.seq())
    }

    /// The positions of the pending events of a stream, oldest first, and whether each is in flight.
    fn owed<'a>(
        &'a self,
        stream: &'a Pattern,
        records: &'a Records,
    ) -> impl Iterator<Item = (u64, bool)> + 'a {
        let rows = self.rows.values().filter_map(|row| {
            let in_flight = matches!(row.state, RowState::InFlight { .. });
            let matches = stream.matches(row.record.event.event_type());
            matches.then_some((row.record.seq(), in_flight))
        });
        let beyond = records.after(self.cursor).filter_map(|record| {
            let matches = stream.matches(record.event.event_type()) && self.awaits(record);
            matches.then_some((record.seq(), false))
        });
        rows.chain(beyond)
    }

    /// Skips the oldest pending events, except those in flight, until at most `keep` are pending. Returns the
    /// skipped ones.
    fn drop_oldest(
        &mut self,
        stream: &Pattern,
        records: &Records,
        keep: u64,
        now: Timestamp,
    ) -> Vec<u64> {
        let owed: Vec<(u64, bool)> = self.owed(stream, records).collect();
        let too_many = owed
            .len()
            .saturating_sub(usize::try_from(keep).unwrap_or(usize::MAX));
        let waiting = owed.iter().filter(|(_, in_flight)| !in_flight);
        let dropped: Vec<u64> = waiting
            .map(|(position, _)| *position)
            .take(too_many)
            .collect();
        for position in &dropped {
            if !self.end(*position, false, None, now) {
                self.dropped.insert(*position);
            }
        }
        // Dropped events that the cursor has passed need not be remembered.
        self.dropped = self.dropped.split_off(&(self.cursor + 1));
        if !dropped.is_empty() {
            let reason: Arc<str> = DROPPED.into();
            let reasons = dropped.iter().map(|position| (*position, reason.clone()));
            self.skipped.extend(reasons);
        }
        dropped
    }
}

impl Memory {
    pub(crate) fn depth_of(&self, stream: &Pattern, limit: u64) -> Result<u64> {
        let state = self.open_state()?;
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let depths = state
            .groups
            .values()
            .filter(|group| !group.ephemeral)
            .map(|group| group.owed(stream, &state.records).take(limit).count());
        Ok(depths.max().unwrap_or(0) as u64)
    }

    pub(crate) fn drop_from(&self, stream: &Pattern, keep: u64) -> Result<u64> {
        let mut guard = self.open_state()?;
        let state = &mut *guard;
        let now = self.now();
        let mut dropped = BTreeSet::new();
        for group in state.groups.values_mut() {
            group.end_leases(now);
            dropped.extend(group.drop_oldest(stream, &state.records, keep, now));
        }
        for position in &dropped {
            state.wake_waiters(*position);
        }
        drop(guard);
        self.work.notify_waiters();
        Ok(dropped.len() as u64)
    }
}

impl Depth for Memory {
    fn depth(&self, stream: Pattern, limit: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { self.depth_of(&stream, limit) })
    }

    fn drop_oldest(&self, stream: Pattern, keep: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { self.drop_from(&stream, keep) })
    }
}
