//! Names on the server: topics, groups, and the topics that a pattern reaches.
//!
//! A topic has letters, digits, dots, hyphens and underscores. Everything else is written as `__` and two hex
//! digits for each byte.

use everbus_core::stream::dotted;
use everbus_core::{GroupName, Pattern};

use crate::config::Topics;

/// The longest name of a topic that Kafka takes is 249; its prefixes need some of that.
const LONGEST: usize = 200;
/// The topic of everything, for [`Topics::Single`].
const SINGLE: &str = "events";
/// The prefixes of Everbus' own topics.
const OWN: [&str; 2] = ["everbus.", "dlq."];

/// The names of a bus on its cluster. With a path in the URL, several buses share one cluster.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    prefix: String,
}

impl Space {
    pub(crate) fn new(space: &str) -> Self {
        let prefix = match space {
            "" => String::new(),
            space => format!("{space}."),
        };
        Self { prefix }
    }

    /// A topic with this short name.
    pub(crate) fn topic(&self, short: &str) -> String {
        format!("{}{short}", self.prefix)
    }

    /// The topic of groups, subscriptions and topics.
    pub(crate) fn registry(&self) -> String {
        self.topic("everbus.groups")
    }

    /// The topic of the dead letters of a topic.
    pub(crate) fn dead(&self, short: &str) -> String {
        self.topic(&format!("dlq.{short}"))
    }

    /// The consumer group of a group.
    pub(crate) fn group(&self, name: &GroupName) -> String {
        let name = match name.is_unnamed() {
            true => "(unnamed)",
            false => name.as_str(),
        };
        format!("{}{name}", self.prefix)
    }
}

/// A name as part of a topic. Dots stay.
pub(crate) fn encoded(name: &str) -> String {
    if name.is_empty() {
        return "__".to_owned();
    }
    let own = OWN.iter().any(|prefix| name.starts_with(prefix));
    let dots = matches!(name, "." | "..");
    let mut out = String::with_capacity(name.len());
    let mut rest = name.chars().peekable();
    while let Some(c) = rest.next() {
        let plain = match c {
            '_' => rest.peek() != Some(&'_'),
            '.' => !dots,
            '-' => true,
            c => c.is_ascii_alphanumeric() && !(own && out.is_empty()),
        };
        if plain {
            out.push(c);
            continue;
        }
        let mut buffer = [0; 4];
        for byte in c.encode_utf8(&mut buffer).bytes() {
            out.push_str(&format!("__{byte:02X}"));
        }
    }
    if out.len() > LONGEST {
        let sum = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        out.truncate(150);
        out.push_str(&format!("__{sum:016x}"));
    }
    out
}

/// The short name of the topic of an event type, where no streams are declared.
pub(crate) fn of_type(topics: Topics, event_type: &str) -> String {
    match topics {
        Topics::Single => SINGLE.to_owned(),
        Topics::Type => encoded(event_type),
        Topics::Domain => encoded(domain(&dotted(event_type))),
    }
}

fn domain(event_type: &str) -> &str {
    event_type.split('.').next().unwrap_or_default()
}

/// Whether a topic that `topics` named may have events that the pattern matches. The answer may be a false yes, but
/// never a false no.
pub(crate) fn reaches(topics: Topics, short: &str, pattern: &Pattern) -> bool {
    let text = pattern.as_str();
    // A pattern may match more than its text says: that of a stream joins several patterns, and that of a channel
    // matches other spellings.
    if topics == Topics::Single || Pattern::new(text).ok().as_ref() != Some(pattern) {
        return true;
    }
    let text = dotted(text);
    match (topics, pattern.exact()) {
        (Topics::Type, Some(exact)) => of_type(topics, exact) == short,
        _ => match domain(&text) {
            "*" | ">" | "**" => true,
            literal if topics == Topics::Domain => encoded(literal) == short,
            literal => {
                let literal = encoded(literal);
                short == literal || short.starts_with(&format!("{literal}."))
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: contract/kafka-odd-types: types that a topic cannot carry have topics of their own
    #[test]
    fn names_are_legal_and_differ() {
        let wide = "ß".repeat(255);
        let names = [
            "order",
            "Task Done",
            "größe",
            "",
            ".",
            "..",
            "__",
            "_",
            "a__b",
            "a_b",
            "__5F",
            "dlq.x",
            "everbus.groups",
            "a:b",
            wide.as_str(),
            "events",
        ];
        let mut seen = std::collections::HashSet::new();
        for name in names {
            let out = encoded(name);
            let legal = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            assert!(
                !out.is_empty() && out.len() <= 220 && out.chars().all(legal),
                "{out}"
            );
            assert!(out != "." && out != ".." && !OWN.iter().any(|own| out.starts_with(own)));
            assert!(seen.insert(out), "{name}");
        }
    }

    #[test]
    fn a_pattern_reaches_the_topics_of_what_it_matches() {
        let patterns = [
            "*",
            "order.*",
            "order.>",
            "*.placed",
            "order.placed",
            "system.>",
            "a b",
        ];
        let types = [
            "order.placed",
            "order.a.b",
            "mail.placed",
            "system.x",
            "a b",
            "orders:order-placed",
        ];
        for topics in [Topics::Domain, Topics::Single, Topics::Type] {
            for text in patterns {
                let pattern = Pattern::new(text).unwrap();
                for event_type in types {
                    let short = of_type(topics, event_type);
                    if pattern.matches(event_type) {
                        assert!(
                            reaches(topics, &short, &pattern),
                            "{topics:?} {text} {event_type}"
                        );
                    }
                }
            }
        }
        let orders = Pattern::new("order.*").unwrap();
        assert!(!reaches(Topics::Domain, "mail", &orders));
        assert!(!reaches(Topics::Type, "orders.x", &orders));
    }
}
