//! Publishing: what is taken, what is refused, and waiting for dispatch.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use everbus::dialects::encode;
use everbus::{Clock, Code, Cursor, Dialect, Event, EventId, HandlerError, Message};
use serde_json::json;
use tokio::sync::Semaphore;

use crate::support::{fine, on_every_engine, published, recorder};

// conformance: embedded/publish-id: publish() persists the event and returns its id.
// conformance: bus/receipt: publish returns id and sequence of what is stored.
// conformance: framework/structure-id: an event without an id is given one, by which it is found.
// conformance: omni/publish-metadata: publish returns the id and the sequence of the event.
// conformance: omni/publish-enrich: an event without an id is given one.
#[tokio::test]
async fn publish_returns_the_id_and_the_place_in_the_log() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let first = bus.publish(("a.b", json!({ "n": 1 }))).await.unwrap();
        let second = bus
            .publish(Event::builder("a.b").json(&2).key("k"))
            .await
            .unwrap();
        assert!(second.seq() > first.seq());
        assert!(!first.is_duplicate());
        assert_eq!(
            first.received_at(),
            bus.lookup().unwrap().find(first.id()).await.unwrap()[0].received_at
        );
        let stored = bus.lookup().unwrap().find(second.id()).await.unwrap();
        assert_eq!(stored[0].event.payload().as_ref(), b"2");
    })
    .await;
}

// conformance: bus/duplicate-publish: the same event published twice returns the first receipt and stores nothing; the same id with another body is IdReused.
#[tokio::test]
async fn the_same_event_twice_is_stored_once_and_another_body_is_refused() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let id = EventId::new();
        let event = |n: u32| Event::builder("a").id(id).json(&n);
        let first = bus.publish(event(1)).await.unwrap();
        let again = bus.publish(event(1)).await.unwrap();
        assert!(again.is_duplicate());
        assert_eq!((again.id(), again.seq()), (first.id(), first.seq()));
        assert_eq!(again.received_at(), first.received_at());
        let error = bus.publish(event(2)).await.unwrap_err();
        assert_eq!(error.code(), Code::IdReused);
        assert_eq!(
            bus.log().unwrap().head().await.unwrap(),
            first.position().into()
        );
    })
    .await;
}

// conformance: embedded/invalid-payload: a payload that is not JSON-serialisable is rejected with InvalidPayloadError.
#[tokio::test]
async fn a_payload_that_is_not_json_is_refused() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let not_json = HashMap::from([((1, 2), "keys must be strings")]);
        let error = bus.publish(("a", not_json)).await.unwrap_err();
        assert!(
            error.to_string().starts_with("InvalidPayloadError: "),
            "{error}"
        );
        let text = Event::builder("a").payload("not json");
        let error = bus.publish(text).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidPayloadError);
        assert_eq!(bus.log().unwrap().head().await.unwrap(), Cursor::START);
    })
    .await;
}

// conformance: bus/bad-input: illegal types and payloads over the limit give a specific error with a hint and store nothing.
#[tokio::test]
async fn illegal_types_and_large_payloads_are_refused_with_a_hint() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().max_payload(10)).await;
        for illegal in ["", "a.*", "a\nb"] {
            let error = bus.publish((illegal, 1)).await.unwrap_err();
            assert_eq!(error.code(), Code::InvalidType, "{illegal:?}");
        }
        bus.publish(("a", "12345678")).await.unwrap();
        let error = bus.publish(("a", "123456789")).await.unwrap_err();
        assert_eq!(error.code(), Code::PayloadTooLarge);
        assert!(
            error.message().contains("11") && error.message().contains("10"),
            "{error}"
        );
        assert!(error.hint_text().is_some());
    })
    .await;
}

// conformance: bus/publish-batch: publish_batch stores all events or none.
// conformance: omni/publish-batch: publish_batch stores all events or none.
#[tokio::test]
async fn a_batch_is_stored_as_a_whole_or_not_at_all() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let receipts = bus
            .publish_batch((0..100).map(|n| ("a.b", n)))
            .await
            .unwrap();
        assert!(receipts.windows(2).all(|w| w[0].seq() < w[1].seq()));
        let head = bus.log().unwrap().head().await.unwrap();
        assert_eq!(Cursor::from(receipts.last().unwrap().position()), head);

        let taken = receipts[0].id();
        let batch = [
            Event::builder("a.b").json(&"new"),
            Event::builder("a.b").id(taken).json(&"another body"),
        ];
        let error = bus.publish_batch(batch).await.unwrap_err();
        assert_eq!(error.code(), Code::IdReused);
        let error = bus
            .publish_batch([("ok", 1), ("not*ok", 2)])
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidType);
        let (stored, _) = bus
            .log()
            .unwrap()
            .read(head, vec!["*".parse().unwrap()], 10)
            .await
            .unwrap();
        assert!(stored.is_empty(), "{stored:?}");
        assert!(
            bus.publish_batch(Vec::<Event>::new())
                .await
                .unwrap()
                .is_empty()
        );
    })
    .await;
}

// conformance: embedded/publish-awaits-dispatch: a publisher can await the dispatch of its event by every matching group.
#[tokio::test]
async fn settled_waits_until_every_group_has_handled_the_event() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let gate = Arc::new(Semaphore::new(0));
        let inside = gate.clone();
        bus.subscribe("a").handler(|| async {}).await.unwrap();
        bus.subscribe("a")
            .group("slow")
            .handler(move || {
                let gate = inside.clone();
                async move {
                    gate.acquire().await?.forget();
                    everbus::handled()
                }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        let error = receipt
            .settled_within(Duration::from_millis(20))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Timeout);
        gate.add_permits(1);
        assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: bus/settled: settled says in which groups the event was dead-lettered.
#[tokio::test]
async fn settled_names_the_groups_that_gave_up() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("a").handler(|| async {}).await.unwrap();
        bus.subscribe("a")
            .group("picky")
            .handler(|| async { Err::<(), _>(HandlerError::permanent("never")) })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        let settled = receipt.settled().await.unwrap();
        let names: Vec<&str> = settled
            .dead_lettered
            .iter()
            .map(everbus::GroupName::as_str)
            .collect();
        assert_eq!(names, ["picky"]);
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn an_event_no_group_wants_is_settled_at_once() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.publish(("a", 1))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
    })
    .await;
}

// conformance: bus/wake: a publish wakes its handlers without polling.
// conformance: embedded/publish: what is published is handed to its handler.
#[tokio::test]
async fn a_publish_wakes_the_handler_while_the_clock_stands_still() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        for n in 0..50 {
            let receipt = bus.publish(("a", n)).await.unwrap();
            let message: Message = seen.next().await;
            assert_eq!(message.id(), receipt.id());
            assert_eq!(message.seq(), receipt.seq());
            assert_eq!(message.json::<i32>().unwrap(), n);
            assert!(message.group().is_unnamed() && message.attempt() == 1);
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: operations/system-reserved: types that begin with system. are the bus's own: a program cannot publish them
#[tokio::test]
async fn the_types_of_the_bus_itself_are_reserved() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let refused = bus.publish(("system.dead_letter", 1)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidType);
        assert!(refused.hint_text().is_some());
        bus.publish(("systematic.error", 1)).await.unwrap();
    })
    .await;
}

// conformance: omni/publish-metadata: a receipt has type, timestamp and source of the event.
#[tokio::test]
async fn a_receipt_says_what_was_published() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().source("shop")).await;
        let event = Event::builder("order.placed").json(&1).build().unwrap();
        let happened = event.occurred_at();
        let receipt = bus.publish(event).await.unwrap();
        assert_eq!(receipt.event_type(), "order.placed");
        assert_eq!(receipt.occurred_at(), happened);
        assert_eq!(receipt.source(), Some("shop"), "that of the bus");
        let own = Event::builder("order.paid").source("till").build().unwrap();
        let receipts = bus.publish_batch([own]).await.unwrap();
        assert_eq!(receipts[0].source(), Some("till"));
        assert_eq!(receipts[0].event_type(), "order.paid");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: contract/dialect-bus: a document of any dialect is published as it is, alone or in a batch, and its mistakes are errors of the publish
#[tokio::test]
async fn documents_of_a_dialect_are_published_as_they_are() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let omni = |n: u32| {
            format!(
                r#"{{"type":"message.received","payload":{{"n":{n}}},"id":"m-{n}","timestamp":"2026-01-03T15:22:19.640Z","source":"whatsapp"}}"#
            )
        };
        let (one, two, three) = (omni(1), omni(2), omni(3));
        let publish = |text: &str| {
            let document = text.as_bytes().to_vec();
            let bus = bus.clone();
            async move { bus.publish(Dialect::Omni.document(&document)).await }
        };
        let receipt = publish(&one).await.unwrap();
        assert!(publish(&one).await.unwrap().is_duplicate());
        let batch = [&two, &three].map(|text| Dialect::Omni.document(text.as_bytes()));
        bus.publish_batch(batch).await.unwrap();
        let stored = published(&bus, "message.*").await;
        assert_eq!(stored.len(), 3);
        assert_eq!(stored[0].event.id(), receipt.id());
        assert_eq!(stored[0].received_at, lab.clock.now(), "added on the way in");
        for (record, text) in stored.iter().zip([&one, &two, &three]) {
            let again = encode(&record.event, Dialect::Omni).unwrap();
            let again: serde_json::Value = serde_json::from_slice(&again).unwrap();
            let wanted: serde_json::Value = serde_json::from_str(text).unwrap();
            assert_eq!(again, wanted);
        }
        let bad = publish("{\"type\":\"a.b\"}").await.unwrap_err();
        assert_eq!(bad.code(), Code::InvalidAttribute);
        assert!(bad.message().contains("field \"source\""), "{bad}");
        bus.shutdown().await.unwrap();
    })
    .await;
}
