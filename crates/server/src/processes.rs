//! The totals of all servers that share the store: each server writes its totals to the store, and reads those of the
//! others.

use std::collections::BTreeMap;
use std::time::Duration;

use everbus::{Bus, Clock as _, EventId, Kv, SystemClock, Timestamp};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::metrics::Metrics;

const BUCKET: &str = "everbus-processes";
/// How often a process reports, if its figures have changed.
const EVERY: Duration = Duration::from_secs(5);
/// How often a process reports unchanged figures, so that the others know that it runs.
const AT_LEAST: Duration = Duration::from_secs(60);
/// A report expires after this time.
const LASTS: Duration = Duration::from_secs(150);

/// The totals of a process since its start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Totals {
    pub(crate) published: f64,
    pub(crate) handled: f64,
    pub(crate) failed: f64,
    pub(crate) dead_lettered: f64,
    /// The buckets of the latency histogram, summed over all groups.
    pub(crate) latency: Vec<u64>,
}

impl Totals {
    pub(crate) fn of(metrics: &Metrics) -> Self {
        Self {
            published: metrics.total("everbus_events_published_total"),
            handled: metrics.total("everbus_events_handled_total"),
            failed: metrics.total("everbus_events_failed_total"),
            dead_lettered: metrics.total("everbus_events_dead_lettered_total"),
            latency: metrics.buckets("everbus_event_latency_seconds"),
        }
    }

    fn add(&mut self, other: &Self) {
        self.published += other.published;
        self.handled += other.handled;
        self.failed += other.failed;
        self.dead_lettered += other.dead_lettered;
        self.latency
            .resize(self.latency.len().max(other.latency.len()), 0);
        for (sum, more) in self.latency.iter_mut().zip(&other.latency) {
            *sum += more;
        }
    }
}

/// The report of one process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) host: String,
    pub(crate) pid: u32,
    pub(crate) version: String,
    pub(crate) started_at: Timestamp,
    pub(crate) at: Timestamp,
    pub(crate) totals: Totals,
}

/// The processes that share the store.
pub(crate) struct Processes {
    kv: Option<Kv>,
    /// The key of this process in the store.
    own: String,
    started_at: Timestamp,
    others: Mutex<BTreeMap<String, Report>>,
    /// The totals of processes that have ended, so that the sum does not fall when a process stops.
    ended: Mutex<Totals>,
}

impl Processes {
    pub(crate) fn new(bus: &Bus) -> Self {
        Self {
            kv: bus.kv(BUCKET).ok(),
            own: EventId::new().to_string(),
            started_at: SystemClock.now(),
            others: Mutex::default(),
            ended: Mutex::default(),
        }
    }

    /// How many processes there are, this one included.
    pub(crate) fn count(&self) -> usize {
        self.others.lock().len() + 1
    }

    /// The reports of all processes, this one first.
    pub(crate) fn reports(&self, metrics: &Metrics) -> Vec<Report> {
        let mut all = vec![self.report(metrics)];
        all.extend(self.others.lock().values().cloned());
        all
    }

    /// The totals of all processes.
    pub(crate) fn add_others(&self, mut own: Totals) -> Totals {
        own.add(&self.ended.lock());
        for other in self.others.lock().values() {
            own.add(&other.totals);
        }
        own
    }

    fn report(&self, metrics: &Metrics) -> Report {
        Report {
            host: host(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_at: self.started_at,
            at: SystemClock.now(),
            totals: Totals::of(metrics),
        }
    }

    /// Reports the totals of this process and reads those of the others, until the future is dropped.
    pub(crate) async fn run(&self, metrics: &Metrics) {
        let Some(kv) = &self.kv else {
            return;
        };
        let report = async {
            let mut last: Option<Report> = None;
            loop {
                let report = self.report(metrics);
                let quiet = last.as_ref().is_some_and(|last| {
                    last.totals == report.totals && report.at.since(last.at) < AT_LEAST
                });
                // After an error the next round reports again.
                if !quiet && kv.put_json(&*self.own, &report).ttl(LASTS).await.is_ok() {
                    last = Some(report);
                }
                tokio::time::sleep(EVERY).await;
            }
        };
        tokio::join!(report, self.follow(kv));
    }

    async fn follow(&self, kv: &Kv) {
        loop {
            if let Ok(mut changes) = kv.watch().await {
                while let Ok(change) = changes.next().await {
                    if change.key != self.own {
                        self.note(change.key, change.value.as_deref());
                    }
                }
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    fn note(&self, key: String, value: Option<&[u8]>) {
        let report = value.and_then(|value| serde_json::from_slice(value).ok());
        let mut others = self.others.lock();
        match report {
            Some(report) => {
                others.insert(key, report);
            }
            None => {
                if let Some(ended) = others.remove(&key) {
                    self.ended.lock().add(&ended.totals);
                }
            }
        }
    }

    /// Deletes the report of this process.
    pub(crate) async fn leave(&self) {
        if let Some(kv) = &self.kv {
            let _ = kv.delete(&*self.own).await;
        }
    }
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    name.map_or_else(|_| "this host".to_owned(), |name| name.trim().to_owned())
}
