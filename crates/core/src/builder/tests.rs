//! Events as they are built, and what is refused.

use super::*;
use serde_json::json;

fn code(builder: EventBuilder) -> Code {
    builder.build().unwrap_err().code()
}

// conformance: memory/ttl: an event may say for how long after it happened it is wanted
#[test]
fn a_time_to_live_counts_from_when_it_happened() {
    let at: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let day = Duration::from_secs(24 * 3600);
    let event = Event::builder("a").ttl(day).occurred_at(at);
    let expires = event.build().unwrap().attributes().unwrap().expires_at;
    assert_eq!(expires, Some(at.plus(day)));
    for wrong in [Duration::ZERO, Duration::MAX] {
        assert_eq!(code(Event::builder("a").ttl(wrong)), Code::InvalidAttribute);
    }
}

// conformance: bus/odd-types: spaces and undotted names are legal
#[test]
fn odd_but_legal_types_are_taken() {
    for name in [
        "a",
        "Task Processing Started",
        "TelemetryWindowClosed",
        "größe.geändert",
        "a..b",
    ] {
        assert_eq!(Event::builder(name).build().unwrap().event_type(), name);
    }
    assert!(Event::builder("ä".repeat(255)).build().is_ok());
}

// conformance: bus/builder-validates: illegal types are refused with a hint
#[test]
fn illegal_types_are_refused_with_a_hint() {
    for name in [
        "",
        "a.*",
        "a>",
        "a\nb",
        "a\u{0}",
        "a\u{202e}b",
        &"x".repeat(256),
        &"ä".repeat(256),
    ] {
        let e = Event::builder(name).build().unwrap_err();
        assert_eq!(e.code(), Code::InvalidType, "{name:?}");
        assert!(e.hint_text().is_some());
    }
}

// conformance: embedded/payload-json: the payload is kept as the bytes given and must be JSON
// conformance: outbox/1-payload: the payload is kept as the bytes given and must be JSON
// conformance: framework/structure-payload: the payload is kept as the bytes given and must be JSON
#[test]
fn payload_bytes_are_kept_and_must_be_json_unless_said_otherwise() {
    let spaced = Event::builder("t")
        .payload(&b"{ \"b\" : 1.0e2,\"a\":2 }"[..])
        .build()
        .unwrap();
    assert_eq!(&spaced.payload()[..], b"{ \"b\" : 1.0e2,\"a\":2 }");
    for bad in ["", "{", "nope", "{\"a\":1}x", "NaN"] {
        assert_eq!(
            code(Event::builder("t").payload(bad)),
            Code::InvalidPayloadError,
            "{bad}"
        );
    }
    let binary = Event::builder("t")
        .payload(vec![0xff, 0])
        .content_type("application/octet-stream");
    assert!(!binary.build().unwrap().is_json());
    let vendor = Event::builder("t")
        .payload("{")
        .content_type("application/cloudevents+json");
    assert_eq!(code(vendor), Code::InvalidPayloadError);
}

// conformance: embedded/invalid-payload: what is not JSON-serialisable is refused
#[test]
fn a_value_that_cannot_be_json_is_an_invalid_payload() {
    let map = std::collections::HashMap::from([(vec![1u8], 1)]);
    assert_eq!(
        code(Event::builder("t").json(&map)),
        Code::InvalidPayloadError
    );
    let e = ("t", map).into_event().unwrap_err();
    assert!(e.to_string().contains("InvalidPayloadError"));
}

#[test]
fn the_key_defaults_to_the_entity_and_the_correlation_to_the_id() {
    let e = Event::builder("t")
        .entity("TASK", "req-123")
        .build()
        .unwrap();
    assert_eq!(e.ordering_key().unwrap(), "TASK#req-123");
    assert_eq!(e.correlation_id(), e.id().to_string());
    let e = Event::builder("t")
        .entity("TASK", "1")
        .key("k")
        .correlation_id("c")
        .build()
        .unwrap();
    assert_eq!(
        (e.ordering_key().unwrap(), e.correlation_id()),
        ("k".into(), "c".into())
    );
}

#[test]
fn foreign_ids_are_kept_beside_the_uuid() {
    let e = Event::builder("t")
        .source("shop")
        .foreign_id("test-1")
        .build()
        .unwrap();
    assert_eq!(e.display_id(), "test-1");
    assert_eq!(e.id(), EventId::from_foreign("shop", "test-1"));
    let uuid = EventId::new();
    let e = Event::builder("t")
        .foreign_id(uuid.to_string())
        .build()
        .unwrap();
    assert_eq!((e.id(), e.attributes()), (uuid, None));
}

#[test]
fn the_same_body_ignores_what_a_second_try_gives_anew() {
    let id = EventId::new();
    let make = || {
        Event::builder("t")
            .id(id)
            .json(&json!({"a": 1}))
            .meta("k", "v")
    };
    let first = make().build().unwrap();
    let again = make()
        .correlation_id("other")
        .occurred_at(Timestamp::EPOCH)
        .build()
        .unwrap();
    assert!(first.same_body(&again));
    for other in [
        make().json(&json!({"a": 2})),
        make().version(2),
        make().meta("k", "w"),
        make().tenant("x"),
        make().key("x"),
        make().content_type("text/plain"),
    ] {
        assert!(!first.same_body(&other.build().unwrap()));
    }
}

#[test]
fn attributes_are_bounded_and_not_empty() {
    assert_eq!(code(Event::builder("t").tenant("")), Code::InvalidAttribute);
    assert_eq!(
        code(Event::builder("t").meta("k", "x".repeat(MAX_ATTRIBUTE_BYTES + 1))),
        Code::InvalidAttribute
    );
    let mut many = Event::builder("t");
    for i in 0..20 {
        many = many.meta(format!("{i}"), "x".repeat(MAX_ATTRIBUTE_BYTES));
    }
    assert_eq!(code(many), Code::InvalidAttribute);
    assert_eq!(code(Event::builder("t").version(0)), Code::InvalidAttribute);
}
