//! What a replay would do, told before it does it.

use std::sync::Arc;

use everbus::replay::ReplaySkips;
use everbus::{
    Bus, Event, HandlerError, HandlerResult, Json, Message, Receipt, ReplayPreview, ReplayReport,
    Router, to,
};
use tokio::sync::Semaphore;

use super::{Given, each_second, of_type};
use crate::support::{
    eventually, fine, handled, on_every_engine, published, recorder, wait_for_retry,
};

// conformance: memory/replay-preview: a preview says how many events, which groups and handlers would run and how many the inbox would absorb, and changes nothing.
#[tokio::test]
async fn a_preview_tells_who_would_get_what() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (billing, mut billed) = recorder(fine);
        let (mail, mut mailed) = recorder(fine);
        let (_unused, other) = (0, recorder(fine).0);
        let subscribe = bus.subscribe("order.*").group("billing").name("charge");
        subscribe.idempotent().handler(billing).await.unwrap();
        bus.subscribe("user.*")
            .group("billing")
            .name("greet")
            .handler(other)
            .await
            .unwrap();
        bus.subscribe("*")
            .group("mail")
            .name("all")
            .handler(mail)
            .await
            .unwrap();
        let (nobody, _) = recorder(fine);
        bus.subscribe("nothing")
            .group("idle")
            .handler(nobody)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let first = handled(&bus, of_type("order.placed")).await;
        lab.clock.advance(super::SECOND);
        let second = handled(&bus, of_type("order.placed")).await;
        handled(&bus, of_type("order.shipped")).await;
        handled(&bus, of_type("file.stored")).await;
        for _ in 0..3 {
            billed.next().await;
        }
        for _ in 0..4 {
            mailed.next().await;
        }

        let preview = bus
            .replay()
            .filter(|record| record.event.event_type() != "order.shipped")
            .into_group("billing")
            .preview()
            .await
            .unwrap();
        assert_eq!((preview.events, preview.skipped), (0, 4));
        let skips = &preview.skips;
        assert_eq!((skips.filtered, skips.unwanted, skips.absorbed), (1, 1, 2));
        assert_eq!(preview.types["order.placed"], 2);
        assert_eq!(preview.types.len(), 1);
        assert_eq!(preview.first, Some(first.received_at()));
        assert_eq!(preview.last, Some(second.received_at()));
        assert_eq!(preview.groups.len(), 1);
        let group = &preview.groups[0];
        assert_eq!(group.group.to_string(), "billing");
        assert_eq!((group.events, group.absorbed, group.owed), (2, 2, 0));
        assert_eq!(group.patterns, ["order.*", "user.*"]);
        assert_eq!(group.handlers, ["charge"]);

        let preview = bus.replay().publish_copies().preview().await.unwrap();
        assert_eq!(preview.events, 4);
        let groups: Vec<_> = preview.groups.iter().map(|g| g.group.to_string()).collect();
        assert_eq!(groups, ["billing", "mail"]);
        assert_eq!((preview.groups[0].events, preview.groups[1].events), (3, 4));
        assert_eq!(preview.groups[0].absorbed, 0, "copies are new to the inbox");

        let router = Router::new().on("file.*", to(|Json(_): Json<u32>| async {}).name("index"));
        let fresh = bus
            .replay()
            .into_fresh_group(router)
            .preview()
            .await
            .unwrap();
        assert_eq!(fresh.groups[0].events, 1);
        assert_eq!(fresh.groups[0].handlers, ["index"]);

        let given = Given::default();
        let function = bus
            .replay()
            .into_function(given.function())
            .preview()
            .await
            .unwrap();
        assert_eq!((function.events, function.groups.len()), (4, 0));

        // Nothing happened.
        assert!(given.positions().is_empty());
        assert_eq!(published(&bus, "*").await.len(), 4);
        for group in bus.groups().await.unwrap() {
            assert_eq!((group.waiting, group.in_flight), (0, 0), "{group:?}");
        }
        assert_eq!(bus.groups().await.unwrap().len(), 3);
        assert!(billed.is_empty() && mailed.is_empty());
        let missing = bus.replay().into_group("nobody").preview().await;
        assert!(missing.is_err());
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn what_a_group_has_not_reached_is_its_anyway() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, _seen) = recorder(fine);
        bus.subscribe("a")
            .group("g")
            .handler(handler)
            .await
            .unwrap();
        each_second(&lab, &bus, (0..3).map(|_| of_type("a"))).await;
        let preview = bus.replay().into_group("g").preview().await.unwrap();
        assert_eq!((preview.groups[0].events, preview.groups[0].owed), (3, 3));
        let report = bus.replay().into_group("g").await.unwrap();
        assert_eq!((report.processed, report.skips.owed), (0, 3));
    })
    .await;
}

/// Does what the event says; what is to be held is in flight until the gate is closed.
async fn obey(message: Message, gate: Arc<Semaphore>) -> HandlerResult {
    match message.event().json::<String>().unwrap().as_str() {
        "wait" => Err(HandlerError::new("not yet")),
        "die" => Err(HandlerError::permanent("never")),
        "hold" => {
            let _ = gate.acquire().await;
            Ok(())
        }
        _ => Ok(()),
    }
}

async fn told(bus: &Bus, event_type: &str, what: &str) -> Receipt {
    let event = Event::builder(event_type.to_owned()).json(&what);
    bus.publish(event).await.unwrap()
}

fn same(preview: &ReplayPreview, report: &ReplayReport) {
    assert_eq!(preview.skips, report.skips);
    assert_eq!(
        (preview.events, preview.skipped),
        (report.processed, report.skipped)
    );
    assert!(report.failures.is_empty());
}

fn skips(set: impl FnOnce(&mut ReplaySkips)) -> ReplaySkips {
    let mut skips = ReplaySkips::default();
    set(&mut skips);
    skips
}

// conformance: memory/replay-preview-exact: a preview counts as the run does, event for event: waiting, in flight, dead, absorbed, copied, corrected and unmatched.
// conformance: memory/replay-corrections: a corrected event is replayed for the group it was sent to, in place of its original; copies of a range leave out both, and count them.
#[tokio::test]
async fn a_preview_counts_what_the_run_does() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let gate = Arc::new(Semaphore::new(0));
        for group in ["once", "plain"] {
            let gate = gate.clone();
            let subscribe = bus.subscribe("a.*").group(group);
            let subscribe = if group == "once" {
                subscribe.idempotent()
            } else {
                subscribe
            };
            let handler = move |message: Message| obey(message, gate.clone());
            subscribe.handler(handler).await.unwrap();
        }
        bus.start().await.unwrap();
        let first = told(&bus, "a.b", "fine").await;
        for (event_type, what) in [
            ("a.b", "fine"),
            ("a.c", "fine"),
            ("c", "fine"),
            ("a.b", "die"),
        ] {
            told(&bus, event_type, what).await.settled().await.unwrap();
        }
        let waiting = told(&bus, "a.b", "wait").await;
        for group in ["once", "plain"] {
            wait_for_retry(&bus, waiting.seq(), group, 1).await;
        }
        let dead = told(&bus, "a.b", "die").await;
        dead.settled().await.unwrap();
        let letters = bus.dead_letters().get(dead.id()).await.unwrap();
        let letter = letters.iter().find(|it| it.group.as_str() == "once");
        let edit = bus.dead_letters().edit(letter.unwrap(), "\"fine\"").await;
        let correction = edit.unwrap();
        correction.settled().await.unwrap();
        let copy = bus.replay_event(first.id()).await.unwrap();
        copy.settled().await.unwrap();
        told(&bus, "a.b", "hold").await;
        eventually("it is held", || async {
            let groups = bus.groups().await.unwrap();
            groups.iter().all(|group| group.in_flight == 1)
        })
        .await;

        // Named, an event is replayed whatever it is.
        let named = || bus.replay().event(correction.id());
        assert_eq!(named().publish_copies().preview().await.unwrap().events, 1);
        let preview = named().into_group("plain").preview().await.unwrap();
        assert_eq!((preview.events, preview.skipped), (1, 0));
        let named = bus.replay().event(dead.id());
        let preview = named.into_group("once").preview().await.unwrap();
        assert_eq!((preview.events, preview.skipped), (1, 0));

        let preview = bus.replay().into_group("once").preview().await.unwrap();
        let report = bus.replay().into_group("once").await.unwrap();
        same(&preview, &report);
        let expected = skips(|skips| {
            (skips.unwanted, skips.owed, skips.replaced) = (1, 3, 1);
            skips.absorbed = 5;
        });
        assert_eq!((report.processed, report.skips), (0, expected));
        let group = &preview.groups[0];
        assert_eq!((group.events, group.owed, group.absorbed), (8, 3, 5));

        let preview = bus.replay().into_group("plain").preview().await.unwrap();
        let report = bus.replay().into_group("plain").await.unwrap();
        same(&preview, &report);
        let expected = skips(|skips| {
            (skips.unwanted, skips.owed, skips.corrections) = (1, 4, 1);
        });
        assert_eq!((report.processed, report.skips), (4, expected));
        assert_eq!((preview.groups[0].events, preview.groups[0].owed), (8, 4));
        assert_eq!(preview.types["a.b"], 3);

        let router = || Router::new().on("c", to(|Json(_): Json<String>| async {}));
        let fresh = || bus.replay().into_fresh_group(router());
        same(&fresh().preview().await.unwrap(), &fresh().await.unwrap());
        let given = Given::default();
        let function = || bus.replay().into_function(given.function());
        same(
            &function().preview().await.unwrap(),
            &function().await.unwrap(),
        );

        let preview = bus.replay().publish_copies().preview().await.unwrap();
        let report = bus.replay().publish_copies().await.unwrap();
        same(&preview, &report);
        let expected = skips(|skips| {
            (skips.copies, skips.replaced, skips.corrections) = (1, 1, 1);
        });
        assert_eq!((report.processed, report.skips), (7, expected));
        let reached: Vec<u64> = preview.groups.iter().map(|group| group.events).collect();
        assert_eq!(reached, [6, 6]);
        gate.close();
        bus.shutdown().await.unwrap();
    })
    .await;
}
