//! The envelope of the *framework* specification.

use everbus_core::{Code, Event, EventId};
use everbus_dialects::{Dialect, decode, encode};
use serde_json::json;

use crate::support::{refused, round, value, with};

/// The envelope as the document shows it, filled with the values of its test.
const SAMPLE: &str = r#"{
  "event_id": "test-1",
  "event_type": "orders.order.placed",
  "event_version": 1,
  "timestamp": "2026-03-01T12:00:00Z",
  "source": "test",
  "correlation_id": "corr-1",
  "trace_id": "0af7651916cd43dd8448eb211c80319c",
  "payload": {"order_id": "ord-123", "user_id": "user-456"}
}"#;

// conformance: framework/structure-fields: event_id, event_type, event_version, timestamp, source, correlation_id, trace_id, payload
// conformance: memory/dialect-framework: the envelope is read and written with its names
#[test]
fn the_envelope_of_the_document_is_read_and_written() {
    let event = round(SAMPLE, Dialect::Framework);
    assert_eq!(event.event_type(), "orders.order.placed");
    assert_eq!(event.version(), 1);
    assert_eq!(event.occurred_at(), "2026-03-01T12:00:00Z".parse().unwrap());
    assert_eq!(event.correlation_id(), "corr-1");
    assert_eq!(
        &event.payload()[..],
        br#"{"order_id": "ord-123", "user_id": "user-456"}"#
    );
    let attributes = event.attributes().unwrap();
    assert_eq!(attributes.source.as_deref(), Some("test"));
    let trace = attributes.trace.as_ref().unwrap();
    assert_eq!(trace.trace_id(), Some("0af7651916cd43dd8448eb211c80319c"));
    // Nothing about it is special, so nothing had to be kept beside it.
    assert!(event.metadata().is_empty(), "{:?}", event.metadata());
}

#[test]
fn a_native_event_is_written_with_exactly_these_fields() {
    let event = Event::builder("a.b").json(&json!({})).build().unwrap();
    let document = encode(&event, Dialect::Framework).unwrap();
    let names: Vec<String> = value(&document)
        .as_object()
        .unwrap()
        .keys()
        .cloned()
        .collect();
    let mut expected = [
        "event_id",
        "event_type",
        "event_version",
        "timestamp",
        "source",
        "correlation_id",
        "trace_id",
        "payload",
    ];
    expected.sort_unstable();
    assert_eq!(names, expected);
    assert_eq!(value(&document)["correlation_id"], event.id().to_string());
    assert_eq!(value(&document)["trace_id"], json!(null));
}

// conformance: memory/dialect-foreign-ids: an id that is no UUID becomes a UUIDv5 of source and id, and is shown again
#[test]
fn a_foreign_id_becomes_a_uuid_of_source_and_id_and_is_shown_again() {
    let event = decode(SAMPLE.as_bytes(), Dialect::Framework).unwrap();
    assert_eq!(event.id(), EventId::from_foreign("test", "test-1"));
    assert_eq!(event.id().as_uuid().get_version_num(), 5);
    assert_eq!(event.display_id(), "test-1");
    let other = with(SAMPLE, "source", Some("\"other\""));
    assert_ne!(round(&other, Dialect::Framework).id(), event.id());
    for dialect in [Dialect::Omni, Dialect::CloudEvents, Dialect::Framework] {
        let document = value(&encode(&event, dialect).unwrap());
        let id = document.get("id").or(document.get("event_id")).unwrap();
        assert_eq!(id, "test-1", "{dialect}");
    }
}

#[test]
fn the_case_of_a_uuid_comes_back() {
    let upper = with(
        SAMPLE,
        "event_id",
        Some("\"3F2504E0-4F89-41D3-9A0C-0305E82C3301\""),
    );
    let event = round(&upper, Dialect::Framework);
    assert_eq!(
        event.id().to_string(),
        "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
    );
}

// conformance: framework/structure-version: event_version is 1 by default
// conformance: memory/dialect-defaults: defaults apply when reading and are not written into a document that had none
#[test]
fn without_a_version_it_is_1_and_the_document_stays_without() {
    let document = with(SAMPLE, "event_version", None);
    assert_eq!(round(&document, Dialect::Framework).version(), 1);
    let document = with(SAMPLE, "event_version", Some("7"));
    assert_eq!(round(&document, Dialect::Framework).version(), 7);
}

// conformance: framework/structure-timestamp: a time without an offset is UTC
#[test]
fn times_without_an_offset_are_utc_as_python_writes_them() {
    let at = "2026-03-01T12:00:00.123456";
    let document = with(SAMPLE, "timestamp", Some(&format!("\"{at}\"")));
    let event = round(&document, Dialect::Framework);
    assert_eq!(event.occurred_at(), format!("{at}Z").parse().unwrap());
}

// conformance: framework/structure-trace: trace_id links the event to its trace; null if tracing is disabled
#[test]
fn a_trace_id_that_is_none_of_opentelemetry_is_kept_as_metadata() {
    for (json, kept) in [("null", None), ("\"\"", None), ("\"req/7\"", Some("req/7"))] {
        let event = round(&with(SAMPLE, "trace_id", Some(json)), Dialect::Framework);
        assert!(event.attributes().unwrap().trace.is_none());
        assert_eq!(event.metadata().get("trace_id").map(String::as_str), kept);
    }
    round(&with(SAMPLE, "trace_id", None), Dialect::Framework);
    let upper = "\"0AF7651916CD43DD8448EB211C80319C\"";
    let event = round(&with(SAMPLE, "trace_id", Some(upper)), Dialect::Framework);
    assert!(event.attributes().unwrap().trace.is_some());
}

// conformance: memory/dialect-bad-input: every mistake is an error with a code that names the field
#[test]
fn mistakes_are_refused_by_the_name_of_their_field() {
    let cases = [
        ("event_id", None, Code::InvalidAttribute),
        ("event_id", Some("\"\""), Code::InvalidAttribute),
        ("event_id", Some("7"), Code::InvalidAttribute),
        ("event_id", Some("\"a\\nb\""), Code::InvalidAttribute),
        ("event_type", None, Code::InvalidAttribute),
        ("event_version", Some("0"), Code::InvalidAttribute),
        ("event_version", Some("1.5"), Code::InvalidAttribute),
        ("event_version", Some("\"1\""), Code::InvalidAttribute),
        ("event_version", Some("4294967296"), Code::InvalidAttribute),
        ("timestamp", None, Code::InvalidAttribute),
        ("timestamp", Some("\"yesterday\""), Code::InvalidAttribute),
        ("timestamp", Some("1767453739640"), Code::InvalidAttribute),
        ("source", None, Code::InvalidAttribute),
        ("source", Some("null"), Code::InvalidAttribute),
        ("correlation_id", None, Code::InvalidAttribute),
        ("trace_id", Some("{}"), Code::InvalidAttribute),
        ("payload", None, Code::InvalidAttribute),
        ("payload", Some("[1]"), Code::InvalidPayloadError),
        ("payload", Some("null"), Code::InvalidPayloadError),
    ];
    for (field, json, code) in cases {
        let place = format!("field {field:?}");
        refused(&with(SAMPLE, field, json), Dialect::Framework, code, &place);
    }
    let bad_type = with(SAMPLE, "event_type", Some("\"orders.*\""));
    refused(&bad_type, Dialect::Framework, Code::InvalidType, "orders.*");
    for broken in ["", "[]", "{", "7", "{\"a\":1}x", "\u{feff}{}"] {
        let code = Code::InvalidPayloadError;
        refused(broken, Dialect::Framework, code, "line 1 column");
    }
    let e = decode(b"{\"event_id\":\"\xff\"}", Dialect::Framework).unwrap_err();
    assert_eq!(e.code(), Code::InvalidPayloadError);
}
