//! The figures of the overview: rates and latencies of the last minutes, the lag of groups, open breakers.
//!
//! A sample is taken every two seconds; the charts show the last ten minutes. Counting a long backlog is slow, so the
//! groups are inspected less often the longer an inspection takes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use everbus::{BreakerState, Bus, Clock as _, GroupInfo, Result, SystemClock, Timestamp};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::auth::Caller;
use crate::metrics::Metrics;
use crate::processes::{Processes, Totals};

const EVERY: Duration = Duration::from_secs(2);
/// Ten minutes of samples.
const SAMPLES: usize = 300;
/// Rates and quantiles are over this many samples: ten seconds.
const WINDOW: usize = 5;
/// Groups are inspected again after this time at the earliest, and after fifty times the duration of the last
/// inspection.
const LOOK_AFTER: Duration = Duration::from_secs(1);
const LOOK_PER_COST: u32 = 50;

/// The samples and the cached state of the groups.
pub(crate) struct Figures {
    bus: Bus,
    metrics: Metrics,
    processes: Processes,
    samples: Mutex<VecDeque<Sample>>,
    lags: Mutex<BTreeMap<String, VecDeque<u64>>>,
    looked: AsyncMutex<Option<Look>>,
}

#[derive(Clone)]
struct Look {
    at: Instant,
    cost: Duration,
    groups: Arc<Vec<GroupInfo>>,
}

struct Sample {
    at: Timestamp,
    totals: Totals,
    point: Point,
}

/// One point of the charts.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Point {
    /// Milliseconds since 1970.
    pub(crate) at: i64,
    /// Events per second.
    pub(crate) published: f64,
    pub(crate) handled: f64,
    pub(crate) failed: f64,
    /// Milliseconds from publish to handled.
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    /// Events that groups have not settled.
    pub(crate) waiting: u64,
    pub(crate) dead_letters: u64,
}

/// One group in the overview.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct GroupFigures {
    pub(crate) name: String,
    pub(crate) behind: u64,
    pub(crate) in_flight: u64,
    pub(crate) waiting: u64,
    pub(crate) dead_letters: u64,
    pub(crate) behind_ms: u64,
    /// Whether the group belongs to one process and ends with it.
    pub(crate) ephemeral: bool,
    /// The number of unsettled events in each sample of the last two minutes.
    pub(crate) spark: Vec<u64>,
}

/// A circuit breaker that is not closed.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct OpenBreaker {
    pub(crate) name: String,
    pub(crate) state: &'static str,
}

/// The figures that the overview shows. The WebSocket sends them every second.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Overview {
    /// The newest point. It has no rates for the token of a tenant, because the rates include other tenants.
    pub(crate) now: Point,
    pub(crate) groups: Vec<GroupFigures>,
    pub(crate) breakers: Vec<OpenBreaker>,
    pub(crate) processes: usize,
}

impl Figures {
    pub(crate) fn new(bus: Bus, metrics: Metrics) -> Self {
        Self {
            processes: Processes::new(&bus),
            bus,
            metrics,
            samples: Mutex::default(),
            lags: Mutex::default(),
            looked: AsyncMutex::default(),
        }
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    pub(crate) fn processes(&self) -> &Processes {
        &self.processes
    }

    /// Takes samples until the future is dropped.
    pub(crate) async fn run(&self) {
        let mut every = interval(EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let sample = async {
            loop {
                every.tick().await;
                self.sample().await;
            }
        };
        tokio::join!(sample, self.processes.run(&self.metrics));
    }

    async fn sample(&self) {
        let own = Totals::of(&self.metrics);
        let totals = self.processes.add_others(own);
        let groups = self.groups().await.unwrap_or_default();
        let waiting = groups.iter().map(|group| group.lag().unsettled()).sum();
        let dead_letters = groups.iter().map(|group| group.dead_letters).sum();
        self.note_lags(&groups);
        let at = SystemClock.now();
        let mut samples = self.samples.lock();
        let point = match samples.get(samples.len().saturating_sub(WINDOW)) {
            Some(before) => point(at, &totals, before),
            None => Point::default(),
        };
        let point = Point {
            at: at.as_micros() / 1000,
            waiting,
            dead_letters,
            ..point
        };
        if samples.len() >= SAMPLES {
            samples.pop_front();
        }
        samples.push_back(Sample { at, totals, point });
    }

    fn note_lags(&self, groups: &[GroupInfo]) {
        let mut lags = self.lags.lock();
        lags.retain(|name, _| groups.iter().any(|group| group.name.to_string() == *name));
        for group in groups {
            let past = lags.entry(group.name.to_string()).or_default();
            if past.len() >= SAMPLES / 5 {
                past.pop_front();
            }
            past.push_back(group.lag().unsettled());
        }
    }

    /// The state of every group, cached: at most a second old if the inspection is quick.
    pub(crate) async fn groups(&self) -> Result<Arc<Vec<GroupInfo>>> {
        let mut looked = self.looked.lock().await;
        if let Some(look) = &*looked
            && look.at.elapsed() < LOOK_AFTER.max(look.cost * LOOK_PER_COST)
        {
            return Ok(look.groups.clone());
        }
        let at = Instant::now();
        let groups = Arc::new(self.bus.groups().await?);
        *looked = Some(Look {
            at,
            cost: at.elapsed(),
            groups: groups.clone(),
        });
        Ok(groups)
    }

    /// The points of the last ten minutes, oldest first; empty for the token of a tenant.
    pub(crate) fn points(&self, caller: &Caller) -> Vec<Point> {
        if caller.tenant().is_some() {
            return Vec::new();
        }
        let samples = self.samples.lock();
        samples.iter().map(|sample| sample.point).collect()
    }

    pub(crate) async fn overview(&self, caller: &Caller) -> Overview {
        let groups = self.groups().await.unwrap_or_default();
        let groups = self.group_figures(&groups, caller);
        let mut now = match caller.tenant() {
            None => self.samples.lock().back().map(|sample| sample.point),
            Some(_) => None,
        }
        .unwrap_or_default();
        now.at = SystemClock.now().as_micros() / 1000;
        now.waiting = groups
            .iter()
            .map(|g| g.behind + g.in_flight + g.waiting)
            .sum();
        now.dead_letters = groups.iter().map(|g| g.dead_letters).sum();
        Overview {
            now,
            groups,
            breakers: self.breakers(caller),
            processes: self.processes.count(),
        }
    }

    pub(crate) fn group_figures(&self, groups: &[GroupInfo], caller: &Caller) -> Vec<GroupFigures> {
        let lags = self.lags.lock();
        let shown = groups.iter().filter_map(|group| {
            let name = caller.group_shown(&group.name)?;
            let spark = lags.get(&group.name.to_string());
            Some(GroupFigures {
                name,
                behind: group.behind,
                in_flight: group.in_flight,
                waiting: group.waiting,
                dead_letters: group.dead_letters,
                behind_ms: u64::try_from(group.behind_for.as_millis()).unwrap_or(u64::MAX),
                ephemeral: group.ephemeral,
                spark: spark
                    .map(|past| past.iter().copied().collect())
                    .unwrap_or_default(),
            })
        });
        shown.collect()
    }

    /// The breakers of this process that are not closed; empty for the token of a tenant.
    pub(crate) fn breakers(&self, caller: &Caller) -> Vec<OpenBreaker> {
        if caller.tenant().is_some() {
            return Vec::new();
        }
        let open = self.bus.breakers().into_iter().filter_map(|breaker| {
            let state = match breaker.state {
                BreakerState::Closed => return None,
                BreakerState::HalfOpen => "half-open",
                BreakerState::Open { .. } => "open",
                _ => "unknown",
            };
            Some(OpenBreaker {
                name: breaker.name.to_string(),
                state,
            })
        });
        open.collect()
    }
}

/// The rates and quantiles between an earlier sample and now.
fn point(now: Timestamp, totals: &Totals, before: &Sample) -> Point {
    let seconds = now.since(before.at).as_secs_f64().max(0.001);
    let rate = |now: f64, before: f64| ((now - before).max(0.0) / seconds * 10.0).round() / 10.0;
    let latency: Vec<u64> = totals
        .latency
        .iter()
        .zip(before.totals.latency.iter().chain(std::iter::repeat(&0)))
        .map(|(now, before)| now.saturating_sub(*before))
        .collect();
    Point {
        published: rate(totals.published, before.totals.published),
        handled: rate(totals.handled, before.totals.handled),
        failed: rate(totals.failed, before.totals.failed),
        p50: crate::metrics::quantile_millis(&latency, 0.5),
        p99: crate::metrics::quantile_millis(&latency, 0.99),
        ..Point::default()
    }
}
