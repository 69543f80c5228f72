//! A record of the clock of a store: whether it can be trusted when data is removed by age.
//!
//! A wrong answer of a time server, or a suspended machine, can make a clock jump ahead. Removed data cannot be
//! restored, so retention waits until the clock has run without a jump for some time.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

const HOUR: Duration = Duration::from_secs(3600);

/// What is known about the clock; stored at every check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockRecord {
    /// The time at the last check.
    pub seen: Timestamp,
    /// Set while the clock is in doubt.
    pub doubt: Option<ClockDoubt>,
}

/// The clock was found far ahead of the last check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockDoubt {
    /// The last time seen before the jump.
    pub before: Timestamp,
    /// The time after the jump.
    pub found: Timestamp,
    /// How long the clock has run without a jump since.
    pub even_for: Duration,
}

impl ClockRecord {
    /// If the clock is more than this ahead of the last check, it is in doubt: it has jumped, or no check ran for this
    /// long.
    pub const LEAP: Duration = Duration::from_secs(3 * 24 * 3600);
    /// A clock in doubt is trusted again after it has run without a jump for this long.
    pub const PROOF: Duration = Duration::from_secs(24 * 3600);
    /// Each check adds at most this much to [`ClockDoubt::even_for`]. A running bus checks every hour.
    const STEP: Duration = Duration::from_secs(2 * 3600);

    /// Returns the record after another check. Without an earlier check, the clock is compared with the newest event,
    /// if there is one.
    #[must_use]
    pub fn look(known: Option<Self>, newest: Option<Timestamp>, now: Timestamp) -> Self {
        let first = || Self::certain(newest.unwrap_or(now));
        let Self { seen, doubt } = known.unwrap_or_else(first);
        let step = now.since(seen);
        let doubt = if now < seen {
            // The clock was set back. If it is back to about where it was before the jump, the doubt is over.
            doubt.filter(|doubt| now > doubt.before.plus(Self::LEAP))
        } else if step > Self::LEAP {
            let before = doubt.map_or(seen, |doubt| doubt.before);
            Some(ClockDoubt {
                before,
                found: now,
                even_for: Duration::ZERO,
            })
        } else {
            doubt
                .map(|doubt| ClockDoubt {
                    even_for: doubt.even_for + step.min(Self::STEP),
                    ..doubt
                })
                .filter(|doubt| doubt.even_for < Self::PROOF)
        };
        Self { seen: now, doubt }
    }

    /// The record of a clock that is known to be right.
    pub fn certain(now: Timestamp) -> Self {
        Self {
            seen: now,
            doubt: None,
        }
    }
}

impl ClockDoubt {
    /// How much longer the clock must run without a jump to be trusted again.
    pub fn left(&self) -> Duration {
        ClockRecord::PROOF.saturating_sub(self.even_for)
    }
}

impl std::fmt::Display for ClockDoubt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hours = self.left().as_secs().div_ceil(HOUR.as_secs());
        write!(
            f,
            "the clock jumped from {} to {} between two checks; retention waits until it has run without a jump for \
             {hours} more hours of running, or until an operator confirms that it is right",
            self.before, self.found
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn at(hours: u32) -> Timestamp {
        Timestamp::EPOCH.plus(hours * HOUR)
    }

    fn look(known: &mut Option<ClockRecord>, hours: u32) -> Option<ClockDoubt> {
        let record = ClockRecord::look(known.take(), None, at(hours));
        known.insert(record).doubt.clone()
    }

    // conformance: memory/retention-clock-doubt: a clock that leaps by more than three days is in doubt until it has gone evenly for a day
    #[test]
    fn a_leap_is_doubted_for_a_day_of_running() {
        let known = &mut None;
        assert_eq!(look(known, 0), None);
        assert_eq!(look(known, 72), None, "three days are a long weekend");
        let doubt = look(known, 72 + 73).unwrap();
        assert_eq!((doubt.before, doubt.found), (at(72), at(145)));
        for hour in 1..24 {
            let doubt = look(known, 145 + hour).unwrap();
            assert_eq!(doubt.left(), (24 - hour) * HOUR);
        }
        assert_eq!(look(known, 145 + 24), None);
    }

    #[test]
    fn nights_are_no_leaps_and_prove_little() {
        let known = &mut None;
        look(known, 0);
        assert!(look(known, 1000).is_some());
        // Each check proves two hours at most, however long ago the last check was.
        for night in 1..12 {
            assert!(look(known, 1000 + 16 * night).is_some(), "{night}");
        }
        assert_eq!(look(known, 1000 + 16 * 12), None);
    }

    // conformance: memory/retention-clock-again: a clock in doubt that leaps again has to prove itself anew
    #[test]
    fn a_second_leap_begins_the_day_anew() {
        let known = &mut None;
        look(known, 0);
        look(known, 1000);
        for hour in 1..24 {
            look(known, 1000 + hour);
        }
        let doubt = look(known, 2000).unwrap();
        assert_eq!((doubt.before, doubt.even_for), (at(0), Duration::ZERO));
        assert!(look(known, 2001).is_some());
    }

    // conformance: memory/retention-clock-back: a clock that is put right again is believed at once
    #[test]
    fn a_clock_that_is_put_back_is_believed() {
        let known = &mut None;
        look(known, 10);
        assert!(look(known, 1000).is_some());
        assert!(look(known, 900).is_some(), "still far ahead");
        assert_eq!(look(known, 12), None);
        assert_eq!(look(known, 13), None);
        assert_eq!(look(known, 2), None, "earlier takes nothing early");
    }

    #[test]
    fn the_first_look_is_compared_with_the_log() {
        let newest = Some(at(0));
        assert_eq!(ClockRecord::look(None, newest, at(72)).doubt, None);
        let doubt = ClockRecord::look(None, newest, at(73)).doubt.unwrap();
        assert_eq!(doubt.before, at(0));
        assert!(doubt.to_string().contains("24 more hours"), "{doubt}");
        assert_eq!(ClockRecord::look(None, None, at(73)).doubt, None);
        assert!(ClockRecord::LEAP >= 2 * DAY && ClockRecord::PROOF >= DAY);
    }
}
