//! Reading the log without a group.

use std::sync::Arc;

use everbus_core::{BoxFuture, EventId, GroupState, Log, Pattern, Recorded, Result, StartFrom};

use crate::broker::Memory;
use crate::records::any_matches;
use crate::state::no_event;

impl Log for Memory {
    fn head(&self) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { Ok(self.open_state()?.records.head()) })
    }

    fn read(
        &self,
        after: u64,
        patterns: Vec<Pattern>,
        limit: usize,
    ) -> BoxFuture<'_, Result<(Vec<Arc<Recorded>>, u64)>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let wanted = state
                .records
                .after(after)
                .filter(|record| any_matches(&patterns, record.event.event_type()));
            let found: Vec<Arc<Recorded>> = wanted.take(limit).cloned().collect();
            let reached = match found.last() {
                Some(last) if found.len() == limit => last.position,
                _ if limit == 0 => after,
                _ => after.max(state.records.head()),
            };
            Ok((found, reached))
        })
    }

    fn resolve(&self, from: StartFrom, patterns: Vec<Pattern>) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { Ok(self.open_state()?.records.resolve(from, &patterns)) })
    }

    fn wait_beyond(&self, position: u64) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            loop {
                let mut woken = std::pin::pin!(self.work.notified());
                woken.as_mut().enable();
                if self.open_state()?.records.head() > position {
                    return Ok(());
                }
                woken.await;
            }
        })
    }

    fn find(&self, id: EventId) -> BoxFuture<'_, Result<Vec<Arc<Recorded>>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let found = state.records.with_id(id).cloned().collect();
            Ok(found)
        })
    }

    fn states(&self, position: u64) -> BoxFuture<'_, Result<Vec<GroupState>>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            state.end_leases(self.now());
            let record = state
                .records
                .get(position)
                .ok_or_else(|| no_event(position))?;
            Ok(state.states(record))
        })
    }
}
