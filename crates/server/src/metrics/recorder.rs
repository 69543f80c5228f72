//! The recorder for the `metrics` facade: it keeps every series that the bus reports, in fixed memory per series.
//!
//! Histograms have fixed buckets, so nothing has to be drained between two scrapes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use parking_lot::RwLock;

use super::family::{Distribution, Family, Kind, Labels, Value};

/// The upper bounds of the buckets, in seconds: from the commit of a fast disk to a slow handler.
pub(super) const BOUNDS: [f64; 18] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0, 60.0,
];

/// The series of this process. Cloning gives another handle to the same series.
#[derive(Clone, Default)]
pub struct Metrics(Arc<RwLock<BTreeMap<String, Series>>>);

#[derive(Default)]
struct Series {
    help: String,
    unit: Option<Unit>,
    counters: BTreeMap<Labels, Arc<Count>>,
    gauges: BTreeMap<Labels, Arc<Level>>,
    histograms: BTreeMap<Labels, Arc<Buckets>>,
}

/// The recorder of this process.
static INSTALLED: OnceLock<Metrics> = OnceLock::new();

impl Metrics {
    /// Installs the recorder of this process, and returns it. Call this before the bus is opened: a bus reports to the
    /// recorder that is installed at that time. A second call returns the same recorder.
    pub fn install() -> Self {
        let metrics = INSTALLED.get_or_init(|| {
            let metrics = Self::default();
            if metrics::set_global_recorder(metrics.clone()).is_err() {
                tracing::warn!(
                    target: "everbus::metrics",
                    "the program has another metrics recorder; /metrics shows only what is measured at the scrape"
                );
            }
            metrics
        });
        metrics.clone()
    }

    /// Every family with its current values, by name.
    pub(crate) fn families(&self) -> BTreeMap<String, Family> {
        let all = self.0.read();
        let families = all
            .iter()
            .filter_map(|(name, series)| Some((name.clone(), series.family(name)?)));
        families.collect()
    }

    /// One family with its current values.
    pub(super) fn family(&self, name: &str) -> Option<Family> {
        self.0.read().get(name)?.family(name)
    }

    fn describe(&self, name: &KeyName, unit: Option<Unit>, help: &SharedString) {
        let mut all = self.0.write();
        let series = all.entry(name.as_str().to_owned()).or_default();
        series.help = help.to_string();
        series.unit = unit;
    }
}

impl Series {
    fn family(&self, name: &str) -> Option<Family> {
        let mut family = Family::new(name, self.kind()?, &self.help);
        family.unit = self.unit.and_then(unit_suffix);
        let counters = self.counters.iter();
        family.series.extend(counters.map(|(labels, count)| {
            let total = count.0.load(Ordering::Relaxed) as f64;
            (labels.clone(), Value::Number(total))
        }));
        let gauges = self.gauges.iter();
        family
            .series
            .extend(gauges.map(|(labels, level)| (labels.clone(), Value::Number(level.get()))));
        let histograms = self.histograms.iter();
        family
            .series
            .extend(histograms.map(|(labels, buckets)| {
                (labels.clone(), Value::Distribution(buckets.snapshot()))
            }));
        Some(family)
    }

    fn kind(&self) -> Option<Kind> {
        if !self.counters.is_empty() {
            Some(Kind::Counter)
        } else if !self.histograms.is_empty() {
            Some(Kind::Histogram)
        } else if !self.gauges.is_empty() {
            Some(Kind::Gauge)
        } else {
            None
        }
    }
}

/// The unit as a suffix of metric names: OpenMetrics requires that unit and name agree.
fn unit_suffix(unit: Unit) -> Option<&'static str> {
    match unit {
        Unit::Seconds => Some("seconds"),
        Unit::Milliseconds => Some("milliseconds"),
        Unit::Bytes => Some("bytes"),
        _ => None,
    }
}

impl Recorder for Metrics {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(&name, unit, &help);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(&name, unit, &help);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(&name, unit, &help);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let mut all = self.0.write();
        let series = all.entry(key.name().to_owned()).or_default();
        let count = series.counters.entry(labels(key)).or_default();
        Counter::from_arc(count.clone())
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        let mut all = self.0.write();
        let series = all.entry(key.name().to_owned()).or_default();
        let level = series.gauges.entry(labels(key)).or_default();
        Gauge::from_arc(level.clone())
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        let mut all = self.0.write();
        let series = all.entry(key.name().to_owned()).or_default();
        let buckets = series.histograms.entry(labels(key)).or_default();
        Histogram::from_arc(buckets.clone())
    }
}

fn labels(key: &Key) -> Labels {
    let pairs = key.labels();
    pairs
        .map(|label| (label.key().to_owned(), label.value().to_owned()))
        .collect()
}

#[derive(Default)]
struct Count(AtomicU64);

impl CounterFn for Count {
    fn increment(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    fn absolute(&self, to: u64) {
        self.0.fetch_max(to, Ordering::Relaxed);
    }
}

/// A gauge: the bits of an `f64`.
#[derive(Default)]
struct Level(AtomicU64);

impl Level {
    fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }

    fn change(&self, change: impl Fn(f64) -> f64) {
        let update = |bits| Some(change(f64::from_bits(bits)).to_bits());
        let _ = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, update);
    }
}

impl GaugeFn for Level {
    fn increment(&self, by: f64) {
        self.change(|now| now + by);
    }

    fn decrement(&self, by: f64) {
        self.change(|now| now - by);
    }

    fn set(&self, to: f64) {
        self.0.store(to.to_bits(), Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Buckets {
    /// One per bound, and one for everything above the last.
    counts: [AtomicU64; BOUNDS.len() + 1],
    /// The sum of the values, in nanoseconds.
    sum: AtomicU64,
}

impl Buckets {
    fn snapshot(&self) -> Distribution {
        Distribution {
            bounds: BOUNDS.to_vec(),
            counts: self
                .counts
                .iter()
                .map(|count| count.load(Ordering::Relaxed))
                .collect(),
            sum: self.sum.load(Ordering::Relaxed) as f64 / 1e9,
        }
    }
}

impl HistogramFn for Buckets {
    fn record(&self, seconds: f64) {
        let bucket = BOUNDS.partition_point(|bound| *bound < seconds);
        if let Some(count) = self.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.sum
            .fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
    }
}
