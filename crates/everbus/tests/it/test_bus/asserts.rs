//! What was published, and the assertions about it.

use std::panic::AssertUnwindSafe;

use everbus::testing::TestBus;
use everbus::{Event, EventId, Router, to};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{
    NotificationRefused, NotificationSent, Notifications, OrderPlaced, everywhere, notifier, order,
};

/// What a panic says.
fn said<T>(run: impl FnOnce() -> T) -> String {
    match std::panic::catch_unwind(AssertUnwindSafe(run)) {
        Ok(_) => panic!("it did not panic"),
        Err(payload) => *payload.downcast::<String>().unwrap(),
    }
}

async fn bus_with(orders: usize) -> TestBus {
    let bus = TestBus::new(notifier(&Notifications::default()))
        .await
        .unwrap();
    for n in 0..orders {
        let order = OrderPlaced {
            order_id: format!("ord-{n}"),
            ..order()
        };
        bus.publish(order).await.unwrap().assert_handled();
    }
    bus
}

// conformance: handlers/test-bus-assert-published: assert_published::<T>() gives the one event of a type, or says what was published instead
#[tokio::test]
async fn the_one_event_of_a_type_is_given_back() {
    everywhere(|builder| async move {
        let bus = builder
            .open(notifier(&Notifications::default()))
            .await
            .unwrap();
        bus.publish(order()).await.unwrap().assert_handled();
        let sent = NotificationSent {
            user_id: "user-456".into(),
            order_id: "ord-123".into(),
        };
        assert_eq!(bus.assert_published::<NotificationSent>(), sent);
        assert_eq!(bus.published::<OrderPlaced>(), [order()]);
        bus.assert_not_published::<NotificationRefused>();
        assert!(bus.published::<NotificationRefused>().is_empty());
        let all = bus.published_events("*");
        let types: Vec<_> = all.iter().map(|r| r.event.event_type()).collect();
        assert_eq!(
            types,
            ["orders.order.placed", "notifications.notification.sent"]
        );
        assert!(all[0].position < all[1].position);
    })
    .await;
}

// conformance: handlers/test-bus-assert-published: assert_published::<T>() gives the one event of a type, or says what was published instead
#[tokio::test]
async fn a_failed_assertion_lists_what_was_published_instead() {
    let bus = bus_with(0).await;
    let none = said(|| bus.assert_published::<OrderPlaced>());
    assert_eq!(
        none,
        "expected one orders.order.placed (version 1), but none was published. Nothing was published."
    );
    let bus = bus_with(2).await;
    let other = said(|| bus.assert_published::<NotificationRefused>());
    assert!(other.contains("none was published. Published were:\n  orders.order.placed (version 1) {\"order_id\":\"ord-0\""), "{other}");
    assert_eq!(other.lines().count(), 5);
    let two = said(|| bus.assert_published::<OrderPlaced>());
    assert!(two.contains("but 2 were published"), "{two}");
    let unwanted = said(|| bus.assert_not_published::<NotificationSent>());
    assert!(
        unwanted.contains("expected no notifications.notification.sent, but 2"),
        "{unwanted}"
    );
}

// conformance: handlers/test-bus-assert-published: assert_published::<T>() gives the one event of a type, or says what was published instead
#[tokio::test]
async fn the_one_event_for_which_a_condition_holds_is_given_back() {
    let bus = bus_with(3).await;
    let second = bus.assert_published_where(|sent: &NotificationSent| sent.order_id == "ord-1");
    assert_eq!(second.order_id, "ord-1");
    let none = said(|| bus.assert_published_where(|sent: &NotificationSent| sent.order_id == "x"));
    assert!(
        none.contains("for which the condition holds, but none was"),
        "{none}"
    );
    let all = said(|| bus.assert_published_where(|_: &NotificationSent| true));
    assert!(all.contains("but 3 were"), "{all}");
}

#[tokio::test]
async fn long_lists_and_payloads_are_cut() {
    let bus = TestBus::new(Router::new()).await.unwrap();
    for _ in 0..35 {
        bus.publish(("a", "x".repeat(1000))).await.unwrap();
    }
    let text = said(|| bus.assert_published::<OrderPlaced>());
    assert!(text.ends_with("and 5 more"), "{text}");
    assert!(text.len() < 31 * 300, "{}", text.len());
}

/// A later version of the same event.
#[derive(Debug, Serialize, Deserialize, Event)]
#[event(type = "orders.order.placed", version = 2)]
struct OrderPlacedV2 {
    order_id: String,
}

#[tokio::test]
async fn other_versions_are_told_apart() {
    let bus = bus_with(1).await;
    assert!(bus.published::<OrderPlacedV2>().is_empty());
    let text = said(|| bus.assert_published::<OrderPlacedV2>());
    assert!(
        text.contains("orders.order.placed (version 2), but none"),
        "{text}"
    );
    assert!(text.contains("orders.order.placed (version 1)"), "{text}");
    // Not even another version.
    said(|| bus.assert_not_published::<OrderPlacedV2>());
}

#[tokio::test]
async fn an_event_that_cannot_be_read_is_an_error_of_the_test() {
    let bus = TestBus::new(Router::new()).await.unwrap();
    bus.publish(("orders.order.placed", json!({"order_id": 1})))
        .await
        .unwrap();
    let text = said(|| bus.published::<OrderPlaced>());
    assert!(text.contains("cannot be read"), "{text}");
}

// conformance: handlers/test-bus-assert-handled: assertions about handling and dead letters say group, attempts and errors
#[tokio::test]
async fn an_event_that_was_not_handled_is_described() {
    let bus = bus_with(0).await;
    bus.fail_next(1);
    let report = bus.publish(order()).await.unwrap();
    for text in [
        said(|| bus.assert_handled(report.id())),
        said(|| report.assert_handled()),
    ] {
        assert!(text.contains("group (unnamed): retrying at"), "{text}");
        assert!(
            text.contains("attempt 1 (error, handler \"handle_order_placed\"): the test lets"),
            "{text}"
        );
    }
    bus.run_to_end().await.unwrap();
    bus.assert_handled(report.id());
    // The report is of its own time.
    assert!(!report.is_handled());

    let nobody = bus.publish(("invoice.sent", 1)).await.unwrap();
    let text = said(|| bus.assert_handled(nobody.id()));
    assert!(text.contains("no group of this bus wants it"), "{text}");
    let unknown = EventId::new();
    let text = said(|| bus.assert_handled(unknown));
    assert!(
        text.contains(&format!("no event {unknown} was published")),
        "{text}"
    );
}

// conformance: handlers/test-bus-assert-handled: assertions about handling and dead letters say group, attempts and errors
#[tokio::test]
async fn dead_letters_fail_the_assertion_that_there_are_none() {
    let router = Router::new().on(
        "orders.*.*",
        to(|| async { Err::<(), _>(everbus::permanent("closed for good")) }).group("shop"),
    );
    let bus = TestBus::new(router).await.unwrap();
    bus.assert_no_dead_letters().await;
    bus.publish(order()).await.unwrap();
    let line = line!() + 1;
    let task = async move { bus.assert_no_dead_letters().await };
    let panicked = tokio::spawn(task).await.unwrap_err().into_panic();
    let text = panicked.downcast_ref::<String>().unwrap();
    assert!(text.contains("but there are 1"), "{text}");
    assert!(text.contains("in group shop: closed for good"), "{text}");
    assert!(text.contains(&format!("asserts.rs:{line}")), "{text}");
}

// conformance: handlers/test-bus-assert-published: assert_published::<T>() gives the one event of a type, or says what was published instead
#[tokio::test]
async fn what_was_published_without_waiting_is_there_at_once() {
    everywhere(|builder| async move {
        let bus = builder.open(Router::new()).await.unwrap();
        let receipt = bus.publish_only(order()).await.unwrap();
        bus.assert_published::<OrderPlaced>();
        bus.bus().publish(order()).await.unwrap();
        assert_eq!(bus.published::<OrderPlaced>().len(), 2);
        assert_eq!(bus.published_events("orders.>")[0].event.id(), receipt.id());
    })
    .await;
}
