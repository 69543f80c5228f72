//! Copies for everybody.

use everbus::audit::{Operator, with_operator};
use everbus::core::{AuditQuery, Order};
use everbus::{Clock, Code, Entity, Event, HandlerError, Timestamp};

use super::{SECOND, each_second, of_type};
use crate::support::{fine, given_up, handled, on_every_engine, published, recorder};

// conformance: omni/replay-event: replayEvent publishes the event again under a new id with replayOf naming the original; everything else is as it was.
// conformance: memory/replay-id: replay of an id publishes a copy with a new id and replay_of.
#[tokio::test]
async fn a_copy_differs_in_its_id_and_says_what_it_copies() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("order.*").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let occurred: Timestamp = "2020-02-02T02:02:02.123456Z".parse().unwrap();
        let event = Event::builder("order.placed")
            .payload("{\"z\":1, \"a\":1.50}")
            .version(3)
            .occurred_at(occurred)
            .tenant("acme")
            .app("shop")
            .source("till")
            .key("k")
            .entity("ORDER", "1")
            .causation_id("why")
            .meta("k", "v");
        let original = handled(&bus, event).await;
        let first = seen.next().await;
        lab.clock.advance(SECOND);
        // Whatever surrounds the call is not the copy's.
        let replayed = everbus::with_correlation_id("another", bus.replay_event(original.id()));
        let copy = replayed.await.unwrap();
        assert_ne!(copy.id(), original.id());
        assert!(copy.seq() > original.seq());
        let second = seen.next().await;
        assert_eq!(second.event().id(), copy.id());
        let (one, two) = (first.event(), second.event());
        assert_eq!(two.occurred_at(), occurred);
        assert_eq!(two.payload(), one.payload());
        assert_eq!((two.event_type(), two.version()), ("order.placed", 3));
        assert_eq!(two.correlation_id(), one.correlation_id());
        let attributes = two.attributes().unwrap();
        assert_eq!(attributes.tenant.as_deref(), Some("acme"));
        assert_eq!(attributes.app.as_deref(), Some("shop"));
        assert_eq!(attributes.source.as_deref(), Some("till"));
        assert_eq!(attributes.key.as_deref(), Some("k"));
        assert_eq!(attributes.causation_id.as_deref(), Some("why"));
        let entity = Entity {
            kind: "ORDER".into(),
            id: "1".into(),
        };
        assert_eq!(attributes.entity, Some(entity));
        assert_eq!(two.metadata()["k"], "v");
        assert_eq!(two.metadata()["replay_of"], original.id().to_string());

        // Each time is another copy.
        let third = bus.replay_event(original.id()).await.unwrap();
        assert_ne!(third.id(), copy.id());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: omni/replay-event-missing: replayEvent of an unknown id is an error that says so.
// conformance: memory/replay-id-tenants: an id that several tenants use is replayed for the tenant that is named.
#[tokio::test]
async fn an_id_must_name_one_event() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let missing = everbus::EventId::new();
        let error = bus.replay_event(missing).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
        assert!(error.to_string().contains(&missing.to_string()), "{error}");
        let id = everbus::EventId::new();
        for tenant in ["a", "b"] {
            let event = of_type("x").id(id).tenant(tenant);
            bus.publish(event).await.unwrap();
        }
        let error = bus.replay_event(id).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting);
        assert!(error.to_string().contains("2 tenants"), "{error}");
        let one = bus.replay().event(id).tenant("b").publish_copies();
        let report = one.await.unwrap();
        assert_eq!(report.processed, 1);
        let copies = published(&bus, "x").await;
        assert_eq!(copies.len(), 3);
        assert_eq!(copies[2].event.tenant(), Some("b"));
        assert_eq!(copies[2].event.metadata()["replay_of"], id.to_string());
    })
    .await;
}

// conformance: memory/replay-everybody: replay is for everybody or for a named group; copies reach every group that wants them.
// conformance: memory/replay-staleness: replays keep occurred_at, carry replay_of and are exempt from staleness.
#[tokio::test]
async fn copies_reach_everybody_however_old_they_are() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (billing, mut billed) = recorder(fine);
        let (mail, mut mailed) = recorder(fine);
        let subscribe = bus.subscribe("order.*").group("billing");
        subscribe
            .max_staleness(60 * SECOND)
            .handler(billing)
            .await
            .unwrap();
        bus.subscribe("*")
            .group("mail")
            .handler(mail)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let events = ["order.placed", "user.created", "order.shipped"].map(of_type);
        let originals = each_second(&lab, &bus, events).await;
        for original in &originals {
            original.settled().await.unwrap();
        }
        for _ in 0..2 {
            billed.next().await;
        }
        for _ in 0..3 {
            mailed.next().await;
        }
        lab.clock.advance(3600 * SECOND);
        let report = bus.replay().publish_copies().await.unwrap();
        assert_eq!((report.processed, report.skipped, report.errors), (3, 0, 0));
        for expected in [0, 2] {
            let copy = billed.next().await;
            let original = originals[expected].id().to_string();
            assert_eq!(copy.event().metadata()["replay_of"], original);
            assert!(copy.event().occurred_at() < lab.clock.now().minus(3000 * SECOND));
        }
        for _ in 0..3 {
            mailed.next().await;
        }
        // A second replay of the range copies the originals, not their copies.
        let report = bus.replay().publish_copies().await.unwrap();
        assert_eq!((report.processed, report.skips.copies), (3, 3));
        assert_eq!(published(&bus, "*").await.len(), 9);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: framework/dlq-manual-replay: an event of the dead letters goes back to its original stream.
#[tokio::test]
async fn a_dead_letter_can_go_back_to_its_stream() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (billing, mut billed) = recorder(|message| match message.event().metadata().len() {
            0 => Err(HandlerError::new("not the first time")),
            _ => Ok(()),
        });
        let (mail, mut mailed) = recorder(fine);
        bus.subscribe("a")
            .group("billing")
            .handler(billing)
            .await
            .unwrap();
        bus.subscribe("a")
            .group("mail")
            .handler(mail)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("a", 1)).await;
        billed.next().await;
        mailed.next().await;
        let copy = bus.replay_event(letter.event().id()).await.unwrap();
        let settled = copy.settled().await.unwrap();
        assert!(settled.dead_lettered.is_empty());
        assert_eq!(billed.next().await.event().id(), copy.id());
        assert_eq!(mailed.next().await.event().id(), copy.id());
        assert_eq!(bus.dead_letters().list().await.unwrap().len(), 1, "kept");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/replay-audit: a replay is on record before it is done, with who asked for it, and with what came of it; a preview and a function that reads are not.
#[tokio::test]
async fn a_replay_is_on_record() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let receipt = bus.publish(("a", 1)).await.unwrap();
        let nothing = |_| std::future::ready(Ok::<(), String>(()));
        bus.replay().into_function(nothing).await.unwrap();
        bus.replay().publish_copies().preview().await.unwrap();
        let alice = || Operator::new("alice").reason("a test");
        let range = bus.replay().types("a").name("n").publish_copies();
        with_operator(alice(), range.into_future()).await.unwrap();
        let one = with_operator(alice(), bus.replay_event(receipt.id()));
        let copy = one.await.unwrap();
        bus.replay().into_group("nobody").await.unwrap_err();
        let oldest = AuditQuery {
            order: Order::Oldest,
            ..AuditQuery::default()
        };
        let page = bus.audit().query(oldest).await.unwrap();
        let entries: Vec<_> = page.items.into_iter().map(|item| item.entry).collect();
        let actions: Vec<&str> = entries.iter().map(|e| e.action.as_str()).collect();
        let expected = [
            "replay",
            "replay.done",
            "replay",
            "replay.done",
            "replay",
            "replay.failed",
        ];
        assert_eq!(actions, expected);
        assert!(
            entries[..4].iter().all(|e| e.actor == "alice"),
            "{entries:?}"
        );
        assert_eq!(entries[0].details["types"], "a");
        assert_eq!(entries[0].details["target"], "copies");
        assert_eq!(entries[0].details["reason"], "a test");
        assert_eq!(entries[1].details["result"]["processed"], 1);
        let entity = entries[2].entity.as_ref().unwrap();
        assert_eq!(
            (&*entity.kind, &*entity.id),
            ("EVENT", &*receipt.id().to_string())
        );
        assert_eq!(entries[3].details["result"]["copy"], copy.id().to_string());
        assert_eq!(entries[5].details["code"], "GroupNotFound");
    })
    .await;
}
