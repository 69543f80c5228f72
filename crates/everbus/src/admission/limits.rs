//! How full a stream may be and what happens when it is: settings, their defaults, what is refused.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use everbus_core::{Code, Error, Result};
use serde::Serialize;

use crate::streams::canonical;

/// How long a publish waits for room or for its turn, unless set.
pub(super) const DEFAULT_WAIT: Duration = Duration::from_secs(5);
/// Longer waits are a mistake of units.
const LONGEST_WAIT: Duration = Duration::from_secs(366 * 24 * 3600);

/// What a publish into a full stream does.
///
/// It is written `wait`, `reject` or `drop_oldest`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OnFull {
    /// Waits for room, [`StreamLimit::wait`] at most, then fails with
    /// [`Code::Backpressure`](everbus_core::Code::Backpressure).
    #[default]
    Wait,
    /// Fails with [`Code::Backpressure`](everbus_core::Code::Backpressure) at once.
    Reject,
    /// Makes room: the oldest events of the stream that wait are skipped in every group, and the skips
    /// are recorded. What is being handled is left alone.
    ///
    /// A stream of 128 events or more gets room for a 128th of its length at once, so that a full one
    /// need not be trimmed at every publish.
    DropOldest,
}

impl OnFull {
    /// The name, as it is written in configuration.
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
                format!("{text:?} is nothing to do when a stream is full"),
            )
            .hint("it is wait, reject or drop_oldest")),
        }
    }
}

/// How many events of one type may wait for the group that is furthest behind.
///
/// ```
/// use everbus::{OnFull, StreamLimit};
/// let limit = StreamLimit::new(10_000).on_full(OnFull::DropOldest);
/// assert!(limit.validate().is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamLimit {
    /// At most this many events are owed.
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

    /// Refuses limits that make no sense.
    pub fn validate(&self) -> Result<()> {
        if self.max_len == 0 {
            return Err(Error::new(
                Code::InvalidSetting,
                "a stream with a max_len of 0 takes no events",
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

/// Refuses waits of more than a year.
pub(super) fn check_wait(what: &str, wait: Duration) -> Result<()> {
    if wait > LONGEST_WAIT {
        return Err(Error::new(
            Code::InvalidSetting,
            format!("{what} is longer than a year: {wait:?}"),
        )
        .hint("check the unit"));
    }
    Ok(())
}

/// The limits of all streams. A stream is named by an exact event type.
///
/// The system's own events (`system.…`) are never limited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// For each event type without a limit of its own, by itself; `None` if such types have none.
    pub default: Option<StreamLimit>,
    /// By event type.
    pub by_stream: BTreeMap<String, StreamLimit>,
}

impl Limits {
    /// No limits.
    pub fn new() -> Self {
        Self::default()
    }

    /// For each event type without a limit of its own.
    #[must_use]
    pub fn default_limit(mut self, limit: StreamLimit) -> Self {
        self.default = Some(limit);
        self
    }

    /// For one event type.
    #[must_use]
    pub fn stream(mut self, event_type: impl Into<String>, limit: StreamLimit) -> Self {
        self.by_stream.insert(event_type.into(), limit);
        self
    }

    /// Refuses limits that make no sense, naming the stream.
    pub fn validate(&self) -> Result<()> {
        if let Some(limit) = &self.default {
            limit.validate()?;
        }
        for (name, limit) in &self.by_stream {
            let bad = |what: &str, hint: &str| {
                Error::new(Code::InvalidSetting, format!("the stream {name:?}: {what}")).hint(hint)
            };
            if name.is_empty() || name.contains(['*', '>']) {
                return Err(bad(
                    "a limit is for one event type",
                    "name the type in full, for example orders.order.placed",
                ));
            }
            if is_system(name) {
                return Err(bad(
                    "the system's own events are never limited",
                    "remove this limit",
                ));
            }
            limit
                .validate()
                .map_err(|e| bad(e.message(), e.hint_text().unwrap_or_default()))?;
        }
        Ok(())
    }

    /// The limit of an event type, if it has one.
    pub(super) fn of(&self, event_type: &str) -> Option<&StreamLimit> {
        if is_system(event_type) {
            return None;
        }
        // Named streams are few and dotted; a type may be spelt the other way.
        let named = match self.by_stream.get(event_type) {
            None if event_type.contains(':') => self.by_stream.get(&canonical(event_type)),
            named => named,
        };
        named.or(self.default.as_ref())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.default.is_none() && self.by_stream.is_empty()
    }
}

/// Whether the system itself publishes this: alerts must get out.
pub(super) fn is_system(event_type: &str) -> bool {
    event_type.starts_with("system.")
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: issue-3/backpressure-modes: on_full is wait, reject or drop_oldest; wait 5 s by default
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

    // conformance: issue-3/backpressure-settings: a limit that makes no sense is refused
    #[test]
    fn nonsense_is_refused_with_a_hint() {
        let limit = StreamLimit::new(10);
        for bad in [
            StreamLimit::new(0),
            limit.wait(Duration::ZERO),
            limit.wait(Duration::MAX),
            limit.on_full(OnFull::Reject).wait(Duration::MAX),
        ] {
            let e = bad.validate().unwrap_err();
            assert_eq!(e.code(), Code::InvalidSetting, "{bad:?}");
            assert!(e.hint_text().is_some());
            assert!(Limits::new().default_limit(bad).validate().is_err());
            let named = Limits::new().stream("orders.order.placed", bad);
            let e = named.validate().unwrap_err();
            assert!(e.message().contains("orders.order.placed"), "{e}");
            assert!(!e.hint_text().unwrap().is_empty());
        }
        for name in ["", "orders.*", "orders.>", "system.alert"] {
            let e = Limits::new().stream(name, limit).validate().unwrap_err();
            assert_eq!(e.code(), Code::InvalidSetting, "{name:?}");
        }
        let reject = limit.on_full(OnFull::Reject).wait(Duration::ZERO);
        assert!(Limits::new().default_limit(reject).validate().is_ok());
        assert!(Limits::new().stream("a", limit).validate().is_ok());
    }

    // conformance: framework/backpressure-maxlen: a default cap and overrides by stream
    // conformance: issue-3/backpressure-system: the system's own events are never limited
    #[test]
    fn a_stream_has_its_own_limit_or_the_default_one_and_the_system_has_none() {
        let (own, other) = (StreamLimit::new(10), StreamLimit::new(100));
        let named = Limits::new().stream("prices.tick", own);
        assert_eq!(named.of("prices.tick"), Some(&own));
        assert_eq!(named.of("prices.tock"), None);
        let both = named.default_limit(other);
        assert_eq!(both.of("prices.tick"), Some(&own));
        assert_eq!(both.of("prices.tock"), Some(&other));
        assert_eq!(both.of("system.circuit_opened"), None);
        assert_eq!(both.of("systems.alert"), Some(&other));
    }
}
