//! The record of a failed attempt.

use std::borrow::Cow;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FailureKind {
    /// The handler returned an error.
    Error,
    /// The handler returned an error that no retry can fix.
    Permanent,
    /// The handler did not finish in time.
    Timeout,
    /// The handler panicked.
    Panic,
    /// The process died, or lost its lease, while the event was in flight.
    Crash,
    /// The event or its payload could not be decoded.
    Decode,
    /// No process had a handler for the event for too long.
    NoHandler,
    /// The payload has a version that no handler of this process reads.
    Version,
    /// The payload does not match its schema.
    Schema,
    /// Not an attempt: the circuit breaker was open.
    Rejected,
    /// Not an attempt: the stored event is damaged, so no handler got it.
    Corrupt,
}

impl FailureKind {
    /// Whether a delivery that ended with this failure counts as an attempt. Not for a rejection by an open circuit
    /// breaker, and not for damaged data: a delivery was counted, but no handler ran. True for
    /// [`NoHandler`](Self::NoHandler): such an event was not handed out, so no attempt was counted.
    pub const fn is_attempt(self) -> bool {
        !matches!(self, Self::Rejected | Self::Corrupt)
    }

    /// The kind as it is written in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Permanent => "permanent",
            Self::Timeout => "timeout",
            Self::Panic => "panic",
            Self::Crash => "crash",
            Self::Decode => "decode",
            Self::NoHandler => "no_handler",
            Self::Version => "version",
            Self::Schema => "schema",
            Self::Rejected => "rejected",
            Self::Corrupt => "corrupt",
        }
    }
}

/// One failed attempt: kept, in order, with the delivery and later with the dead letter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Which attempt it was, from 1.
    pub attempt: u32,
    /// When it failed.
    pub at: Timestamp,
    /// How it failed.
    pub kind: FailureKind,
    /// The name of the handler that failed, if one ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handler: Option<String>,
    /// The error, with its causes.
    pub error: String,
    /// Where it happened, if known: the backtrace of a panic or of an error that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backtrace: Option<String>,
    /// For a crash: whether this was the only event that its process had in flight, so that no other event
    /// can be the cause. Only such an event may be dead-lettered for crashes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alone: bool,
    /// How long the attempt ran, if a handler ran. In JSON `took_us`, in microseconds.
    #[serde(
        rename = "took_us",
        default,
        skip_serializing_if = "Option::is_none",
        with = "micros"
    )]
    pub took: Option<Duration>,
    /// The worker that made the attempt, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<String>,
}

/// The final attempt of an event in a group: how long it ran, and on which worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ran {
    /// How long the attempt ran, if a handler ran. In JSON `took_us`, in microseconds.
    #[serde(
        rename = "took_us",
        default,
        skip_serializing_if = "Option::is_none",
        with = "micros"
    )]
    pub took: Option<Duration>,
    /// The worker that made the attempt, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<String>,
}

impl Ran {
    /// An attempt of this worker. The duration is kept in whole microseconds.
    pub fn new(took: Option<Duration>, worker: impl Into<String>) -> Self {
        Self {
            took: took.map(whole_micros),
            worker: Some(worker.into()),
        }
    }
}

/// The end of an event in a group where it had failed before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ended {
    /// When the group handled or skipped it.
    pub at: Timestamp,
    /// The final attempt.
    #[serde(flatten)]
    pub ran: Ran,
}

/// The reason with which an ephemeral group, which has no dead letters, skips an event that failed for good.
pub fn given_up(last: Option<&Failure>) -> String {
    match last {
        Some(failure) => format!("given up: {}", cut_at(&failure.error, 1000)),
        None => "given up".to_owned(),
    }
}

/// Cuts a duration to whole microseconds, which is what engines keep.
fn whole_micros(took: Duration) -> Duration {
    Duration::from_micros(u64::try_from(took.as_micros()).unwrap_or(u64::MAX))
}

/// An optional duration as a number of microseconds.
mod micros {
    use super::{Deserialize, Duration, Serialize};

    #[expect(clippy::ref_option, reason = "serde passes a reference to the field")]
    pub(super) fn serialize<S: serde::Serializer>(
        took: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let micros = took.map(|took| u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        micros.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        let micros = Option::<u64>::deserialize(deserializer)?;
        Ok(micros.map(Duration::from_micros))
    }
}

/// Longer error texts are cut at this length, at a character boundary, with a mark.
pub const MAX_ERROR_BYTES: usize = 64 * 1024;

impl Failure {
    /// A failure; the text is cut at [`MAX_ERROR_BYTES`].
    pub fn new(attempt: u32, at: Timestamp, kind: FailureKind, error: impl Into<String>) -> Self {
        let error = cut(error.into());
        Self {
            attempt,
            at,
            kind,
            handler: None,
            error,
            backtrace: None,
            alone: false,
            took: None,
            worker: None,
        }
    }

    /// Adds how long the attempt ran, if a handler ran, and on which worker.
    #[must_use]
    pub fn on_worker(mut self, took: Option<Duration>, worker: impl Into<String>) -> Self {
        let ran = Ran::new(took, worker);
        (self.took, self.worker) = (ran.took, ran.worker);
        self
    }

    /// Adds where it happened; the text is cut at [`MAX_ERROR_BYTES`].
    #[must_use]
    pub fn with_backtrace(mut self, backtrace: impl Into<String>) -> Self {
        self.backtrace = Some(cut(backtrace.into()));
        self
    }

    /// Names the handler that failed.
    #[must_use]
    pub fn in_handler(mut self, name: impl Into<String>) -> Self {
        self.handler = Some(name.into());
        self
    }
}

fn cut(text: String) -> String {
    match cut_at(&text, MAX_ERROR_BYTES) {
        Cow::Borrowed(_) => text,
        Cow::Owned(cut) => cut,
    }
}

/// The text, cut at a character boundary, with a mark.
pub(crate) fn cut_at(text: &str, bytes: usize) -> Cow<'_, str> {
    if text.len() <= bytes {
        return Cow::Borrowed(text);
    }
    let end = text.floor_char_boundary(bytes);
    Cow::Owned(format!("{}… (cut)", &text[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_errors_are_cut_at_a_character_boundary() {
        let f = Failure::new(
            1,
            Timestamp::EPOCH,
            FailureKind::Error,
            "ä".repeat(MAX_ERROR_BYTES),
        );
        assert!(f.error.len() <= MAX_ERROR_BYTES + 16);
        assert!(f.error.ends_with("(cut)"));
    }

    #[test]
    fn duration_and_worker_come_back_and_older_records_have_none() {
        let took = Duration::from_nanos(1_234_567);
        let failure = Failure::new(1, Timestamp::EPOCH, FailureKind::Error, "x")
            .on_worker(Some(took), "host/1");
        let text = serde_json::to_string(&failure).unwrap();
        assert!(
            text.contains("\"took_us\":1234,\"worker\":\"host/1\""),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<Failure>(&text).unwrap(), failure);
        let old = r#"{"attempt":1,"at":"1970-01-01T00:00:00Z","kind":"error","error":"x"}"#;
        let old: Failure = serde_json::from_str(old).unwrap();
        assert_eq!((old.took, old.worker), (None, None));
    }

    #[test]
    fn the_text_of_a_kind_is_its_json_form() {
        for kind in [
            FailureKind::Error,
            FailureKind::NoHandler,
            FailureKind::Crash,
            FailureKind::Version,
            FailureKind::Schema,
            FailureKind::Rejected,
            FailureKind::Corrupt,
        ] {
            assert_eq!(
                serde_json::to_string(&kind).unwrap(),
                format!("\"{}\"", kind.as_str())
            );
        }
    }
}
