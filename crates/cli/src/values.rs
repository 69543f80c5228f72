//! Parsers for the values of options and arguments. Times are in `when`.

use std::net::{Ipv4Addr, SocketAddr};

use everbus::Dialect;
use everbus_core::{
    AuditHead, DeadLetterKey, Entity, Error, GroupName, PageCursor, Pattern, Shard,
};

/// A page of any list has at most this many entries.
const MOST_ON_A_PAGE: usize = 10_000;

pub(crate) fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not KEY=VALUE")),
    }
}

/// Reads an address with a port. `localhost` is 127.0.0.1.
pub(crate) fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let loopback = text.strip_prefix("localhost:");
    let parsed = match loopback {
        Some(port) => port
            .parse::<u16>()
            .map(|port| (Ipv4Addr::LOCALHOST, port).into())
            .map_err(|_| ()),
        None => text.parse().map_err(|_| ()),
    };
    parsed.map_err(|()| {
        format!(
            "{text:?} is not an IP address with a port, such as 127.0.0.1:7770, or 0.0.0.0:7770 for every address of \
             this machine"
        )
    })
}

pub(crate) fn parse_entity(text: &str) -> Result<Entity, String> {
    match text.split_once(':') {
        Some((kind, id)) if !kind.is_empty() && !id.is_empty() => Ok(Entity {
            kind: kind.to_owned(),
            id: id.to_owned(),
        }),
        _ => Err(format!("{text:?} is not TYPE:ID, for example ORDER:42")),
    }
}

/// The entity in the form that [`parse_entity`] reads, so that printed text can be typed again.
pub(crate) fn entity_text(entity: &Entity) -> String {
    format!("{}:{}", entity.kind, entity.id)
}

pub(crate) fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && (0.001..=10_000_000.0).contains(&rate) => Ok(rate),
        _ => Err(format!(
            "{text:?} is not a number of events per second between 0.001 and 10000000"
        )),
    }
}

/// Reads a whole number that is not zero.
pub(crate) fn parse_count(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(format!("{text:?} is not a whole number of 1 or more")),
    }
}

/// Reads a whole number that is not zero, for rates and counts.
pub(crate) fn parse_whole_rate(text: &str) -> Result<u32, String> {
    let bad = || format!("{text:?} is not a whole number of 1 or more");
    text.parse().ok().filter(|n| *n > 0).ok_or_else(bad)
}

/// Reads how many are on a page.
pub(crate) fn parse_page(text: &str) -> Result<usize, String> {
    let bad = || format!("{text:?} is not a whole number between 1 and {MOST_ON_A_PAGE}");
    let page = text.parse().ok();
    page.filter(|n| (1..=MOST_ON_A_PAGE).contains(n))
        .ok_or_else(bad)
}

/// Reads how many are left out.
pub(crate) fn parse_offset(text: &str) -> Result<usize, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not a whole number"))
}

/// Reads the number of an audit record.
pub(crate) fn parse_record(text: &str) -> Result<u64, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not the number of a record, as `audit list` prints it"))
}

/// Reads the head of an audit trail.
pub(crate) fn parse_head(text: &str) -> Result<AuditHead, String> {
    text.parse().map_err(|error: Error| {
        let hint =
            "give it as `everbus audit head` printed it: a number, a colon and 64 hex digits";
        format!("{}{HINT}{hint}", error.message())
    })
}

/// Reads a number of bytes: `500`, `64k`, `8m`. The library reports values that are too large.
pub(crate) fn parse_bytes(text: &str) -> Result<usize, String> {
    let lower = text.to_ascii_lowercase();
    let (digits, unit) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 1 << 10),
        Some(b'm') => (&lower[..lower.len() - 1], 1 << 20),
        _ => (lower.as_str(), 1),
    };
    let bytes = digits.parse().ok().and_then(|n: usize| n.checked_mul(unit));
    bytes
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| format!("{text:?} is not a number of bytes such as 500, 64k or 8m"))
}

pub(crate) fn parse_pattern(text: &str) -> Result<Pattern, String> {
    Pattern::new(text).map_err(|error| with_hint(&error))
}

pub(crate) fn parse_dialect(text: &str) -> Result<Dialect, String> {
    text.parse().map_err(|error| with_hint(&error))
}

pub(crate) fn parse_group(text: &str) -> Result<GroupName, String> {
    text.parse().map_err(|error| with_hint(&error))
}

/// Reads a group that may be consumed from the command line. The unnamed group belongs to programs that name
/// no group: consuming it here would take their events away.
pub(crate) fn parse_own_group(text: &str) -> Result<GroupName, String> {
    match parse_group(text)? {
        group if group.is_unnamed() => Err(format!(
            "the unnamed group belongs to the programs that name none{HINT}\
             name a group of its own, for example --group audit"
        )),
        group => Ok(group),
    }
}

/// Separates the message and the hint of a refused value; `usage` finds it again.
pub(crate) const HINT: &str = "\nhint: ";

fn with_hint(error: &Error) -> String {
    match error.hint_text() {
        Some(hint) => format!("{}{HINT}{hint}", error.message()),
        None => error.message().to_owned(),
    }
}

/// Reads a cursor as `events` prints it.
pub(crate) fn parse_history_cursor(text: &str) -> Result<PageCursor, String> {
    text.parse().map_err(|error| with_hint(&error))
}

/// A cursor as `dlq list` prints it: `seq:group`, or `shard:place,group` where there are shards.
pub(crate) fn dead_letter_cursor(key: &DeadLetterKey) -> String {
    let between = if key.position.shard() == Shard::ONLY {
        ':'
    } else {
        ','
    };
    format!("{}{between}{}", key.position, key.group)
}

pub(crate) fn parse_cursor(text: &str) -> Result<DeadLetterKey, String> {
    let bad = || format!("{text:?} is not a cursor as `dlq list` prints it");
    let parts = |between| -> Option<DeadLetterKey> {
        let (position, group) = text.split_once(between)?;
        Some(DeadLetterKey {
            position: position.parse().ok()?,
            group: group.parse().ok()?,
        })
    };
    parts(':').or_else(|| parts(',')).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_unit() {
        assert_eq!(parse_bytes("500"), Ok(500));
        assert_eq!(parse_bytes("64k"), Ok(65_536));
        assert_eq!(parse_bytes("8M"), Ok(8 << 20));
        for bad in ["", "0", "k", "-1", "1.5m", "99999999999999999999m"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn cursors_name_a_position_and_a_group() {
        for text in ["12:a:b", "12:(unnamed)", "orders/3:17,billing", "p:1,a,b:c"] {
            let key = parse_cursor(text).unwrap();
            assert_eq!(dead_letter_cursor(&key), text);
        }
        let key = parse_cursor("12:a:b").unwrap();
        assert_eq!(key.position, everbus_core::Position::seq(12));
        assert_eq!(key.group.as_str(), "a:b");
        assert!(parse_cursor("x:y").is_err() && parse_cursor("12").is_err());
    }
}
