//! Typed events: the value itself is published, and read back as the type it was.

mod asyncapi;
mod asyncapi_rules;
mod schema;
mod upcast;

use std::fmt::Debug;

use everbus::{Code, Event, FailureKind, IntoEvent, IntoOutcome, Returns, TypedEvent};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::support::{fine, given_up, on_every_engine, recorder};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(type = "orders.order.placed", version = 2)]
#[event(key = "order_id", tenant = "shop", entity("ORDER", "order_id"))]
struct OrderPlaced {
    order_id: u64,
    shop: String,
}

fn order() -> OrderPlaced {
    OrderPlaced {
        order_id: 42,
        shop: "north".to_owned(),
    }
}

// conformance: handlers/typed-publish: publish takes the value itself.
#[tokio::test]
async fn a_value_or_a_reference_is_published_and_read_back_by_the_handler() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("orders.>").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        bus.publish(&order()).await.unwrap();
        bus.publish(order()).await.unwrap();
        bus.publish_batch(vec![order()]).await.unwrap();
        for _ in 0..3 {
            assert_eq!(seen.next().await.typed::<OrderPlaced>().unwrap(), order());
        }
    })
    .await;
}

// conformance: handlers/typed-publish: type, version, key, tenant and entity come from the attribute.
#[test]
fn the_attribute_says_what_the_envelope_holds() {
    assert_eq!(OrderPlaced::TYPE, "orders.order.placed");
    assert_eq!(OrderPlaced::VERSION, 2);
    let event = order().into_event().unwrap();
    assert_eq!(event.event_type(), "orders.order.placed");
    assert_eq!(event.version(), 2);
    assert_eq!(event.tenant(), Some("north"));
    let attributes = event.attributes().unwrap();
    assert_eq!(attributes.key.as_deref(), Some("42"));
    assert_eq!(attributes.entity.as_ref().unwrap().to_string(), "ORDER#42");
    let payload: serde_json::Value = event.json().unwrap();
    assert_eq!(payload, json!({ "order_id": 42, "shop": "north" }));
}

// conformance: handlers/typed-return: a handler returns a value whose type derives Event, and it is published.
#[test]
fn a_value_is_what_a_handler_may_return() {
    let outcome = order().into_outcome().unwrap();
    let [event] = outcome.events() else {
        panic!("not one event: {outcome:?}");
    };
    assert_eq!(event.typed::<OrderPlaced>().unwrap(), order());
    // It is known before the handler ever ran.
    let mut returns = Returns::default();
    <Result<Vec<OrderPlaced>, std::io::Error>>::returns(&mut returns);
    let [emitted] = returns.emits.as_slice() else {
        panic!("not one type: {returns:?}");
    };
    assert_eq!(
        (emitted.event_type, emitted.version),
        (OrderPlaced::TYPE, 2)
    );
}

#[test]
fn without_more_than_a_type_the_version_is_1_and_there_are_no_attributes() {
    #[derive(Serialize, Event)]
    #[event(type = "ping")]
    struct Ping;

    let event = Ping.into_event().unwrap();
    assert_eq!((event.version(), event.attributes()), (1, None));
}

// conformance: handlers/typed-any-type: the derive works on any serde type.
#[test]
fn every_shape_of_type_can_be_an_event() {
    #[derive(Debug, PartialEq, Serialize, Deserialize, Event)]
    #[event(type = "shape.unit")]
    struct Unit;

    #[derive(Debug, PartialEq, Serialize, Deserialize, Event)]
    #[event(type = "shape.tuple")]
    struct Tuple(u8, String);

    #[derive(Debug, PartialEq, Serialize, Deserialize, Event)]
    #[event(type = "shape.enum")]
    enum Choice {
        Nothing,
        Some { n: u8 },
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize, Event)]
    #[event(type = "shape.generic", key = "id")]
    struct Generic<T: Debug, const N: usize>
    where
        T: Clone,
    {
        id: u8,
        value: T,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize, Event)]
    #[event(type = "shape.raw", key = "type")]
    struct Raw {
        r#type: String,
    }

    fn round_trip<T>(value: &T)
    where
        T: TypedEvent + DeserializeOwned + PartialEq + Debug,
        for<'a> &'a T: IntoEvent,
    {
        let event = value.into_event().unwrap();
        assert_eq!(event.event_type(), T::TYPE);
        assert_eq!(&event.typed::<T>().unwrap(), value);
    }

    round_trip(&Unit);
    round_trip(&Tuple(1, "a".to_owned()));
    round_trip(&Choice::Nothing);
    round_trip(&Choice::Some { n: 3 });
    round_trip(&Generic::<_, 4> {
        id: 1,
        value: vec![1, 2],
    });
    round_trip(&Raw {
        r#type: "x".to_owned(),
    });

    // A type that borrows is published without a copy, and read from the event it lives in.
    #[derive(Debug, PartialEq, Serialize, Deserialize, Event)]
    #[event(type = "shape.borrowed", key = "name")]
    struct Borrowed<'a> {
        name: &'a str,
    }
    let event = Borrowed { name: "b" }.into_event().unwrap();
    assert_eq!(
        event.typed::<Borrowed<'_>>().unwrap(),
        Borrowed { name: "b" }
    );
}

/// A type made by a macro, in a place where nothing is imported and the usual names mean other things.
mod nothing_imported {
    #![allow(dead_code, non_camel_case_types)]

    struct Result;
    struct String;
    struct str;
    struct u32;
    trait ToString {}

    macro_rules! event {
        ($name:ident, $field:ident, $key:literal) => {
            #[derive(::serde::Serialize, ::everbus::Event)]
            #[event(type = "made.by.macro", key = $key)]
            pub(super) struct $name {
                pub(super) $field: u8,
            }
        };
    }
    event!(Made, id, "id");
}

#[test]
fn the_derive_needs_no_imports() {
    let event = nothing_imported::Made { id: 7 }.into_event().unwrap();
    assert_eq!(event.ordering_key().unwrap(), "7");
}

// conformance: handlers/typed-read: another type or version is refused with both named.
#[test]
fn another_type_or_version_is_refused_even_if_the_payload_fits() {
    let refusal = |event_type: &str, version| {
        let event = Event::builder(event_type).version(version).json(&order());
        event.build().unwrap().typed::<OrderPlaced>().unwrap_err()
    };
    let other_type = refusal("orders.order.paid", 2);
    let other_version = refusal("orders.order.placed", 1);
    for error in [&other_type, &other_version] {
        assert_eq!(error.code(), Code::InvalidPayloadError);
        assert!(error.hint_text().is_some());
    }
    let end = r#" and cannot be read as "orders.order.placed" version 2"#;
    let text = other_type.to_string();
    let is = r#"is "orders.order.paid" version 2"#;
    assert!(text.ends_with(&format!("{is}{end}")), "{text}");
    let text = other_version.to_string();
    let is = r#"is "orders.order.placed" version 1"#;
    assert!(text.ends_with(&format!("{is}{end}")), "{text}");
}

// conformance: handlers/typed-read: a payload that does not fit is refused.
#[test]
fn a_payload_that_does_not_fit_is_refused() {
    let event = Event::builder(OrderPlaced::TYPE)
        .version(2)
        .json(&json!({ "order_id": "x" }));
    let error = event.build().unwrap().typed::<OrderPlaced>().unwrap_err();
    assert_eq!(error.code(), Code::InvalidPayloadError);
}

#[tokio::test]
async fn a_handler_that_is_given_another_version_fails_with_a_decode_error() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, _seen) = recorder(|m| {
            m.typed::<OrderPlaced>()?;
            Ok(())
        });
        bus.subscribe("*")
            .group("g")
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let old = Event::builder(OrderPlaced::TYPE).json(&order());
        let letter = given_up(&bus, old).await;
        assert_eq!(letter.failures[0].kind, FailureKind::Decode);
        assert_eq!(letter.attempts, 1);
    })
    .await;
}

#[test]
fn an_empty_key_is_refused_when_the_event_is_made() {
    #[derive(Serialize, Event)]
    #[event(type = "t", key = "name")]
    struct Named {
        name: String,
    }
    let error = Named {
        name: String::new(),
    }
    .into_event()
    .unwrap_err();
    assert_eq!(error.code(), Code::InvalidAttribute);
}
