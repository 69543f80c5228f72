//! CloudEvents 1.0 in JSON, with the examples of the standard.

use everbus_core::{Code, Event, TraceContext};
use everbus_dialects::{Beside, Dialect, decode, decode_beside, encode};
use serde_json::json;

use crate::support::{refused, round, round_beside, value, with};

const CE: Dialect = Dialect::CloudEvents;

pub(crate) const BINARY: &str = r#"{
    "specversion" : "1.0",
    "type" : "com.example.someevent",
    "source" : "/mycontext",
    "id" : "A234-1234-1234",
    "time" : "2018-04-05T17:31:00Z",
    "comexampleextension1" : "value",
    "comexampleothervalue" : 5,
    "datacontenttype" : "application/vnd.apache.thrift.binary",
    "data_base64" : "AAH/gA=="
}"#;

pub(crate) const XML: &str = r#"{
    "specversion" : "1.0",
    "type" : "com.example.someevent",
    "source" : "/mycontext",
    "id" : "B234-1234-1234",
    "time" : "2018-04-05T17:31:00Z",
    "comexampleextension1" : "value",
    "comexampleothervalue" : 5,
    "unsetextension": null,
    "datacontenttype" : "application/xml",
    "data" : "<much wow=\"xml\"/>"
}"#;

pub(crate) const OBJECT: &str = r#"{
    "specversion" : "1.0",
    "type" : "com.example.someevent",
    "source" : "/mycontext",
    "subject": null,
    "id" : "C234-1234-1234",
    "time" : "2018-04-05T17:31:00Z",
    "comexampleextension1" : "value",
    "comexampleothervalue" : 5,
    "datacontenttype" : "application/json",
    "data" : { "appinfoA" : "abc", "appinfoB" : 123, "appinfoC" : true }
}"#;

pub(crate) const STRING: &str = r#"{
    "specversion" : "1.0",
    "type" : "com.example.someevent",
    "source" : "/mycontext",
    "subject": null,
    "id" : "D234-1234-1234",
    "time" : "2018-04-05T17:31:00Z",
    "comexampleextension1" : "value",
    "comexampleothervalue" : 5,
    "data" : "I'm just a string"
}"#;

// conformance: memory/dialect-cloudevents: CloudEvents 1.0 in JSON, the examples of the standard
#[test]
fn the_examples_of_the_standard_are_read_and_written() {
    for (document, payload) in [
        (BINARY, &[0, 1, 0xff, 0x80][..]),
        (XML, b"<much wow=\"xml\"/>"),
        (
            OBJECT,
            b"{ \"appinfoA\" : \"abc\", \"appinfoB\" : 123, \"appinfoC\" : true }",
        ),
        (STRING, b"\"I'm just a string\""),
    ] {
        let event = round(document, CE);
        assert_eq!(&event.payload()[..], payload);
        assert_eq!(event.event_type(), "com.example.someevent");
        assert_eq!(
            event.display_id(),
            value(document.as_bytes())["id"].as_str().unwrap()
        );
        assert_eq!(event.metadata()["comexampleextension1"], "value");
        assert_eq!(event.metadata()["cloudevents:comexampleothervalue"], "5");
    }
    let event = round(STRING, CE);
    assert_eq!(event.content_type(), "application/json");
}

#[test]
fn subject_and_dataschema_are_metadata() {
    let document = with(OBJECT, "subject", Some("\"mynewfile.jpg\""));
    let document = with(&document, "dataschema", Some("\"https://example.com/s\""));
    let event = round(&document, CE);
    assert_eq!(event.metadata()["subject"], "mynewfile.jpg");
    assert_eq!(event.metadata()["dataschema"], "https://example.com/s");
}

#[test]
fn what_everbus_knows_travels_as_extensions() {
    let trace = TraceContext::parse(
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        Some("vendor=1"),
    )
    .unwrap();
    let event = Event::builder("order.placed")
        .source("/shop")
        .foreign_id("order-7")
        .version(3)
        .tenant("acme")
        .app("web")
        .entity("ORDER", "7")
        .key("k")
        .correlation_id("c")
        .causation_id("e-0")
        .trace(trace)
        .content_type("application/vnd.order+json")
        .meta("channel", "web")
        .meta("replay_of", "order-6")
        .json(&json!({"order": 7}))
        .build()
        .unwrap();
    let document = encode(&event, CE).unwrap();
    assert_eq!(
        value(&document),
        json!({
            "specversion": "1.0", "id": "order-7", "source": "/shop", "type": "order.placed",
            "time": value(&document)["time"], "schemaversion": 3,
            "datacontenttype": "application/vnd.order+json",
            "tenant": "acme", "app": "web", "entitytype": "ORDER", "entityid": "7",
            "partitionkey": "k", "correlationid": "c", "causationid": "e-0",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "tracestate": "vendor=1", "channel": "web", "replayof": "order-6",
            "data": {"order": 7},
        })
    );
    assert_eq!(decode(&document, CE).unwrap(), event);
}

#[test]
fn extensions_that_do_not_fit_their_place_stay_extensions() {
    for (name, json) in [
        ("tenant", "5"),
        ("tenant", "\"\""),
        ("tenant", "null"),
        ("traceparent", "\"garbage\""),
        ("tracestate", "\"a=1\""),
        ("entitytype", "\"ORDER\""),
        ("entityid", "\"7\""),
        ("schemaversion", "\"1.2\""),
        ("schemaversion", "0"),
        ("schemaversion", "-3"),
        ("schemaversion", "true"),
        ("replayof", "7"),
    ] {
        let document = with(OBJECT, name, Some(json));
        let event = round(&document, CE);
        assert_eq!(
            (event.tenant(), event.version()),
            (None, 1),
            "{name}: {json}"
        );
        let a = event.attributes().unwrap();
        assert!(a.trace.is_none() && a.entity.is_none());
    }
    for json in ["2", "\"2\"", "\"\\u0032\"", "\"02\""] {
        let event = round(&with(OBJECT, "schemaversion", Some(json)), CE);
        assert_eq!(event.version(), 2, "{json}");
    }
}

// A metadata entry must not come back as the tenant.
#[test]
fn metadata_with_the_name_of_an_attribute_is_not_written() {
    for name in [
        "tenant",
        "id",
        "source",
        "data",
        "time",
        "schemaversion",
        "specversion",
    ] {
        let event = Event::builder("t").meta(name, "2").build().unwrap();
        let back = decode(&encode(&event, CE).unwrap(), CE).unwrap();
        assert_eq!(back.tenant(), None);
        assert_eq!((back.id(), back.version()), (event.id(), 1));
        assert!(back.metadata().is_empty(), "{name}");
    }
}

#[test]
fn data_may_be_missing_null_or_base64_and_comes_back_so() {
    let event = round(&with(OBJECT, "data", None), CE);
    assert_eq!(&event.payload()[..], b"null");
    let event = round(&with(OBJECT, "data", Some("null")), CE);
    assert_eq!(&event.payload()[..], b"null");
    let event = round(&with(XML, "data", None), CE);
    assert!(event.payload().is_empty());

    let json = with(
        &with(OBJECT, "data", None),
        "data_base64",
        Some("\"eyAieHl6IjogMTIzIH0=\""),
    );
    let event = round(&json, CE);
    assert_eq!(&event.payload()[..], b"{ \"xyz\": 123 }");
    let text = with(
        &with(XML, "data", None),
        "data_base64",
        Some("\"PGEvPg==\""),
    );
    assert_eq!(&round(&text, CE).payload()[..], b"<a/>");
    round(&with(OBJECT, "data_base64", Some("null")), CE);
    round(&with(BINARY, "data_base64", Some("null")), CE);
    // A subtype json of any type is JSON.
    let other = with(
        OBJECT,
        "datacontenttype",
        Some("\"text/json; charset=utf-8\""),
    );
    round(&other, CE);
}

#[test]
fn without_a_time_the_event_gets_one_and_the_document_stays_without() {
    for json in [None, Some("null")] {
        let document = with(OBJECT, "time", json);
        let at = "2026-01-01T00:00:00Z".parse().unwrap();
        let beside = Beside {
            time: Some(at),
            ..Beside::default()
        };
        assert_eq!(round_beside(&document, CE, &beside).occurred_at(), at);
        let first = round(&document, CE);
        let again = decode_beside(document.as_bytes(), CE, &beside).unwrap();
        assert!(first.same_body(&again), "a redelivery is the same event");
    }
}

#[test]
fn mistakes_are_refused_by_the_name_of_their_field() {
    for (field, json, code) in [
        ("specversion", None, Code::InvalidAttribute),
        ("specversion", Some("\"0.3\""), Code::Unsupported),
        ("id", Some("\"\""), Code::InvalidAttribute),
        ("source", None, Code::InvalidAttribute),
        ("type", Some("null"), Code::InvalidAttribute),
        ("time", Some("\"2018-04-05\""), Code::InvalidAttribute),
        ("subject", Some("7"), Code::InvalidAttribute),
        ("Upper", Some("\"x\""), Code::InvalidAttribute),
        ("with_score", Some("\"x\""), Code::InvalidAttribute),
        ("ext", Some("{}"), Code::InvalidAttribute),
        ("ext", Some("1.5"), Code::InvalidAttribute),
        ("ext", Some("2147483648"), Code::InvalidAttribute),
        ("ext", Some("\"a\\u0007\""), Code::InvalidAttribute),
    ] {
        let place = format!("field {field:?}");
        refused(&with(OBJECT, field, json), CE, code, &place);
    }
    let both = with(OBJECT, "data_base64", Some("\"AA==\""));
    refused(&both, CE, Code::InvalidPayloadError, "\"data\"");
    for bad in ["\"AAH/gA\"", "\"AAH/gB==\"", "\"-_==\"", "7", "\"AA ==\""] {
        let document = with(BINARY, "data_base64", Some(bad));
        refused(&document, CE, Code::InvalidPayloadError, "\"data_base64\"");
    }
    let number = with(XML, "data", Some("7"));
    refused(&number, CE, Code::InvalidPayloadError, "\"data\"");
    let not_json = with(
        &with(OBJECT, "data", None),
        "data_base64",
        Some("\"AAH/gA==\""),
    );
    refused(&not_json, CE, Code::InvalidPayloadError, "not JSON");
}
