//! The inbox: which events a group has handled.

use std::collections::BTreeMap;
use std::sync::Arc;

use everbus_core::{BoxFuture, Event, EventId, GroupName, Inbox, Recorded, Result, Timestamp};

use crate::broker::Memory;

/// A group's number, the event's id and its tenant.
type Key = (u64, EventId, Option<Box<str>>);

/// When each group handled which event.
#[derive(Debug, Default)]
pub(crate) struct Handled(BTreeMap<Key, Timestamp>);

fn key(group: u64, event: &Event) -> Key {
    (group, event.id(), event.tenant().map(Into::into))
}

impl Handled {
    pub(crate) fn contains(&self, group: u64, event: &Event) -> bool {
        self.0.contains_key(&key(group, event))
    }

    pub(crate) fn insert(&mut self, group: u64, event: &Event, now: Timestamp) {
        self.0.insert(key(group, event), now);
    }

    /// Removes the records of a group. This only frees memory, because the number of a group is never used again.
    pub(crate) fn remove_group(&mut self, group: u64) {
        self.0.retain(|(number, _, _), _| *number != group);
    }

    fn forget(&mut self, before: Timestamp) -> u64 {
        let kept = self.0.len();
        self.0.retain(|_, at| *at >= before);
        (kept - self.0.len()) as u64
    }
}

impl Inbox for Memory {
    fn handled(
        &self,
        group: GroupName,
        events: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<Vec<bool>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let number = state.names.get(&group);
            let handled = events
                .iter()
                .map(|r| number.is_some_and(|number| state.inbox.contains(*number, &r.event)));
            Ok(handled.collect())
        })
    }

    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { Ok(self.open_state()?.inbox.forget(before)) })
    }
}
