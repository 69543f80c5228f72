//! The figures: a table for people, an array of objects for machines.

use serde::Serialize;

use super::Scenario;
use crate::output::{Output, Table, grouped};
use crate::stop::Outcome;

/// One measured scenario. Fields that do not apply are `None`, `null` in JSON.
#[derive(Debug, Default, Serialize)]
pub(super) struct Figure {
    scenario: &'static str,
    pub(super) events_per_s: Option<f64>,
    pub(super) raw_events_per_s: Option<f64>,
    pub(super) ratio: Option<f64>,
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    pub(super) rss_mib: Option<f64>,
    target: String,
    met: bool,
    pub(super) detail: String,
    /// Its single measurements, if they are reported.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) parts: Vec<Part>,
}

/// One of several measurements, out of a small file and a large one, in microseconds.
#[derive(Debug, Serialize)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) small_p50_us: f64,
    pub(super) large_p50_us: f64,
    pub(super) large_p99_us: f64,
    pub(super) raw_small_p50_us: f64,
    pub(super) raw_large_p50_us: f64,
    pub(super) raw_large_p99_us: f64,
}

impl Part {
    /// How fast it is in the large file: 0.5 takes twice as long as raw.
    pub(super) fn ratio(&self) -> f64 {
        round(self.raw_large_p50_us / self.large_p50_us, 3)
    }
}

impl Figure {
    pub(super) fn new(scenario: Scenario) -> Self {
        Self {
            scenario: scenario.name(),
            ..Self::default()
        }
    }

    /// Sets both rates and their ratio.
    pub(super) fn rates(mut self, ours: f64, raw: f64) -> Self {
        self.events_per_s = Some(ours.round());
        self.raw_events_per_s = Some(raw.round());
        self.ratio = Some(round(ours / raw, 3));
        self
    }

    pub(super) fn latencies(mut self, p50_us: f64, p99_us: f64) -> Self {
        self.p50_us = Some(round(p50_us, 1));
        self.p99_us = Some(round(p99_us, 1));
        self
    }

    pub(super) fn rss(mut self, mib: f64) -> Self {
        self.rss_mib = Some(round(mib, 1));
        self
    }

    /// Sets the target and whether it was met.
    pub(super) fn target(mut self, target: impl Into<String>, met: bool) -> Self {
        self.target = target.into();
        self.met = met;
        self
    }

    pub(super) fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = detail.into();
        self
    }
}

fn round(value: f64, digits: i32) -> f64 {
    let factor = 10_f64.powi(digits);
    (value * factor).round() / factor
}

pub(super) fn print(figures: &[Figure], quick: bool, output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(figures);
    }
    let mut table = Table::new(&[
        "SCENARIO", "EVENTS/S", "RAW/S", "RATIO", "P50 µs", "P99 µs", "RSS MiB", "TARGET", "MET",
    ]);
    for figure in figures {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| v.to_string());
        table.row(vec![
            figure.scenario.to_owned(),
            whole(figure.events_per_s),
            whole(figure.raw_events_per_s),
            number(figure.ratio),
            number(figure.p50_us),
            number(figure.p99_us),
            number(figure.rss_mib),
            figure.target.clone(),
            if figure.met { "yes" } else { "NO" }.to_owned(),
        ]);
    }
    table.print(output)?;
    for figure in figures.iter().filter(|figure| !figure.detail.is_empty()) {
        output.line(format!("{}: {}", figure.scenario, figure.detail))?;
    }
    for figure in figures.iter().filter(|figure| !figure.parts.is_empty()) {
        print_parts(&figure.parts, output)?;
    }
    if quick {
        output.line("quick: a twentieth of everything; the figures mean little")?;
    }
    if cfg!(debug_assertions) {
        output.line("debug build: the figures mean little")?;
    }
    Ok(())
}

fn print_parts(parts: &[Part], output: &mut Output) -> Outcome {
    let mut table = Table::new(&[
        "PART",
        "SMALL µs",
        "LARGE µs",
        "P99",
        "RAW SMALL",
        "RAW LARGE",
        "RAW P99",
        "RATIO",
    ]);
    for part in parts {
        let mut cells = vec![part.name.clone()];
        let times = [
            part.small_p50_us,
            part.large_p50_us,
            part.large_p99_us,
            part.raw_small_p50_us,
            part.raw_large_p50_us,
            part.raw_large_p99_us,
        ];
        cells.extend(times.map(|time| round(time, 0).to_string()));
        cells.push(part.ratio().to_string());
        table.row(cells);
    }
    table.print(output)
}

fn whole(value: Option<f64>) -> String {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate, rounded"
    )]
    value.map_or_else(|| "-".to_owned(), |v| grouped(v as u64))
}
