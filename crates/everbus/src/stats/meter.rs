//! The counters of one type in one group, and of one published type.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use everbus_core::GroupName;

use super::facade::{self, Labels};
use super::histogram::Histogram;
use super::report::Sums;

/// Why an event was neither handled nor dead-lettered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Skip {
    /// It was older than its stream allows.
    Stale,
    /// The circuit breaker was open and the group is best-effort.
    BestEffort,
    /// The handler skipped it.
    Handler,
    /// It was dropped to make room for newer ones.
    Dropped,
}

impl Skip {
    pub(super) const ALL: [Skip; 4] = [Skip::Stale, Skip::BestEffort, Skip::Handler, Skip::Dropped];

    /// The label in the metrics.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Stale => "stale",
            Self::BestEffort => "best_effort",
            Self::Handler => "handler",
            Self::Dropped => "dropped",
        }
    }
}

/// Counts the outcomes of the events of one type in one group. Nothing here locks or allocates.
///
/// Its counters share cache lines: a group counts its outcomes in one task, so threads rarely write at the
/// same time. If they do, nothing is lost.
pub(crate) struct Meter {
    handled: metrics::Counter,
    latency: Times,
    handler_time: Times,
    failed: Count,
    retried: Count,
    skipped: [Count; Skip::ALL.len()],
    dead_lettered: Count,
    inbox_hits: Count,
    rejections: Count,
}

impl Meter {
    pub(super) fn new(group: &GroupName, event_type: &str) -> Self {
        let labels = Labels::stream(event_type).and_group(group);
        let count = |name| Count::new(labels.counter(name));
        let skipped =
            |skip: Skip| Count::new(labels.and_reason(skip.as_str()).counter(facade::SKIPPED));
        Self {
            handled: labels.counter(facade::HANDLED),
            latency: Times::new(labels.histogram(facade::LATENCY)),
            handler_time: Times::new(labels.histogram(facade::HANDLER_DURATION)),
            failed: count(facade::FAILED),
            retried: count(facade::RETRIED),
            skipped: Skip::ALL.map(skipped),
            dead_lettered: count(facade::DEAD_LETTERED),
            inbox_hits: count(facade::INBOX_HITS),
            rejections: count(facade::BREAKER_REJECTIONS),
        }
    }

    /// An event was handled: the latency since its publish, and the run time of the handlers.
    pub(crate) fn handled(&self, latency: Duration, took: Duration) {
        // `stats` uses the number of latencies; this is the counter of the recorder.
        self.handled.increment(1);
        self.latency.record(latency);
        self.handler_time.record(took);
    }

    /// An attempt failed, with any verdict.
    pub(crate) fn failed(&self) {
        self.failed.add(1);
    }

    /// A failed attempt will be followed by another one.
    pub(crate) fn retried(&self) {
        self.retried.add(1);
    }

    pub(crate) fn skipped(&self, reason: Skip) {
        self.skipped[reason as usize].add(1);
    }

    pub(crate) fn dead_lettered(&self) {
        self.dead_lettered.add(1);
    }

    /// The inbox knew the event; the handler was not called.
    pub(crate) fn inbox_hit(&self) {
        self.inbox_hits.add(1);
    }

    /// The circuit breaker was open; no attempt was made.
    pub(crate) fn rejected(&self) {
        self.rejections.add(1);
    }

    pub(super) fn add_to(&self, sums: &mut Sums) {
        sums.latency.absorb(&self.latency.all);
        sums.handler.absorb(&self.handler_time.all);
        sums.failed += self.failed.get();
        sums.retried += self.retried.get();
        for (sum, count) in sums.skipped.iter_mut().zip(&self.skipped) {
            *sum += count.get();
        }
        sums.dead_lettered += self.dead_lettered.get();
        sums.inbox_hits += self.inbox_hits.get();
        sums.rejections += self.rejections.get();
    }
}

/// Counts the events of one type that were stored.
pub(crate) struct PublishMeter {
    published: Count,
    dropped: Count,
}

impl PublishMeter {
    pub(super) fn new(event_type: &str) -> Self {
        let labels = Labels::stream(event_type);
        let dropped = labels.and_reason(Skip::Dropped.as_str());
        Self {
            published: Count::new(labels.counter(facade::PUBLISHED)),
            dropped: Count::new(dropped.counter(facade::SKIPPED)),
        }
    }

    /// This many new events are durable.
    pub(crate) fn published(&self, events: u64) {
        self.published.add(events);
    }

    /// This many old events were dropped to make room, in any group.
    pub(crate) fn dropped(&self, events: u64) {
        self.dropped.add(events);
    }

    pub(super) fn get(&self) -> u64 {
        self.published.get()
    }

    pub(super) fn add_to(&self, sums: &mut Sums) {
        sums.skipped[Skip::Dropped as usize] += self.dropped.get();
    }
}

/// A counter of ours and the series of the recorder.
struct Count {
    total: AtomicU64,
    series: metrics::Counter,
}

impl Count {
    fn new(series: metrics::Counter) -> Self {
        Self {
            total: AtomicU64::new(0),
            series,
        }
    }

    fn add(&self, n: u64) {
        self.total.fetch_add(n, Ordering::Relaxed);
        self.series.increment(n);
    }

    fn get(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }
}

/// A histogram of ours and the series of the recorder.
struct Times {
    all: Histogram,
    series: metrics::Histogram,
}

impl Times {
    fn new(series: metrics::Histogram) -> Self {
        Self {
            all: Histogram::default(),
            series,
        }
    }

    fn record(&self, duration: Duration) {
        self.all.record(duration);
        self.series.record(duration);
    }
}
