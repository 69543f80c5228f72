//! Times in the spelling of the dialects.

use everbus_core::{Result, Timestamp};

use crate::fields::Fields;

/// How many digits follow the seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Digits {
    /// Three, or six if needed, as `toISOString` writes.
    Milliseconds,
    /// None, or six, as `isoformat` writes.
    NoneOrSix,
    /// As many as needed.
    Shortest,
}

/// RFC 3339 in UTC.
pub(crate) fn spelled(at: Timestamp, digits: Digits) -> String {
    let full = at.to_string();
    let Some((second, fraction)) = full.strip_suffix('Z').and_then(|t| t.rsplit_once('.')) else {
        return full;
    };
    let fraction = match digits {
        Digits::Milliseconds => fraction.strip_suffix("000").unwrap_or(fraction),
        Digits::NoneOrSix if fraction == "000000" => "",
        Digits::NoneOrSix => fraction,
        Digits::Shortest => fraction.trim_end_matches('0'),
    };
    let point = if fraction.is_empty() { "" } else { "." };
    format!("{second}{point}{fraction}Z")
}

/// A time with its offset.
pub(crate) fn read(fields: &Fields<'_>, name: &str) -> Result<Option<Timestamp>> {
    match fields.text(name)? {
        None => Ok(None),
        Some(text) => match parsed(&text) {
            Some(at) => Ok(Some(at)),
            None => Err(fields.bad(name, &expected(&text))),
        },
    }
}

/// A time with its offset, or without one: then it is UTC, as in Python's `utcnow().isoformat()`.
pub(crate) fn read_utc(fields: &Fields<'_>, name: &str) -> Result<Timestamp> {
    let text = fields.required(name)?;
    let at = parsed(&text).or_else(|| parsed(&format!("{text}Z")));
    at.ok_or_else(|| fields.bad(name, &expected(&text)))
}

pub(crate) fn required(fields: &Fields<'_>, name: &str) -> Result<Timestamp> {
    read(fields, name)?.ok_or_else(|| fields.missing(name))
}

fn parsed(text: &str) -> Option<Timestamp> {
    let at = text.parse::<Timestamp>().ok()?;
    // A time outside the years 0 to 9999 could not be written again.
    (Timestamp::from_micros(at.as_micros()) == at).then_some(at)
}

fn expected(text: &str) -> String {
    let shown: String = text.chars().take(64).collect();
    format!("{shown:?} is not a time; times are RFC 3339, for example 2026-03-01T12:00:00Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_dialect_has_its_digits() {
        let at = |micros: i64| Timestamp::from_micros(1_700_000_000_000_000 + micros);
        let all = |micros: i64| {
            [Digits::Milliseconds, Digits::NoneOrSix, Digits::Shortest]
                .map(|digits| spelled(at(micros), digits).replace("2023-11-14T22:13:", ""))
        };
        assert_eq!(all(0), ["20.000Z", "20Z", "20Z"]);
        assert_eq!(all(500_000), ["20.500Z", "20.500000Z", "20.5Z"]);
        assert_eq!(all(1), ["20.000001Z", "20.000001Z", "20.000001Z"]);
    }
}
