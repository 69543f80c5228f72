//! What is wrong with a file: where it stands, and what was most likely meant.

use everbus::BreakerPolicy;
use everbus::config::Breaker;

use super::{parse, problems, refused};

// conformance: handlers/config-unknown-key: an unknown key is an error with file, line and the nearest known key
#[test]
fn an_unknown_key_comes_with_the_nearest_known_one() {
    for (text, start, meant) in [
        (
            "brokr: {}\n",
            "1:1: unknown key \"brokr\" at the top",
            "did you mean \"broker\"?",
        ),
        (
            "broker: {url: 'memory:', typ: memory}\n",
            "1:26: unknown key \"typ\" in broker",
            "did you mean \"type\"?",
        ),
        (
            "consumers:\n  a:\n    stream: o.p\n    citicality: standard\n",
            "4:5: unknown key \"citicality\" in consumers.a;",
            "did you mean \"criticality\"?",
        ),
        (
            "consumers:\n  a:\n    stream: o.p\n    retry:\n      maxAttempts: 3\n",
            "5:7: unknown key \"maxAttempts\" in consumers.a.retry",
            "did you mean \"max_attempts\"?",
        ),
        (
            "consumers: {a: {stream: o.p, circuit_breaker: {timeout: 3}}}",
            "1:48: unknown key \"timeout\"",
            "did you mean \"timeout_duration\"?",
        ),
        (
            "streams: {overrides: {'o:p': {max_len: 3, maxlen: 3}}}",
            "1:31: unknown key \"max_len\" in streams.overrides.\"o:p\"",
            "did you mean \"maxlen\"?",
        ),
        (
            "backpressure: {max_staleness: {a.b: 1}}",
            "1:16: unknown key \"max_staleness\"",
            "did you mean \"max_staleness_ms\"?",
        ),
        (
            "max_attempts: 3\n",
            "1:1: unknown key \"max_attempts\" at the top",
            "it belongs under consumers.NAME.retry",
        ),
        (
            "frobnicate: 3\n",
            "1:1: unknown key",
            "the keys here are broker, store, streams",
        ),
        (
            "consumers: {a: {stream: o.p, <<: {}}}",
            "1:30: unknown key \"<<\"",
            "merge keys",
        ),
        // A key may be anything; it is shown on one line and cut.
        (
            "\"a\\nb\\e[2J\": 3\n",
            "1:1: unknown key \"a\\nb\\u{1b}[2J\"",
            "",
        ),
    ] {
        refused(text, start, meant);
    }
}

// conformance: handlers/config-all-problems: all problems of a file are reported at once, in the order of its lines
#[test]
fn all_problems_of_a_file_are_reported_at_once() {
    let text = "
broker:
  type: reddis
  url: ${NOT_SET}
streams:
  default_maxlen: 0
  default_maxlen: 5
consumers:
  a:
    group: 'x'
    criticality: important
    processing_timeout: 30 parsecs
    retry: {max_attempts: 0, backoff_multiplier: -1, backof_max: 3}
backpressure:
  max_staleness_ms:
    orders:order-placed: 5s
    a.b: -1
";
    let found = problems(text);
    let starts: Vec<&str> = found
        .iter()
        .map(|line| line.split("; ").next().unwrap())
        .collect();
    assert_eq!(
        starts,
        [
            "3:9: broker.type is reddis, which is not known",
            "4:8: broker.url: the variable NOT_SET is not set",
            "6:19: streams.default_maxlen is 0, which is out of range",
            "7:3: the key \"default_maxlen\" is given twice, first on line 6",
            "9:3: consumers.a.stream is missing",
            "11:18: consumers.a.criticality is important, which is not known",
            "12:25: consumers.a.processing_timeout is 30 parsecs, which has a unit that is not known",
            "13:27: consumers.a.retry.max_attempts is 0, which is out of range",
            "13:50: consumers.a.retry.backoff_multiplier is -1, which is negative",
            "13:54: unknown key \"backof_max\" in consumers.a.retry",
            "16:26: backpressure.max_staleness_ms.\"orders:order-placed\" is 5s, which is not a whole number",
            "17:10: backpressure.max_staleness_ms.\"a.b\" is -1, which is out of range",
        ]
    );
    let error = parse(text).unwrap_err();
    let mut lines = error.message().lines();
    assert_eq!(lines.next(), Some("12 problems in everbus.yaml"));
    let first = lines.next().unwrap();
    assert!(
        first.starts_with("everbus.yaml:3:9: ") && first.ends_with("did you mean \"redis\"? It is one of redis, nats, kafka, sqlite, memory and postgres"),
        "{first}"
    );
    assert_eq!(lines.count(), 11);
}

// conformance: handlers/config-all-problems: the list is bounded
#[test]
fn the_list_of_problems_is_bounded() {
    let many: String = (0..3000).map(|n| format!("zz{n}: 1\n")).collect();
    let error = parse(&many).unwrap_err();
    assert_eq!(error.message().lines().count(), 22);
    assert!(error.message().ends_with("and 2980 more"), "{error}");
}

// conformance: handlers/config-units: *_ms keys are milliseconds and nothing else; a wrong unit names the right ones
#[test]
fn numbers_with_the_wrong_unit_type_or_range_are_refused() {
    let consumer =
        |key: &str, value: &str| format!("consumers: {{a: {{stream: o.p, {key}: {value}}}}}");
    for (key, value, said) in [
        ("processing_timeout", "0", "zero"),
        ("processing_timeout", "-3", "negative"),
        ("processing_timeout", "400d", "ms, s, m and h"),
        ("processing_timeout", "9000h", "longer than a year"),
        ("processing_timeout", "1e300", "unit"),
        ("processing_timeout", "'30 seconds'", "did you mean 30s?"),
        ("processing_timeout", "soon", "not a duration"),
        ("processing_timeout", "[30]", "is a list"),
        ("processing_timeout", "{s: 30}", "is a mapping"),
        ("processing_timeout", "", "has no value"),
        ("processing_timeout", "true", "not a duration"),
        ("concurrency", "0", "out of range"),
        ("concurrency", "65537", "out of range"),
        ("concurrency", "1.5", "not a whole number"),
        ("concurrency", "'4'", "without quotes"),
        ("concurrency", "010", "not a whole number"),
        ("concurrency", "0x10", "not a whole number"),
        ("concurrency", "99999999999999999999999", "out of range"),
        ("ordered", "yes", "true or false"),
        ("ordered", "'true'", "true or false"),
        ("idempotent", "1", "true or false"),
        ("decode", "again", "one of dead_letter"),
        ("start_from", "yesterday", "new, first, last, or a time"),
        ("criticality", "3", "one of critical"),
        ("criticality", "[critical]", "is a list"),
        ("group", "''", "cannot be the name of a group"),
        ("group", "{}", "is a mapping"),
        ("retry", "3", "is a single value"),
        ("retry", "[]", "is a list"),
        ("circuit_breaker", "on", "is a single value"),
        ("circuit_breaker", "{fail_max: 0}", "out of range"),
        ("circuit_breaker", "{timeout_duration: 0}", "zero"),
        (
            "circuit_breaker",
            "{failure_rate: 50}",
            "between 0.001 and 1",
        ),
        ("circuit_breaker", "{failure_rate: .nan}", "not a number"),
        ("circuit_breaker", "{failure_rate: .inf}", "not a number"),
        ("circuit_breaker", "{dependency: ''}", "not a name"),
        ("retry", "{max_attempts: 99999999}", "out of range"),
        ("retry", "{backoff_multiplier: 0}", "zero"),
        ("retry", "{backoff_max: 99999999999}", "longer than a year"),
        (
            "retry",
            "{backoff_multiplier: 60}",
            "shorter than the first",
        ),
        (
            "retry",
            "{backoff_multiplier: 5, backoff_max: 2}",
            "shorter than the first",
        ),
    ] {
        refused(&consumer(key, value), "1:", said);
    }
    for (text, said) in [
        ("backpressure: {publish_rate: 0}", "out of range"),
        ("backpressure: {publish_rate: fast}", "not a number"),
        (
            "backpressure: {max_staleness_ms: 5000}",
            "is a single value",
        ),
        (
            "backpressure: {max_staleness_ms: {a.b: 1.5}}",
            "not a whole number",
        ),
        (
            "backpressure: {max_staleness_ms: {a.b: 500ms}}",
            "milliseconds",
        ),
        (
            "backpressure: {max_staleness_ms: {a.b: 99999999999999}}",
            "out of range",
        ),
        ("backpressure: {max_staleness_ms: {a.*: 5}}", "pattern"),
        ("backpressure: {max_staleness_ms: {'': 5}}", "empty"),
        ("streams: {default_maxlen: -5}", "out of range"),
        ("streams: {default_maxlen: lots}", "not a whole number"),
        (
            "streams: {on_full: drop-oldest}",
            "did you mean \"drop_oldest\"",
        ),
        ("streams: {wait: 0}", "zero"),
        ("streams: {overrides: {a.b: 5}}", "is a single value"),
        ("streams: {overrides: {a.b: }}", "says nothing"),
        (
            "streams: {overrides: {'system:circuit-opened': {maxlen: 3}}}",
            "never limited",
        ),
        (
            "streams: {overrides: {a.b: {on_full: reject}}}",
            "no default_maxlen",
        ),
        (
            "streams: {overrides: {a.b: {maxlen: 5}, 'a:b': {maxlen: 6}}}",
            "line 1 names too",
        ),
        ("consumers: [a]", "is a list"),
        ("consumers: {a: }", "consumers.a.stream is missing"),
        (
            "consumers: {a: {stream: 'o.p*'}}",
            "not the name of a stream",
        ),
        (
            "consumers: {'': {stream: o.p}}",
            "cannot be the name of a group",
        ),
        ("- broker\n", "the file is a list"),
        ("just text\n", "the file is a single value"),
    ] {
        refused(text, "1:", said);
    }
}

// conformance: handlers/config-group-conflict: consumers of one group that contradict each other, or are the same, are refused
#[test]
fn consumers_that_share_a_group_must_agree() {
    let two = |one: &str, two: &str| {
        format!(
            "consumers:\n  a: {{stream: a.a, group: g{one}}}\n  b: {{stream: b.b, group: g{two}}}\n"
        )
    };
    for (one, other, said) in [
        (
            ", concurrency: 2",
            ", concurrency: 3",
            "consumers.b.concurrency contradicts line 2",
        ),
        (
            ", ordered: true",
            ", ordered: false",
            "consumers.b.ordered contradicts line 2",
        ),
        (
            ", start_from: new",
            ", start_from: last",
            "consumers.b.start_from contradicts line 2",
        ),
        (
            ", circuit_breaker: {fail_max: 2}",
            ", circuit_breaker: {fail_max: 3}",
            "differs from line 2",
        ),
    ] {
        refused(&two(one, other), "3:", said);
    }
    for (one, other) in [
        (", concurrency: 2", ""),
        ("", ", ordered: true"),
        (", concurrency: 2", ", concurrency: 2"),
        (", circuit_breaker: off", ", circuit_breaker: {fail_max: 2}"),
        // Retry and timeout may differ.
        (", retry: {max_attempts: 1}", ", processing_timeout: 3"),
        (
            ", circuit_breaker: {dependency: mail}",
            ", circuit_breaker: {dependency: sms, fail_max: 2}",
        ),
    ] {
        let config = parse(&two(one, other)).unwrap();
        assert_eq!(config.consumers.len(), 2);
    }
    refused(
        "consumers:\n  a: {stream: a.a, circuit_breaker: {dependency: d, fail_max: 2}}\n  b: {stream: a.a, circuit_breaker: {dependency: d, fail_max: 1}}\n",
        "3:",
        "the breaker of one dependency",
    );
    let config = parse(&two("", ", circuit_breaker: {fail_max: 2}")).unwrap();
    let shared = config.consumers[0].circuit_breaker;
    assert_eq!(shared, Breaker::On(BreakerPolicy::new().fail_max(2)));
    refused(
        "consumers:\n  a: {stream: 'o:p-q', group: g}\n  b: {stream: o.p.q, group: g}\n",
        "3:",
        "as the same group as \"a\" on line 2",
    );
}
