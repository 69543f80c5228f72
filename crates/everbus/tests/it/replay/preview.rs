//! What a replay would do, told before it does it.

use everbus::{Json, Router, to};

use super::{Given, each_second, of_type};
use crate::support::{fine, handled, on_every_engine, published, recorder};

// conformance: issue-4/replay-preview: a preview says how many events, which groups and handlers would run and how many the inbox would absorb, and changes nothing.
#[tokio::test]
async fn a_preview_tells_who_would_get_what() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (billing, mut billed) = recorder(fine);
        let (mail, mut mailed) = recorder(fine);
        let (_unused, other) = (0, recorder(fine).0);
        let subscribe = bus.subscribe("order.*").group("billing").name("charge");
        subscribe.idempotent().to(billing).await.unwrap();
        bus.subscribe("user.*")
            .group("billing")
            .name("greet")
            .to(other)
            .await
            .unwrap();
        bus.subscribe("*")
            .group("mail")
            .name("all")
            .to(mail)
            .await
            .unwrap();
        let (nobody, _) = recorder(fine);
        bus.subscribe("nothing")
            .group("idle")
            .to(nobody)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let first = handled(&bus, of_type("order.placed")).await;
        lab.clock.advance(super::SECOND);
        handled(&bus, of_type("order.placed")).await;
        handled(&bus, of_type("order.shipped")).await;
        let last = handled(&bus, of_type("file.stored")).await;
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
        assert_eq!((preview.events, preview.filtered), (3, 1));
        assert_eq!(preview.types["order.placed"], 2);
        assert_eq!(preview.types.len(), 2);
        assert_eq!(preview.first, Some(first.received_at()));
        assert_eq!(preview.last, Some(last.received_at()));
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
        let function = bus.replay().to(given.function()).preview().await.unwrap();
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
        bus.subscribe("a").group("g").to(handler).await.unwrap();
        each_second(&lab, &bus, (0..3).map(|_| of_type("a"))).await;
        let preview = bus.replay().into_group("g").preview().await.unwrap();
        assert_eq!((preview.groups[0].events, preview.groups[0].owed), (3, 3));
        let report = bus.replay().into_group("g").await.unwrap();
        assert_eq!((report.processed, report.skips.owed), (0, 3));
    })
    .await;
}
