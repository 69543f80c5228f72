//! Valid documents of every dialect, in all their spellings.

use everbus_dialects::{Beside, Dialect};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

/// A document as a list of fields and their JSON.
pub(crate) type Document = Vec<(String, String)>;

/// What stands beside every document of these tests.
pub(crate) fn beside() -> Beside<'static> {
    Beside {
        event_type: Some("Some Type"),
        source: None,
        time: Some(everbus_core::Timestamp::from_micros(1_700_000_000_000_001)),
    }
}

/// The document as text. `spaced` puts spaces and line ends between its parts.
pub(crate) fn text(document: &Document, spaced: bool) -> String {
    let (open, colon, comma) = if spaced {
        ("{\n ", " : ", " ,\n\t")
    } else {
        ("{", ":", ",")
    };
    let fields = document
        .iter()
        .map(|(name, json)| format!("{}{colon}{json}", Value::from(name.as_str())));
    format!("{open}{}}}", fields.collect::<Vec<_>>().join(comma))
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Any JSON, nested, with odd numbers and odd strings, written in odd ways.
pub(crate) fn any_json() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        select(vec![
            "null",
            "true",
            "0",
            "-0",
            "1.50",
            "1e400",
            "123456789012345678901234567890"
        ])
        .prop_map(str::to_owned),
        select(vec!["\"\\u00e9\\/\"", "\"\\n\\u0000\"", "\" { \\\" : \""]).prop_map(str::to_owned),
        ".{0,8}".prop_map(|text| quoted(&text)),
        any::<i64>().prop_map(|number| number.to_string()),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(|items| format!("[{}]", items.join(" , "))),
            btree_map(".{0,6}", inner, 0..4)
                .prop_map(|fields| text(&fields.into_iter().collect(), true)),
        ]
    })
}

pub(crate) fn any_object() -> impl Strategy<Value = String> {
    btree_map(".{0,6}", any_json(), 0..4)
        .prop_map(|fields| text(&fields.into_iter().collect(), true))
}

/// A text that an attribute may be, as JSON.
fn attribute() -> impl Strategy<Value = String> {
    "[^\\p{C}]{1,12}".prop_map(|text| quoted(&text))
}

/// A text, or one of the ways to say nothing.
fn maybe(strategy: impl Strategy<Value = String> + 'static) -> BoxedStrategy<Option<String>> {
    prop_oneof![
        2 => strategy.prop_map(Some),
        1 => Just(None),
        1 => Just(Some("null".to_owned())),
        1 => Just(Some("\"\"".to_owned())),
    ]
    .boxed()
}

fn id() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<u128>().prop_map(|n| quoted(&uuid_text(n))),
        any::<u128>().prop_map(|n| quoted(&uuid_text(n).to_uppercase())),
        any::<u128>().prop_map(|n| quoted(&uuid_text(n).replace('-', ""))),
        attribute(),
    ]
}

fn uuid_text(n: u128) -> String {
    everbus_core::EventId::from_bytes(n.to_be_bytes()).to_string()
}

fn event_type() -> impl Strategy<Value = String> {
    select(vec![
        "orders.order.placed",
        "Task Completed",
        "größe",
        "a..b",
    ])
    .prop_map(quoted)
}

/// RFC 3339 in its many spellings.
fn time() -> impl Strategy<Value = String> {
    let second = (
        0..9999_u32,
        1..=12_u32,
        1..=28_u32,
        0..24_u32,
        0..60_u32,
        0..=60_u32,
    );
    let fraction = prop_oneof![Just(String::new()), "\\.[0-9]{1,9}"];
    let offset = select(vec!["Z", "z", "+00:00", "-00:00", "+02:00", "-11:30"]);
    (second, fraction, offset, select(vec!['T', 't']))
        .prop_map(|((y, mo, d, h, mi, s), fraction, offset, t)| {
            format!("{y:04}-{mo:02}-{d:02}{t}{h:02}:{mi:02}:{s:02}{fraction}{offset}")
        })
        // Year 0 in the west is year -1 in UTC.
        .prop_filter("in range", |text| text.as_str() >= "0001")
        .prop_map(|text| quoted(&text))
}

fn version() -> impl Strategy<Value = Option<String>> {
    prop_oneof![
        (1..=u32::MAX).prop_map(|n| Some(n.to_string())),
        Just(Some("1".to_owned())),
        Just(Some("null".to_owned())),
        Just(None),
    ]
}

fn trace_id() -> BoxedStrategy<Option<String>> {
    maybe(prop_oneof![
        "[0-9a-f]{32}".prop_map(|text| quoted(&text)),
        "[0-9A-F]{32}".prop_map(|text| quoted(&text)),
        Just(quoted("00000000000000000000000000000000")),
        attribute(),
    ])
}

/// Unknown fields.
fn unknown() -> impl Strategy<Value = Document> {
    btree_map("[^\\p{C}]{0,5}:?", any_json(), 0..4).prop_map(|fields| fields.into_iter().collect())
}

fn fields(known: Vec<(&str, Option<String>)>, unknown: Document) -> Document {
    let known = known
        .into_iter()
        .filter_map(|(name, json)| Some((name.to_owned(), json?)));
    let mut document: Document = known.collect();
    for (name, json) in unknown {
        if document.iter().all(|(other, _)| *other != name) && !RESERVED.contains(&name.as_str()) {
            document.push((name, json));
        }
    }
    document
}

/// Short names of known fields that could be made by chance.
const RESERVED: &[&str] = &[
    "id", "type", "key", "app", "PK", "SK", "time", "data", "trace",
];

fn omni() -> impl Strategy<Value = Document> {
    let optional = (trace_id(), maybe(attribute()));
    (
        event_type(),
        any_json(),
        id(),
        time(),
        attribute(),
        optional,
        unknown(),
    )
        .prop_map(
            |(kind, payload, id, at, source, (trace, replay), unknown)| {
                let known = vec![
                    ("type", Some(kind)),
                    ("payload", Some(payload)),
                    ("id", Some(id)),
                    ("timestamp", Some(at)),
                    ("source", Some(source)),
                    ("traceId", trace),
                    ("replayOf", replay),
                ];
                fields(known, unknown)
            },
        )
}

fn outbox() -> impl Strategy<Value = Document> {
    let texts = (maybe(attribute()), maybe(attribute()), maybe(attribute()));
    let event_type = select(vec![
        None,
        Some("null".to_owned()),
        Some(quoted("Some Type")),
    ]);
    (
        id(),
        time(),
        texts,
        version(),
        any_json(),
        event_type,
        unknown(),
    )
        .prop_map(
            |(id, at, (correlation, tenant, station), version, payload, kind, unknown)| {
                let known = vec![
                    ("event_id", Some(id)),
                    ("occurred_at", Some(at)),
                    ("correlation_id", correlation),
                    ("tenant_id", tenant),
                    ("station_id", station),
                    ("schema_version", version),
                    ("payload", Some(payload)),
                    ("event_type", kind),
                ];
                fields(known, unknown)
            },
        )
}

fn framework() -> impl Strategy<Value = Document> {
    let naive = "20[0-9]{2}-0[1-9]-1[0-9]T1[0-9]:[0-5][0-9]:[0-5][0-9](\\.[0-9]{6})?";
    let at = prop_oneof![time(), naive.prop_map(|text| quoted(&text))];
    let correlation = prop_oneof![3 => attribute(), 1 => Just(quoted(""))];
    let texts = (attribute(), correlation, trace_id());
    (
        id(),
        event_type(),
        version(),
        at,
        texts,
        any_object(),
        unknown(),
    )
        .prop_map(
            |(id, kind, version, at, (source, correlation, trace), payload, unknown)| {
                let known = vec![
                    ("event_id", Some(id)),
                    ("event_type", Some(kind)),
                    ("event_version", version),
                    ("timestamp", Some(at)),
                    ("source", Some(source)),
                    ("correlation_id", Some(correlation)),
                    ("trace_id", trace),
                    ("payload", Some(payload)),
                ];
                fields(known, unknown)
            },
        )
}

fn workflow() -> impl Strategy<Value = Document> {
    let part = || "[^\\p{C}#]{1,8}";
    let entity = proptest::option::of((part(), part()));
    let parts = (
        part(),
        proptest::option::of(part()),
        entity,
        0..200_000_000_000_000_u64,
    );
    let id = id().prop_map(|json| serde_json::from_str::<String>(&json).unwrap());
    let context = prop_oneof![
        any_object().prop_map(Some),
        Just(None),
        Just(Some("null".into()))
    ];
    (parts, id, context, any_object(), unknown()).prop_map(
        |((tenant, app, entity, ms), id, context, properties, unknown)| {
            let kind = "Task Completed";
            let (time, tenant_key) = (format!("TIMESTAMP#{ms}"), format!("TENANT#{tenant}"));
            let e = entity.as_ref().map(|(kind, id)| format!("{kind}#{id}"));
            let a = app.as_ref().map(|app| format!("APP#{app}"));
            let both = e.as_ref().zip(a.as_ref());
            let event = quoted(&format!("EVENT#{kind}"));
            let q = |text: String| Some(quoted(&text));
            let known = vec![
                ("PK", q(tenant_key.clone())),
                ("SK", q(format!("{time}#EVENT#{id}"))),
                ("GSI1PK", e.clone().and_then(q)),
                (
                    "GSI1SK",
                    entity
                        .as_ref()
                        .and_then(|(kind, _)| q(format!("{kind}#{time}"))),
                ),
                ("GSI2PK", a.clone().and_then(q)),
                ("GSI2SK", a.as_ref().and_then(|_| q(time.clone()))),
                ("GSI3PK", both.and_then(|(_, a)| q(a.clone()))),
                ("GSI3SK", both.and_then(|(e, _)| q(format!("{e}#{time}")))),
                ("GSI4PK", Some(event.clone())),
                ("GSI4SK", q(format!("{tenant_key}#{time}"))),
                ("GSI5PK", e.as_ref().map(|_| event.clone())),
                (
                    "GSI5SK",
                    e.as_ref()
                        .and_then(|e| q(format!("{tenant_key}#{e}#{time}"))),
                ),
                ("GSI6PK", a.as_ref().map(|_| event.clone())),
                (
                    "GSI6SK",
                    a.as_ref()
                        .and_then(|a| q(format!("{tenant_key}#{a}#{time}"))),
                ),
                ("GSI7PK", both.map(|_| event.clone())),
                (
                    "GSI7SK",
                    both.and_then(|(e, a)| q(format!("{tenant_key}#{a}#{e}#{time}"))),
                ),
                ("entityType", entity.as_ref().map(|(kind, _)| quoted(kind))),
                ("entityId", entity.as_ref().map(|(_, id)| quoted(id))),
                ("tenantId", q(tenant)),
                ("eventType", q(kind.to_owned())),
                ("timestamp", Some(ms.to_string())),
                ("context", context),
                ("properties", Some(properties)),
            ];
            fields(known, unknown)
        },
    )
}

/// Extensions, those that Everbus has a place for among them.
fn extensions() -> impl Strategy<Value = Document> {
    let name = prop_oneof![
        "x[a-z0-9]{1,6}",
        select(vec![
            "tenant",
            "app",
            "partitionkey",
            "correlationid",
            "causationid",
            "entitytype",
            "entityid",
            "traceparent",
            "tracestate",
            "schemaversion",
            "replayof",
        ])
        .prop_map(str::to_owned),
    ];
    let json = prop_oneof![
        3 => attribute(),
        1 => Just("\"\"".to_owned()),
        1 => select(vec!["null", "true", "false", "7", "-1", "0", "\"2\""]).prop_map(str::to_owned),
        1 => "0[01]-[0-9a-f]{32}-[0-9a-f]{16}-0[01]".prop_map(|text| quoted(&text)),
    ];
    btree_map(name, json, 0..6).prop_map(|fields| fields.into_iter().collect())
}

pub(crate) fn cloudevents() -> impl Strategy<Value = Document> {
    let data = prop_oneof![
        4 => (select(vec![None, Some("application/json"), Some("a/b+json; x=1"), Some("text/json")]),
            any_json().prop_map(|json| Some(("data", json)))),
        2 => (Just(Some("text/plain")), ".{0,8}".prop_map(|text| Some(("data", quoted(&text))))),
        1 => (select(vec![Some("a/b"), Some("text/plain")]), vec(any::<u8>(), 0..9).prop_map(|bytes| {
            Some(("data_base64", quoted(&data_encoding::BASE64.encode(&bytes))))
        })),
        1 => (select(vec![None, Some("application/json")]), any_json().prop_map(|json| {
            Some(("data_base64", quoted(&data_encoding::BASE64.encode(json.as_bytes()))))
        })),
        1 => (select(vec![None, Some("a/b"), Some("a/json")]),
            select(vec![None, Some(("data_base64", "null".to_owned()))])),
    ];
    let texts = (
        maybe(attribute()),
        maybe(attribute()),
        prop_oneof![
            time().prop_map(Some),
            Just(None),
            Just(Some("null".to_owned())),
        ],
    );
    (id(), attribute(), event_type(), texts, data, extensions()).prop_map(
        |(id, source, kind, (subject, schema, at), (content_type, data), extensions)| {
            let mut known = vec![
                ("specversion", Some(quoted("1.0"))),
                ("id", Some(id)),
                ("source", Some(source)),
                ("type", Some(kind)),
                ("time", at),
                ("subject", subject),
                ("dataschema", schema),
                ("datacontenttype", content_type.map(quoted)),
            ];
            if let Some((name, json)) = data {
                known.push((name, Some(json)));
            }
            fields(known, extensions)
        },
    )
}

fn native() -> impl Strategy<Value = Document> {
    let texts = (
        maybe(attribute()),
        maybe(attribute()),
        maybe(attribute()),
        maybe(attribute()),
    );
    let objects = (
        maybe(attribute()).prop_map(|id| match id {
            Some(id) if id != "null" => Some(format!("{{\"x\":1,\"id\":{id},\"type\":{id}}}")),
            other => other,
        }),
        btree_map(".{0,6}", ".{0,6}", 0..3).prop_map(|map| Some(json!(map).to_string())),
    );
    let payload = prop_oneof![
        any_json().prop_map(|json| (None, Some(("payload", json)))),
        ".{0,8}".prop_map(|text| (Some("a/b"), Some(("payload_text", quoted(&text))))),
        any_json().prop_map(|json| (None, Some(("payload_text", quoted(&json))))),
        any_json().prop_map(|json| (Some("a/b"), Some(("payload", json)))),
        vec(any::<u8>(), 0..9).prop_map(|bytes| {
            (
                Some("a/b"),
                Some((
                    "payload_hex",
                    quoted(&data_encoding::HEXLOWER.encode(&bytes)),
                )),
            )
        }),
        Just((None, None)),
    ];
    let at = prop_oneof![time().prop_map(Some), Just(None)];
    (
        id(),
        event_type(),
        version(),
        at,
        texts,
        objects,
        payload,
        unknown(),
    )
        .prop_map(
            |(
                id,
                kind,
                version,
                at,
                (source, tenant, key, cause),
                (entity, meta),
                payload,
                unknown,
            )| {
                let mut known = vec![
                    ("id", Some(id)),
                    ("type", Some(kind)),
                    ("version", version),
                    ("occurred_at", at),
                    ("source", source),
                    ("tenant", tenant),
                    ("key", key.clone()),
                    ("correlation_id", key),
                    ("causation_id", cause),
                    ("entity", entity),
                    ("metadata", meta),
                    ("content_type", payload.0.map(quoted)),
                ];
                if let Some((name, json)) = payload.1 {
                    known.push((name, Some(json)));
                }
                fields(known, unknown)
            },
        )
}

/// A valid document of any dialect.
pub(crate) fn documents() -> impl Strategy<Value = (Dialect, Document)> {
    let each = prop_oneof![
        native().prop_map(|d| (Dialect::Native, d)),
        cloudevents().prop_map(|d| (Dialect::CloudEvents, d)),
        omni().prop_map(|d| (Dialect::Omni, d)),
        workflow().prop_map(|d| (Dialect::Workflow, d)),
        outbox().prop_map(|d| (Dialect::Outbox, d)),
        framework().prop_map(|d| (Dialect::Framework, d)),
    ];
    (each, any::<u64>()).prop_map(|((dialect, mut document), seed)| {
        // The order of fields means nothing.
        let turn = usize::try_from(seed % document.len() as u64).unwrap();
        document.rotate_left(turn);
        (dialect, document)
    })
}

/// The type that is given beside a document: only *outbox* documents need one.
pub(crate) fn beside_of(dialect: Dialect) -> Beside<'static> {
    Beside {
        event_type: beside().event_type.filter(|_| dialect == Dialect::Outbox),
        ..beside()
    }
}
