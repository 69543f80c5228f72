//! Consumer groups: their names, where they start, and their subscriptions.
//!
//! Each engine moves the cursor of a group in its own way:
//!
//! | engine | where |
//! |---|---|
//! | memory | `memory/src/groups.rs`: `pass`, `advance_to` |
//! | SQLite | `sqlite/src/deliveries/cursor.rs`: `hand_out` |
//! | PostgreSQL | `postgres/src/sql/claim.sql`: `everbus.claim_new`, and `postgres/src/claim/fresh.rs` |
//! | Kafka | `kafka/src/board/commit.rs`: the floor of `Progress` is the committed offset; `kafka/src/member/commit.rs` commits it |
//! | Redis | `redis/src/scripts/claim.lua`: `XREADGROUP` |
//! | NATS | the server, for each pull request of `nats/src/consumer.rs` |

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::error::{Code, Error, Result};
use crate::lag::{Lag, StreamLag};
use crate::pattern::Pattern;
use crate::position::Cursor;
use crate::time::Timestamp;

/// The name of a group. The unnamed group of the embedded bus's specification has the empty name and is
/// shown as `(unnamed)`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupName(Arc<str>);

/// How the unnamed group is shown, and may be written on a command line.
pub const UNNAMED: &str = "(unnamed)";

/// Why a group skipped an event that waited for a handler: its subscription was removed.
pub const UNSUBSCRIBED: &str = "unsubscribed: the group no longer wants it";

/// The name of the group that copies every event into the store beside a broker.
pub const ARCHIVE: &str = "everbus.archive";

impl GroupName {
    /// The unnamed group.
    pub fn unnamed() -> Self {
        Self("".into())
    }

    /// A named group: 1 to 128 printable characters.
    pub fn new(name: &str) -> Result<Self> {
        let bad = |what: &str| {
            Err(
                Error::new(Code::InvalidSetting, format!("{what}: {name:?}"))
                    .hint("a group name is 1 to 128 printable characters, for example billing"),
            )
        };
        if name.is_empty() {
            return bad("the group name is empty");
        }
        if name.chars().count() > 128 {
            return bad("the group name is too long");
        }
        if name == UNNAMED || name.chars().any(char::is_control) {
            return bad("the group name is not allowed");
        }
        Ok(Self(name.into()))
    }

    /// Whether the group may get an event with this address: the event is for all groups, or for this one,
    /// or this is the [`ARCHIVE`], which copies every event.
    pub fn receives(&self, address: Option<&str>) -> bool {
        address.is_none_or(|address| address == self.as_str() || self.as_str() == ARCHIVE)
    }

    /// Whether this is the unnamed group.
    pub fn is_unnamed(&self) -> bool {
        self.0.is_empty()
    }

    /// The name as stored: empty for the unnamed group.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_unnamed() { UNNAMED } else { &self.0 })
    }
}

impl FromStr for GroupName {
    type Err = Error;

    /// Parses a displayed name: the empty text and `(unnamed)` are the unnamed group.
    fn from_str(s: &str) -> Result<Self> {
        if s.is_empty() || s == UNNAMED {
            Ok(Self::unnamed())
        } else {
            Self::new(s)
        }
    }
}

impl Serialize for GroupName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Where a new group begins. An existing group keeps its cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartFrom {
    /// After the newest event in the log.
    New,
    /// At the beginning of the log.
    First,
    /// At the newest matching event, which is included.
    Last,
    /// At the first event received at or after this time.
    Time(Timestamp),
}

/// One subscription inside a group: a pattern under a name that stays the same across restarts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SubscriptionSpec {
    /// The name, unique in the group. Declaring the same name again is the same subscription.
    pub name: String,
    /// The events it matches.
    pub pattern: Pattern,
}

/// A group and the subscriptions this process adds to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// The group.
    pub name: GroupName,
    /// Where it begins if it does not exist yet.
    pub start_from: StartFrom,
    /// Whether events with the same key are handled strictly one after another.
    pub ordered: bool,
    /// Whether the group is ephemeral: it is removed when the engine that declares it is closed or found dead. An
    /// ephemeral group has no dead letters (events that fail for good are skipped, with the reason), and retention does
    /// not wait for it.
    pub ephemeral: bool,
    /// The subscriptions to add. They apply to events after the group's current cursor.
    pub subscriptions: Vec<SubscriptionSpec>,
}

impl GroupSpec {
    /// A durable group that begins after the newest event and has no subscriptions yet.
    pub fn new(name: GroupName) -> Self {
        Self {
            name,
            start_from: StartFrom::New,
            ordered: false,
            ephemeral: false,
            subscriptions: Vec::new(),
        }
    }
}

impl GroupSpec {
    /// For engines: refuses a new group that cannot be created as declared.
    pub fn check_new(&self) -> Result<()> {
        if self.name.is_unnamed() && self.ephemeral {
            return Err(other_lifetime(self));
        }
        if self.name.is_unnamed() && self.start_from != StartFrom::First {
            let what = "the unnamed group begins at the start of the log";
            return Err(Error::new(Code::InvalidSetting, what)
                .hint("name the group to start it anywhere else"));
        }
        Ok(())
    }

    /// For engines: refuses a declaration that contradicts the group that exists.
    pub fn check_known(&self, ordered: bool, same_lifetime: bool) -> Result<()> {
        if ordered != self.ordered {
            let not = if ordered { "" } else { "not " };
            let what = format!("group {} is {not}ordered and cannot be changed", self.name);
            return Err(Error::new(Code::GroupConflict, what)
                .hint("use another group name, or remove the group first"));
        }
        if !same_lifetime {
            return Err(other_lifetime(self));
        }
        Ok(())
    }
}

/// The error for a group that does not exist.
pub fn no_group(name: &GroupName) -> Error {
    Error::new(Code::GroupNotFound, format!("there is no group {name}"))
        .hint("declare it by subscribing, or list the groups with `everbus groups`")
}

/// The error for an existing group of the other kind: ephemeral instead of durable, or the reverse.
pub fn other_lifetime(spec: &GroupSpec) -> Error {
    if spec.name.is_unnamed() {
        return Error::new(Code::InvalidSetting, "the unnamed group is never ephemeral")
            .hint("leave the name of the group out: the bus chooses one");
    }
    let what = if spec.ephemeral {
        "exists and is not an ephemeral group of this process"
    } else {
        "is an ephemeral group"
    };
    Error::new(Code::GroupConflict, format!("{} {what}", spec.name))
        .hint("use another group name, or leave the name of an ephemeral group out")
}

/// A subscription as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SubscriptionInfo {
    /// The id that `subscribe` returns and `unsubscribe` takes.
    pub id: crate::id::EventId,
    /// The group it belongs to.
    pub group: GroupName,
    /// Its name within the group.
    pub name: String,
    /// The events it matches.
    pub pattern: Pattern,
    /// The subscription applies to events after this cursor.
    pub after: Cursor,
    /// When it was first declared.
    pub created_at: Timestamp,
}

/// The state of a group. Engines begin with [`GroupInfo::new`] and fill in what they know.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct GroupInfo {
    /// The group.
    pub name: GroupName,
    /// Whether events with the same key are handled one after another.
    pub ordered: bool,
    /// Whether the group is removed with the engine that declared it.
    pub ephemeral: bool,
    /// The patterns of its subscriptions.
    pub patterns: Vec<String>,
    /// Its subscriptions, by name. A named handler has its name here.
    pub subscriptions: Vec<SubscriptionInfo>,
    /// The cursor of the group: every event up to here was delivered or skipped.
    pub position: Cursor,
    /// The number of matching events after the cursor.
    pub behind: u64,
    /// Events delivered and not settled.
    pub in_flight: u64,
    /// Failed events that wait for their next attempt, and released ones.
    pub waiting: u64,
    /// How many of the `waiting` events wait because no process has a handler for them.
    pub unhandled: u64,
    /// Open dead letters.
    pub dead_letters: u64,
    /// When the oldest event that is not settled was received.
    pub oldest: Option<Timestamp>,
    /// How long the oldest unsettled event has been waiting; zero if there is none.
    #[serde(rename = "behind_ms", serialize_with = "as_millis")]
    pub behind_for: Duration,
    /// When the group last delivered or settled an event.
    pub active_at: Timestamp,
    /// The lag of each event type, if the engine knows it; types without lag may be left out.
    #[serde(skip)]
    pub types: BTreeMap<Arc<str>, Lag>,
    /// The lag of each stream: from an engine that counts by stream, or by
    /// [`with_streams`](Self::with_streams).
    pub streams: Vec<StreamLag>,
    /// Why stored events do not reach the group, if the engine knows a reason: a transaction that has not ended, another
    /// program that deleted events.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_back: Option<String>,
}

impl GroupInfo {
    /// A group without subscriptions and pending events.
    pub fn new(name: GroupName, active_at: Timestamp) -> Self {
        Self {
            name,
            ordered: false,
            ephemeral: false,
            patterns: Vec::new(),
            subscriptions: Vec::new(),
            position: Cursor::START,
            behind: 0,
            in_flight: 0,
            waiting: 0,
            unhandled: 0,
            dead_letters: 0,
            oldest: None,
            behind_for: Duration::ZERO,
            active_at,
            types: BTreeMap::new(),
            streams: Vec::new(),
            held_back: None,
        }
    }
}

pub(crate) fn as_millis<S: serde::Serializer>(
    d: &Duration,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

pub(crate) fn as_millis_if_any<S: serde::Serializer>(
    d: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match d {
        Some(d) => as_millis(d, serializer),
        None => serializer.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unnamed_group_is_shown_and_read_as_such() {
        assert_eq!(GroupName::unnamed().to_string(), "(unnamed)");
        assert_eq!(
            "(unnamed)".parse::<GroupName>().unwrap(),
            GroupName::unnamed()
        );
        assert_eq!("billing".parse::<GroupName>().unwrap().as_str(), "billing");
    }

    #[test]
    fn bad_names_are_refused() {
        for bad in ["", "(unnamed)", "a\nb", &"x".repeat(129)] {
            assert_eq!(
                GroupName::new(bad).unwrap_err().code(),
                Code::InvalidSetting
            );
        }
    }
}
