//! `everbus events`.

use serde_json::Value;

use crate::support::{Ran, Shop};

/// Five orders of two tenants, and an event without any names.
fn filled() -> Shop {
    let shop = Shop::new();
    for n in 1..=5 {
        let tenant = if n % 2 == 1 { "acme" } else { "other" };
        let entity = format!("ORDER:{}", n % 3);
        let payload = format!("{{\"n\":{n}}}");
        let kind = if n == 3 { "order.paid" } else { "order.placed" };
        shop.run(&[
            "publish", kind, &payload, "--tenant", tenant, "--app", "shop", "--entity", &entity,
        ])
        .ok();
    }
    shop.run(&["publish", "user.created", "{\"n\":6}"]).ok();
    shop
}

fn listed(page: &Value) -> Vec<u64> {
    let events = page["events"].as_array().unwrap();
    events.iter().map(|e| e["seq"].as_u64().unwrap()).collect()
}

fn json(shop: &Shop, arguments: &[&str]) -> Value {
    shop.run(&[&["-o", "json", "events"], arguments].concat())
        .json()
}

// conformance: memory/cli-events: `everbus events` finds by tenant, app, entity, type and time, in both orders
#[test]
fn events_are_found_by_every_filter() {
    let shop = filled();
    for (arguments, expected, plan) in [
        (&[][..], &[6, 5, 4, 3, 2, 1][..], "scan"),
        (&["--tenant", "acme"], &[5, 3, 1], "index tenant"),
        (
            &["--app", "shop", "--order", "oldest"],
            &[1, 2, 3, 4, 5],
            "index app",
        ),
        (&["--entity", "ORDER:2"], &[5, 2], "index entity"),
        (&["--type", "order.paid"], &[3], "scan, filter type"),
        (
            &["--type", "order.*", "--tenant", "other"],
            &[4, 2],
            "index tenant, filter type",
        ),
        (
            &["--type", "order.placed", "--tenant", "acme"],
            &[5, 1],
            "index type+tenant",
        ),
        (
            &["--tenant", "acme", "--entity", "ORDER:2"],
            &[5],
            "indexes entity ∩ tenant",
        ),
        (
            &["--since", "1h", "--until", "2999-01-01", "--limit", "2"],
            &[6, 5],
            "scan",
        ),
        (&["--until", "2020-01-01"], &[], "scan"),
        (&["--tenant", "nobody"], &[], "index tenant"),
    ] {
        let page = json(&shop, &[arguments, &["--explain"]].concat());
        assert_eq!(listed(&page), expected, "{arguments:?}");
        assert_eq!(page["plan"], plan, "{arguments:?}");
    }
    let page = json(&shop, &["--entity", "ORDER:1", "--limit", "1"]);
    assert_eq!(page.get("plan"), None, "only with --explain");
    let event = &page["events"][0];
    assert_eq!(
        (&event["tenant"], &event["app"]),
        (&"other".into(), &"shop".into())
    );
    assert_eq!(event["payload"]["n"], 4);
}

// conformance: memory/cli-events-pages: the text is a table whose last line is the command for the next page
#[test]
fn the_table_ends_with_the_command_for_the_next_page() {
    let shop = filled();
    let text = shop
        .run(&[
            "events", "--type", "order.*", "--order", "oldest", "--limit", "3", "--since", "1h",
        ])
        .ok();
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines[0].starts_with("SEQ") && lines[0].contains("ENTITY"),
        "{text}"
    );
    assert!(
        lines[1].contains("acme") && lines[1].contains("ORDER:1 "),
        "{text}"
    );
    assert_eq!(lines.len(), 5);
    let command = lines[4].strip_prefix("more: everbus ").unwrap();
    let words: Vec<&str> = command.split(' ').map(|w| w.trim_matches('\'')).collect();
    let rest = shop.run(&words).ok();
    assert_eq!(
        rest.lines().count(),
        3,
        "two more, and no next page: {rest}"
    );
    assert!(!rest.contains("more:"), "{rest}");
    // Empty columns are left out.
    let bare = shop.run(&["events", "--type", "user.*"]).ok();
    assert!(
        !bare.contains("TENANT") && bare.contains("user.created"),
        "{bare}"
    );
    assert_eq!(shop.run(&["events", "--app", "none"]).ok(), "no events\n");
}

// conformance: memory/cli-events-json: the cursor and the resolved times of a page lead to the next
#[test]
fn json_pages_lead_from_one_to_the_next() {
    let shop = filled();
    let mut found = Vec::new();
    let first = json(&shop, &["--since", "1h", "--limit", "4"]);
    found.extend(listed(&first));
    let (since, next) = (
        first["since"].as_str().unwrap(),
        first["next"].as_str().unwrap(),
    );
    let second = json(&shop, &["--since", since, "--limit", "4", "--cursor", next]);
    found.extend(listed(&second));
    assert_eq!(found, [6, 5, 4, 3, 2, 1]);
    assert_eq!(second["next"], Value::Null);
}

// conformance: memory/cli-events-bad-input: malformed cursors, ranges, limits and entities are clear errors
#[test]
fn wrong_input_is_a_clear_error() {
    let shop = filled();
    let refused = |arguments: &[&str]| -> Ran {
        let ran = shop.run(&[&["events"], arguments].concat());
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.out.is_empty(), "{ran:?}");
        ran
    };
    for bad in ["x", "", "4d", "4d-zz", "4D-00000000"] {
        let ran = refused(&["--cursor", bad]);
        assert!(
            ran.err.contains("is not a cursor") && ran.err.contains("hint"),
            "{ran:?}"
        );
    }
    let next = json(&shop, &["--limit", "1"])["next"]
        .as_str()
        .unwrap()
        .to_owned();
    let ran = refused(&["--tenant", "acme", "--cursor", &next]);
    assert!(ran.err.contains("belongs to another query"), "{ran:?}");
    let ran = refused(&["--since", "2026-02-01", "--until", "2026-01-01"]);
    assert!(ran.err.contains("is after --until"), "{ran:?}");
    for limit in ["0", "10001", "-1", "x"] {
        refused(&["--limit", limit]);
    }
    refused(&["--entity", "ORDER"]);
    refused(&["--type", "order.*x"]);
    refused(&["--order", "upwards"]);
    let nowhere = Shop::new();
    assert_eq!(nowhere.run(&["events"]).code, 3, "it makes no file");
    assert!(!nowhere.db().exists());
}
