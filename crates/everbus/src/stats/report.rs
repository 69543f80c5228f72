//! The result of `bus.stats()`.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::time::Duration;

use everbus_core::GroupName;
use serde::Serialize;

use super::histogram::Distribution;
use super::meter::Skip;
use crate::breaker::BreakerInfo;

/// The counts of a bus since it was opened, in this process.
///
/// Memory is bounded: after 1,000 types, and after 1,000 pairs of a type and a group, all further ones are
/// counted together under the name `other`.
///
/// The same numbers go to the recorder of the `metrics` crate, if the program installed one before
/// it opened the bus.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BusStats {
    /// By event type, all groups together.
    pub types: BTreeMap<String, TypeStats>,
    /// By group, all types together.
    pub groups: BTreeMap<GroupName, GroupStats>,
    /// The circuit breakers.
    pub breakers: Vec<BreakerInfo>,
}

/// The events of one type. It derefs to its [`Outcomes`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TypeStats {
    /// Events stored; duplicates are not counted.
    pub published: u64,
    /// Their outcomes, summed over the groups.
    #[serde(flatten)]
    pub outcomes: Outcomes,
}

/// The events of one group. It derefs to its [`Outcomes`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct GroupStats {
    /// Events that were fetched and are not settled, at this moment.
    pub queue_depth: u64,
    /// The outcomes of the others.
    #[serde(flatten)]
    pub outcomes: Outcomes,
}

/// The outcomes of events. An event counts once for every subscribed group.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Outcomes {
    /// Events that their handlers finished.
    pub handled: u64,
    /// Attempts that failed.
    pub failed: u64,
    /// Failed attempts after which another one follows.
    pub retried: u64,
    /// Events that were not handled, by reason.
    pub skipped: Skipped,
    /// Events that became dead letters.
    pub dead_lettered: u64,
    /// Events that the inbox knew as handled already.
    pub inbox_hits: u64,
    /// Events that met an open circuit breaker.
    pub breaker_rejections: u64,
    /// From the publish of an event until it was handled.
    pub latency: Quantiles,
    /// How long handlers ran for an event that they finished.
    pub handler_time: Quantiles,
}

/// Events that were settled without a handler's work, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Skipped {
    /// Older than `max_staleness` allows.
    pub stale: u64,
    /// The circuit breaker was open and the group is best-effort.
    pub best_effort: u64,
    /// The handler returned `skip`.
    pub handler: u64,
    /// Removed by `drop_oldest` to make room.
    pub dropped: u64,
}

impl Skipped {
    /// All reasons together.
    pub fn total(&self) -> u64 {
        self.stale + self.best_effort + self.handler + self.dropped
    }
}

/// Durations in milliseconds. Quantiles and the mean are within 4 %, the maximum is exact; all are 0
/// if nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Quantiles {
    /// How many were measured.
    pub count: u64,
    /// The mean.
    pub mean: f64,
    /// Half of them took no longer.
    pub p50: f64,
    /// 95 % took no longer.
    pub p95: f64,
    /// 99 % took no longer.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

impl Deref for TypeStats {
    type Target = Outcomes;

    fn deref(&self) -> &Outcomes {
        &self.outcomes
    }
}

impl Deref for GroupStats {
    type Target = Outcomes;

    fn deref(&self) -> &Outcomes {
        &self.outcomes
    }
}

/// The sums of several meters.
#[derive(Default)]
pub(super) struct Sums {
    pub(super) latency: Distribution,
    pub(super) handler: Distribution,
    pub(super) failed: u64,
    pub(super) retried: u64,
    pub(super) skipped: [u64; Skip::ALL.len()],
    pub(super) dead_lettered: u64,
    pub(super) inbox_hits: u64,
    pub(super) rejections: u64,
}

impl From<Sums> for Outcomes {
    fn from(sums: Sums) -> Self {
        let skipped = |reason: Skip| sums.skipped[reason as usize];
        Self {
            handled: sums.latency.count(),
            failed: sums.failed,
            retried: sums.retried,
            skipped: Skipped {
                stale: skipped(Skip::Stale),
                best_effort: skipped(Skip::BestEffort),
                handler: skipped(Skip::Handler),
                dropped: skipped(Skip::Dropped),
            },
            dead_lettered: sums.dead_lettered,
            inbox_hits: sums.inbox_hits,
            breaker_rejections: sums.rejections,
            latency: Quantiles::from(&sums.latency),
            handler_time: Quantiles::from(&sums.handler),
        }
    }
}

impl From<&Distribution> for Quantiles {
    fn from(durations: &Distribution) -> Self {
        let millis = |duration: Duration| duration.as_secs_f64() * 1e3;
        Self {
            count: durations.count(),
            mean: millis(durations.mean()),
            p50: millis(durations.quantile(0.50)),
            p95: millis(durations.quantile(0.95)),
            p99: millis(durations.quantile(0.99)),
            max: millis(durations.max()),
        }
    }
}
