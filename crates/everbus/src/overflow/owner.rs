//! Whose objects are whose. A place belongs to the log that put the first object there; a small object
//! beside the others says which that is. Any other log marks its keys with its id, so that no two logs
//! ever make the same key, and an object can be told to be one's own by its key alone.

use everbus_core::{Code, Error, LogId, Result};
use serde::{Deserialize, Serialize};

use super::store::Store;
use super::{Objects, key};

/// The object that says whose place it is.
const MARK: &str = "everbus-log.json";

#[derive(Serialize, Deserialize)]
struct Mark {
    /// The id of the log.
    log: String,
}

/// Who makes which keys in a place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owners {
    /// This log.
    pub(super) log: LogId,
    /// The log whose place it is, if it is anybody's.
    pub(super) place: Option<LogId>,
}

impl Owners {
    /// What this log marks its keys with; nothing where the place is its own.
    pub(super) fn mark(&self) -> Option<String> {
        (self.place != Some(self.log)).then(|| self.log.short())
    }

    /// Whether only this log can have put the object.
    pub(super) fn is_ours(&self, key: &str) -> bool {
        match key::maker(key) {
            None => false,
            Some(None) => self.place == Some(self.log),
            Some(Some(mark)) => mark == self.log.short(),
        }
    }

    /// The log that put the object, by the first digits of its id, if that can be told.
    pub(super) fn of(&self, key: &str) -> Option<String> {
        match key::maker(key)? {
            None => self.place.map(|log| log.short()),
            Some(mark) => Some(mark.to_owned()),
        }
    }
}

impl Objects {
    /// Who makes which keys. `None` if the engine takes no notes of objects.
    pub(super) async fn owners(&self) -> Result<Option<Owners>> {
        let Some(orphans) = &self.orphans else {
            return Ok(None);
        };
        let (log, place) = (orphans.log_id().await?, self.store.owner().await?);
        Ok(Some(Owners { log, place }))
    }

    /// As [`owners`](Self::owners), before an object is put: a place that is nobody's becomes ours.
    pub(super) async fn owners_or_claim(&self) -> Result<Option<Owners>> {
        let Some(orphans) = &self.orphans else {
            return Ok(None);
        };
        let log = orphans.log_id().await?;
        let place = self.store.claim(log).await?;
        Ok(Some(Owners { log, place }))
    }
}

impl Store {
    /// The log whose place this is.
    pub(super) async fn owner(&self) -> Result<Option<LogId>> {
        if let Some(known) = self.owner.get() {
            return Ok(*known);
        }
        self.read_mark().await
    }

    /// Makes the place this log's if it is nobody's and nothing is in it. Returns whose it is.
    pub(super) async fn claim(&self, log: LogId) -> Result<Option<LogId>> {
        let claimed = self.owner.get_or_try_init(async || {
            let owner = self.read_mark().await?;
            if owner.is_some() || !self.is_empty().await? {
                return Ok(owner);
            }
            self.mark(log).await
        });
        claimed.await.copied()
    }

    /// Says that the place is this log's, unless it is somebody's. Returns whose it is.
    pub(super) async fn mark(&self, log: LogId) -> Result<Option<LogId>> {
        let mark = Mark {
            log: log.to_string(),
        };
        let mark = serde_json::to_vec(&mark)
            .map_err(|e| Error::new(Code::Internal, "a mark cannot be written").caused_by(e))?;
        if self.create(&self.mark_key(), &[mark.into()]).await? {
            return Ok(Some(log));
        }
        self.read_mark().await
    }

    pub(super) fn mark_key(&self) -> String {
        format!("{}{MARK}", self.prefix)
    }

    /// A mark that cannot be read makes the place nobody's.
    async fn read_mark(&self) -> Result<Option<LogId>> {
        const LONGEST: u64 = 4096;
        let Some(found) = self.get(&self.mark_key()).await? else {
            return Ok(None);
        };
        if found.meta.size > LONGEST {
            return Ok(None);
        }
        let bytes = found.bytes().await.map_err(|e| {
            super::errors::failed("whose objects these are could not be read".into(), e)
        })?;
        let mark: Option<Mark> = serde_json::from_slice(&bytes).ok();
        Ok(mark.and_then(|mark| mark.log.parse().ok()))
    }
}
