//! Objects whose events are gone.

use std::collections::BTreeMap;

use everbus_core::{BoxFuture, Event, Orphan, Orphans, Result, Timestamp};

use crate::broker::Memory;

/// What removed events left behind, by bucket and key.
#[derive(Debug, Default)]
pub(crate) struct Left(BTreeMap<(String, String), Orphan>);

impl Left {
    /// An event is being removed.
    pub(crate) fn note(&mut self, event: &Event, now: Timestamp) {
        let Some(overflow) = event.overflow() else {
            return;
        };
        let (bucket, key) = (overflow.bucket.clone(), overflow.key.clone());
        let orphan = Orphan {
            bucket: bucket.clone(),
            key: key.clone(),
            id: event.id(),
            since: now,
        };
        self.0.insert((bucket, key), orphan);
    }
}

fn name(orphan: Orphan) -> (String, String) {
    (orphan.bucket, orphan.key)
}

impl Orphans for Memory {
    fn list(&self, after: Option<Orphan>, limit: usize) -> BoxFuture<'_, Result<Vec<Orphan>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let after = after.map(name);
            let all = state.orphans.0.iter();
            let rest = all.filter(|(name, _)| after.as_ref().is_none_or(|after| *name > after));
            let rest = rest.map(|(_, orphan)| orphan.clone());
            Ok(rest.take(limit).collect())
        })
    }

    fn forget(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            for orphan in orphans {
                state.orphans.0.remove(&name(orphan));
            }
            Ok(())
        })
    }
}
