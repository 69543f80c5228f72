//! Payloads are checked against their schemas when they are published and before they are handled.

use everbus::schemars::JsonSchema;
use everbus::{Bus, Code, Event, FailureKind, Payload, Router, TypedEvent, to};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::{Kind, Lab, fine, given_up, handled, on_every_engine, published, recorder};

#[derive(Serialize, Deserialize, JsonSchema, Event)]
#[event(type = "orders.order.placed")]
#[schemars(crate = "everbus::schemars")]
struct Placed {
    order: u64,
    lines: Vec<Line>,
}

#[derive(Serialize, Deserialize, JsonSchema)]
#[schemars(crate = "everbus::schemars")]
struct Line {
    amount: u32,
}

fn wrong() -> (&'static str, Value) {
    let lines = json!([{ "amount": 1 }, { "amount": "many" }]);
    (Placed::TYPE, json!({ "order": 1, "lines": lines }))
}

/// A bus beside this one on the same engine, which knows no schemas.
fn careless(lab: &Lab, bus: &Bus) -> Bus {
    lab.builder().with_engine(bus.engine().clone()).unwrap()
}

// conformance: handlers/validation-publish: a payload that violates the schema of its type is refused on publish, with the place; nothing is stored.
// conformance: framework/framework-validation: events are validated on publish.
// conformance: framework/structure-schema: the schema comes from the type; a publish is checked against it.
#[tokio::test]
async fn a_payload_against_its_schema_is_not_published() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let router = Router::new().on(Placed::TYPE, |_: Payload<Placed>| async {});
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let error = bus.publish(wrong()).await.unwrap_err();
        assert_eq!(error.code(), Code::ValidationError);
        assert!(error.message().contains("at /lines/1/amount: "), "{error}");
        let batch = vec![("other", json!(1)), wrong()];
        let error = bus.publish_batch(batch).await.unwrap_err();
        assert_eq!(error.code(), Code::ValidationError);
        assert!(
            published(&bus, "*").await.is_empty(),
            "nothing of the batch"
        );
        let right = Placed {
            order: 1,
            lines: vec![Line { amount: 2 }],
        };
        handled(&bus, (Placed::TYPE, serde_json::to_value(&right).unwrap())).await;
        handled(&bus, right).await;
        // Another version has another schema, or none.
        let (event_type, payload) = wrong();
        let other = Event::builder(event_type).version(2).json(&payload);
        bus.publish(other).await.unwrap();
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: framework/framework-validation: events are validated on consume.
// conformance: framework/structure-schema: the schema comes from the type; an event is checked against it before it is handled.
// conformance: handlers/validation-consume: a payload that was published elsewhere against its schema is dead-lettered at once, with the place; the handler does not run.
// conformance: framework/framework-malformed: a payload against its schema is dead-lettered at once; the handler does not run.
#[tokio::test]
async fn a_payload_against_its_schema_is_not_handled() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(fine);
        // The schema is known from another handler's type.
        let router = Router::new()
            .event::<Placed>()
            .on(Placed::TYPE, to(handler).name("untyped"));
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&careless(&lab, &bus), wrong()).await;
        assert_eq!((letter.attempts, letter.failures.len()), (1, 1));
        assert_eq!(letter.failures[0].kind, FailureKind::Schema);
        assert_eq!(letter.handler.as_deref(), Some("untyped"));
        let said = letter.last_error();
        assert!(said.contains("ValidationError"), "{said}");
        assert!(said.contains("at /lines/1/amount: "), "{said}");
        assert!(seen.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/validation-later: a schema that is registered while the bus runs holds from then on, also for what other routers subscribed.
#[tokio::test]
async fn a_schema_that_comes_later_holds_for_running_groups() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, ("a", "text")).await;
        seen.next().await;
        let later = Router::new().schema("a", 1, json!({ "type": "integer" }));
        bus.mount(later).await.unwrap();
        let letter = given_up(&careless(&lab, &bus), ("a", "text")).await;
        assert_eq!(letter.failures[0].kind, FailureKind::Schema);
        assert!(seen.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

/// A type whose own schema nothing fits.
#[derive(Serialize)]
struct Odd;

impl TypedEvent for Odd {
    const TYPE: &'static str = "odd";

    fn schema() -> Option<Value> {
        Some(json!(false))
    }
}

impl everbus::IntoEvent for Odd {
    fn into_event(self) -> everbus::Result<Event> {
        Event::builder(Self::TYPE).json(&1).build()
    }

    fn rust_type(&self) -> Option<&'static str> {
        Some(std::any::type_name::<Self>())
    }
}

// conformance: handlers/validation-exempt: a value that was just serialised from the very type of the schema is not checked on publish; anything else is.
#[tokio::test]
async fn the_type_of_the_schema_is_exempt_on_publish() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    bus.mount(Router::new().event::<Odd>()).await.unwrap();
    bus.publish(Odd).await.unwrap();
    let error = bus.publish(("odd", 1)).await.unwrap_err();
    assert_eq!(error.code(), Code::ValidationError);
}

// conformance: handlers/validation-subscription: validated(schema) checks what a subscription handles; another subscription does not care.
// conformance: omni/subscribe-validated: a validated subscription checks every payload against its schema before the handler runs.
#[tokio::test]
async fn a_validated_subscription_checks_for_itself() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (strict, mut strictly) = recorder(fine);
        let (lax, mut laxly) = recorder(fine);
        let schema = json!({ "type": "object", "required": ["id"] });
        let validated = bus.subscribe("user.*").group("strict").validated(schema);
        validated.handler(strict).await.unwrap();
        bus.subscribe("user.*")
            .group("lax")
            .handler(lax)
            .await
            .unwrap();
        bus.start().await.unwrap();
        handled(&bus, ("user.created", json!({ "id": 1 }))).await;
        strictly.next().await;
        laxly.next().await;
        let letter = given_up(&bus, ("user.renamed", json!({ "name": "x" }))).await;
        assert_eq!(letter.group.as_str(), "strict");
        assert_eq!(letter.failures[0].kind, FailureKind::Schema);
        assert!(
            letter
                .last_error()
                .contains("\"id\" is a required property")
        );
        laxly.next().await;
        // What is not JSON violates every schema.
        let text = Event::builder("user.noted").payload("not json");
        let letter = given_up(&bus, text.content_type("text/plain")).await;
        assert_eq!(letter.failures[0].kind, FailureKind::Schema);
        assert!(strictly.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}
