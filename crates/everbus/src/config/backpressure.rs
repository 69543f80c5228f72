//! The section `backpressure`: what happens when consumers cannot keep up.

use std::collections::BTreeMap;
use std::time::Duration;

use super::duration::LONGEST;
use super::limits::Names;
use super::section::{Reader, Section};
use crate::admission::PublishRate;
use crate::streams::canonical;

pub(super) const KEYS: &[&str] = &["max_staleness_ms", "publish_rate"];

/// Which old events are skipped, and the publish rate.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Backpressure {
    /// The age limit of events by canonical stream name (`max_staleness_ms`). Zero: no limit.
    pub max_staleness: BTreeMap<String, Duration>,
    /// The rate limit of one bus (`publish_rate`, in events per second).
    pub publish_rate: Option<PublishRate>,
}

impl Backpressure {
    /// The age limit of this event type; `None` if its events are never skipped.
    pub fn max_staleness(&self, event_type: &str) -> Option<Duration> {
        let limit = self.max_staleness.get(&canonical(event_type)).copied();
        limit.filter(|limit| !limit.is_zero())
    }
}

pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>) -> Backpressure {
    let longest = u64::try_from(LONGEST.as_millis()).unwrap_or(u64::MAX);
    let mut backpressure = Backpressure::default();
    let mut seen = Names::default();
    let thresholds = section.get("max_staleness_ms");
    for field in reader.names(thresholds, "names of streams to milliseconds") {
        let name = seen.add(reader, &field);
        let millis = reader.whole(Some(field), 0..=longest, "milliseconds");
        if let (Some(name), Some(millis)) = (name, millis) {
            let limit = Duration::from_millis(millis);
            backpressure.max_staleness.insert(name, limit);
        }
    }
    let rate = section.get("publish_rate");
    let rate = reader.number(rate, 0.001..=1e9, "events per second");
    backpressure.publish_rate = rate.map(PublishRate::new);
    backpressure
}
