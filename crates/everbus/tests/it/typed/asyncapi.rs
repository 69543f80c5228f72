//! The AsyncAPI document: held against the rules of the specification, and against a golden file.

use std::collections::BTreeSet;
use std::time::Duration;

use everbus::asyncapi::{Action, Channel, Document, Operation};
use everbus::schemars::JsonSchema;
use everbus::{
    Code, Event, EventId, Position, Recorded, RetryPolicy, Schema, Timestamp, TraceContext,
    TypedEvent,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::asyncapi_rules::broken_rules;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/asyncapi.json");

/// A customer has paid for goods.
#[derive(Serialize, Deserialize, JsonSchema, Event)]
#[event(type = "orders.order.placed", version = 2)]
#[schemars(crate = "everbus::schemars")]
struct OrderPlaced {
    order_id: u64,
    lines: Vec<Line>,
    replaces: Option<Box<Line>>,
}

#[derive(Serialize, Deserialize, JsonSchema)]
#[schemars(crate = "everbus::schemars")]
struct Line {
    goods: String,
    count: u8,
    parts: Vec<Line>,
}

fn channel(event_type: &str, versions: Vec<(u32, Option<Value>)>) -> Channel {
    Channel {
        event_type: event_type.to_owned(),
        versions,
    }
}

fn known(event_types: &[&str]) -> Document {
    Document {
        channels: event_types
            .iter()
            .map(|name| channel(name, vec![(1, None)]))
            .collect(),
        ..Document::new("Test", "1")
    }
}

fn receives(pattern: &str) -> Operation {
    Operation {
        group: Some("billing".to_owned()),
        ..Operation::new(Action::Receive, "charge", pattern)
    }
}

/// A shop with everything in it.
fn shop() -> Document {
    let mut document = Document::new("Shop", "1.4.0");
    document.description = Some("Orders and *receipts*.".to_owned());
    document.channels = vec![
        channel("orders.order.shipped", vec![]),
        channel(
            OrderPlaced::TYPE,
            vec![(2, OrderPlaced::schema()), (1, None)],
        ),
        channel(
            "mail.receipt.sent",
            vec![(
                1,
                Some(json!({ "prefixItems": [{ "$ref": "#/$defs/to" }], "$defs": { "to": {} } })),
            )],
        ),
        channel("system.dead_letter", vec![(1, Some(json!(true)))]),
    ];
    document.operations = vec![
        Operation {
            group: Some("notification-service".to_owned()),
            versions: vec![1, 2],
            retry: Some(RetryPolicy::default()),
            timeout: Some(Duration::from_secs(30)),
            settings: [("criticality".to_owned(), json!("standard"))].into(),
            ..Operation::new(Action::Receive, "send_receipt", OrderPlaced::TYPE)
        },
        Operation {
            versions: vec![1],
            ..Operation::new(Action::Send, "send_receipt", "mail.receipt.sent")
        },
        Operation::new(Action::Receive, "archive", "*"),
        Operation::new(Action::Receive, "watch_stock", "stock.*.changed.>"),
    ];
    document
}

// conformance: handlers/asyncapi-document: an AsyncAPI 3 document of all channels, messages and schemas.
#[test]
fn the_document_is_what_it_was() {
    let json = shop().to_json().unwrap();
    if std::env::var_os("EVERBUS_WRITE_GOLDEN").is_some() {
        let text = serde_json::to_string_pretty(&json).unwrap();
        std::fs::write(GOLDEN, text + "\n").unwrap();
    }
    let golden = std::fs::read_to_string(GOLDEN).unwrap();
    let golden: Value = serde_json::from_str(&golden).unwrap();
    assert_eq!(
        json, golden,
        "after a deliberate change, EVERBUS_WRITE_GOLDEN=1 writes the golden file anew"
    );
}

// conformance: handlers/asyncapi-valid: the document keeps the rules of the AsyncAPI specification.
#[test]
fn the_document_keeps_the_rules_of_asyncapi_3() {
    assert_eq!(broken_rules(&shop().to_json().unwrap()), [""; 0]);
    assert_eq!(
        broken_rules(&Document::new("", "").to_json().unwrap()),
        [""; 0]
    );
}

#[test]
fn the_rules_can_be_broken() {
    type Break<'a> = (&'a str, &'a dyn Fn(&mut Value));

    let whole = shop().to_json().unwrap();
    let placed = "orders.order.placed";
    let breaks: [Break<'_>; 8] = [
        ("no asyncapi", &|d| drop(d["asyncapi"].take())),
        ("no title", &|d| d["info"] = json!({ "version": "1" })),
        ("a stray field", &|d| d["channels"][placed]["x"] = json!(1)),
        ("a bad action", &|d| {
            first(&mut d["operations"])["action"] = json!("publish");
        }),
        ("a message of another channel", &|d| {
            let reference = "#/channels/system.dead_letter/messages/system.dead_letter.v1";
            let operation = &mut d["operations"]["send_receipt.send.mail.receipt.sent"];
            operation["messages"] = json!([{ "$ref": reference }]);
        }),
        ("a lost schema", &|d| {
            d["components"]["schemas"] = json!({});
        }),
        ("a key with a space", &|d| {
            d["components"]["messages"]["a b"] = json!({});
        }),
        ("an unnamed parameter", &|d| {
            d["channels"][placed]["address"] = json!("orders.{what}");
        }),
    ];
    for (what, break_it) in breaks {
        let mut document = whole.clone();
        break_it(&mut document);
        assert_ne!(broken_rules(&document), [""; 0], "{what}");
    }
}

fn first(map: &mut Value) -> &mut Value {
    map.as_object_mut().unwrap().values_mut().next().unwrap()
}

// conformance: handlers/asyncapi-versions: every version of an event is a message of its own, with its schema.
#[test]
fn every_version_is_a_message_of_its_channel() {
    let json = shop().to_json().unwrap();
    let channel = &json["channels"]["orders.order.placed"];
    assert_eq!(channel["address"], "orders.order.placed");
    let names: Vec<&String> = channel["messages"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["orders.order.placed.v1", "orders.order.placed.v2"]);
    let message = &json["components"]["messages"]["orders.order.placed.v2"];
    let payload = "#/components/schemas/orders.order.placed.v2";
    assert_eq!(message["payload"], json!({ "$ref": payload }));
    assert_eq!(message["summary"], "A customer has paid for goods.");
    let headers = &message["headers"]["properties"];
    assert_eq!(headers["type"]["const"], "orders.order.placed");
    assert_eq!(headers["version"]["const"], 2);
    let unknown = &json["components"]["messages"]["orders.order.placed.v1"];
    assert!(unknown.get("payload").is_none());
}

/// The schema as a reader of the document would see it.
fn within(document: &Value, pointer: &str) -> Schema {
    let mut root = document.clone();
    root["$schema"] = "http://json-schema.org/draft-07/schema#".into();
    root["allOf"] = json!([{ "$ref": pointer }]);
    Schema::new(pointer, &root).unwrap()
}

// conformance: handlers/asyncapi-versions: every version of an event is a message of its own, with its schema.
#[test]
fn a_schema_in_the_document_asks_for_the_same_as_by_itself() {
    let json = shop().to_json().unwrap();
    let schema = within(&json, "#/components/schemas/orders.order.placed.v2");
    let payload = |count: Value| {
        let part = json!({ "goods": "nut", "count": count, "parts": [] });
        let line = json!({ "goods": "bolt", "count": 1, "parts": [part] });
        json!({ "order_id": 1, "lines": [line], "replaces": null }).to_string()
    };
    assert!(schema.check(payload(json!(2)).as_bytes()).is_ok());
    let error = schema.check(payload(json!(256)).as_bytes()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("at /lines/0/parts/0/count: "), "{text}");
}

// conformance: framework/structure-envelope: the envelope of an event is described as the headers of its message.
#[test]
fn the_headers_describe_the_envelope_as_it_is() {
    let event = Event::builder("orders.order.placed")
        .version(2)
        .source("shop")
        .foreign_id("test-1")
        .app("a")
        .tenant("t")
        .entity("ORDER", "42")
        .key("42")
        .correlation_id("c")
        .causation_id(EventId::new().to_string())
        .trace(TraceContext {
            traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned(),
            tracestate: Some("x=1".to_owned()),
        })
        .meta("k", "v")
        .content_type("application/json")
        .build()
        .unwrap();
    let recorded = Recorded::new(event, Position::seq(7), Timestamp::EPOCH);
    let mut envelope = serde_json::to_value(&recorded).unwrap();
    envelope.as_object_mut().unwrap().remove("payload").unwrap();

    let json = shop().to_json().unwrap();
    let described = &json["components"]["schemas"]["EventEnvelope"]["properties"];
    let names = |value: &Value| -> BTreeSet<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!(names(described), names(&envelope));

    let pointer = "#/components/messages/orders.order.placed.v2/headers";
    let headers = within(&json, pointer);
    headers.check(envelope.to_string().as_bytes()).unwrap();
    envelope["version"] = json!(1);
    assert!(headers.check(envelope.to_string().as_bytes()).is_err());
}

// conformance: handlers/asyncapi-operations: every handler is an operation that receives, with its settings; what it emits is one that sends.
#[test]
fn a_handler_is_an_operation_with_its_settings() {
    let json = shop().to_json().unwrap();
    let operations = &json["operations"];
    let receives = &operations["notification-service.send_receipt.receive.orders.order.placed"];
    assert_eq!(receives["action"], "receive");
    let channel = "#/channels/orders.order.placed";
    assert_eq!(receives["channel"]["$ref"], channel);
    assert_eq!(receives["messages"].as_array().unwrap().len(), 2);
    for (name, value) in [
        ("group", json!("notification-service")),
        ("handler", json!("send_receipt")),
        ("pattern", json!("orders.order.placed")),
        ("criticality", json!("standard")),
        ("timeout-ms", json!(30_000)),
        (
            "retry",
            json!({ "max_attempts": 4, "delays_ms": [1000, 2000, 4000] }),
        ),
    ] {
        assert_eq!(receives[format!("x-everbus-{name}")], value, "{name}");
    }
    let sends = &operations["send_receipt.send.mail.receipt.sent"];
    assert_eq!(sends["action"], "send");
    assert_eq!(sends["channel"]["$ref"], "#/channels/mail.receipt.sent");
}

// conformance: handlers/asyncapi-operations: every handler is an operation that receives, with its settings; what it emits is one that sends.
#[test]
fn a_handler_of_one_version_takes_only_that_message() {
    let mut document = known(&["t"]);
    document.channels[0].versions.push((2, None));
    // Version 3 is known from the handler alone.
    let versions = vec![2, 3];
    document.operations = vec![Operation {
        versions,
        ..receives("t")
    }];
    let json = document.to_json().unwrap();
    let refs: Vec<Value> = ["t.v2", "t.v3"]
        .map(|key| json!({ "$ref": format!("#/channels/t/messages/{key}") }))
        .into();
    assert_eq!(
        json["operations"]["billing.charge.receive.t"]["messages"],
        json!(refs)
    );
    assert_eq!(broken_rules(&json), [""; 0]);
}

// conformance: handlers/asyncapi-patterns: a pattern is an operation on every channel it matches, or on one of its own.
#[test]
fn a_pattern_receives_from_every_channel_it_matches() {
    let mut document = known(&["orders.a", "orders.b.c", "users.a", "system.dead_letter"]);
    document.operations = vec![receives("orders.*"), receives("*")];
    let json = document.to_json().unwrap();
    let operations: Vec<&String> = json["operations"].as_object().unwrap().keys().collect();
    assert_eq!(
        operations,
        [
            "billing.charge.receive.orders.a",
            "billing.charge.receive.orders.a_2",
            "billing.charge.receive.orders.b.c",
            "billing.charge.receive.users.a",
        ]
    );
    assert_eq!(broken_rules(&json), [""; 0]);
}

// conformance: handlers/asyncapi-patterns: a pattern is an operation on every channel it matches, or on one of its own.
#[test]
fn a_pattern_that_matches_nothing_known_is_a_channel_with_parameters() {
    for (pattern, address) in [
        ("order.*.shipped", json!("order.{segment2}.shipped")),
        ("order.*.>", json!("order.{segment2}.{rest}")),
        (">", json!("{type}")),
        ("a{b}.*", Value::Null),
    ] {
        let mut document = Document::new("Test", "1");
        document.operations = vec![receives(pattern), receives(pattern)];
        let json = document.to_json().unwrap();
        assert_eq!(json["channels"].as_object().unwrap().len(), 1);
        assert_eq!(json["operations"].as_object().unwrap().len(), 2);
        let channel = json["channels"].as_object().unwrap().values().next();
        assert_eq!(channel.unwrap()["address"], address);
        assert_eq!(broken_rules(&json), [""; 0], "{pattern}");
    }
    // One pattern is no event type that another could match.
    let mut document = Document::new("Test", "1");
    document.operations = vec![receives("a.*"), receives(">")];
    let json = document.to_json().unwrap();
    let channels: Vec<&String> = json["channels"].as_object().unwrap().keys().collect();
    assert_eq!(channels, ["_", "a._"]);
}

#[test]
fn a_pattern_that_is_none_is_refused() {
    let mut document = Document::new("Test", "1");
    document.operations = vec![receives("a.>.b")];
    let error = document.to_json().unwrap_err();
    assert_eq!(error.code(), Code::InvalidPattern);
}

// conformance: handlers/asyncapi-names: odd event types get keys that every tool takes; no two share one.
#[test]
fn odd_types_get_plain_keys_and_keep_their_address() {
    let odd = [
        "Task Processing Started",
        "Task_Processing_Started",
        "größe/geändert~1",
        "a{b}",
        "EventEnvelope",
        "$ref",
    ];
    let mut document = known(&odd);
    for event_type in odd {
        document.operations.push(receives(event_type));
    }
    let json = document.to_json().unwrap();
    assert_eq!(broken_rules(&json), [""; 0]);
    let channels = json["channels"].as_object().unwrap();
    let titles: BTreeSet<&str> = channels
        .values()
        .map(|channel| channel["title"].as_str().unwrap())
        .collect();
    assert_eq!(titles, BTreeSet::from(odd));
    for channel in channels.values() {
        let braces = channel["title"].as_str().unwrap().contains('{');
        let address = if braces {
            &Value::Null
        } else {
            &channel["title"]
        };
        assert_eq!(&channel["address"], address);
    }
    // A type without a version could take the key of the envelope.
    let mut document = Document::new("Test", "1");
    document.channels = vec![channel("EventEnvelope", vec![])];
    assert_eq!(broken_rules(&document.to_json().unwrap()), [""; 0]);
}

#[test]
fn a_type_given_twice_is_one_channel_with_all_versions() {
    let schema = json!({ "type": "object" });
    let mut document = Document::new("Test", "1");
    document.channels = vec![
        channel("t", vec![(1, None)]),
        channel("t", vec![(2, None), (1, Some(schema.clone()))]),
        channel("t", vec![(1, None)]),
    ];
    let json = document.to_json().unwrap();
    assert_eq!(json["channels"].as_object().unwrap().len(), 1);
    assert_eq!(json["components"]["schemas"]["t.v1"], schema);
    let messages = json["channels"]["t"]["messages"].as_object().unwrap();
    assert_eq!(messages.len(), 2);
}

/// The schema of `t` version 1 as the document has it.
fn embedded(schema: Value) -> Value {
    let mut document = Document::new("Test", "1");
    document.channels = vec![channel("t", vec![(1, Some(schema))])];
    let json = document.to_json().unwrap();
    assert_eq!(broken_rules(&json), [""; 0]);
    json["components"]["schemas"]["t.v1"].clone()
}

// conformance: handlers/asyncapi-schemas: the references of a schema lead to their targets in the document, data is left alone.
#[test]
fn references_are_led_into_the_document_and_data_is_left_alone() {
    let data = json!({ "$ref": "#/nowhere" });
    let schema = embedded(json!({
        "$id": "https://example.com/t",
        "properties": {
            "$ref": { "$ref": "#" },
            "enum": { "$ref": "https://example.com/t#/definitions/a" },
            "list": { "items": [{ "$ref": "#/definitions/a" }] },
        },
        "definitions": { "a": { "const": data, "default": data, "enum": [data] } },
    }));
    let at = "#/components/schemas/t.v1";
    let properties = &schema["properties"];
    assert_eq!(properties["$ref"]["$ref"], at);
    assert_eq!(properties["enum"]["$ref"], format!("{at}/definitions/a"));
    let item = &properties["list"]["items"][0];
    assert_eq!(item["$ref"], format!("{at}/definitions/a"));
    let a = json!({ "const": data, "default": data, "enum": [data] });
    assert_eq!(schema["definitions"]["a"], a);
    assert!(schema.get("$id").is_none());
}

// conformance: handlers/asyncapi-schemas: the references of a schema lead to their targets in the document, data is left alone.
#[test]
fn a_schema_that_draft_7_would_misread_keeps_its_draft() {
    let draft = |schema: Value| {
        let embedded = embedded(schema);
        let format = embedded.get("schemaFormat").cloned();
        format.map(|format| format.as_str().unwrap().to_owned())
    };
    let uri = |name: &str| format!("https://json-schema.org/draft/{name}/schema");
    let tuple = json!({ "prefixItems": [true] });
    let of = |mut schema: Value, uri: &str| {
        schema["$schema"] = uri.into();
        schema
    };
    for (schema, format) in [
        (json!({ "type": "object" }), None),
        (of(json!({}), &uri("2020-12")), None),
        (
            of(json!({}), "http://json-schema.org/draft-07/schema#"),
            None,
        ),
        (
            of(json!({}), "http://json-schema.org/draft-04/schema#"),
            Some("draft-04"),
        ),
        (tuple.clone(), Some("draft-2020-12")),
        (
            json!({ "properties": { "a": { "allOf": [tuple] } } }),
            Some("draft-2020-12"),
        ),
        (
            of(json!({ "unevaluatedItems": false }), &uri("2019-09")),
            Some("draft-2019-09"),
        ),
        (
            json!({ "$ref": "#/$defs/a", "required": ["b"], "$defs": { "a": true } }),
            Some("draft-2020-12"),
        ),
        (json!({ "$ref": "#/$defs/a", "$defs": { "a": true } }), None),
        // A property of that name is not the keyword.
        (json!({ "properties": { "prefixItems": {} } }), None),
    ] {
        let format = format.map(|draft| format!("application/schema+json;version={draft}"));
        assert_eq!(draft(schema.clone()), format, "{schema}");
    }
    assert_eq!(embedded(json!(false)), json!({ "not": {} }));
}
