//! Documents of other systems on the command line: published as they are, and printed as others read them.

use everbus::dialects::encode;
use everbus::{Dialect, Event};
use serde_json::{Value, json};

use crate::support::{Shop, exists};

const OMNI: &str = r#"{"type":"message.received","payload":{"text":"hello"},"id":"m-1","timestamp":"2026-01-03T15:22:19.640Z","source":"whatsapp"}"#;

/// A document of each dialect, with the type that stands before it if it needs one.
fn documents() -> Vec<(Dialect, Option<&'static str>, String)> {
    let event = Event::builder("Task Started")
        .tenant("acme")
        .app("pictures")
        .entity("TASK", "req-1")
        .payload(r#"{"n": 1.50}"#)
        .occurred_at("2026-03-01T12:00:00.5Z".parse().unwrap())
        .build()
        .unwrap();
    let written = |dialect| String::from_utf8(encode(&event, dialect).unwrap()).unwrap();
    let cloud =
        r#"{"specversion":"1.0","id":"c-1","source":"/shop","type":"order.placed","data":[1]}"#;
    let framework = r#"{"event_id":"test-1","event_type":"orders.order.placed","event_version":2,"timestamp":"2026-03-01T12:00:00Z","source":"test","correlation_id":"corr-1","trace_id":null,"payload":{"order_id":"ord-123"}}"#;
    let outbox = r#"{"event_id":"e-1","occurred_at":"2026-02-01T00:15:00Z","correlation_id":"e-1","tenant_id":"t","station_id":"s-7","schema_version":1,"payload":{"window":15}}"#;
    vec![
        (Dialect::Omni, None, OMNI.to_owned()),
        (Dialect::CloudEvents, None, cloud.to_owned()),
        (Dialect::Framework, None, framework.to_owned()),
        (
            Dialect::Outbox,
            Some("TelemetryWindowClosed"),
            outbox.to_owned(),
        ),
        (Dialect::Workflow, None, written(Dialect::Workflow)),
        (Dialect::Native, None, written(Dialect::Native)),
    ]
}

/// The document without what the log adds, which must be there.
fn without_added(mut shown: Value, dialect: Dialect) -> Value {
    let fields = shown.as_object_mut().unwrap();
    let mut take = |name: &str| fields.remove(name).unwrap();
    match dialect {
        Dialect::Workflow => {
            let millis = take("receivedAt").as_i64().unwrap();
            assert!(millis > 1_700_000_000_000, "{millis}");
        }
        Dialect::Native => {
            assert!(take("seq").is_u64());
            assert!(take("received_at").is_string());
        }
        _ => {}
    }
    shown
}

// conformance: contract/dialect-cli: publish --dialect takes a whole document, and events, get and tail --dialect print it again
// conformance: workflow/dialect-received-at: receivedAt is added on the way in
#[test]
fn a_document_goes_in_and_comes_out_as_it_was() {
    for (dialect, event_type, document) in documents() {
        let shop = Shop::new();
        let name = dialect.as_str();
        std::fs::write(shop.path("event.json"), &document).unwrap();
        let mut publish = vec!["-o", "json", "publish", "--dialect", name];
        publish.extend(event_type);
        publish.extend(["--payload", "@event.json"]);
        let published = shop.run(&publish).json();
        let id = published["id"].as_str().unwrap();
        let wanted: Value = serde_json::from_str(&document).unwrap();
        let show = |command: &[&str]| {
            let shown = shop.run(&[command, &["--dialect", name]].concat()).json();
            without_added(shown, dialect)
        };
        assert_eq!(show(&["events"]), wanted, "{dialect}");
        assert_eq!(show(&["get", id]), wanted, "{dialect}");
        assert_eq!(show(&["tail", "--no-follow"]), wanted, "{dialect}");
        let tailed = ["tail", "--no-follow", "--from", "first", "--group", "g"];
        assert_eq!(show(&tailed), wanted, "{dialect}");
        let page = shop
            .run(&["-o", "json", "events", "--dialect", name])
            .json();
        assert_eq!(page["next"], Value::Null);
        let shown = without_added(page["events"][0].clone(), dialect);
        assert_eq!(shown, wanted, "{dialect}");
        // The same document again is the same event.
        assert_eq!(shop.run(&publish).json()["duplicate"], true, "{dialect}");
    }
}

// conformance: contract/dialect-cli: documents come as an argument, from a file, or one per line of standard input
#[test]
fn documents_come_from_where_payloads_come_from() {
    let shop = Shop::new();
    let numbered = |n: u32| OMNI.replace("m-1", &format!("m-{n}"));
    let omni = ["publish", "--dialect", "omni"];
    let inline = shop.run(&[&omni[..], &[&numbered(1)]].concat()).ok();
    assert!(inline.contains("(m-1) at 1"), "{inline}");
    let second = numbered(2);
    shop.run(&[&omni[..], &["message.received", &second]].concat())
        .ok();
    let all = [&omni[..], &["--payload", "@-"]].concat();
    shop.run_with_input(&all, &numbered(3)).ok();
    let lines = [&omni[..], &["-"]].concat();
    let input = format!("{}\n\n{}\n", numbered(4), numbered(5));
    let out = shop.run_with_input(&lines, &input).ok();
    assert!(out.contains("published 2 events"), "{out}");
    // A bad line ends it with its number; what came before is stored.
    let input = format!("{}\n{{\"type\":7}}\n{}\n", numbered(6), numbered(7));
    let bad = shop
        .run_with_input(&lines, &input)
        .failed(2, "InvalidAttribute");
    assert!(
        bad.contains("line 2: omni document, field \"source\""),
        "{bad}"
    );
    let shown = shop
        .run(&["events", "--order", "oldest", "--dialect", "omni"])
        .lines();
    let ids: Vec<&str> = shown.iter().map(|d| d["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["m-1", "m-2", "m-3", "m-4", "m-5", "m-6"]);
}

// conformance: contract/dialect-bad-input: what cannot be read is refused by name, and no file is made
#[test]
fn wrong_documents_and_dialects_are_refused_by_name() {
    let shop = Shop::new();
    let publish = |dialect: &str, document: &str| {
        shop.run(&["publish", "--dialect", dialect, "--payload", document])
    };
    let said = publish("omni", "{").failed(2, "InvalidPayloadError");
    assert!(said.contains("the omni document cannot be read"), "{said}");
    assert!(
        said.contains("hint: a document is one JSON object"),
        "{said}"
    );
    publish("omni", "[1]").failed(2, "InvalidPayloadError");
    let said = publish("framework", r#"{"event_id":"e"}"#).failed(2, "InvalidAttribute");
    assert!(said.contains("field \"source\": it is missing"), "{said}");
    let outbox = r#"{"event_id":"e-1","occurred_at":"2026-02-01T00:15:00Z","payload":{}}"#;
    let said = publish("outbox", outbox).failed(2, "InvalidType");
    assert!(
        said.contains("hint: give the type before the document"),
        "{said}"
    );
    let misused = |arguments: &[&str], said: &str| {
        let ran = shop.run(&[&["publish"], arguments].concat());
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(said), "{said}: {ran:?}");
    };
    misused(&["--dialect", "omnii", OMNI], "\"omnii\" is not a dialect");
    misused(&["--dialect", "omnii", OMNI], "did you mean \"omni\"?");
    misused(&["--dialect", "omni"], "there is no document");
    misused(
        &["--dialect", "omni", OMNI, "--tenant", "t"],
        "cannot be used with",
    );
    misused(&[], "<TYPE>");
    let other = ["publish", "--dialect", "omni", "order.placed", OMNI];
    let said = shop.run(&other).failed(2, "InvalidType");
    assert!(said.contains("\"order.placed\""), "{said}");
    assert!(!exists(&shop.db()), "nothing was made for a mistake");
}

// conformance: contract/dialect-dropped: what a dialect has no place for is said; what it cannot say is left out with a reason
#[test]
fn what_a_dialect_cannot_carry_is_said() {
    let shop = Shop::new();
    let publish = ["publish", "order.placed", r#"{"n":1}"#, "--tenant", "acme"];
    shop.run(&[&publish[..], &["--id", "order-1", "--source", "shop"]].concat())
        .ok();
    shop.run(&publish).ok();
    shop.run(&["publish", "order.noted", "7", "--id", "number"])
        .ok();
    let ran = shop.run(&["events", "--order", "oldest", "--dialect", "framework"]);
    assert_eq!(ran.code, 1, "not everything is there: {ran:?}");
    let tenant = "the framework dialect has no place for tenant; it is left out";
    assert_eq!(
        ran.err.matches(tenant).count(),
        1,
        "once is enough: {ran:?}"
    );
    assert!(
        ran.err.contains("number is left out: Unsupported"),
        "{ran:?}"
    );
    let shown: Vec<Value> = ran
        .out
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(shown.len(), 2);
    assert_eq!(shown[0]["event_id"], "order-1");
    assert_eq!(shown[0]["payload"], json!({ "n": 1 }));
    let get = ["get", "number", "--dialect", "framework"];
    let said = shop.run(&get).failed(1, "Unsupported");
    assert!(said.contains("JSON object"), "{said}");
    // A group would count it as handled, so it ends the tail, and the group keeps it.
    let tail = ["tail", "--no-follow", "--from", "first", "--group", "g"];
    let ran = shop.run(&[&tail[..], &["--dialect", "framework"]].concat());
    ran.failed(1, "Unsupported");
    let rest = shop
        .run(&[&tail[..], &["--dialect", "native"]].concat())
        .lines();
    assert_eq!(rest.last().unwrap()["foreign_id"], "number");
    let page = shop.run(&[
        "events",
        "--order",
        "oldest",
        "--limit",
        "1",
        "--dialect",
        "omni",
    ]);
    assert!(page.err.contains("more: everbus"), "{page:?}");
    assert!(page.err.contains("--dialect omni"), "{page:?}");
}
