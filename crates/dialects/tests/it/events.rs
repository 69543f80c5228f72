//! Every native event is either written so that it can be read, or refused with a reason.

use everbus_core::{Code, Event, EventBuilder, Timestamp, TraceContext};
use everbus_dialects::{Beside, Dialect, decode, decode_beside, dropped, encode};
use proptest::collection::btree_map;
use proptest::option::of;
use proptest::prelude::*;
use proptest::sample::select;

use crate::documents::any_json;

/// Attributes may be any text, control characters included.
fn attribute() -> impl Strategy<Value = String> {
    prop_oneof![5 => "[^\\p{C}]{1,8}", 1 => "\\PC{1,4}[\n\u{7f}#]"]
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z]{1,5}",
        ".{0,6}",
        select(vec![
            "tenant",
            "id",
            "data",
            "station_id",
            "context",
            "subject",
            "trace_id",
            "replay_of",
            "omni:x",
            "omni:id",
            "cloudevents:data",
            "workflow:PK",
            "outbox:payload",
            "native:id",
            "framework:timestamp",
        ])
        .prop_map(str::to_owned),
    ]
}

fn events() -> impl Strategy<Value = Event> {
    let who = (
        of(attribute()),
        of(attribute()),
        of(attribute()),
        of((attribute(), attribute())),
    );
    let links = (
        of(attribute()),
        of(attribute()),
        of(attribute()),
        of(attribute()),
    );
    let meta = btree_map(
        key(),
        prop_oneof![".{0,6}", any_json(), Just(String::new())],
        0..4,
    );
    let payload = prop_oneof![
        4 => any_json().prop_map(|json| (None, json.into_bytes())),
        1 => (select(vec!["a/b+json", "application/json"]), any_json())
            .prop_map(|(kind, json)| (Some(kind), json.into_bytes())),
        1 => (select(vec!["text/plain", "text/json", "a/b"]), any::<Vec<u8>>())
            .prop_map(|(kind, bytes)| (Some(kind), bytes)),
    ];
    let trace = of((1..u128::MAX, 1..u64::MAX, of(attribute())));
    (who, links, meta, payload, trace, 1..4_u32, any::<i64>()).prop_map(
        |(
            (source, app, tenant, entity),
            (key, correlation, cause, foreign),
            meta,
            payload,
            trace,
            version,
            at,
        )| {
            let mut e = Event::builder("order.placed")
                .version(version)
                .occurred_at(Timestamp::from_micros(at))
                .payload(payload.1);
            let set = |e: EventBuilder,
                       value: Option<String>,
                       f: fn(EventBuilder, String) -> EventBuilder| {
                match value {
                    Some(value) => f(e, value),
                    None => e,
                }
            };
            e = set(e, source, EventBuilder::source);
            e = set(e, foreign, EventBuilder::foreign_id);
            e = set(e, app, EventBuilder::app);
            e = set(e, tenant, EventBuilder::tenant);
            e = set(e, key, EventBuilder::key);
            e = set(e, correlation, EventBuilder::correlation_id);
            e = set(e, cause, EventBuilder::causation_id);
            e = set(e, payload.0.map(str::to_owned), EventBuilder::content_type);
            if let Some((kind, id)) = entity {
                e = e.entity(kind, id);
            }
            if let Some((id, span, state)) = trace {
                let parent = format!("00-{id:032x}-{span:016x}-01");
                e = e.trace(TraceContext::parse(&parent, state.as_deref()).unwrap());
            }
            for (key, value) in meta {
                e = e.meta(key, value);
            }
            e.build().unwrap()
        },
    )
}

/// Entries under `native:` are fields of the document.
fn is_free(event: &Event) -> bool {
    let mut keys = event.metadata().keys();
    !keys.any(|key| key.starts_with("native:"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    // conformance: memory/dialect-native-whole: the native document carries everything
    #[test]
    fn native_documents_carry_everything(event in events().prop_filter("reserved", is_free)) {
        let document = encode(&event, Dialect::Native).unwrap();
        prop_assert_eq!(&decode(&document, Dialect::Native).unwrap(), &event);
        prop_assert!(dropped(&event, Dialect::Native).unwrap().is_empty());
    }

    // conformance: memory/dialect-encode-checked: what is written can be read, what cannot be said is refused
    #[test]
    fn what_is_written_can_be_read(event in events(), dialect in select(Dialect::ALL)) {
        let document = match encode(&event, dialect) {
            Ok(document) => document,
            Err(e) => {
                let known = [Code::InvalidAttribute, Code::Unsupported].contains(&e.code());
                prop_assert!(known && !e.message().is_empty(), "{}", e);
                return Ok(());
            }
        };
        let beside = Beside {
            event_type: Some("order.placed"),
            ..Beside::default()
        };
        let back = decode_beside(&document, dialect, &beside).unwrap();
        prop_assert_eq!(back.event_type(), event.event_type());
        prop_assert_eq!(back.version(), event.version());
        prop_assert_eq!(back.display_id(), event.display_id());
        let (payload, content) = (back.payload(), event.payload());
        prop_assert_eq!(payload.trim_ascii(), content.trim_ascii());

        // Whatever is not said to be dropped is there.
        let names = dropped(&event, dialect).unwrap();
        let kept = |name: &str| !names.iter().any(|n| n == name);
        if kept("id") {
            prop_assert_eq!(back.id(), event.id());
        }
        if kept("occurred_at") {
            prop_assert_eq!(back.occurred_at(), event.occurred_at());
        }
        if let Some(a) = event.attributes() {
            let none = everbus_core::Attributes::default();
            let b = back.attributes().unwrap_or(&none);
            prop_assert!(!kept("tenant") || a.tenant == b.tenant);
            prop_assert!(!kept("app") || a.app == b.app || a.app.is_none());
            prop_assert!(!kept("entity") || a.entity == b.entity);
            prop_assert!(!kept("key") || a.key == b.key);
            prop_assert!(!kept("causation_id") || a.causation_id == b.causation_id);
            prop_assert!(!kept("trace") || !kept("span") || a.trace == b.trace || a.trace.is_none());
            prop_assert!(!kept("source") || a.source == b.source || a.source.is_none());
        }
        // And what is read is the same from then on.
        let again = encode(&back, dialect).unwrap();
        prop_assert_eq!(crate::support::exact(&again), crate::support::exact(&document));
    }
}
