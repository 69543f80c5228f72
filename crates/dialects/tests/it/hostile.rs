//! Input from outside: whatever it is, it is read or refused, and nothing panics.

use everbus_core::Code;
use everbus_dialects::cloudevents::{from_http, to_http};
use everbus_dialects::{Dialect, decode, decode_beside, dropped, encode};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use crate::documents::{any_json, beside_of, documents, text};
use crate::support::exact;

const NAMES: &[&str] = &[
    "id",
    "type",
    "source",
    "time",
    "data",
    "data_base64",
    "datacontenttype",
    "specversion",
    "payload",
    "payload_text",
    "payload_hex",
    "content_type",
    "metadata",
    "entity",
    "trace",
    "foreign_id",
    "event_id",
    "event_type",
    "event_version",
    "occurred_at",
    "schema_version",
    "timestamp",
    "correlation_id",
    "tenant_id",
    "tenantId",
    "trace_id",
    "PK",
    "SK",
    "GSI2PK",
    "eventType",
    "entityId",
    "entityType",
    "context",
    "properties",
    "\u{0}",
    "ä",
    "",
];

/// Whatever is accepted must come back as it was.
fn accepted_comes_back(document: &[u8], dialect: Dialect) -> Result<(), TestCaseError> {
    match decode_beside(document, dialect, &beside_of(dialect)) {
        Ok(event) => {
            let again = encode(&event, dialect).unwrap();
            prop_assert_eq!(exact(&again), exact(document));
            for other in Dialect::ALL {
                // May be refused, must not panic.
                let _ = (encode(&event, *other), dropped(&event, *other));
            }
            if dialect == Dialect::CloudEvents {
                let _ = to_http(&event);
            }
        }
        Err(e) => {
            let codes = [
                Code::InvalidPayloadError,
                Code::InvalidAttribute,
                Code::InvalidType,
                Code::InvalidId,
                Code::Unsupported,
            ];
            prop_assert!(codes.contains(&e.code()), "{}", e);
            prop_assert!(e.message().contains(dialect.as_str()), "{}", e);
            prop_assert!(
                !e.message().chars().any(char::is_control),
                "{:?}",
                e.message()
            );
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    // conformance: memory/dialect-no-panic: whatever the input is, it is read or refused
    #[test]
    fn arbitrary_bytes(bytes in vec(any::<u8>(), 0..64), dialect in select(Dialect::ALL)) {
        accepted_or_not_json(&bytes, dialect)?;
    }

    // conformance: memory/dialect-no-panic: what is accepted comes back
    #[test]
    fn arbitrary_fields(
        fields in vec((select(NAMES), any_json()), 0..10),
        dialect in select(Dialect::ALL),
    ) {
        let fields = fields.into_iter().map(|(name, json)| (name.to_owned(), json)).collect();
        accepted_comes_back(text(&fields, false).as_bytes(), dialect)?;
    }

    // conformance: memory/dialect-no-panic: what is accepted comes back
    #[test]
    fn valid_documents_with_one_field_replaced(
        (dialect, mut document) in documents(),
        at: prop::sample::Index,
        json in any_json(),
    ) {
        let at = at.index(document.len());
        document[at].1 = json;
        accepted_comes_back(text(&document, true).as_bytes(), dialect)?;
    }

    // conformance: memory/dialect-no-panic: what is accepted comes back
    #[test]
    fn valid_documents_of_another_dialect((_, document) in documents(), dialect in select(Dialect::ALL)) {
        accepted_comes_back(text(&document, false).as_bytes(), dialect)?;
    }

    // conformance: memory/dialect-no-panic: what is accepted comes back
    #[test]
    fn valid_documents_with_one_byte_changed_or_cut_off(
        (dialect, document) in documents(),
        at: prop::sample::Index,
        byte: u8,
        cut: bool,
    ) {
        let mut bytes = text(&document, false).into_bytes();
        let at = at.index(bytes.len());
        if cut {
            bytes.truncate(at);
        } else {
            bytes[at] = byte;
        }
        accepted_or_not_json(&bytes, dialect)?;
    }

    #[test]
    fn arbitrary_headers(
        headers in vec(("(ce-)?[a-zA-Z-]{0,8}|ce-(id|source|type|specversion)|content-type", ".{0,12}"), 0..8),
        body in vec(any::<u8>(), 0..16),
    ) {
        if let Ok(event) = from_http(&headers, &body) {
            to_http(&event).unwrap();
        }
    }
}

fn accepted_or_not_json(bytes: &[u8], dialect: Dialect) -> Result<(), TestCaseError> {
    if decode_beside(bytes, dialect, &beside_of(dialect)).is_ok() {
        accepted_comes_back(bytes, dialect)?;
    }
    Ok(())
}

// conformance: memory/dialect-deep: nesting does not exhaust the stack
#[test]
fn deep_nesting_is_carried_or_refused_but_does_not_overflow() {
    let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
    let base = r#""id":"1","type":"t","source":"s","timestamp":"2026-03-01T12:00:00Z""#;
    let payload = format!("{{{base},\"payload\":{deep}}}");
    let event = decode(payload.as_bytes(), Dialect::Omni).unwrap();
    assert_eq!(event.payload().len(), deep.len());
    assert!(
        event.json::<serde_json::Value>().is_err(),
        "the reader's limit holds"
    );
    let unknown = format!("{{{base},\"payload\":1,\"x\":{deep}}}");
    let e = decode(unknown.as_bytes(), Dialect::Omni).unwrap_err();
    assert_eq!(e.code(), Code::InvalidAttribute, "{e}");
    for field in ["id", "type", "source", "timestamp", "traceId"] {
        let document = format!("{{\"payload\":1,\"{field}\":{deep}}}");
        assert!(decode(document.as_bytes(), Dialect::Omni).is_err());
    }
    let context = format!("{{\"a\":{deep}}}");
    for (dialect, field) in [(Dialect::Native, "entity"), (Dialect::Native, "metadata")] {
        let document = format!("{{{base},\"{field}\":{context}}}");
        assert!(decode(document.as_bytes(), dialect).is_err());
    }
}

#[test]
fn very_many_fields_are_refused_early() {
    let many: Vec<String> = (0..10_000).map(|n| format!("\"f{n}\":1")).collect();
    let document = format!("{{{}}}", many.join(","));
    let e = decode(document.as_bytes(), Dialect::Omni).unwrap_err();
    assert_eq!(e.code(), Code::InvalidPayloadError);
    assert!(e.message().contains("more than 4096 fields"), "{e}");
}
