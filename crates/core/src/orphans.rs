//! Objects that outlived their event.
//!
//! The large part of an event may lie in an object store. When the event is removed, the same
//! transaction notes the object here; it is deleted later, and then forgotten. So an object is never
//! deleted under an event that is still there, and none is left behind.

use serde::Serialize;

use crate::broker::BoxFuture;
use crate::error::Result;
use crate::id::EventId;
use crate::time::Timestamp;

/// An object whose event is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Orphan {
    /// The bucket or directory, as the event named it.
    pub bucket: String,
    /// The key of the object in it.
    pub key: String,
    /// The event. Another one with this id, of another tenant, may still refer to the object.
    pub id: EventId,
    /// When the event was removed.
    pub since: Timestamp,
}

/// A store that knows which objects its removed events left behind.
pub trait Orphans: Send + Sync + 'static {
    /// Up to `limit` of them by bucket and key, those after `after` if it is given.
    fn list(&self, after: Option<Orphan>, limit: usize) -> BoxFuture<'_, Result<Vec<Orphan>>>;

    /// Strikes these off the list: their objects are gone, or belong to another event. What is not on
    /// the list is passed over.
    fn forget(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>>;
}
