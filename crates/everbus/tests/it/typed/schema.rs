//! Schemas: where they come from, what they refuse, and what they say about it.

use std::borrow::Cow;
use std::net::TcpListener;

use everbus::schemars::{self, JsonSchema};
use everbus::{Code, Error, Event, IntoEvent, Schema, Schemas, TypedEvent};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema, Event)]
#[event(type = "orders.order.placed", version = 2)]
#[schemars(crate = "everbus::schemars")]
struct OrderPlaced {
    #[serde(rename = "orderId")]
    order_id: u64,
    ship_to: Option<Address>,
    payment: Payment,
    #[serde(default)]
    notes: Vec<String>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(crate = "everbus::schemars")]
struct Address {
    street: String,
    zip: u32,
}

#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[schemars(crate = "everbus::schemars")]
enum Payment {
    Card { last4: String },
    Invoice { days: u8 },
}

fn order() -> OrderPlaced {
    OrderPlaced {
        order_id: 42,
        ship_to: Some(Address {
            street: "Main".to_owned(),
            zip: 1010,
        }),
        payment: Payment::Invoice { days: 14 },
        notes: vec![],
    }
}

fn registered() -> Schemas {
    let mut schemas = Schemas::new();
    schemas.register::<OrderPlaced>().unwrap();
    schemas
}

fn event(payload: &Value) -> Event {
    let event = Event::builder(OrderPlaced::TYPE).version(2).json(payload);
    event.build().unwrap()
}

/// What the schema of `OrderPlaced` says about a payload.
fn refusal(payload: &Value) -> Error {
    registered().check_consumed(&event(payload)).unwrap_err()
}

fn compiled(schema: &Value) -> Schema {
    Schema::new("a test", schema).unwrap()
}

// conformance: handlers/typed-schema: the schema describes what the type reads, with its serde names.
#[test]
fn the_schema_comes_from_the_type() {
    let schema = OrderPlaced::schema().unwrap();
    assert_eq!(schema["$schema"], "http://json-schema.org/draft-07/schema#");
    assert_eq!(schema["required"], json!(["orderId", "payment"]));
    assert_eq!(schema["properties"]["orderId"]["type"], "integer");
}

// conformance: handlers/typed-schema: a type without JsonSchema is an event all the same.
#[test]
fn a_type_without_a_schema_has_none_and_is_not_checked() {
    #[derive(Serialize, Event)]
    #[event(type = "plain")]
    struct Plain;

    assert_eq!(Plain::schema(), None);
    let mut schemas = Schemas::new();
    schemas.register::<Plain>().unwrap();
    assert!(schemas.is_empty());
    let anything = Event::builder("plain").json(&json!([1])).build().unwrap();
    schemas.check_published(&anything, None).unwrap();
    schemas.check_consumed(&anything).unwrap();
}

// conformance: handlers/typed-schema: a generic type has a schema where that can be known.
#[test]
fn a_generic_type_has_a_schema_if_its_bounds_say_so() {
    #[derive(Serialize, JsonSchema, Event)]
    #[event(type = "generic.unknown")]
    #[schemars(crate = "everbus::schemars")]
    struct Unknown<T> {
        value: T,
    }

    #[derive(Serialize, JsonSchema, Event)]
    #[event(type = "generic.known")]
    #[schemars(crate = "everbus::schemars")]
    struct Known<T: JsonSchema> {
        value: T,
    }

    #[derive(Serialize, JsonSchema, Event)]
    #[event(type = "borrowed")]
    #[schemars(crate = "everbus::schemars")]
    struct Borrowed<'a> {
        name: Cow<'a, str>,
    }

    assert_eq!(Unknown::<u8>::schema(), None);
    let known = Known::<u8>::schema().unwrap();
    assert_eq!(known["properties"]["value"]["maximum"], 255);
    assert!(Borrowed::schema().is_some());
}

// conformance: handlers/schema-exempt: a value just serialised from the type of the schema is not checked.
#[test]
fn a_value_knows_the_type_it_is_serialised_from() {
    let name = std::any::type_name::<OrderPlaced>();
    assert_eq!(order().rust_type(), Some(name));
    assert_eq!(
        <&OrderPlaced as IntoEvent>::rust_type(&&order()),
        Some(name)
    );
    assert_eq!(("a", 1).rust_type(), None);
    assert_eq!(order().into_event().unwrap().rust_type(), None);
}

/// A type whose schema nothing fits: whether it was checked shows.
#[derive(Serialize)]
struct Refused;

impl TypedEvent for Refused {
    const TYPE: &'static str = "refused";

    fn schema() -> Option<Value> {
        Some(json!(false))
    }
}

// conformance: handlers/schema-publish: what is published under a type with a schema is checked.
// conformance: handlers/schema-exempt: a value just serialised from the type of the schema is not checked.
#[test]
fn a_publish_is_checked_unless_the_payload_comes_from_the_very_type_of_the_schema() {
    let mut schemas = Schemas::new();
    schemas.register::<Refused>().unwrap();
    let event = Event::builder("refused").build().unwrap();
    let refused = Some(std::any::type_name::<Refused>());
    assert!(schemas.check_published(&event, refused).is_ok());
    for other in [None, Some(std::any::type_name::<OrderPlaced>())] {
        let error = schemas.check_published(&event, other).unwrap_err();
        assert_eq!(error.code(), Code::ValidationError, "{other:?}");
    }
}

// conformance: handlers/schema-consume: what is consumed is checked, whoever published it.
#[test]
fn a_consumer_checks_every_event() {
    let mut schemas = Schemas::new();
    schemas.register::<Refused>().unwrap();
    let event = Event::builder("refused").build().unwrap();
    let error = schemas.check_consumed(&event).unwrap_err();
    assert_eq!(error.code(), Code::ValidationError);
}

// conformance: handlers/typed-schema: what a type serialises fits the schema of the type.
#[test]
fn what_a_type_serialises_fits_its_own_schema() {
    let schemas = registered();
    let published = order().into_event().unwrap();
    schemas.check_published(&published, None).unwrap();
    schemas.check_consumed(&published).unwrap();
    // A field with a default may be missing, as it may for the type.
    let short = json!({ "orderId": 1, "payment": { "kind": "card", "last4": "1234" } });
    schemas.check_consumed(&event(&short)).unwrap();
}

// conformance: handlers/schema-where: a violation says where in the document and what is asked for.
#[test]
fn a_violation_says_where_and_what() {
    let error = refusal(&json!({
        "orderId": "x",
        "payment": { "kind": "card", "last4": "1234" },
        "notes": ["fine", 7],
    }));
    assert_eq!(error.code(), Code::ValidationError);
    assert!(error.hint_text().is_some());
    let text = error.to_string();
    assert!(text.starts_with("ValidationError: "), "{text}");
    for part in [
        "orders.order.placed version 2",
        "at /orderId: value is not of type \"integer\"",
        "at /notes/1: value is not of type \"string\"",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let text = refusal(&json!({ "orderId": 1 })).to_string();
    assert!(
        text.contains("at the root: \"payment\" is a required property"),
        "{text}"
    );
}

// conformance: handlers/schema-where: a violation says where in the document and what is asked for.
#[test]
fn a_violation_inside_an_optional_field_or_an_enum_is_found_where_it_is() {
    let with = |ship_to: Value, payment: Value| {
        refusal(&json!({ "orderId": 1, "ship_to": ship_to, "payment": payment })).to_string()
    };
    let card = json!({ "kind": "card", "last4": "1234" });
    let text = with(json!({ "street": "Main", "zip": "x" }), card.clone());
    assert!(text.contains("at /ship_to/zip: "), "{text}");
    let text = with(json!({ "street": "Main" }), card.clone());
    assert!(
        text.contains("at /ship_to: \"zip\" is a required property"),
        "{text}"
    );
    let text = with(Value::Null, json!({ "kind": "card" }));
    assert!(
        text.contains("at /payment: \"last4\" is a required property"),
        "{text}"
    );
    let text = with(Value::Null, json!({ "kind": "invoice", "days": 300 }));
    assert!(text.contains("at /payment/days: "), "{text}");
    // Which alternative was meant cannot be told.
    let text = with(Value::Null, json!({ "kind": "barter" }));
    assert!(text.contains("at /payment: "), "{text}");
}

// conformance: handlers/schema-no-secrets: a violation shows no values of the payload and is bounded.
#[test]
fn a_violation_shows_no_values_and_stays_short() {
    let schema = compiled(&json!({
        "properties": {
            "password": { "type": "integer" },
            "token": { "pattern": "^[0-9]+$" },
            "state": { "enum": ["a", "b"] },
        },
        "additionalProperties": false,
    }));
    let said = |payload: Value| {
        let error = schema.check(payload.to_string().as_bytes());
        error.unwrap_err().to_string()
    };
    let secret = "hunter2";
    let text = said(json!({ "password": secret, "token": secret, "state": secret }));
    assert!(!text.contains(secret), "{text}");
    let text = said(json!({ "k".repeat(10_000): 1 }));
    assert!(text.len() < 500, "{} bytes", text.len());
    let text = said(json!({ "\u{1b}[31m\n\u{202e}": 1 }));
    assert!(text.contains(r"\u{1b}[31m\n\u{202e}"), "{text:?}");

    let many = Value::Array(vec![json!("x"); 1_000]);
    let error = compiled(&json!({ "items": { "type": "integer" } }))
        .check(many.to_string().as_bytes())
        .unwrap_err();
    let text = error.to_string();
    assert_eq!(text.matches("at /").count(), 3, "{text}");
    assert!(text.ends_with("; and more"), "{text}");
}

// conformance: handlers/schema-bounded: saying why a payload does not fit takes bounded work.
#[test]
fn the_reasons_of_a_deep_tree_of_choices_are_not_looked_for() {
    #[derive(Serialize, JsonSchema)]
    #[serde(tag = "op")]
    #[schemars(crate = "everbus::schemars")]
    #[allow(dead_code)]
    enum Expression {
        Neg { of: Box<Expression> },
        Abs { of: Box<Expression> },
        Sum { of: Vec<Expression> },
        Number { value: i64 },
    }
    #[derive(Serialize, JsonSchema)]
    #[schemars(crate = "everbus::schemars")]
    struct Chain {
        value: i64,
        next: Option<Box<Chain>>,
    }

    let said = |schema: &Schema, begin: &str, inner: &str, depth: usize| {
        let payload = format!("{}{inner}{}", begin.repeat(depth), "}".repeat(depth));
        schema.check(payload.as_bytes()).map_err(|e| e.to_string())
    };
    // Each of three alternatives leads back: the reasons triple with every level.
    let tree = compiled(&schemars::schema_for!(Expression).to_value());
    let begin = r#"{"op":"Neg","of":"#;
    let (right, wrong) = (r#"{"op":"Number","value":1}"#, r#"{"op":"Number"}"#);
    assert_eq!(said(&tree, begin, right, 100), Ok(()));
    let text = said(&tree, begin, wrong, 3).unwrap_err();
    assert!(text.contains("at /of/of/of: "), "{text}");
    let text = said(&tree, begin, wrong, 9).unwrap_err();
    assert!(text.ends_with("nested too deeply to say where"), "{text}");
    assert!(said(&tree, begin, wrong, 100).is_err());
    // The same somewhere inside.
    let inside = compiled(&schemars::schema_for!(Vec<Expression>).to_value());
    let wrong = format!("{}{wrong}{}]", begin.repeat(9), "}".repeat(9));
    let text = said(&inside, "", &format!("[{wrong}"), 0).unwrap_err();
    assert!(text.ends_with("nested too deeply to say where"), "{text}");
    // Only one of two leads back here: nothing grows.
    let chain = compiled(&schemars::schema_for!(Chain).to_value());
    let begin = r#"{"value":1,"next":"#;
    let text = said(&chain, begin, "{}", 100).unwrap_err();
    assert!(text.contains(&"/next".repeat(30)), "{text}");
}

// conformance: handlers/schema-not-json: a payload that is not JSON violates every schema.
#[test]
fn a_payload_that_is_not_json_or_nested_without_end_is_a_violation() {
    let anything = compiled(&json!(true));
    let deep = "[".repeat(100_000);
    for payload in [&b""[..], b"{", b"\xff\xfe", b"{} x", deep.as_bytes()] {
        let error = anything.check(payload).unwrap_err();
        assert_eq!(error.code(), Code::ValidationError);
        assert!(error.message().contains("is not JSON"), "{error}");
    }
    let binary = Event::builder(OrderPlaced::TYPE)
        .version(2)
        .payload(vec![0xff])
        .content_type("application/octet-stream");
    let error = registered().check_consumed(&binary.build().unwrap());
    assert_eq!(error.unwrap_err().code(), Code::ValidationError);
}

// conformance: handlers/schema-invalid: a schema that is no schema is an error at start that names the place.
#[test]
fn what_is_no_schema_is_refused_with_the_place() {
    let refused = |schema: Value| {
        let mut schemas = Schemas::new();
        let error = schemas.register_json("a.b", 3, &schema).unwrap_err();
        assert_eq!(error.code(), Code::InvalidSchema, "{schema}");
        assert!(schemas.is_empty());
        error.to_string()
    };
    for schema in [json!(42), json!("x"), json!(null), json!([])] {
        let text = refused(schema);
        assert!(text.contains("a.b version 3"), "{text}");
        assert!(text.contains("at the root"), "{text}");
    }
    let text = refused(json!({ "properties": { "n": { "items": { "minimum": "1" } } } }));
    assert!(text.contains("at /properties/n/items/minimum: "), "{text}");
    let text = refused(json!({ "type": "objekt" }));
    assert!(text.contains("at /type: "), "{text}");
    let text = refused(json!({ "pattern": "(" }));
    assert!(text.contains("at /pattern: "), "{text}");
    refused(json!({ "$schema": "https://example.com/no-such-draft" }));
    let text = refused(json!({ "$ref": "#/$defs/missing" }));
    assert!(text.contains("/$defs/missing"), "{text}");
}

// conformance: handlers/schema-invalid: a schema that is no schema is an error at start that names the place.
#[test]
fn a_schema_needs_a_legal_type_and_version() {
    let mut schemas = Schemas::new();
    let code = |result: everbus::Result<()>| result.unwrap_err().code();
    let refused = schemas.register_json("a.*", 1, &json!(true));
    assert_eq!(code(refused), Code::InvalidType);
    let refused = schemas.register_json("a", 0, &json!(true));
    assert_eq!(code(refused), Code::InvalidSchema);
}

// conformance: handlers/schema-offline: references to the outside are refused and never fetched.
#[test]
fn nothing_is_fetched() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    for target in [
        format!("http://{address}/schema.json"),
        "file:///schema.json".to_owned(),
        "other.json".to_owned(),
    ] {
        let error = Schema::new("a test", &json!({ "$ref": target })).unwrap_err();
        assert_eq!(error.code(), Code::InvalidSchema);
        assert!(error.to_string().contains(&target), "{error}");
        assert!(error.hint_text().unwrap().contains("nothing is fetched"));
    }
    assert!(listener.accept().is_err(), "somebody came to fetch");
}

// conformance: handlers/schema-forms: boolean schemas, references inside and every draft are understood.
#[test]
fn boolean_schemas_allow_everything_or_nothing() {
    assert!(compiled(&json!(true)).check(b"1").is_ok());
    assert!(compiled(&json!({})).check(b"1").is_ok());
    assert!(compiled(&json!(false)).check(b"1").is_err());
}

// conformance: handlers/schema-forms: boolean schemas, references inside and every draft are understood.
#[test]
fn references_inside_a_schema_are_followed_even_in_a_circle() {
    let tree = compiled(&json!({
        "$ref": "#/$defs/node",
        "$defs": { "node": {
            "required": ["n"],
            "properties": { "child": { "$ref": "#/$defs/node" } },
        } },
    }));
    assert!(tree.check(br#"{"n":1,"child":{"n":2}}"#).is_ok());
    let error = tree.check(br#"{"n":1,"child":{"n":2,"child":{}}}"#);
    let text = error.unwrap_err().to_string();
    assert!(text.contains("at /child/child: "), "{text}");
    // Nothing is asked for, but that takes no time for ever.
    assert!(compiled(&json!({ "$ref": "#" })).check(b"1").is_ok());
}

// conformance: handlers/schema-forms: boolean schemas, references inside and every draft are understood.
#[test]
fn the_draft_is_the_one_the_schema_names() {
    // In draft 4 this is a switch of `minimum`; later it is a limit of its own.
    let bounds = json!({ "minimum": 5, "exclusiveMinimum": true });
    let mut draft4 = bounds.clone();
    draft4["$schema"] = "http://json-schema.org/draft-04/schema#".into();
    assert!(compiled(&draft4).check(b"6").is_ok());
    assert!(compiled(&draft4).check(b"5").is_err());
    let error = Schema::new("a test", &bounds).unwrap_err();
    assert_eq!(error.code(), Code::InvalidSchema);
    // Without a name it is 2020-12.
    let tuple = compiled(&json!({ "prefixItems": [{ "type": "integer" }] }));
    assert!(tuple.check(br#"["x"]"#).is_err());
}

// conformance: handlers/schema-formats: a format is checked where the draft says so, never on the text of a Rust type.
#[test]
fn formats_are_checked_as_the_draft_says_and_never_for_rust_types() {
    #[derive(Serialize)]
    struct Timed;

    impl TypedEvent for Timed {
        const TYPE: &'static str = "timed";

        fn schema() -> Option<Value> {
            Some(json!({
                "$schema": "http://json-schema.org/draft-07/schema#",
                "format": "date-time",
            }))
        }
    }

    let later = json!({ "format": "date-time" });
    assert!(compiled(&later).check(br#""soon""#).is_ok());
    let asserted = Timed::schema().unwrap();
    assert!(compiled(&asserted).check(br#""soon""#).is_err());

    let mut schemas = Schemas::new();
    schemas.register_json("timed", 1, &asserted).unwrap();
    let soon = Event::builder("timed").json("soon").build().unwrap();
    assert!(schemas.check_consumed(&soon).is_err());
    schemas.register::<Timed>().unwrap();
    assert!(schemas.check_consumed(&soon).is_ok());

    let mut schemas = Schemas::new();
    schemas.register::<Timed>().unwrap();
    assert!(schemas.check_consumed(&soon).is_ok());
}

// conformance: handlers/schema-conflict: another schema for the same type and version is refused; the same again is harmless.
#[test]
fn a_second_schema_must_be_the_same() {
    let mut schemas = registered();
    schemas.register::<OrderPlaced>().unwrap();
    let error = schemas
        .register_json(OrderPlaced::TYPE, 2, &json!({}))
        .unwrap_err();
    assert_eq!(error.code(), Code::InvalidSchema);
    assert!(error.to_string().contains("orders.order.placed version 2"));
    let kept = schemas.get(OrderPlaced::TYPE, 2).unwrap();
    assert_eq!(kept.json(), &OrderPlaced::schema().unwrap());

    let mut other = Schemas::new();
    other.register_json("x", 1, &json!(true)).unwrap();
    other.merge(&schemas).unwrap();
    other.merge(&schemas).unwrap();
    assert_eq!(other.iter().count(), 2);
    let mut against = Schemas::new();
    against.register_json("x", 1, &json!(false)).unwrap();
    let error = other.merge(&against).unwrap_err();
    assert_eq!(error.code(), Code::InvalidSchema);
}

// conformance: framework/versioning-schemas: each version of an event has its own schema.
#[test]
fn each_version_has_its_own_schema() {
    let mut schemas = Schemas::new();
    let asks_for = |name: &str| json!({ "required": [name] });
    schemas.register_json("t", 1, &asks_for("old")).unwrap();
    schemas.register_json("t", 2, &asks_for("new")).unwrap();
    let check = |version, payload: Value| {
        let event = Event::builder("t").version(version).json(&payload);
        schemas.check_consumed(&event.build().unwrap())
    };
    assert!(check(1, json!({ "old": 1 })).is_ok());
    assert!(check(2, json!({ "new": 1 })).is_ok());
    assert!(check(1, json!({ "new": 1 })).is_err());
    assert!(check(2, json!({ "old": 1 })).is_err());
    assert!(check(3, json!(null)).is_ok(), "nothing is known of it");
}

// conformance: omni/subscribe-validated: a subscriber's own schema is checked before its handler; a violation is a ValidationError.
#[test]
fn a_schema_of_a_subscriber_works_without_being_registered() {
    fn is_shared<T: Clone + Send + Sync + 'static>(_: &T) {}

    let schema = Schema::new("message.received", &json!({ "required": ["messageId"] })).unwrap();
    is_shared(&schema);
    is_shared(&registered());
    assert!(schema.check(br#"{"messageId":"m"}"#).is_ok());
    let error = schema.check(b"{}").unwrap_err();
    assert_eq!(error.code().as_str(), "ValidationError");
    assert!(error.to_string().contains("message.received"), "{error}");
}
