//! The same metrics under the names of other systems, for existing dashboards and alerts.

use std::collections::BTreeMap;

use everbus::{BusStats, GroupInfo};

use super::family::{Family, Kind, Labels, Value};
use crate::options::MetricsCompat;

/// Adds the metric families with the names of another system.
pub(crate) fn add(
    compat: MetricsCompat,
    families: &mut BTreeMap<String, Family>,
    stats: &BusStats,
    groups: &[GroupInfo],
) {
    let added = match compat {
        MetricsCompat::Omni => omni(families, stats, groups),
        MetricsCompat::Framework => framework(families, stats, groups),
    };
    let added = added.into_iter().filter(|family| !family.is_empty());
    families.extend(added.map(|family| (family.name.clone(), family)));
}

fn omni(
    families: &BTreeMap<String, Family>,
    stats: &BusStats,
    groups: &[GroupInfo],
) -> Vec<Family> {
    let mut events = Family::new("omni_events_total", Kind::Counter, "Events published");
    let mut dead = Family::new(
        "omni_dead_letters_total",
        Kind::Counter,
        "Events given up on",
    );
    for (event_type, of) in &stats.types {
        events.number(&[("type", event_type)], of.published as f64);
        dead.number(&[("type", event_type)], of.dead_lettered as f64);
    }
    let help = "Milliseconds from the publish of an event until it was handled";
    let mut latency = Family::new("omni_event_latency", Kind::Histogram, help);
    let types = Types::new(stats);
    for (labels, value) in series(families, "everbus_event_latency_seconds") {
        if let Value::Distribution(seconds) = value {
            let millis = Value::Distribution(seconds.clone().times(1000.0));
            latency.add(types.labels("type", labels), millis);
        }
    }
    let help = "Events that a consumer has not settled";
    let mut pending = Family::new("omni_consumer_pending_messages", Kind::Gauge, help);
    for group in groups {
        let name = group.name.to_string();
        pending.number(&[("consumer", &name)], group.lag().unsettled() as f64);
    }
    vec![events, latency, dead, pending]
}

fn framework(
    families: &BTreeMap<String, Family>,
    stats: &BusStats,
    groups: &[GroupInfo],
) -> Vec<Family> {
    let copy = |from: &str, to: &str, kind: Kind, help: &str, keep: &[&str]| {
        let mut family = Family::new(to, kind, help);
        for (labels, value) in series(families, from) {
            let kept = labels
                .iter()
                .filter(|(name, _)| keep.contains(&name.as_str()));
            family.add(kept.cloned().collect(), value.clone());
        }
        family
    };
    let types = Types::new(stats);
    let by_type = |from: &str, to: &str, kind: Kind, help: &str| {
        let mut family = Family::new(to, kind, help);
        for (labels, value) in series(families, from) {
            family.add(types.labels("event_type", labels), value.clone());
        }
        family
    };
    let help = "Current number of events in dead letter queue";
    let mut depth = Family::new("dlq_depth", Kind::Gauge, help);
    for group in groups {
        for (stream, dead_letters) in super::lags(group) {
            depth.number(&[("stream", &stream)], dead_letters as f64);
        }
    }
    let (gauge, counter) = (Kind::Gauge, Kind::Counter);
    vec![
        copy(
            "everbus_consumer_lag_events",
            "consumer_lag_events",
            gauge,
            "Number of unprocessed events",
            &["stream", "group"],
        ),
        copy(
            "everbus_consumer_lag_milliseconds",
            "consumer_lag_ms",
            gauge,
            "Estimated lag in milliseconds",
            &["stream", "group"],
        ),
        copy(
            "everbus_events_handled_total",
            "consumer_processing_rate",
            counter,
            "Events processed",
            &["stream", "group"],
        ),
        copy(
            "everbus_events_skipped_total",
            "consumer_events_skipped",
            counter,
            "Events skipped (stale, low priority)",
            &["stream", "reason"],
        ),
        copy(
            "everbus_events_dead_lettered_total",
            "dlq_events_total",
            counter,
            "Events moved to dead letter queue",
            &["stream"],
        ),
        depth,
        by_type(
            "everbus_handler_duration_seconds",
            "event_processing_duration",
            Kind::Histogram,
            "Seconds that the handlers of an event ran",
        ),
        by_type(
            "everbus_events_failed_total",
            "event_processing_errors",
            counter,
            "Attempts that failed",
        ),
    ]
}

fn series<'a>(
    families: &'a BTreeMap<String, Family>,
    name: &str,
) -> impl Iterator<Item = (&'a Labels, &'a Value)> {
    families
        .get(name)
        .into_iter()
        .flat_map(|family| &family.series)
}

/// Maps the label of a stream back to the event type. If two types have the same label, the first one is used.
struct Types(BTreeMap<String, String>);

impl Types {
    fn new(stats: &BusStats) -> Self {
        let mut types = BTreeMap::new();
        for event_type in stats.types.keys() {
            let label = everbus::streams::label(event_type);
            types.entry(label).or_insert_with(|| event_type.clone());
        }
        Self(types)
    }

    /// Replaces all labels of a series by one label with the event type.
    fn labels(&self, name: &str, labels: &Labels) -> Labels {
        let stream = labels.iter().find(|(name, _)| name == "stream");
        let stream = stream.map_or("", |(_, stream)| stream.as_str());
        let event_type = self.0.get(stream).map_or(stream, String::as_str);
        vec![(name.to_owned(), event_type.to_owned())]
    }
}
