//! Handlers called directly.

use std::sync::{Arc, Mutex};

use everbus::testing::call;
use everbus::{
    Context, Envelope, Event, HandlerError, Json, Message, Meta, Payload, State, permanent, sqlite,
};
use serde::{Deserialize, Serialize};

use super::{
    NotificationSent, Notifications, OrderPlaced, handle_order_placed, order, order_event,
};

// conformance: framework/testing-unit: handler functions are called directly, without a broker
#[tokio::test]
async fn order_placed_sends_a_notification() {
    let notifications = Notifications::default();
    let sent = handle_order_placed(Payload(order()), State(notifications.clone())).await;
    assert_eq!(notifications.sent().len(), 1);
    assert_eq!(sent.user_id, "user-456");
}

// conformance: framework/testing-unit: handler functions are called directly, without a broker
// conformance: handlers/test-bus-direct-call: a handler is called with its extractors, without engine and pipeline
#[tokio::test]
async fn a_handler_takes_its_parameters_from_the_event_it_is_called_with() {
    let notifications = Notifications::default();
    let outcome = call(handle_order_placed)
        .state(notifications.clone())
        .with(order_event())
        .await
        .unwrap();
    assert_eq!(notifications.sent(), ["user-456: order ord-123 confirmed"]);
    let [event] = outcome.events() else {
        panic!("{:?}", outcome.events());
    };
    assert_eq!(
        event.typed::<NotificationSent>().unwrap().order_id,
        "ord-123"
    );
    assert_eq!(event.correlation_id(), "corr-1");
}

// conformance: handlers/test-bus-direct-call: a handler is called with its extractors, without engine and pipeline
#[tokio::test]
async fn every_extractor_works_in_a_direct_call() {
    async fn look(
        context: Context,
        envelope: Envelope,
        meta: Meta,
        message: Message,
        Json(order): Json<OrderPlaced>,
    ) -> Result<(), HandlerError> {
        assert_eq!((context.attempt(), context.group().as_str()), (2, "mail"));
        assert_eq!(context.correlation_id(), "corr-1");
        assert_eq!(
            (envelope.display_id(), meta.get("k")),
            ("test-1".into(), None)
        );
        assert_eq!(message.event_type(), "orders.order.placed");
        assert_eq!(everbus::correlation_id().as_deref(), Some("corr-1"));
        context.publish(("staged", order.order_id))?;
        context.publish(("staged.too", 2))?;
        Ok(())
    }
    let outcome = call(look)
        .group("mail".parse().unwrap())
        .attempt(2)
        .with(order_event())
        .await
        .unwrap();
    let types: Vec<_> = outcome.events().iter().map(Event::event_type).collect();
    assert_eq!(types, ["staged", "staged.too"]);
}

// conformance: handlers/test-bus-direct-call: a handler is called with its extractors, without engine and pipeline
#[tokio::test]
async fn a_direct_call_says_what_cannot_be_taken_from_the_event() {
    let no_state = call(handle_order_placed).with(order()).await.unwrap_err();
    assert!(
        no_state.to_string().contains("no state of type"),
        "{no_state}"
    );
    let wrong_type = call(handle_order_placed)
        .state(Notifications::default())
        .with(("orders.order.cancelled", 1))
        .await
        .unwrap_err();
    assert!(
        wrong_type.to_string().contains("orders.order.cancelled"),
        "{wrong_type}"
    );
    let no_event = call(|| async {}).with(("", 1)).await.unwrap_err();
    assert!(
        no_event.to_string().contains("the event type is empty"),
        "{no_event}"
    );
    let own = call(|| async { Err::<(), _>(permanent("closed")) })
        .with(order())
        .await;
    assert_eq!(own.unwrap_err().to_string(), "closed");
}

#[derive(Serialize, Deserialize, Event)]
#[event(type = "users.user.created")]
struct UserV1 {
    name: String,
}

#[derive(Serialize, Deserialize, Event)]
#[event(type = "users.user.created", version = 2)]
struct User {
    first: String,
}

#[tokio::test]
async fn a_direct_call_reads_older_versions_through_upcasts() {
    let names = Arc::new(Mutex::new(Vec::new()));
    let seen = names.clone();
    let handler = move |Payload(user): Payload<User>| {
        seen.lock().unwrap().push(user.first);
        async {}
    };
    let old = || UserV1 {
        name: "Ada Lovelace".into(),
    };
    let upcast = |old: UserV1| User {
        first: old.name.split(' ').next().unwrap_or_default().to_owned(),
    };
    call(handler.clone())
        .upcast(upcast)
        .with(old())
        .await
        .unwrap();
    assert_eq!(*names.lock().unwrap(), ["Ada"]);
    let refused = call(handler).with(old()).await.unwrap_err();
    assert!(refused.to_string().contains("version"), "{refused}");
}

#[tokio::test]
async fn a_transaction_is_returned_and_not_run() {
    let handler = || async {
        sqlite::in_transaction(|_| -> Result<(), HandlerError> { panic!("nobody commits this") })
    };
    let outcome = call(handler).with(order()).await.unwrap();
    assert!(outcome.events().is_empty());
}
