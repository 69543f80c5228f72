//! Ephemeral groups: each handler its own, gone with the bus.

use everbus::{Bus, Code, GroupInfo, HandlerError, RetryPolicy, Router, to};

use crate::support::{fine, on_every_durable_engine, on_every_engine, recorder};

async fn ok() {}

async fn groups(bus: &Bus) -> Vec<GroupInfo> {
    bus.groups().await.unwrap()
}

// conformance: contract/ephemeral-handlers: each ephemeral handler has a group of its own that begins with what comes, and is gone with its bus
#[tokio::test]
async fn every_ephemeral_handler_sees_every_event_from_now_on() {
    on_every_durable_engine(|lab| async move {
        let bus = lab.open().await;
        bus.publish(("a", "before")).await.unwrap();
        let (first, mut by_first) = recorder(fine);
        let (second, mut by_second) = recorder(fine);
        bus.subscribe("a").ephemeral().handler(first).await.unwrap();
        bus.mount(Router::new().ephemeral().on("a", second))
            .await
            .unwrap();
        bus.subscribe("a")
            .group("lasting")
            .handler(ok)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", "after")).await.unwrap();
        for seen in [&mut by_first, &mut by_second] {
            assert_eq!(seen.next().await.payload().as_ref(), b"\"after\"");
        }
        receipt.settled().await.unwrap();
        let names: Vec<String> = groups(&bus)
            .await
            .iter()
            .filter(|group| group.ephemeral)
            .map(|group| group.name.to_string())
            .collect();
        assert_eq!(names.len(), 2);
        for name in &names {
            assert!(name.starts_with("ephemeral-"), "{name}");
        }
        bus.shutdown().await.unwrap();

        let bus = lab.open().await;
        let left = groups(&bus).await;
        assert_eq!(left.len(), 1);
        assert_eq!(
            (left[0].name.as_str(), left[0].ephemeral),
            ("lasting", false)
        );
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: contract/ephemeral-omni: durable is the group, queue if there is no durable, with neither the group is ephemeral
// conformance: omni/subscribe-durable: durable is the group, queue if there is no durable, with neither the group is ephemeral
#[tokio::test]
async fn durable_is_the_group_then_queue_and_neither_is_ephemeral() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        for (durable, queue) in [
            (Some("durable"), Some("queue")),
            (None, Some("queue-only")),
            (Some("durable-only"), None),
            (None, None),
        ] {
            let route = to(ok).durable_or_queue(durable, queue);
            bus.mount(Router::new().on("a", route)).await.unwrap();
        }
        let groups = groups(&bus).await;
        let lasting = groups.iter().filter(|group| !group.ephemeral);
        let names: Vec<&str> = lasting.map(|group| group.name.as_str()).collect();
        assert_eq!(names, ["durable", "durable-only", "queue-only"]);
        assert_eq!(groups.len(), 4);
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn what_an_ephemeral_handler_cannot_handle_is_no_dead_letter() {
    on_every_engine(|lab| async move {
        let bus = lab
            .open_with(lab.builder().retry(RetryPolicy::never()))
            .await;
        let (handler, mut seen) = recorder(|_| Err(HandlerError::new("no")));
        let subscribe = bus.subscribe("a").group("viewer").ephemeral();
        subscribe.handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        seen.next().await;
        assert_eq!(receipt.settled().await.unwrap().dead_lettered, []);
        assert_eq!(bus.dead_letters().list().await.unwrap(), []);
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_group_is_ephemeral_for_all_its_handlers_or_for_none() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("a").group("g").handler(ok).await.unwrap();
        let mixed = bus.subscribe("b").group("g").ephemeral().handler(ok).await;
        assert_eq!(mixed.unwrap_err().code(), Code::GroupConflict);
        // Said once is enough.
        bus.subscribe("a")
            .group("e")
            .ephemeral()
            .handler(ok)
            .await
            .unwrap();
        bus.subscribe("b").group("e").handler(ok).await.unwrap();
        bus.shutdown().await.unwrap();
    })
    .await;
}
