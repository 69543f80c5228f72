//! Durations in the file: `30`, `0.5`, `30s`, `500ms`, `5m`, `1h`.

use std::time::Duration;

/// A longer duration is probably a mistake of units.
pub(super) const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);
/// The finest resolution.
const SHORTEST: Duration = Duration::from_millis(1);

pub(super) const UNITS: &str = "the units are ms, s, m and h, as in 500ms, 30s, 5m and 1h; \
                     a number without a unit is seconds";

/// A longer age is probably a mistake of units.
const OLDEST: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

pub(super) const AGES: &str = "write an age with its unit, ms, s, m, h or d, as in 30d and 12h, or \
                    never; a number without a unit is seconds";

/// Parses an age: also in days, and up to a hundred years.
pub(super) fn parse_age(text: &str) -> Result<Duration, (&'static str, String)> {
    let Some(days) = text.strip_suffix('d') else {
        return parse(text);
    };
    let Some(days) = days.trim().replace('_', "").parse::<f64>().ok() else {
        return Err(("which is not a duration", AGES.to_owned()));
    };
    if days <= 0.0 {
        return Err(("and it must be more than nothing", AGES.to_owned()));
    }
    match Duration::try_from_secs_f64(days * 86_400.0) {
        Ok(age) if (SHORTEST..=OLDEST).contains(&age) => Ok(age),
        _ => Err(("which is out of range", AGES.to_owned())),
    }
}

/// Parses a duration, or says what is wrong and what would be right.
pub(super) fn parse(text: &str) -> Result<Duration, (&'static str, String)> {
    let is_number = |c: char| c.is_ascii_digit() || matches!(c, '.' | '_' | '-' | '+');
    let (number, unit) = text.split_at(text.find(|c| !is_number(c)).unwrap_or(text.len()));
    let Ok(amount) = number.replace('_', "").parse::<f64>() else {
        return Err(("which is not a duration", UNITS.to_owned()));
    };
    let seconds = match unit.trim() {
        "ms" => amount / 1000.0,
        "" | "s" => amount,
        "m" => amount * 60.0,
        "h" => amount * 3600.0,
        other => {
            let hint = match known(other) {
                Some(unit) => format!("did you mean {number}{unit}? {UNITS}"),
                None => UNITS.to_owned(),
            };
            return Err(("which has a unit that is not known", hint));
        }
    };
    if seconds < 0.0 {
        return Err(("which is negative", UNITS.to_owned()));
    }
    if seconds > LONGEST.as_secs_f64() {
        return Err(("which is longer than a year", UNITS.to_owned()));
    }
    let duration = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    if seconds == 0.0 {
        return Err(("and it cannot be zero", UNITS.to_owned()));
    }
    if duration < SHORTEST {
        return Err(("which is shorter than a millisecond", UNITS.to_owned()));
    }
    Ok(duration)
}

/// The unit for a longer word.
fn known(unit: &str) -> Option<&'static str> {
    match unit.to_ascii_lowercase().as_str() {
        "msec" | "msecs" | "millis" | "millisecond" | "milliseconds" => Some("ms"),
        "s" | "sec" | "secs" | "second" | "seconds" => Some("s"),
        "m" | "min" | "mins" | "minute" | "minutes" => Some("m"),
        "h" | "hr" | "hrs" | "hour" | "hours" => Some("h"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: handlers/config-units: bare numbers are seconds, units are ms, s, m and h
    #[test]
    fn durations_have_units_and_bare_numbers_are_seconds() {
        for (text, millis) in [
            ("30", 30_000),
            ("30s", 30_000),
            ("30 s", 30_000),
            ("500ms", 500),
            ("5m", 300_000),
            ("1h", 3_600_000),
            ("0.5", 500),
            ("1.5s", 1500),
            ("0.1", 100),
            ("1ms", 1),
            ("1_000ms", 1000),
            ("8784h", 366 * 24 * 3_600_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    // conformance: memory/config-retention: ages are also written in days
    #[test]
    fn ages_may_be_days() {
        let day = Duration::from_secs(24 * 3600);
        for (text, age) in [
            ("30d", 30 * day),
            ("0.5d", day / 2),
            ("3_650d", 3650 * day),
            ("12h", day / 2),
            ("60", Duration::from_secs(60)),
        ] {
            assert_eq!(parse_age(text), Ok(age), "{text}");
        }
        for text in [
            "0d", "-1d", "d", "1000000d", "NaNd", "infd", "30days", "1e999d", "soon",
        ] {
            assert!(parse_age(text).is_err(), "{text}");
        }
    }

    // conformance: handlers/config-units: a wrong unit is refused with the units that are known
    #[test]
    fn what_is_no_duration_is_refused_with_the_units() {
        for (text, what) in [
            ("30 parsecs", "unit"),
            ("30 seconds", "unit"),
            ("1e99", "unit"),
            ("5M", "unit"),
            ("soon", "not a duration"),
            ("", "not a duration"),
            ("s", "not a duration"),
            ("1.2.3", "not a duration"),
            (".inf", "not a duration"),
            ("NaN", "not a duration"),
            ("0", "zero"),
            ("0ms", "zero"),
            ("-0", "zero"),
            ("-5", "negative"),
            ("0.1ms", "shorter"),
            ("8785h", "longer than a year"),
            (&"9".repeat(400), "longer than a year"),
        ] {
            let (said, hint) = parse(text).unwrap_err();
            assert!(said.contains(what), "{text}: {said}");
            assert!(hint.contains("ms, s, m and h"), "{hint}");
        }
        assert!(
            parse("30 seconds")
                .unwrap_err()
                .1
                .contains("did you mean 30s?")
        );
        assert!(!parse("30 parsecs").unwrap_err().1.contains("did you mean"));
    }
}
