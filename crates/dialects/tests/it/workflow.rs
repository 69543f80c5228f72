//! The document of the *workflow* specification.

use everbus_core::{Code, Event, Timestamp};
use everbus_dialects::workflow::{Keys, Overflow, Properties, seconds};
use everbus_dialects::{Dialect, decode, encode};

use crate::support::{refused, round, value, with};

/// The example of the specification.
const SAMPLE: &str = r##"{
  "PK":     "TENANT#gbinnovations",
  "SK":     "TIMESTAMP#1767453739640#EVENT#ddf71f63-b036-4ac7-ad0f-77a7fdfca352",
  "GSI1PK": "TASK#req-123",
  "GSI1SK": "TASK#TIMESTAMP#1767453739640",
  "GSI2PK": "APP#task-workflow",
  "GSI2SK": "TIMESTAMP#1767453739640",
  "GSI3PK": "APP#task-workflow",
  "GSI3SK": "TASK#req-123#TIMESTAMP#1767453739640",
  "GSI4PK": "EVENT#Task Processing Started",
  "GSI4SK": "TENANT#gbinnovations#TIMESTAMP#1767453739640",
  "GSI5PK": "EVENT#Task Processing Started",
  "GSI5SK": "TENANT#gbinnovations#TASK#req-123#TIMESTAMP#1767453739640",
  "GSI6PK": "EVENT#Task Processing Started",
  "GSI6SK": "TENANT#gbinnovations#APP#task-workflow#TIMESTAMP#1767453739640",
  "GSI7PK": "EVENT#Task Processing Started",
  "GSI7SK": "TENANT#gbinnovations#APP#task-workflow#TASK#req-123#TIMESTAMP#1767453739640",
  "entityId": "req-123",
  "entityType": "TASK",
  "tenantId": "gbinnovations",
  "eventType": "Task Processing Started",
  "timestamp": 1767453739640,
  "context": {
    "source": "system",
    "environment": "prod",
    "origin": "sqs-worker",
    "workerId": "worker-abc123"
  },
  "properties": {
    "requestId": "req-123",
    "startedAt": 1767453739640
  }
}"##;

fn native() -> everbus_core::EventBuilder {
    let id: everbus_core::EventId = "ddf71f63-b036-4ac7-ad0f-77a7fdfca352".parse().unwrap();
    Event::builder("Task Processing Started")
        .id(id)
        .occurred_at(Timestamp::from_micros(1_767_453_739_640_000))
        .tenant("gbinnovations")
        .app("task-workflow")
        .entity("TASK", "req-123")
        .meta(
            "context",
            r#"{"source":"system","environment":"prod","origin":"sqs-worker","workerId":"worker-abc123"}"#,
        )
        .payload(r#"{"requestId":"req-123","startedAt":1767453739640}"#)
}

// conformance: workflow/dialect-keys: PK, SK and GSI1 to GSI7 are computed by the sender as specified
// conformance: workflow/dialect-structure: the structure of an event, from the example of the document
// conformance: memory/dialect-workflow: golden test from the document's own example
#[test]
fn a_native_event_becomes_the_example_of_the_document() {
    let document = encode(&native().build().unwrap(), Dialect::Workflow).unwrap();
    assert_eq!(value(&document), value(SAMPLE.as_bytes()));
}

#[test]
fn the_example_of_the_document_is_read() {
    let event = round(SAMPLE, Dialect::Workflow);
    let expected = native().payload(event.payload().clone()).build().unwrap();
    assert_eq!(event, expected);
}

// conformance: workflow/ttl: TTL on the `ttl` attribute, in seconds since 1970
#[test]
fn the_ttl_is_when_the_event_expires() {
    let document = SAMPLE.replacen('{', r#"{"ttl": 1770045739,"#, 1);
    let event = round(&document, Dialect::Workflow);
    let expires = event.attributes().unwrap().expires_at;
    assert_eq!(expires, Some(Timestamp::from_micros(1_770_045_739_000_000)));
    assert!(!event.metadata().contains_key("workflow:ttl"));
    // A part of a second counts as a whole one: never earlier than the event says.
    let late = native().expires_at(Timestamp::from_micros(1_770_045_738_000_001));
    let document = encode(&late.build().unwrap(), Dialect::Workflow).unwrap();
    let document = String::from_utf8(document.to_vec()).unwrap();
    assert!(document.contains(r#""ttl":1770045739"#), "{document}");
    for wrong in ["-1", "1.5", "\"soon\"", "99999999999999"] {
        let document = SAMPLE.replacen('{', &format!(r#"{{"ttl": {wrong},"#), 1);
        let error = decode(document.as_bytes(), Dialect::Workflow).unwrap_err();
        assert!(error.to_string().contains("ttl"), "{error}");
    }
}

// conformance: workflow/dialect-entity-types: the prefix of the keys is the type of the entity
#[test]
fn the_prefix_of_the_keys_is_the_type_of_the_entity() {
    for kind in ["TASK", "JOB", "STORE"] {
        let event = native().entity(kind, "x-1").build().unwrap();
        let keys = Keys::of(&event).unwrap();
        assert_eq!(keys.get("GSI1PK").unwrap(), format!("{kind}#x-1"));
        assert_eq!(
            keys.get("GSI1SK").unwrap(),
            format!("{kind}#TIMESTAMP#1767453739640")
        );
        let document = String::from_utf8(encode(&event, Dialect::Workflow).unwrap()).unwrap();
        round(&document, Dialect::Workflow);
    }
}

// conformance: workflow/dialect-sparse: events without app or entity have no keys in the indexes that need them
#[test]
fn without_app_or_entity_the_indexes_that_need_them_have_no_keys() {
    let bare = Event::builder("Task Health Check")
        .tenant("t")
        .json(&serde_json::json!({"summary": {}}));
    let names = |event: &Event| -> Vec<&'static str> {
        let keys = Keys::of(event).unwrap();
        keys.iter().map(|(name, _)| name).collect()
    };
    let event = bare.clone().build().unwrap();
    assert_eq!(names(&event), ["PK", "SK", "GSI4PK", "GSI4SK"]);
    let app = bare.clone().app("a").build().unwrap();
    let expected = [
        "PK", "SK", "GSI2PK", "GSI2SK", "GSI4PK", "GSI4SK", "GSI6PK", "GSI6SK",
    ];
    assert_eq!(names(&app), expected);
    let entity = bare.entity("JOB", "j").build().unwrap();
    let expected = [
        "PK", "SK", "GSI1PK", "GSI1SK", "GSI4PK", "GSI4SK", "GSI5PK", "GSI5SK",
    ];
    assert_eq!(names(&entity), expected);
    for event in [event, app, entity] {
        let document = String::from_utf8(encode(&event, Dialect::Workflow).unwrap()).unwrap();
        let back = round(&document, Dialect::Workflow);
        assert_eq!(back.attributes(), event.attributes());
    }
}

// conformance: workflow/dialect-wrong-keys: senders compute everything, so a document with wrong keys is refused
#[test]
fn a_document_with_wrong_or_missing_keys_is_refused_by_the_name_of_the_key() {
    for name in everbus_dialects::workflow::KEY_NAMES {
        let place = format!("field {name:?}");
        let wrong = with(SAMPLE, name, Some("\"TENANT#other\""));
        refused(&wrong, Dialect::Workflow, Code::InvalidAttribute, &place);
        let missing = with(SAMPLE, name, None);
        let e = decode(missing.as_bytes(), Dialect::Workflow).unwrap_err();
        assert_eq!(e.code(), Code::InvalidAttribute, "{name}");
    }
    // Keys of another tenant do not come in by way of the fields either.
    let other = with(SAMPLE, "tenantId", Some("\"other\""));
    refused(
        &other,
        Dialect::Workflow,
        Code::InvalidAttribute,
        "TENANT#other",
    );
    let later = with(SAMPLE, "timestamp", Some("1767453739641"));
    refused(&later, Dialect::Workflow, Code::InvalidAttribute, "\"SK\"");
    // An index that the event has no part in.
    let bare = with(&with(SAMPLE, "entityId", None), "entityType", None);
    refused(
        &bare,
        Dialect::Workflow,
        Code::InvalidAttribute,
        "\"GSI1PK\"",
    );
}

#[test]
fn a_hash_in_a_part_of_a_key_is_refused_both_ways() {
    for event in [
        native().tenant("a#TIMESTAMP#1"),
        native().app("a#b"),
        native().entity("TA#SK", "1"),
        native().entity("TASK", "1#TIMESTAMP#2"),
        native().entity("", "1"),
    ] {
        let event = event.build().unwrap();
        let e = encode(&event, Dialect::Workflow).unwrap_err();
        assert_eq!(e.code(), Code::InvalidAttribute);
        assert!(e.hint_text().unwrap().contains('#'));
    }
    let replaced = SAMPLE.replace("gbinnovations", "gb#innovations");
    refused(
        &replaced,
        Dialect::Workflow,
        Code::InvalidAttribute,
        "gb#innovations",
    );
}

#[test]
fn what_has_no_place_in_the_table_is_refused() {
    let refused = |event: everbus_core::EventBuilder, word: &str| {
        let e = encode(&event.build().unwrap(), Dialect::Workflow).unwrap_err();
        assert_eq!(e.code(), Code::Unsupported);
        assert!(e.message().contains(word), "{e}");
    };
    let bare = || Event::builder("T").json(&serde_json::json!({}));
    refused(bare(), "tenant");
    refused(
        bare().tenant("t").occurred_at(Timestamp::from_micros(-1)),
        "1970",
    );
    refused(bare().tenant("t").version(2), "version 2");
    refused(native().payload("[1]"), "object");
    refused(native().payload("x").content_type("text/plain"), "JSON");
}

// conformance: workflow/dialect-received-at: receivedAt, which the consumer adds, is kept
#[test]
fn what_the_consumer_adds_is_kept() {
    let document = with(SAMPLE, "receivedAt", Some("1767453739701"));
    let event = round(&document, Dialect::Workflow);
    assert_eq!(event.metadata()["workflow:receivedAt"], "1767453739701");
}

// conformance: workflow/dialect-context: the context lives in the metadata
#[test]
fn a_context_is_any_object_or_none() {
    let event = round(&with(SAMPLE, "context", None), Dialect::Workflow);
    assert!(event.metadata().is_empty());
    let nested = r#"{"source": "system", "retries": 3, "tags": ["a", {"b": 1.0}]}"#;
    let event = round(&with(SAMPLE, "context", Some(nested)), Dialect::Workflow);
    let kept: serde_json::Value = serde_json::from_str(&event.metadata()["context"]).unwrap();
    assert_eq!(kept, value(nested.as_bytes()));
    let text = with(SAMPLE, "context", Some("\"prod\""));
    refused(
        &text,
        Dialect::Workflow,
        Code::InvalidAttribute,
        "\"context\"",
    );
    // Metadata of that name need not be one.
    let event = native().meta("context", "checkout").build().unwrap();
    let document = value(&encode(&event, Dialect::Workflow).unwrap());
    assert_eq!(document.get("context"), None);
}

// conformance: workflow/dialect-times: timestamp is in milliseconds, effectiveUntil and lastActivity.timestamp are in seconds
#[test]
fn the_timestamp_is_in_milliseconds_and_times_in_the_properties_in_seconds() {
    let heartbeat = r#"{
      "requestId": "req-123", "effectiveUntil": 1707300645, "heartbeatNumber": 3,
      "lastActivity": {"type": "step_running", "stepName": "color-tags", "timestamp": 1707300540}
    }"#;
    let event = round(
        &with(SAMPLE, "properties", Some(heartbeat)),
        Dialect::Workflow,
    );
    assert_eq!(
        event.occurred_at().to_string(),
        "2026-01-03T15:22:19.640000Z"
    );
    let properties = Properties::of(&event).unwrap();
    let at = |text: &str| Some(text.parse::<Timestamp>().unwrap());
    assert_eq!(properties.effective_until, at("2024-02-07T10:10:45Z"));
    assert_eq!(properties.last_activity, at("2024-02-07T10:09:00Z"));
    assert_eq!(seconds(properties.effective_until.unwrap()), 1_707_300_645);
    // Half a second, as 1.5 times an odd number gives it; and milliseconds by mistake.
    let half = native()
        .payload(r#"{"effectiveUntil":1707300645.5}"#)
        .build()
        .unwrap();
    let until = Properties::of(&half).unwrap().effective_until;
    assert_eq!(until, at("2024-02-07T10:10:45.5Z"));
    for wrong in ["1707300645000", "-1", "1e300"] {
        let payload = format!("{{\"effectiveUntil\":{wrong}}}");
        let e = Properties::of(&native().payload(payload).build().unwrap()).unwrap_err();
        assert_eq!(e.code(), Code::InvalidPayloadError, "{wrong}");
    }
}

// conformance: workflow/dialect-overflow: _s3Overflow {bucket, key} stands in the properties
#[test]
fn the_reference_to_an_overflow_object_stays_in_the_properties() {
    let key = "events/req-123/ddf71f63-b036-4ac7-ad0f-77a7fdfca352-payload.json";
    let properties =
        format!(r#"{{"requestId":"req-123","_s3Overflow":{{"bucket":"b","key":"{key}"}}}}"#);
    let event = round(
        &with(SAMPLE, "properties", Some(&properties)),
        Dialect::Workflow,
    );
    let found = Properties::of(&event).unwrap().overflow;
    let expected = Overflow {
        bucket: "b".into(),
        key: key.into(),
    };
    assert_eq!(found, Some(expected));
}

// conformance: workflow/overflow-reference: large fields are left out of the properties, and _s3Overflow {bucket, key} says where they are
#[test]
fn large_fields_are_replaced_by_a_reference() {
    let key = "events/req-123/ddf71f63-b036-4ac7-ad0f-77a7fdfca352-payload.json";
    let reference = |fields: &[&str]| everbus_core::Overflow {
        bucket: "b".into(),
        key: key.into(),
        size: 9,
        sha256: String::new(),
        payload_size: 9,
        payload_sha256: String::new(),
        parts: fields
            .iter()
            .map(|field| everbus_core::OverflowPart {
                field: (*field).into(),
                at: 0,
                from: 0,
                len: 0,
            })
            .collect(),
    };
    let event = native().build().unwrap();
    let properties = |payload: &'static str, fields: &[&str]| {
        let event = event
            .clone()
            .with_overflow(payload.into(), reference(fields));
        let document = encode(&event, Dialect::Workflow).unwrap();
        let document: serde_json::Value = serde_json::from_slice(&document).unwrap();
        let again = decode(document.to_string().as_bytes(), Dialect::Workflow).unwrap();
        let found = Properties::of(&again).unwrap().overflow.unwrap();
        assert_eq!((found.bucket.as_str(), found.key.as_str()), ("b", key));
        let mut properties = document["properties"].clone();
        properties.as_object_mut().unwrap().remove("_s3Overflow");
        properties.to_string()
    };
    let travels =
        r#" { "requestId" : "req-123", "outputs":null,"in\u0070ut" : null,"output":null } "#;
    let left = properties(travels, &["outputs", "input"]);
    assert_eq!(left, r#"{"output":null,"requestId":"req-123"}"#);
    assert_eq!(properties("null", &[]), "{}", "all of it moved");

    let event = event.with_overflow("null".into(), reference(&[]));
    for dialect in [Dialect::Native, Dialect::Omni, Dialect::CloudEvents] {
        let error = encode(&event, dialect).unwrap_err();
        assert_eq!(error.code(), Code::Unsupported, "{dialect}");
        assert!(error.to_string().contains("object store"), "{error}");
    }
}

#[test]
fn mistakes_are_refused_by_the_name_of_their_field() {
    for (field, json) in [
        ("timestamp", Some("1767453739640.5")),
        ("timestamp", Some("\"1767453739640\"")),
        ("timestamp", Some("18446744073709551615")),
        ("timestamp", None),
        ("tenantId", None),
        ("eventType", None),
        ("entityId", None),
        ("entityType", Some("7")),
        ("properties", None),
    ] {
        let place = format!("field {field:?}");
        let document = with(SAMPLE, field, json);
        refused(&document, Dialect::Workflow, Code::InvalidAttribute, &place);
    }
    let list = with(SAMPLE, "properties", Some("[]"));
    refused(
        &list,
        Dialect::Workflow,
        Code::InvalidPayloadError,
        "\"properties\"",
    );
    let no_id = with(SAMPLE, "SK", Some("\"TIMESTAMP#1767453739640#EVENT#\""));
    refused(&no_id, Dialect::Workflow, Code::InvalidAttribute, "\"SK\"");
}

#[test]
fn ids_that_are_no_uuids_stand_in_the_sort_key() {
    let document = SAMPLE.replace("ddf71f63-b036-4ac7-ad0f-77a7fdfca352", "evt#7");
    let event = round(&document, Dialect::Workflow);
    assert_eq!(event.display_id(), "evt#7");
}
