//! The log: events by position, and the ids in use.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use everbus_core::{Appended, EventId, Lease, Pattern, Recorded, StartFrom, Timestamp};

/// All stored events. Positions begin at 1 and are never used again.
#[derive(Debug)]
pub(crate) struct Records {
    /// The position of the first slot.
    first: u64,
    /// `None` where an event was removed. The first slot is never `None`.
    slots: VecDeque<Option<Arc<Recorded>>>,
    kept: u64,
    last_received: Timestamp,
    /// The ids with their positions. The tenant of an id is read from the event.
    ids: BTreeSet<(EventId, u64)>,
}

impl Records {
    pub(crate) fn new() -> Self {
        Self {
            first: 1,
            slots: VecDeque::new(),
            kept: 0,
            last_received: Timestamp::from_micros(i64::MIN),
            ids: BTreeSet::new(),
        }
    }

    /// The position of the newest event ever appended.
    pub(crate) fn head(&self) -> u64 {
        self.first + self.slots.len() as u64 - 1
    }

    /// The number of stored events.
    pub(crate) fn len(&self) -> u64 {
        self.kept
    }

    /// A receive time that is not before the receive time of the last event.
    pub(crate) fn receipt_time(&self, now: Timestamp) -> Timestamp {
        now.max(self.last_received)
    }

    pub(crate) fn get(&self, position: u64) -> Option<&Arc<Recorded>> {
        let slot = usize::try_from(position.checked_sub(self.first)?).ok()?;
        self.slots.get(slot)?.as_ref()
    }

    /// The events after a position, in order.
    pub(crate) fn after(&self, position: u64) -> impl DoubleEndedIterator<Item = &Arc<Recorded>> {
        let skip = (position + 1).saturating_sub(self.first);
        let skip = usize::try_from(skip).map_or(self.slots.len(), |n| n.min(self.slots.len()));
        self.slots.range(skip..).flatten()
    }

    /// The events with this id, one per tenant.
    pub(crate) fn with_id(&self, id: EventId) -> impl Iterator<Item = &Arc<Recorded>> {
        let positions = self.ids.range((id, 0)..=(id, u64::MAX));
        positions.filter_map(|(_, position)| self.get(*position))
    }

    /// The event with this id in this tenant.
    pub(crate) fn find(&self, id: EventId, tenant: Option<&str>) -> Option<&Arc<Recorded>> {
        self.with_id(id).find(|r| r.event.tenant() == tenant)
    }

    pub(crate) fn push(&mut self, record: Arc<Recorded>) {
        debug_assert_eq!(record.seq(), self.head() + 1);
        self.ids.insert((record.event.id(), record.seq()));
        self.last_received = record.received_at;
        self.slots.push_back(Some(record));
        self.kept += 1;
    }

    /// Removes everything that was pushed after this head.
    pub(crate) fn truncate(&mut self, head: u64) {
        while self.head() > head {
            if let Some(Some(record)) = self.slots.pop_back() {
                self.ids.remove(&(record.event.id(), record.seq()));
                self.kept -= 1;
            }
        }
    }

    pub(crate) fn remove(&mut self, position: u64) {
        let Some(slot) = position.checked_sub(self.first) else {
            return;
        };
        let slot = usize::try_from(slot).unwrap_or(usize::MAX);
        let Some(record) = self.slots.get_mut(slot).and_then(Option::take) else {
            return;
        };
        self.ids.remove(&(record.event.id(), position));
        self.kept -= 1;
        while let Some(None) = self.slots.front() {
            self.slots.pop_front();
            self.first += 1;
        }
    }

    /// Returns the position for `from`: reading after it yields the first matching event.
    pub(crate) fn resolve(&self, from: StartFrom, patterns: &[Pattern]) -> u64 {
        match from {
            StartFrom::New => self.head(),
            StartFrom::First => 0,
            StartFrom::Last => {
                let mut newest = self.after(0).rev();
                newest
                    .find(|r| any_matches(patterns, r.event.event_type()))
                    .map_or(self.head(), |r| r.seq() - 1)
            }
            StartFrom::Time(time) => {
                // Receive times never decrease, but removed slots have none: search from the end.
                let later = self.after(0).rev().take_while(|r| r.received_at >= time);
                later.last().map_or(self.head(), |r| r.seq() - 1)
            }
        }
    }
}

/// The sequence number of an event: the engine has a single log.
pub(crate) trait Seq {
    fn seq(&self) -> u64;
}

impl Seq for Recorded {
    fn seq(&self) -> u64 {
        self.position.place()
    }
}

impl Seq for Appended {
    fn seq(&self) -> u64 {
        self.position.place()
    }
}

impl Seq for Lease {
    fn seq(&self) -> u64 {
        self.position().place()
    }
}

/// The content of a lease of this engine.
pub(crate) trait LeaseParts {
    /// The number of the group.
    fn slot(&self) -> u64;
    /// The fencing token: changes with each delivery.
    fn token(&self) -> u64;
}

impl LeaseParts for Lease {
    fn slot(&self) -> u64 {
        self.words()[0]
    }

    fn token(&self) -> u64 {
        self.words()[1]
    }
}

pub(crate) fn any_matches(patterns: &[Pattern], event_type: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(event_type))
}
