//! The size limit of a stream, and what happens when it is full.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;

use crate::error::{Code, Error, Result};

/// How long a publish waits for room or for the rate limit, by default.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(5);
/// A longer wait is probably a mistake of units.
const LONGEST_WAIT: Duration = Duration::from_secs(366 * 24 * 3600);

/// What a publish into a full stream does.
///
/// It is written `wait`, `reject` or `drop_oldest`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnFull {
    /// Waits for room, [`StreamLimit::wait`] at most, then fails with
    /// [`Code::Backpressure`](crate::Code::Backpressure).
    #[default]
    Wait,
    /// Fails with [`Code::Backpressure`](crate::Code::Backpressure) at once.
    Reject,
    /// Makes room: the oldest waiting events of the stream are skipped in every group, and the skips are recorded.
    /// Events that are being handled are not skipped.
    ///
    /// A stream of 128 events or more gets room for a 128th of its length at once, so that a full stream
    /// need not be trimmed at every publish.
    DropOldest,
}

impl OnFull {
    /// The name in the configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Reject => "reject",
            Self::DropOldest => "drop_oldest",
        }
    }
}

impl fmt::Display for OnFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for OnFull {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "wait" => Ok(Self::Wait),
            "reject" => Ok(Self::Reject),
            "drop_oldest" => Ok(Self::DropOldest),
            _ => Err(Error::new(
                Code::InvalidSetting,
                format!("{text:?} is not a value of on_full"),
            )
            .hint("it is wait, reject or drop_oldest")),
        }
    }
}

/// How many events of a stream may be pending in the group that is furthest behind.
///
/// ```
/// use everbus_core::{OnFull, StreamLimit};
/// let limit = StreamLimit::new(10_000).on_full(OnFull::DropOldest);
/// assert!(limit.validate().is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamLimit {
    /// At most this many events are pending.
    pub max_len: u64,
    /// What a publish does when there is no room.
    pub on_full: OnFull,
    /// How long a publish waits for room at most (5 s), with [`OnFull::Wait`].
    pub wait: Duration,
}

impl StreamLimit {
    /// A limit at which publishers wait 5 s for room.
    pub fn new(max_len: u64) -> Self {
        Self {
            max_len,
            on_full: OnFull::default(),
            wait: DEFAULT_WAIT,
        }
    }

    /// What a publish does when there is no room.
    #[must_use]
    pub fn on_full(mut self, on_full: OnFull) -> Self {
        self.on_full = on_full;
        self
    }

    /// How long a publish waits for room at most.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Refuses invalid limits.
    pub fn validate(&self) -> Result<()> {
        if self.max_len == 0 {
            return Err(Error::new(
                Code::InvalidSetting,
                "a stream with a max_len of 0 accepts no events",
            )
            .hint("leave max_len out for a stream without a limit"));
        }
        if self.wait.is_zero() && self.on_full == OnFull::Wait {
            return Err(
                Error::new(Code::InvalidSetting, "the wait for room is zero")
                    .hint("5 s is the default; to fail at once say on_full: reject"),
            );
        }
        check_wait("the wait for room", self.wait)
    }
}

/// Refuses waits of more than a year; `what` begins the message.
pub fn check_wait(what: &str, wait: Duration) -> Result<()> {
    if wait > LONGEST_WAIT {
        return Err(Error::new(
            Code::InvalidSetting,
            format!("{what} is longer than a year: {wait:?}"),
        )
        .hint("check the unit"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: handlers/backpressure-modes: on_full is wait, reject or drop_oldest; wait 5 s by default
    #[test]
    fn what_to_do_when_full_is_read_and_written_in_the_words_of_the_configuration() {
        for (mode, text) in [
            (OnFull::Wait, "wait"),
            (OnFull::Reject, "reject"),
            (OnFull::DropOldest, "drop_oldest"),
        ] {
            assert_eq!(mode.to_string(), text);
            assert_eq!(text.parse::<OnFull>().unwrap(), mode);
            assert_eq!(serde_json::to_value(mode).unwrap(), text);
        }
        let e = "block".parse::<OnFull>().unwrap_err();
        assert_eq!(e.code(), Code::InvalidSetting);
        assert!(e.hint_text().unwrap().contains("drop_oldest"));
        let limit = StreamLimit::new(7);
        assert_eq!(limit.on_full, OnFull::Wait);
        assert_eq!((limit.max_len, limit.wait), (7, Duration::from_secs(5)));
    }
}
