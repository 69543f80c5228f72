//! The retry policy: when a failed event is retried, and when it fails for good.

use std::time::Duration;

use crate::error::{Code, Error, Result};

/// How often and when a failed event is retried.
///
/// Attempt 1 is immediate; attempt *n* waits `min(base · multiplier^(n-2), max)`. The defaults are
/// those of the specification: 3 retries (so 4 attempts), 1 s, doubling, at most 30 s, no jitter.
///
/// ```
/// use std::time::Duration;
/// use everbus_core::RetryPolicy;
/// let policy = RetryPolicy::default();
/// assert_eq!(policy.max_attempts(), 4);
/// assert_eq!(policy.delay_before(2), Duration::from_secs(1));
/// assert_eq!(policy.delay_before(4), Duration::from_secs(4));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryPolicy {
    max_retries: u32,
    base_delay: Duration,
    max_delay: Duration,
    multiplier: f64,
    jitter: f64,
}

/// The longest delay; a longer one is probably a mistake of units.
pub const LONGEST_DELAY: Duration = Duration::from_secs(366 * 24 * 3600);

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            max_retries: 3,
            base_delay: Duration::from_secs(1),
            max_delay: Duration::from_secs(30),
            multiplier: 2.0,
            jitter: 0.0,
        }
    }
}

impl RetryPolicy {
    /// The defaults; the same as [`RetryPolicy::default`].
    pub fn new() -> Self {
        Self::default()
    }

    /// One attempt and no retry.
    pub fn never() -> Self {
        Self::default().max_retries(0)
    }

    /// How many retries follow the first attempt.
    #[must_use]
    pub fn max_retries(mut self, retries: u32) -> Self {
        self.max_retries = retries;
        self
    }

    /// The wait before the second attempt.
    #[must_use]
    pub fn base_delay(mut self, delay: Duration) -> Self {
        self.base_delay = delay;
        self
    }

    /// The longest wait.
    #[must_use]
    pub fn max_delay(mut self, delay: Duration) -> Self {
        self.max_delay = delay;
        self
    }

    /// The factor by which each wait grows.
    #[must_use]
    pub fn multiplier(mut self, multiplier: f64) -> Self {
        self.multiplier = multiplier;
        self
    }

    /// Spreads each wait by up to this fraction, in both directions: 0.1 is ±10 %. Off by default.
    #[must_use]
    pub fn jitter(mut self, fraction: f64) -> Self {
        self.jitter = fraction;
        self
    }

    /// All attempts, the first included.
    pub fn max_attempts(&self) -> u32 {
        self.max_retries.saturating_add(1)
    }

    /// How long to wait before attempt `attempt` (from 1), without jitter.
    pub fn delay_before(&self, attempt: u32) -> Duration {
        if attempt < 2 {
            return Duration::ZERO;
        }
        let exponent = i32::try_from(attempt - 2).unwrap_or(i32::MAX);
        let seconds = self.base_delay.as_secs_f64() * self.multiplier.powi(exponent);
        // An infinite or NaN product is "longer than any maximum".
        if seconds >= self.max_delay.as_secs_f64() || !seconds.is_finite() {
            return self.max_delay;
        }
        Duration::try_from_secs_f64(seconds).unwrap_or(self.max_delay)
    }

    /// How long to wait before attempt `attempt`, spread by the jitter; `random` is in `0.0..1.0`.
    pub fn jittered_delay_before(&self, attempt: u32, random: f64) -> Duration {
        let delay = self.delay_before(attempt);
        if self.jitter == 0.0 {
            return delay;
        }
        let factor = 1.0 + self.jitter * (2.0 * random.clamp(0.0, 1.0) - 1.0);
        Duration::try_from_secs_f64(delay.as_secs_f64() * factor.max(0.0)).unwrap_or(delay)
    }

    /// Whether another attempt follows failed attempt `attempt`, and after how long.
    pub fn after_failure(&self, attempt: u32, random: f64) -> Option<Duration> {
        (attempt < self.max_attempts())
            .then(|| self.jittered_delay_before(attempt.saturating_add(1), random))
    }

    /// Refuses invalid policies.
    pub fn validate(&self) -> Result<()> {
        let bad = |what: &str, hint: &str| {
            Err(Error::new(Code::InvalidSetting, format!("retry policy: {what}")).hint(hint))
        };
        if !self.multiplier.is_finite() || self.multiplier < 1.0 {
            return bad(
                "the multiplier must be 1 or more",
                "2.0 doubles the wait each time",
            );
        }
        if !self.jitter.is_finite() || !(0.0..=1.0).contains(&self.jitter) {
            return bad(
                "the jitter must be between 0 and 1",
                "0.1 spreads the wait by ±10 %",
            );
        }
        if self.max_retries > 0 && self.base_delay.is_zero() {
            return bad(
                "the first wait is zero",
                "1 s is the default; without a wait a failing event would keep the group busy",
            );
        }
        if self.max_delay < self.base_delay {
            return bad(
                "the longest wait is shorter than the first",
                "raise max_delay or lower base_delay",
            );
        }
        if self.max_delay > LONGEST_DELAY {
            return bad("a wait of more than a year", "check the unit of max_delay");
        }
        if self.max_retries > 1_000_000 {
            return bad(
                "more than a million retries",
                "an event that never succeeds would never be dead-lettered",
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // conformance: embedded/retry-defaults: 3 retries, 1 s, at most 30 s, times 2
    // conformance: embedded/backoff-schedule: attempt n waits min(base * multiplier^(n-2), longest)
    // conformance: rule-8: the schedule and its defaults
    // conformance: omni/subscribe-retry-defaults: 3 retries, 1000 ms before the first
    #[test]
    fn the_default_waits_are_those_of_the_specification() {
        let p = RetryPolicy::default();
        let waits: Vec<u64> = (1..=4)
            .map(|n| p.delay_before(n).as_millis() as u64)
            .collect();
        assert_eq!(waits, [0, 1000, 2000, 4000]);
        assert_eq!(p.max_attempts(), 4);
        assert_eq!(p.after_failure(4, 0.5), None);
        assert_eq!(p.after_failure(3, 0.5), Some(Duration::from_secs(4)));
        assert_eq!(p.max_retries(100).delay_before(7), Duration::from_secs(30));
    }

    // conformance: bus/absurd-durations: a policy that makes no sense is refused
    #[test]
    fn nonsense_is_refused_with_a_hint() {
        let p = RetryPolicy::default();
        for bad in [
            p.multiplier(0.5),
            p.multiplier(f64::NAN),
            p.jitter(1.5),
            p.jitter(f64::INFINITY),
            p.base_delay(Duration::ZERO),
            p.max_delay(Duration::from_millis(1)),
            p.max_delay(Duration::MAX),
            p.max_retries(u32::MAX),
        ] {
            let e = bad.validate().unwrap_err();
            assert_eq!(e.code(), Code::InvalidSetting);
            assert!(e.hint_text().is_some());
        }
        assert!(p.validate().is_ok());
        assert!(RetryPolicy::never().validate().is_ok());
        let never = RetryPolicy::never().base_delay(Duration::ZERO);
        assert!(never.validate().is_ok(), "nothing waits");
    }

    proptest! {
        #[test]
        fn waits_grow_up_to_the_maximum_and_never_panic(
            base in 1u64..10_000_000, max in 0u64..100_000_000, mult in 1.0f64..100.0,
            attempt in 1u32..10_000, jitter in 0.0f64..1.0, random in 0.0f64..1.0,
        ) {
            let max = Duration::from_millis(base.max(max));
            let p = RetryPolicy::new().base_delay(Duration::from_millis(base)).max_delay(max)
                .multiplier(mult).jitter(jitter).max_retries(20_000);
            prop_assert!(p.validate().is_ok());
            prop_assert!(p.delay_before(attempt) <= p.delay_before(attempt + 1));
            prop_assert!(p.delay_before(attempt) <= max);
            let spread = p.jittered_delay_before(attempt, random).as_secs_f64();
            prop_assert!(spread <= p.delay_before(attempt).as_secs_f64() * (1.0 + jitter) + 1e-6);
        }
    }
}
