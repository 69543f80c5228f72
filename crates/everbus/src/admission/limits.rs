//! The limits of streams, and which limits are refused.

use std::collections::BTreeMap;

use everbus_core::{Code, Error, Pattern, Result, Stream, StreamLimit, Streams, TypeLimits};

use crate::streams::canonical;

/// The limits of streams, by name.
///
/// The names are those of declared streams. Without declared streams each event type has a separate limit,
/// named by the type. The system's own events (`system.…`) are never limited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The limit of each stream that is not in `by_stream`; `None`: no limit.
    pub default: Option<StreamLimit>,
    /// The limits of single streams, by name.
    pub by_stream: BTreeMap<String, StreamLimit>,
}

impl Limits {
    /// No limits.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the limit of each stream that has no limit by name.
    #[must_use]
    pub fn default_limit(mut self, limit: StreamLimit) -> Self {
        self.default = Some(limit);
        self
    }

    /// Sets the limit of one stream.
    #[must_use]
    pub fn stream(mut self, name: impl Into<String>, limit: StreamLimit) -> Self {
        self.by_stream.insert(name.into(), limit);
        self
    }

    /// Refuses invalid limits, naming the stream.
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
                    "a limit is for one stream",
                    "name a declared stream, or without any an event type: orders.order.placed",
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

    /// Overrides the limits of declared streams with these. Refuses names that are not declared. Without
    /// declared streams the limits apply by type, and the table carries them for engines that trim.
    pub fn over(&self, streams: &Streams) -> Result<Streams> {
        let mut limited = streams.clone();
        if !streams.is_declared() {
            let limits = TypeLimits {
                default: self.default,
                by_type: self.by_stream.clone(),
            };
            return Ok(limited.with_type_limits(limits));
        }
        for (name, limit) in &self.by_stream {
            limited = limited.with(name, |stream| stream.limit(*limit))?;
        }
        let Some(default) = self.default else {
            return Ok(limited);
        };
        let system = Pattern::new("system.>")?;
        let unlimited =
            |stream: &&Stream| stream.limit.is_none() && stream.types().overlap(&system).is_none();
        for stream in streams.iter().filter(unlimited) {
            if self.by_stream.keys().all(|name| !stream.is_named(name)) {
                limited = limited.with(&stream.name, |stream| stream.limit(default))?;
            }
        }
        Ok(limited)
    }

    /// The limit of an event type without declared streams, if it has one.
    pub(super) fn of(&self, event_type: &str) -> Option<&StreamLimit> {
        if is_system(event_type) {
            return None;
        }
        // Names in `by_stream` use dots; an event type may use colons.
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

/// Whether the system itself publishes this type: alerts must never be blocked.
pub(super) fn is_system(event_type: &str) -> bool {
    event_type.starts_with("system.")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use everbus_core::OnFull;

    use super::*;

    // conformance: handlers/backpressure-settings: a limit that makes no sense is refused
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
    // conformance: handlers/backpressure-system: the system's own events are never limited
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
