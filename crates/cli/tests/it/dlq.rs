//! `everbus dlq`.

use serde_json::{Value, json};

use crate::support::Shop;

// conformance: bus/cli-dlq: dead letters are listed newest first, shown, and paged
// conformance: bus/dlq-keyset: the cursor of a page leads to the next one
#[test]
fn dead_letters_are_listed_newest_first_and_paged() {
    let shop = Shop::new();
    let ids = shop.dead_letters(5);
    let page = shop
        .run(&["-o", "json", "dlq", "list", "--limit", "2"])
        .json();
    let listed = |page: &Value| -> Vec<String> {
        let letters = page["dead_letters"].as_array().unwrap();
        letters
            .iter()
            .map(|l| l["event"]["id"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(listed(&page), [&*ids[4], &*ids[3]]);
    let next = page["next"].as_str().unwrap();
    let page = shop
        .run(&["-o", "json", "dlq", "list", "--limit", "2", "--after", next])
        .json();
    assert_eq!(listed(&page), [&*ids[2], &*ids[1]]);
    let page = shop
        .run(&["-o", "json", "dlq", "list", "--offset", "4"])
        .json();
    assert_eq!(listed(&page), [&*ids[0]]);
    assert_eq!(page["next"], Value::Null);
    let text = shop.run(&["dlq", "list", "--limit", "2"]).ok();
    assert!(text.contains(&ids[4]) && text.contains("payment"), "{text}");
}

#[test]
fn the_next_page_is_named_if_there_is_one_by_a_command_that_works() {
    let shop = Shop::new();
    let ids = shop.dead_letters(5);
    let all = shop
        .run(&["-o", "json", "dlq", "list", "--limit", "5"])
        .json();
    assert_eq!(all["next"], Value::Null, "a full page that is the last");
    let text = shop
        .run(&[
            "dlq", "list", "--limit", "4", "--type", "order.*", "--group", "payment", "--since",
            "1h",
        ])
        .ok();
    let more = text.lines().last().unwrap();
    let command = more.strip_prefix("more: everbus ").unwrap();
    for part in [
        "--limit 4",
        "--type 'order.*'",
        "--group payment",
        "--since 2",
    ] {
        assert!(command.contains(part), "{part} in {command}");
    }
    let words: Vec<&str> = command.split(' ').map(|w| w.trim_matches('\'')).collect();
    let last = shop.run(&words).ok();
    assert!(last.contains(&ids[0]) && !last.contains(&ids[1]), "{last}");
    assert!(!last.contains("more: "), "{last}");
}

#[test]
fn the_filters_of_the_list_are_honoured() {
    let shop = Shop::new();
    shop.dead_letters(3);
    let count = |arguments: &[&str]| {
        let all = [&["-o", "json", "dlq", "list"], arguments].concat();
        let page = shop.run(&all).json();
        page["dead_letters"].as_array().unwrap().len()
    };
    assert_eq!(count(&["--type", "order.*"]), 3);
    assert_eq!(count(&["--type", "user.*"]), 0);
    assert_eq!(count(&["--group", "payment"]), 3);
    assert_eq!(count(&["--since", "1h"]), 3);
    assert_eq!(count(&["--until", "1h"]), 0);
    for limit in ["0", "10001"] {
        let ran = shop.run(&["-o", "json", "dlq", "list", "--limit", limit]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains("between 1 and 10000"), "{ran:?}");
    }
}

// conformance: bus/cli-dlq: a filter by a group that does not exist is an error, not an empty answer
#[test]
fn a_filter_that_can_match_nothing_is_an_error() {
    let shop = Shop::new();
    let ids = shop.dead_letters(1);
    for group in ["paymnet", "(unnamed)"] {
        for command in [
            &["dlq", "list"][..],
            &["dlq", "retry", "--all"],
            &["dlq", "purge", "--older-than", "0"],
            &["dlq", "show", &ids[0]],
        ] {
            let arguments = [command, &["--group", group]].concat();
            shop.run(&arguments).failed(3, "GroupNotFound");
        }
    }
    shop.run(&["dlq", "list", "--since", "1h", "--until", "2h"])
        .failed(2, "Usage");
    for wrong in [
        &["dlq", "purge", "--older-than", "-1"][..],
        &["dlq", "list", "--since", "2999-01-01"],
        &["dlq", "list", "--limit", "-1"],
        &["dlq", "list", "--limit", "0"],
        &["dlq", "list", "--offset", "x"],
        &["dlq", "retry", "--all", "--rate", "-1"],
    ] {
        let ran = shop.run(wrong);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains("invalid value"), "{ran:?}");
        assert!(!ran.err.contains("digit found in string"), "{ran:?}");
    }
    assert_eq!(
        shop.run(&["-o", "json", "groups"]).json()[0]["dead_letters"],
        1
    );
}

#[test]
fn what_is_not_among_the_dead_letters_is_said_with_the_reason() {
    let shop = Shop::new();
    let ids = shop.dead_letters(1);
    let other = shop.run(&["-o", "json", "publish", "a.b"]).json();
    let other = other["id"].as_str().unwrap();
    shop.run(&["tail", "--group", "audit", "--no-follow"]).ok();
    let said = shop
        .run(&["dlq", "show", &ids[0], "--group", "audit"])
        .failed(3, "NotFound");
    assert!(said.contains("hint: it has one in payment"), "{said}");
    shop.run(&["dlq", "retry", &ids[0]]).ok();
    let said = shop.run(&["dlq", "retry", &ids[0]]).failed(3, "NotFound");
    assert!(said.contains("sent back to payment already"), "{said}");
    assert!(said.contains(&format!("everbus get {}", ids[0])), "{said}");
    for command in ["show", "retry"] {
        let said = shop.run(&["dlq", command, other]).failed(3, "NotFound");
        assert!(said.contains("is not a dead letter"), "{said}");
        let ran = shop.run(&["dlq", command, "nope"]);
        assert_eq!(ran.out, "", "nothing was done");
        let said = ran.failed(3, "NotFound");
        assert!(
            said.contains("there is no event") && said.contains("--source"),
            "{said}"
        );
    }
    let trail = shop.run(&["-o", "json", "audit", "list"]).json();
    let trail = trail["records"].as_array().unwrap();
    assert_eq!(trail.len(), 2, "only what was done is on record: {trail:?}");
}

// conformance: bus/cli-dlq: a dead letter shows payload, attempts and every error, escaped
#[test]
fn a_dead_letter_shows_everything_needed_to_understand_it() {
    let shop = Shop::new();
    let ids = shop.dead_letters(1);
    let shown = shop.run(&["-o", "json", "dlq", "show", &ids[0]]).json();
    let letter = &shown[0];
    assert_eq!(letter["group"], "payment");
    assert_eq!(letter["handler"], "charge");
    assert_eq!(letter["attempts"], 1);
    assert_eq!(letter["failures"][0]["kind"], "permanent");
    assert_eq!(letter["event"]["payload"], 0);
    assert!(letter["died_at"].is_string());
    let text = shop.run(&["dlq", "show", &ids[0]]).ok();
    assert!(text.contains("no \\u{1b}[31mmoney"), "{text:?}");
    assert!(!text.contains('\u{1b}'));
    assert!(!shop.run(&["dlq", "list"]).ok().contains('\u{1b}'));
}

// conformance: bus/cli-dlq: retry sends one, many or all back to the group that failed
#[test]
fn a_retried_dead_letter_goes_back_to_its_group() {
    let shop = Shop::new();
    let ids = shop.dead_letters(4);
    shop.run(&["dlq", "retry"]).failed(2, "Usage");
    let dry = shop
        .run(&["-o", "json", "dlq", "retry", "--all", "--dry-run"])
        .json();
    assert_eq!(dry["retried"], 4);
    assert_eq!(dry["dry_run"], true);
    let two = shop
        .run(&["-o", "json", "dlq", "retry", &ids[0], &ids[1]])
        .json();
    assert_eq!(two["retried"], 2);
    let got = shop.run(&["-o", "json", "get", &ids[0]]).json();
    assert_eq!(got["groups"][0]["state"], "pending");
    let group = shop.run(&["-o", "json", "groups"]).json();
    assert_eq!(group[0]["dead_letters"], 2);
    // Retried ones are not open any more: naming one again is an error, the rest still goes.
    let ran = shop.run(&["dlq", "retry", &ids[0], &ids[2]]);
    assert!(ran.out.contains("sent back 1 dead letter"), "{ran:?}");
    ran.failed(3, "NotFound");
    let rest = shop.run(&["dlq", "retry", "--type", "order.>"]).ok();
    assert_eq!(rest, "sent back 1 dead letter\n");
    assert_eq!(shop.run(&["dlq", "list"]).ok(), "no dead letters\n");
    let handled = shop
        .run(&["-o", "json", "tail", "--group", "payment", "--no-follow"])
        .lines();
    assert_eq!(handled.len(), 4, "all came back to the group");
}

// conformance: bus/cli-dlq: purge deletes what is old enough, by creation or by death
#[test]
fn purge_deletes_what_is_old_enough() {
    let shop = Shop::new();
    shop.dead_letters(3);
    for by in ["created", "died"] {
        let none = shop
            .run(&[
                "-o",
                "json",
                "dlq",
                "purge",
                "--older-than",
                "1",
                "--by",
                by,
            ])
            .json();
        assert_eq!(none["purged"], 0);
        let dry = shop
            .run(&[
                "-o",
                "json",
                "dlq",
                "purge",
                "--older-than",
                "0",
                "--by",
                by,
                "--dry-run",
            ])
            .json();
        assert_eq!(dry, json!({ "purged": 3, "dry_run": true }));
    }
    let gone = shop.run(&["dlq", "purge", "--older-than", "0"]).ok();
    assert_eq!(gone, "deleted 3 dead letters and 3 events\n");
    let empty = shop.run(&["-o", "json", "dlq", "list"]).json();
    assert_eq!(
        empty,
        json!({ "dead_letters": [], "next": null, "outbox_dead_letters": 0 })
    );
}
