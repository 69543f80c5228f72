//! Times in the forms that SQLite knows: several text forms, Julian days, Unix seconds.

use std::time::Duration;

use everbus_core::{Code, Error, Result, Timestamp};
use rusqlite::Connection;

/// Reads a time in any form that the date functions of SQLite take.
pub(super) fn read(conn: &Connection, text: &str) -> Result<Timestamp> {
    if let Ok(at) = text.parse() {
        return Ok(at);
    }
    // `now` cannot be a stored time, because its value changes with every read.
    let micros: Option<f64> = if text.trim().eq_ignore_ascii_case("now") {
        None
    } else {
        conn.prepare_cached("SELECT (julianday(?1, 'auto') - 2440587.5) * 86400000000.0")
            .and_then(|mut s| s.query_row([text], |r| r.get(0)))
            .unwrap_or(None)
    };
    let Some(micros) = micros else {
        let shown: String = text.chars().take(64).collect();
        return Err(Error::new(
            Code::InvalidAttribute,
            format!("created_at is not a time: {shown:?}"),
        )
        .hint("leave the column to its default, or write datetime('now')"));
    };
    // Days as floating point numbers are exact to milliseconds.
    #[allow(clippy::cast_possible_truncation, reason = "clamped by the timestamp")]
    let millis = (micros / 1000.0).round() as i64;
    Ok(Timestamp::from_micros(millis.saturating_mul(1000)))
}

/// The last moment that a text may mean: fractions of a second may be missing.
pub(super) fn latest(conn: &Connection, text: &str) -> Option<Timestamp> {
    let at = read(conn, text).ok()?;
    let digits = text.split_once('.').map_or(0, |(_, fraction)| {
        fraction.bytes().take_while(u8::is_ascii_digit).count()
    });
    let left_out = match digits {
        0 => 999_999,
        1..=5 => 999,
        _ => 0,
    };
    Some(at.plus(Duration::from_micros(left_out)))
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: memory/outbox-times: created_at is read in every form that SQLite's own functions write
    #[test]
    fn every_form_of_sqlite_is_read() {
        let conn = Connection::open_in_memory().unwrap();
        let expected: Timestamp = "2026-03-01T12:30:15.250Z".parse().unwrap();
        for text in [
            "2026-03-01T12:30:15.250Z",
            "2026-03-01 12:30:15.250",
            "2026-03-01T12:30:15.250",
            "2026-03-01 13:30:15.250+01:00",
            "1772368215.25",
        ] {
            assert_eq!(read(&conn, text).unwrap(), expected, "{text}");
        }
        let at = |sql: &str| -> Timestamp {
            let text: String = conn
                .query_row(&format!("SELECT CAST({sql} AS TEXT)"), [], |r| r.get(0))
                .unwrap();
            read(&conn, &text).unwrap()
        };
        let second: Timestamp = "2026-03-01T12:30:15Z".parse().unwrap();
        assert_eq!(at("datetime('2026-03-01 12:30:15')"), second);
        assert_eq!(at("unixepoch('2026-03-01 12:30:15')"), second);
        assert_eq!(at("julianday('2026-03-01 12:30:15')"), second);
        let day: Timestamp = "2026-03-01T00:00:00Z".parse().unwrap();
        assert_eq!(at("date('2026-03-01')"), day);
        for (text, expected) in [
            ("2026-03-01 12:30:15", Some("2026-03-01T12:30:15.999999Z")),
            ("1772368215", Some("2026-03-01T12:30:15.999999Z")),
            (
                "2026-03-01T12:30:15.250Z",
                Some("2026-03-01T12:30:15.250999Z"),
            ),
            (
                "2026-03-01T12:30:15.250001Z",
                Some("2026-03-01T12:30:15.250001Z"),
            ),
            ("soon", None),
        ] {
            let expected = expected.map(|text| text.parse().unwrap());
            assert_eq!(latest(&conn, text), expected, "{text}");
        }
        for bad in ["", "yesterday", "2026-13-01", "now", "12 o'clock", "NaN"] {
            let error = read(&conn, bad).unwrap_err();
            assert_eq!(error.code(), Code::InvalidAttribute, "{bad}");
        }
    }
}
