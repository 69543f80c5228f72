//! Gauges: how many events a group holds, the state of a circuit breaker, the lag.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use everbus_core::GroupName;
use metrics::{Counter, Gauge};

use super::facade::{self, Labels};
use crate::breaker::BreakerState;

/// The queues of one group in this process.
pub(super) struct Queues {
    depth: AtomicU64,
    series: Gauge,
}

impl Queues {
    pub(super) fn new(group: &GroupName) -> Self {
        Self {
            depth: AtomicU64::new(0),
            series: Labels::group(group).gauge(facade::QUEUE_DEPTH),
        }
    }

    pub(super) fn depth(&self) -> u64 {
        self.depth.load(Ordering::Relaxed)
    }
}

/// The depth of one queue: events fetched and not settled. It counts until it is dropped.
pub(crate) struct QueueDepth {
    /// What this queue has added to the shared depth.
    own: AtomicU64,
    queues: Arc<Queues>,
}

impl QueueDepth {
    pub(super) fn new(queues: Arc<Queues>) -> Self {
        Self {
            own: AtomicU64::new(0),
            queues,
        }
    }

    pub(crate) fn set(&self, depth: u64) {
        let before = self.own.swap(depth, Ordering::Relaxed);
        let queues = &self.queues;
        // Adds differences, because several queues may share a series, also queues of another bus.
        if depth > before {
            queues.depth.fetch_add(depth - before, Ordering::Relaxed);
            queues.series.increment((depth - before) as f64);
        } else if depth < before {
            queues.depth.fetch_sub(before - depth, Ordering::Relaxed);
            queues.series.decrement((before - depth) as f64);
        }
    }
}

impl Drop for QueueDepth {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// The lag gauges of one group in one stream.
pub(super) struct LagGauges {
    events: Gauge,
    millis: Gauge,
}

impl LagGauges {
    pub(super) fn new(group: &GroupName, stream: &str) -> Self {
        let labels = Labels::stream(stream).and_group(group);
        Self {
            events: labels.gauge(facade::LAG_EVENTS),
            millis: labels.gauge(facade::LAG_MILLIS),
        }
    }

    /// No gauges: a series shared by several pairs would be meaningless.
    pub(super) fn none() -> Self {
        Self {
            events: Gauge::noop(),
            millis: Gauge::noop(),
        }
    }

    pub(super) fn set(&self, events: u64, behind: Duration) {
        self.events.set(events as f64);
        self.millis.set(behind.as_millis() as f64);
    }
}

/// How close the server is to removing events that a group has not settled, and how many it has removed.
pub(super) struct AgeGauges {
    used: Gauge,
    dropped: Counter,
}

impl AgeGauges {
    pub(super) fn new(group: &GroupName, stream: &str) -> Self {
        let labels = Labels::stream(stream).and_group(group);
        Self {
            used: labels.gauge(facade::AGE_USED),
            dropped: labels.counter(facade::DROPPED),
        }
    }

    /// No gauges: a series shared by several pairs would be meaningless.
    pub(super) fn none() -> Self {
        Self {
            used: Gauge::noop(),
            dropped: Counter::noop(),
        }
    }

    pub(super) fn set(&self, used: f64, dropped: u64) {
        self.used.set(used);
        self.dropped.increment(dropped);
    }
}

/// The state gauge of one circuit breaker.
pub(crate) struct BreakerGauge(Gauge);

impl BreakerGauge {
    pub(super) fn new(name: &str) -> Self {
        Self(Labels::breaker(name).gauge(facade::BREAKER_STATE))
    }

    /// No gauge: a series shared by several breakers would be meaningless.
    pub(super) fn none() -> Self {
        Self(Gauge::noop())
    }

    pub(crate) fn set(&self, state: BreakerState) {
        self.0.set(match state {
            BreakerState::Closed => 0.0,
            BreakerState::HalfOpen => 1.0,
            BreakerState::Open { .. } => 2.0,
        });
    }
}
