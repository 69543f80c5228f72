//! The envelope of the *outbox* specification.

use everbus_core::{Code, Event};
use everbus_dialects::{Beside, Dialect, decode, decode_beside, encode};

use crate::support::{refused, round, round_beside, value, with};

const WINDOW_CLOSED: &str = r#"{
  "event_id": "9b2f4b3e-6f0a-4c58-9d5e-1f6f0c7a1b11",
  "occurred_at": "2026-02-01T00:15:00Z",
  "correlation_id": "req-77",
  "tenant_id": "tenant-a",
  "station_id": "station-1",
  "schema_version": 1,
  "payload": {"window_start": "2026-02-01T00:00:00Z", "window_end": "2026-02-01T00:15:00Z", "samples": 900}
}"#;

const STATISTIC: &str = r#"{
  "event_id": "9b2f4b3e-6f0a-4c58-9d5e-1f6f0c7a1b12",
  "occurred_at": "2026-02-01T00:15:01.25Z",
  "correlation_id": "9b2f4b3e-6f0a-4c58-9d5e-1f6f0c7a1b12",
  "tenant_id": "tenant-a",
  "station_id": "station-1",
  "schema_version": 1,
  "payload": {"statistic": "mean_power", "value": 12.50, "unit": "kW"}
}"#;

const SETTLEMENT: &str = r#"{
  "event_id": "9b2f4b3e-6f0a-4c58-9d5e-1f6f0c7a1b13",
  "occurred_at": "2026-02-01T01:00:00Z",
  "correlation_id": "req-78",
  "tenant_id": "tenant-a",
  "station_id": "station-1",
  "schema_version": 2,
  "payload": {"period": "2026-01", "amount": "1043.20", "currency": "EUR", "lines": [{"kwh": 1e3}]}
}"#;

fn row(event_type: &str) -> Beside<'_> {
    Beside {
        event_type: Some(event_type),
        ..Beside::default()
    }
}

// conformance: outbox/1-payloads: TelemetryWindowClosed, StatisticCalculated, SettlementCalculated
// conformance: outbox/1-envelope: event_id, occurred_at, correlation_id, tenant_id, station_id, schema_version, payload
// conformance: outbox/1-document: the envelope as a document with these names
// conformance: memory/dialect-outbox: golden documents for the three payloads
#[test]
fn the_three_payloads_are_read_and_written() {
    for (event_type, document, version) in [
        ("TelemetryWindowClosed", WINDOW_CLOSED, 1),
        ("StatisticCalculated", STATISTIC, 1),
        ("SettlementCalculated", SETTLEMENT, 2),
    ] {
        let event = round_beside(document, Dialect::Outbox, &row(event_type));
        let original = value(document.as_bytes());
        assert_eq!(event.event_type(), event_type);
        assert_eq!(event.version(), version);
        assert_eq!(event.tenant(), Some("tenant-a"));
        assert_eq!(event.metadata()["station_id"], "station-1");
        assert_eq!(event.metadata().len(), 1, "{:?}", event.metadata());
        assert_eq!(
            event.correlation_id(),
            original["correlation_id"].as_str().unwrap()
        );
        let text = std::str::from_utf8(event.payload()).unwrap();
        assert!(
            document.contains(text),
            "the payload is kept as it was written: {text}"
        );
    }
}

// conformance: outbox/1-occurred-at: occurred_at is RFC 3339 in UTC
#[test]
fn times_come_back_as_they_were_spelled_and_are_written_in_utc() {
    for at in [
        "2026-02-01T00:15:00.123456789Z",
        "2026-02-01T01:15:00+01:00",
        "2026-02-01t00:15:00z",
        "2026-02-01T00:15:00.000Z",
    ] {
        let json = format!("\"{at}\"");
        let document = with(WINDOW_CLOSED, "occurred_at", Some(&json));
        round_beside(&document, Dialect::Outbox, &row("T"));
    }
    let at = "2026-02-01T01:15:00.5+01:00".parse().unwrap();
    let event = Event::builder("T").occurred_at(at).build().unwrap();
    let document = value(&encode(&event, Dialect::Outbox).unwrap());
    assert_eq!(document["occurred_at"], "2026-02-01T00:15:00.5Z");
}

// conformance: outbox/1-correlation: correlation_id defaults to event_id if not provided
#[test]
fn the_correlation_defaults_to_the_event_id_and_the_document_stays_as_it_was() {
    for json in [None, Some("null"), Some("\"\"")] {
        let document = with(WINDOW_CLOSED, "event_id", Some("\"e-1\""));
        let document = with(&document, "correlation_id", json);
        let event = round_beside(&document, Dialect::Outbox, &row("T"));
        assert_eq!(event.correlation_id(), "e-1", "{json:?}");
    }
    let event = Event::builder("T").build().unwrap();
    let document = value(&encode(&event, Dialect::Outbox).unwrap());
    assert_eq!(document["correlation_id"], document["event_id"]);
}

// conformance: outbox/1-schema-version: schema_version is a number, 1 by default
#[test]
fn the_schema_version_defaults_to_1_and_the_document_stays_without() {
    let document = with(WINDOW_CLOSED, "schema_version", None);
    let event = round_beside(&document, Dialect::Outbox, &row("T"));
    assert_eq!(event.version(), 1);
    let native = Event::builder("T").version(3).build().unwrap();
    let document = value(&encode(&native, Dialect::Outbox).unwrap());
    assert_eq!(document["schema_version"], 3);
}

// conformance: outbox/1-tenant: tenant_id belongs to the envelope
#[test]
fn tenant_and_station_may_be_empty_or_missing_and_are_always_written() {
    for field in ["tenant_id", "station_id"] {
        for json in [None, Some("\"\""), Some("null")] {
            let document = with(WINDOW_CLOSED, field, json);
            let event = round_beside(&document, Dialect::Outbox, &row("T"));
            assert_eq!(event.tenant().is_none(), field == "tenant_id");
        }
    }
    let event = Event::builder("T").build().unwrap();
    let document = value(&encode(&event, Dialect::Outbox).unwrap());
    assert_eq!(
        (&document["tenant_id"], &document["station_id"]),
        (&"".into(), &"".into())
    );
    assert_eq!(document.as_object().unwrap().len(), 7);
}

#[test]
fn the_type_stands_beside_the_envelope_or_in_a_field_of_its_own() {
    let e = decode(WINDOW_CLOSED.as_bytes(), Dialect::Outbox).unwrap_err();
    assert_eq!(e.code(), Code::InvalidType);
    assert!(e.hint_text().unwrap().contains("decode_beside"));

    let document = with(
        WINDOW_CLOSED,
        "event_type",
        Some("\"TelemetryWindowClosed\""),
    );
    let event = round(&document, Dialect::Outbox);
    assert_eq!(event.event_type(), "TelemetryWindowClosed");
    round_beside(&document, Dialect::Outbox, &row("TelemetryWindowClosed"));
    let e = decode_beside(document.as_bytes(), Dialect::Outbox, &row("Other")).unwrap_err();
    assert_eq!(e.code(), Code::InvalidType);
    assert!(
        e.message().contains("\"event_type\"") && e.message().contains("\"Other\""),
        "{e}"
    );
}

#[test]
fn the_source_beside_the_envelope_belongs_to_the_identity_of_a_foreign_id() {
    let document = with(WINDOW_CLOSED, "event_id", Some("\"e-1\""));
    let from = |source| {
        let beside = Beside { source, ..row("T") };
        round_beside(&document, Dialect::Outbox, &beside)
    };
    assert_ne!(from(Some("a")).id(), from(Some("b")).id());
    assert_eq!(
        from(Some("a")).attributes().unwrap().source.as_deref(),
        Some("a")
    );
    assert_eq!(from(None).display_id(), "e-1");
}

#[test]
fn mistakes_are_refused_by_the_name_of_their_field() {
    let typed = with(WINDOW_CLOSED, "event_type", Some("\"T\""));
    for (field, json) in [
        ("event_id", None),
        ("occurred_at", None),
        ("occurred_at", Some("\"2026-02-01T00:15:00\"")),
        ("occurred_at", Some("\"-000044-03-15T00:00:00Z\"")),
        ("schema_version", Some("0")),
        ("schema_version", Some("-1")),
        ("schema_version", Some("true")),
        ("tenant_id", Some("7")),
        ("tenant_id", Some("\"a\\u001bb\"")),
        ("station_id", Some("{}")),
        ("payload", None),
    ] {
        let place = format!("field {field:?}");
        let document = with(&typed, field, json);
        refused(&document, Dialect::Outbox, Code::InvalidAttribute, &place);
    }
}
