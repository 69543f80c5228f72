//! What happened to one event, by group.

use std::fmt;

use everbus_core::{EventId, Failure, GroupName, Position, Timestamp};

/// What happened to an event in every subscribed group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub(super) id: EventId,
    pub(super) position: Position,
    pub(super) event_type: String,
    pub(super) groups: Vec<Happened>,
}

/// What happened to an event in one group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Happened {
    /// The group.
    pub group: GroupName,
    /// Its state there.
    pub fate: Fate,
    /// Attempts begun.
    pub attempts: u32,
    /// The failed attempts, in order. With duplicate deliveries this includes a second run that failed
    /// after the first had succeeded; such a failure changes nothing else.
    pub failures: Vec<Failure>,
}

/// The state of an event in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fate {
    /// Not delivered to a handler yet, being handled, or released without an attempt, for example because of an open
    /// circuit breaker.
    Waiting,
    /// All its handlers are done.
    Handled,
    /// Settled without being handled.
    Skipped {
        /// Why.
        reason: String,
    },
    /// The last attempt failed, and another one follows.
    Retrying {
        /// When, in virtual time.
        due_at: Timestamp,
    },
    /// Failed for good.
    DeadLettered,
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waiting => f.write_str("waiting"),
            Self::Handled => f.write_str("handled"),
            Self::Skipped { reason } => write!(f, "skipped ({reason})"),
            Self::Retrying { due_at } => write!(f, "retrying at {due_at}"),
            Self::DeadLettered => f.write_str("dead-lettered"),
        }
    }
}

impl Report {
    /// The id of the event.
    pub fn id(&self) -> EventId {
        self.id
    }

    /// Its sequence number in the log.
    pub fn seq(&self) -> u64 {
        self.position.place()
    }

    /// One entry for each subscribed group of the bus, by name.
    pub fn groups(&self) -> &[Happened] {
        &self.groups
    }

    /// Its state in a group; `None` if the group is not subscribed to it. The unnamed group is
    /// `"(unnamed)"`.
    pub fn fate(&self, group: &str) -> Option<&Fate> {
        let name: GroupName = group.parse().ok()?;
        let found = self.groups.iter().find(|happened| happened.group == name);
        found.map(|happened| &happened.fate)
    }

    /// Whether at least one group is subscribed to it and all subscribed groups have handled it.
    pub fn is_handled(&self) -> bool {
        let mut all = self.groups.iter();
        !self.groups.is_empty() && all.all(|happened| happened.fate == Fate::Handled)
    }

    /// The failed attempts in all groups.
    pub fn failures(&self) -> impl Iterator<Item = &Failure> {
        self.groups.iter().flat_map(|happened| &happened.failures)
    }

    /// Panics unless at least one group is subscribed to the event and all subscribed groups have handled
    /// it.
    #[track_caller]
    pub fn assert_handled(&self) {
        assert!(self.is_handled(), "the event was not handled: {self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.event_type, self.id)?;
        if self.groups.is_empty() {
            f.write_str(": no group of this bus wants it")?;
        }
        for happened in &self.groups {
            let (group, fate, attempts) = (&happened.group, &happened.fate, happened.attempts);
            write!(f, "\n  group {group}: {fate}, attempts: {attempts}")?;
            for failure in &happened.failures {
                let (attempt, kind) = (failure.attempt, failure.kind.as_str());
                let handler = failure.handler.as_deref().unwrap_or("?");
                write!(
                    f,
                    "\n    attempt {attempt} ({kind}, handler {handler:?}): {}",
                    failure.error
                )?;
            }
        }
        Ok(())
    }
}
