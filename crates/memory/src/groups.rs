//! A consumer group: its cursor, and its delivered events that are not settled.
//!
//! Every event up to the cursor is done, has a row (in flight or waiting), or is an open dead letter. The rows
//! are indexed by what they wait for, so that a fetch checks only rows that it can get.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use everbus_core::{
    ConsumeOptions, Event, Failure, FailureKind, GroupName, Lease, Progress, Recorded,
    SubscriptionInfo, Timestamp, UNSUBSCRIBED,
};

use crate::consumer::Member;
use crate::outcomes::Outcome;
use crate::records::{LeaseParts as _, Records, Seq as _};

#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) name: GroupName,
    pub(crate) ordered: bool,
    /// Whether the group is ephemeral: it has no dead letters, and retention does not keep events that it has
    /// not reached.
    pub(crate) ephemeral: bool,
    /// The head of the log when the group was declared. [`Settled`](everbus_core::Settled) counts the group only
    /// for later events.
    pub(crate) declared_at: u64,
    pub(crate) subscriptions: Vec<SubscriptionInfo>,
    /// The cursor of the group: every event up to here was delivered, has a waiting row, or was skipped.
    pub(crate) cursor: u64,
    /// Which events are settled or skipped. A retried dead letter is one of them, and has a row again.
    pub(crate) done: Progress,
    pub(crate) rows: BTreeMap<u64, Row>,
    pub(crate) active_at: Timestamp,
    /// The reasons of skipped events that are still in the log.
    pub(crate) skipped: BTreeMap<u64, Arc<str>>,
    /// Attempts and failures of events that failed before the group finished them.
    pub(crate) outcomes: BTreeMap<u64, Outcome>,
    /// Events beyond the cursor that were dropped; the group skips them.
    pub(crate) dropped: BTreeSet<u64>,
    pub(crate) consumers: HashMap<u64, Member>,
    /// Waiting rows that may be delivered now.
    ready: BTreeSet<u64>,
    /// Waiting rows without a handler in any consumer, by when this was first seen.
    unhandled: BTreeSet<(Timestamp, u64)>,
    /// Waiting rows that are not due yet.
    due: BTreeSet<(Timestamp, u64)>,
    /// Leases by their end.
    leases: BTreeSet<(Timestamp, u64)>,
    /// In an ordered group: the rows of each key.
    keys: HashMap<Arc<str>, BTreeSet<u64>>,
}

/// An event that was delivered or waits, and is not settled.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) record: Arc<Recorded>,
    /// How many attempts have begun.
    pub(crate) attempts: u32,
    pub(crate) failures: Vec<Failure>,
    pub(crate) state: RowState,
    key: Option<Arc<str>>,
    /// Whether the event was retried from the dead letters, or is replayed.
    pub(crate) retried: bool,
    /// When the group first found that no consumer has a handler for the event.
    unhandled_since: Option<Timestamp>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowState {
    InFlight {
        token: u64,
        consumer: u64,
        until: Timestamp,
    },
    Waiting {
        due: Timestamp,
    },
}

/// The result of a claim.
pub(crate) struct Claim {
    /// The positions of the delivered rows. The rows have the leases.
    pub(crate) taken: Vec<u64>,
    /// Rows that had no handler for too long. They are already removed from the group.
    pub(crate) orphans: Vec<Row>,
    /// When to check again, unless a wake-up comes earlier.
    pub(crate) next: Option<Timestamp>,
}

impl Group {
    pub(crate) fn new(
        name: GroupName,
        ordered: bool,
        cursor: u64,
        head: u64,
        now: Timestamp,
    ) -> Self {
        Self {
            name,
            ordered,
            ephemeral: false,
            declared_at: head,
            subscriptions: Vec::new(),
            cursor,
            done: Progress::new(cursor),
            rows: BTreeMap::new(),
            active_at: now,
            skipped: BTreeMap::new(),
            outcomes: BTreeMap::new(),
            dropped: BTreeSet::new(),
            consumers: HashMap::new(),
            ready: BTreeSet::new(),
            unhandled: BTreeSet::new(),
            due: BTreeSet::new(),
            leases: BTreeSet::new(),
            keys: HashMap::new(),
        }
    }

    /// Whether a subscription matches this type.
    pub(crate) fn wants(&self, event_type: &str) -> bool {
        self.subscriptions
            .iter()
            .any(|s| s.pattern.matches(event_type))
    }

    /// Whether the group gets the event: a subscription matches it, and it is not addressed to another group.
    pub(crate) fn is_due(&self, event: &Event) -> bool {
        event.is_for(&self.name) && self.wants(event.event_type())
    }

    /// Makes every row without a handler ready again, because a consumer may have a handler for it now.
    pub(crate) fn handlers_changed(&mut self) {
        let again = std::mem::take(&mut self.unhandled);
        self.ready
            .extend(again.into_iter().map(|(_, position)| position));
    }

    /// Delivers up to `max` events to a consumer, first waiting rows, then new events. Also ends expired leases,
    /// and removes rows that had no handler for too long.
    pub(crate) fn claim(
        &mut self,
        consumer: u64,
        options: &ConsumeOptions,
        max: usize,
        records: &Records,
        now: Timestamp,
        next_token: &mut u64,
    ) -> Claim {
        self.end_leases(now);
        self.wake_due(now);
        let free = self
            .consumers
            .get_mut(&consumer)
            .map_or(0, |c| c.free(options.prefetch));
        let max = max.min(free);
        let until = now.plus(options.lease);
        let mut taken = Vec::new();
        // Rows that only other consumers have a handler for stay ready.
        let mut from = 0;
        while taken.len() < max {
            let Some(&position) = self.ready.range(from..).next() else {
                break;
            };
            from = position + 1;
            let event_type = self.rows[&position].record.event.type_arc().clone();
            if self.handles(consumer, &event_type) {
                self.hand_out(position, consumer, until, next_token);
                taken.push(position);
            } else if !self.is_handled(&event_type) {
                self.set_aside(position, now);
            }
        }
        if taken.len() < max {
            for record in records.after(self.cursor) {
                if taken.len() == max {
                    break;
                }
                self.pass(record, consumer, until, next_token, now, &mut taken);
            }
            if taken.len() < max {
                // Nothing is left up to the end of the log; the last events of the log may have been removed.
                self.advance_to(records.head());
                self.dropped.clear();
            }
        }
        let orphans = self.take_orphans(options, now);
        if !taken.is_empty() {
            self.active_at = now;
        }
        let due = self.due.first().map(|(at, _)| *at);
        let lease = self.leases.first().map(|(at, _)| *at);
        let orphan = self.unhandled.first();
        let orphan = orphan.map(|(since, _)| since.plus(options.no_handler_after));
        let next = [due, lease, orphan].into_iter().flatten().min();
        Claim {
            taken,
            orphans,
            next,
        }
    }

    /// Moves the cursor past one new event. The event is skipped, delivered to this consumer, made ready for
    /// another one, set aside if no consumer has a handler, or waits behind another event of its key.
    fn pass(
        &mut self,
        record: &Arc<Recorded>,
        consumer: u64,
        until: Timestamp,
        next_token: &mut u64,
        now: Timestamp,
        taken: &mut Vec<u64>,
    ) {
        let position = record.seq();
        if self.dropped.remove(&position) || !self.is_due(&record.event) {
            self.advance_to(position);
            return;
        }
        self.advance_to(position - 1);
        self.cursor = position;
        if !self.insert_row(record.clone(), now) {
            return;
        }
        let event_type = record.event.event_type();
        if self.handles(consumer, event_type) {
            self.hand_out(position, consumer, until, next_token);
            taken.push(position);
        } else if self.is_handled(event_type) {
            self.ready.insert(position);
        } else {
            self.set_aside(position, now);
        }
    }

    /// Moves a row that no consumer has a handler for to `unhandled`.
    fn set_aside(&mut self, position: u64, now: Timestamp) {
        self.ready.remove(&position);
        if let Some(row) = self.rows.get_mut(&position) {
            let since = *row.unhandled_since.get_or_insert(now);
            self.unhandled.insert((since, position));
        }
    }

    /// Whether a row waits because no consumer has a handler for it.
    pub(crate) fn is_unhandled(&self, row: &Row) -> bool {
        let since = row.unhandled_since;
        since.is_some_and(|since| self.unhandled.contains(&(since, row.record.seq())))
    }

    /// Skips events that wait without a handler and match no subscription any more: in an ordered group
    /// they would block every later event of their key.
    pub(crate) fn skip_unwanted(&mut self, now: Timestamp) {
        let waiting: Vec<u64> = self.unhandled.iter().map(|(_, at)| *at).collect();
        for position in waiting {
            let row = self.rows.get(&position);
            if row.is_some_and(|row| !self.wants(row.record.event.event_type())) {
                self.end(position, false, None, now);
                self.skipped.insert(position, UNSUBSCRIBED.into());
            }
        }
    }

    /// Removes a row from `ready` and `unhandled`.
    fn withdraw(&mut self, position: u64) {
        self.ready.remove(&position);
        let since = self.rows.get(&position).and_then(|row| row.unhandled_since);
        if let Some(since) = since {
            self.unhandled.remove(&(since, position));
        }
    }

    /// Moves the cursor up to a position, and marks everything that it passes as done.
    pub(crate) fn advance_to(&mut self, position: u64) {
        if position > self.cursor {
            self.done.complete_range(self.cursor + 1, position);
            self.cursor = position;
        }
    }

    fn handles(&self, consumer: u64, event_type: &str) -> bool {
        let consumer = self.consumers.get(&consumer);
        consumer.is_some_and(|c| c.handles(event_type))
    }

    fn is_handled(&self, event_type: &str) -> bool {
        let mut consumers = self.consumers.values();
        consumers.any(|c| c.handles(event_type))
    }

    /// Records why the group skipped an event without a row. An event beyond the cursor is skipped when the
    /// cursor passes it.
    pub(crate) fn skip(&mut self, position: u64, reason: &str) {
        if position > self.cursor {
            self.dropped.insert(position);
        }
        self.skipped.insert(position, reason.into());
    }

    /// Adds a row for a retried dead letter or a replayed event. It is due now and has no attempts.
    pub(crate) fn add_waiting(&mut self, record: Arc<Recorded>, now: Timestamp) {
        let position = record.seq();
        self.skipped.remove(&position);
        if self.insert_row(record, now) {
            self.ready.insert(position);
        }
        if let Some(row) = self.rows.get_mut(&position) {
            row.retried = true;
        }
    }

    /// Adds a row that is due now. Returns whether it may be delivered: in an ordered group, no earlier event of
    /// its key is unsettled and no event of its key is in flight.
    fn insert_row(&mut self, record: Arc<Recorded>, now: Timestamp) -> bool {
        let position = record.seq();
        let mut key = None;
        if self.ordered
            && let Some(name) = record.event.ordering_key()
        {
            let name: Arc<str> = name.as_ref().into();
            let rows = self.keys.entry(name.clone()).or_default();
            let later = rows.range(position..).next().copied();
            rows.insert(position);
            // The new row may be a retried dead letter, which comes before the row that was the first of its key.
            if let Some(later) = later {
                self.withdraw(later);
            }
            key = Some(name);
        }
        let free = key.as_ref().is_none_or(|key| self.may_go(key, position));
        let row = Row {
            record,
            attempts: 0,
            failures: Vec::new(),
            state: RowState::Waiting { due: now },
            key,
            retried: false,
            unhandled_since: None,
        };
        self.rows.insert(position, row);
        free
    }

    fn hand_out(&mut self, position: u64, consumer: u64, until: Timestamp, next_token: &mut u64) {
        self.withdraw(position);
        if let Some(row) = self.rows.get_mut(&position) {
            row.unhandled_since = None;
            *next_token += 1;
            row.attempts += 1;
            row.state = RowState::InFlight {
                token: *next_token,
                consumer,
                until,
            };
            self.leases.insert((until, position));
        }
        if let Some(consumer) = self.consumers.get_mut(&consumer) {
            consumer.took();
        }
    }

    /// The row of a lease, if the lease is still held.
    pub(crate) fn held(&self, lease: &Lease) -> Option<&Row> {
        let row = self.rows.get(&lease.seq())?;
        match row.state {
            RowState::InFlight { token, .. } if token == lease.token() => Some(row),
            _ => None,
        }
    }

    /// Extends a held lease.
    pub(crate) fn extend(&mut self, position: u64, to: Timestamp) {
        if let Some(Row {
            state: RowState::InFlight { until, .. },
            ..
        }) = self.rows.get_mut(&position)
        {
            self.leases.remove(&(*until, position));
            *until = to;
            self.leases.insert((to, position));
        }
    }

    /// Removes a row and marks its event as done.
    pub(crate) fn finish(&mut self, position: u64) -> Option<Row> {
        self.leave_flight(position);
        self.withdraw(position);
        let row = self.rows.remove(&position)?;
        if let RowState::Waiting { due } = row.state {
            self.due.remove(&(due, position));
        }
        // A corrected event that the group's patterns do not match gets a row at once. It may be settled before
        // the cursor reaches it.
        if position <= self.cursor {
            self.done.complete(position);
        }
        if let Some(key) = &row.key {
            if let Some(rows) = self.keys.get_mut(key) {
                rows.remove(&position);
            }
            self.wake_key(key);
        }
        Some(row)
    }

    /// Lets the first row of a key be delivered as soon as it is due, if it waits.
    fn wake_key(&mut self, key: &Arc<str>) {
        let Some(&first) = self.keys.get(key).and_then(BTreeSet::first) else {
            self.keys.remove(key);
            return;
        };
        let state = self.rows.get(&first).map(|row| row.state);
        if let Some(RowState::Waiting { due }) = state {
            self.due.insert((due, first));
        }
    }

    /// Puts a row that was in flight back to waiting. `undo_attempt` takes back the count of its last attempt.
    pub(crate) fn put_back(&mut self, position: u64, due: Timestamp, undo_attempt: bool) {
        self.leave_flight(position);
        if let Some(row) = self.rows.get_mut(&position) {
            row.attempts -= u32::from(undo_attempt);
            row.state = RowState::Waiting { due };
            self.due.insert((due, position));
            if let Some(key) = row.key.clone() {
                self.wake_key(&key);
            }
        }
    }

    fn leave_flight(&mut self, position: u64) {
        let state = self.rows.get(&position).map(|row| row.state);
        if let Some(RowState::InFlight {
            consumer, until, ..
        }) = state
        {
            self.leases.remove(&(until, position));
            if let Some(consumer) = self.consumers.get_mut(&consumer) {
                consumer.gave();
            }
        }
    }

    /// Puts rows whose lease has ended back to waiting. The attempt stays counted, with a failure of kind crash.
    pub(crate) fn end_leases(&mut self, now: Timestamp) {
        let mut ended = Vec::new();
        while let Some(&(until, position)) = self.leases.first()
            && until <= now
        {
            ended.push(position);
            self.leases.pop_first();
        }
        for position in ended {
            if let Some(row) = self.rows.get_mut(&position) {
                // Not `alone`: an expired lease proves nothing against the event, because no process died.
                let text = "the lease ended before the event was settled";
                let failure = Failure::new(row.attempts, now, FailureKind::Crash, text);
                row.failures.push(failure);
            }
            self.put_back(position, now, false);
        }
    }

    /// Makes due rows ready. A row that waits behind another row of its key is left out; it becomes ready when
    /// that row is settled.
    fn wake_due(&mut self, now: Timestamp) {
        while let Some(&(due, position)) = self.due.first()
            && due <= now
        {
            self.due.pop_first();
            let Some(row) = self.rows.get(&position) else {
                continue;
            };
            let free = row
                .key
                .as_ref()
                .is_none_or(|key| self.may_go(key, position));
            if free {
                self.ready.insert(position);
            }
        }
    }

    /// Whether a row may be delivered: it is the first of its key, and no row of the key is in flight.
    fn may_go(&self, key: &Arc<str>, position: u64) -> bool {
        let Some(rows) = self.keys.get(key) else {
            return true;
        };
        rows.first() == Some(&position)
            && rows.iter().all(|other| {
                let row = self.rows.get(other);
                row.is_none_or(|row| matches!(row.state, RowState::Waiting { .. }))
            })
    }

    fn take_orphans(&mut self, options: &ConsumeOptions, now: Timestamp) -> Vec<Row> {
        let mut orphans = Vec::new();
        while let Some(&(since, position)) = self.unhandled.first()
            && since.plus(options.no_handler_after) <= now
        {
            if let Some(mut row) = self.finish(position) {
                let text = format!(
                    "no process had a handler for {} for {:?}",
                    row.record.event.event_type(),
                    options.no_handler_after
                );
                let failure = Failure::new(row.attempts, now, FailureKind::NoHandler, text);
                row.failures.push(failure);
                orphans.push(row);
            }
        }
        orphans
    }

    /// Looks for a contradiction in the state of the group, for the consistency check.
    pub(crate) fn contradiction(&self, open_dead: impl Fn(u64) -> bool) -> Option<String> {
        for (first, last) in self.done.unfinished(self.cursor) {
            for position in first..=last {
                if !self.rows.contains_key(&position) {
                    return Some(format!("event {position} is unfinished and has no row"));
                }
            }
        }
        let wanted = |row: &&Row| self.wants(row.record.event.event_type());
        let last = self.rows.values().rev().find(wanted);
        let highest = self
            .done
            .highest()
            .max(last.map_or(0, |row| row.record.seq()));
        if highest > self.cursor {
            return Some(format!(
                "event {highest} is beyond position {}",
                self.cursor
            ));
        }
        let both = self.rows.keys().find(|position| open_dead(**position));
        both.map(|position| format!("event {position} is owed and a dead letter"))
    }
}
