//! `everbus streams`, and the commands that take a stream.

use everbus::{Bus, HandlerError};
use serde_json::Value;

use crate::support::{Shop, on_runtime};

const OMNI: &str = "streams: {preset: omni, overrides: {MESSAGES: {maxlen: 5, on_full: reject}}}\n";

fn configured() -> Shop {
    let shop = Shop::new();
    std::fs::write(shop.path("everbus.yaml"), OMNI).unwrap();
    shop
}

fn with_config<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let mut all = vec!["--config", "everbus.yaml", "-o", "json"];
    all.extend(more);
    all
}

/// A group that reads and handles nothing yet.
fn waiting_group(shop: &Shop, pattern: &str) {
    let url = format!("sqlite:{}", shop.db().display());
    on_runtime(async {
        let bus = Bus::open(&url).await.unwrap();
        let subscribe = bus.subscribe(pattern).group("g").name("h");
        let handler = || std::future::ready(Err::<(), _>(HandlerError::permanent("no")));
        subscribe.handler(handler).await.unwrap();
        bus.shutdown().await.unwrap();
    });
}

// conformance: contract/streams-cli-replay: replay --stream MESSAGES finds what the omni table routes there, with the table in the file and without
#[test]
fn replay_of_messages_finds_what_the_omni_table_routes_there() {
    let shop = configured();
    waiting_group(&shop, "*");
    for event_type in ["message.received", "media.seen", "message.a.b"] {
        shop.run(&with_config(&["publish", event_type, "1"])).ok();
    }
    let foretold = ["replay", "--stream", "MESSAGES", "--dry-run"];
    let declared = shop.run(&with_config(&foretold)).json();
    let mut plain = vec!["-o", "json"];
    plain.extend(foretold);
    let undeclared = shop.run(&plain).json();
    for report in [&declared, &undeclared] {
        assert_eq!(report["events"], 2, "{report}");
    }
    let done = shop.run(&with_config(&["replay", "--stream", "MESSAGES", "--yes"]));
    assert_eq!(done.json()["processed"], 2);
    let wrong = shop.run(&[
        "--config",
        "everbus.yaml",
        "replay",
        "--stream",
        "message",
        "--yes",
    ]);
    let wrong = wrong.failed(2, "NoStream");
    assert!(wrong.contains("MESSAGES"), "{wrong}");
}

// conformance: contract/streams-cli: streams shows names, types, limits and what waits; check --config the routing table
#[test]
fn streams_are_listed_with_their_limits_and_what_waits() {
    let shop = configured();
    let before = shop.run(&with_config(&["streams"])).json();
    assert_eq!(before["declared"], true);
    assert_eq!(before["streams"][0]["waiting"], Value::Null, "no file yet");
    waiting_group(&shop, "*");
    for _ in 0..5 {
        shop.run(&with_config(&["publish", "message.received", "1"]))
            .ok();
    }
    let full = shop.run(&["--config", "everbus.yaml", "publish", "message.sent", "1"]);
    assert!(full.err.contains("the stream MESSAGES is full"), "{full:?}");
    let uncovered = shop.run(&["--config", "everbus.yaml", "publish", "order.placed", "1"]);
    uncovered.failed(2, "NoStream");
    let listed = shop.run(&with_config(&["streams"])).json();
    let messages = &listed["streams"][0];
    assert_eq!(messages["name"], "MESSAGES");
    assert_eq!(messages["types"][0], "message.>");
    assert_eq!(messages["max_age_s"], 30 * 24 * 3600);
    assert_eq!(
        (&messages["max_len"], &messages["waiting"]),
        (&5.into(), &5.into())
    );
    assert_eq!(messages["on_full"], "reject");
    let text = shop.run(&["--config", "everbus.yaml", "streams"]).ok();
    assert!(
        text.contains("MESSAGES") && text.contains("message.>"),
        "{text}"
    );
    let single = shop.run(&["-o", "json", "streams"]).json();
    assert_eq!(single["declared"], false);
    assert_eq!(single["streams"][0]["name"], "events");
    assert_eq!(single["streams"][0]["waiting"], 5);

    let text = shop.run(&["check", "--config", "everbus.yaml"]).ok();
    assert!(text.contains("stream MESSAGES: message.>\n"), "{text}");
    assert!(text.contains("stream SYSTEM: system.>\n"), "{text}");
    let report = shop
        .run(&["-o", "json", "check", "--config", "everbus.yaml"])
        .json();
    assert_eq!(report["streams"][1]["name"], "IDENTITY");
}

// conformance: contract/streams-cli-dlq: dlq list --stream has the dead letters of a declared stream
#[test]
fn dead_letters_are_listed_by_stream() {
    let shop = configured();
    let url = format!("sqlite:{}", shop.db().display());
    on_runtime(async {
        let bus = Bus::open(&url).await.unwrap();
        let handler = || std::future::ready(Err::<(), _>(HandlerError::permanent("no")));
        bus.subscribe("*")
            .group("g")
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        for event_type in ["message.received", "media.seen"] {
            let receipt = bus.publish((event_type, 1)).await.unwrap();
            receipt.settled().await.unwrap();
        }
        bus.shutdown().await.unwrap();
    });
    let types = |arguments: &[&str]| -> Vec<String> {
        let page = shop.run(arguments).json();
        let letters = page["dead_letters"].as_array().unwrap().iter();
        letters
            .map(|l| l["event"]["type"].as_str().unwrap().to_owned())
            .collect()
    };
    let listed = types(&with_config(&["dlq", "list", "--stream", "MESSAGES"]));
    assert_eq!(listed, ["message.received"]);
    assert_eq!(
        types(&["-o", "json", "dlq", "list", "--stream", "media"]),
        ["media.seen"]
    );
    let wrong = shop.run(&[
        "--config",
        "everbus.yaml",
        "dlq",
        "list",
        "--stream",
        "MEDIUM",
    ]);
    wrong.failed(2, "NoStream");
    let both = ["dlq", "list", "--stream", "MEDIA", "--type", "media.*"];
    assert_eq!(shop.run(&both).code, 2);
}

// conformance: contract/streams-cli-retention: retention goes by the ages of declared streams; --stream takes their names
#[test]
fn retention_goes_by_declared_streams() {
    let shop = configured();
    shop.run(&with_config(&["publish", "message.received", "1"]))
        .ok();
    let shown = shop
        .run(&with_config(&["retention", "show", "--stream", "MEDIA=1h"]))
        .json();
    let ages = shown["policy"]["streams"].as_array().unwrap();
    assert_eq!(ages[0]["types"], "media.>");
    assert_eq!(ages[0]["max_age_s"], 3600);
    let messages = ages.iter().find(|age| age["types"] == "message.>").unwrap();
    assert_eq!(messages["max_age_s"], 30 * 24 * 3600);
    let wrong = shop.run(&[
        "--config",
        "everbus.yaml",
        "retention",
        "show",
        "--stream",
        "order.>=1h",
    ]);
    wrong.failed(2, "NoStream");
}
