//! Counts what the bus does: for `bus.stats()`, and for the recorder of the `metrics` crate if the program
//! has installed one. Memory is bounded for any number of types and groups.
//!
//! The caller keeps a [`Meter`]: it is looked up at the first event of a type and used for each event. A
//! meter reports to the recorder that was installed when the meter was made.

mod bounded;
#[cfg(test)]
mod captured;
mod facade;
mod gauges;
mod histogram;
mod meter;
mod published;
mod report;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{GroupInfo, GroupName, Lag, Streams, Timestamp};

use crate::breaker::BreakerInfo;
use crate::streams;
use bounded::Bounded;
use gauges::{AgeGauges, LagGauges, Queues};
use report::Sums;

pub(crate) use gauges::{BreakerGauge, QueueDepth};
pub(crate) use meter::{Meter, PublishMeter, Skip};
pub(crate) use published::Published;
pub use report::{BusStats, GroupStats, Outcomes, Quantiles, Skipped, TypeStats};

/// At most this many types, pairs of group and type (11 KiB each), groups and breakers are counted
/// separately.
pub(crate) const MOST_SERIES: usize = 1000;
/// The type and the group of all others.
const OTHER: &str = "other";

/// The numbers of one bus.
pub(crate) struct Stats {
    meters: Bounded<(GroupName, Arc<str>), Meter>,
    published: Bounded<Arc<str>, PublishMeter>,
    queues: Bounded<GroupName, Queues>,
    breakers: Bounded<Arc<str>, BreakerGauge>,
    lags: Bounded<(GroupName, Arc<str>), LagGauges>,
    ages: Bounded<(GroupName, Arc<str>), AgeGauges>,
    commit: metrics::Histogram,
    other_group: GroupName,
}

impl Default for Stats {
    fn default() -> Self {
        Self::with_most(MOST_SERIES)
    }
}

impl Stats {
    /// With this limit for each kind of series.
    pub(crate) fn with_most(series: usize) -> Self {
        facade::describe();
        Self {
            meters: Bounded::new(series),
            published: Bounded::new(series),
            queues: Bounded::new(series),
            breakers: Bounded::new(series),
            lags: Bounded::new(series),
            ages: Bounded::new(series),
            commit: facade::Labels::none().histogram(facade::COMMIT),
            // The name is valid, so the fallback is never used.
            other_group: GroupName::new(OTHER).unwrap_or_else(|_| GroupName::unnamed()),
        }
    }

    /// The meter of this type in this group. The caller keeps it.
    pub(crate) fn meter(&self, group: &GroupName, event_type: &Arc<str>) -> Arc<Meter> {
        self.meters.entry(
            (group.clone(), event_type.clone()),
            || Meter::new(group, event_type),
            || Meter::new(&self.other_group, OTHER),
        )
    }

    /// A batch was durable after this time.
    pub(crate) fn committed(&self, after: Duration) {
        self.commit.record(after);
    }

    /// The meter of published events of this type.
    pub(crate) fn publishing(&self, event_type: &Arc<str>) -> Arc<PublishMeter> {
        self.published.entry(
            event_type.clone(),
            || PublishMeter::new(event_type),
            || PublishMeter::new(OTHER),
        )
    }

    /// The depth gauge of a queue of this group, zero at first.
    pub(crate) fn queue(&self, group: &GroupName) -> QueueDepth {
        QueueDepth::new(self.queues.entry(
            group.clone(),
            || Queues::new(group),
            || Queues::new(&self.other_group),
        ))
    }

    /// The state gauge of this breaker.
    pub(crate) fn breaker(&self, name: &str) -> Arc<BreakerGauge> {
        self.breakers
            .entry(name.into(), || BreakerGauge::new(name), BreakerGauge::none)
    }

    /// Sets the lag gauges of groups: by declared stream, or without declared streams by event type. A pair
    /// without lag is set to zero.
    pub(crate) fn lag(&self, groups: &[GroupInfo], streams: &Streams, now: Timestamp) {
        let mut lags: BTreeMap<(GroupName, Arc<str>), Lag> = BTreeMap::new();
        let mut note = |group: &GroupInfo, stream: &str, lag: &Lag| {
            let key = (group.name.clone(), streams::label(stream).into());
            lags.entry(key).or_default().add(lag);
        };
        for group in groups {
            if streams.is_declared() || group.types.is_empty() {
                let of_streams = group.streams.iter();
                of_streams.for_each(|of| note(group, &of.stream, &of.lag));
            } else {
                let of_types = group.types.iter();
                of_types.for_each(|(event_type, lag)| note(group, event_type, lag));
            }
        }
        for (key, gauges) in self.lags.all() {
            if key.is_some_and(|key| !lags.contains_key(&key)) {
                gauges.set(0, Duration::ZERO);
            }
        }
        for ((group, stream), lag) in lags {
            let gauges = self.lags.entry(
                (group.clone(), stream.clone()),
                || LagGauges::new(&group, &stream),
                LagGauges::none,
            );
            gauges.set(lag.unsettled(), lag.behind_for(now));
        }
    }

    /// Sets how much of the age at which the server removes events the oldest one has reached, and counts those
    /// that were removed.
    pub(crate) fn age_used(&self, group: &GroupName, stream: &Arc<str>, used: f64, dropped: u64) {
        let label: Arc<str> = streams::label(stream).into();
        let gauges = self.ages.entry(
            (group.clone(), label.clone()),
            || AgeGauges::new(group, &label),
            AgeGauges::none,
        );
        gauges.set(used, dropped);
    }

    /// All counts so far. Counts that change meanwhile may be of different moments.
    pub(crate) fn snapshot(&self, breakers: Vec<BreakerInfo>) -> BusStats {
        let mut types = BTreeMap::<Arc<str>, (u64, Sums)>::new();
        let mut groups = BTreeMap::<GroupName, (u64, Sums)>::new();
        let other: Arc<str> = OTHER.into();
        for (key, meter) in self.meters.all() {
            let (group, event_type) =
                key.unwrap_or_else(|| (self.other_group.clone(), other.clone()));
            meter.add_to(&mut types.entry(event_type).or_default().1);
            meter.add_to(&mut groups.entry(group).or_default().1);
        }
        for (event_type, meter) in self.published.all() {
            let event_type = event_type.unwrap_or_else(|| other.clone());
            let (published, sums) = types.entry(event_type).or_default();
            *published += meter.get();
            meter.add_to(sums);
        }
        for (group, queues) in self.queues.all() {
            let group = group.unwrap_or_else(|| self.other_group.clone());
            groups.entry(group).or_default().0 += queues.depth();
        }
        let types = types.into_iter().map(|(event_type, (published, sums))| {
            let outcomes = sums.into();
            (
                event_type.as_ref().to_owned(),
                TypeStats {
                    published,
                    outcomes,
                },
            )
        });
        let groups = groups.into_iter().map(|(group, (queue_depth, sums))| {
            let outcomes = sums.into();
            (
                group,
                GroupStats {
                    queue_depth,
                    outcomes,
                },
            )
        });
        BusStats {
            types: types.collect(),
            groups: groups.collect(),
            breakers,
        }
    }
}
