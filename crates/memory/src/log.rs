//! Reading the log without a group.

use std::sync::Arc;

use everbus_core::{
    BoxFuture, Cursor, EventId, GroupState, Log, Lookup, Pattern, Position, Recorded, Result,
    Shard, StartFrom,
};

use crate::broker::Memory;
use crate::records::{Seq as _, any_matches};
use crate::state::no_event;

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
