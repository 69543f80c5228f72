//! Spellings that are kept with an event, and when they no longer count.

use everbus_core::{Code, Event, EventBuilder, EventId};
use everbus_dialects::{Beside, Dialect, decode, decode_beside, dropped, encode};
use serde_json::json;

use crate::support::value;

const DOCUMENT: &str = r#"{"event_id":"e-1","event_type":"a.b","timestamp":"2026-03-01T13:00:00+01:00",
    "source":"s","correlation_id":"c","payload":{},"extra":[1]}"#;

/// A copy as a replay makes one: another id, sometimes another time, the same metadata.
fn copy(event: &Event) -> EventBuilder {
    let mut copy = Event::builder(event.event_type())
        .id(EventId::new())
        .source("s")
        .correlation_id("c")
        .occurred_at(event.occurred_at())
        .payload(event.payload().clone());
    for (key, text) in event.metadata() {
        copy = copy.meta(key, text);
    }
    copy
}

// conformance: memory/dialect-stale-spelling: a spelling that no longer means what the event says is not used
#[test]
fn a_copy_with_another_time_is_not_written_with_the_old_one() {
    let event = decode(DOCUMENT.as_bytes(), Dialect::Framework).unwrap();
    assert!(event.metadata().contains_key("framework:timestamp"));

    let same_time = copy(&event).build().unwrap();
    let document = value(&encode(&same_time, Dialect::Framework).unwrap());
    assert_eq!(document["timestamp"], "2026-03-01T13:00:00+01:00");
    assert_eq!(document.get("event_version"), None);

    let at = "2027-01-01T00:00:00Z".parse().unwrap();
    let later = copy(&event).occurred_at(at).version(2).build().unwrap();
    let document = value(&encode(&later, Dialect::Framework).unwrap());
    assert_eq!(document["timestamp"], "2027-01-01T00:00:00Z");
    assert_eq!(document["event_version"], 2);
    assert_eq!(document["event_id"], later.id().to_string());
    // What still fits is still there.
    assert_eq!(document["extra"], json!([1]));
    assert_eq!(document.get("trace_id"), None);
    let left = dropped(&later, Dialect::Framework).unwrap();
    assert_eq!(
        left,
        [
            "metadata.framework:event_version",
            "metadata.framework:timestamp"
        ]
    );
}

#[test]
fn metadata_under_a_reserved_name_adds_a_field_but_changes_none() {
    let event = Event::builder("a.b")
        .tenant("acme")
        .meta("outbox:region", "\"eu\"")
        .meta("outbox:tenant_id", "\"evil\"")
        .meta("outbox:payload", "{}")
        .meta("outbox:event_id", "\"evil\"")
        .json(&json!({"a": 1}))
        .build()
        .unwrap();
    let document = value(&encode(&event, Dialect::Outbox).unwrap());
    assert_eq!(document["region"], "eu");
    assert_eq!(document["tenant_id"], "acme");
    assert_eq!(document["event_id"], event.id().to_string());
    assert_eq!(document["payload"], json!({"a": 1}));
}

#[test]
fn reserved_metadata_that_is_not_json_is_refused() {
    for broken in ["eu", "{", "1,\"tenant\":2", "\"a\" \"b\""] {
        let event = Event::builder("a.b")
            .meta("omni:region", broken)
            .json(&json!({}))
            .build()
            .unwrap();
        let e = encode(&event, Dialect::Omni).unwrap_err();
        assert_eq!(e.code(), Code::InvalidAttribute, "{broken}");
        assert!(e.message().contains("omni:region") && e.hint_text().is_some());
        // It means nothing to other dialects.
        assert!(encode(&event, Dialect::Framework).is_ok());
    }
}

#[test]
fn a_mark_for_a_payload_that_changed_is_not_used() {
    let without = br#"{"specversion":"1.0","id":"1","source":"s","type":"t"}"#;
    let event = decode(without, Dialect::CloudEvents).unwrap();
    let edited = copy(&event).payload("{\"a\":1}").build().unwrap();
    let document = value(&encode(&edited, Dialect::CloudEvents).unwrap());
    assert_eq!(document["data"], json!({"a": 1}));
}

#[test]
fn a_mark_set_by_hand_cannot_make_a_payload_mean_something_else() {
    for mark in ["json", "text", "bytes", "", "other"] {
        for dialect in Dialect::ALL {
            let event = |kind: &str, payload: &'static str| {
                let field = match dialect {
                    Dialect::CloudEvents => "data",
                    Dialect::Workflow => "properties",
                    _ => "payload",
                };
                Event::builder("t")
                    .tenant("a")
                    .payload(payload)
                    .meta(format!("{dialect}:{field}"), mark)
                    .content_type(kind)
                    .build()
                    .unwrap()
            };
            let beside = Beside {
                event_type: Some("t"),
                ..Beside::default()
            };
            let json = event("application/json", "{\"a\":1}");
            let document = encode(&json, *dialect).unwrap();
            let back = decode_beside(&document, *dialect, &beside).unwrap();
            assert_eq!(back.payload(), json.payload(), "{dialect} {mark:?}");
            let text = event("text/plain", "7");
            if let Ok(document) = encode(&text, *dialect) {
                let back = decode_beside(&document, *dialect, &beside).unwrap();
                assert_eq!(back.payload(), text.payload(), "{dialect} {mark:?}");
            }
        }
    }
}
