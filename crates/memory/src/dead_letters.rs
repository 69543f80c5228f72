//! The dead letters, newest first.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use everbus_core::dead_letters::{MAX_PAGE, check_replacement, id_taken, last_handler, not_open};
use everbus_core::{
    Appended, BoxFuture, Burial, DeadLetter, DeadLetterFilter, DeadLetterKey, DeadLetterPage,
    DeadLetterTally, DeadLetters, Death, EarlierDeath, Event, EventId, GroupName, Held,
    LETTER_PURGED, PageRequest, PurgeBasis, Purged, Recorded, Replaced, Result, Timestamp,
};

use crate::broker::Memory;
use crate::records::Seq as _;

type Key = (Reverse<u64>, GroupName);

/// All dead letters, open and retried, in the order they are listed.
#[derive(Debug, Default)]
pub(crate) struct DeadLetterTable {
    entries: BTreeMap<Key, DeadLetter>,
}

impl DeadLetterTable {
    /// Adds a dead letter, or opens an existing one again. Then the attempts are added up, and the time of the
    /// first death stays.
    pub(crate) fn bury(
        &mut self,
        group: GroupName,
        record: Arc<Recorded>,
        death: Death,
    ) -> &DeadLetter {
        let death = match self.get(record.seq(), &group) {
            Some(letter) => death.after(letter.attempts, letter.failures.clone()),
            None => death,
        };
        self.put(group, record, death)
    }

    /// Stores a dead letter of an event that another engine moves.
    pub(crate) fn report(&mut self, record: Arc<Recorded>, burial: &Burial) {
        let known = self.get(record.seq(), &burial.group);
        let earlier = known.map(|letter| EarlierDeath {
            attempts: letter.attempts,
            failures: letter.failures.clone(),
            died_at: letter.died_at,
            open: letter.is_open(),
        });
        self.put(burial.group.clone(), record, burial.with_earlier(earlier));
    }

    fn put(&mut self, group: GroupName, record: Arc<Recorded>, death: Death) -> &DeadLetter {
        let key = (Reverse(record.seq()), group.clone());
        let known = self.entries.remove(&key);
        let letter = DeadLetter {
            group,
            handler: last_handler(&death.failures).map(str::to_owned),
            attempts: death.attempts,
            failures: death.failures,
            first_seen_at: known.as_ref().map_or(death.died_at, |l| l.first_seen_at),
            died_at: death.died_at,
            retried_at: None,
            replaced_by: known.and_then(|letter| letter.replaced_by),
            record,
        };
        self.entries.entry(key).or_insert(letter)
    }

    pub(crate) fn get(&self, position: u64, group: &GroupName) -> Option<&DeadLetter> {
        self.entries.get(&(Reverse(position), group.clone()))
    }

    pub(crate) fn get_mut(&mut self, position: u64, group: &GroupName) -> Option<&mut DeadLetter> {
        self.entries.get_mut(&(Reverse(position), group.clone()))
    }

    pub(crate) fn is_open(&self, position: u64, group: &GroupName) -> bool {
        self.get(position, group).is_some_and(DeadLetter::is_open)
    }

    /// The number of open dead letters of a group by event type.
    pub(crate) fn open_by_type(&self, group: &GroupName) -> BTreeMap<Arc<str>, u64> {
        let entries = self.entries.values();
        let open = entries.filter(|letter| letter.is_open() && letter.group == *group);
        let mut counts = BTreeMap::new();
        for letter in open {
            let event_type = letter.event().type_arc().clone();
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

    /// The keys of dead letters, open and retried, whose last death was before a time.
    pub(crate) fn died_before(&self, time: Timestamp) -> impl Iterator<Item = (u64, GroupName)> {
        let old = self
            .entries
            .iter()
            .filter(move |(_, letter)| letter.died_at < time);
        old.map(|((position, group), _)| (position.0, group.clone()))
    }

    /// The number of dead letters, and the time of the oldest.
    pub(crate) fn held(&self) -> Held {
        Held {
            count: self.entries.len() as u64,
            oldest: self.entries.values().map(|letter| letter.died_at).min(),
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

    /// The open dead letters after a key that match a filter.
    fn open<'a>(
        &'a self,
        filter: &'a DeadLetterFilter,
        after: Option<Key>,
    ) -> impl Iterator<Item = &'a DeadLetter> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let entries = self.entries.range((after, Bound::Unbounded));
        let letters = entries.map(|(_, letter)| letter);
        letters.filter(|letter| letter.is_open() && filter.matches(letter))
    }
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

    /// Retries up to `limit` open dead letters that match a filter, oldest event first. Returns how many.
    fn retry_open(&self, filter: &DeadLetterFilter, limit: usize) -> Result<u64> {
        let mut guard = self.open_state()?;
        let state = &mut *guard;
        let now = self.now();
        let mut retried = 0;
        for letter in state.dead.entries.values_mut().rev() {
            if retried == limit {
                break;
            }
            if !letter.is_open() || !filter.matches(letter) {
                continue;
            }
            let number = state.names.get(&letter.group);
            let Some(group) = number.and_then(|number| state.groups.get_mut(number)) else {
                continue;
            };
            group.add_waiting(letter.record.clone(), now);
            letter.retried_at = Some(now);
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
        let letter = state.dead.get(key.position.place(), &key.group);
        let Some(letter) = letter.filter(|letter| letter.is_open()) else {
            return Err(not_open(key));
        };
        check_replacement(letter.event(), &corrected)?;
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
            // The patterns of the group do not match the event. It gets a row, or the group would skip it.
            group.add_waiting(record, now);
        }
        if let Some(letter) = state.dead.get_mut(key.position.place(), &key.group) {
            letter.retried_at = Some(now);
            letter.replaced_by = Some(id);
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
        let open = state.dead.open(filter, None);
        let old = open.filter(|letter| basis.time_of(letter) <= cutoff);
        let old: Vec<DeadLetter> = old.cloned().collect();
        for letter in old {
            let position = letter.record.seq();
            state.dead.remove(position, &letter.group);
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
            let of_event = entries.filter(|letter| letter.event().id() == id);
            Ok(of_event.cloned().collect())
        })
    }

    fn replaced(&self) -> BoxFuture<'_, Result<Vec<Replaced>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let letters = state.dead.entries.values().rev();
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
