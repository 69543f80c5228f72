//! Times as people write and read them.

use std::time::Duration;

use everbus_core::{Clock as _, StartFrom, SystemClock, Timestamp};

/// Reads a time: RFC 3339, a date, or how long ago (`90s`, `15m`, `2h`, `7d`).
pub(crate) fn parse(text: &str) -> Result<Timestamp, String> {
    if let Some(ago) = age(text) {
        return Ok(SystemClock.now().minus(ago));
    }
    let bare_date = text.len() == 10 && text.bytes().filter(|b| *b == b'-').count() == 2;
    let full = if bare_date {
        format!("{text}T00:00:00Z")
    } else {
        text.to_owned()
    };
    full.parse::<Timestamp>().map_err(|_| {
        format!(
            "{text:?} is not a time; write 2026-01-31T12:00:00Z, 2026-01-31, \
             or how long ago: 90s, 15m, 2h, 7d"
        )
    })
}

fn age(text: &str) -> Option<Duration> {
    let unit = match text.chars().last()? {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return None,
    };
    let number: u64 = text[..text.len() - 1].parse().ok()?;
    Some(Duration::from_secs(number.checked_mul(unit)?))
}

/// Reads where to start: `new`, `first`, `last` or a time.
pub(crate) fn parse_start(text: &str) -> Result<StartFrom, String> {
    match text {
        "new" => Ok(StartFrom::New),
        "first" => Ok(StartFrom::First),
        "last" => Ok(StartFrom::Last),
        time => parse(time)
            .map(StartFrom::Time)
            .map_err(|e| format!("{e}; or one of new, first, last")),
    }
}

/// Reads a whole or decimal number of days.
pub(crate) fn parse_days(text: &str) -> Result<Duration, String> {
    let days: f64 = text
        .strip_suffix('d')
        .unwrap_or(text)
        .parse()
        .map_err(|_| format!("{text:?} is not a number of days"))?;
    let seconds = days * 86_400.0;
    if !(0.0..=86_400.0 * 366_000.0).contains(&seconds) {
        return Err(format!("{text:?} days is out of range"));
    }
    Duration::try_from_secs_f64(seconds).map_err(|e| format!("{text:?} days: {e}"))
}

/// Reads a positive number of seconds.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .strip_suffix('s')
        .unwrap_or(text)
        .parse()
        .map_err(|_| format!("{text:?} is not a number of seconds"))?;
    if !(seconds > 0.0 && seconds <= 86_400.0 * 366.0) {
        return Err(format!("{text:?} seconds is out of range"));
    }
    Duration::try_from_secs_f64(seconds).map_err(|e| format!("{text:?} seconds: {e}"))
}

/// A time to the millisecond: `2026-01-31 12:00:00.123 UTC`.
pub(crate) fn shown(time: Timestamp) -> String {
    format!("{} UTC", stamp(time))
}

/// The same without the zone, for lines that come one after another.
pub(crate) fn stamp(time: Timestamp) -> String {
    let full = time.to_string();
    full.get(..23).unwrap_or(&full).replace('T', " ")
}

/// How long ago, in one or two units.
pub(crate) fn ago(time: Timestamp) -> String {
    format!("{} ago", lasting(SystemClock.now().since(time)))
}

/// A duration in one or two units: `850 ms`, `12 s`, `3 m 20 s`, `2 h 5 m`, `4 d 1 h`.
pub(crate) fn lasting(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{} ms", duration.as_millis()),
        1..60 => format!("{seconds} s"),
        60..3600 => format!("{} m {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_in_every_form() {
        assert_eq!(
            parse("2026-01-31").unwrap().to_string(),
            "2026-01-31T00:00:00.000000Z"
        );
        assert_eq!(
            parse("2026-01-31T13:00:00+01:00").unwrap(),
            parse("2026-01-31T12:00:00Z").unwrap()
        );
        let then = parse("1h").unwrap();
        let hour = SystemClock.now().since(then).as_secs();
        assert!((3600..3700).contains(&hour), "{hour}");
        for bad in [
            "",
            "yesterday",
            "1y",
            "-5m",
            "2026-13-01",
            "999999999999999999999d",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_start("last").unwrap(), StartFrom::Last);
    }

    #[test]
    fn negative_and_absurd_numbers_of_days_are_refused() {
        assert_eq!(parse_days("30").unwrap(), Duration::from_secs(30 * 86_400));
        assert_eq!(parse_days("0").unwrap(), Duration::ZERO);
        for bad in ["-1", "x", "1e99", "NaN", "inf"] {
            assert!(parse_days(bad).is_err(), "{bad}");
        }
        for bad in ["0", "-1", "NaN"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_and_durations_are_shown_readably() {
        let time: Timestamp = "2026-01-31T12:00:00.123456Z".parse().unwrap();
        assert_eq!(shown(time), "2026-01-31 12:00:00.123 UTC");
        assert_eq!(stamp(time), "2026-01-31 12:00:00.123");
        assert_eq!(lasting(Duration::from_millis(850)), "850 ms");
        assert_eq!(lasting(Duration::from_secs(200)), "3 m 20 s");
        assert_eq!(lasting(Duration::from_secs(90_000)), "1 d 1 h");
    }
}
