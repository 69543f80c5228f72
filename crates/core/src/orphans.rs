//! Objects without an event, and the log that owns an object.
//!
//! The large part of an event may be in an object store. Before an object is put, the engine makes a note of it. The
//! append of the event removes the note, and the removal of the event makes the note again, each in the same step. So at
//! any moment an event or a note refers to every object of a log.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::broker::BoxFuture;
use crate::error::Result;
use crate::id::EventId;
use crate::time::Timestamp;

/// The id of a log: random, made with the log. A backup or a restored log gets another id, because the two
/// logs diverge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LogId(#[serde(with = "uuid::serde::simple")] Uuid);

impl LogId {
    /// A new id.
    #[allow(clippy::new_without_default, reason = "each is another")]
    pub fn new() -> Self {
        Self(Uuid::new_v4())
    }

    /// From stored bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }

    /// The sixteen bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// The first twelve digits: enough to tell logs apart.
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

/// An object without an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Orphan {
    /// The bucket or directory, as in the event.
    pub bucket: String,
    /// The key of the object in it.
    pub key: String,
    /// The event. An event of another tenant with the same id may still refer to the object.
    pub id: EventId,
    /// When the note was made.
    pub since: Timestamp,
    /// Whether the note was made for a publish and the event does not exist yet; otherwise the event was
    /// removed.
    pub unborn: bool,
}

/// A store that knows its objects without an event.
pub trait Orphans: Send + Sync + 'static {
    /// All notes by bucket and key.
    fn list(&self) -> BoxFuture<'_, Result<Vec<Orphan>>>;

    /// Makes notes of objects before they are put. Durable on return. The append of an event that refers to
    /// one of them removes its note, in the same step.
    fn note(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>>;

    /// Removes these notes: their objects were deleted, or belong to another event. A note that does not
    /// exist, or was made again since, is ignored.
    fn forget(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>>;

    /// The id of this log.
    fn log_id(&self) -> BoxFuture<'_, Result<LogId>>;
}
