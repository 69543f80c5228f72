//! Patterns that select event types: globs over dotted names.

use std::fmt;
use std::str::FromStr;

use crate::builder::MAX_TYPE_CHARS;
use crate::error::{Code, Error, Result};
use crate::stream::{canonical, dotted};

/// A compiled glob over event types. Matching allocates nothing.
///
/// | pattern | matches | does not match |
/// |---|---|---|
/// | `user.created` | `user.created` | `user.updated` |
/// | `user.*` | `user.created` | `order.created`, `user.name.changed` |
/// | `order.*.shipped` | `order.123.shipped` | `order.shipped` |
/// | `*` | everything except `system.…` | `system.dead_letter` |
/// | `order.>`, `order.**` | `order.placed`, `order.123.shipped` | `order` |
/// | `system.>` | `system.dead_letter` | |
///
/// A `*` stands for one whole segment, also at the end. `>` and `**` may only come last and stand for one
/// or more segments. Alone, `*`, `>` and `**` match everything but the system's own events.
///
/// ```
/// use everbus_core::Pattern;
/// let shipped: Pattern = "order.*.shipped".parse()?;
/// assert!(shipped.matches("order.123.shipped"));
/// assert!(!shipped.matches("order.shipped"));
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Pattern {
    text: Box<str>,
    form: Form,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Form {
    /// Everything but `system.…`.
    All,
    /// No wildcard: compare the text.
    Exact,
    /// Segment by segment; `rest` requires one or more further segments.
    Segments {
        segments: Box<[Segment]>,
        rest: bool,
    },
    /// The types of a stream: any of these patterns, and a channel (`orders:order-placed`) by its dotted
    /// form.
    Stream(Box<[Pattern]>),
    /// One type in any spelling: compare canonical names.
    Channel,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Segment {
    Literal(Box<str>),
    One,
}

/// The first segment of the events that the system publishes about itself.
const SYSTEM: &str = "system.";

impl Pattern {
    /// Compiles a pattern.
    pub fn new(text: &str) -> Result<Self> {
        let bad = |what: String| Err(Error::new(Code::InvalidPattern, what).hint(HINT));
        if text.is_empty() {
            return bad("the pattern is empty".into());
        }
        if text.len() > MAX_TYPE_CHARS && text.chars().count() > MAX_TYPE_CHARS {
            return bad(format!(
                "the pattern has more than {MAX_TYPE_CHARS} characters"
            ));
        }
        if let Some(c) = text.chars().find(|c| c.is_control()) {
            return bad(format!("the pattern {text:?} contains {c:?}"));
        }
        if matches!(text, "*" | ">" | "**") {
            return Ok(Self {
                text: text.into(),
                form: Form::All,
            });
        }
        if !text.contains(['*', '>']) {
            return Ok(Self {
                text: text.into(),
                form: Form::Exact,
            });
        }
        let parts: Vec<&str> = text.split('.').collect();
        let mut segments = Vec::with_capacity(parts.len());
        let mut rest = false;
        for (index, part) in parts.iter().enumerate() {
            let last = index + 1 == parts.len();
            match *part {
                "*" => segments.push(Segment::One),
                ">" | "**" if last => rest = true,
                ">" | "**" => return bad(format!("in {text:?}, {part} is not at the end")),
                literal if literal.contains(['*', '>']) => {
                    return bad(format!(
                        "in {text:?}, {literal:?} mixes a wildcard with text"
                    ));
                }
                literal => segments.push(Segment::Literal(literal.into())),
            }
        }
        Ok(Self {
            text: text.into(),
            form: Form::Segments {
                segments: segments.into(),
                rest,
            },
        })
    }

    /// The types that any of these patterns matches. A type that is written as a channel matches by its
    /// dotted form ([`dotted`]). The text is for display: it cannot be compiled again.
    pub(crate) fn of_stream(patterns: &[Pattern]) -> Self {
        let texts: Vec<&str> = patterns.iter().map(Pattern::as_str).collect();
        Self {
            text: texts.join(", ").into(),
            form: Form::Stream(patterns.into()),
        }
    }

    /// One type in any spelling: `orders:order-placed`, `orders.order.placed` and `orders.order-placed` are
    /// the same.
    pub(crate) fn of_channel(name: &str) -> Result<Self> {
        let pattern = Self::new(&canonical(name))?;
        Ok(Self {
            form: Form::Channel,
            ..pattern
        })
    }

    /// A type that both patterns match, if there is one.
    ///
    /// ```
    /// use everbus_core::Pattern;
    /// let (all_orders, shipped) = (Pattern::new("order.>")?, Pattern::new("*.*.shipped")?);
    /// assert_eq!(all_orders.overlap(&shipped).as_deref(), Some("order.x.shipped"));
    /// assert_eq!(all_orders.overlap(&Pattern::new("user.>")?), None);
    /// # Ok::<(), everbus_core::Error>(())
    /// ```
    pub fn overlap(&self, other: &Pattern) -> Option<String> {
        match (&self.form, &other.form) {
            (Form::Stream(patterns), _) => patterns.iter().find_map(|p| p.overlap(other)),
            (_, Form::Stream(patterns)) => patterns.iter().find_map(|p| self.overlap(p)),
            (Form::Channel, _) => other.matches(&self.text).then(|| self.text.to_string()),
            (_, Form::Channel) => self.matches(&other.text).then(|| other.text.to_string()),
            _ => self.shape().overlap(&other.shape()),
        }
    }

    fn shape(&self) -> Shape<'_> {
        let (segments, rest) = match &self.form {
            Form::All => (Vec::new(), true),
            Form::Segments { segments, rest } => {
                let segments = segments.iter().map(|segment| match segment {
                    Segment::Literal(literal) => Some(&**literal),
                    Segment::One => None,
                });
                (segments.collect(), *rest)
            }
            Form::Exact | Form::Channel | Form::Stream(_) => {
                (self.text.split('.').map(Some).collect(), false)
            }
        };
        Shape {
            segments,
            rest,
            spares_system: matches!(self.form, Form::All),
        }
    }

    /// Whether an event type matches.
    pub fn matches(&self, event_type: &str) -> bool {
        match &self.form {
            Form::All => !event_type.starts_with(SYSTEM),
            Form::Exact => *self.text == *event_type,
            Form::Segments { segments, rest } => {
                let mut parts = event_type.split('.');
                let all = segments
                    .iter()
                    .all(|segment| match (segment, parts.next()) {
                        (_, None) => false,
                        (Segment::One, Some(_)) => true,
                        (Segment::Literal(literal), Some(part)) => **literal == *part,
                    });
                all && parts.next().is_some() == *rest
            }
            Form::Stream(patterns) => {
                let event_type = dotted(event_type);
                patterns.iter().any(|pattern| pattern.matches(&event_type))
            }
            Form::Channel => canonical(event_type) == *self.text,
        }
    }

    /// The pattern as written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The one type this matches, if it has no wildcard.
    pub fn exact(&self) -> Option<&str> {
        matches!(self.form, Form::Exact).then_some(&self.text)
    }
}

/// The form of the types that a pattern matches: literal or free segments, and perhaps more.
struct Shape<'a> {
    segments: Vec<Option<&'a str>>,
    rest: bool,
    /// Whether the pattern leaves out `system.…`.
    spares_system: bool,
}

impl Shape<'_> {
    fn overlap(&self, other: &Shape<'_>) -> Option<String> {
        let (mine, others) = (self.segments.len(), other.segments.len());
        let length = match (self.rest, other.rest) {
            (false, false) if mine == others => mine,
            (true, false) if others > mine => others,
            (false, true) if mine > others => mine,
            (true, true) => mine.max(others) + 1,
            _ => return None,
        };
        let mut example: Vec<&str> = Vec::with_capacity(length);
        for index in 0..length {
            let mine = self.segments.get(index).copied().flatten();
            let others = other.segments.get(index).copied().flatten();
            example.push(match (mine, others) {
                (Some(a), Some(b)) if a != b => return None,
                (Some(literal), _) | (None, Some(literal)) => literal,
                (None, None) => "x",
            });
        }
        let example = example.join(".");
        let spared = self.spares_system || other.spares_system;
        (!(spared && example.starts_with(SYSTEM))).then_some(example)
    }
}

const HINT: &str = "use whole segments: user.created, user.*, order.*.shipped, order.> or * alone";

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::new(s)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pattern({})", self.text)
    }
}

impl serde::Serialize for Pattern {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl TryFrom<&str> for Pattern {
    type Error = Error;

    fn try_from(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn p(text: &str) -> Pattern {
        text.parse().unwrap()
    }

    // conformance: embedded/match-exact: user.created matches itself alone
    // conformance: embedded/match-last-segment: user.* matches user.created and not order.created
    // conformance: embedded/match-everything: a lone star matches everything
    // conformance: embedded/match-middle-segment: order.*.shipped matches order.123.shipped and not order.shipped
    #[test]
    fn the_table_of_the_specification() {
        let table: &[(&str, &[&str], &[&str])] = &[
            ("user.created", &["user.created"], &["user.updated"]),
            (
                "user.*",
                &["user.created", "user.updated"],
                &["order.created"],
            ),
            ("*", &["user.created", "x", "Task Processing Started"], &[]),
            (
                "order.*.shipped",
                &["order.123.shipped"],
                &["order.shipped"],
            ),
        ];
        for (pattern, yes, no) in table {
            yes.iter()
                .for_each(|t| assert!(p(pattern).matches(t), "{pattern} {t}"));
            no.iter()
                .for_each(|t| assert!(!p(pattern).matches(t), "{pattern} {t}"));
        }
    }

    // conformance: bus/pattern-rest: > and ** match one or more segments
    #[test]
    fn a_star_is_one_segment_and_a_tail_is_one_or_more() {
        assert!(!p("user.*").matches("user.name.changed"));
        assert!(!p("user.*").matches("user"));
        for tail in ["order.>", "order.**"] {
            assert!(p(tail).matches("order.a") && p(tail).matches("order.a.b.c"));
            assert!(!p(tail).matches("order") && !p(tail).matches("orders.a"));
        }
        assert!(p("*.*").matches("a.b") && !p("*.*").matches("a"));
    }

    // conformance: bus/system: a lone star leaves out system events
    #[test]
    fn everything_leaves_out_the_systems_own_events() {
        for all in ["*", ">", "**"] {
            assert!(!p(all).matches("system.dead_letter"));
            assert!(p(all).matches("system") && p(all).matches("systems.a"));
        }
        assert!(p("system.>").matches("system.dead_letter"));
        assert!(p("system.*").matches("system.dead_letter"));
    }

    // conformance: embedded/match-no-other-wildcards: a wildcard is a whole segment, everything else is refused
    #[test]
    fn malformed_patterns_are_refused() {
        for bad in [
            "",
            "us*",
            "a.b*",
            ">.a",
            "a.**.b",
            "a.>b",
            "a\n",
            &"x".repeat(256),
        ] {
            let e = Pattern::new(bad).unwrap_err();
            assert_eq!(e.code(), Code::InvalidPattern, "{bad:?}");
            assert!(e.hint_text().is_some());
        }
    }

    fn some_pattern() -> impl Strategy<Value = String> {
        let segment = prop::sample::select(vec!["a", "b", "*", "system"]);
        let tail = prop::option::of(Just(">"));
        (prop::collection::vec(segment, 0..4), tail)
            .prop_map(|(mut segments, tail)| {
                segments.extend(tail);
                segments.join(".")
            })
            .prop_filter("a pattern has segments", |text| !text.is_empty())
    }

    #[test]
    fn a_stream_matches_a_channel_by_its_dotted_form() {
        let stream = Pattern::of_stream(&[p("orders.>"), p("cart.*")]);
        assert_eq!(stream.as_str(), "orders.>, cart.*");
        for name in ["orders:order-placed", "orders.order-placed", "cart.filled"] {
            assert!(stream.matches(name), "{name}");
        }
        // Only a colon after the domain makes a channel: this type has two segments.
        assert!(stream.matches("cart.was-filled") && !stream.matches("cart:was-filled"));
        assert_eq!(stream.exact(), None);
        let channel = Pattern::of_channel("orders:order-placed").unwrap();
        for name in [
            "orders:order-placed",
            "orders.order.placed",
            "orders.order-placed",
        ] {
            assert!(channel.matches(name), "{name}");
        }
        assert_eq!(channel.exact(), None);
        assert!(channel.overlap(&stream).is_some() && stream.overlap(&p("*")).is_some());
    }

    /// The obvious recursive matcher, as an oracle.
    fn oracle(pattern: &[&str], name: &[&str]) -> bool {
        match (pattern, name) {
            ([], []) => true,
            ([">"] | ["**"], [_, ..]) => true,
            (["*", p @ ..], [_, n @ ..]) => oracle(p, n),
            ([a, p @ ..], [b, n @ ..]) => a == b && oracle(p, n),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn matching_agrees_with_the_oracle(
            pattern in prop::collection::vec(prop::sample::select(vec!["a", "b", "*", ""]), 2..5),
            tail in prop::option::of(prop::sample::select(vec![">", "**"])),
            name in prop::collection::vec(prop::sample::select(vec!["a", "b", ""]), 1..6),
        ) {
            let mut pattern = pattern;
            pattern.extend(tail);
            let compiled = Pattern::new(&pattern.join(".")).unwrap();
            prop_assert_eq!(compiled.matches(&name.join(".")), oracle(&pattern, &name));
        }

        // conformance: contract/streams-overlap: two patterns that share a type are found, with such a type
        #[test]
        fn an_overlap_is_a_type_that_both_match_and_no_overlap_is_none(
            a in some_pattern(),
            b in some_pattern(),
            name in prop::collection::vec(prop::sample::select(vec!["a", "b", "x", "system"]), 1..6),
        ) {
            let (a, b, name) = (p(&a), p(&b), name.join("."));
            prop_assert_eq!(a.overlap(&b).is_some(), b.overlap(&a).is_some());
            match a.overlap(&b) {
                Some(both) => prop_assert!(a.matches(&both) && b.matches(&both), "{}", both),
                None => prop_assert!(!(a.matches(&name) && b.matches(&name)), "{}", name),
            }
        }

        #[test]
        fn any_text_compiles_or_is_refused(text in "\\PC{0,20}", name in "\\PC{0,20}") {
            if let Ok(pattern) = Pattern::new(&text) {
                pattern.matches(&name);
                prop_assert_eq!(pattern.as_str(), text);
            }
        }
    }
}
