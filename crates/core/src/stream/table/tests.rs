use proptest::prelude::*;

use super::*;
use crate::StreamLimit;

fn stream(name: &str, patterns: &[&str]) -> Stream {
    Stream::new(name, patterns).unwrap()
}

fn refused(streams: impl IntoIterator<Item = Stream>) -> Error {
    let error = Streams::new(streams).unwrap_err();
    assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    assert!(error.hint_text().is_some(), "{error}");
    error
}

// conformance: contract/streams-single: without a declaration one stream has every type, the system's own included
#[test]
fn without_a_declaration_one_stream_has_everything() {
    let streams = Streams::default();
    assert!(!streams.is_declared());
    for event_type in [
        "order.placed",
        "system.dead_letter",
        "Task Processing Started",
    ] {
        let stream = streams.route(event_type).unwrap();
        assert_eq!(&*stream.name, DEFAULT_STREAM);
        assert!(stream.covers(event_type), "{event_type}");
        assert!(streams.reaches(&Pattern::new(event_type).unwrap()).is_ok());
    }
}

// conformance: contract/streams-omni: the omni preset has the six streams of the table with their ages, and SYSTEM
// conformance: omni/stream-ages: the omni preset has the six streams of the table with their ages, and SYSTEM
// conformance: omni/streams-system: the omni preset has the six streams of the table with their ages, and SYSTEM
#[test]
fn the_omni_table_is_the_one_of_the_specification() {
    let streams = Streams::omni();
    for (event_type, name, days) in [
        ("message.received", "MESSAGES", 30),
        ("identity.linked.again", "IDENTITY", 90),
        ("media.processed", "MEDIA", 7),
        ("agent.started", "AGENT", 7),
        ("access.denied", "ACCESS", 30),
        ("channel.connected", "CHANNEL", 7),
        ("system.dead_letter", "SYSTEM", 30),
    ] {
        let stream = streams.route(event_type).unwrap();
        assert_eq!((&*stream.name, stream.max_age), (name, Some(days * DAY)));
    }
    assert_eq!(streams.iter().count(), 7);
    // The same table could have been declared.
    assert_eq!(Streams::new(streams.iter().cloned()).unwrap(), streams);
}

// conformance: contract/streams-uncovered: a type that no stream covers is refused with the streams and the nearest one
// conformance: omni/streams-system: a type that no stream covers is refused with the streams and the nearest one
#[test]
fn what_no_stream_covers_is_refused_with_the_nearest_stream() {
    let streams = Streams::omni();
    let error = streams.route("mesage.received").unwrap_err();
    assert_eq!(error.code(), Code::NoStream);
    assert!(error.message().contains("mesage.received"), "{error}");
    let hint = error.hint_text().unwrap();
    assert!(
        hint.starts_with("the nearest is MESSAGES (message.>)"),
        "{hint}"
    );
    assert!(hint.contains("CHANNEL (channel.>)"), "{hint}");
    let error = streams.route("order.placed").unwrap_err();
    assert!(error.hint_text().unwrap().starts_with("declare a stream"));
    for (pattern, served) in [
        ("message.*", true),
        ("*.received", true),
        ("*", true),
        ("message", false),
        ("order.>", false),
    ] {
        let reached = streams.reaches(&Pattern::new(pattern).unwrap());
        assert_eq!(reached.is_ok(), served, "{pattern}");
    }
}

// conformance: contract/streams-overlap: two streams that share a type are refused with both patterns and such a type
#[test]
fn streams_that_share_a_type_are_refused() {
    let error = refused([
        stream("ORDERS", &["cart.*", "order.>"]),
        stream("SHIPPED", &["*.*.shipped"]),
    ]);
    let message = error.message();
    for part in [
        "ORDERS (order.>)",
        "SHIPPED (*.*.shipped)",
        "order.x.shipped",
    ] {
        assert!(message.contains(part), "{message}");
    }
    // Patterns of one stream may overlap, and separate literal types are fine.
    let fine = [
        stream("ORDERS", &["order.>", "order.placed"]),
        stream("REST", &["cart.filled", "user.*"]),
    ];
    assert!(Streams::new(fine).is_ok());
}

#[test]
fn the_systems_own_events_are_in_one_stream_without_a_limit() {
    let orders = || stream("ORDERS", &["order.>"]);
    let streams = Streams::new([orders()]).unwrap();
    assert_eq!(
        &*streams.route("system.dead_letter").unwrap().name,
        SYSTEM_STREAM
    );
    let own = Streams::new([orders(), stream("OPS", &["system.>", "ops.>"])]).unwrap();
    assert_eq!(&*own.route("system.dead_letter").unwrap().name, "OPS");
    // A stream for some of them would leave the others without a stream.
    refused([stream("ALERTS", &["system.circuit_opened"])]);
    let limited = stream("OPS", &["system.>", "ops.>"]).limit(StreamLimit::new(10));
    refused([limited]);
}

#[test]
fn names_and_settings_that_make_no_sense_are_refused() {
    for name in ["", "a b", "orders.>", "a\n"] {
        assert!(Stream::new(name, ["a.b"]).is_err(), "{name:?}");
    }
    assert!(Stream::new("A", Vec::<String>::new()).is_err());
    assert!(Stream::new("A", ["a.**.b"]).is_err());
    refused([]);
    refused([
        stream("orders:order-placed", &["a.b"]),
        stream("orders.order.placed", &["c.d"]),
    ]);
    refused([stream("A", &["a.b"]), stream("a", &["c.d"])]);
    refused([stream("A", &["a.b"]).max_age(Duration::ZERO)]);
    refused([stream("A", &["a.b"]).limit(StreamLimit::new(0))]);
    refused([stream("A", &["a.b"]).shards(0)]);
    refused([stream("A", &["a.b"]).copies(u32::MAX)]);
}

// conformance: contract/streams-names: orders:order-placed and orders.order.placed name the same stream
#[test]
fn a_channel_and_a_dotted_type_name_the_same_stream() {
    let streams = Streams::new([
        stream("orders:order-placed", &["orders:order-placed"]),
        stream("PRICES", &["prices.>"]),
    ])
    .unwrap();
    for name in ["orders:order-placed", "orders.order.placed"] {
        assert_eq!(&*streams.route(name).unwrap().name, "orders:order-placed");
        assert!(streams.named(name).is_some() && streams.select(name).is_ok());
        assert!(streams.reaches(&Pattern::new(name).unwrap()).is_ok());
    }
    assert_eq!(&*streams.route("prices:tick-seen").unwrap().name, "PRICES");
    assert!(streams.named("prices").is_some());
}

#[test]
fn a_name_selects_a_declared_stream_and_nothing_else() {
    let streams = Streams::omni();
    for name in ["MESSAGES", "messages"] {
        let types = streams.select(name).unwrap();
        assert!(types.matches("message.received") && !types.matches("messages.received"));
    }
    let error = streams.select("MESAGES").unwrap_err();
    assert_eq!(error.code(), Code::NoStream);
    assert!(
        error
            .hint_text()
            .unwrap()
            .starts_with("did you mean MESSAGES?")
    );
    let error = streams.select("message.received").unwrap_err();
    assert!(
        error
            .hint_text()
            .unwrap()
            .contains("a type of the stream MESSAGES")
    );
}

// conformance: contract/streams-select: without declared streams MESSAGES means what the omni table routes there
#[test]
fn without_a_declaration_a_name_is_a_type_a_domain_or_one_of_the_omni_table() {
    let streams = Streams::single();
    let has = |name: &str, event_type: &str| streams.select(name).unwrap().matches(event_type);
    for name in [
        "orders:order-placed",
        "orders.order.placed",
        "orders.order-placed",
    ] {
        assert!(has(name, "orders.order.placed"), "{name}");
        assert!(has(name, "orders.order-placed"), "{name}");
        assert!(!has(name, "orders.order.shipped"), "{name}");
        assert!(!has(name, "orders.order.placed.again"), "{name}");
    }
    for name in ["message", "MESSAGE", "MESSAGES"] {
        assert!(has(name, "message.received"), "{name}");
    }
    assert!(!has("MESSAGE", "messages.received") && has("MESSAGES", "messages.received"));
    assert!(has("TelemetryWindowClosed", "TelemetryWindowClosed"));
    assert!(has("message.>", "message.a.b") && !has("message.*", "message.a.b"));
    assert!(has("events", "order.placed") && has("events", "system.dead_letter"));
    for bad in ["", "a\nb", "a.**.b"] {
        let error = streams.select(bad).unwrap_err();
        assert_eq!(error.code(), Code::InvalidPattern, "{bad:?}");
    }
}

fn some_pattern() -> impl Strategy<Value = String> {
    let segment = prop::sample::select(vec!["a", "b", "c", "*"]);
    let tail = prop::option::of(Just(">"));
    (prop::collection::vec(segment, 1..4), tail).prop_map(|(mut segments, tail)| {
        segments.extend(tail);
        segments.join(".")
    })
}

proptest! {
    // conformance: contract/streams-routing: each type is in exactly one declared stream or in none
    #[test]
    fn a_type_is_in_exactly_one_stream_or_in_none(
        patterns in prop::collection::vec(prop::collection::vec(some_pattern(), 1..3), 1..5),
        types in prop::collection::vec(
            prop::collection::vec(prop::sample::select(vec!["a", "b", "c", "system"]), 1..5),
            1..20,
        ),
        colon in any::<bool>(),
    ) {
        let streams = patterns.iter().enumerate().map(|(n, patterns)| {
            Stream::new(format!("S{n}"), patterns).unwrap()
        });
        let Ok(streams) = Streams::new(streams) else {
            return Ok(());
        };
        for segments in types {
            let mut event_type = segments.join(".");
            if colon {
                event_type = event_type.replacen('.', ":", 1);
            }
            let covering: Vec<_> = streams.iter().filter(|s| s.covers(&event_type)).collect();
            prop_assert!(covering.len() <= 1, "{} is in {:?}", event_type, covering);
            let routed = streams.route(&event_type).ok();
            prop_assert_eq!(routed, covering.first().copied());
            let pattern = Pattern::new(&event_type).unwrap();
            prop_assert_eq!(streams.reaches(&pattern).is_ok(), routed.is_some());
        }
    }
}
