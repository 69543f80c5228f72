//! The routing table: each event type is in exactly one stream.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Stream, StreamLimit, canonical, dotted};
use crate::error::{Code, Error, Result};
use crate::pattern::Pattern;
use crate::suggest::nearest;

/// The name of the single stream without any declaration.
pub const DEFAULT_STREAM: &str = "events";
/// The name of the stream that is added for the system's own events if no declared stream covers them.
pub const SYSTEM_STREAM: &str = "SYSTEM";

const SYSTEM_TYPES: &str = "system.>";
const DAY: Duration = Duration::from_secs(24 * 3600);
/// Hints name at most this many streams.
const MOST_NAMED: usize = 10;

/// The streams, and which types are in which.
///
/// The default is one stream for all types. Declared streams must not overlap, and need not cover all
/// types. Publishing a type that no stream covers is refused with [`Code::NoStream`], and mounting a
/// subscription that no stream covers too.
///
/// ```
/// use everbus_core::Streams;
/// let streams = Streams::omni();
/// assert_eq!(&*streams.route("message.received")?.name, "MESSAGES");
/// assert_eq!(&*streams.route("system.dead_letter")?.name, "SYSTEM");
/// assert!(streams.route("order.placed").is_err());
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Streams {
    streams: Arc<[Stream]>,
    declared: bool,
    by_type: Option<Arc<TypeLimits>>,
}

/// The limits of event types where no streams are declared.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TypeLimits {
    /// The limit of each type that is not in `by_type`.
    pub default: Option<StreamLimit>,
    /// The limits of single types, by their dotted names.
    pub by_type: BTreeMap<String, StreamLimit>,
}

impl Default for Streams {
    fn default() -> Self {
        Self::single()
    }
}

impl Streams {
    /// One stream for all types, the system's own events included.
    pub fn single() -> Self {
        let all = Stream::new(DEFAULT_STREAM, ["*", SYSTEM_TYPES]);
        Self {
            // Both patterns and the name are valid.
            streams: all.into_iter().collect(),
            declared: false,
            by_type: None,
        }
    }

    /// A table of declared streams.
    ///
    /// Two streams that share a type are refused, and so are two with one name. The system's own events
    /// (`system.…`) are in one stream too: [`SYSTEM_STREAM`] is added if none covers `system.>`.
    pub fn new(streams: impl IntoIterator<Item = Stream>) -> Result<Self> {
        let mut streams: Vec<Stream> = streams.into_iter().collect();
        if streams.is_empty() {
            return Err(Error::new(Code::InvalidSetting, "no streams are declared")
                .hint("declare at least one stream, or leave the list out: then one stream has all types"));
        }
        let system = Pattern::new(SYSTEM_TYPES)?;
        let covers = |stream: &Stream| {
            let mut patterns = stream.patterns().iter();
            patterns.any(|p| matches!(p.as_str(), SYSTEM_TYPES | "system.**"))
        };
        if !streams.iter().any(covers) {
            streams.push(Stream::new(SYSTEM_STREAM, [SYSTEM_TYPES])?);
        }
        for (index, stream) in streams.iter().enumerate() {
            stream.validate()?;
            if stream.limit.is_some() && stream.types().overlap(&system).is_some() {
                return Err(Error::new(
                    Code::InvalidSetting,
                    format!(
                        "the stream {} has a limit and covers the system's own events, which are never \
                         limited",
                        stream.name
                    ),
                )
                .hint("put system.> into a stream of its own, without a limit"));
            }
            for other in &streams[..index] {
                if other.is_named(&stream.name) {
                    return Err(Error::new(
                        Code::InvalidSetting,
                        format!(
                            "{} and {} are one name, for two streams",
                            other.name, stream.name
                        ),
                    )
                    .hint("give one of them another name"));
                }
                if let Some(error) = overlap(other, stream) {
                    return Err(error);
                }
            }
        }
        Ok(Self {
            streams: streams.into(),
            declared: true,
            by_type: None,
        })
    }

    /// The streams of the *omni* specification with their ages, and one for the system's own events.
    pub fn omni() -> Self {
        let table = [
            ("MESSAGES", "message.>", 30),
            ("IDENTITY", "identity.>", 90),
            ("MEDIA", "media.>", 7),
            ("AGENT", "agent.>", 7),
            ("ACCESS", "access.>", 30),
            ("CHANNEL", "channel.>", 7),
            (SYSTEM_STREAM, SYSTEM_TYPES, 30),
        ];
        let streams = table.iter().filter_map(|(name, types, days)| {
            let stream = Stream::new(*name, [types]).ok()?;
            Some(stream.max_age(*days * DAY))
        });
        Self {
            streams: streams.collect(),
            declared: true,
            by_type: None,
        }
    }

    /// Whether streams were declared; otherwise one stream has all types.
    pub fn is_declared(&self) -> bool {
        self.declared
    }

    /// The same table with limits by type. They apply only where no streams are declared.
    #[must_use]
    pub fn with_type_limits(mut self, limits: TypeLimits) -> Self {
        self.by_type = (limits != TypeLimits::default()).then(|| Arc::new(limits));
        self
    }

    /// The limits by type, where no streams are declared and there are any.
    pub fn type_limits(&self) -> Option<&TypeLimits> {
        self.by_type.as_deref().filter(|_| !self.declared)
    }

    /// The streams, in the order of their declaration.
    pub fn iter(&self) -> std::slice::Iter<'_, Stream> {
        self.streams.iter()
    }

    /// The stream of an event type, if one covers it.
    pub fn of(&self, event_type: &str) -> Option<&Stream> {
        if !self.declared {
            return self.streams.first();
        }
        let event_type = dotted(event_type);
        let covers = |stream: &&Stream| stream.patterns().iter().any(|p| p.matches(&event_type));
        self.streams.iter().find(covers)
    }

    /// The stream of an event type. [`Code::NoStream`] if none covers it.
    pub fn route(&self, event_type: &str) -> Result<&Stream> {
        self.of(event_type)
            .ok_or_else(|| self.uncovered(&format!("the event type {event_type}"), event_type))
    }

    /// Refuses a pattern that shares no type with any stream: nothing could ever match it.
    pub fn reaches(&self, pattern: &Pattern) -> Result<()> {
        let (wanted, text) = match dotted(pattern.as_str()) {
            text if text == pattern.as_str() => (pattern.clone(), text),
            text => (Pattern::new(&text)?, text),
        };
        let reached = |stream: &Stream| wanted.overlap(stream.types()).is_some();
        if !self.declared || self.streams.iter().any(reached) {
            return Ok(());
        }
        Err(self.uncovered(&format!("the pattern {pattern}"), &text))
    }

    /// The stream of a name, in any spelling.
    pub fn named(&self, name: &str) -> Option<&Stream> {
        self.streams.iter().find(|stream| stream.is_named(name))
    }

    /// The types that a user means by the name of a stream.
    ///
    /// With declared streams this is the name of one of them. Without, it is the single stream, a stream of
    /// the *omni* table, a type in any spelling, a pattern, or a domain (`orders`, `ORDERS`).
    pub fn select(&self, name: &str) -> Result<Pattern> {
        if let Some(stream) = self.named(name) {
            return Ok(stream.types().clone());
        }
        if self.declared {
            return Err(self.unknown(name));
        }
        let unnamed = |_| {
            Error::new(
                Code::InvalidPattern,
                format!("{name:?} is not the name of a stream"),
            )
            .hint("a stream is named like orders:order-placed, orders.order.placed or orders")
        };
        let canonical = canonical(name);
        if canonical.contains(['*', '>']) {
            return Pattern::new(&canonical).map_err(unnamed);
        }
        if canonical.contains('.') {
            return Pattern::of_channel(&canonical).map_err(unnamed);
        }
        let mut texts = vec![canonical.clone(), format!("{canonical}.>")];
        let lower = canonical.to_lowercase();
        if lower != canonical && canonical.to_uppercase() == canonical {
            texts.push(format!("{lower}.>"));
            // A log that was written with the omni table can be read by its names without the table.
            let omni = Self::omni();
            let known = omni.iter().find(|stream| *stream.name == canonical);
            let patterns = known.into_iter().flat_map(Stream::patterns);
            texts.extend(patterns.map(|pattern| pattern.as_str().to_owned()));
        }
        let stream = Stream::new(canonical.as_str(), texts).map_err(unnamed)?;
        Ok(stream.types().clone())
    }

    /// The same table with one stream changed, if it exists.
    pub fn with(&self, name: &str, change: impl FnOnce(Stream) -> Stream) -> Result<Self> {
        let mut streams = self.streams.to_vec();
        match streams.iter_mut().find(|stream| stream.is_named(name)) {
            Some(stream) => *stream = change(stream.clone()),
            None => return Err(self.unknown(name)),
        }
        Self::new(streams)
    }

    fn unknown(&self, name: &str) -> Error {
        let error = Error::new(Code::NoStream, format!("there is no stream {name}"));
        if let Some(stream) = self.of(&canonical(name)).filter(|_| self.declared) {
            let hint = format!(
                "it is a type of the stream {}; the streams are {}",
                stream.name,
                self.listed()
            );
            return error.hint(hint);
        }
        let names = self.streams.iter().map(|stream| &*stream.name);
        error.hint(match nearest(&name.to_uppercase(), names.clone()) {
            Some(near) => format!("did you mean {near}? The streams are {}", self.listed()),
            None => match nearest(name, names) {
                Some(near) => format!("did you mean {near}? The streams are {}", self.listed()),
                None => format!("the streams are {}", self.listed()),
            },
        })
    }

    /// The error for a type or pattern that no stream covers; the hint names the nearest stream.
    fn uncovered(&self, what: &str, text: &str) -> Error {
        let domain = |text: &str| text.split('.').next().unwrap_or_default().to_owned();
        let domains: Vec<(String, &Stream)> = self
            .streams
            .iter()
            .flat_map(|stream| {
                let patterns = stream.patterns().iter();
                patterns.map(move |p| (domain(p.as_str()), stream))
            })
            .collect();
        let wanted = domain(text);
        let near = nearest(&wanted, domains.iter().map(|(domain, _)| domain.as_str()));
        let near = near.and_then(|near| domains.iter().find(|(domain, _)| domain == near));
        let hint = match near {
            Some((_, stream)) => format!(
                "the nearest is {} ({}); the streams are {}",
                stream.name,
                stream.types(),
                self.listed()
            ),
            None => format!(
                "declare a stream that covers it; the streams are {}",
                self.listed()
            ),
        };
        Error::new(Code::NoStream, format!("no declared stream covers {what}")).hint(hint)
    }

    fn listed(&self) -> String {
        let mut names: Vec<String> = self
            .streams
            .iter()
            .take(MOST_NAMED)
            .map(|stream| format!("{} ({})", stream.name, stream.types()))
            .collect();
        if self.streams.len() > MOST_NAMED {
            names.push(format!("and {} more", self.streams.len() - MOST_NAMED));
        }
        names.join(", ")
    }
}

impl<'a> IntoIterator for &'a Streams {
    type Item = &'a Stream;
    type IntoIter = std::slice::Iter<'a, Stream>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// The error for two streams that share a type.
fn overlap(a: &Stream, b: &Stream) -> Option<Error> {
    for mine in a.patterns() {
        for other in b.patterns() {
            if let Some(both) = mine.overlap(other) {
                return Some(
                    Error::new(
                        Code::InvalidSetting,
                        format!(
                            "the streams {} ({mine}) and {} ({other}) overlap: {both} would be in both",
                            a.name, b.name
                        ),
                    )
                    .hint("each event type belongs to exactly one stream: narrow one of the patterns"),
                );
            }
        }
    }
    None
}

#[cfg(test)]
mod tests;
