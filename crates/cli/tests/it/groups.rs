//! `everbus groups`.

use everbus::Bus;

use crate::support::{Shop, on_runtime};

// conformance: bus/cli-groups: position, backlog, waiting and dead letters of every group are shown
#[test]
fn every_group_is_shown_with_what_it_owes() {
    let shop = Shop::new();
    shop.run(&["publish", "order.placed"]).ok();
    assert!(shop.run(&["groups"]).ok().contains("no groups yet"));
    shop.dead_letters(2);
    shop.run(&["publish", "order.placed", "1", "--count", "3"])
        .ok();
    let groups = shop.run(&["-o", "json", "groups"]).json();
    assert_eq!(groups[0]["name"], "payment");
    assert_eq!(groups[0]["dead_letters"], 2);
    assert_eq!(groups[0]["behind"], 3);
    let text = shop.run(&["groups"]).ok();
    assert!(
        text.contains("DEAD LETTERS") && text.contains("order.*"),
        "{text}"
    );
}

// conformance: contract/lag-cli: groups shows the lag of each stream, as JSON always, as text where streams are declared or asked for
#[test]
fn the_lag_of_each_stream_is_shown() {
    let shop = Shop::new();
    std::fs::write(shop.path("everbus.yaml"), "streams: {preset: omni}\n").unwrap();
    let url = format!("sqlite:{}", shop.db().display());
    on_runtime(async {
        let bus = Bus::open(&url).await.unwrap();
        for pattern in ["message.received", "media.*"] {
            let subscribe = bus.subscribe(pattern).group("g");
            subscribe.handler(|| async {}).await.unwrap();
        }
        for event_type in ["message.sent", "message.received", "message.received"] {
            bus.publish((event_type, 1)).await.unwrap();
        }
        let groups = bus.groups().await.unwrap();
        assert_eq!((groups[0].behind, groups[0].streams.len()), (2, 1));
        bus.shutdown().await.unwrap();
    });
    let groups = shop
        .run(&["--config", "everbus.yaml", "-o", "json", "groups"])
        .json();
    assert_eq!(groups[0]["behind"], 2);
    let streams = groups[0]["streams"].as_array().unwrap();
    assert_eq!(streams.len(), 2, "{streams:?}");
    assert_eq!(
        (&streams[0]["stream"], &streams[0]["behind"]),
        (&"MESSAGES".into(), &2.into())
    );
    assert!(streams[0]["behind_ms"].is_u64() && streams[0]["oldest"].is_string());
    assert_eq!(
        (&streams[1]["stream"], &streams[1]["behind_ms"]),
        (&"MEDIA".into(), &0.into())
    );
    for field in ["in_flight", "waiting", "dead_letters"] {
        assert_eq!(streams[0][field], 0, "{field}");
    }
    let text = shop.run(&["--config", "everbus.yaml", "groups"]).ok();
    assert!(
        text.contains("  MESSAGES") && text.contains("  MEDIA"),
        "{text}"
    );
    assert!(!shop.run(&["groups"]).ok().contains("  events"));
    assert!(shop.run(&["groups", "--streams"]).ok().contains("  events"));
}

// conformance: bus/cli-groups: a group is removed only when that is confirmed
#[test]
fn a_group_is_removed_only_when_that_is_confirmed() {
    let shop = Shop::new();
    shop.dead_letters(2);
    let said = shop
        .run(&["groups", "remove", "payment"])
        .failed(2, "Usage");
    assert!(
        said.contains("2 dead letters") && said.contains("--yes"),
        "{said}"
    );
    shop.run(&["groups", "remove", "payment", "--yes"]).ok();
    shop.run(&["groups", "remove", "payment", "--yes"])
        .failed(3, "GroupNotFound");
    let groups = shop.run(&["-o", "json", "groups"]).json();
    assert_eq!(groups, serde_json::json!([]));
}

// conformance: contract/ephemeral-cli: an ephemeral group is marked, and gone with its bus
#[test]
fn an_ephemeral_group_is_marked() {
    let shop = Shop::new();
    let url = format!("sqlite:{}", shop.db().display());
    on_runtime(async {
        let bus = Bus::open(&url).await.unwrap();
        let handler = || std::future::ready(());
        bus.subscribe("a")
            .ephemeral()
            .handler(handler)
            .await
            .unwrap();
        let text = shop.run(&["groups"]).ok();
        assert!(
            text.contains("ephemeral-") && text.contains(" (ephemeral)"),
            "{text}"
        );
        let groups = shop.run(&["-o", "json", "groups"]).json();
        assert_eq!(groups[0]["ephemeral"], true);
        bus.shutdown().await.unwrap();
    });
    assert!(shop.run(&["groups"]).ok().contains("no groups yet"));
}

// conformance: operations/handler-cli: groups says what waits without a handler, groups show what a group is subscribed to, groups unsubscribe takes a subscription away
#[test]
fn a_subscription_that_no_handler_takes_can_be_seen_and_taken_away() {
    let shop = Shop::new();
    let url = format!("sqlite:{}", shop.db().display());
    on_runtime(async {
        // The first version has both handlers, the second one of them.
        for patterns in [&["r.a", "r.b"][..], &["r.a"]] {
            let bus = Bus::open(&url).await.unwrap();
            for pattern in patterns {
                let subscribe = bus.subscribe(pattern).group("g");
                subscribe.handler(|| async {}).await.unwrap();
            }
            if patterns.len() == 1 {
                bus.publish(("r.b", 1)).await.unwrap();
                bus.start().await.unwrap();
                while bus.groups().await.unwrap()[0].unhandled == 0 {
                    tokio::task::yield_now().await;
                }
            }
            bus.shutdown().await.unwrap();
        }
    });
    let text = shop.run(&["groups"]).ok();
    assert!(text.contains("g: 1 event without a handler"), "{text}");
    let text = shop.run(&["groups", "show", "g"]).ok();
    assert!(
        text.contains("r.b") && text.contains("NO HANDLER"),
        "{text}"
    );
    let wrong = shop.run(&["groups", "unsubscribe", "g", "r.c"]);
    assert_eq!(wrong.code, 3, "{wrong:?}");
    assert!(wrong.err.contains("subscribed to r.a, r.b"), "{wrong:?}");
    let text = shop.run(&["groups", "unsubscribe", "g", "r.b"]).ok();
    assert!(
        text.contains("1 event that waited for a handler skipped"),
        "{text}"
    );
    let group = shop.run(&["-o", "json", "groups", "show", "g"]).json();
    assert_eq!(group["group"]["patterns"], serde_json::json!(["r.a"]));
    assert_eq!(group["group"]["unhandled"], 0);
    assert_eq!(shop.run(&["groups", "show", "nope"]).code, 3);
}
