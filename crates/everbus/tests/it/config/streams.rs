//! Declared streams in the section `streams`, and the names that other sections use for them.

use std::time::Duration;

use everbus::{OnFull, StreamLimit, Streams};

use super::{parse, problems, refused};

const DAY: Duration = Duration::from_secs(24 * 3600);

// conformance: contract/streams-config: streams are declared in the file, or taken from the omni preset
#[test]
fn the_file_declares_streams() {
    let config = parse("broker: {url: 'memory:'}").unwrap();
    assert_eq!(config.streams, Streams::single());
    let config = parse("streams: {preset: omni}").unwrap();
    assert_eq!(config.streams, Streams::omni());
    let config = parse(
        "
streams:
  declare:
    ORDERS:
      types: [order.>, 'cart:*']
      max_age: 30d
      maxlen: 1000
      on_full: drop_oldest
      dialect: cloudevents
      shards: 4
      copies: 3
    'signals:price-update':
    USERS: {types: user.>}
",
    )
    .unwrap();
    let names: Vec<&str> = config.streams.iter().map(|s| &*s.name).collect();
    assert_eq!(names, ["ORDERS", "signals:price-update", "USERS", "SYSTEM"]);
    let orders = config.streams.named("ORDERS").unwrap();
    assert_eq!(orders.types().as_str(), "order.>, cart.*");
    assert_eq!(orders.max_age, Some(30 * DAY));
    let limit = StreamLimit::new(1000).on_full(OnFull::DropOldest);
    assert_eq!(orders.limit, Some(limit));
    assert_eq!(orders.dialect.as_deref(), Some("cloudevents"));
    assert_eq!((orders.shards, orders.copies), (Some(4), Some(3)));
    let routed = config.streams.route("signals.price.update").unwrap();
    assert_eq!(&*routed.name, "signals:price-update");
}

// conformance: contract/streams-config: limits, ages and consumers of the file may name a declared stream
#[test]
fn other_sections_name_declared_streams() {
    let config = parse(
        "
streams:
  preset: omni
  default_maxlen: 100
  overrides: {MESSAGES: {maxlen: 10}}
consumers:
  archive: {stream: MESSAGES}
  typing: {stream: 'message:typing'}
retention:
  streams: {media: never, message.typing: 1h}
",
    )
    .unwrap();
    let streams = config.limits.over(&config.streams).unwrap();
    let limit = |name| streams.named(name).unwrap().limit.map(|l| l.max_len);
    assert_eq!(limit("MESSAGES"), Some(10));
    assert_eq!(limit("AGENT"), Some(100));
    assert_eq!(limit("SYSTEM"), None);
    assert!(config.consumers[0].pattern.matches("message.received"));
    assert_eq!(config.consumers[1].pattern.as_str(), "message.typing");
    let kept = config.retention.unwrap().with_streams(&config.streams);
    assert_eq!(kept.age_of("media.seen"), None);
    assert_eq!(kept.age_of("message.typing"), Some(DAY / 24));
    assert_eq!(kept.age_of("message.sent"), Some(30 * DAY));
}

// conformance: contract/streams-config: what is wrong with declared streams is said with its line and what was meant
#[test]
fn what_is_wrong_with_declared_streams_is_said_with_its_line() {
    refused(
        "streams:\n  declare:\n    A: {types: [a.>]}\n    B: {types: [b.>, a.*.c]}\n",
        "4:5: streams.declare.B: the streams A (a.>) and B (a.*.c) overlap: a.x.c would be in both",
        "exactly one stream",
    );
    let both = problems("streams:\n  declare:\n    A: {type: a.>}\n");
    assert!(
        both[0].starts_with("3:5: streams.declare.A.types is missing"),
        "{both:?}"
    );
    let unknown = "3:9: unknown key \"type\" in streams.declare.A; did you mean \"types\"?";
    assert_eq!((both.len(), both[1].as_str()), (2, unknown));
    refused(
        "streams:\n  declare:\n    A: {types: [a.>]}\n    a: {types: [b.>]}\n",
        "4:5: streams.declare.a: A and a are one name",
        "another name",
    );
    refused(
        "streams: {declare: {A: {types: ['a*']}}}",
        "1:33: streams.declare.A.types[0] is \"a*\", which is not a pattern",
        "whole segments",
    );
    refused(
        "streams: {declare: {A: {types: a.>, on_full: reject}}}",
        "1:37: streams.declare.A.on_full without a maxlen",
        "add maxlen",
    );
    refused(
        "streams: {declare: {A: {types: a.>, dialect: omny}}}",
        "1:46: streams.declare.A.dialect is omny",
        "did you mean \"omni\"?",
    );
    refused(
        "streams: {preset: omny}",
        "1:19: streams.preset is omny",
        "omni",
    );
    refused(
        "streams: {declare: {A: {}}}",
        "1:21: streams.declare.A.types is missing",
        "types:",
    );
    refused(
        "streams: {preset: omni, overrides: {MESAGES: {maxlen: 1}}}",
        "1:37: streams.overrides.MESAGES is no declared stream",
        "did you mean MESSAGES?",
    );
    refused(
        "streams: {preset: omni, overrides: {system: {maxlen: 1}}}",
        "1:37: streams.overrides.system is of the system's own events",
        "never limited",
    );
    let all = problems(
        "streams: {preset: omni}
consumers: {a: {stream: 'orders:order-placed'}}
retention: {streams: {'order.>': 1d}}
",
    );
    assert_eq!(all.len(), 2, "{all:#?}");
    assert!(
        all[0]
            .starts_with("2:25: consumers.a.stream is \"orders:order-placed\", which no declared")
    );
    assert!(all[1].starts_with("3:23: retention.streams.\"order.>\": no declared stream covers"));
    assert!(
        all.iter().all(|line| line.contains("MESSAGES (message.>)")),
        "{all:#?}"
    );
}

// conformance: framework/backpressure-sizing: the book has the figures by kind of stream, and its example sets them
#[test]
fn the_book_says_how_long_streams_should_be() {
    let page = include_str!("../../../../../docs/book/failure.md");
    let (_, section) = page
        .split_once("### How long a stream should be")
        .expect("the section is in the book");
    for row in [
        "| high-frequency: price ticks, telemetry | 10,000 to 50,000 |",
        "| standard: orders, notifications | 100,000 |",
        "| audit, compliance | none |",
    ] {
        assert!(section.contains(row), "{row}");
    }
    let (_, example) = section.split_once("```yaml\n").expect("an example");
    let (example, _) = example.split_once("```").expect("its end");
    let limits = parse(example).unwrap().limits;
    assert_eq!(limits.default, Some(StreamLimit::new(100_000)));
    let dropping = |length| StreamLimit::new(length).on_full(OnFull::DropOldest);
    assert_eq!(limits.by_stream["signals.price.update"], dropping(10_000));
    assert_eq!(
        limits.by_stream["telemetry.window.closed"],
        dropping(50_000)
    );
}
