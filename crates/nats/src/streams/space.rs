//! The names of streams and subjects of one bus.

use super::SINGLE;
use crate::names;

const GROUPS: &str = "EVERBUS_GROUPS";
const DEAD: &str = "DLQ";

/// The names of a bus on its server. With a path in the URL, several buses share one server.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    pub(super) stream_prefix: String,
    pub(super) subject_prefix: String,
    pub(super) own: String,
}

impl Space {
    pub(crate) fn new(space: &str) -> Self {
        let (stream_prefix, subject_prefix, own) = match space {
            "" => (String::new(), String::new(), "$EVERBUS".to_owned()),
            space => (
                format!("{space}-"),
                format!("{space}."),
                format!("$EVERBUS.{space}"),
            ),
        };
        Self {
            stream_prefix,
            subject_prefix,
            own,
        }
    }

    pub(super) fn stream(&self, name: &str) -> String {
        format!("{}{}", self.stream_prefix, names::encoded(name))
    }

    /// The name of a bucket of values.
    pub(crate) fn bucket(&self, name: &str) -> String {
        format!("{}{name}", self.stream_prefix)
    }

    pub(crate) fn single_stream(&self) -> String {
        self.stream(SINGLE)
    }

    pub(crate) fn groups_stream(&self) -> String {
        self.stream(GROUPS)
    }

    pub(crate) fn dead_stream(&self) -> String {
        self.stream(DEAD)
    }

    /// The subject of a group's record; `*` for all.
    pub(crate) fn group_subject(&self, encoded: &str) -> String {
        format!("{}.groups.{encoded}", self.own)
    }

    /// The subject where a running engine answers.
    pub(crate) fn owner_subject(&self, owner: &str) -> String {
        format!("{}.owner.{owner}", self.own)
    }

    /// The subject of a dead letter.
    pub(crate) fn dead_subject(&self, stream: &str, group: &str, seq: &str) -> String {
        format!("{}dlq.{stream}.{group}.{seq}", self.subject_prefix)
    }
}
