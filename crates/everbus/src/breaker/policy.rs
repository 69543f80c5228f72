//! The policy of a breaker: when it opens, and what happens to events while it is open.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use everbus_core::{Code, Error, Result};
use serde::Serialize;

/// A longer duration is probably a mistake of units.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// What happens to events while the breaker of their consumer is open.
///
/// It is written `critical`, `standard` or `best_effort`; `best-effort` is accepted too.
///
/// ```
/// use everbus::Criticality;
/// assert_eq!(Criticality::default(), Criticality::Critical);
/// assert_eq!("best-effort".parse::<Criticality>()?.to_string(), "best_effort");
/// # Ok::<(), everbus::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Criticality {
    /// They wait until the breaker allows them. No attempt is counted, and an alert is published at once.
    #[default]
    Critical,
    /// They go to the dead letters, to be retried later, with a warning.
    Standard,
    /// They are acked and counted as skipped.
    BestEffort,
}

impl Criticality {
    /// The name, as it is written in configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Standard => "standard",
            Self::BestEffort => "best_effort",
        }
    }
}

impl fmt::Display for Criticality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Criticality {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "critical" => Ok(Self::Critical),
            "standard" => Ok(Self::Standard),
            "best_effort" | "best-effort" => Ok(Self::BestEffort),
            _ => Err(Error::new(
                Code::InvalidSetting,
                format!("{text:?} is not a criticality"),
            )
            .hint("it is critical, standard or best_effort")),
        }
    }
}

/// When a circuit breaker opens, and for how long.
///
/// It opens when, inside the rolling `window`, `fail_max` attempts failed one after another, or when at
/// least `fail_max` failed and they are at least `failure_rate` of all attempts. So a busy group with a few
/// errors per thousand continues, and a dependency that fails half of the time does not.
///
/// ```
/// use std::time::Duration;
/// use everbus::BreakerPolicy;
/// let policy = BreakerPolicy::new().fail_max(3).open_for(Duration::from_secs(10));
/// assert!(policy.validate().is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BreakerPolicy {
    /// This many failures open it (5).
    pub fail_max: u32,
    /// How long it stays open before one attempt is allowed as a probe (30 s).
    pub open_for: Duration,
    /// Attempts older than this are forgotten (60 s). The window has thirty buckets, so an attempt may be
    /// forgotten a thirtieth of the window early.
    pub window: Duration,
    /// Failures that are not consecutive must be at least this fraction of all attempts (0.5).
    pub failure_rate: f64,
}

impl Default for BreakerPolicy {
    fn default() -> Self {
        Self {
            fail_max: 5,
            open_for: Duration::from_secs(30),
            window: Duration::from_secs(60),
            failure_rate: 0.5,
        }
    }
}

impl BreakerPolicy {
    /// The defaults; the same as [`BreakerPolicy::default`].
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how many failures open it.
    #[must_use]
    pub fn fail_max(mut self, failures: u32) -> Self {
        self.fail_max = failures;
        self
    }

    /// Sets how long it stays open before a probe.
    #[must_use]
    pub fn open_for(mut self, open_for: Duration) -> Self {
        self.open_for = open_for;
        self
    }

    /// Sets how long an attempt is remembered.
    #[must_use]
    pub fn window(mut self, window: Duration) -> Self {
        self.window = window;
        self
    }

    /// Sets which fraction of the attempts must have failed, if the failures are not consecutive; 1.0 means
    /// all of them.
    #[must_use]
    pub fn failure_rate(mut self, rate: f64) -> Self {
        self.failure_rate = rate;
        self
    }

    /// Refuses invalid policies.
    pub fn validate(&self) -> Result<()> {
        let bad = |what: String, hint: &str| {
            Err(Error::new(Code::InvalidSetting, format!("circuit breaker: {what}")).hint(hint))
        };
        if self.fail_max == 0 {
            return bad(
                "fail_max is 0".into(),
                "5 failures is the default; 1 opens at the first",
            );
        }
        for (name, duration, hint) in [
            ("open_for", self.open_for, "30 s is the default"),
            ("window", self.window, "60 s is the default"),
        ] {
            if duration.is_zero() {
                return bad(format!("{name} is zero"), hint);
            }
            if duration > LONGEST {
                return bad(
                    format!("{name} is longer than a year: {duration:?}"),
                    "check the unit",
                );
            }
        }
        // Written so that NaN is refused as well.
        if !(self.failure_rate > 0.0 && self.failure_rate <= 1.0) {
            return bad(
                format!("a failure rate of {}", self.failure_rate),
                "it is above 0 and at most 1; 0.5, half of the attempts, is the default",
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: framework/criticality-names: critical, standard and best_effort are the levels
    // conformance: framework/criticality-default: critical unless said otherwise
    #[test]
    fn criticality_is_read_and_written_as_in_the_specification() {
        assert_eq!(Criticality::default(), Criticality::Critical);
        for (level, text) in [
            (Criticality::Critical, "critical"),
            (Criticality::Standard, "standard"),
            (Criticality::BestEffort, "best_effort"),
        ] {
            assert_eq!(level.to_string(), text);
            assert_eq!(text.parse::<Criticality>().unwrap(), level);
            assert_eq!(serde_json::to_value(level).unwrap(), text);
        }
        let dashed: Criticality = "best-effort".parse().unwrap();
        assert_eq!(dashed, Criticality::BestEffort);
        for wrong in ["", "Critical", "besteffort", "high"] {
            let e = wrong.parse::<Criticality>().unwrap_err();
            assert_eq!(e.code(), Code::InvalidSetting);
            assert!(e.hint_text().unwrap().contains("best_effort"));
        }
    }

    // conformance: framework/breaker-defaults: opens after 5 failures, for 30 s
    #[test]
    fn the_defaults_are_five_failures_and_thirty_seconds() {
        let policy = BreakerPolicy::default();
        assert_eq!(policy.fail_max, 5);
        assert_eq!(policy.open_for, Duration::from_secs(30));
        assert!(policy.validate().is_ok());
    }

    // conformance: handlers/breaker-settings: a breaker policy that makes no sense is refused
    #[test]
    fn nonsense_is_refused_with_a_hint() {
        let p = BreakerPolicy::new();
        for bad in [
            p.fail_max(0),
            p.open_for(Duration::ZERO),
            p.open_for(Duration::MAX),
            p.window(Duration::ZERO),
            p.window(LONGEST + Duration::from_secs(1)),
            p.failure_rate(0.0),
            p.failure_rate(-0.5),
            p.failure_rate(1.01),
            p.failure_rate(f64::NAN),
            p.failure_rate(f64::INFINITY),
        ] {
            let e = bad.validate().unwrap_err();
            assert_eq!(e.code(), Code::InvalidSetting, "{bad:?}");
            assert!(e.hint_text().is_some());
        }
        for good in [
            p.fail_max(u32::MAX),
            p.open_for(LONGEST),
            p.window(Duration::from_nanos(1)),
            p.failure_rate(1.0),
            p.failure_rate(f64::MIN_POSITIVE),
        ] {
            assert!(good.validate().is_ok(), "{good:?}");
        }
    }
}
