//! Documents on their way into and out of a log.

use everbus_core::{Code, Event, IntoEvent, Position, Recorded};
use everbus_dialects::{Dialect, encode, encode_stored};
use serde_json::Value;

fn record(event: Event) -> Recorded {
    let at = "2026-03-01T12:00:00.123456Z".parse().unwrap();
    Recorded::new(event, Position::seq(7), at)
}

fn event() -> Event {
    let event = Event::builder("Task Started").tenant("acme").payload("{}");
    event.build().unwrap()
}

// conformance: contract/dialect-stored: an event of a log is written with what the log added: receivedAt of workflow, seq and received_at of native
#[test]
fn what_the_log_added_is_written_where_there_is_a_place_for_it() {
    let shown = |record: &Recorded, dialect| -> Value {
        serde_json::from_slice(&encode_stored(record, dialect).unwrap()).unwrap()
    };
    let stored = record(event());
    let workflow = shown(&stored, Dialect::Workflow);
    assert_eq!(workflow["receivedAt"], 1_772_366_400_123_i64);
    let native = shown(&stored, Dialect::Native);
    assert_eq!(native["seq"], 7);
    assert_eq!(native["received_at"], "2026-03-01T12:00:00.123456Z");
    for dialect in [
        Dialect::Omni,
        Dialect::CloudEvents,
        Dialect::Outbox,
        Dialect::Framework,
    ] {
        let plain = encode(&stored.event, dialect).unwrap();
        assert_eq!(encode_stored(&stored, dialect).unwrap(), plain, "{dialect}");
    }
    // A document that was stored before is received again: the later time counts.
    for dialect in [Dialect::Workflow, Dialect::Native] {
        let document = encode_stored(&stored, dialect).unwrap();
        let again = dialect.document(&document).into_event().unwrap();
        let at = "2027-01-01T00:00:00Z".parse().unwrap();
        let shown = shown(&Recorded::new(again, Position::seq(8), at), dialect);
        match dialect {
            Dialect::Workflow => assert_eq!(shown["receivedAt"], 1_798_761_600_000_i64),
            _ => assert_eq!(shown["seq"], 8),
        }
    }
}

// conformance: contract/dialect-bus: a document is published as it is, with what stands beside it
#[test]
fn a_document_is_an_event_to_publish() {
    let envelope = br#"{"event_id":"e-1","occurred_at":"2026-03-01T12:00:00Z","payload":{}}"#;
    let document = Dialect::Outbox.document(envelope);
    let error = document.into_event().unwrap_err();
    assert_eq!(error.code(), Code::InvalidType);
    let typed = document.of_type("TelemetryWindowClosed");
    let event = typed.into_event().unwrap();
    assert_eq!(event.event_type(), "TelemetryWindowClosed");
    let other = typed.from_source("station-7").into_event().unwrap();
    assert_ne!(event.id(), other.id(), "the source is part of the identity");
    assert_eq!(other.display_id(), "e-1");
}
