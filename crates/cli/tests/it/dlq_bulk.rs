//! `everbus dlq retry` in bulk, and the filters by which dead letters are chosen.

use everbus::{Bus, Event, HandlerError, RetryPolicy};
use serde_json::{Value, json};

use crate::support::{Shop, on_runtime};

/// Dead letters of two groups, two tenants, two handlers and three errors.
fn mixed(shop: &Shop) {
    let url = format!("sqlite:{}", shop.db().display());
    on_runtime(async {
        let builder = Bus::builder().retry(RetryPolicy::never());
        let bus = builder.open(&url).await.unwrap();
        for (group, name, error) in [
            ("payment", "charge", "the bank's \"closed\""),
            ("mail", "send", "no route\u{1b}[31m"),
        ] {
            let fail = move || std::future::ready(Err::<(), _>(HandlerError::new(error)));
            let subscribe = bus.subscribe("order.*").group(group).name(name);
            subscribe.handler(fail).await.unwrap();
        }
        bus.start().await.unwrap();
        for (event_type, tenant) in [
            ("order.placed", "acme"),
            ("order.placed", "umbrella"),
            ("order.paid", "acme"),
        ] {
            let event = Event::builder(event_type).tenant(tenant);
            bus.publish(event).await.unwrap().settled().await.unwrap();
        }
        bus.shutdown().await.unwrap();
    });
}

// conformance: memory/cli-dlq-filter: dead letters are listed, retried and purged by tenant, handler and error
#[test]
fn dead_letters_are_chosen_by_tenant_handler_and_error() {
    let shop = Shop::new();
    mixed(&shop);
    let count = |arguments: &[&str]| {
        let all = [&["-o", "json", "dlq", "list"], arguments].concat();
        let page = shop.run(&all).json();
        page["dead_letters"].as_array().unwrap().len()
    };
    assert_eq!(count(&[]), 6);
    assert_eq!(count(&["--tenant", "acme"]), 4);
    assert_eq!(count(&["--tenant", "nobody"]), 0);
    assert_eq!(count(&["--handler", "send"]), 3);
    assert_eq!(count(&["--error", "bank's \"c"]), 3);
    assert_eq!(count(&["--error", "BANK"]), 0);
    assert_eq!(
        count(&[
            "--tenant",
            "acme",
            "--handler",
            "charge",
            "--type",
            "order.paid"
        ]),
        1
    );
    // The next page is of the same choice.
    let text = shop
        .run(&[
            "dlq", "list", "--limit", "1", "--tenant", "acme", "--error", "no route",
        ])
        .ok();
    let more = text.lines().last().unwrap();
    assert!(
        more.contains("--tenant acme") && more.contains("--error 'no route'"),
        "{more}"
    );
    let purged = shop
        .run(&[
            "dlq",
            "purge",
            "--older-than",
            "0",
            "--handler",
            "send",
            "--dry-run",
        ])
        .ok();
    let with = "with their events where no other group needs them";
    assert_eq!(purged, format!("would delete 3 dead letters, {with}\n"));
    let by_death = ["--by", "died", "--dry-run"];
    let purged = shop.run(
        &[
            &["dlq", "purge", "--older-than", "0", "--tenant", "acme"],
            &by_death[..],
        ]
        .concat(),
    );
    assert_eq!(
        purged.ok(),
        format!("would delete 4 dead letters, {with}\n")
    );
    let sent = shop
        .run(&[
            "dlq", "retry", "--error", "no route", "--tenant", "umbrella",
        ])
        .ok();
    assert_eq!(sent, "sent back 1 dead letter\n");
    assert_eq!(count(&[]), 5);
}

// conformance: memory/cli-dlq-dry-run: --dry-run says how many, of which groups and types, and why they failed
#[test]
fn a_dry_run_says_what_would_go() {
    let shop = Shop::new();
    mixed(&shop);
    let dry = shop
        .run(&["-o", "json", "dlq", "retry", "--all", "--dry-run"])
        .json();
    assert_eq!(
        (&dry["retried"], &dry["dry_run"]),
        (&json!(6), &json!(true))
    );
    let by = dry["by"].as_array().unwrap();
    let of = |group: &str, event_type: &str| -> Vec<&Value> {
        let found = by
            .iter()
            .filter(|t| t["group"] == group && t["event_type"] == event_type);
        found.map(|t| &t["count"]).collect()
    };
    assert_eq!(of("payment", "order.placed"), [&json!(2)]);
    assert_eq!(of("mail", "order.paid"), [&json!(1)]);
    let text = shop.run(&["dlq", "retry", "--all", "--dry-run"]).ok();
    assert!(
        text.starts_with("would send back 6 dead letters\n"),
        "{text}"
    );
    for part in [
        "payment",
        "mail",
        "order.placed",
        "order.paid",
        "the bank's \"closed\"",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains('\u{1b}'), "{text:?}");
    let few = shop
        .run(&["dlq", "retry", "--all", "--limit", "4", "--dry-run"])
        .ok();
    assert!(few.starts_with("would send back 4 dead letters\n"), "{few}");
    let none = shop
        .run(&["dlq", "retry", "--tenant", "nobody", "--dry-run"])
        .ok();
    assert_eq!(none, "would send back 0 dead letters\n");
    let left = shop.run(&["-o", "json", "dlq", "list"]).json();
    assert_eq!(
        left["dead_letters"].as_array().unwrap().len(),
        6,
        "nothing went"
    );
}

// conformance: memory/cli-dlq-rate: --rate sends back so many per second, --limit so many in all, oldest first
// conformance: framework/dlq-replay-limit: the number to replay is an option
#[test]
fn a_bulk_retry_has_a_rate_and_a_limit() {
    let shop = Shop::new();
    let ids = shop.dead_letters(6);
    let sent = shop.run(&["dlq", "retry", "--all", "--limit", "2"]).ok();
    assert_eq!(sent, "sent back 2 dead letters\n");
    let began = std::time::Instant::now();
    let sent = shop.run(&[
        "-o", "json", "dlq", "retry", "--type", "order.*", "--rate", "5", "--limit", "3",
    ]);
    assert_eq!(sent.json(), json!({ "retried": 3, "dry_run": false }));
    // The second and the third wait a fifth of a second each.
    assert!(began.elapsed() >= std::time::Duration::from_millis(400));
    let left = shop.run(&["-o", "json", "dlq", "list"]).json();
    let left = left["dead_letters"].as_array().unwrap().clone();
    assert_eq!(left.len(), 1);
    assert_eq!(
        left[0]["event"]["id"],
        ids[5].as_str(),
        "the newest is left"
    );
    let sent = shop.run(&["dlq", "retry", "--all", "--rate", "1000"]).ok();
    assert_eq!(sent, "sent back 1 dead letter\n");
    let shown = shop.run(&["dlq", "show", &ids[0]]).ok();
    assert!(shown.contains("sent back "), "{shown}");
    for wrong in [
        &["--all", "--rate", "0"][..],
        &["--all", "--rate", "-1"],
        &["--all", "--rate", "fast"],
        &["--all", "--limit", "0"],
        &[&ids[0], "--rate", "5"],
        &[&ids[0], "--limit", "5"],
    ] {
        let ran = shop.run(&[&["dlq", "retry"], wrong].concat());
        assert_eq!(ran.code, 2, "{wrong:?}: {ran:?}");
    }
    shop.run(&["dlq", "retry", "--rate", "5"])
        .failed(2, "Usage");
}
