//! The figures of a scenario.

use serde::Serialize;

use crate::Rates;

/// One measured scenario. Fields that do not apply are `None`, `null` in JSON.
#[derive(Debug, Default, Serialize)]
pub struct Figure {
    /// The name of the scenario.
    pub scenario: &'static str,
    /// The rate of Everbus.
    pub events_per_s: Option<f64>,
    /// The rate of the raw loop.
    pub raw_events_per_s: Option<f64>,
    /// The rate of Everbus divided by that of the raw loop.
    pub ratio: Option<f64>,
    /// The median, in microseconds.
    pub p50_us: Option<f64>,
    /// The 99th percentile, in microseconds.
    pub p99_us: Option<f64>,
    /// Resident memory.
    pub rss_mib: Option<f64>,
    /// The target, as a text.
    pub target: String,
    /// Whether the target was met.
    pub met: bool,
    /// Details, for people.
    pub detail: String,
    /// The single measurements, if the scenario reports them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
}

/// One of several measurements, in a small file and in a large one, in microseconds.
#[derive(Debug, Serialize)]
pub struct Part {
    /// What was measured.
    pub name: String,
    /// Everbus in the small file, median.
    pub small_p50_us: f64,
    /// Everbus in the large file, median.
    pub large_p50_us: f64,
    /// Everbus in the large file, 99th percentile.
    pub large_p99_us: f64,
    /// Raw in the small file, median.
    pub raw_small_p50_us: f64,
    /// Raw in the large file, median.
    pub raw_large_p50_us: f64,
    /// Raw in the large file, 99th percentile.
    pub raw_large_p99_us: f64,
}

impl Part {
    /// How fast Everbus is in the large file: 0.5 means that it takes twice as long as raw.
    pub fn ratio(&self) -> f64 {
        round(self.raw_large_p50_us / self.large_p50_us, 3)
    }
}

impl Figure {
    /// Sets the target and whether it was met.
    pub(crate) fn target(target: impl Into<String>, met: bool) -> Self {
        Self {
            target: target.into(),
            met,
            ..Self::default()
        }
    }

    /// Sets both rates and their ratio.
    pub(crate) fn rates(mut self, rates: &Rates) -> Self {
        self.events_per_s = Some(rates.ours.round());
        self.raw_events_per_s = Some(rates.raw.round());
        self.ratio = Some(round(rates.ours / rates.raw, 3));
        self
    }

    pub(crate) fn latencies(mut self, p50_us: f64, p99_us: f64) -> Self {
        self.p50_us = Some(round(p50_us, 1));
        self.p99_us = Some(round(p99_us, 1));
        self
    }

    pub(crate) fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = detail.into();
        self
    }
}

pub(crate) fn round(value: f64, digits: i32) -> f64 {
    let factor = 10_f64.powi(digits);
    (value * factor).round() / factor
}
