//! `everbus tail`.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::support::{Ran, Shop, signal, wait_until};

fn types(lines: &[Value]) -> Vec<&str> {
    lines.iter().map(|l| l["type"].as_str().unwrap()).collect()
}

fn shop_with(types: &[&str]) -> Shop {
    let shop = Shop::new();
    for (n, kind) in types.iter().enumerate() {
        shop.run(&["publish", kind, &n.to_string()]).ok();
    }
    shop
}

// conformance: bus/cli-tail: events are shown from where it is told, by pattern, up to a limit
#[test]
fn events_are_shown_from_where_it_is_told() {
    let shop = shop_with(&["order.placed", "user.created", "order.paid"]);
    let tail = |arguments: &[&str]| {
        let all = [&["-o", "json", "tail", "--no-follow"], arguments].concat();
        shop.run(&all).lines()
    };
    assert_eq!(
        types(&tail(&[])),
        ["order.placed", "user.created", "order.paid"]
    );
    assert_eq!(types(&tail(&["order.*"])), ["order.placed", "order.paid"]);
    assert_eq!(
        types(&tail(&["user.>", "order.paid"])),
        ["user.created", "order.paid"]
    );
    assert_eq!(types(&tail(&["--from", "last"])), ["order.paid"]);
    assert_eq!(types(&tail(&["--limit", "1"])), ["order.placed"]);
    assert!(tail(&["--from", "new"]).is_empty());
    assert_eq!(tail(&["--from", "1h"]).len(), 3);
    let second = tail(&[])[1]["received_at"].as_str().unwrap().to_owned();
    assert_eq!(tail(&["--from", &second]).len(), 2);
    assert_eq!(
        shop.run(&["tail", "--no-follow", "none.*"]).ok(),
        "no events\n"
    );
}

// conformance: bus/cli-escapes: escape sequences in payloads, types and metadata do not reach the terminal
#[test]
fn escape_sequences_in_event_data_are_shown_escaped() {
    let shop = Shop::new();
    let evil = "\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}";
    shop.run(
        &[
            "publish",
            "a.b",
            evil,
            "--content-type",
            "text/plain",
            "--key",
            evil,
            "--meta",
        ]
        .iter()
        .copied()
        .chain([format!("k={evil}").as_str()])
        .collect::<Vec<_>>(),
    )
    .ok();
    let listed = shop.run(&["tail", "--no-follow"]).ok();
    let id = shop.run(&["-o", "json", "tail", "--no-follow"]).json()["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let shown = shop.run(&["get", &id]).ok();
    for text in [listed, shown] {
        let harmful = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!text.contains(harmful), "{text:?}");
        assert!(text.contains("\\u{1b}]0;owned"), "{text:?}");
    }
}

// conformance: bus/cli-tail: it follows what another process publishes
// conformance: bus/cross-process-wake: events published by another process are noticed
#[test]
fn it_follows_until_it_is_told_to_stop() {
    let shop = shop_with(&["a.old"]);
    let mut child = shop
        .command(&["-o", "json", "tail", "--from", "first"])
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    assert_eq!(next()["type"], "a.old");
    shop.run(&["publish", "a.new"]).ok();
    assert_eq!(next()["type"], "a.new");
    signal(&child, "-INT");
    assert_eq!(
        child.wait().unwrap().code(),
        Some(0),
        "Ctrl-C is the usual end of a tail"
    );
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    let shop = Shop::new();
    let payload = format!("\"{}\"", "x".repeat(500));
    shop.run(&["publish", "a.b", &payload, "--count", "2000"])
        .ok();
    let mut child = shop.command(&["tail", "--no-follow"]).spawn().unwrap();
    let mut first = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let mut said = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert_eq!((child.wait().unwrap().code(), said.as_str()), (Some(0), ""));
}

/// Waits for a child that must end by itself.
fn end_of(child: &mut Child) -> Option<i32> {
    wait_until("the command ends", || child.try_wait().unwrap().is_some());
    child.wait().unwrap().code()
}

#[test]
fn a_reader_that_goes_away_while_there_is_nothing_new_ends_it_too() {
    let shop = shop_with(&["a.old"]);
    for arguments in [
        &["tail", "--from", "first"][..],
        &["tail", "--from", "first", "--group", "g"],
    ] {
        let mut child = shop.command(arguments).spawn().unwrap();
        let mut from = BufReader::new(child.stdout.take().unwrap());
        from.read_line(&mut String::new()).unwrap();
        drop(from);
        assert_eq!(end_of(&mut child), Some(0), "{arguments:?}");
    }
}

// conformance: bus/cli-tail: with a group, what the reader of a pipe never took is not handled
#[test]
fn what_a_reader_that_left_never_took_is_not_handled() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b", "1", "--count", "50"]).ok();
    for taken in 1..=3 {
        let mut tail = shop
            .command(&["tail", "--group", "g", "--from", "first", "--no-follow"])
            .spawn()
            .unwrap();
        let head = Command::new("head")
            .arg("-1")
            .stdin(Stdio::from(tail.stdout.take().unwrap()))
            .output()
            .unwrap();
        assert_eq!(Ran::from(head).ok().lines().count(), 1);
        assert_eq!(end_of(&mut tail), Some(0));
        let group = &shop.run(&["-o", "json", "groups"]).json()[0];
        let open = ["behind", "in_flight", "waiting"].map(|field| group[field].as_u64().unwrap());
        assert_eq!(open.iter().sum::<u64>(), 50 - taken, "{group}");
    }
    let rest = shop.run(&["-o", "json", "tail", "--group", "g", "--no-follow"]);
    let mut seqs: Vec<u64> = rest
        .lines()
        .iter()
        .map(|line| line["seq"].as_u64().unwrap())
        .collect();
    seqs.sort_unstable();
    assert_eq!(seqs, (4..=50).collect::<Vec<u64>>());
}

#[test]
fn nothing_is_handled_while_the_output_is_not_read() {
    let shop = shop_with(&["a.one", "a.two"]);
    let mut child = shop
        .command(&["tail", "--group", "g", "--from", "first"])
        .spawn()
        .unwrap();
    let group = || shop.run(&["-o", "json", "groups"]).json()[0].clone();
    wait_until("the first event is handed out", || {
        group()["in_flight"] == 1
    });
    signal(&child, "-INT");
    assert_eq!(end_of(&mut child), Some(0));
    let left = group();
    let open = ["behind", "in_flight", "waiting"].map(|field| left[field].as_u64().unwrap());
    assert_eq!(open.iter().sum::<u64>(), 2, "{left}");
}

// conformance: bus/cli-tail: it never consumes the unnamed group, whose events belong to programs that name none
#[test]
fn the_unnamed_group_is_not_consumed() {
    let shop = shop_with(&["a.b"]);
    for name in ["", "(unnamed)"] {
        let ran = shop.run(&["tail", "--group", name, "--no-follow"]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains("hint: name a group"), "{ran:?}");
    }
    let groups = shop.run(&["-o", "json", "groups"]).json();
    assert_eq!(groups, serde_json::json!([]));
}

#[test]
fn a_start_that_makes_no_sense_is_refused() {
    let shop = shop_with(&["a.b"]);
    for (from, why) in [
        ("-5m", "out of range"),
        ("99999999d", "out of range"),
        ("2999-01-01", "future"),
    ] {
        let ran = shop.run(&["tail", "--no-follow", "--from", from]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(why), "{ran:?}");
    }
    let since = shop.run(&[
        "-o",
        "json",
        "tail",
        "--no-follow",
        "--from",
        "2020-01-31 10:00",
    ]);
    assert_eq!(since.lines().len(), 1);
}

// conformance: bus/cli-tail: with a group, what was shown is handled and not shown again
#[test]
fn a_group_consumes_what_it_shows() {
    let shop = shop_with(&["order.placed", "user.created", "order.paid"]);
    let consume = |arguments: &[&str]| {
        let all = [
            &["-o", "json", "tail", "--no-follow", "--group", "audit"],
            arguments,
        ]
        .concat();
        shop.run(&all).lines()
    };
    assert_eq!(types(&consume(&["--limit", "1"])), ["order.placed"]);
    assert_eq!(types(&consume(&[])), ["user.created", "order.paid"]);
    assert!(consume(&[]).is_empty());
    shop.run(&["publish", "user.left"]).ok();
    assert_eq!(types(&consume(&[])), ["user.left"]);
    let groups = shop.run(&["-o", "json", "groups"]).json();
    assert_eq!(groups[0]["name"], "audit");
    assert_eq!(groups[0]["behind"], 0);
}

#[test]
fn a_group_of_another_program_is_not_widened() {
    let shop = Shop::new();
    shop.dead_letters(1);
    let said = shop
        .run(&["tail", "--group", "payment", "user.*", "--no-follow"])
        .failed(2, "Usage");
    assert!(said.contains("order.*"), "{said}");
    let groups = shop.run(&["-o", "json", "groups"]).json();
    assert_eq!(groups[0]["patterns"], serde_json::json!(["order.*"]));
}

// conformance: bus/several-processes: two processes consume one file, a third publishes; each event is handled once
// conformance: embedded/non-goal-processes: several processes publish and consume one file
// conformance: framework/framework-groups: several processes publish and consume one file
// conformance: framework/backpressure-scaling: several processes publish and consume one file
// conformance: omni/subscribe-queue: several processes publish and consume one file
#[test]
fn two_tails_of_one_group_share_the_events() {
    let shop = shop_with(&["a.first"]);
    shop.run(&["tail", "--group", "g", "--no-follow"]).ok();
    let tail = |name: &str| {
        let shown = std::fs::File::create(shop.path(name)).unwrap();
        let mut command = shop.command(&["-o", "json", "tail", "--group", "g"]);
        command.stdout(shown).spawn().unwrap()
    };
    let mut children = [tail("one"), tail("two")];
    let published = shop
        .run(&["-o", "json", "publish", "a.b", "1", "--count", "300"])
        .lines();
    wait_until("300 events are settled", || {
        let group = &shop.run(&["-o", "json", "groups"]).json()[0];
        group["behind"] == 0 && group["in_flight"] == 0 && group["waiting"] == 0
    });
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let mut shown: Vec<u64> = ["one", "two"]
        .iter()
        .flat_map(|name| {
            let text = std::fs::read_to_string(shop.path(name)).unwrap();
            let lines = text.lines().map(serde_json::from_str::<Value>);
            lines
                .map(|line| line.unwrap()["seq"].as_u64().unwrap())
                .collect::<Vec<_>>()
        })
        .collect();
    shown.sort_unstable();
    let expected: Vec<u64> = published
        .iter()
        .map(|line| line["seq"].as_u64().unwrap())
        .collect();
    assert_eq!(shown, expected, "every event once, in one of the two");
}
