//! `get --payloads` and `payloads largest`.

use everbus::Bus;
use everbus::payloads::Stage;
use serde_json::{Value, json};

use crate::support::{Shop, on_runtime};

/// An event with two stages, one of them large; its id.
fn staged(shop: &Shop) -> String {
    let url = format!("sqlite:{}", shop.db().display());
    on_runtime(async {
        let bus = Bus::open(&url).await.unwrap();
        let receipt = bus
            .publish(("message.received", json!({ "n": 1 })))
            .await
            .unwrap();
        let stages = bus.payloads();
        let id = receipt.id();
        stages
            .store(id, Stage::WEBHOOK_RAW, &json!({ "a": "\u{1b}[31m" }))
            .await
            .unwrap();
        stages
            .store(id, Stage::AGENT_RESPONSE, &"x".repeat(60_000))
            .status_code(502)
            .error_details("bad gateway")
            .await
            .unwrap();
        bus.shutdown().await.unwrap();
        id.to_string()
    })
}

// conformance: memory/cli-payloads: get --payloads shows the stages of an event, one or all, as text and JSON, and exports them
#[test]
fn the_stages_of_an_event_are_shown() {
    let shop = Shop::new();
    let id = staged(&shop);
    let text = shop.run(&["get", &id, "--payloads"]).ok();
    assert!(text.contains("stage        webhook_raw"), "{text}");
    assert!(text.contains("agent_response"), "{text}");
    assert!(text.contains("60002 bytes"), "{text}");
    assert!(text.contains("status 502, base64"), "{text}");
    assert!(text.contains("error: bad gateway"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
    assert!(!shop.run(&["get", &id]).ok().contains("webhook_raw"));

    let one = shop
        .run(&[
            "get",
            &id,
            "--payloads",
            "--stage",
            "webhook_raw",
            "-o",
            "json",
        ])
        .ok();
    let one: Value = serde_json::from_str(&one).unwrap();
    assert_eq!(one["event"]["payload"], json!({ "n": 1 }));
    let stages = one["payloads"].as_array().unwrap();
    assert_eq!(stages.len(), 1);
    assert_eq!(stages[0]["stage"], "webhook_raw");
    assert_eq!(stages[0]["payload"], json!({ "a": "\u{1b}[31m" }));

    let rows = shop.run(&["get", &id, "--payloads", "--export"]).ok();
    let rows: Vec<Value> = rows
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[1]["status_code"], 502);
    assert!(
        rows[0]["payload_compressed"]
            .as_str()
            .unwrap()
            .starts_with("H4sI")
    );

    assert_eq!(shop.run(&["get", &id, "--stage", "error"]).code, 2);
    assert_eq!(shop.run(&["get", &id, "--payloads", "--stage", ""]).code, 2);
}

// conformance: memory/cli-payloads-largest: the largest stages are listed, over 50,000 bytes unless said otherwise
#[test]
fn the_largest_stages_are_listed() {
    let shop = Shop::new();
    let id = staged(&shop);
    let text = shop.run(&["payloads", "largest"]).ok();
    assert!(text.contains(&id) && text.contains("60002"), "{text}");
    assert!(!text.contains("webhook_raw"), "{text}");
    let all = shop
        .run(&["payloads", "largest", "--over", "0", "-o", "json"])
        .ok();
    let all: Value = serde_json::from_str(&all).unwrap();
    let sizes: Vec<u64> = all
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["payload_size_original"].as_u64().unwrap())
        .collect();
    assert_eq!(sizes.len(), 2);
    assert_eq!(sizes[0], 60_002);
    let first = shop
        .run(&[
            "payloads", "largest", "--over", "0", "--limit", "1", "-o", "json",
        ])
        .ok();
    assert_eq!(
        serde_json::from_str::<Value>(&first)
            .unwrap()
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let none = shop.run(&["payloads", "largest", "--over", "1m"]).ok();
    assert!(none.contains("no stage"), "{none}");
    assert_eq!(shop.run(&["payloads", "largest", "--over", "many"]).code, 2);
}
