//! The times of a schedule: a cron expression in a time zone.

use std::time::Duration;

use croner::Cron;
use croner::parser::{CronParser, Seconds};
use everbus::{Code, Error, Result, Timestamp};
use jiff::Zoned;
use jiff::tz::TimeZone;

/// A cron expression in a time zone.
///
/// Five fields: minute, hour, day of month, month, day of week (0 or 7 is Sunday; names work too). Six fields: seconds
/// first. `@hourly`, `@daily`, `@weekly` and similar words are accepted. When clocks are set forward, a tick in the
/// skipped hour runs at the first moment after it. When clocks are set back, a tick in the repeated hour runs once.
#[derive(Clone, Debug)]
pub struct CronTimes {
    text: String,
    cron: Cron,
    zone: TimeZone,
    zone_name: String,
}

impl CronTimes {
    /// An expression in a time zone by its name, such as `Europe/Berlin` or `UTC`.
    pub fn new(expression: &str, zone: &str) -> Result<Self> {
        let parser = CronParser::builder().seconds(Seconds::Optional).build();
        let cron = parser.parse(expression).map_err(|error| {
            let what = format!("{expression:?} is not a cron expression: {error}");
            Error::new(Code::InvalidSetting, what)
                .hint("five fields: minute, hour, day of month, month, day of week; for example */15 * * * *")
        })?;
        let known = TimeZone::get(zone).map_err(|error| {
            Error::new(Code::InvalidSetting, format!("{zone:?} is not a time zone"))
                .caused_by(error)
                .hint("names like Europe/Berlin, America/New_York, UTC")
        })?;
        Ok(Self {
            text: expression.to_owned(),
            cron,
            zone: known,
            zone_name: zone.to_owned(),
        })
    }

    /// The expression.
    pub fn expression(&self) -> &str {
        &self.text
    }

    /// The name of the time zone.
    pub fn zone(&self) -> &str {
        &self.zone_name
    }

    /// The first tick after a time. `None` if there is none, for example for 30 February.
    pub fn next_after(&self, time: Timestamp) -> Option<Timestamp> {
        let next = self.cron.find_next_occurrence(&self.zoned(time)?, false);
        next.ok().as_ref().map(timestamp)
    }

    /// The last tick at or before a time.
    pub fn last_at(&self, time: Timestamp) -> Option<Timestamp> {
        let last = self.cron.find_previous_occurrence(&self.zoned(time)?, true);
        last.ok().as_ref().map(timestamp)
    }

    /// The ticks after `after` and up to `until`: at most the newest `limit` of them, oldest first.
    pub fn between(&self, after: Timestamp, until: Timestamp, limit: usize) -> Vec<Timestamp> {
        let mut ticks = Vec::new();
        let mut next = self.last_at(until);
        while let Some(tick) = next.filter(|tick| *tick > after && ticks.len() < limit) {
            ticks.push(tick);
            next = self.last_at(tick.minus(Duration::from_micros(1)));
        }
        ticks.reverse();
        ticks
    }

    /// The time from a tick to the next one.
    pub fn interval(&self, tick: Timestamp) -> Option<Duration> {
        self.next_after(tick).map(|next| next.since(tick))
    }

    fn zoned(&self, time: Timestamp) -> Option<Zoned> {
        let time = jiff::Timestamp::from_microsecond(time.as_micros()).ok()?;
        Some(time.to_zoned(self.zone.clone()))
    }
}

fn timestamp(time: &Zoned) -> Timestamp {
    Timestamp::from_micros(time.timestamp().as_microsecond())
}

/// The default time limit of a run: a minute less than the interval, or 90 % of an interval under 10 minutes.
pub(super) fn default_timeout(interval: Duration) -> Duration {
    match interval < Duration::from_secs(600) {
        true => interval.mul_f64(0.9),
        false => interval - Duration::from_secs(60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn ticks_of_an_expression() {
        let quarter = CronTimes::new("*/15 * * * *", "UTC").unwrap();
        let time = at("2026-11-17T20:01:30Z");
        assert_eq!(quarter.next_after(time), Some(at("2026-11-17T20:15:00Z")));
        assert_eq!(quarter.last_at(time), Some(at("2026-11-17T20:00:00Z")));
        let tick = at("2026-11-17T20:00:00Z");
        assert_eq!(quarter.last_at(tick), Some(tick));
        assert_eq!(quarter.next_after(tick), Some(at("2026-11-17T20:15:00Z")));
        assert_eq!(quarter.interval(tick), Some(Duration::from_secs(900)));
        let between = quarter.between(tick, at("2026-11-17T21:00:00Z"), 10);
        let expected = ["20:15", "20:30", "20:45", "21:00"];
        assert_eq!(
            between,
            expected.map(|t| at(&format!("2026-11-17T{t}:00Z")))
        );
        let newest = quarter.between(tick, at("2026-11-17T21:00:00Z"), 2);
        assert_eq!(newest, between[2..]);
    }

    #[test]
    fn a_time_zone_moves_with_its_clocks() {
        let nine = CronTimes::new("0 9 * * *", "Europe/Berlin").unwrap();
        let winter = nine.next_after(at("2026-01-10T12:00:00Z"));
        assert_eq!(winter, Some(at("2026-01-11T08:00:00Z")));
        let summer = nine.next_after(at("2026-07-10T12:00:00Z"));
        assert_eq!(summer, Some(at("2026-07-11T07:00:00Z")));
        // The clocks go back at 3 on 25 October 2026: half past two comes twice, and runs once.
        let twice = CronTimes::new("30 2 * * *", "Europe/Berlin").unwrap();
        let day = twice.between(at("2026-10-24T22:00:00Z"), at("2026-10-25T22:00:00Z"), 10);
        assert_eq!(day.len(), 1, "{day:?}");
    }

    #[test]
    fn what_is_no_schedule_is_refused() {
        for (expression, zone) in [
            ("61 * * * *", "UTC"),
            ("* * *", "UTC"),
            ("", "UTC"),
            ("* * * * *", "Middle/Earth"),
        ] {
            let error = CronTimes::new(expression, zone).unwrap_err();
            assert_eq!(error.code(), Code::InvalidSetting, "{expression} {zone}");
        }
        let never = CronTimes::new("0 0 30 2 *", "UTC").unwrap();
        assert_eq!(never.next_after(at("2026-01-10T12:00:00Z")), None);
    }

    // conformance: framework/schedule-cron: a run of the specification's 15 minutes has 14, shorter intervals 90 %
    #[test]
    fn the_timeout_is_below_the_interval() {
        let minutes = |n: u64| Duration::from_secs(60 * n);
        assert_eq!(default_timeout(minutes(15)), minutes(14));
        assert_eq!(default_timeout(minutes(10)), minutes(9));
        assert_eq!(default_timeout(minutes(1)), Duration::from_secs(54));
    }
}
