//! A metrics recorder that keeps everything, for the tests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use parking_lot::Mutex;

/// Keeps everything that is recorded.
#[derive(Clone, Default)]
pub(super) struct Captured(pub(super) Arc<Mutex<BTreeMap<String, Series>>>);

#[derive(Default)]
pub(super) struct Series {
    pub(super) described: Option<(Option<Unit>, String)>,
    pub(super) values: BTreeMap<Vec<(String, String)>, Value>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Counter(u64),
    Gauge(f64),
    Histogram(Vec<f64>),
}

/// The handle of one series.
struct Handle {
    captured: Captured,
    name: String,
    labels: Vec<(String, String)>,
}

impl Captured {
    fn register(&self, key: &Key, zero: Value) -> Arc<Handle> {
        let labels: Vec<_> = key
            .labels()
            .map(|label| (label.key().to_owned(), label.value().to_owned()))
            .collect();
        let name = key.name().to_owned();
        let mut all = self.0.lock();
        let series = all.entry(name.clone()).or_default();
        series.values.entry(labels.clone()).or_insert(zero);
        Arc::new(Handle {
            captured: self.clone(),
            name,
            labels,
        })
    }

    fn describe(&self, name: &KeyName, unit: Option<Unit>, text: &SharedString) {
        let mut all = self.0.lock();
        let series = all.entry(name.as_str().to_owned()).or_default();
        assert!(series.described.is_none(), "{name:?} is described twice");
        series.described = Some((unit, text.to_string()));
    }

    /// The value of a series; the labels are written `stream=a:b group=c`.
    pub(super) fn value(&self, name: &str, labels: &str) -> Value {
        let labels: Vec<_> = labels
            .split(' ')
            .map(|label| label.split_once('=').unwrap())
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        let value = {
            let all = self.0.lock();
            let series = all.get(name);
            series.and_then(|series| series.values.get(&labels).cloned())
        };
        value.unwrap_or_else(|| panic!("no {name} {labels:?}"))
    }

    pub(super) fn names(&self) -> BTreeSet<String> {
        let all = self.0.lock();
        let used = all.iter().filter(|(_, series)| !series.values.is_empty());
        used.map(|(name, _)| name.clone()).collect()
    }

    pub(super) fn series_of(&self, name: &str) -> usize {
        self.0.lock()[name].values.len()
    }
}

impl Handle {
    fn change(&self, change: impl FnOnce(&mut Value)) {
        let mut all = self.captured.0.lock();
        let series = all.get_mut(&self.name).unwrap();
        change(series.values.get_mut(&self.labels).unwrap());
    }

    fn change_gauge(&self, change: impl FnOnce(f64) -> f64) {
        self.change(|value| match value {
            Value::Gauge(now) => *now = change(*now),
            other => panic!("{other:?} is no gauge"),
        });
    }
}

impl CounterFn for Handle {
    fn increment(&self, by: u64) {
        self.change(|value| match value {
            Value::Counter(now) => *now += by,
            other => panic!("{other:?} is no counter"),
        });
    }

    fn absolute(&self, _: u64) {
        panic!("counters are only incremented");
    }
}

impl GaugeFn for Handle {
    fn increment(&self, by: f64) {
        self.change_gauge(|now| now + by);
    }

    fn decrement(&self, by: f64) {
        self.change_gauge(|now| now - by);
    }

    fn set(&self, to: f64) {
        self.change_gauge(|_| to);
    }
}

impl HistogramFn for Handle {
    fn record(&self, recorded: f64) {
        self.change(|value| match value {
            Value::Histogram(all) => all.push(recorded),
            other => panic!("{other:?} is no histogram"),
        });
    }
}

impl Recorder for Captured {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe(&key, unit, &text);
    }

    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe(&key, unit, &text);
    }

    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe(&key, unit, &text);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.register(key, Value::Counter(0)))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.register(key, Value::Gauge(0.0)))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.register(key, Value::Histogram(Vec::new())))
    }
}
