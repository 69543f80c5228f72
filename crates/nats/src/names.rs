//! Names on the server: subjects of event types, filters of patterns, names of consumers.
//!
//! A subject consists of tokens that are separated by dots, as a type is. Characters that a token cannot contain
//! (blanks, wildcards) and empty tokens are encoded with `%`, and decoded when they are read.
//!
//! | | declared streams | without declared streams |
//! |---|---|---|
//! | `order.placed` | `order.placed` | `events.order.placed` |
//! | `system.dead_letter` | `system.dead_letter` | `events-system.dead_letter` |
//! | `Task Done` | `Task%20Done` | `events.Task%20Done` |
//!
//! No stream may have all subjects of a server. So without declared streams, all types have a prefix. The types of
//! Everbus itself have another prefix, because the pattern `*` does not match them.

use everbus_core::Pattern;
use everbus_core::stream::dotted;

const EVENTS: &str = "events.";
const SYSTEM_EVENTS: &str = "events-system.";
const SYSTEM: &str = "system.";
/// An empty token.
const EMPTY: &str = "%e";

/// How types become subjects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    /// The subject is the type.
    Declared,
    /// All types are under a prefix.
    Single,
}

/// The subjects of the stream that has everything.
pub(crate) fn single_subjects() -> Vec<String> {
    vec![format!("{EVENTS}>"), format!("{SYSTEM_EVENTS}>")]
}

fn plain(c: char) -> bool {
    !(c.is_whitespace() || c.is_control() || matches!(c, '%' | '*' | '>' | '.'))
}

fn push_token(token: &str, out: &mut String) {
    if token.is_empty() {
        out.push_str(EMPTY);
        return;
    }
    // Only subjects of the server itself begin with a dollar sign.
    let own = out.is_empty() && token.starts_with('$');
    for (at, c) in token.char_indices() {
        if plain(c) && !(own && at == 0) {
            out.push(c);
        } else {
            let mut buffer = [0; 4];
            for byte in c.encode_utf8(&mut buffer).bytes() {
                out.push_str(&format!("%{byte:02X}"));
            }
        }
    }
}

/// Encodes a type or a pattern as a subject. With `wildcards`, the wildcards of a pattern are kept.
fn encode(text: &str, wildcards: bool) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    for (index, token) in text.split('.').enumerate() {
        if index > 0 {
            out.push('.');
        }
        match token {
            "*" if wildcards => out.push('*'),
            ">" | "**" if wildcards => out.push('>'),
            token => push_token(token, &mut out),
        }
    }
    out
}

fn decode(subject: &str) -> String {
    let mut bytes = Vec::with_capacity(subject.len());
    for (index, token) in subject.split('.').enumerate() {
        if index > 0 {
            bytes.push(b'.');
        }
        if token == EMPTY {
            continue;
        }
        let raw = token.as_bytes();
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
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The subject of an event type, without the prefix of the space.
pub(crate) fn subject(naming: Naming, event_type: &str) -> String {
    match naming {
        Naming::Declared => encode(&dotted(event_type), false),
        Naming::Single => match event_type.strip_prefix(SYSTEM) {
            Some(rest) => format!("{SYSTEM_EVENTS}{}", inner(rest, false)),
            None => format!("{EVENTS}{}", inner(event_type, false)),
        },
    }
}

/// Like [`encode`], for text after a prefix: there a dollar sign is a character like any other.
fn inner(text: &str, wildcards: bool) -> String {
    let mut out = encode(text, wildcards);
    if out.starts_with("%24") {
        out.replace_range(..3, "$");
    }
    out
}

/// The event type of a subject.
pub(crate) fn event_type(naming: Naming, subject: &str) -> String {
    match naming {
        Naming::Declared => decode(subject),
        Naming::Single => match subject.strip_prefix(SYSTEM_EVENTS) {
            Some(rest) => format!("{SYSTEM}{}", decode(rest)),
            None => decode(subject.strip_prefix(EVENTS).unwrap_or(subject)),
        },
    }
}

/// The subjects that a pattern selects, or `None` if they cannot be told from its text.
fn of_pattern(naming: Naming, pattern: &Pattern) -> Option<Vec<String>> {
    let text = pattern.as_str();
    // A pattern may match more than its text says: that of a stream joins several patterns, and that of a channel
    // matches other spellings.
    if Pattern::new(text).ok().as_ref() != Some(pattern) {
        return None;
    }
    let is_all = matches!(text, "*" | ">" | "**");
    Some(match naming {
        Naming::Declared if is_all => return None,
        Naming::Declared => vec![encode(&dotted(text), pattern.exact().is_none())],
        Naming::Single if is_all => vec![format!("{EVENTS}>")],
        Naming::Single => {
            let wildcards = pattern.exact().is_none();
            let under = |prefix: &str, text: &str| format!("{prefix}{}", inner(text, wildcards));
            match text.split_once('.') {
                Some(("system", rest)) => vec![under(SYSTEM_EVENTS, rest)],
                Some(("*", rest)) => vec![under(EVENTS, text), under(SYSTEM_EVENTS, rest)],
                _ => vec![under(EVENTS, text)],
            }
        }
    })
}

/// The filters of a consumer that wants these patterns. `None` is everything in the stream. Filters may
/// select too much and never too little.
pub(crate) fn filters<'a>(
    naming: Naming,
    patterns: impl IntoIterator<Item = &'a Pattern>,
) -> Option<Vec<String>> {
    let mut all: Vec<String> = Vec::new();
    for pattern in patterns {
        all.extend(of_pattern(naming, pattern)?);
    }
    Some(union(&all, &[]))
}

/// Joins two lists of filters: the result selects what either of them selects.
pub(crate) fn union(one: &[String], other: &[String]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for filter in one.iter().chain(other) {
        if all.iter().any(|known| covers(known, filter)) {
            continue;
        }
        all.retain(|known| !covers(filter, known));
        all.push(filter.clone());
    }
    all.sort();
    all
}

/// Whether a subject exists that both match.
pub(crate) fn overlap(one: &str, other: &str) -> bool {
    let (mut one, mut other) = (one.split('.'), other.split('.'));
    loop {
        match (one.next(), other.next()) {
            (Some(">"), Some(_)) | (Some(_), Some(">")) | (None, None) => return true,
            (Some(a), Some(b)) if a == b || a == "*" || b == "*" => {}
            _ => return false,
        }
    }
}

/// Whether every subject that `inner` matches is one that `outer` matches.
pub(crate) fn covers(outer: &str, inner: &str) -> bool {
    let (mut outer, mut inner) = (outer.split('.'), inner.split('.'));
    loop {
        match (outer.next(), inner.next()) {
            (Some(">"), Some(_)) | (None, None) => return true,
            (Some("*"), Some(token)) if token != ">" => {}
            (Some(a), Some(b)) if a == b => {}
            _ => return false,
        }
    }
}

/// A name for a consumer, a stream or one token of a subject: letters, digits, `-` and `_`; everything else is
/// encoded. The empty name is the unnamed group.
pub(crate) fn encoded(name: &str) -> String {
    if name.is_empty() {
        return "=_".to_owned();
    }
    let mut out = String::with_capacity(name.len());
    for c in name.chars() {
        if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') {
            out.push(c);
        } else {
            let mut buffer = [0; 4];
            for byte in c.encode_utf8(&mut buffer).bytes() {
                out.push_str(&format!("={byte:02X}"));
            }
        }
    }
    // The server uses these names as directory names, whose length is limited.
    if out.len() > 200 {
        let sum = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        out.truncate(150);
        out.push_str(&format!("=~{sum:016x}"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: contract/nats-odd-types: a type that a subject cannot carry is encoded and read back
    #[test]
    fn every_type_reads_back() {
        let wide = "ß".repeat(255);
        for event_type in [
            "order.placed",
            "Task Processing Started",
            "größe.geändert",
            "a..b",
            ".",
            "a.",
            "%e",
            "%20",
            "*",
            "a.>",
            "$JS.x",
            "system.dead_letter",
            "system",
            "日本.語\u{2028}x",
            wide.as_str(),
        ] {
            for naming in [Naming::Single, Naming::Declared] {
                let subject = subject(naming, event_type);
                assert!(!subject.contains(char::is_whitespace), "{subject}");
                assert!(!subject.starts_with('$') && !subject.contains(".."));
                assert_eq!(super::event_type(naming, &subject), event_type);
            }
        }
    }

    #[test]
    fn a_filter_selects_what_its_pattern_matches() {
        let patterns = [
            "*",
            "order.*",
            "system.>",
            "*.x",
            "*.>",
            "a b",
            "order.placed",
            "*.*",
        ];
        let types = [
            "order.placed",
            "system.x",
            "order.x",
            "a b",
            "system",
            "order",
            "a.b.c",
        ];
        for text in patterns {
            let pattern = Pattern::new(text).unwrap();
            let filters = filters(Naming::Single, [&pattern]).unwrap();
            for event_type in types {
                let subject = subject(Naming::Single, event_type);
                let selected = filters.iter().any(|filter| covers(filter, &subject));
                assert_eq!(selected, pattern.matches(event_type), "{text} {event_type}");
            }
        }
    }

    #[test]
    fn filters_do_not_contain_each_other() {
        let patterns = ["order.placed", "order.*", "order.>", "a.b"];
        let patterns: Vec<Pattern> = patterns.iter().map(|p| Pattern::new(p).unwrap()).collect();
        let all = filters(Naming::Declared, &patterns).unwrap();
        assert_eq!(all, ["a.b", "order.>"]);
        let one = Pattern::new("*").unwrap();
        assert_eq!(filters(Naming::Declared, [&one]), None);
    }

    #[test]
    fn subjects_overlap_if_one_matches_both() {
        for (one, other, expected) in [
            ("order.>", "order.placed", true),
            ("order.*", "*.paid", true),
            ("order.>", "order", false),
            ("order.*", "order.a.b", false),
            ("mail.*", "order.>", false),
            (">", "a.b", true),
        ] {
            assert_eq!(overlap(one, other), expected, "{one} {other}");
            assert_eq!(overlap(other, one), expected, "{other} {one}");
        }
    }

    #[test]
    fn names_are_encoded() {
        assert_eq!(encoded("billing"), "billing");
        assert_eq!(encoded("a b.c"), "a=20b=2Ec");
        assert_ne!(encoded(""), encoded("=_"));
        let (one, two) = ("ü".repeat(127) + "1", "ü".repeat(127) + "2");
        assert!(encoded(&one).len() <= 255 && encoded(&one) != encoded(&two));
    }
}
