//! The statistics, in the report and at the metrics recorder.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Appended, Code, Error, Event, GroupName, Position, Timestamp};
use metrics::{Unit, with_local_recorder};

use super::captured::{Captured, Value};
use super::*;
use crate::breaker::BreakerState;

const MS: Duration = Duration::from_millis(1);

fn group(name: &str) -> GroupName {
    name.parse().unwrap()
}

fn event_type(name: &str) -> Arc<str> {
    name.into()
}

// conformance: handlers/metrics-names: every name of the facade with its labels and kind
// conformance: framework/framework-observability: every name of the facade with its labels and kind
#[test]
fn every_series_has_its_name_its_labels_and_its_value() {
    let recorder = Captured::default();
    with_local_recorder(&recorder, || {
        let stats = Stats::default();
        let placed = event_type("orders.order.placed");
        stats.publishing(&placed).published(3);
        let meter = stats.meter(&group("billing"), &placed);
        meter.handled(250 * MS, 50 * MS);
        meter.handled(500 * MS, 100 * MS);
        (0..2).for_each(|_| meter.failed());
        (0..3).for_each(|_| meter.retried());
        (0..4).for_each(|_| meter.skipped(Skip::Stale));
        (0..5).for_each(|_| meter.skipped(Skip::BestEffort));
        (0..6).for_each(|_| meter.skipped(Skip::Handler));
        (0..7).for_each(|_| meter.skipped(Skip::Dropped));
        (0..8).for_each(|_| meter.dead_lettered());
        (0..9).for_each(|_| meter.inbox_hit());
        (0..10).for_each(|_| meter.rejected());
        stats.committed(2 * MS);
        let queue = stats.queue(&group("billing"));
        queue.set(12);
        let breaker = stats.breaker("payments");
        breaker.set(BreakerState::HalfOpen);

        let both = "stream=orders:order-placed group=billing";
        let counters = [
            (
                "everbus_events_published_total",
                "stream=orders:order-placed",
                3,
            ),
            ("everbus_events_handled_total", both, 2),
            ("everbus_events_failed_total", both, 2),
            ("everbus_events_retried_total", both, 3),
            (
                "everbus_events_skipped_total",
                &format!("{both} reason=stale"),
                4,
            ),
            (
                "everbus_events_skipped_total",
                &format!("{both} reason=best_effort"),
                5,
            ),
            (
                "everbus_events_skipped_total",
                &format!("{both} reason=handler"),
                6,
            ),
            (
                "everbus_events_skipped_total",
                &format!("{both} reason=dropped"),
                7,
            ),
            ("everbus_events_dead_lettered_total", both, 8),
            ("everbus_inbox_hits_total", both, 9),
            ("everbus_breaker_rejections_total", both, 10),
        ];
        for (name, labels, value) in counters {
            assert_eq!(
                recorder.value(name, labels),
                Value::Counter(value),
                "{name}"
            );
        }
        let histograms = [
            ("everbus_event_latency_seconds", [0.25, 0.5]),
            ("everbus_handler_duration_seconds", [0.05, 0.1]),
        ];
        for (name, values) in histograms {
            assert_eq!(recorder.value(name, both), Value::Histogram(values.into()));
        }
        let depth = || recorder.value("everbus_queue_depth", "group=billing");
        assert_eq!(depth(), Value::Gauge(12.0));

        let names = counters.map(|(name, ..)| name).into_iter();
        let names = names.chain(histograms.map(|(name, _)| name));
        let others = [
            "everbus_queue_depth",
            "everbus_breaker_state",
            "everbus_commit_seconds",
        ];
        let names = names.chain(others);
        assert_eq!(recorder.names(), names.map(str::to_owned).collect());
    });
}

// conformance: contract/lag-metrics: gauges show events and milliseconds behind by stream and group, and zero once there is nothing to do
#[test]
fn the_gauges_of_the_lag_go_by_declared_stream_or_by_type_and_back_to_zero() {
    let recorder = Captured::default();
    with_local_recorder(&recorder, || {
        let now = Timestamp::from_micros(5_000_000);
        let info = |types: &[(&str, u64)]| {
            let types = types.iter().map(|(name, behind)| {
                let mut lag = Lag::new();
                lag.behind = *behind;
                lag.in_flight = 1;
                lag.note_oldest(Timestamp::from_micros(2_000_000));
                (event_type(name), lag)
            });
            GroupInfo::new(group("g"), now).with_types(types.collect(), now)
        };
        let value = |name: &str, stream: &str| match recorder
            .value(name, &format!("stream={stream} group=g"))
        {
            Value::Gauge(value) => value,
            other => panic!("{other:?}"),
        };
        let both = |stream| {
            let events = value("everbus_consumer_lag_events", stream);
            (events, value("everbus_consumer_lag_milliseconds", stream))
        };
        let behind = info(&[("message.received", 4), ("message.sent", 2)]);
        let declared = Streams::omni();
        let stats = Stats::default();
        let by_stream = behind.clone().with_streams(&declared, now);
        stats.lag(&[by_stream], &declared, now);
        assert_eq!(both("MESSAGES"), (8.0, 3000.0));
        stats.lag(&[behind], &Streams::single(), now);
        assert_eq!(both("message:received"), (5.0, 3000.0));
        assert_eq!(both("MESSAGES"), (0.0, 0.0));
        stats.lag(&[info(&[])], &Streams::single(), now);
        assert_eq!(both("message:received"), (0.0, 0.0));
    });
}

// conformance: handlers/metrics-breaker-state: 0 closed, 1 half-open, 2 open
#[test]
fn the_gauge_of_a_breaker_says_closed_half_open_or_open() {
    let recorder = Captured::default();
    with_local_recorder(&recorder, || {
        let stats = Stats::default();
        let open = BreakerState::Open {
            until: Timestamp::EPOCH,
        };
        for (state, value) in [
            (open, 2.0),
            (BreakerState::HalfOpen, 1.0),
            (BreakerState::Closed, 0.0),
        ] {
            stats.breaker("payments").set(state);
            let shown = recorder.value("everbus_breaker_state", "breaker=payments");
            assert_eq!(shown, Value::Gauge(value));
        }
    });
}

#[test]
fn every_series_is_described_once_with_its_unit() {
    let recorder = Captured::default();
    with_local_recorder(&recorder, || {
        let stats = Stats::default();
        stats.publishing(&event_type("a.b"));
        stats.meter(&group("g"), &event_type("a.b"));
        stats.queue(&group("g"));
        stats.breaker("b");
        let mut types = BTreeMap::new();
        types.insert(event_type("a.b"), Lag::new());
        let now = Timestamp::EPOCH;
        let info = GroupInfo::new(group("g"), now).with_types(types, now);
        stats.lag(&[info], &Streams::single(), now);
        stats.committed(Duration::from_millis(1));
        stats.age_used(&group("g"), &event_type("a.b"), 0.5, 1);
    });
    let all = recorder.0.lock();
    assert_eq!(all.len(), 17);
    for (name, series) in &*all {
        let (unit, text) = series.described.as_ref().unwrap();
        let seconds = name.ends_with("_seconds");
        assert_eq!(*unit == Some(Unit::Seconds), seconds, "{name}");
        assert!(!text.is_empty(), "{name}");
        assert!(
            !series.values.is_empty(),
            "{name} is described and not used"
        );
    }
}

// conformance: handlers/metrics-stream-label: the stream label has the form domain:event-type
#[test]
fn the_stream_label_is_domain_and_event_type_and_the_unnamed_group_has_a_name() {
    let recorder = Captured::default();
    with_local_recorder(&recorder, || {
        let stats = Stats::default();
        for name in [
            "signals.price.update",
            "users.created",
            "TelemetryWindowClosed",
        ] {
            stats
                .meter(&GroupName::unnamed(), &event_type(name))
                .failed();
        }
    });
    for stream in [
        "signals:price-update",
        "users:created",
        "TelemetryWindowClosed",
    ] {
        let labels = format!("stream={stream} group=(unnamed)");
        let failed = recorder.value("everbus_events_failed_total", &labels);
        assert_eq!(failed, Value::Counter(1));
    }
}

// conformance: handlers/stats-bounded: types and groups beyond the limit are counted together
#[test]
fn types_and_groups_beyond_the_limit_are_counted_as_other() {
    let recorder = Captured::default();
    let stats = with_local_recorder(&recorder, || {
        let stats = Stats::with_most(10);
        for n in 0..100 {
            let (group, event_type) = (group(&format!("g{n}")), event_type(&format!("a.t{n}")));
            stats.publishing(&event_type).published(1);
            stats.meter(&group, &event_type).handled(MS, MS);
            let queue = stats.queue(&group);
            queue.set(1);
            // It counts until it is dropped.
            std::mem::forget(queue);
            stats.breaker(&format!("b{n}")).set(BreakerState::HalfOpen);
        }
        stats
    });
    for name in [
        "everbus_events_published_total",
        "everbus_events_handled_total",
        "everbus_event_latency_seconds",
        "everbus_queue_depth",
    ] {
        assert_eq!(recorder.series_of(name), 10 + 1, "{name}");
    }
    // A series shared by several breakers would be meaningless.
    assert_eq!(recorder.series_of("everbus_breaker_state"), 10);
    let shared = recorder.value("everbus_events_handled_total", "stream=other group=other");
    assert_eq!(shared, Value::Counter(90));
    let shared = recorder.value("everbus_queue_depth", "group=other");
    assert_eq!(shared, Value::Gauge(90.0));

    let report = stats.snapshot(Vec::new());
    assert_eq!(report.types.len(), 11);
    assert_eq!(report.groups.len(), 11);
    let other = &report.types["other"];
    assert_eq!((other.published, other.handled), (90, 90));
    let other = &report.groups[&group("other")];
    assert_eq!((other.queue_depth, other.handled), (90, 90));
    let handled: u64 = report.types.values().map(|of| of.handled).sum();
    assert_eq!(handled, 100, "nothing is left out");
}

#[test]
fn a_thousand_pairs_of_type_and_group_are_told_apart() {
    let stats = Stats::default();
    let group = group("g");
    let meters: Vec<_> = (0..MOST_SERIES + 100)
        .map(|n| stats.meter(&group, &event_type(&format!("a.t{n}"))))
        .collect();
    assert!(!Arc::ptr_eq(&meters[0], &meters[MOST_SERIES - 1]));
    assert!(!Arc::ptr_eq(&meters[0], &meters[MOST_SERIES]));
    for beyond in &meters[MOST_SERIES..] {
        assert!(Arc::ptr_eq(beyond, &meters[MOST_SERIES]));
    }
    // Existing types keep their own series.
    let again = stats.meter(&group, &event_type("a.t0"));
    assert!(Arc::ptr_eq(&again, &meters[0]));
}

// conformance: handlers/stats-report: counts by type and by group
#[test]
fn the_report_sums_a_type_over_groups_and_a_group_over_types() {
    let stats = Stats::default();
    let (a, b) = (event_type("a.a"), event_type("b.b"));
    let (x, y) = (group("x"), GroupName::unnamed());
    stats.publishing(&a).published(2);
    stats.meter(&x, &a).handled(MS, MS);
    stats.meter(&y, &a).handled(MS, MS);
    stats.meter(&x, &b).handled(MS, MS);
    stats.meter(&x, &b).failed();
    stats.meter(&x, &b).retried();
    stats.meter(&y, &b).failed();
    stats.meter(&y, &b).dead_lettered();
    stats.meter(&y, &a).skipped(Skip::Stale);
    stats.meter(&x, &a).skipped(Skip::Handler);
    stats.meter(&x, &a).inbox_hit();
    stats.meter(&y, &a).rejected();
    let queue = stats.queue(&x);
    queue.set(5);

    let report = stats.snapshot(Vec::new());
    let of_a = &report.types["a.a"];
    assert_eq!((of_a.published, of_a.handled, of_a.failed), (2, 2, 0));
    assert_eq!((of_a.skipped.stale, of_a.skipped.handler), (1, 1));
    assert_eq!(of_a.skipped.total(), 2);
    assert_eq!((of_a.inbox_hits, of_a.breaker_rejections), (1, 1));
    assert_eq!(of_a.latency.count, 2);
    let of_b = &report.types["b.b"];
    assert_eq!((of_b.published, of_b.handled, of_b.failed), (0, 1, 2));
    assert_eq!((of_b.retried, of_b.dead_lettered), (1, 1));
    let of_x = &report.groups[&x];
    assert_eq!((of_x.queue_depth, of_x.handled, of_x.failed), (5, 2, 1));
    let of_y = &report.groups[&y];
    assert_eq!((of_y.queue_depth, of_y.handled, of_y.failed), (0, 1, 1));
    assert_eq!((of_y.dead_lettered, of_y.skipped.stale), (1, 1));
}

// conformance: handlers/stats-per-type: count, p50, p95 and p99 of each type, in milliseconds
// conformance: omni/metrics-latency: count, p50, p95 and p99 of each type, in milliseconds
#[test]
fn a_type_has_its_count_and_quantiles_in_milliseconds() {
    let stats = Stats::default();
    let meter = stats.meter(&group("g"), &event_type("a.a"));
    let slow = stats.meter(&group("h"), &event_type("a.a"));
    for n in 1..=1000 {
        let meter = if n > 960 { &slow } else { &meter };
        meter.handled(n * MS, n * MS / 10);
    }
    let report = stats.snapshot(Vec::new());
    let near = |measured: f64, exact: f64| (measured - exact).abs() <= 0.04 * exact;
    for (measured, exact) in [
        (report.types["a.a"].latency, 1.0),
        (report.types["a.a"].handler_time, 0.1),
    ] {
        assert_eq!(measured.count, 1000);
        assert!(near(measured.p50, 500.0 * exact), "{measured:?}");
        assert!(near(measured.p95, 950.0 * exact), "{measured:?}");
        assert!(near(measured.p99, 990.0 * exact), "{measured:?}");
        assert!(near(measured.mean, 500.5 * exact), "{measured:?}");
        assert_eq!(measured.max, 1000.0 * exact);
    }
    // The groups have their own series.
    let fast = report.groups[&group("g")].latency;
    assert_eq!((fast.count, fast.max), (960, 960.0));
}

#[test]
fn the_report_is_plain_json() {
    let stats = Stats::default();
    stats.publishing(&event_type("a.a")).published(1);
    let unnamed = GroupName::unnamed();
    stats
        .meter(&unnamed, &event_type("a.a"))
        .skipped(Skip::BestEffort);
    let json = serde_json::to_value(stats.snapshot(Vec::new())).unwrap();
    assert_eq!(json["types"]["a.a"]["published"], 1);
    assert_eq!(json["types"]["a.a"]["skipped"]["best_effort"], 1);
    assert_eq!(json["types"]["a.a"]["latency"]["p99"], 0.0);
    assert_eq!(json["groups"]["(unnamed)"]["queue_depth"], 0);
    assert_eq!(json["breakers"], serde_json::json!([]));
}

#[test]
fn the_depth_of_a_group_is_that_of_its_queues_until_they_end() {
    let recorder = Captured::default();
    with_local_recorder(&recorder, || {
        let stats = Stats::default();
        let g = group("g");
        let depth = || {
            let series = recorder.value("everbus_queue_depth", "group=g");
            let own = stats.snapshot(Vec::new()).groups[&g].queue_depth;
            assert_eq!(series, Value::Gauge(own as f64));
            own
        };
        let (one, two) = (stats.queue(&g), stats.queue(&g));
        one.set(7);
        two.set(5);
        assert_eq!(depth(), 12);
        one.set(3);
        assert_eq!(depth(), 8);
        drop(two);
        assert_eq!(depth(), 3);
        drop(one);
        assert_eq!(depth(), 0);
    });
}

// conformance: handlers/metrics-published: what was stored counts; duplicates and refusals do not
#[test]
fn a_batch_counts_what_was_stored_under_its_type() {
    let stats = Stats::default();
    let event = |name: &str| Event::builder(name).build().unwrap();
    let events = ["a", "a", "b", "a", "c", "c"].map(event);
    let first = Appended::new(events[0].id(), Position::seq(1), Timestamp::EPOCH);
    let stored = |duplicate| {
        Ok(if duplicate {
            first.as_duplicate()
        } else {
            first
        })
    };
    let refused = || Err(Error::new(Code::Internal, "refused"));
    let batch = Published::new(&stats, &events);
    batch.stored(&[
        stored(false),
        stored(true),
        stored(false),
        stored(false),
        refused(),
        refused(),
    ]);
    // An engine that answers for fewer events has a bug; counting must not panic.
    batch.stored(&[stored(false)]);
    let report = stats.snapshot(Vec::new());
    let published = |name: &str| report.types[name].published;
    assert_eq!((published("a"), published("b"), published("c")), (3, 1, 0));
}

// conformance: handlers/metrics-no-recorder: without a recorder the own numbers are counted
#[test]
fn without_a_recorder_only_the_own_numbers_are_counted() {
    let stats = Stats::default();
    let meter = stats.meter(&group("g"), &event_type("a.a"));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..1000).for_each(|_| meter.handled(MS, MS)));
        }
    });
    assert_eq!(stats.snapshot(Vec::new()).types["a.a"].handled, 8000);
}
