//! Times in the forms that people write and read.

use std::time::Duration;

use everbus_core::{Clock as _, StartFrom, SystemClock, Timestamp};

/// Nothing here is older than a hundred years; a longer age is a mistake of units.
const OLDEST_DAYS: u64 = 36_525;
/// Clocks of several machines may differ by this much.
const SKEW: Duration = Duration::from_secs(60);

/// Reads a time: RFC 3339, a date, a date with a time of day (in UTC unless it names a zone), or how
/// long ago (`90s`, `15m`, `2h`, `7d`).
pub(crate) fn parse(text: &str) -> Result<Timestamp, String> {
    match age(text) {
        Some(Ok(ago)) => return Ok(SystemClock.now().minus(ago)),
        Some(Err(out_of_range)) => return Err(out_of_range),
        None => {}
    }
    full_time(text).parse::<Timestamp>().map_err(|_| {
        format!(
            "{text:?} is not a time; write 2026-01-31T12:00:00Z, 2026-01-31 12:00 (UTC), \
             2026-01-31, or how long ago: 90s, 15m, 2h, 7d"
        )
    })
}

/// Reads a time that may be in the future, so an age is refused.
pub(crate) fn parse_at(text: &str) -> Result<Timestamp, String> {
    if age(text).is_some() {
        return Err(format!("{text:?} is a duration; --after takes those"));
    }
    parse(text)
}

/// Reads a time that is not in the future.
pub(crate) fn parse_past(text: &str) -> Result<Timestamp, String> {
    let time = parse(text)?;
    if time > SystemClock.now().plus(SKEW) {
        return Err(format!("{text:?} lies in the future"));
    }
    Ok(time)
}

fn age(text: &str) -> Option<Result<Duration, String>> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let unit = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return None,
    };
    let digits = number.strip_prefix('-').unwrap_or(number);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let seconds = number.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
    Some(match seconds {
        Some(seconds) if seconds <= OLDEST_DAYS * 86_400 => Ok(Duration::from_secs(seconds)),
        _ => Err(format!(
            "{text:?} ago is out of range: between 0s and {OLDEST_DAYS}d"
        )),
    })
}

/// Reads for how long: `90s`, `15m`, `12h`, `30d`; more than nothing.
pub(crate) fn parse_length(text: &str) -> Result<Duration, String> {
    match age(text) {
        Some(Ok(length)) if !length.is_zero() => Ok(length),
        Some(_) => Err(format!(
            "{text:?} is out of range: more than 0s and at most {OLDEST_DAYS}d"
        )),
        None => Err(format!(
            "{text:?} is not a length of time; write 90s, 15m, 12h or 30d"
        )),
    }
}

/// Adds the parts of a time that people leave out: `2026-01-31 12:00` is `2026-01-31T12:00:00Z`.
fn full_time(text: &str) -> String {
    let text = text.strip_suffix(" UTC").unwrap_or(text);
    let Some((date, rest)) = text.split_at_checked(10) else {
        return text.to_owned();
    };
    if rest.is_empty() {
        return format!("{date}T00:00:00Z");
    }
    let Some(rest) = rest.strip_prefix([' ', 'T', 't']) else {
        return text.to_owned();
    };
    let zone = rest.find(['Z', 'z', '+', '-']).unwrap_or(rest.len());
    let (time, zone) = rest.split_at(zone);
    let seconds = if time.len() == 5 { ":00" } else { "" };
    let zone = if zone.is_empty() { "Z" } else { zone };
    format!("{date}T{time}{seconds}{zone}")
}

/// Reads where to start: `new`, `first`, `last` or a time.
pub(crate) fn parse_start(text: &str) -> Result<StartFrom, String> {
    match text {
        "new" => Ok(StartFrom::New),
        "first" => Ok(StartFrom::First),
        "last" => Ok(StartFrom::Last),
        time => parse_past(time)
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
        return Err(format!("{text:?} days is out of range: 0 or more"));
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

/// Reads how long to wait: `10`, `10s`, `500ms`, `2m`; at most an hour.
pub(crate) fn parse_wait(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text {
        _ if text.ends_with("ms") => (&text[..text.len() - 2], 0.001),
        _ if text.ends_with('s') => (&text[..text.len() - 1], 1.0),
        _ if text.ends_with('m') => (&text[..text.len() - 1], 60.0),
        _ => (text, 1.0),
    };
    let number: f64 = number
        .parse()
        .map_err(|_| format!("{text:?} is not a duration such as 10s, 500ms or 2m"))?;
    let seconds = number * unit;
    if !(0.0..=3600.0).contains(&seconds) {
        return Err(format!("{text:?} is out of range: between 0s and 60m"));
    }
    Duration::try_from_secs_f64(seconds).map_err(|e| format!("{text:?}: {e}"))
}

/// Reads a limit: `500ms`, `90s`, `15m`, `12h`, `30d`; more than nothing.
pub(crate) fn parse_limit(text: &str) -> Result<Duration, String> {
    match parse_wait(text) {
        Ok(limit) if !limit.is_zero() => Ok(limit),
        _ => parse_length(text),
    }
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
            "2026-01-31 25:00",
            "2026-01-31x12:00",
            "999999999999999999999d",
            "40000d",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_start("last").unwrap(), StartFrom::Last);
        let noon = parse("2026-01-31T12:00:00Z").unwrap();
        for same in [
            "2026-01-31 12:00",
            "2026-01-31 12:00:00",
            "2026-01-31T12:00",
            "2026-01-31T12:00:00",
            "2026-01-31 12:00Z",
            "2026-01-31 13:00+01:00",
            "2026-01-31 12:00:00.000",
            &shown(noon),
        ] {
            assert_eq!(parse(same), Ok(noon), "{same}");
        }
    }

    #[test]
    fn a_start_in_the_future_is_refused() {
        assert!(parse_start("2999-01-01").is_err_and(|e| e.contains("future")));
        assert!(parse("2999-01-01").is_ok(), "an end may lie there");
        assert!(parse_start("-5m").is_err_and(|e| e.contains("out of range")));
    }

    #[test]
    fn waits_have_units_and_an_end() {
        assert_eq!(parse_limit("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_limit("2h"), Ok(Duration::from_secs(7200)));
        for bad in ["0s", "0", "soon", "-1s"] {
            assert!(parse_limit(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_wait("10"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_wait("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_wait("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(parse_wait("0"), Ok(Duration::ZERO));
        for bad in ["", "x", "-1", "2h", "61m", "NaN", "1e99"] {
            assert!(parse_wait(bad).is_err(), "{bad}");
        }
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
