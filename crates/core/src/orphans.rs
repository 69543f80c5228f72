//! Objects without an event, and whose objects are whose.
//!
//! The large part of an event may lie in an object store. Before an object is put it is noted here; the
//! append of its event strikes the note off, and the removal of the event makes it again, in the same
//! step each. So every object of a log is referred to or noted at any moment, and what is neither was put
//! by somebody else: another log, or a later state of this one that an older copy has replaced.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use uuid::Uuid;

use crate::broker::BoxFuture;
use crate::error::{Code, Error, Result};
use crate::id::EventId;
use crate::time::Timestamp;

/// Which log this is: made at random with the log. A backup or a restored log is another one, since the
/// two go different ways from then on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogId(Uuid);

impl LogId {
    /// A new one.
    #[allow(clippy::new_without_default, reason = "each is another")]
    pub fn new() -> Self {
        Self(Uuid::new_v4())
    }

    /// From what an engine stored.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }

    /// The sixteen bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// The first twelve digits, which tell logs apart well enough.
    pub fn short(&self) -> String {
        let mut text = self.to_string();
        text.truncate(12);
        text
    }
}

impl fmt::Display for LogId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.simple().fmt(f)
    }
}

impl fmt::Debug for LogId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LogId({self})")
    }
}

impl FromStr for LogId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::new(
                Code::InvalidSetting,
                format!("{text:?} is not the id of a log"),
            )
        };
        let digits = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let uuid = Uuid::try_parse(text).ok().filter(|_| digits);
        uuid.map(Self).ok_or_else(wrong)
    }
}

/// An object without an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Orphan {
    /// The bucket or directory, as the event named it.
    pub bucket: String,
    /// The key of the object in it.
    pub key: String,
    /// The event. Another one with this id, of another tenant, may still refer to the object.
    pub id: EventId,
    /// When it was noted.
    pub since: Timestamp,
    /// Whether it was noted for a publish and the event is not there yet; else the event is gone.
    pub unborn: bool,
}

/// A store that knows which of its objects have no event.
pub trait Orphans: Send + Sync + 'static {
    /// Up to `limit` of them by bucket and key, those after `after` if it is given.
    fn list(&self, after: Option<Orphan>, limit: usize) -> BoxFuture<'_, Result<Vec<Orphan>>>;

    /// Notes objects that are about to be put. Durable when it returns. The append of an event that
    /// refers to one of them strikes it off the list, in the same step.
    fn note(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>>;

    /// Strikes these notes off the list, as they were listed: their objects are gone, or belong to
    /// another event. What is not on the list, or was noted again since, is passed over.
    fn forget(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>>;

    /// Which log this is.
    fn log_id(&self) -> BoxFuture<'_, Result<LogId>>;

    /// Makes this another log: it gets a new id and forgets all notes, in one step. For a copy that was
    /// put in the place of another state of the same log.
    fn renew(&self) -> BoxFuture<'_, Result<LogId>>;
}
