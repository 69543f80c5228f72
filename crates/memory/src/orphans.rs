//! Notes about objects in the object store whose event was removed.

use std::collections::BTreeMap;

use everbus_core::{BoxFuture, Event, LogId, Orphan, Orphans, Result, Timestamp};

use crate::broker::Memory;

/// The notes, by bucket and key.
#[derive(Debug)]
pub(crate) struct Left {
    notes: BTreeMap<(String, String), Orphan>,
    log: LogId,
}

impl Default for Left {
    fn default() -> Self {
        Self {
            notes: BTreeMap::new(),
            log: LogId::new(),
        }
    }
}

impl Left {
    /// Notes the object of an event that is being removed, if it has one.
    pub(crate) fn note(&mut self, event: &Event, now: Timestamp) {
        let Some(overflow) = event.overflow() else {
            return;
        };
        self.add(Orphan {
            bucket: overflow.bucket.clone(),
            key: overflow.key.clone(),
            id: event.id(),
            since: now,
            unborn: false,
        });
    }

    /// Removes the note of the object of an event that was appended.
    pub(crate) fn born(&mut self, event: &Event) {
        if let Some(overflow) = event.overflow() {
            let name = (overflow.bucket.clone(), overflow.key.clone());
            self.notes.remove(&name);
        }
    }

    fn add(&mut self, orphan: Orphan) {
        let name = (orphan.bucket.clone(), orphan.key.clone());
        self.notes.insert(name, orphan);
    }
}

impl Orphans for Memory {
    fn list(&self) -> BoxFuture<'_, Result<Vec<Orphan>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            Ok(state.orphans.notes.values().cloned().collect())
        })
    }

    fn note(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            for orphan in orphans {
                state.orphans.add(orphan);
            }
            Ok(())
        })
    }

    fn forget(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            for orphan in orphans {
                let key = (orphan.bucket.clone(), orphan.key.clone());
                if state.orphans.notes.get(&key) == Some(&orphan) {
                    state.orphans.notes.remove(&key);
                }
            }
            Ok(())
        })
    }

    fn log_id(&self) -> BoxFuture<'_, Result<LogId>> {
        Box::pin(async move { Ok(self.open_state()?.orphans.log) })
    }
}
