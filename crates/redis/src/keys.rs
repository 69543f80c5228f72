//! Names on the server: the stream of each event type, and the keys of the engine itself.
//!
//! | type | stream |
//! |---|---|
//! | `orders.order.placed`, `orders:order-placed` | `orders:order-placed` |
//! | `TelemetryWindowClosed` | the same |
//! | `orders.order-placed` | `orders:order%2Dplaced` |
//!
//! The name of a stream alone says which types it has. A name with a `%` is decoded to one type. Every other stream has
//! two spellings of its type: with dots, and as the name of the stream. With the space `shop` in the URL, the names of
//! streams begin with `shop/`.

use everbus_core::stream::{canonical, label};
use everbus_core::{Pattern, Position, Result, Shard};

/// Domains that no stream of events may have: those of the engine's own keys, and of the dead letters.
const OWN: [&str; 2] = ["everbus", "dlq"];
const SEQ_BITS: u32 = 22;
const MOST_SEQ: u64 = (1 << SEQ_BITS) - 1;
const MOST_MS: u64 = (1 << (64 - SEQ_BITS)) - 1;
/// The name of the unnamed group on the server.
const UNNAMED: &str = everbus_core::group::UNNAMED;

/// The keys of one bus on a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Space {
    /// The prefix of the engine's own keys.
    pub(crate) prefix: String,
    streams: String,
}

impl Space {
    pub(crate) fn new(space: &str) -> Self {
        match space {
            "" => Self {
                prefix: "everbus:".to_owned(),
                streams: String::new(),
            },
            space => Self {
                prefix: format!("everbus:{space}:"),
                streams: format!("{space}/"),
            },
        }
    }

    /// A key of the engine itself.
    pub(crate) fn own(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The stream of an event type.
    pub(crate) fn stream(&self, event_type: &str) -> String {
        format!("{}{}", self.streams, encode(event_type))
    }

    /// The name of a stream without the prefix of the space.
    pub(crate) fn plain<'a>(&self, key: &'a str) -> &'a str {
        key.strip_prefix(&self.streams).unwrap_or(key)
    }

    /// The dead letters of a stream.
    pub(crate) fn dead(&self, key: &str) -> String {
        format!("{}dlq:{}", self.streams, self.plain(key))
    }

    /// The types that a stream has, the dotted one first.
    pub(crate) fn types(&self, key: &str) -> Vec<String> {
        let plain = self.plain(key);
        if plain.contains('%') {
            return vec![decode(plain)];
        }
        let dotted = canonical(plain);
        match dotted == plain {
            true => vec![dotted],
            false => vec![dotted, plain.to_owned()],
        }
    }

    /// Whether one of these patterns matches a type of the stream.
    pub(crate) fn wanted(&self, key: &str, patterns: &[Pattern]) -> bool {
        let types = self.types(key);
        let mut patterns = patterns.iter();
        patterns.any(|pattern| types.iter().any(|of| pattern.matches(of)))
    }

    pub(crate) fn shard(&self, key: &str) -> Result<Shard> {
        Shard::named(&shard_name(self.plain(key)))
    }
}

/// The name of a group on the server.
pub(crate) fn group_name(group: &str) -> &str {
    match group {
        "" => UNNAMED,
        group => group,
    }
}

fn is_plain(event_type: &str, key: &str) -> bool {
    let domain = key.split(':').next().unwrap_or(key);
    let reserved = OWN.contains(&domain);
    let odd = |c: char| matches!(c, '%' | '/');
    !reserved && !key.contains(odd) && (event_type == key || event_type == canonical(key))
}

fn encode(event_type: &str) -> String {
    let key = label(event_type);
    if is_plain(event_type, &key) {
        return key;
    }
    let mut out = String::with_capacity(event_type.len() + 8);
    let first = event_type.find([':', '.']);
    let domain_end = first.filter(|at| event_type.as_bytes()[*at] == b'.');
    let (domain, rest) = match domain_end {
        Some(at) => (&event_type[..at], Some(&event_type[at + 1..])),
        None => (event_type, None),
    };
    escape(domain, &mut out);
    if let Some(rest) = rest {
        out.push(':');
        for (index, segment) in rest.split('.').enumerate() {
            if index > 0 {
                out.push('-');
            }
            escape(segment, &mut out);
        }
    }
    if OWN.contains(&domain) {
        // A reserved domain: its first letter is percent-encoded.
        let first = out.remove(0);
        out.insert_str(0, &format!("%{:02X}", u32::from(first)));
    }
    out
}

fn escape(text: &str, out: &mut String) {
    for c in text.chars() {
        if matches!(c, '%' | ':' | '-' | '.' | '/') {
            out.push_str(&format!("%{:02X}", u32::from(c)));
        } else {
            out.push(c);
        }
    }
}

fn decode(key: &str) -> String {
    let unescape = |text: &str| {
        let mut bytes = Vec::with_capacity(text.len());
        let raw = text.as_bytes();
        let mut at = 0;
        while at < raw.len() {
            let hex = raw.get(at + 1..at + 3).filter(|_| raw[at] == b'%');
            let hex = hex.and_then(|hex| std::str::from_utf8(hex).ok());
            match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                Some(byte) => {
                    bytes.push(byte);
                    at += 3;
                }
                None => {
                    bytes.push(raw[at]);
                    at += 1;
                }
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    };
    match key.split_once(':') {
        Some((domain, rest)) => {
            let rest: Vec<String> = rest.split('-').map(unescape).collect();
            format!("{}.{}", unescape(domain), rest.join("."))
        }
        None => unescape(key),
    }
}

/// The name of a stream in positions: spaces and commas are encoded, and a long name is cut.
fn shard_name(key: &str) -> String {
    let odd = |c: char| c.is_control() || c.is_whitespace() || c == ',';
    let fits = |text: &str| !text.is_empty() && text.chars().count() <= 255;
    if fits(key) && !key.contains(odd) && !key.starts_with('~') {
        return key.to_owned();
    }
    let mut out = "~".to_owned();
    for c in key.chars() {
        if odd(c) || matches!(c, '~' | '%') {
            out.push_str(&format!("%{:X};", u32::from(c)));
        } else {
            out.push(c);
        }
    }
    if !fits(&out) {
        let sum = key.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        out = out.chars().take(200).collect();
        out.push_str(&format!("~{sum:016x}"));
    }
    out
}

/// The id of an entry: the time in milliseconds, and a number within that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EntryId {
    pub(crate) ms: u64,
    pub(crate) seq: u64,
}

impl EntryId {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (ms, seq) = text.split_once('-')?;
        Some(Self {
            ms: ms.parse().ok()?,
            seq: seq.parse().ok()?,
        })
    }

    /// Reads an id as the server wrote it.
    pub(crate) fn read(text: &[u8]) -> Option<Self> {
        Self::parse(std::str::from_utf8(text).ok()?)
    }

    /// The place of the entry in its stream: 42 bits of time, 22 of the number. Larger ids, which only other programs
    /// write, share the last place.
    pub(crate) fn place(self) -> u64 {
        if self.ms > MOST_MS {
            return u64::MAX;
        }
        self.ms << SEQ_BITS | self.seq.min(MOST_SEQ)
    }

    pub(crate) fn at_place(place: u64) -> Self {
        Self {
            ms: place >> SEQ_BITS,
            seq: place & MOST_SEQ,
        }
    }

    /// The last id at a place: what comes after it is at a later place. `None` for the last place of all.
    pub(crate) fn end_of_place(place: u64) -> Option<Self> {
        let id = Self::at_place(place);
        match (place, id.seq) {
            (u64::MAX, _) => None,
            (_, MOST_SEQ) => Some(Self {
                seq: u64::MAX,
                ..id
            }),
            _ => Some(id),
        }
    }

    /// When the server received it.
    pub(crate) fn time(self) -> everbus_core::Timestamp {
        let micros = i64::try_from(self.ms)
            .unwrap_or(i64::MAX)
            .saturating_mul(1000);
        everbus_core::Timestamp::from_micros(micros)
    }

    pub(crate) fn position(self, shard: Shard) -> Position {
        Position::new(shard, self.place())
    }

    /// The id before this one.
    pub(crate) fn just_before(self) -> Self {
        match (self.ms, self.seq) {
            (ms, seq) if seq > 0 => Self { ms, seq: seq - 1 },
            (0, _) => self,
            (ms, _) => Self {
                ms: ms - 1,
                seq: u64::MAX,
            },
        }
    }

    /// The id just before the first id at or after a time.
    pub(crate) fn before(time: everbus_core::Timestamp) -> Self {
        let micros = u64::try_from(time.as_micros()).unwrap_or(0);
        match micros.div_ceil(1000).checked_sub(1) {
            Some(ms) => Self { ms, seq: u64::MAX },
            None => Self { ms: 0, seq: 0 },
        }
    }
}

impl std::fmt::Display for EntryId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.ms, self.seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: contract/redis-channel-names: a type is in the stream {domain}:{event-type}
    #[test]
    fn types_are_in_the_streams_of_the_specification() {
        let space = Space::new("");
        for (event_type, key) in [
            ("orders.order.placed", "orders:order-placed"),
            ("orders:order-placed", "orders:order-placed"),
            ("order.placed", "order:placed"),
            ("TelemetryWindowClosed", "TelemetryWindowClosed"),
            ("orders.order-placed", "orders:order%2Dplaced"),
            ("everbus.groups", "%65verbus:groups"),
        ] {
            assert_eq!(space.stream(event_type), key);
        }
        assert_eq!(space.dead("orders:order-placed"), "dlq:orders:order-placed");
        let shop = Space::new("shop");
        assert_eq!(shop.stream("order.placed"), "shop/order:placed");
        assert_eq!(
            shop.types("shop/order:placed"),
            ["order.placed", "order:placed"]
        );
        assert_eq!(shop.dead("shop/order:placed"), "shop/dlq:order:placed");
    }

    // conformance: contract/redis-odd-types: a stream says which types it has, and no two other types share one
    #[test]
    fn every_type_is_one_of_its_stream() {
        let space = Space::new("");
        let wide = "ß".repeat(255);
        let mut seen: std::collections::HashMap<String, String> = Default::default();
        for event_type in [
            "order.placed",
            "a-b",
            "a.b-c",
            "a.b:c",
            "a:b",
            "a:b-c",
            "a:b.c",
            "a:b:c",
            "a..b",
            ".",
            "a.",
            "a:",
            ":a",
            ".a",
            "%",
            "a.%2D",
            "a%2D.b",
            "dlq.x",
            "dlq:x",
            "dlq",
            "everbus",
            "everbus.a-b",
            "a/b.c",
            "Task Processing Started",
            "größe.geändert",
            "it's \"quoted\" \\ %_?#/",
            "日本.語",
            wide.as_str(),
        ] {
            let key = space.stream(event_type);
            let types = space.types(&key);
            assert!(
                types.iter().any(|of| of == event_type),
                "{event_type} {key} {types:?}"
            );
            assert!(
                !key.starts_with("everbus:") && !key.starts_with("dlq:"),
                "{key}"
            );
            if let Some(other) = seen.insert(key.clone(), event_type.to_owned()) {
                assert_eq!(canonical(&other), canonical(event_type), "{key}");
            }
            let shard = space.shard(&key).unwrap();
            assert_eq!(space.shard(&key).unwrap(), shard);
        }
    }

    // conformance: contract/redis-position: an id is packed into a place and comes back, in order
    #[test]
    fn ids_become_places_and_come_back() {
        let mut before = 0;
        for text in [
            "0-1",
            "1-0",
            "1700000000000-0",
            "1700000000000-4194303",
            "1700000000001-0",
        ] {
            let id = EntryId::parse(text).unwrap();
            assert_eq!(EntryId::at_place(id.place()), id);
            assert_eq!(id.to_string(), text);
            assert!(id.place() > before);
            before = id.place();
        }
        let beyond = EntryId {
            ms: 5,
            seq: u64::MAX,
        };
        assert_eq!(
            beyond.place(),
            EntryId {
                ms: 5,
                seq: MOST_SEQ
            }
            .place()
        );
        let time = everbus_core::Timestamp::from_micros(5001);
        assert_eq!(
            EntryId::before(time),
            EntryId {
                ms: 5,
                seq: u64::MAX
            }
        );
        assert!(EntryId::before(everbus_core::Timestamp::EPOCH) < EntryId { ms: 0, seq: 1 });
    }
}
