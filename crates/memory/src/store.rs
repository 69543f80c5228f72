//! The engine as a store beside a broker: what the runtime reports about events that another engine moves.

use std::collections::BTreeMap;
use std::sync::Arc;

use everbus_core::{
    BoxFuture, Burial, EARLY_STAGES, EventId, EventKey, Failure, GroupName, KeptFailures, Position,
    Recorded, Result, SentBack, Store, StoredStage, Timestamp,
};

use crate::broker::Memory;
use crate::groups::Group;
use crate::records::Seq as _;
use crate::state::State;

/// The failed attempts by the number of the group and the position of the event.
pub(crate) type Failed = BTreeMap<(u64, u64), KeptFailures>;
/// Payload stages of events that are not ingested yet.
pub(crate) type Early = Vec<(EventKey, StoredStage)>;

impl State {
    /// Appends an event with the time at which its broker received it; an existing event is not changed.
    /// Returns its position.
    fn ingest(&mut self, record: &Recorded, now: Timestamp) -> u64 {
        let event = &record.event;
        if let Some(known) = self.records.find(event.id(), event.tenant()) {
            return known.seq();
        }
        let seq = self.records.head() + 1;
        let received_at = self.records.receipt_time(record.received_at.min(now));
        self.orphans.born(event);
        let key = EventKey::of(event);
        let here = Recorded::new(event.clone(), Position::seq(seq), received_at);
        self.records.push(Arc::new(here));
        let stages: Early = self.early.extract_if(.., |(to, _)| *to == key).collect();
        for (_, stage) in stages {
            self.stages.add(seq, stage);
        }
        seq
    }

    /// Returns the number of a group and the position of an event. Ingests the event if it is new, and creates
    /// the group if it is new. The cursor of a group without subscriptions moves to the end of the log.
    fn told_of(&mut self, name: &GroupName, record: &Recorded, now: Timestamp) -> (u64, u64) {
        let seq = self.ingest(record, now);
        let head = self.records.head();
        let number = match self.names.get(name) {
            Some(number) => *number,
            None => {
                let number = self.number();
                let group = Group::new(name.clone(), false, head, head, now);
                self.groups.insert(number, group);
                self.names.insert(name.clone(), number);
                number
            }
        };
        if let Some(group) = self.groups.get_mut(&number)
            && group.subscriptions.is_empty()
        {
            group.advance_to(head);
        }
        (number, seq)
    }

    /// The recorded failed attempts of an event.
    pub(crate) fn failed(&self, group: &GroupName, seq: u64) -> Option<&KeptFailures> {
        let number = self.names.get(group)?;
        self.failed.get(&(*number, seq))
    }

    /// Ends the recorded failures of an event that the group has finished, so that they do not count for a later
    /// delivery.
    fn end_failures(&mut self, key: (u64, u64)) {
        if let Some(kept) = self.failed.get_mut(&key) {
            kept.end();
        }
    }
}

impl Store for Memory {
    fn ingest(&self, records: Vec<Arc<Recorded>>) -> BoxFuture<'_, Result<Vec<Position>>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            let now = self.now();
            let places = records.iter();
            let places = places.map(|record| Position::seq(state.ingest(record, now)));
            let places = places.collect();
            drop(state);
            self.work.notify_waiters();
            Ok(places)
        })
    }

    fn store_stage(&self, event: EventKey, stage: StoredStage) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            if state.position_of(&event).is_some() {
                return state.store_stage(&event, stage);
            }
            let old = self.now().minus(EARLY_STAGES);
            state.early.retain(|(_, kept)| kept.info.timestamp >= old);
            state.early.push((event, stage));
            Ok(())
        })
    }

    fn record_failure(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        failure: Failure,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            let key = state.told_of(&group, &record, self.now());
            state.failed.entry(key).or_default().record(failure);
            Ok(())
        })
    }

    fn failures(
        &self,
        group: GroupName,
        events: Vec<EventKey>,
    ) -> BoxFuture<'_, Result<Vec<Vec<Failure>>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let current = |event: &EventKey| {
                let kept = state.failed(&group, state.position_of(event)?)?;
                Some(kept.current().to_vec())
            };
            Ok(events
                .iter()
                .map(|e| current(e).unwrap_or_default())
                .collect())
        })
    }

    fn record_handled(
        &self,
        group: GroupName,
        records: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            let now = self.now();
            for record in records {
                let key = state.told_of(&group, &record, now);
                if !state.inbox.contains(key.0, &record.event) {
                    state.inbox.insert(key.0, &record.event, now);
                }
                state.end_failures(key);
            }
            Ok(())
        })
    }

    fn record_skip(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        reason: String,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            let key = state.told_of(&group, &record, self.now());
            state.skip(key.1, &group, &reason);
            state.end_failures(key);
            Ok(())
        })
    }

    fn bury(&self, letter: Burial) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            let key = state.told_of(&letter.group, &letter.record, self.now());
            let Some(record) = state.records.get(key.1).cloned() else {
                return Ok(());
            };
            state.dead.report(record, &letter);
            if let Some(kept) = state.failed.get_mut(&key) {
                kept.forget_current();
            }
            // The event is a dead letter now, and no longer a skipped event.
            if let Some(group) = state.groups.get_mut(&key.0) {
                group.skipped.remove(&key.1);
            }
            state.wake_waiters(key.1);
            Ok(())
        })
    }

    fn mark_retried(&self, letters: Vec<SentBack>, at: Timestamp) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move { self.sent_back(letters, None, at) })
    }

    fn mark_replaced(
        &self,
        letter: SentBack,
        by: EventId,
        at: Timestamp,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move { self.sent_back(vec![letter], Some(by), at) })
    }
}

impl Memory {
    fn sent_back(&self, letters: Vec<SentBack>, by: Option<EventId>, at: Timestamp) -> Result<()> {
        let mut state = self.open_state()?;
        for SentBack { letter, died_at } in letters {
            let position = letter.position.place();
            if let Some(letter) = state.dead.get_mut(position, &letter.group)
                && letter.is_open()
                && letter.died_at == died_at
            {
                letter.retried_at = Some(at);
                letter.replaced_by = by.or(letter.replaced_by);
            }
            state.wake_waiters(position);
        }
        Ok(())
    }
}
