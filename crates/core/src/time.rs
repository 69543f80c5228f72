//! Points in time, in microseconds of UTC, shown and read as RFC 3339.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Code, Error};

/// A point in time with microsecond precision.
///
/// ```
/// use everbus_core::Timestamp;
/// let t: Timestamp = "2026-01-02T03:04:05.000006Z".parse()?;
/// assert_eq!(t.to_string(), "2026-01-02T03:04:05.000006Z");
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

/// 9999-12-30T22:00:00Z, the last time that the calendar library can format.
const LAST: i64 = 253_402_207_200_000_000;
/// 0000-01-01T00:00:00Z, the first one.
const FIRST: i64 = -62_167_219_200_000_000;

impl Timestamp {
    /// The Unix epoch.
    pub const EPOCH: Timestamp = Timestamp(0);

    /// From microseconds since the Unix epoch; values outside the years 0–9999 are clamped.
    pub const fn from_micros(micros: i64) -> Self {
        if micros > LAST {
            Self(LAST)
        } else if micros < FIRST {
            Self(FIRST)
        } else {
            Self(micros)
        }
    }

    /// Microseconds since the Unix epoch.
    pub const fn as_micros(self) -> i64 {
        self.0
    }

    /// This time plus a duration, clamped to the valid range.
    #[must_use]
    pub fn plus(self, by: Duration) -> Self {
        let by = i64::try_from(by.as_micros()).unwrap_or(i64::MAX);
        Self::from_micros(self.0.saturating_add(by))
    }

    /// This time minus a duration, clamped to the valid range.
    #[must_use]
    pub fn minus(self, by: Duration) -> Self {
        let by = i64::try_from(by.as_micros()).unwrap_or(i64::MAX);
        Self::from_micros(self.0.saturating_sub(by))
    }

    /// How long after `earlier` this is; zero if it is not later.
    pub fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

/// The form of every time, with the places of its digits.
const FORM: [u8; 27] = *b"0000-00-00T00:00:00.000000Z";

impl fmt::Display for Timestamp {
    /// Formats the time without the calendar library, for speed: every event in an answer has two times.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, micros) = (self.0.div_euclid(1_000_000), self.0.rem_euclid(1_000_000));
        let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        let (year, month, day) = date(days);
        let mut text = FORM;
        for (last, width, number) in [
            (3, 4, year),
            (6, 2, month),
            (9, 2, day),
            (12, 2, second / 3600),
            (15, 2, second / 60 % 60),
            (18, 2, second % 60),
            (25, 6, micros),
        ] {
            let mut left = number.unsigned_abs();
            for place in text[last + 1 - width..=last].iter_mut().rev() {
                *place += (left % 10) as u8;
                left /= 10;
            }
        }
        f.write_str(std::str::from_utf8(&text).unwrap_or_default())
    }
}

/// The year, month and day of a number of days since 1970.
fn date(days: i64) -> (i64, i64, i64) {
    // Years begin in March here, so that the leap day is the last of its year; 400 years have 146,097 days.
    let since_march_0 = days + 719_468;
    let (era, day) = (
        since_march_0.div_euclid(146_097),
        since_march_0.rem_euclid(146_097),
    );
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + i64::from(month <= 2), month, day)
}

impl FromStr for Timestamp {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        s.parse::<jiff::Timestamp>()
            .map(|t| Self(t.as_microsecond()))
            .map_err(|e| {
                Error::new(Code::InvalidSetting, format!("{s:?} is not a time: {e}"))
                    .hint("write times as RFC 3339, for example 2026-01-31T12:00:00Z")
            })
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: outbox/1-occurred-at: times are RFC 3339 in UTC
    // conformance: framework/structure-timestamp: times are RFC 3339 in UTC
    #[test]
    fn text_form_round_trips_and_sorts_like_the_number() {
        let a = Timestamp::from_micros(1_700_000_000_000_000);
        let b = Timestamp::from_micros(1_700_000_000_000_001);
        assert_eq!(a.to_string().parse::<Timestamp>().unwrap(), a);
        assert!(a.to_string() < b.to_string());
        assert_eq!(a.to_string(), "2023-11-14T22:13:20.000000Z");
    }

    #[test]
    fn every_time_is_written_as_the_calendar_library_writes_it() {
        // Steps of 11 days and some hours meet every month, and the days around each 1 March.
        let mut at = FIRST;
        while at < LAST {
            for near in [at, at + 86_399_999_999, at - at.rem_euclid(86_400_000_000)] {
                let near = near.clamp(FIRST, LAST);
                let wanted = jiff::Timestamp::from_microsecond(near).unwrap();
                assert_eq!(
                    Timestamp::from_micros(near).to_string(),
                    format!("{wanted:.6}")
                );
            }
            at += 987_654_321_123;
        }
    }

    #[test]
    fn offsets_are_understood_and_nonsense_is_refused() {
        let t: Timestamp = "2023-11-14T23:13:20+01:00".parse().unwrap();
        assert_eq!(t.as_micros(), 1_700_000_000_000_000);
        let e = "yesterday".parse::<Timestamp>().unwrap_err();
        assert_eq!(e.code(), Code::InvalidSetting);
    }

    #[test]
    fn arithmetic_clamps_instead_of_overflowing() {
        let end = Timestamp::EPOCH.plus(Duration::MAX);
        assert!(end.to_string().starts_with("9999-12-30"));
        assert_eq!(
            Timestamp::EPOCH.minus(Duration::MAX).to_string(),
            "0000-01-01T00:00:00.000000Z"
        );
        assert_eq!(Timestamp::EPOCH.since(end), Duration::ZERO);
    }
}
