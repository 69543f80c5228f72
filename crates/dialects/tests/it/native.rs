//! The JSON of Everbus itself.

use everbus_core::{Code, Event, Position, Recorded, Timestamp};
use everbus_dialects::{Dialect, decode, encode};
use serde_json::json;

use crate::support::{refused, round, value, with};

fn full() -> Event {
    Event::builder("order.placed")
        .source("shop")
        .foreign_id("order-7")
        .tenant("acme")
        .app("web")
        .entity("ORDER", "7")
        .key("k")
        .correlation_id("c")
        .causation_id("e-0")
        .version(2)
        .meta("note", "two\nlines")
        .json(&json!({"order": 7}))
        .build()
        .unwrap()
}

// conformance: memory/dialect-native: the native document has the names that the command line prints
#[test]
fn the_document_is_what_the_command_line_prints() {
    let event = full();
    let record = Recorded::new(event.clone(), Position::seq(7), Timestamp::EPOCH);
    let printed = serde_json::to_value(record).unwrap();
    let written = value(&encode(&event, Dialect::Native).unwrap());
    for (name, json) in written.as_object().unwrap() {
        assert_eq!(&printed[name], json, "{name}");
    }
    assert_eq!(
        written.as_object().unwrap().len(),
        printed.as_object().unwrap().len() - 2
    );
    // What is printed can be read; seq and received_at are kept.
    let back = round(&printed.to_string(), Dialect::Native);
    assert_eq!(back.metadata()["native:seq"], "7");
    assert_eq!((back.id(), back.payload()), (event.id(), event.payload()));
}

#[test]
fn a_correlation_that_is_the_foreign_id_is_not_lost() {
    for correlation in [Some("order-7"), None] {
        let mut event = Event::builder("t").foreign_id("order-7");
        if let Some(id) = correlation {
            event = event.correlation_id(id);
        }
        let event = event.build().unwrap();
        let document = encode(&event, Dialect::Native).unwrap();
        assert_eq!(value(&document)["correlation_id"], *event.correlation_id());
        assert_eq!(decode(&document, Dialect::Native).unwrap(), event);
    }
}

#[test]
fn payloads_that_are_not_json_travel_as_text_or_hex() {
    let text = Event::builder("t")
        .payload("hello\n")
        .content_type("text/plain");
    let bytes = Event::builder("t")
        .payload(vec![0xff, 1])
        .content_type("x/y");
    for (event, field, json) in [
        (text, "payload_text", "hello\n"),
        (bytes, "payload_hex", "ff01"),
    ] {
        let event = event.build().unwrap();
        let document = encode(&event, Dialect::Native).unwrap();
        assert_eq!(value(&document)[field], json);
        assert_eq!(decode(&document, Dialect::Native).unwrap(), event);
    }
    let spaced = Event::builder("t")
        .payload(" {\"a\": 1}\n")
        .build()
        .unwrap();
    let document = encode(&spaced, Dialect::Native).unwrap();
    assert_eq!(decode(&document, Dialect::Native).unwrap(), spaced);
    let hand = r#"{"id":"1","type":"t","payload_text":"{\"a\": 1}"}"#;
    assert_eq!(&round(hand, Dialect::Native).payload()[..], b"{\"a\": 1}");
    round(
        r#"{"id":"1","type":"t","content_type":"a/b","payload":{"a": 1}}"#,
        Dialect::Native,
    );
    round(
        r#"{"id":"1","type":"t","content_type":"a/b","payload_hex":""}"#,
        Dialect::Native,
    );
}

#[test]
fn a_document_written_by_hand_needs_only_id_and_type() {
    let event = round(
        r#"{"id":"test-1","type":"t","source":"me"}"#,
        Dialect::Native,
    );
    assert_eq!((event.display_id(), event.version()), ("test-1".into(), 1));
    assert_eq!(&event.payload()[..], b"null");
    let event = round(
        r#"{"id":"3F2504E0-4F89-41D3-9A0C-0305E82C3301","type":"t"}"#,
        Dialect::Native,
    );
    assert_eq!(event.display_id(), "3F2504E0-4F89-41D3-9A0C-0305E82C3301");
}

#[test]
fn objects_in_another_order_or_with_more_in_them_come_back() {
    let document = encode(&full(), Dialect::Native).unwrap();
    let document = String::from_utf8(document).unwrap();
    let entity = with(
        &document,
        "entity",
        Some(r#"{"id":"7","x":1,"type":"ORDER"}"#),
    );
    let back = round(&entity, Dialect::Native);
    assert_eq!(
        back.attributes()
            .unwrap()
            .entity
            .as_ref()
            .unwrap()
            .to_string(),
        "ORDER#7"
    );
    // Large metadata in another order need not be kept twice.
    let large = "x".repeat(10_000);
    let text = format!(
        r#"{{"id":"1","type":"t","metadata":{{ "b":"{large}","a":"{large}","c":"{large}" }}}}"#
    );
    assert_eq!(round(&text, Dialect::Native).metadata()["b"].len(), 10_000);
}

#[test]
fn mistakes_are_refused_by_the_name_of_their_field() {
    let document = String::from_utf8(encode(&full(), Dialect::Native).unwrap()).unwrap();
    let other = "\"3f2504e0-4f89-41d3-9a0c-0305e82c3301\"";
    for (field, json, code) in [
        ("id", None, Code::InvalidAttribute),
        ("id", Some("\"x\""), Code::InvalidId),
        ("foreign_id", Some(other), Code::InvalidId),
        ("type", None, Code::InvalidAttribute),
        ("version", Some("0"), Code::InvalidAttribute),
        ("occurred_at", Some("7"), Code::InvalidAttribute),
        ("entity", Some("\"ORDER#7\""), Code::InvalidAttribute),
        ("metadata", Some(r#"{"a":1}"#), Code::InvalidAttribute),
        (
            "metadata",
            Some(r#"{"native:x":"1"}"#),
            Code::InvalidAttribute,
        ),
        ("payload_hex", Some("\"ff\""), Code::InvalidPayloadError),
    ] {
        let place = if field == "payload_hex" {
            "payload"
        } else {
            field
        };
        let place = format!("field {place:?}");
        refused(&with(&document, field, json), Dialect::Native, code, &place);
    }
    let odd = r#"{"id":"1","type":"t","content_type":"a/b","payload_hex":"FF"}"#;
    refused(
        odd,
        Dialect::Native,
        Code::InvalidPayloadError,
        "payload_hex",
    );
    refused(
        r#"{"id":"1","type":"a>"}"#,
        Dialect::Native,
        Code::InvalidType,
        "a>",
    );
}
