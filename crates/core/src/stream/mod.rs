//! Streams: named logs, and the table that maps each event type to exactly one of them.
//!
//! A stream has a name, the patterns it covers, limits, a dialect and hints for engines. Without any
//! declaration there is one stream for all types ([`Streams::single`]).

mod limit;
mod names;
mod table;

use std::sync::Arc;
use std::time::Duration;

pub use limit::{DEFAULT_WAIT, OnFull, StreamLimit, check_wait};
pub use names::{canonical, dotted, label};
pub use table::{DEFAULT_STREAM, SYSTEM_STREAM, Streams, TypeLimits};

use crate::error::{Code, Error, Result};
use crate::pattern::Pattern;

/// A named log: its event types, its limits, and hints for engines that have a choice.
///
/// ```
/// use std::time::Duration;
/// use everbus_core::{Stream, StreamLimit, Streams};
/// let orders = Stream::new("ORDERS", ["order.>", "cart.*"])?
///     .max_age(Duration::from_secs(30 * 24 * 3600))
///     .limit(StreamLimit::new(100_000))
///     .shards(4);
/// let streams = Streams::new([orders])?;
/// assert_eq!(&*streams.route("order.placed")?.name, "ORDERS");
/// assert!(streams.route("payment.made").is_err());
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Stream {
    /// The name.
    pub name: Arc<str>,
    patterns: Arc<[Pattern]>,
    types: Pattern,
    /// Events received longer ago than this may be removed, once no group has them pending; `None`: not
    /// set.
    pub max_age: Option<Duration>,
    /// How many events may be pending, and what happens at the limit; `None`: no limit.
    pub limit: Option<StreamLimit>,
    /// The dialect of its events on the wire, by name; `None`: the native one.
    pub dialect: Option<Arc<str>>,
    /// The number of shards, for an engine that has them.
    pub shards: Option<u32>,
    /// The number of replicas, for an engine that replicates.
    pub copies: Option<u32>,
}

/// Longer names are refused as a mistake.
const LONGEST_NAME: usize = 255;
/// More shards or copies are refused as a mistake.
const MOST: u32 = 10_000;

impl Stream {
    /// A stream of the types that one of the patterns matches. `orders:order-placed` is read as
    /// `orders.order.placed`.
    pub fn new<P: AsRef<str>>(
        name: impl Into<Arc<str>>,
        patterns: impl IntoIterator<Item = P>,
    ) -> Result<Self> {
        let name = name.into();
        check_name(&name)?;
        let patterns: Vec<Pattern> = patterns
            .into_iter()
            .map(|text| Pattern::new(&dotted(text.as_ref())))
            .collect::<Result<_>>()?;
        if patterns.is_empty() {
            return Err(Error::new(
                Code::InvalidSetting,
                format!("the stream {name} covers no event types"),
            )
            .hint("name patterns such as order.>"));
        }
        Ok(Self {
            types: Pattern::of_stream(&patterns),
            name,
            patterns: patterns.into(),
            max_age: None,
            limit: None,
            dialect: None,
            shards: None,
            copies: None,
        })
    }

    /// Sets how long its events are kept.
    #[must_use]
    pub fn max_age(mut self, age: Duration) -> Self {
        self.max_age = Some(age);
        self
    }

    /// Sets how many of its events may be pending.
    #[must_use]
    pub fn limit(mut self, limit: StreamLimit) -> Self {
        self.limit = Some(limit);
        self
    }

    /// The dialect of its events on the wire.
    #[must_use]
    pub fn dialect(mut self, name: impl Into<Arc<str>>) -> Self {
        self.dialect = Some(name.into());
        self
    }

    /// Sets the number of shards, for an engine that has them.
    #[must_use]
    pub fn shards(mut self, shards: u32) -> Self {
        self.shards = Some(shards);
        self
    }

    /// Sets the number of replicas, for an engine that replicates.
    #[must_use]
    pub fn copies(mut self, copies: u32) -> Self {
        self.copies = Some(copies);
        self
    }

    /// The patterns, as declared.
    pub fn patterns(&self) -> &[Pattern] {
        &self.patterns
    }

    /// All its types as one pattern. The text is for display.
    pub fn types(&self) -> &Pattern {
        &self.types
    }

    /// Whether an event type is in this stream.
    pub fn covers(&self, event_type: &str) -> bool {
        self.types.matches(event_type)
    }

    /// Whether a name means this stream, in any spelling: `orders:order-placed` and `orders.order.placed`
    /// are one name, and so are `MESSAGES` and `messages`.
    pub fn is_named(&self, name: &str) -> bool {
        canonical(&self.name).eq_ignore_ascii_case(&canonical(name))
    }

    /// Refuses invalid settings.
    pub fn validate(&self) -> Result<()> {
        let bad = |what: String, hint: &str| {
            let what = format!("the stream {}: {what}", self.name);
            Err(Error::new(Code::InvalidSetting, what).hint(hint))
        };
        if self.max_age.is_some_and(|age| age.is_zero()) {
            return bad(
                "a max_age of zero".into(),
                "leave it out to keep everything, or say for how long: 30d",
            );
        }
        if let Some(limit) = &self.limit
            && let Err(e) = limit.validate()
        {
            return bad(e.message().to_owned(), e.hint_text().unwrap_or_default());
        }
        for (what, count) in [("shards", self.shards), ("copies", self.copies)] {
            if let Some(count) = count.filter(|count| *count == 0 || *count > MOST) {
                let hint = format!("between 1 and {MOST}, or leave it out");
                return bad(format!("{count} {what}"), &hint);
            }
        }
        Ok(())
    }
}

fn check_name(name: &str) -> Result<()> {
    let bad = |what: &str| {
        Err(Error::new(
            Code::InvalidSetting,
            format!("{name:?} cannot be the name of a stream: {what}"),
        )
        .hint("name it ORDERS, orders or orders:order-placed"))
    };
    if name.is_empty() {
        return bad("it is empty");
    }
    if name.chars().count() > LONGEST_NAME {
        return bad("it has more than 255 characters");
    }
    if name.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return bad("it has a space or a control character");
    }
    if name.contains(['*', '>']) {
        return bad("it is a pattern");
    }
    Ok(())
}
