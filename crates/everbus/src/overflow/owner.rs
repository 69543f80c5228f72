//! The owner of a place. A place belongs to the log that put the first object there; a small marker object
//! names the log. Any other log adds its id to its keys. So no two logs make the same key, and the key
//! alone tells which log put an object.

use everbus_core::{LogId, Result};
use futures_util::TryStreamExt as _;
use serde::{Deserialize, Serialize};

use super::read::content;
use super::{Place, key};

/// The marker object that names the owner of the place.
const MARK: &str = "everbus-log.json";

#[derive(Serialize, Deserialize)]
struct Mark {
    log: LogId,
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

    /// The log that put the object, by the first digits of its id, if the key tells.
    pub(super) fn of(&self, key: &str) -> Option<String> {
        match key::maker(key)? {
            None => self.place.map(|log| log.short()),
            Some(mark) => Some(mark.to_owned()),
        }
    }

    /// Whether only this log can have put the object.
    pub(super) fn is_ours(&self, key: &str) -> bool {
        self.of(key) == Some(self.log.short())
    }
}

impl Place {
    /// The log that owns this place.
    pub(super) async fn owner(&self) -> Result<Option<LogId>> {
        match self.owner.get() {
            Some(known) => Ok(*known),
            None => self.read_mark().await,
        }
    }

    /// Makes the log the owner of the place, if it has no owner and either is empty or was `filled` by the
    /// caller. Returns the owner.
    pub async fn claim(&self, log: LogId, filled: bool) -> Result<Option<LogId>> {
        let claimed = self.owner.get_or_try_init(async || {
            let owner = self.read_mark().await?;
            let empty = async || Ok(self.list().await?.try_next().await?.is_none());
            if owner.is_some() || !(filled || empty().await?) {
                return Ok(owner);
            }
            let mark = serde_json::json!(Mark { log }).to_string();
            match self.create(&self.mark_key(), &[mark.into()]).await? {
                true => Ok(Some(log)),
                false => self.read_mark().await,
            }
        });
        claimed.await.copied()
    }

    fn mark_key(&self) -> String {
        format!("{}{MARK}", self.prefix)
    }

    /// Reads the marker. A marker that cannot be parsed means: no owner.
    async fn read_mark(&self) -> Result<Option<LogId>> {
        const LONGEST: u64 = 4096;
        let key = self.mark_key();
        let found = self.get(&key, false).await?;
        let Some(found) = found.filter(|found| found.meta.size <= LONGEST) else {
            return Ok(None);
        };
        let mark: Option<Mark> = serde_json::from_slice(&content(found, &key).await?).ok();
        Ok(mark.map(|mark| mark.log))
    }
}
