//! Metrics at `/metrics`: the counters of the bus, and values that are read at the scrape.

mod compat;
mod family;
mod recorder;
mod text;

use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use everbus::{Clock as _, GroupInfo, SystemClock, streams};
use everbus_jobs::Jobs;
use everbus_jobs::events::{HealthSummary, TaskState};
use everbus_jobs::health::Thresholds;
use http::{HeaderMap, header};

pub use recorder::Metrics;

use crate::auth::Scope;
use crate::problem::Problem;
use crate::routes::{Access, Route};
use crate::state::AppState;
use family::{Family, Kind, Value};
use text::Format;

pub(crate) fn routes() -> Vec<Route> {
    vec![
        Route::get("/metrics", Access::Scope(Scope::Read), scrape)
            .all_tenants()
            .summary("Metrics for Prometheus")
            .answers("text/plain"),
    ]
}

async fn scrape(State(state): State<AppState>, headers: HeaderMap) -> Result<Response, Problem> {
    let accept = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok());
    let format = Format::accepted(accept);
    // The groups come first: inspecting them sets the gauges of the lag.
    let groups = state.live().figures().groups().await?;
    let mut families = state.live().figures().metrics().families();
    let looked_up = [
        dead_letters(&groups),
        listeners(&state),
        build(),
        started(&state),
    ];
    let looked_up = looked_up
        .into_iter()
        .chain(file(&state))
        .chain(outbox(&state).await)
        .chain(task_health(&state).await);
    families.extend(looked_up.map(|family| (family.name.clone(), family)));
    let stats = state.bus().stats();
    for compat in &state.options().metrics_compat {
        compat::add(*compat, &mut families, &stats, &groups);
    }
    let text = text::write(format, families.values());
    Ok(([(header::CONTENT_TYPE, format.content_type())], text).into_response())
}

/// With this many series in a family, further ones are counted together as `other`.
const MOST_SERIES: usize = 1000;

/// Open dead letters by stream and group.
fn dead_letters(groups: &[GroupInfo]) -> Family {
    let help = "Open dead letters";
    let mut family = Family::new("everbus_dead_letters", Kind::Gauge, help);
    for group in groups {
        let name = group.name.to_string();
        for (stream, lag) in lags(group) {
            if family.series.len() < MOST_SERIES {
                family.number(&[("stream", &stream), ("group", &name)], lag as f64);
            } else {
                family.number(&[("stream", "other"), ("group", "other")], lag as f64);
            }
        }
    }
    family
}

/// Open dead letters of a group by the label of their stream. Types without dead letters are left out: the number of
/// types is unbounded.
pub(crate) fn lags(group: &GroupInfo) -> BTreeMap<String, u64> {
    let mut by_stream = BTreeMap::new();
    let dead = group.types.iter().filter(|(_, lag)| lag.dead_letters > 0);
    for (event_type, lag) in dead {
        *by_stream.entry(streams::label(event_type)).or_default() += lag.dead_letters;
    }
    if group.types.is_empty() {
        for of in &group.streams {
            *by_stream.entry(streams::label(&of.stream)).or_default() += of.lag.dead_letters;
        }
    }
    by_stream
}

fn listeners(state: &AppState) -> Family {
    let help = "Clients of the WebSocket and of server-sent events";
    let mut family = Family::new("everbus_server_listeners", Kind::Gauge, help);
    family.number(&[], state.live().listeners() as f64);
    family
}

fn build() -> Family {
    let mut family = Family::new("everbus_build_info", Kind::Gauge, "The version, as a label");
    family.number(&[("version", env!("CARGO_PKG_VERSION"))], 1.0);
    family
}

fn started(state: &AppState) -> Family {
    let help = "How long the server has run";
    let mut family = Family::new("everbus_server_uptime_seconds", Kind::Gauge, help);
    family.unit = Some("seconds");
    family.number(&[], state.started().elapsed().as_secs_f64().floor());
    family
}

/// The size of the file and of its write-ahead log, where the engine is a file.
fn file(state: &AppState) -> Vec<Family> {
    let Some(path) = state.bus().engine().file.as_deref() else {
        return Vec::new();
    };
    let wal = {
        let mut name = path.as_os_str().to_owned();
        name.push("-wal");
        std::path::PathBuf::from(name)
    };
    let sizes = [
        ("everbus_file_bytes", "Size of the file", path),
        ("everbus_wal_bytes", "Size of the write-ahead log", &*wal),
    ];
    let sizes = sizes.into_iter().map(|(name, help, path)| {
        let mut family = Family::new(name, Kind::Gauge, help);
        family.unit = Some("bytes");
        let bytes = std::fs::metadata(path).map_or(0, |file| file.len());
        family.number(&[], bytes as f64);
        family
    });
    sizes.collect()
}

/// The rows of the outbox that wait, and how long the oldest has waited.
async fn outbox(state: &AppState) -> Vec<Family> {
    let Ok(outbox) = state.bus().engine().outbox() else {
        return Vec::new();
    };
    let Ok(status) = outbox.status().await else {
        return Vec::new();
    };
    let help = "Rows of the outbox by state";
    let mut rows = Family::new("everbus_outbox_rows", Kind::Gauge, help);
    rows.number(&[("state", "pending")], status.pending as f64);
    rows.number(&[("state", "retrying")], status.retrying as f64);
    rows.number(&[("state", "failed")], status.failed as f64);
    let help = "How long the oldest row of the outbox has waited";
    let mut age = Family::new("everbus_outbox_oldest_seconds", Kind::Gauge, help);
    age.unit = Some("seconds");
    let oldest = status.oldest_pending_at;
    let oldest = oldest.map_or(0.0, |at| SystemClock.now().since(at).as_secs_f64());
    age.number(&[], oldest);
    vec![rows, age]
}

/// Running tasks by health, and tasks that wait too long for a worker, summed over all tenants.
async fn task_health(state: &AppState) -> Vec<Family> {
    let Ok(jobs) = state.jobs() else {
        return Vec::new();
    };
    match summed_health(&jobs, &state.options().task_health).await {
        Ok((summary, waiting)) => {
            let help = "Running tasks by their health";
            let mut health = Family::new("everbus_task_health", Kind::Gauge, help);
            for (category, count) in [
                ("healthy", summary.healthy),
                ("warning", summary.warning),
                ("critical", summary.critical),
                ("overtime", summary.overtime),
            ] {
                health.number(&[("category", category)], count as f64);
            }
            let help = "Tasks that wait for a worker for too long";
            let mut late = Family::new("everbus_tasks_pending_too_long", Kind::Gauge, help);
            late.number(&[], waiting as f64);
            vec![health, late]
        }
        Err(error) => {
            tracing::warn!(target: "everbus::metrics", %error, "the health of tasks is not known");
            Vec::new()
        }
    }
}

async fn summed_health(
    jobs: &Jobs,
    thresholds: &Thresholds,
) -> everbus::Result<(HealthSummary, usize)> {
    let index = jobs.index();
    index.catch_up(jobs.bus(), None).await?;
    let mut tenants = index.tenants(TaskState::Processing)?;
    tenants.extend(index.tenants(TaskState::Pending)?);
    tenants.sort();
    tenants.dedup();
    let (mut sum, mut waiting) = (HealthSummary::default(), 0);
    for tenant in tenants {
        let report = jobs.for_tenant(&tenant).health(thresholds).await?;
        let found = report.check.summary;
        sum.healthy += found.healthy;
        sum.warning += found.warning;
        sum.critical += found.critical;
        sum.overtime += found.overtime;
        waiting += report.waiting.len();
    }
    Ok((sum, waiting))
}

impl Metrics {
    /// The sum of all series of a counter.
    pub(crate) fn total(&self, name: &str) -> f64 {
        let family = self.family(name);
        let values = family.iter().flat_map(|family| family.series.values());
        let numbers = values.filter_map(|value| match value {
            Value::Number(number) => Some(*number),
            Value::Distribution(_) => None,
        });
        numbers.sum()
    }

    /// The buckets of a histogram, all series together; empty if there is none.
    pub(crate) fn buckets(&self, name: &str) -> Vec<u64> {
        let mut sum = Vec::new();
        let family = self.family(name);
        for value in family.iter().flat_map(|family| family.series.values()) {
            if let Value::Distribution(of) = value {
                sum.resize(of.counts.len(), 0);
                for (sum, count) in sum.iter_mut().zip(&of.counts) {
                    *sum += count;
                }
            }
        }
        sum
    }
}

/// A quantile of counted buckets in milliseconds, interpolated within its bucket; 0 if there are none.
pub(crate) fn quantile_millis(counts: &[u64], q: f64) -> f64 {
    let total: u64 = counts.iter().sum();
    if total == 0 {
        return 0.0;
    }
    let rank = q * total as f64;
    let mut below = 0.0;
    let mut lower = 0.0;
    for (count, bound) in counts.iter().zip(recorder::BOUNDS) {
        let reached = below + *count as f64;
        if reached >= rank && *count > 0 {
            let within = (rank - below) / *count as f64;
            let seconds = lower + (bound - lower) * within;
            return (seconds * 1e5).round() / 100.0;
        }
        below = reached;
        lower = bound;
    }
    // The values are larger than the last bound, so the bound is the best answer.
    lower * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_lies_within_its_bucket() {
        let mut counts = vec![0; recorder::BOUNDS.len() + 1];
        assert!(quantile_millis(&counts, 0.99).abs() < f64::EPSILON);
        counts[3] = 100; // 0.5 to 1 ms
        assert!((quantile_millis(&counts, 0.5) - 0.75).abs() < 0.01);
        assert!((quantile_millis(&counts, 1.0) - 1.0).abs() < 0.01);
        counts[recorder::BOUNDS.len()] = 900;
        assert!((quantile_millis(&counts, 0.99) - 60_000.0).abs() < 0.01);
    }
}
