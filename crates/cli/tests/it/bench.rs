//! `everbus bench`, small enough to see only that it runs.

use crate::support::Shop;

// conformance: bus/cli-bench: bench -o json prints one object per scenario, the raw figure beside ours
#[test]
fn every_scenario_runs_and_prints_its_figure() {
    let shop = Shop::new();
    let fast = [
        "publish-1",
        "publish-64",
        "publish-batch",
        "end-to-end",
        "replay",
        "history-insert",
    ];
    let all = [
        &["-o", "json", "bench", "--quick", "--events", "2000"],
        &fast[..],
    ]
    .concat();
    let figures = shop.run(&all).json();
    for (figure, name) in figures.as_array().unwrap().iter().zip(fast) {
        assert_eq!(figure["scenario"], name);
        for field in ["events_per_s", "raw_events_per_s", "ratio"] {
            assert!(figure[field].as_f64().unwrap() > 0.0, "{figure}");
        }
        assert!(
            figure
                .get("rss_mib")
                .is_some_and(serde_json::Value::is_null)
        );
    }
    let rest = [
        "latency",
        "cross-process",
        "dead-letters",
        "history",
        "recovery",
        "sparse-group",
        "cold-start",
    ];
    let all = [
        &["-o", "json", "bench", "--quick", "--events", "100"],
        &rest[..],
    ]
    .concat();
    let figures = shop.run(&all).json();
    for (figure, name) in figures.as_array().unwrap().iter().zip(rest) {
        assert_eq!(figure["scenario"], name);
        assert!(figure["p50_us"].as_f64().unwrap() >= 0.0, "{figure}");
    }
    let left = std::fs::read_dir(shop.path(".")).unwrap().count();
    assert_eq!(left, 0, "the bench cleans up after itself");
}

// conformance: memory/outbox-bench: an enqueue beside the insert by hand, relays into memory and into a file
#[test]
fn the_outbox_is_measured_beside_code_written_by_hand() {
    let shop = Shop::new();
    let arguments = ["-o", "json", "bench", "--quick", "--events", "1000"];
    let scenarios = ["outbox-enqueue", "outbox-memory", "outbox"];
    let figures = shop.run(&[&arguments[..], &scenarios].concat()).json();
    for (figure, name) in figures.as_array().unwrap().iter().zip(scenarios) {
        assert_eq!(figure["scenario"], name);
        assert!(figure["events_per_s"].as_f64().unwrap() > 0.0, "{figure}");
        let raw = figure["raw_events_per_s"].as_f64().is_some();
        assert_eq!(raw, name != "outbox-memory", "{figure}");
    }
}

// conformance: operations/http-bench: the server is measured beside a bare handler and the library, and its pages and WebSockets are timed
#[test]
fn the_server_is_measured_under_load() {
    let shop = Shop::new();
    let arguments = ["-o", "json", "bench", "--quick", "--events", "4000"];
    let scenarios = ["http-publish", "http-batch", "http-websocket", "http-pages"];
    let figures = shop.run(&[&arguments[..], &scenarios].concat()).json();
    let measured = ["ratio", "ratio", "p99_us", "p99_us"];
    let figures = figures.as_array().unwrap().iter();
    for ((figure, name), measured) in figures.zip(scenarios).zip(measured) {
        assert_eq!(figure["scenario"], name);
        assert!(figure[measured].as_f64().unwrap() > 0.0, "{figure}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn memory_is_weighed_in_a_process_of_its_own() {
    let shop = Shop::new();
    let figures = shop
        .run(&["-o", "json", "bench", "--quick", "memory"])
        .json();
    assert!(figures[0]["rss_mib"].as_f64().unwrap() > 1.0, "{figures}");
}
