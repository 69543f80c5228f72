//! Event ids: UUIDs, time-ordered by default; an id given by the caller is kept unchanged.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{Code, Error};
use crate::time::Timestamp;

/// The identity of an event and its idempotency key.
///
/// New ids are UUID version 7, so they sort by time (random ids make inserts several times slower). Any
/// UUID given by a caller is kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventId(Uuid);

/// The namespace under which foreign ids are turned into UUIDs.
const FOREIGN: Uuid = Uuid::from_u128(0x9d6e_3b1a_52c7_5c0f_8a54_1f0e_7c2b_6d91);

impl EventId {
    /// A new time-ordered id.
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// The id for a foreign string id: always the same for the same source and id.
    ///
    /// A string that is a UUID is used unchanged.
    pub fn from_foreign(source: &str, id: &str) -> Self {
        if let Ok(uuid) = Uuid::parse_str(id) {
            return Self(uuid);
        }
        let mut name = Vec::with_capacity(source.len() + id.len() + 8);
        name.extend_from_slice(&(source.len() as u64).to_be_bytes());
        name.extend_from_slice(source.as_bytes());
        name.extend_from_slice(id.as_bytes());
        Self(Uuid::new_v5(&FOREIGN, &name))
    }

    /// The id of an event that was caused by handling another one: always the same for the same cause,
    /// group, handler and index, so that a second run publishes nothing twice. It sorts by the time the
    /// cause was received, like the cause's id.
    pub fn derived(
        cause: EventId,
        received_at: Timestamp,
        group: &str,
        handler: &str,
        index: u32,
    ) -> Self {
        let mut name = Vec::with_capacity(16 + group.len() + handler.len());
        name.extend_from_slice(&(group.len() as u64).to_be_bytes());
        name.extend_from_slice(group.as_bytes());
        name.extend_from_slice(&index.to_be_bytes());
        name.extend_from_slice(handler.as_bytes());
        let hash = Uuid::new_v5(&cause.0, &name).into_bytes();
        let millis = u64::try_from(received_at.as_micros() / 1000).unwrap_or(0);
        let random = std::array::from_fn(|i| hash[i]);
        Self(uuid::Builder::from_unix_timestamp_millis(millis, &random).into_uuid())
    }

    /// From the sixteen bytes of a UUID.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }

    /// The sixteen bytes of the UUID.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// As a UUID of the `uuid` crate.
    pub const fn as_uuid(&self) -> Uuid {
        self.0
    }
}

impl Default for EventId {
    fn default() -> Self {
        Self::new()
    }
}

impl From<Uuid> for EventId {
    fn from(uuid: Uuid) -> Self {
        Self(uuid)
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

impl fmt::Debug for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

impl FromStr for EventId {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Uuid::parse_str(s).map(Self).map_err(|e| {
            Error::new(Code::InvalidId, format!("{s:?} is not an event id: {e}"))
                .hint("event ids are UUIDs, as printed by `everbus publish`")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: embedded/id-uuid: every event has a UUID, version 7 by default
    // conformance: outbox/1-event-id: every event has an id of its own
    // conformance: framework/structure-id: every event has an id of its own
    #[test]
    fn new_ids_are_version_7_and_sort_by_creation() {
        let ids: Vec<EventId> = (0..100).map(|_| EventId::new()).collect();
        assert!(ids.iter().all(|id| id.as_uuid().get_version_num() == 7));
        assert!(ids.windows(2).all(|w| w[0] < w[1]));
    }

    #[test]
    fn foreign_ids_are_stable_and_depend_on_the_source() {
        let a = EventId::from_foreign("shop", "test-1");
        assert_eq!(a, EventId::from_foreign("shop", "test-1"));
        assert_ne!(a, EventId::from_foreign("other", "test-1"));
        assert_ne!(
            EventId::from_foreign("ab", "c"),
            EventId::from_foreign("a", "bc")
        );
        assert_eq!(a.as_uuid().get_version_num(), 5);
        let own = EventId::new();
        assert_eq!(EventId::from_foreign("shop", &own.to_string()), own);
    }
}
