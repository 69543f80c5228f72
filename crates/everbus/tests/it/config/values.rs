//! Variables, secrets and the address of the broker.

use std::time::Duration;

use everbus::Config;
use everbus::config::{BrokerKind, Problems};

use super::{SPECIFICATION, parse, refused};

// conformance: handlers/config-variables: ${VAR} and ${VAR:-default} are expanded in values; one that is not set is named with its line
#[test]
fn variables_become_values_and_nothing_else() {
    let text = "
consumers:
  a:
    stream: ${STREAM:-orders:order-placed}
    group: a$$b
    processing_timeout: ${TIMEOUT:-5m}
    circuit_breaker: {fail_max: \"${FAIL_MAX}\"}
    idempotent: ${IDEMPOTENT:-true}
";
    let consumer = parse(text).unwrap().consumers.remove(0);
    assert_eq!(consumer.stream, "orders:order-placed");
    assert_eq!(consumer.group.as_str(), "a$b");
    assert_eq!(consumer.processing_timeout, Some(Duration::from_secs(300)));
    assert_eq!(consumer.circuit_breaker.policy().unwrap().fail_max, 7);
    assert_eq!(consumer.idempotent, Some(true));
    // A value with a line break and a key in it is one value.
    refused(
        "broker:\n  url: ${TRICK}\n",
        "2:8: broker.url contains a blank or a control character",
        "set TRICK",
    );
    refused(
        "broker:\n  url: a${NOT_SET}\n",
        "2:8: broker.url: the variable NOT_SET is not set",
        "",
    );
    refused(
        "broker: {url: \"${EMPTY}\"}",
        "1:15: broker.url names no engine",
        "",
    );
    refused(
        "broker: {type: redis, url: \"${EMPTY}\"}",
        "1:28: broker.url is empty",
        "set EMPTY so that it reads like redis://",
    );
    refused(
        "streams: {overrides: {'${STREAM}': {maxlen: 1}}}",
        "1:23: ",
        "names have no variables",
    );
}

// conformance: handlers/config-secrets: neither a password nor what a variable holds is ever shown
#[test]
fn secrets_are_shown_nowhere() {
    let texts = [
        "broker: {type: kafka, url: \"${REDIS_URL}\"}",
        "broker: {type: redis, url: \"redis//:hunter2@h\"}",
        "broker: {type: redis, url: \"me:hunter2@h\"}",
        "broker: {type: nats, url: \"hunter2@h\"}",
        "broker: {url: \"hunter2://h\"}",
        "broker: {type: \"redis://me:hunter2@h\", url: 5}",
        "broker: \"redis://me:hunter2@h\"",
        "\"redis://me:hunter2@h\": 5",
        "broker: {urll: \"redis://me:hunter2@h\"}",
        "broker: {type: \"${WORD}\", url: \"redis://h\"}",
        "consumers: {a: {stream: \"${WORD}*\", group: \"${WORD}\", concurrency: \"${WORD}\"}}",
        "consumers: {a: {stream: o.p, processing_timeout: \"${WORD}\", ordered: \"${WORD}\"}}",
        "consumers: {a: {stream: o.p, criticality: \"${WORD}\", start_from: \"${WORD}\"}}",
        "consumers: {a: {stream: o.p, retry: \"${WORD}\", circuit_breaker: \"${WORD}\"}}",
        "consumers: {a: {stream: \"${WORD}\", group: \"${WORD}\"}, b: {stream: \"${WORD}\", group: \"${WORD}\"}}",
        "consumers: {a: {stream: a.a, group: \"${WORD}\", ordered: true}, b: {stream: b.b, group: \"${WORD}\", ordered: false}}",
        "consumers: {a: {stream: a.a, processing_timeout: \"${WORD}\"}}",
        "consumers: {a: {stream: a.a, circuit_breaker: {dependency: \"${WORD}\", fail_max: 2}}, b: {stream: b.b, circuit_breaker: {dependency: \"${WORD}\", fail_max: 1}}}",
    ];
    for text in texts {
        let error = parse(text).unwrap_err();
        let problems = Problems::of(&error).unwrap();
        let everything = format!("{error} {error:?} {problems} {problems:?}");
        assert!(!everything.contains("hunter2"), "{everything}");
    }
    // Not even the number of a duration with a wrong unit.
    let error = Config::parse_with(
        "consumers: {a: {stream: a.a, processing_timeout: \"${N}\"}}",
        "everbus.yaml",
        |_| Some("4711 seconds".to_owned()),
    );
    assert!(!format!("{:?}", error.unwrap_err()).contains("4711"));
    let config = parse(SPECIFICATION).unwrap();
    let shown = format!("{config:?} {}", config.broker.as_ref().unwrap().url);
    assert!(!shown.contains("hunter2"), "{shown}");
    assert!(shown.contains("redis://***@cache:6379/0"), "{shown}");
}

// conformance: handlers/config-broker-url: type and url become the URL that opens the bus, and must agree
#[test]
fn the_type_and_the_url_of_the_broker_agree() {
    for (broker, kind, url) in [
        (
            "type: sqlite, url: shop.db",
            BrokerKind::Sqlite,
            "sqlite:shop.db",
        ),
        (
            "type: sqlite, url: 'sqlite:shop.db'",
            BrokerKind::Sqlite,
            "sqlite:shop.db",
        ),
        (
            "url: '/srv/my shop.db'",
            BrokerKind::Sqlite,
            "sqlite:/srv/my shop.db",
        ),
        ("type: memory", BrokerKind::Memory, "memory:"),
        ("url: 'memory:'", BrokerKind::Memory, "memory:"),
        (
            "type: redis, url: 'rediss://h:6380'",
            BrokerKind::Redis,
            "rediss://h:6380",
        ),
        (
            "type: nats, url: 'tls://h:4222'",
            BrokerKind::Nats,
            "tls://h:4222",
        ),
        (
            "url: 'nats://a:4222,nats://b:4222'",
            BrokerKind::Nats,
            "nats://a:4222,nats://b:4222",
        ),
        (
            "type: kafka, url: 'localhost:9092'",
            BrokerKind::Kafka,
            "kafka://localhost:9092",
        ),
        (
            "type: kafka, url: 'a:9092,b:9092'",
            BrokerKind::Kafka,
            "kafka://a:9092,b:9092",
        ),
        (
            "type: kafka, url: 'kafka://h:9092'",
            BrokerKind::Kafka,
            "kafka://h:9092",
        ),
        (
            "type: postgres, url: 'postgresql://h/db'",
            BrokerKind::Postgres,
            "postgresql://h/db",
        ),
    ] {
        let config = parse(&format!("broker: {{{broker}}}")).unwrap();
        assert_eq!(config.broker.as_ref().unwrap().kind, kind, "{broker}");
        assert_eq!(config.broker_url().as_deref(), Some(url), "{broker}");
    }
    for (broker, said) in [
        (
            "type: redis, url: 'kafka://h:9092'",
            "begins with kafka:, which is kafka, but type is redis",
        ),
        ("type: sqlite, url: 'redis://h'", "begins with redis:"),
        (
            "type: memory, url: 'shop.db'",
            "does not begin with memory:",
        ),
        (
            "type: redis, url: 'localhost:6379'",
            "does not begin with redis: or rediss:",
        ),
        ("type: redis, url: 'redis:h'", "has no // after its scheme"),
        ("type: redis, url: 'redis://'", "names no host"),
        ("type: sqlite, url: 'sqlite:'", "names no file"),
        (
            "type: sqlite, url: ':memory:'",
            "does not begin with sqlite:",
        ),
        ("type: sqlite, url: 'sqlite::memory:'", "survives nothing"),
        ("type: sqlite, url: 'a.db?mode=ro'", "question mark"),
        ("type: memory, url: 'memory:x'", "after memory:"),
        ("type: redis", "broker.url is missing"),
        ("type: redis, url: ", "has no value"),
        ("type: redis, url: ''", "is empty"),
        ("url: 'amqp://h'", "names no engine that is known"),
        (
            "type: rabbitmq, url: 'amqp://h'",
            "one of redis, nats, kafka",
        ),
    ] {
        refused(&format!("broker: {{{broker}}}"), "1:", said);
    }
}
