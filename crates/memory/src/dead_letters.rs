//! The dead letters, newest first.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use everbus_core::dead_letters::{MAX_PAGE, check_replacement, id_taken, not_open};
use everbus_core::{
    Appended, BoxFuture, Burial, DeadLetter, DeadLetterFilter, DeadLetterKey, DeadLetterPage,
    DeadLetterTally, DeadLetters, EarlierDeath, Event, EventId, GroupName, Held, LETTER_PURGED,
    PageRequest, PurgeBasis, Purged, Recorded, Replaced, Result, Timestamp, all_failures,
};

use crate::broker::Memory;
use crate::group::Row;
use crate::records::Seq as _;

type Key = (Reverse<u64>, GroupName);

/// All dead letters, open and retried, in the order they are listed.
#[derive(Debug, Default)]
pub(crate) struct DeadLetterTable {
    entries: BTreeMap<Key, Entry>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) letter: DeadLetter,
    /// False after a retry, until the event fails again.
    pub(crate) open: bool,
}

impl DeadLetterTable {
    /// Adds a dead letter, or opens an existing one again: attempts add up, the first time stays.
    pub(crate) fn bury(&mut self, group: GroupName, row: Row, now: Timestamp) -> &DeadLetter {
        let key = (Reverse(row.record.seq()), group.clone());
        let entry = self.entries.entry(key).or_insert_with(|| Entry {
            letter: DeadLetter {
                group,
                handler: None,
                attempts: 0,
                failures: Vec::new(),
                first_seen_at: now,
                died_at: now,
                retried_at: None,
                replaced_by: None,
                record: row.record,
            },
            open: true,
        });
        entry.open = true;
        // The claim counted an attempt; if no handler ran, it was none.
        let was_none = row
            .failures
            .last()
            .is_some_and(|last| !last.kind.is_attempt());
        let attempts = row.attempts.saturating_sub(u32::from(was_none));
        entry.letter.attempts = entry.letter.attempts.saturating_add(attempts);
        let before = std::mem::take(&mut entry.letter.failures);
        entry.letter.failures = all_failures(before, row.failures);
        let mut failures = entry.letter.failures.iter().rev();
        entry.letter.handler = failures.find_map(|f| f.handler.clone());
        entry.letter.died_at = now;
        &entry.letter
    }

    /// Stores a dead letter that the runtime reports.
    pub(crate) fn put(&mut self, record: Arc<Recorded>, burial: &Burial) {
        let key = (Reverse(record.seq()), burial.group.clone());
        let earlier = self.entries.get(&key).map(|entry| EarlierDeath {
            attempts: entry.letter.attempts,
            failures: entry.letter.failures.clone(),
            died_at: entry.letter.died_at,
            open: entry.open,
        });
        let (attempts, failures) = burial.with_earlier(earlier);
        let first = self.entries.get(&key).map(|g| g.letter.first_seen_at);
        let letter = DeadLetter {
            group: burial.group.clone(),
            handler: failures.iter().rev().find_map(|f| f.handler.clone()),
            attempts,
            failures,
            first_seen_at: first.unwrap_or(burial.died_at),
            died_at: burial.died_at,
            retried_at: None,
            replaced_by: self.entries.get(&key).and_then(|g| g.letter.replaced_by),
            record,
        };
        self.entries.insert(key, Entry { letter, open: true });
    }

    pub(crate) fn get(&self, position: u64, group: &GroupName) -> Option<&Entry> {
        self.entries.get(&(Reverse(position), group.clone()))
    }

    pub(crate) fn get_mut(&mut self, position: u64, group: &GroupName) -> Option<&mut Entry> {
        self.entries.get_mut(&(Reverse(position), group.clone()))
    }

    pub(crate) fn is_open(&self, position: u64, group: &GroupName) -> bool {
        self.get(position, group).is_some_and(|entry| entry.open)
    }

    /// The number of open dead letters of a group by event type.
    pub(crate) fn open_by_type(&self, group: &GroupName) -> BTreeMap<Arc<str>, u64> {
        let entries = self.entries.values();
        let open = entries.filter(|g| g.open && g.letter.group == *group);
        let mut counts = BTreeMap::new();
        for entry in open {
            let event_type = entry.letter.event().type_arc().clone();
            *counts.entry(event_type).or_default() += 1;
        }
        counts
    }

    pub(crate) fn remove_group(&mut self, group: &GroupName) {
        self.entries.retain(|(_, name), _| name != group);
    }

    pub(crate) fn remove(&mut self, position: u64, group: &GroupName) {
        self.entries.remove(&(Reverse(position), group.clone()));
    }

    /// Dead letters from before a time, open and retried.
    pub(crate) fn died_before(&self, time: Timestamp) -> impl Iterator<Item = (u64, GroupName)> {
        let old = self
            .entries
            .iter()
            .filter(move |(_, g)| g.letter.died_at < time);
        old.map(|((position, group), _)| (position.0, group.clone()))
    }

    /// The number of dead letters, and the time of the first.
    pub(crate) fn held(&self) -> Held {
        Held {
            count: self.entries.len() as u64,
            oldest: self.entries.values().map(|g| g.letter.died_at).min(),
        }
    }

    /// Removes the dead letters of an event that is removed from the log.
    pub(crate) fn forget(&mut self, position: u64) {
        let first = (Reverse(position), GroupName::unnamed());
        let of_event = self.entries.range(first..).map(|(key, _)| key.clone());
        let of_event: Vec<Key> = of_event.take_while(|key| key.0.0 == position).collect();
        for key in of_event {
            self.entries.remove(&key);
        }
    }

    /// Open dead letters that pass a filter, after a key.
    fn open<'a>(
        &'a self,
        filter: &'a DeadLetterFilter,
        after: Option<Key>,
    ) -> impl Iterator<Item = &'a DeadLetter> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let entries = self.entries.range((after, Bound::Unbounded));
        let open = entries
            .filter(|(_, entry)| entry.open)
            .map(|(_, entry)| &entry.letter);
        open.filter(|letter| passes(letter, filter))
    }
}

fn passes(letter: &DeadLetter, filter: &DeadLetterFilter) -> bool {
    let DeadLetterFilter {
        pattern,
        group,
        id,
        since,
        until,
        died_until,
        tenant,
        handler,
        error,
    } = filter;
    let record = &letter.record;
    pattern
        .as_ref()
        .is_none_or(|p| p.matches(record.event.event_type()))
        && group.as_ref().is_none_or(|g| *g == letter.group)
        && id.is_none_or(|id| id == record.event.id())
        && since.is_none_or(|since| record.received_at >= since)
        && until.is_none_or(|until| record.received_at <= until)
        && died_until.is_none_or(|until| letter.died_at <= until)
        && tenant
            .as_ref()
            .is_none_or(|tenant| tenant == record.event.tenant().unwrap_or_default())
        && (handler.is_none() || *handler == letter.handler)
        && error
            .as_ref()
            .is_none_or(|text| letter.last_error().contains(text))
}

impl Memory {
    fn page(&self, filter: &DeadLetterFilter, page: PageRequest) -> Result<DeadLetterPage> {
        page.validate()?;
        let state = self.open_state()?;
        let after = page
            .after
            .map(|key| (Reverse(key.position.place()), key.group));
        let mut open = state.dead.open(filter, after).skip(page.offset);
        let items: Vec<DeadLetter> = open.by_ref().take(page.limit).cloned().collect();
        let more = open.next().is_some();
        let next = items.last().filter(|_| more).map(DeadLetter::key);
        Ok(DeadLetterPage { items, next })
    }

    /// Retries open dead letters, oldest first.
    fn retry_open(&self, filter: &DeadLetterFilter, limit: usize) -> Result<u64> {
        let mut guard = self.open_state()?;
        let state = &mut *guard;
        let now = self.now();
        let mut retried = 0;
        for entry in state.dead.entries.values_mut().rev() {
            if retried == limit {
                break;
            }
            if !entry.open || !passes(&entry.letter, filter) {
                continue;
            }
            let number = state.names.get(&entry.letter.group);
            let Some(group) = number.and_then(|number| state.groups.get_mut(number)) else {
                continue;
            };
            group.add_waiting(entry.letter.record.clone(), now);
            entry.open = false;
            entry.letter.retried_at = Some(now);
            retried += 1;
        }
        drop(guard);
        self.work.notify_waiters();
        Ok(retried as u64)
    }

    fn replace_open(&self, key: &DeadLetterKey, corrected: Event) -> Result<Appended> {
        let mut guard = self.open_state()?;
        let state = &mut *guard;
        let now = self.now();
        let entry = state.dead.get(key.position.place(), &key.group);
        let Some(entry) = entry.filter(|entry| entry.open) else {
            return Err(not_open(key));
        };
        check_replacement(&entry.letter.record.event, &corrected)?;
        let corrected = corrected.addressed_to(&key.group);
        let (id, event_type) = (corrected.id(), corrected.type_arc().clone());
        if state.records.find(id, corrected.tenant()).is_some() {
            return Err(id_taken(&corrected));
        }
        let appended = state.append(vec![corrected], now)?;
        let (Some(appended), Some(record)) = (
            appended.into_iter().next(),
            state.records.get(state.records.head()).cloned(),
        ) else {
            return Err(not_open(key));
        };
        let number = state.names.get(&key.group);
        if let Some(group) = number.and_then(|number| state.groups.get_mut(number))
            && !group.wants(&event_type)
        {
            // The group's patterns no longer match it, so it would skip the event.
            group.add_waiting(record, now);
        }
        if let Some(entry) = state.dead.get_mut(key.position.place(), &key.group) {
            entry.open = false;
            entry.letter.retried_at = Some(now);
            entry.letter.replaced_by = Some(id);
        }
        state.wake_waiters(key.position.place());
        drop(guard);
        self.work.notify_waiters();
        Ok(appended)
    }

    fn tally_open(&self, filter: &DeadLetterFilter, limit: usize) -> Result<Vec<DeadLetterTally>> {
        let state = self.open_state()?;
        let mut counts: BTreeMap<(GroupName, &str, &str), u64> = BTreeMap::new();
        for letter in state.dead.open(filter, None) {
            let error = DeadLetterTally::beginning(letter.last_error());
            let key = (letter.group.clone(), letter.event().event_type(), error);
            *counts.entry(key).or_default() += 1;
        }
        let tallies = counts
            .into_iter()
            .map(|((group, event_type, error), count)| DeadLetterTally {
                group,
                event_type: event_type.to_owned(),
                error: error.to_owned(),
                count,
            });
        let mut tallies: Vec<DeadLetterTally> = tallies.collect();
        // A stable sort: equal counts stay in the order of their names.
        tallies.sort_by_key(|tally| Reverse(tally.count));
        tallies.truncate(limit.min(MAX_PAGE));
        Ok(tallies)
    }

    fn purge_open(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: &DeadLetterFilter,
    ) -> Result<Purged> {
        let mut state = self.open_state()?;
        let mut purged = Purged::default();
        let old = state.dead.open(filter, None).filter(|letter| {
            let time = match basis {
                PurgeBasis::Created => letter.record.received_at,
                PurgeBasis::Died => letter.died_at,
            };
            time <= cutoff
        });
        let old: Vec<DeadLetter> = old.cloned().collect();
        for letter in old {
            let position = letter.record.seq();
            state
                .dead
                .entries
                .remove(&(Reverse(position), letter.group.clone()));
            let with_event = !state.is_needed(&letter.record);
            if with_event {
                state.remove(position, self.now());
            } else {
                state.skip(position, &letter.group, LETTER_PURGED);
            }
            state.wake_waiters(position);
            purged.add(letter.event().id(), letter.group, with_event);
        }
        Ok(purged)
    }
}

impl DeadLetters for Memory {
    fn list(
        &self,
        filter: DeadLetterFilter,
        page: PageRequest,
    ) -> BoxFuture<'_, Result<DeadLetterPage>> {
        Box::pin(async move { self.page(&filter, page) })
    }

    fn count(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let count = state.dead.open(&filter, None).count();
            Ok(count as u64)
        })
    }

    fn get(&self, id: EventId) -> BoxFuture<'_, Result<Vec<DeadLetter>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let entries = state.dead.entries.values();
            let of_event = entries.filter(|entry| entry.letter.event().id() == id);
            Ok(of_event.map(|entry| entry.letter.clone()).collect())
        })
    }

    fn replaced(&self) -> BoxFuture<'_, Result<Vec<Replaced>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let letters = state.dead.entries.values().rev().map(|entry| &entry.letter);
            let replaced = letters.filter_map(|letter| {
                let (key, by) = (letter.key(), letter.replaced_by?);
                Some(Replaced { key, by })
            });
            Ok(replaced.collect())
        })
    }

    fn tally(
        &self,
        filter: DeadLetterFilter,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<DeadLetterTally>>> {
        Box::pin(async move { self.tally_open(&filter, limit) })
    }

    fn retry(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { self.retry_open(&filter, usize::MAX) })
    }

    fn retry_some(&self, filter: DeadLetterFilter, limit: usize) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { self.retry_open(&filter, limit) })
    }

    fn replace(&self, key: DeadLetterKey, corrected: Event) -> BoxFuture<'_, Result<Appended>> {
        Box::pin(async move { self.replace_open(&key, corrected) })
    }

    fn purge(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: DeadLetterFilter,
    ) -> BoxFuture<'_, Result<Purged>> {
        Box::pin(async move { self.purge_open(cutoff, basis, &filter) })
    }
}
