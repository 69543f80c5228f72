//! Reading the log without a group: for tailing, looking up and replaying.

use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::broker::BoxFuture;
use crate::envelope::envelope;
use crate::error::Result;
use crate::event::Event;
use crate::failure::{Ended, Failure, FailureKind};
use crate::group::{GroupName, StartFrom};
use crate::pattern::Pattern;
use crate::position::{Cursor, Position};
use crate::time::Timestamp;

/// An event in the log. Serialises as the native JSON envelope.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recorded {
    /// The event.
    pub event: Event,
    /// Its position; later events of the same shard have higher positions.
    pub position: Position,
    /// When the engine received the event. Never before the time of an event with an earlier position.
    pub received_at: Timestamp,
}

impl Recorded {
    /// An event at the position that an engine gave it.
    pub const fn new(event: Event, position: Position, received_at: Timestamp) -> Self {
        Self {
            event,
            position,
            received_at,
        }
    }
}

/// The state of an event in one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EventState {
    /// Not delivered yet, or waiting after a release, a crash or the retry of a dead letter.
    Pending,
    /// Delivered, or failed and waiting for its next attempt.
    Processing,
    /// Handled or skipped.
    Done,
    /// In the dead letters.
    Dlq,
}

impl EventState {
    /// For engines: the state of an event that is in flight or waits in a group, with its failures.
    pub fn of_waiting(in_flight: bool, failures: &[Failure]) -> Self {
        let crashed_or_fresh = failures.last().is_none_or(|f| f.kind == FailureKind::Crash);
        if !in_flight && crashed_or_fresh {
            Self::Pending
        } else {
            Self::Processing
        }
    }

    /// The word the specification uses in its `status` column.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Processing => "processing",
            Self::Done => "done",
            Self::Dlq => "dlq",
        }
    }
}

/// The state of one event in one group, with its attempts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupState {
    /// The group.
    pub group: GroupName,
    /// Its state there.
    pub state: EventState,
    /// How many attempts have begun. For a finished event, how many are recorded: 0 if it never failed.
    pub attempts: u32,
    /// The failed attempts, in order. A finished event keeps them, including those before the retry of a
    /// dead letter.
    pub failures: Vec<Failure>,
    /// When the next attempt is due, if it waits for one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub due_at: Option<Timestamp>,
    /// Why the group skipped it, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// For a finished event that had failed there: when it finished, and its final attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
}

/// An engine whose log can be read directly.
pub trait Log: Send + Sync + 'static {
    /// The end of the log: after the newest event of every shard.
    fn head(&self) -> BoxFuture<'_, Result<Cursor>>;

    /// Reads up to `limit` events after a cursor that match one of the patterns. Returns them and the
    /// cursor up to which the log was searched: continue from there. Events of one shard come in its order.
    fn read(
        &self,
        after: Cursor,
        patterns: Vec<Pattern>,
        limit: usize,
    ) -> BoxFuture<'_, Result<(Vec<Arc<Recorded>>, Cursor)>>;

    /// Returns the cursor for `from`: reading after it yields the first matching event.
    fn resolve(&self, from: StartFrom, patterns: Vec<Pattern>) -> BoxFuture<'_, Result<Cursor>>;

    /// Waits until there is an event after a cursor. Cancel safe.
    fn wait_beyond(&self, cursor: Cursor) -> BoxFuture<'_, Result<()>>;
}

impl Serialize for Recorded {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let event = &self.event;
        let mut map = serializer.serialize_map(None)?;
        for (name, value) in envelope(event) {
            map.serialize_entry(name, &value)?;
            match name {
                "id" => map.serialize_entry("seq", &self.position)?,
                "occurred_at" => map.serialize_entry("received_at", &self.received_at)?,
                _ => {}
            }
        }
        match payload_json(event) {
            Some(json) => map.serialize_entry("payload", json)?,
            None => match std::str::from_utf8(event.payload()) {
                Ok(text) => map.serialize_entry("payload_text", text)?,
                Err(_) => map.serialize_entry("payload_hex", &Hex(event.payload()))?,
            },
        }
        map.end()
    }
}

/// The payload as raw JSON, if it is JSON; the bytes are not changed.
fn payload_json(event: &Event) -> Option<&serde_json::value::RawValue> {
    if event.is_json() {
        serde_json::from_slice(event.payload()).ok()
    } else {
        None
    }
}

/// Bytes in hex, written one by one without a copy: there may be many.
struct Hex<'a>(&'a [u8]);

impl std::fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Serialize for Hex<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(event: Event) -> serde_json::Value {
        let r = Recorded {
            event,
            position: Position::seq(7),
            received_at: Timestamp::EPOCH,
        };
        serde_json::to_value(&r).unwrap()
    }

    // conformance: embedded/metadata: the JSON of a recorded event has its metadata
    #[test]
    fn the_envelope_carries_the_payload_as_it_is() {
        let event = Event::builder("t")
            .payload("{\"z\":1, \"a\":1.50}")
            .meta("k", "v")
            .build()
            .unwrap();
        let r = Recorded {
            event,
            position: Position::seq(7),
            received_at: Timestamp::EPOCH,
        };
        let text = serde_json::to_string(&r).unwrap();
        assert!(text.contains("\"payload\":{\"z\":1, \"a\":1.50}"), "{text}");
        assert!(text.contains("\"metadata\":{\"k\":\"v\"}") && text.contains("\"seq\":7"));
    }

    #[test]
    fn payloads_that_are_not_json_are_shown_as_text_or_hex() {
        let text = Event::builder("t")
            .payload("hello")
            .content_type("text/plain")
            .build()
            .unwrap();
        assert_eq!(record(text)["payload_text"], "hello");
        let bytes = Event::builder("t")
            .payload(vec![0xff, 1])
            .content_type("x/y")
            .build()
            .unwrap();
        assert_eq!(record(bytes)["payload_hex"], "ff01");
    }
}
