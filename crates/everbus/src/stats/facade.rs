//! The names and labels of the numbers in the `metrics` crate.
//!
//! Names of other specifications are added here: a handle may stand for several series, and the meter does not depend
//! on their number.

use std::sync::Arc;

use everbus_core::GroupName;
use metrics::{Counter, Gauge, Histogram, Label, SharedString, Unit};

use crate::streams;

pub(super) const PUBLISHED: &str = "everbus_events_published_total";
pub(super) const HANDLED: &str = "everbus_events_handled_total";
pub(super) const FAILED: &str = "everbus_events_failed_total";
pub(super) const RETRIED: &str = "everbus_events_retried_total";
pub(super) const SKIPPED: &str = "everbus_events_skipped_total";
pub(super) const DEAD_LETTERED: &str = "everbus_events_dead_lettered_total";
pub(super) const INBOX_HITS: &str = "everbus_inbox_hits_total";
pub(super) const BREAKER_REJECTIONS: &str = "everbus_breaker_rejections_total";
pub(super) const LATENCY: &str = "everbus_event_latency_seconds";
pub(super) const HANDLER_DURATION: &str = "everbus_handler_duration_seconds";
pub(super) const COMMIT: &str = "everbus_commit_seconds";
pub(super) const BREAKER_STATE: &str = "everbus_breaker_state";
pub(super) const QUEUE_DEPTH: &str = "everbus_queue_depth";
pub(super) const LAG_EVENTS: &str = "everbus_consumer_lag_events";
pub(super) const LAG_MILLIS: &str = "everbus_consumer_lag_milliseconds";
pub(super) const AGE_USED: &str = "everbus_consumer_lag_of_max_age";
pub(super) const DROPPED: &str = "everbus_events_dropped_total";

/// Describes every series to the recorder.
pub(super) fn describe() {
    let counters = [
        (PUBLISHED, "Events stored; duplicates are not counted"),
        (HANDLED, "Events that their handlers finished"),
        (FAILED, "Attempts that failed"),
        (RETRIED, "Failed attempts after which another one follows"),
        (SKIPPED, "Events that were not handled, by reason"),
        (DEAD_LETTERED, "Events given up on"),
        (INBOX_HITS, "Events that the inbox knew as handled"),
        (
            DROPPED,
            "Events that the server removed by their age before the group got them",
        ),
        (
            BREAKER_REJECTIONS,
            "Events that met an open circuit breaker",
        ),
    ];
    for (name, text) in counters {
        metrics::describe_counter!(name, Unit::Count, text);
    }
    let histograms = [
        (LATENCY, "From the publish of an event until it was handled"),
        (HANDLER_DURATION, "How long the handlers of an event ran"),
        (COMMIT, "How long a publish waited until it was durable"),
    ];
    for (name, text) in histograms {
        metrics::describe_histogram!(name, Unit::Seconds, text);
    }
    let gauges = [
        (BREAKER_STATE, "0 closed, 1 half-open, 2 open"),
        (QUEUE_DEPTH, "Events fetched and not settled yet"),
        (LAG_EVENTS, "Matching events that a group has not settled"),
        (
            AGE_USED,
            "The age of the oldest unsettled event; 1 is the age at which the server removes it",
        ),
    ];
    for (name, text) in gauges {
        metrics::describe_gauge!(name, Unit::Count, text);
    }
    let text = "How long the oldest event has waited that a group has not settled";
    metrics::describe_gauge!(LAG_MILLIS, Unit::Milliseconds, text);
}

/// The labels of one series.
#[derive(Clone)]
pub(super) struct Labels(Vec<Label>);

impl Labels {
    /// The stream of a type in the form `domain:event-type`.
    pub(super) fn stream(event_type: &str) -> Self {
        Self(vec![Label::new(
            "stream",
            text(&streams::label(event_type)),
        )])
    }

    pub(super) fn none() -> Self {
        Self(vec![])
    }

    pub(super) fn group(group: &GroupName) -> Self {
        Self(vec![]).and_group(group)
    }

    pub(super) fn breaker(name: &str) -> Self {
        Self(vec![Label::new("breaker", text(name))])
    }

    pub(super) fn and_group(mut self, group: &GroupName) -> Self {
        self.0.push(Label::new("group", text(&group.to_string())));
        self
    }

    pub(super) fn and_reason(&self, reason: &'static str) -> Self {
        let mut labels = self.clone();
        labels.0.push(Label::new("reason", reason));
        labels
    }

    pub(super) fn counter(&self, name: &'static str) -> Counter {
        metrics::counter!(name, self.0.clone())
    }

    pub(super) fn histogram(&self, name: &'static str) -> Histogram {
        metrics::histogram!(name, self.0.clone())
    }

    pub(super) fn gauge(&self, name: &'static str) -> Gauge {
        metrics::gauge!(name, self.0.clone())
    }
}

/// Shared, because a label is cloned for every series of a meter.
fn text(text: &str) -> SharedString {
    Arc::<str>::from(text).into()
}
