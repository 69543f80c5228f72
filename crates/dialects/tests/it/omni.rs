//! The envelope of the *omni* specification.

use everbus_core::{Code, Event, EventId, Timestamp};
use everbus_dialects::{Dialect, encode};

use crate::support::{refused, round, value, with};

const SAMPLE: &str = r#"{
  "type": "message.received",
  "payload": {
    "messageId": "6ac2b1a4-5a57-4d8b-8f0e-0a3d6f2f7e10",
    "externalMessageId": "wamid.1",
    "channel": "whatsapp",
    "instanceId": "inst-1",
    "sender": {"platformUserId": "4915112345678"},
    "externalConversationId": "c-1",
    "content": {"type": "text", "text": "hello"},
    "platformTimestamp": "2026-01-03T15:22:19.000Z"
  },
  "id": "ddf71f63-b036-4ac7-ad0f-77a7fdfca352",
  "timestamp": "2026-01-03T15:22:19.640Z",
  "source": "channel-whatsapp",
  "traceId": "4bf92f3577b34da6a3ce929d0e0e4736"
}"#;

// conformance: omni/dialect-envelope: type, payload, id, timestamp, source, traceId
// conformance: memory/dialect-omni: the envelope is read and written with its names
#[test]
fn the_envelope_of_the_document_is_read_and_written() {
    let event = round(SAMPLE, Dialect::Omni);
    assert_eq!(event.event_type(), "message.received");
    assert_eq!(
        event.id().to_string(),
        "ddf71f63-b036-4ac7-ad0f-77a7fdfca352"
    );
    assert_eq!(
        event.occurred_at(),
        "2026-01-03T15:22:19.640Z".parse().unwrap()
    );
    let attributes = event.attributes().unwrap();
    assert_eq!(attributes.source.as_deref(), Some("channel-whatsapp"));
    let trace = attributes.trace.as_ref().unwrap();
    assert_eq!(trace.trace_id(), Some("4bf92f3577b34da6a3ce929d0e0e4736"));
    assert!(event.metadata().is_empty(), "{:?}", event.metadata());
}

// conformance: omni/dialect-times: timestamps are ISO 8601 as toISOString writes them
#[test]
fn times_are_written_as_to_iso_string_does() {
    for (micros, text) in [
        (0, "2023-11-14T22:13:20.000Z"),
        (640_000, "2023-11-14T22:13:20.640Z"),
    ] {
        let at = Timestamp::from_micros(1_700_000_000_000_000 + micros);
        let event = Event::builder("a.b").occurred_at(at).build().unwrap();
        assert_eq!(
            value(&encode(&event, Dialect::Omni).unwrap())["timestamp"],
            text
        );
    }
}

// conformance: omni/dialect-optional: traceId is optional, source is always there
#[test]
fn an_event_without_trace_has_no_trace_id_and_always_a_source() {
    let event = Event::builder("a.b").app("shop").build().unwrap();
    let document = value(&encode(&event, Dialect::Omni).unwrap());
    assert_eq!(document.get("traceId"), None);
    assert_eq!(document["source"], "shop");
    let event = Event::builder("a.b").build().unwrap();
    assert_eq!(
        value(&encode(&event, Dialect::Omni).unwrap())["source"],
        "everbus"
    );
}

// conformance: omni/dialect-replay-of: replayOf links a replayed event to its original
#[test]
fn replay_of_is_the_metadata_by_which_a_replay_is_known() {
    let original = EventId::new().to_string();
    let document = with(SAMPLE, "replayOf", Some(&format!("\"{original}\"")));
    let event = round(&document, Dialect::Omni);
    assert_eq!(event.metadata()["replay_of"], original);
    let event = Event::builder("a.b")
        .meta("replay_of", &original)
        .build()
        .unwrap();
    let document = value(&encode(&event, Dialect::Omni).unwrap());
    assert_eq!(document["replayOf"], original);
}

// conformance: memory/dialect-unknown-fields: fields that nobody knows are kept
#[test]
fn unknown_fields_are_kept_in_the_metadata() {
    let document = with(SAMPLE, "sequence", Some("42"));
    let document = with(
        &document,
        "x-flags",
        Some(r#"{"a": [1.50, null], "b c": "\u00e9"}"#),
    );
    let event = round(&document, Dialect::Omni);
    assert_eq!(event.metadata()["omni:sequence"], "42");
    assert!(event.metadata().contains_key("omni:x-flags"));
    // They say nothing to other dialects.
    let other = value(&encode(&event, Dialect::Framework).unwrap());
    assert_eq!(other.get("sequence"), None);
}

#[test]
fn mistakes_are_refused_by_the_name_of_their_field() {
    let missing = ["type", "payload", "id", "timestamp", "source"];
    for field in missing {
        let place = format!("field {field:?}");
        let document = with(SAMPLE, field, None);
        refused(&document, Dialect::Omni, Code::InvalidAttribute, &place);
    }
    for (field, json) in [
        ("timestamp", "\"2026-01-03T15:22:19\""),
        ("traceId", "7"),
        ("replayOf", "[]"),
        ("source", "\"a\\u0000b\""),
    ] {
        let place = format!("field {field:?}");
        let document = with(SAMPLE, field, Some(json));
        refused(&document, Dialect::Omni, Code::InvalidAttribute, &place);
    }
    let huge = format!("\"{}\"", "x".repeat(20_000));
    for field in ["source", "unknown"] {
        let document = with(SAMPLE, field, Some(&huge));
        let place = format!("field {field:?}");
        refused(&document, Dialect::Omni, Code::InvalidAttribute, &place);
    }
}
