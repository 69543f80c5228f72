//! The owner of a place. A place belongs to the log that put the first object there; a small marker object
//! names the log. Any other log adds its id to its keys. So no two logs make the same key, and the key
//! alone tells which log put an object.

use everbus_core::{Code, Error, LogId, Result};
use serde::{Deserialize, Serialize};

use super::store::Store;
use super::{Objects, key};

/// The marker object that names the owner of the place.
const MARK: &str = "everbus-log.json";

#[derive(Serialize, Deserialize)]
struct Mark {
    /// The id of the log.
    log: String,
}

/// Which log makes which keys in a place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owners {
    /// This log.
    pub(super) log: LogId,
    /// The log that owns the place, if any.
    pub(super) place: Option<LogId>,
}

impl Owners {
    /// The mark that this log adds to its keys; `None` in its own place.
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

    /// The log that put the object, by the first digits of its id, if the key tells.
    pub(super) fn of(&self, key: &str) -> Option<String> {
        match key::maker(key)? {
            None => self.place.map(|log| log.short()),
            Some(mark) => Some(mark.to_owned()),
        }
    }
}

impl Objects {
    /// The owners of the place. `None` if the engine keeps no notes of objects.
    pub(super) async fn owners(&self) -> Result<Option<Owners>> {
        let Some(orphans) = &self.orphans else {
            return Ok(None);
        };
        let (log, place) = (orphans.log_id().await?, self.store.owner().await?);
        Ok(Some(Owners { log, place }))
    }

    /// As [`owners`](Self::owners), before an object is put: claims a place that has no owner.
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
    /// The log that owns this place.
    pub(super) async fn owner(&self) -> Result<Option<LogId>> {
        if let Some(known) = self.owner.get() {
            return Ok(*known);
        }
        self.read_mark().await
    }

    /// Makes this log the owner if the place has no owner and is empty. Returns the owner.
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

    /// Makes this log the owner, unless there is one. Returns the owner.
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

    /// Reads the marker. A marker that cannot be parsed means: no owner.
    async fn read_mark(&self) -> Result<Option<LogId>> {
        const LONGEST: u64 = 4096;
        let Some(found) = self.get(&self.mark_key()).await? else {
            return Ok(None);
        };
        if found.meta.size > LONGEST {
            return Ok(None);
        }
        let bytes = found.bytes().await.map_err(|e| {
            super::errors::failed("the owner of the objects could not be read".into(), e)
        })?;
        let mark: Option<Mark> = serde_json::from_slice(&bytes).ok();
        Ok(mark.and_then(|mark| mark.log.parse().ok()))
    }
}
