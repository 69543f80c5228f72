//! `/metrics`, the names of the specifications, and the rules and dashboards in `deploy/`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use everbus::core::{GroupSpec, SubscriptionSpec};
use everbus_server::MetricsCompat;
use serde_json::{Value, json};

use crate::served::{Reply, Served, until};

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

/// Whether a program of Prometheus is there; a missing one fails the run where servers are required.
fn has(program: &str) -> bool {
    let there = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok();
    if !there {
        let message = format!("SKIPPED: {program} is not installed (apt-get install prometheus)");
        assert!(
            std::env::var_os("EVERBUS_REQUIRE_SERVERS").is_none(),
            "{message}"
        );
        eprintln!("{message}");
    }
    there
}

/// Handled, failed, dead-lettered and waiting events, so that every family has series.
///
/// Gauges belong to the process, which runs several tests at once: each test has groups of its own.
async fn busy(server: &Served, groups: &str) {
    let (billing, mail) = (format!("{groups}-billing"), format!("{groups}-mail"));
    let bus = &server.bus;
    let handled = |_: everbus::Message| async {};
    let subscribed = bus.subscribe("orders.>").group(&billing).handler(handled);
    subscribed.await.unwrap();
    server
        .failing_group("orders.>", &mail, "no mail server")
        .await;
    for n in 0..5 {
        server
            .publish("orders.order.placed", json!({ "n": n }))
            .await;
    }
    until("dead letters", || async {
        let groups = bus.groups().await.unwrap();
        let group = |name: &str| groups.iter().find(|group| group.name.as_str() == name);
        let done = group(&mail)?.dead_letters == 5 && group(&billing)?.lag().unsettled() == 0;
        done.then_some(())
    })
    .await;
}

async fn scrape(server: &Served) -> String {
    let reply = server.get("/metrics").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.body
}

/// A scrape in which a series has this value: groups are looked at once a second.
async fn scrape_with(server: &Served, series: &str, wanted: f64) -> String {
    until(series, || async {
        let text = scrape(server).await;
        (value(&text, series) == Some(wanted)).then_some(text)
    })
    .await
}

fn value(text: &str, series: &str) -> Option<f64> {
    let line = text.lines().find(|line| {
        line.strip_prefix(series)
            .is_some_and(|rest| rest.starts_with(' '))
    })?;
    line.rsplit_once(' ')?.1.parse().ok()
}

fn names(text: &str) -> BTreeSet<&str> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types.filter_map(|line| line.split(' ').next()).collect()
}

// conformance: operations/server-metrics: /metrics has what the bus counts, dead letters, the sizes of the file and the outbox, and passes promtool where that is installed
#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_are_complete_and_well_formed() {
    let server = Served::start().await;
    busy(&server, "complete").await;
    let dead = "everbus_dead_letters{stream=\"orders:order-placed\",group=\"complete-mail\"}";
    let text = scrape_with(&server, dead, 5.0).await;
    let expected = [
        "everbus_events_published_total",
        "everbus_events_handled_total",
        "everbus_events_failed_total",
        "everbus_events_dead_lettered_total",
        "everbus_event_latency_seconds",
        "everbus_handler_duration_seconds",
        "everbus_commit_seconds",
        "everbus_consumer_lag_events",
        "everbus_consumer_lag_milliseconds",
        "everbus_dead_letters",
        "everbus_wal_bytes",
        "everbus_file_bytes",
        "everbus_outbox_rows",
        "everbus_outbox_oldest_seconds",
    ];
    let found = names(&text);
    for name in expected {
        assert!(found.contains(name), "{name} is missing from {found:?}");
    }
    assert!(value(&text, "everbus_file_bytes").unwrap() > 0.0);
    assert!(!text.contains("omni_events_total") && !text.contains("consumer_lag_ms"));
    if has("promtool") {
        lint(&text);
    }
    let reply = server
        .send(
            "GET",
            "/metrics",
            &[("Accept", "application/openmetrics-text; version=1.0.0")],
            "",
        )
        .await;
    assert!(
        reply
            .header("content-type")
            .unwrap()
            .starts_with("application/openmetrics-text")
    );
    assert!(reply.body.ends_with("# EOF\n"));
    server.stop().await;
}

/// The checks of `promtool`; advice about names is not an error here.
fn lint(text: &str) {
    use std::io::Write as _;
    let mut child = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    // 3 means advice, such as seconds instead of milliseconds; 1 means that the text is malformed.
    assert_ne!(output.status.code(), Some(1), "{said}");
    for line in said.lines().filter(|line| line.contains("everbus_")) {
        assert!(line.contains("milliseconds"), "{line}");
    }
}

// conformance: framework/lag-metrics: metrics.compat framework adds the six names with their types and labels
// conformance: framework/dlq-metrics: dlq_events_total and dlq_depth count by stream
// conformance: framework/middleware-metrics: event_processing_duration and event_processing_errors count by event type
// conformance: framework/lag-collection: the lag of every group is looked at with every scrape
// conformance: framework/backpressure-lag: consumer_lag_events is a gauge that an autoscaler can read
#[tokio::test(flavor = "multi_thread")]
async fn compat_framework_adds_exactly_its_names() {
    let server =
        Served::with(|options| options.metrics_compat = vec![MetricsCompat::Framework]).await;
    // A group that no process consumes stays behind.
    let spec = GroupSpec {
        subscriptions: vec![SubscriptionSpec {
            name: "all".to_owned(),
            pattern: "orders.>".parse().unwrap(),
        }],
        ..GroupSpec::new("framework-slow".parse().unwrap())
    };
    server.bus.engine().broker.declare(spec).await.unwrap();
    busy(&server, "framework").await;
    let depth = "dlq_depth{stream=\"orders:order-placed\"}";
    let text = scrape_with(&server, depth, 5.0).await;
    let kinds = [
        ("consumer_lag_events", "gauge"),
        ("consumer_lag_ms", "gauge"),
        ("consumer_processing_rate", "counter"),
        ("consumer_events_skipped", "counter"),
        ("dlq_events_total", "counter"),
        ("dlq_depth", "gauge"),
        ("event_processing_duration", "histogram"),
        ("event_processing_errors", "counter"),
    ];
    for (name, kind) in kinds {
        assert!(
            text.contains(&format!("# TYPE {name} {kind}\n")),
            "{name} {kind}: {text}"
        );
    }
    let added: BTreeSet<&str> = names(&text)
        .into_iter()
        .filter(|name| !name.starts_with("everbus_"))
        .collect();
    assert_eq!(added, kinds.iter().map(|(name, _)| *name).collect());
    let labels = "{stream=\"orders:order-placed\",group=\"framework-slow\"}";
    let lag = value(&text, &format!("consumer_lag_events{labels}"));
    assert_eq!(lag, Some(5.0), "{text}");
    assert!(value(&text, &format!("consumer_lag_ms{labels}")).unwrap() > 0.0);
    // The process counts for every test in it, so that these are at least what this one did.
    assert!(
        value(
            &text,
            "event_processing_errors{event_type=\"orders.order.placed\"}"
        )
        .unwrap()
            >= 5.0
    );
    assert!(
        value(
            &text,
            "event_processing_duration_count{event_type=\"orders.order.placed\"}"
        )
        .unwrap()
            >= 5.0
    );
    assert!(
        text.contains("consumer_events_skipped{stream=\"orders:order-placed\",reason=\"stale\"}"),
        "{text}"
    );
    server.stop().await;
}

/// A private Prometheus that scrapes one server.
struct Prometheus {
    child: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl Prometheus {
    fn start(server: &Served) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("prometheus.yml");
        let config = format!(
            "global: {{scrape_interval: 1s}}\nscrape_configs:\n- job_name: everbus\n  static_configs: [{{targets: ['{}']}}]\n",
            server.address
        );
        std::fs::write(&file, config).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                dir.path().join("data").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            child,
            port,
            _dir: dir,
        }
    }

    /// The values of a query; none while Prometheus is not ready.
    async fn query(&self, query: &str) -> Vec<f64> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], self.port));
        let Some(reply) = Reply::of(address, &format!("/api/v1/query?query={encoded}")).await
        else {
            return Vec::new();
        };
        let answer: Value = serde_json::from_str(&reply.body).unwrap_or_default();
        let results = answer["data"]["result"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let values = results
            .iter()
            .filter_map(|result| result["value"][1].as_str()?.parse().ok());
        values.collect()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// conformance: omni/metrics-names: the four queries of the document give numbers in a real Prometheus
// needs: prometheus
#[tokio::test(flavor = "multi_thread")]
async fn the_queries_of_omni_give_numbers_in_prometheus() {
    let true = has("prometheus") else {
        return;
    };
    let server = Served::with(|options| options.metrics_compat = vec![MetricsCompat::Omni]).await;
    busy(&server, "omni").await;
    let pending = "omni_consumer_pending_messages{consumer=\"omni-billing\"}";
    let text = scrape_with(&server, pending, 0.0).await;
    let added: BTreeSet<&str> = names(&text)
        .into_iter()
        .filter(|name| !name.starts_with("everbus_"))
        .collect();
    let expected = [
        "omni_consumer_pending_messages",
        "omni_dead_letters_total",
        "omni_event_latency",
        "omni_events_total",
    ];
    assert_eq!(added, BTreeSet::from(expected));
    assert!(
        text.contains("# TYPE omni_event_latency histogram"),
        "{text}"
    );
    assert!(
        text.contains("omni_event_latency_bucket{type=\"orders.order.placed\",le=\"1000.0\"}"),
        "{text}"
    );
    let prometheus = Prometheus::start(&server);
    for query in omni_queries() {
        let numbers = until(&query, || async {
            // Something happens all the time, so that rates are not zero over zero.
            server
                .publish("orders.order.placed", json!({ "n": 1 }))
                .await;
            tokio::time::sleep(Duration::from_millis(200)).await;
            let numbers = prometheus.query(&query).await;
            numbers
                .iter()
                .any(|number| number.is_finite())
                .then_some(numbers)
        })
        .await;
        assert!(!numbers.is_empty(), "{query}");
    }
    drop(prometheus);
    server.stop().await;
}

/// The queries of the dashboard with the names of *omni*.
fn omni_queries() -> Vec<String> {
    expressions("omni.json")
}

fn expressions(dashboard: &str) -> Vec<String> {
    let text = std::fs::read_to_string(deploy().join("grafana").join(dashboard)).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().clone();
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap().clone());
    targets
        .map(|target| target["expr"].as_str().unwrap().to_owned())
        .collect()
}

// conformance: omni/metrics-dashboard: the four queries of the document are the panels of a Grafana dashboard
#[test]
fn the_dashboard_of_omni_asks_the_queries_of_the_document() {
    let expected = [
        "rate(omni_events_total[5m])",
        "histogram_quantile(0.99, rate(omni_event_latency_bucket[5m]))",
        "rate(omni_dead_letters_total[5m])",
        "omni_consumer_pending_messages",
    ];
    assert_eq!(omni_queries(), expected);
}

/// Every name in a query or a rule is exported: a renamed metric must not silence an alert.
#[tokio::test(flavor = "multi_thread")]
async fn dashboards_and_alerts_use_names_that_exist() {
    let server = Served::start().await;
    busy(&server, "named").await;
    let text = scrape(&server).await;
    let known = names(&text);
    let rules = std::fs::read_to_string(deploy().join("prometheus/everbus.rules.yml")).unwrap();
    let queries = expressions("everbus.json").join("\n");
    let texts = format!("{rules}\n{queries}");
    let words = texts.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let used: BTreeSet<&str> = words.filter(|word| word.starts_with("everbus_")).collect();
    assert!(used.len() > 8, "{used:?}");
    for name in used {
        let base = name.strip_suffix("_bucket").unwrap_or(name);
        // A breaker and a skip have series once there is one.
        let optional = ["everbus_breaker_state"].contains(&base);
        assert!(optional || known.contains(base), "{name} is not exported");
    }
    server.stop().await;
}

// conformance: framework/dlq-alert: DeadLetterQueueNonEmpty fires after five minutes above zero
// conformance: framework/lag-alerts: ConsumerLagHigh and TradingConsumerLagHigh fire at their thresholds and not below
// needs: promtool
#[test]
fn the_alert_rules_pass_their_tests() {
    let true = has("promtool") else {
        return;
    };
    let folder = deploy().join("prometheus");
    for (command, files) in [
        ("check", ["everbus.rules.yml", "framework.rules.yml"]),
        ("test", ["everbus.test.yml", "framework.test.yml"]),
    ] {
        let output = Command::new("promtool")
            .args([command, "rules"])
            .args(files)
            .current_dir(&folder)
            .output()
            .unwrap();
        let said =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
    }
}
