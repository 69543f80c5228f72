//! Metric families as values, before they are written as text.

use std::collections::BTreeMap;

/// The names and values of labels, in the order in which they are written.
pub(crate) type Labels = Vec<(String, String)>;

/// What a family measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Only grows, until the process ends.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts values by size.
    Histogram,
}

impl Kind {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// All series with one name.
#[derive(Clone, Debug)]
pub(crate) struct Family {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) help: String,
    pub(crate) unit: Option<&'static str>,
    pub(crate) series: BTreeMap<Labels, Value>,
}

/// The value of one series.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// The value of a counter or a gauge.
    Number(f64),
    /// The value of a histogram.
    Distribution(Distribution),
}

/// How many values are in each bucket.
#[derive(Clone, Debug, Default)]
pub(crate) struct Distribution {
    /// The upper bounds.
    pub(crate) bounds: Vec<f64>,
    /// One count per bound, and one for larger values. The counts are not cumulative.
    pub(crate) counts: Vec<u64>,
    pub(crate) sum: f64,
}

impl Distribution {
    pub(crate) fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Converts the values to another unit.
    pub(crate) fn times(mut self, factor: f64) -> Self {
        self.bounds.iter_mut().for_each(|bound| *bound *= factor);
        self.sum *= factor;
        self
    }
}

impl Family {
    pub(crate) fn new(name: &str, kind: Kind, help: &str) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            help: help.to_owned(),
            unit: None,
            series: BTreeMap::new(),
        }
    }

    /// Adds a value to a series. Values with the same labels are summed.
    pub(crate) fn add(&mut self, labels: Labels, value: Value) {
        match (self.series.get_mut(&labels), value) {
            (Some(Value::Number(sum)), Value::Number(more)) => *sum += more,
            (Some(Value::Distribution(sum)), Value::Distribution(more)) => {
                for (sum, more) in sum.counts.iter_mut().zip(&more.counts) {
                    *sum += more;
                }
                sum.sum += more.sum;
            }
            (_, value) => {
                self.series.insert(labels, value);
            }
        }
    }

    /// Adds a number.
    pub(crate) fn number(&mut self, labels: &[(&str, &str)], value: f64) {
        let labels = labels.iter();
        let labels = labels.map(|&(name, value)| (name.to_owned(), value.to_owned()));
        self.add(labels.collect(), Value::Number(value));
    }

    /// Whether nothing was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.series.is_empty()
    }
}
