//! The id of a subscription.

use std::fmt;
use std::str::FromStr;

use everbus_core::{Error, EventId, Result};
use serde::Serialize;

/// Identifies a subscription: `subscribe` returns it and `unsubscribe` takes it. It is the same across
/// restarts for the same name in the same group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct SubscriptionId(EventId);

impl From<EventId> for SubscriptionId {
    fn from(id: EventId) -> Self {
        Self(id)
    }
}

impl From<SubscriptionId> for EventId {
    fn from(id: SubscriptionId) -> Self {
        id.0
    }
}

impl fmt::Display for SubscriptionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for SubscriptionId {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        s.parse().map(Self)
    }
}
