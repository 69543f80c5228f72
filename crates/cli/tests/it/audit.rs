//! `everbus audit`, and what the other commands put on record.

use rusqlite::Connection;
use serde_json::{Value, json};

use crate::support::Shop;

fn records(shop: &Shop, arguments: &[&str]) -> Vec<Value> {
    let list = ["-o", "json", "audit", "list", "--order", "oldest"];
    let page = shop.run(&[&list[..], arguments].concat()).json();
    page["records"].as_array().unwrap().clone()
}

fn actions(shop: &Shop) -> Vec<String> {
    let all = records(shop, &[]);
    let actions = all.iter().map(|r| r["action"].as_str().unwrap().to_owned());
    actions.collect()
}

// conformance: memory/cli-audit: audit record, list, head and verify, as a table and as JSON
// conformance: framework/audit-what: state changes, user actions, decisions and security-relevant operations can be put on record
#[test]
fn entries_are_recorded_listed_and_verified() {
    let shop = Shop::new();
    shop.run(&["audit", "list"]).failed(3, "NoSuchFile");
    shop.run(&["publish", "a.b"]).ok();
    assert_eq!(shop.run(&["audit", "list"]).ok(), "nothing on record\n");
    shop.run(&["audit", "head"]).failed(3, "NotFound");
    shop.run(&["audit", "verify", "--strict"]).ok();
    let recorded = shop.run(&[
        "-o",
        "json",
        "--actor",
        "alice",
        "--reason",
        "late",
        "audit",
        "record",
        "order.refund",
        "--entity",
        "ORDER:1:2",
        "--details",
        r#"{"amount": 20}"#,
        "--tenant",
        "acme",
        "--correlation-id",
        "c-1",
        "--trace-id",
        "t-1",
    ]);
    assert_eq!(recorded.json(), json!({ "seq": 1 }));
    shop.run(&["audit", "record", "user.\u{1b}[31mlogin", "--actor", "bob"])
        .ok();
    let all = records(&shop, &[]);
    assert_eq!(all[0]["actor"], "alice");
    assert_eq!(all[0]["entity"], json!({ "type": "ORDER", "id": "1:2" }));
    assert_eq!(all[0]["details"], json!({ "amount": 20, "reason": "late" }));
    assert_eq!(all[0]["correlation_id"], "c-1");
    assert_eq!(all[0]["trace_id"], "t-1");
    assert_eq!(all[0]["tenant"], "acme");
    assert_eq!(records(&shop, &["--actor", "bob"]).len(), 1);
    assert_eq!(records(&shop, &["--action", "order.*"]).len(), 1);
    assert_eq!(records(&shop, &["--entity", "ORDER:1:2"]).len(), 1);
    assert_eq!(records(&shop, &["--since", "1h"]).len(), 2);
    assert_eq!(records(&shop, &["--until", "1h"]).len(), 0);
    let text = shop.run(&["audit", "list"]).ok();
    assert!(
        text.contains("alice") && text.contains("ORDER:1:2"),
        "{text}"
    );
    assert!(
        !text.contains('\u{1b}') && text.contains("\\u{1b}[31m"),
        "{text}"
    );

    let head = shop.run(&["audit", "head"]).ok();
    let head = head.trim();
    assert!(head.starts_with("2:") && head.len() == 66, "{head}");
    let shown = shop.run(&["-o", "json", "audit", "head"]).json();
    assert_eq!(shown["head"], head);
    let text = shop
        .run(&["audit", "verify", "--head", head, "--strict"])
        .ok();
    assert!(
        text.contains("whole: 2 records") && text.contains(head),
        "{text}"
    );
    let verdict = shop.run(&["-o", "json", "audit", "verify"]).json();
    assert_eq!(verdict["ok"], true);
    assert_eq!(verdict["verified"], 2);
}

#[test]
fn wrong_input_is_refused() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    for arguments in [
        &["audit", "record"][..],
        &["audit", "record", "x", "--details", "{no"],
        &["audit", "record", "x", "--entity", "ORDER"],
        &["audit", "record", "x", "--details", "1", "--reason", "r"],
        &["audit", "verify", "--head", "7"],
        &["audit", "list", "--limit", "0"],
        &["audit", "list", "--after", "x"],
        &["audit", "list", "--since", "1h", "--until", "2h"],
        &["audit", "record", ""],
    ] {
        let ran = shop.run(arguments);
        assert_eq!(ran.code, 2, "{arguments:?}: {ran:?}");
        for jargon in ["InvalidSetting", "digit found in string"] {
            assert!(!ran.err.contains(jargon), "{arguments:?}: {ran:?}");
        }
    }
    let ran = shop.run(&["audit", "verify", "--head", "7"]);
    assert!(
        ran.err.contains("hint: give it as `everbus audit head`"),
        "{ran:?}"
    );
    assert!(records(&shop, &[]).is_empty());
}

#[test]
fn the_next_page_is_named_by_a_command_that_works() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    for n in 0..3 {
        let details = n.to_string();
        shop.run(&[
            "audit",
            "record",
            "a b",
            "--details",
            &details,
            "--actor",
            "it's me",
        ])
        .ok();
    }
    let text = shop
        .run(&[
            "audit", "list", "--actor", "it's me", "--action", "a b", "--limit", "2",
        ])
        .ok();
    let more = text.lines().last().unwrap().strip_prefix("more: ").unwrap();
    let program = env!("CARGO_BIN_EXE_everbus");
    let script = more.replacen("everbus", &format!("'{program}'"), 1);
    let shell = std::process::Command::new("sh")
        .current_dir(shop.path(""))
        .arg("-c")
        .arg(&script)
        .output()
        .unwrap();
    let page = String::from_utf8(shell.stdout).unwrap();
    assert_eq!(page.lines().count(), 2, "{script}: {page}");
    assert!(page.lines().last().unwrap().starts_with("  1"), "{page}");
}

// conformance: memory/cli-audit-verify: audit verify names the first bad row and ends with exit code 1
#[test]
fn a_trail_that_was_changed_fails() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    for _ in 0..5 {
        shop.run(&["audit", "record", "x"]).ok();
    }
    let head = shop.run(&["audit", "head"]).ok();
    // A head that the trail contradicts: what comes before it is all that is vouched for.
    let other = format!("2:{}", "0".repeat(64));
    let ran = shop.run(&["audit", "verify", "--head", &other]);
    assert!(ran.out.contains("1 record before that verified"), "{ran:?}");
    let conn = Connection::open(shop.db()).unwrap();
    conn.execute_batch(
        "DROP TRIGGER audit_log_no_update; UPDATE audit_log SET actor = 'm' WHERE seq = 3",
    )
    .unwrap();
    drop(conn);
    let ran = shop.run(&["audit", "verify"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("BROKEN: record 3"), "{ran:?}");
    assert!(
        ran.out.contains("2 records before that verified"),
        "{ran:?}"
    );
    let ran = shop.run(&["-o", "json", "audit", "verify"]);
    let verdict: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((ran.code, &verdict["broken"]["seq"]), (1, &json!(3)));
    assert_eq!(shop.run(&["check"]).code, 1);

    // The trail begins behind the break: what was verified is not before it.
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    for _ in 0..5 {
        shop.run(&["audit", "record", "x"]).ok();
    }
    let conn = Connection::open(shop.db()).unwrap();
    conn.execute_batch(
        "INSERT OR REPLACE INTO audit_anchor SELECT 1, seq, hash, at FROM audit_log WHERE seq = 2;
         DELETE FROM audit_log WHERE seq <= 2",
    )
    .unwrap();
    drop(conn);
    let ran = shop.run(&["audit", "verify"]);
    assert!(ran.out.contains("BROKEN: record 1 is missing"), "{ran:?}");
    assert!(ran.out.contains("3 records after that verified"), "{ran:?}");

    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    shop.run(&["audit", "record", "x"]).ok();
    let ran = shop.run(&["audit", "verify", "--head", head.trim()]);
    assert_eq!(ran.code, 1, "another trail: {ran:?}");
    let mut kept = shop.db().into_os_string();
    kept.push(".audit-head");
    std::fs::remove_file(kept).unwrap();
    let text = shop.run(&["audit", "verify"]).ok();
    assert!(text.contains("note: no head"), "{text}");
    assert_eq!(shop.run(&["audit", "verify", "--strict"]).code, 1);
    let own = shop.run(&["audit", "head"]).ok();
    shop.run(&["audit", "verify", "--strict", "--head", own.trim()])
        .ok();
}

// conformance: memory/audit-operators: operator actions put themselves on record before they act and after, with actor, reason and counts
// conformance: framework/audit-what: operator actions put themselves on record before they act and after, with actor, reason and counts
#[test]
fn what_operators_do_is_on_record() {
    let shop = Shop::new();
    let ids = shop.dead_letters(3);
    shop.run(&["dlq", "retry", "--all", "--dry-run"]).ok();
    assert!(actions(&shop).is_empty(), "looking is no action");
    shop.run(&[
        "--actor",
        "alice",
        "--reason",
        "card fixed",
        "dlq",
        "retry",
        &ids[0],
    ])
    .ok();
    shop.run(&["dlq", "purge", "--older-than", "0", "--type", "order.*"])
        .ok();
    shop.run(&["groups", "remove", "payment"])
        .failed(2, "Usage");
    shop.run(&["groups", "remove", "payment", "--yes"]).ok();
    assert_eq!(
        actions(&shop),
        [
            "dlq.retry",
            "dlq.retry.done",
            "dlq.purge",
            "dlq.purge.done",
            "groups.remove",
            "groups.remove.done"
        ]
    );
    let all = records(&shop, &[]);
    assert_eq!(all[0]["actor"], "alice");
    assert_eq!(all[0]["details"]["reason"], "card fixed");
    assert_eq!(all[0]["entity"], json!({ "type": "EVENT", "id": ids[0] }));
    assert_eq!(all[1]["details"], json!({ "of": 1, "result": 1 }));
    let actor = all[2]["actor"].as_str().unwrap();
    assert!(actor.starts_with("cli:") && actor.len() > 4, "{actor}");
    assert_eq!(all[2]["details"]["type"], "order.*");
    let purged = &all[3]["details"]["result"];
    assert_eq!(
        (&purged["dead_letters"], &purged["events"]),
        (&json!(2), &json!(2))
    );
    let named = purged["named"].as_array().unwrap();
    assert!(named.iter().all(|letter| letter["group"] == "payment"));
    assert_eq!(named.len(), 2, "{purged}");
    assert_eq!(
        all[4]["entity"],
        json!({ "type": "GROUP", "id": "payment" })
    );
    let mut command = shop.command(&["audit", "record", "x"]);
    command.env("EVERBUS_ACTOR", "deploy");
    assert!(command.status().unwrap().success());
    let mut command = shop.command(&["-o", "json", "audit", "list"]);
    let out = command
        .env("EVERBUS_ACTOR", "deploy")
        .output()
        .unwrap()
        .stdout;
    let page: Value = serde_json::from_slice(&out).unwrap();
    let items = page["records"].as_array().unwrap();
    assert_eq!(items.len(), 7, "the variable is no filter");
    assert_eq!(items[0]["actor"], "deploy");
    shop.run(&["audit", "verify", "--strict"]).ok();
}

// conformance: memory/cli-audit-restore: a restore is on record in the old and the new file, and names the head of the old trail
#[test]
fn a_restore_is_on_record_in_both_files() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    shop.run(&["audit", "record", "one"]).ok();
    let backup = shop.path("backup.db");
    let backup = backup.to_str().unwrap();
    shop.run(&["backup", backup]).ok();
    shop.run(&["audit", "record", "two"]).ok();
    let head = shop.run(&["audit", "head"]).ok();
    let restored = shop.run(&[
        "-o", "json", "--reason", "drill", "restore", backup, "--force",
    ]);
    let kept = restored.json()["kept"].as_str().unwrap().to_owned();
    assert_eq!(actions(&shop), ["one", "restore.done"]);
    let done = &records(&shop, &[])[1];
    assert_eq!(
        done["details"]["head_before"],
        head.trim(),
        "the head outside was newer"
    );
    assert_eq!(done["details"]["reason"], "drill");
    shop.run(&["audit", "verify", "--strict"]).ok();
    let old = ["-o", "json", "--db", &kept, "audit", "list"];
    let old = shop.run(&old).json();
    assert_eq!(old["records"][0]["action"], "restore");
    shop.run(&["--db", &kept, "audit", "verify", "--strict"])
        .ok();

    let elsewhere = shop.path("elsewhere.db");
    let elsewhere = elsewhere.to_str().unwrap();
    shop.run(&["--db", elsewhere, "restore", backup]).ok();
    shop.run(&["--db", elsewhere, "audit", "verify", "--strict"])
        .ok();
}

// conformance: memory/cli-audit-config: a publish with another configuration than the last time puts that on record
#[test]
fn a_changed_configuration_is_on_record() {
    let shop = Shop::new();
    let file = shop.path("everbus.yaml");
    let publish = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let config = file.to_str().unwrap();
        shop.run(&["--config", config, "publish", "a.b"]).ok();
    };
    let broker = format!("broker: {{type: sqlite, url: '{}'}}\n", shop.db().display());
    publish(&broker);
    publish(&format!("# only a comment\n{broker}"));
    publish(&format!("{broker}streams: {{default_maxlen: 500}}\n"));
    let all = records(&shop, &["--action", "config.changed"]);
    assert_eq!(all.len(), 2, "{all:?}");
    assert_eq!(all[0]["details"]["changed"], json!(["broker"]));
    assert_eq!(all[1]["details"]["changed"], json!(["streams"]));
    assert_eq!(all[1]["details"]["previous"], all[0]["details"]["hash"]);
}
