//! `everbus.yaml`: the file of the framework specification works as written, and whatever is wrong
//! with a file is said all at once, each with its line.

mod files;
mod problems;
mod retention;
mod streams;
mod values;

use std::time::Duration;

use everbus::config::{Breaker, BrokerKind, Problems};
use everbus::{
    BreakerPolicy, Code, Config, Criticality, Decode, Error, OnFull, PublishRate, RetryPolicy,
    StartFrom, StreamLimit,
};

/// The block of the specification's section Configuration, byte for byte.
const SPECIFICATION: &str = r#"broker:
  type: "redis"                     # redis | nats | kafka
  url: "${REDIS_URL}"
  
streams:
  default_maxlen: 100000            # Default MAXLEN for new streams
  overrides:
    "signals:price-update":
      maxlen: 10000                 # Low for high-frequency trading data
    "orders:order-placed":
      maxlen: 500000                # High for critical business events

consumers:
  notification-service:
    stream: "orders:order-placed"
    group: "notification-service"
    criticality: standard
    circuit_breaker:
      fail_max: 5
      timeout_duration: 30
    retry:
      max_attempts: 3
      backoff_multiplier: 1
      backoff_max: 10
    processing_timeout: 30
    
  signal-processor:
    stream: "signals:price-update"
    group: "signal-processor"
    criticality: best_effort        # Skip stale, never block
    processing_timeout: 5

backpressure:
  max_staleness_ms:
    "signals:price-update": 5000
    "agents:task-completed": 60000
    "orders:order-placed": 0        # Never skip
"#;

/// The example of the book.
const BOOK: &str = include_str!("../../../../docs/book/configuration.md");

fn variables(name: &str) -> Option<String> {
    match name {
        "REDIS_URL" => Some("redis://me:hunter2@cache:6379/0".into()),
        "FAIL_MAX" => Some("7".into()),
        "WORD" => Some("hunter2".into()),
        "EMPTY" => Some(String::new()),
        "TRICK" => Some("x\n  type: kafka # \"".into()),
        _ => None,
    }
}

/// The specification's file, read.
pub(crate) fn specification() -> Config {
    parse(SPECIFICATION).unwrap()
}

fn parse(text: &str) -> Result<Config, Error> {
    Config::parse_with(text, "everbus.yaml", variables)
}

/// The text is refused; its problems, one per line as `line:column: message; hint`.
#[track_caller]
fn problems(text: &str) -> Vec<String> {
    let error = parse(text).unwrap_err();
    assert_eq!(error.code(), Code::InvalidConfig, "{error}");
    assert!(error.hint_text().is_some(), "{error}");
    let problems = Problems::of(&error).expect("the cause");
    assert_eq!(problems.file, "everbus.yaml");
    let mut lines = Vec::new();
    for problem in &problems.list {
        assert!(!problem.hint.is_empty(), "{problem:?}");
        let place = match (problem.line, problem.column) {
            (Some(line), Some(column)) => format!("{line}:{column}: "),
            _ => String::new(),
        };
        let line = format!("{place}{}", problem.message);
        assert!(error.message().contains(&line), "{line} in {error}");
        lines.push(format!("{line}; {}", problem.hint));
    }
    lines
}

/// The text has exactly one problem, which begins and continues like this.
#[track_caller]
fn refused(text: &str, start: &str, contains: &str) {
    let problems = problems(text);
    let text: String = text.chars().take(500).collect();
    assert_eq!(problems.len(), 1, "{text}: {problems:#?}");
    assert!(
        problems[0].starts_with(start) && problems[0].contains(contains),
        "{text}: {problems:#?}"
    );
}

// conformance: framework/config-file: the specification's configuration file loads as written, every value of it
// conformance: handlers/config-spec-file: the specification's file loads as written
#[test]
fn the_file_of_the_specification_loads_as_written() {
    let config = specification();

    let broker = config.broker.as_ref().unwrap();
    assert_eq!(broker.kind, BrokerKind::Redis);
    assert_eq!(
        config.broker_url().as_deref(),
        Some("redis://me:hunter2@cache:6379/0")
    );

    let limit = |events| {
        StreamLimit::new(events)
            .on_full(OnFull::Wait)
            .wait(Duration::from_secs(5))
    };
    assert_eq!(config.limits.default, Some(limit(100_000)));
    let overrides: Vec<_> = config.limits.by_stream.iter().collect();
    assert_eq!(
        overrides,
        [
            (&"orders.order.placed".to_owned(), &limit(500_000)),
            (&"signals.price.update".to_owned(), &limit(10_000)),
        ]
    );

    assert_eq!(config.consumers.len(), 2);
    let notification = &config.consumers[0];
    assert_eq!(notification.name, "notification-service");
    assert_eq!(notification.stream, "orders:order-placed");
    assert_eq!(notification.pattern.as_str(), "orders.order.placed");
    assert_eq!(notification.group.as_str(), "notification-service");
    assert_eq!(notification.criticality, Some(Criticality::Standard));
    assert_eq!(
        notification.circuit_breaker,
        Breaker::On(
            BreakerPolicy::new()
                .fail_max(5)
                .open_for(Duration::from_secs(30))
        )
    );
    assert_eq!(notification.dependency, None);
    let retry = notification.retry.unwrap();
    assert_eq!(retry.max_attempts, Some(3));
    assert_eq!(retry.backoff_multiplier, Some(Duration::from_secs(1)));
    assert_eq!(retry.backoff_max, Some(Duration::from_secs(10)));
    assert_eq!(
        retry.policy(),
        RetryPolicy::default()
            .max_retries(2)
            .base_delay(Duration::from_secs(1))
            .max_delay(Duration::from_secs(10))
            .multiplier(2.0)
    );
    assert_eq!(
        notification.processing_timeout,
        Some(Duration::from_secs(30))
    );

    let signals = &config.consumers[1];
    assert_eq!(signals.name, "signal-processor");
    assert_eq!(signals.pattern.as_str(), "signals.price.update");
    assert_eq!(signals.group.as_str(), "signal-processor");
    assert_eq!(signals.criticality, Some(Criticality::BestEffort));
    assert_eq!(signals.processing_timeout, Some(Duration::from_secs(5)));
    assert_eq!(signals.retry, None);
    assert_eq!(signals.circuit_breaker, Breaker::Unsaid);
    for consumer in &config.consumers {
        assert_eq!(consumer.concurrency, None);
        assert_eq!(consumer.ordered, None);
        assert_eq!(consumer.idempotent, None);
        assert_eq!(consumer.start_from, None);
    }

    let staleness = |name| config.backpressure.max_staleness(name);
    assert_eq!(config.backpressure.max_staleness.len(), 3);
    assert_eq!(
        staleness("signals:price-update"),
        Some(Duration::from_secs(5))
    );
    assert_eq!(
        staleness("agents.task.completed"),
        Some(Duration::from_secs(60))
    );
    assert_eq!(staleness("orders:order-placed"), None, "0: never skip");
    assert_eq!(staleness("users:user-created"), None);
    assert_eq!(config.backpressure.publish_rate, None);
}

// conformance: framework/config-criticality-sample: the sample of Consumer Resilience loads, its group is the consumer's name
#[test]
fn a_consumer_without_a_group_is_its_own_group() {
    let sample = r#"
consumers:
  notification-service:
    stream: "orders:order-placed"
    criticality: standard          # critical | standard | best_effort
    circuit_breaker:
      fail_max: 5
      timeout_duration: 30
    retry:
      max_attempts: 3
      backoff_multiplier: 1
      backoff_max: 10
    processing_timeout: 30
"#;
    let config = parse(sample).unwrap();
    assert_eq!(config.consumers[0].group.as_str(), "notification-service");
    assert_eq!(config.broker, None);
    assert_eq!(config.broker_url(), None);
}

// conformance: framework/config-staleness-sample: the sample of Backpressure loads; 0 means never skip
#[test]
fn a_threshold_of_zero_means_never_skip() {
    let sample = r#"
backpressure:
  max_staleness_ms:
    "signals:price-update": 5000     # 5 seconds — trading data
    "agents:task-completed": 60000   # 60 seconds — agent events
    "orders:order-placed": 0         # Never skip — critical
"#;
    let backpressure = parse(sample).unwrap().backpressure;
    assert_eq!(
        backpressure.max_staleness("signals.price.update"),
        Some(Duration::from_millis(5000))
    );
    assert_eq!(backpressure.max_staleness("orders.order.placed"), None);
}

// conformance: framework/config-retry: max_attempts counts all attempts, backoff_multiplier is the first wait, backoff_max the longest, waits double
#[test]
fn retry_means_what_it_means_in_the_specification() {
    let text = "consumers: {a: {stream: o.p, retry: {max_attempts: 6, backoff_multiplier: 1, backoff_max: 5}}}";
    let retry = parse(text).unwrap().consumers[0].retry.unwrap();
    // The growth of the program's own policy does not matter, what the file leaves out does.
    for policy in [
        retry.policy(),
        retry.over(RetryPolicy::default().multiplier(3.0).jitter(0.5)),
    ] {
        assert_eq!(policy.max_attempts(), 6);
        let waits: Vec<u64> = (1..=6).map(|n| policy.delay_before(n).as_secs()).collect();
        assert_eq!(waits, [0, 1, 2, 4, 5, 5]);
    }
    let once = parse("consumers: {a: {stream: o.p, retry: {max_attempts: 1}}}").unwrap();
    let once = once.consumers[0].retry.unwrap();
    assert_eq!(once.policy().max_attempts(), 1);
    let patient = RetryPolicy::default().max_delay(Duration::from_secs(600));
    assert_eq!(once.over(patient), patient.max_retries(0));
}

// conformance: framework/config-breaker-default: a consumer has a breaker of 5 failures and 30 s unless it says off
// conformance: framework/config-criticality-values: critical, standard, best_effort and best-effort; critical if none is given
#[test]
fn a_consumer_has_a_breaker_and_is_critical_unless_it_says_otherwise() {
    let of = |settings: &str| {
        let text = format!("consumers:\n  a: {{stream: o.p{settings}}}\n");
        parse(&text).unwrap().consumers.remove(0)
    };
    let plain = of("");
    assert_eq!(plain.criticality, None);
    assert_eq!(Criticality::default(), Criticality::Critical);
    assert_eq!(plain.circuit_breaker, Breaker::Unsaid);
    let policy = plain.circuit_breaker.policy().unwrap();
    assert_eq!(policy.fail_max, 5);
    assert_eq!(policy.open_for, Duration::from_secs(30));
    for off in [", circuit_breaker: off", ", circuit_breaker: false"] {
        assert_eq!(of(off).circuit_breaker, Breaker::Off);
        assert_eq!(of(off).circuit_breaker.policy(), None);
    }
    let named = of(
        ", circuit_breaker: {fail_max: 2, timeout_duration: 500ms, window: 2m, failure_rate: 0.7, dependency: mail}",
    );
    let policy = BreakerPolicy::new()
        .fail_max(2)
        .open_for(Duration::from_millis(500))
        .window(Duration::from_secs(120))
        .failure_rate(0.7);
    assert_eq!(named.circuit_breaker, Breaker::On(policy));
    assert_eq!(named.dependency.as_deref(), Some("mail"));
    for (word, criticality) in [
        ("critical", Criticality::Critical),
        ("standard", Criticality::Standard),
        ("best_effort", Criticality::BestEffort),
        ("best-effort", Criticality::BestEffort),
    ] {
        let consumer = of(&format!(", criticality: {word}"));
        assert_eq!(consumer.criticality, Some(criticality));
    }
}

// conformance: contract/decode-config: decode of a consumer is dead_letter or retry, with either hyphen
#[test]
fn what_becomes_of_an_event_that_cannot_be_read_is_a_setting() {
    let of = |settings: &str| {
        let text = format!("consumers: {{a: {{stream: o.p{settings}}}}}");
        parse(&text).unwrap().consumers.remove(0).decode
    };
    assert_eq!(of(""), None);
    assert_eq!(Decode::default(), Decode::DeadLetter);
    assert_eq!(of(", decode: retry"), Some(Decode::Retry));
    assert_eq!(of(", decode: dead_letter"), Some(Decode::DeadLetter));
    assert_eq!(of(", decode: dead-letter"), Some(Decode::DeadLetter));
}

// conformance: handlers/config-extensions: the keys beyond the specification are read with their defaults
#[test]
fn the_keys_beyond_the_specification_are_read() {
    let config = parse(
        "
streams:
  default_maxlen: 1_000
  on_full: reject
  wait: 2s
  overrides:
    a.b: {on_full: drop_oldest}
    c.d: {maxlen: 5, wait: 250ms}
consumers:
  one:
    stream: 'orders:*'
    group: shop
    concurrency: 4
    ordered: true
    idempotent: true
    start_from: first
    processing_timeout: 1.5
  two:
    stream: users.>
    group: shop
    start_from: first
  three:
    stream: users.>
    start_from: 2026-01-31T12:00:00Z
backpressure:
  publish_rate: 0.5
",
    )
    .unwrap();
    let default = StreamLimit::new(1000)
        .on_full(OnFull::Reject)
        .wait(Duration::from_secs(2));
    assert_eq!(config.limits.default, Some(default));
    let named = |name| config.limits.by_stream[name];
    assert_eq!(named("a.b"), default.on_full(OnFull::DropOldest));
    let small = StreamLimit::new(5).on_full(OnFull::Reject);
    assert_eq!(named("c.d"), small.wait(Duration::from_millis(250)));
    let one = &config.consumers[0];
    assert!(one.pattern.matches("orders.placed"));
    assert_eq!(one.group.as_str(), "shop");
    assert_eq!(one.concurrency, Some(4));
    assert_eq!(one.ordered, Some(true));
    assert_eq!(one.idempotent, Some(true));
    assert_eq!(one.start_from, Some(StartFrom::First));
    assert_eq!(one.processing_timeout, Some(Duration::from_millis(1500)));
    assert!(matches!(
        config.consumers[2].start_from,
        Some(StartFrom::Time(_))
    ));
    assert_eq!(
        config.backpressure.publish_rate,
        Some(PublishRate::new(0.5))
    );
}

// conformance: handlers/config-alerts: the section alerts is read, and its addresses are not shown
#[test]
fn the_addresses_of_alerts_are_secrets() {
    let text = "
alerts:
  slack: https://hooks.example.com/hidden-1
  webhook: https://alerts.example.com/hidden-2
  job_webhook: https://jobs.example.com/hidden-3
  allow_private: true
  repeat_after: 1h
  per_minute: 5
";
    let config = parse(text).unwrap();
    assert!(!format!("{config:?}").contains("hidden"), "{config:?}");
    let alerts = config.alerts.unwrap();
    let revealed = [&alerts.slack, &alerts.webhook, &alerts.job_webhook]
        .map(|url| url.as_ref().unwrap().reveal().to_owned());
    assert_eq!(revealed[0], "https://hooks.example.com/hidden-1");
    assert_eq!(revealed[1], "https://alerts.example.com/hidden-2");
    assert_eq!(revealed[2], "https://jobs.example.com/hidden-3");
    assert!(alerts.allow_private && !alerts.allow_http);
    assert_eq!(alerts.repeat_after, Some(Duration::from_secs(3600)));
    assert_eq!(alerts.per_minute, Some(5));
    assert!(parse("alerts: {per_minute: 0}").is_err());
}

// conformance: handlers/config-book: the example of the book loads
#[test]
fn the_example_of_the_book_loads() {
    let examples: Vec<&str> = BOOK
        .split("```yaml\n")
        .skip(1)
        .map(|rest| rest.split_once("```").expect("an end").0)
        .collect();
    assert!(examples.len() >= 2, "{}", examples.len());
    for example in examples {
        let loaded = Config::parse_with(example, "book.yaml", |name| {
            (name == "REDIS_URL").then(|| "redis://localhost".to_owned())
        });
        loaded.unwrap_or_else(|e| panic!("{e:?}\n{example}"));
    }
}

// conformance: handlers/config-book: the book names every key
#[test]
fn the_book_names_every_key() {
    // An unknown key in each section makes the reader list what it knows.
    let text = "
zz1: 1
broker: {zz2: 1}
streams: {zz3: 1, overrides: {a.b: {maxlen: 1, zz4: 1}}}
consumers: {a: {stream: a.b, zz5: 1, circuit_breaker: {zz6: 1}, retry: {zz7: 1}}}
backpressure: {zz8: 1}
server: {zz9: 1}
alerts: {zz10: 1}
metrics: {zz11: 1}
telemetry: {zz12: 1, otlp: {zz13: 1}}
";
    let problems = problems(text);
    assert_eq!(problems.len(), 13, "{problems:#?}");
    let mut keys = 0;
    for problem in &problems {
        let (_, list) = problem.split_once("the keys here are ").expect("a list");
        for key in list.split(", ").flat_map(|part| part.split(" and ")) {
            keys += 1;
            assert!(
                BOOK.contains(&format!("`{key}`")),
                "{key} is not in the book"
            );
        }
    }
    assert!(keys > 30, "{keys}");
}
