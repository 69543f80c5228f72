//! The settings of overflow, their defaults and their limits.

use std::collections::BTreeMap;

use everbus_core::{Code, Error, Result};

#[cfg(feature = "overflow")]
use super::Place;
use crate::streams;

/// Events with more bytes than this are split by default: the 200 KB of *workflow*, below the limit of
/// EventBridge.
pub const THRESHOLD: usize = 204_800;
/// The largest payload of an event that is split: 64 MiB.
pub const LARGEST_EVENT: usize = 64 * 1024 * 1024;

/// A reference needs some bytes itself.
const SMALLEST_THRESHOLD: usize = 1024;
/// SQLite stores no larger row.
const LARGEST_OBJECT: usize = 512 * 1024 * 1024;

/// When events are split, and where the large parts go.
///
/// ```
/// use everbus::overflow::Overflow;
/// let overflow = Overflow::default() // beside the file
///     .threshold(100_000)
///     .stream("telemetry:window-closed", 1_000_000);
/// # let _ = overflow;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overflow {
    /// Where the objects go: `file:///directory`, a path, or `s3://bucket/prefix` in a build with the
    /// feature `s3`. By default a directory beside the engine's file; a bus without a file and without this
    /// setting splits nothing.
    pub url: Option<String>,
    /// Where older objects are, if they are not all in the place above or beside the file: URLs of the same
    /// form. They are only read; nothing is put or deleted there.
    pub also_read: Vec<String>,
    /// Events whose attributes and payload have more bytes than this are split (204,800).
    pub threshold: usize,
    /// Thresholds of single streams, by canonical name.
    pub streams: BTreeMap<String, usize>,
    /// The largest payload of an event that is split (64 MiB).
    pub limit: usize,
    /// Whether events are split. Events that were split earlier are read in any case.
    pub enabled: bool,
}

impl Default for Overflow {
    fn default() -> Self {
        Self {
            url: None,
            also_read: Vec::new(),
            threshold: THRESHOLD,
            streams: BTreeMap::new(),
            limit: LARGEST_EVENT,
            enabled: true,
        }
    }
}

impl Overflow {
    /// Puts objects there: `file:///directory`, a path, or `s3://bucket/prefix`.
    pub fn to(url: impl Into<String>) -> Self {
        Self {
            url: Some(url.into()),
            ..Self::default()
        }
    }

    /// Splits no event.
    pub fn off() -> Self {
        Self {
            enabled: false,
            ..Self::default()
        }
    }

    /// Also reads objects of older events from there, for example after the place was changed. Nothing is
    /// put or deleted there.
    ///
    /// ```
    /// use everbus::overflow::Overflow;
    /// let overflow = Overflow::to("/new/place").also_read("/old/place");
    /// # let _ = overflow;
    /// ```
    #[must_use]
    pub fn also_read(mut self, url: impl Into<String>) -> Self {
        self.also_read.push(url.into());
        self
    }

    /// Sets the size in bytes above which events are split.
    #[must_use]
    pub fn threshold(mut self, bytes: usize) -> Self {
        self.threshold = bytes;
        self
    }

    /// Sets the size in bytes above which events of one stream are split: `orders.order.placed`, or in the
    /// form `orders:order-placed`.
    #[must_use]
    pub fn stream(mut self, stream: &str, threshold: usize) -> Self {
        self.streams.insert(streams::canonical(stream), threshold);
        self
    }

    /// Sets the largest payload of an event that is split.
    #[must_use]
    pub fn limit(mut self, bytes: usize) -> Self {
        self.limit = bytes;
        self
    }

    pub(crate) fn validate(&self) -> Result<()> {
        let thresholds = self.streams.values().chain([&self.threshold]);
        let thresholds = thresholds.map(|bytes| ("threshold", *bytes, THRESHOLD));
        for (what, bytes, usual) in thresholds.chain([("limit", self.limit, LARGEST_EVENT)]) {
            if !(SMALLEST_THRESHOLD..=LARGEST_OBJECT).contains(&bytes) {
                let what = format!("an overflow {what} of {bytes} bytes");
                return Err(Error::new(Code::InvalidSetting, what).hint(format!(
                    "it is between {SMALLEST_THRESHOLD} and {LARGEST_OBJECT}; {usual} is the default"
                )));
            }
        }
        #[cfg(feature = "overflow")]
        for url in self.url.iter().chain(&self.also_read) {
            Place::parse(url)?;
        }
        Ok(())
    }
}

#[cfg(feature = "overflow")]
impl Overflow {
    /// The threshold of an event type.
    pub(super) fn threshold_of(&self, event_type: &str) -> usize {
        if self.streams.is_empty() {
            return self.threshold;
        }
        let own = self.streams.get(&streams::canonical(event_type));
        own.copied().unwrap_or(self.threshold)
    }
}
