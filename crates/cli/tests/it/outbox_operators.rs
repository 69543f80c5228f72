//! `everbus outbox` and `everbus dlq` beside each other, and how an outbox begins and is kept small.

use everbus::rusqlite::Connection;
use serde_json::{Value, json};

use crate::support::{Shop, exists};

/// A file of the bus whose outbox has a row that the relay has given up.
fn with_dead_row(shop: &Shop) -> Connection {
    shop.run(&["publish", "a.b", "0"]).ok();
    let db = Connection::open(shop.db()).unwrap();
    db.execute_batch("INSERT INTO event_outbox (event_id, event_type, payload, attempts) VALUES ('bad-1', 'order.placed', '{', 4)")
        .unwrap();
    shop.run(&["outbox", "relay", "--once"]).ok();
    db
}

// conformance: memory/cli-dlq-outbox: `dlq` says how many dead letters the outbox has, and where they are shown and retried
#[test]
fn the_dead_letters_point_to_those_of_the_outbox() {
    let shop = Shop::new();
    shop.dead_letters(1);
    let said = shop.run(&["dlq", "list"]).ok();
    assert!(!said.contains("outbox"), "{said}");
    with_dead_row(&shop);
    let said = shop.run(&["dlq", "list"]).ok();
    let last = said.lines().last().unwrap();
    assert!(
        last.contains("1 dead letter of the outbox") && last.ends_with("outbox failed"),
        "{said}"
    );
    let page = shop.run(&["-o", "json", "dlq", "list"]).json();
    assert_eq!(page["outbox_dead_letters"], 1);
    assert_eq!(page["dead_letters"].as_array().unwrap().len(), 1);
    // Where there are no others.
    shop.run(&["dlq", "purge", "--older-than", "0"]).ok();
    let said = shop.run(&["dlq", "list"]).ok();
    assert!(
        said.starts_with("no dead letters\n") && said.contains("outbox failed"),
        "{said}"
    );
    for command in ["show", "retry"] {
        let said = shop.run(&["dlq", command, "bad-1"]).failed(3, "NotFound");
        for told in [
            "of the outbox",
            "everbus outbox failed",
            "everbus outbox retry bad-1",
        ] {
            assert!(said.contains(told), "{command}: {said}");
        }
    }
    let said = shop
        .run(&["dlq", "list", "--group", "outbox"])
        .failed(3, "GroupNotFound");
    assert!(said.contains("everbus outbox failed"), "{said}");
    // What it said works, and then there is nothing to say.
    let rows = shop.run(&["-o", "json", "outbox", "failed"]).json();
    let failures = rows[0]["failures"].as_array().unwrap();
    assert_eq!((failures.len(), &failures[0]["attempt"]), (1, &json!(5)));
    assert!(
        failures[0]["error"]
            .as_str()
            .unwrap()
            .contains("cannot be read")
    );
    shop.run(&["outbox", "retry", "bad-1"]).ok();
    let page = shop.run(&["-o", "json", "dlq", "list"]).json();
    assert_eq!(page["outbox_dead_letters"], 0);
    let said = shop.run(&["dlq", "show", "bad-1"]).failed(3, "NotFound");
    assert!(!said.contains("outbox"), "{said}");
}

// conformance: memory/outbox-failed-until-retried: after `dlq retry` the outbox shows nothing failed any more
#[test]
fn a_retried_dead_letter_is_no_failure_of_the_outbox_any_more() {
    let shop = Shop::new();
    // So that there is a group.
    shop.dead_letters(1);
    let db = Connection::open(shop.db()).unwrap();
    db.execute_batch("INSERT INTO event_outbox (event_id, event_type, payload, status, sent_at)
         SELECT event_id, event_type, payload, 'failed', '2026-01-01T00:00:00.000000Z' FROM dead_letter_events")
        .unwrap();
    let status = || shop.run(&["-o", "json", "outbox", "status"]).json();
    assert_eq!(status()["failed"], 1);
    shop.run(&["dlq", "retry", "--all"]).ok();
    let status = status();
    assert_eq!((&status["failed"], &status["sent"]), (&json!(0), &json!(1)));
    assert_eq!(status.get("last_error"), None);
}

// conformance: memory/cli-outbox-init: `everbus outbox init` makes the tables for a service in any language, or prints their SQL
#[test]
fn an_outbox_is_made_for_a_service_in_any_language() {
    let shop = Shop::new();
    let sql = shop.run(&["outbox", "init", "--print-sql"]).ok();
    let by_hand = Connection::open(shop.path("by-hand.db")).unwrap();
    by_hand.execute_batch(&sql).unwrap();
    let printed = shop.run(&["-o", "json", "outbox", "init", "--print-sql"]);
    assert_eq!(printed.json()["sql"], Value::from(sql.as_str()));
    let for_file = ["outbox", "init", "--print-sql", "--outbox", "x.db"];
    assert_eq!(shop.run(&for_file).ok(), sql);
    assert!(!exists(&shop.path("x.db")), "it only prints");

    let init = |file: &str| shop.run(&["outbox", "init", "--outbox", file]);
    let orders = Connection::open(shop.path("shop.db")).unwrap();
    orders
        .execute_batch("CREATE TABLE orders (id INTEGER)")
        .unwrap();
    assert_eq!(
        init("shop.db").ok(),
        "made the tables of an outbox in shop.db\n"
    );
    assert!(init("shop.db").ok().contains("there already"));
    let made = shop
        .run(&["-o", "json", "outbox", "init", "--outbox", "new.db"])
        .json();
    assert_eq!(
        made,
        json!({ "outbox": "new.db", "created": true, "new_file": true })
    );
    for file in ["shop.db", "by-hand.db", "new.db"] {
        let db = Connection::open(shop.path(file)).unwrap();
        db.execute_batch(
            "INSERT INTO event_outbox (event_type, payload) VALUES ('order.placed', '1')",
        )
        .unwrap();
        let said = shop
            .run(&["outbox", "relay", "--once", "--outbox", file])
            .ok();
        assert!(said.contains("1 event sent"), "{file}: {said}");
    }
    assert!(init("everbus.db").ok().contains("a file of Everbus"));
    // Mistakes are said, and change nothing.
    assert_eq!(shop.run(&["outbox", "init"]).code, 2);
    let other = Connection::open(shop.path("other.db")).unwrap();
    other
        .execute_batch("CREATE TABLE event_outbox (id)")
        .unwrap();
    let said = init("other.db").failed(1, "Unsupported");
    assert!(said.contains("RENAME"), "{said}");
    std::fs::write(
        shop.path("text"),
        "no database at all, however long this text may be",
    )
    .unwrap();
    init("text").failed(2, "NotAFile");
    init("none/shop.db").failed(3, "NoSuchFile");
}

// conformance: memory/cli-outbox-keep: the relay removes old rows from a database of one's own, after the ages of --keep and --keep-failed
#[test]
fn a_relay_keeps_an_outbox_small() {
    let shop = Shop::new();
    shop.run(&["outbox", "init", "--outbox", "shop.db"]).ok();
    let db = Connection::open(shop.path("shop.db")).unwrap();
    let ago = |days: u32| {
        let insert = "INSERT INTO event_outbox (event_type, payload, status, sent_at)
             VALUES ('a', '1', 'sent', strftime('%Y-%m-%dT%H:%M:%f000Z', 'now', ?1))";
        db.execute(insert, [format!("-{days} days")]).unwrap();
    };
    ago(8);
    ago(6);
    let count = || -> i64 {
        let count = "SELECT count(*) FROM event_outbox";
        db.query_row(count, [], |r| r.get(0)).unwrap()
    };
    let relay = |more: &[&str]| {
        shop.run(&[&["outbox", "relay", "--once", "--outbox", "shop.db"], more].concat())
    };
    relay(&["--keep", "never"]).ok();
    assert_eq!(count(), 2);
    let said = relay(&[]).ok();
    assert!(said.contains("1 old ones removed"), "{said}");
    assert_eq!(count(), 1);
    let stats = relay(&["--keep", "5d", "--keep-failed", "never", "-o", "json"]).json();
    assert_eq!(stats["removed"], 1);
    assert_eq!(count(), 0);
    for wrong in ["0s", "soon", "-1d"] {
        assert_eq!(relay(&["--keep", wrong]).code, 2, "{wrong}");
    }
    // The file of Everbus has a retention of its own.
    let own = shop.run(&["outbox", "relay", "--once", "--keep", "5d"]);
    assert_eq!(own.code, 2, "{own:?}");
    assert!(own.err.contains("retention"), "{own:?}");
}
