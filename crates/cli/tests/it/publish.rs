//! `everbus publish` and `everbus get`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::support::{Shop, exists, signal, wait_until};

// conformance: bus/cli-publish: an event is stored with its attributes, id and sequence are printed
// conformance: bus/cli-get: an event is shown with everything it was published with
#[test]
fn an_event_is_stored_with_everything_it_was_given() {
    let shop = Shop::new();
    let published = shop
        .run(&[
            "-o",
            "json",
            "publish",
            "order.placed",
            "{\"order\": 42, \"z\":1.50}",
            "--key",
            "42",
            "--tenant",
            "acme",
            "--app",
            "web",
            "--entity",
            "ORDER:42",
            "--correlation-id",
            "req-1",
            "--source",
            "checkout",
            "--meta",
            "a=1",
            "--meta",
            "b=x=y",
            "--version",
            "3",
        ])
        .json();
    assert_eq!(published["seq"], 1);
    let id = published["id"].as_str().unwrap();
    let raw = shop.run(&["-o", "json", "get", id]).ok();
    assert!(
        raw.contains("{\"order\": 42, \"z\":1.50}"),
        "kept as given: {raw}"
    );
    let got: Value = serde_json::from_str(&raw).unwrap();
    let event = &got["event"];
    for (field, value) in [
        ("id", json!(id)),
        ("type", json!("order.placed")),
        ("version", json!(3)),
        ("key", json!("42")),
        ("tenant", json!("acme")),
        ("app", json!("web")),
        ("entity", json!({ "type": "ORDER", "id": "42" })),
        ("correlation_id", json!("req-1")),
        ("source", json!("checkout")),
        ("metadata", json!({ "a": "1", "b": "x=y" })),
    ] {
        assert_eq!(event[field], value, "{field}");
    }
    let text = shop.run(&["get", id]).ok();
    assert!(
        text.contains("order.placed") && text.contains("a=1"),
        "{text}"
    );
}

#[test]
fn the_payload_may_be_left_out() {
    let shop = Shop::new();
    let text = shop.run(&["publish", "door.opened"]).ok();
    assert!(text.ends_with(" at 1\n"), "{text}");
    let line = shop.run(&["-o", "json", "tail", "--no-follow"]).json();
    assert_eq!(line["payload"], Value::Null);
}

#[test]
fn the_same_id_again_stores_nothing_and_another_body_is_an_error() {
    let shop = Shop::new();
    let publish = |body: &str| shop.run(&["-o", "json", "publish", "a.b", body, "--id", "order-7"]);
    let first = publish("1").json();
    let again = publish("1").json();
    assert_eq!(first["id"], again["id"]);
    assert_eq!(first["seq"], again["seq"]);
    assert_eq!(again["duplicate"], true);
    let other = publish("2");
    assert_eq!(other.code, 2);
    assert!(other.err.contains("IdReused"), "{other:?}");
    // The id that was given is shown beside the one that was made of it.
    assert_eq!(first["foreign_id"], "order-7");
    let text = shop.run(&["publish", "a.b", "1", "--id", "order-7"]).ok();
    assert!(text.contains("(order-7) at 1"), "{text}");
    // A foreign id finds its event again.
    let got = shop.run(&["-o", "json", "get", "order-7"]).json();
    assert_eq!(got["event"]["foreign_id"], "order-7");
}

#[test]
fn what_is_wrong_with_an_event_is_said_before_a_file_is_made() {
    let shop = Shop::new();
    shop.run(&["publish", "", "{}"]).failed(2, "InvalidType");
    shop.run(&["publish", "a.*", "{}"]).failed(2, "InvalidType");
    shop.run(&["publish", "a.b", "hello"])
        .failed(2, "InvalidPayloadError");
    shop.run(&["publish", "a.b", "1", "--version", "0"])
        .failed(2, "InvalidAttribute");
    assert!(!exists(&shop.db()));
    shop.run(&["publish", "a.b", "hello", "--content-type", "text/plain"])
        .ok();
}

#[test]
fn an_event_that_is_not_there_is_not_found() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    shop.run(&["get", "0198c5f0-0000-7000-8000-000000000000"])
        .failed(3, "NotFound");
    shop.run(&["get", "no-such-id"]).failed(3, "NotFound");
}

// conformance: bus/cli-publish-stdin: each line is an event, printed in order; empty lines are skipped
#[test]
fn each_line_of_standard_input_is_an_event() {
    let shop = Shop::new();
    let input: String = (0..5000).map(|n| format!("{{\"n\":{n}}}\n\n")).collect();
    let lines = shop
        .run_with_input(&["-o", "json", "publish", "a.b", "-"], &input)
        .lines();
    let seqs: Vec<u64> = lines.iter().map(|l| l["seq"].as_u64().unwrap()).collect();
    assert_eq!(seqs, (1..=5000).collect::<Vec<u64>>());
    let stored = shop.run(&["-o", "json", "tail", "--no-follow"]).lines();
    let payloads: Vec<u64> = stored
        .iter()
        .map(|l| l["payload"]["n"].as_u64().unwrap())
        .collect();
    assert_eq!(
        payloads,
        (0..5000).collect::<Vec<u64>>(),
        "in the order given"
    );
}

// conformance: bus/cli-publish-stdin: each event is printed as it commits, not at the end
#[test]
fn a_line_is_answered_while_the_input_is_still_open() {
    let shop = Shop::new();
    let mut child = shop
        .command(&["-o", "json", "publish", "a.b", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut to = child.stdin.take().unwrap();
    let mut from = BufReader::new(child.stdout.take().unwrap());
    for n in 1..=3 {
        writeln!(to, "{n}").unwrap();
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(answer["seq"], n);
    }
    drop(to);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_bad_line_is_named_and_everything_before_it_is_published() {
    let shop = Shop::new();
    let ran = shop.run_with_input(&["-o", "json", "publish", "a.b", "-"], "1\n2\n\noops\n4\n");
    assert_eq!(ran.code, 2);
    assert!(ran.err.contains("line 4: "), "{ran:?}");
    assert_eq!(ran.out.lines().count(), 2);
    let stored = shop.run(&["-o", "json", "tail", "--no-follow"]).lines();
    assert_eq!(stored.len(), 2);
}

// conformance: bus/payload-too-large: a payload over the limit is refused, with its line
#[test]
fn a_line_over_the_limit_is_refused_by_its_number() {
    let shop = Shop::new();
    let input = format!("1\n\"{}\"\n3\n", "x".repeat(1 << 20));
    let ran = shop.run_with_input(&["--max-payload", "1m", "publish", "a.b", "-"], &input);
    let said = ran.failed(2, "PayloadTooLarge");
    assert!(said.contains("line 2: "), "{said}");
    assert!(said.contains("raise --max-payload"), "{said}");
    let stored = shop.run(&["-o", "json", "tail", "--no-follow"]).lines();
    assert_eq!(stored.len(), 1, "the line before is stored, none after");
}

#[test]
fn the_limit_of_a_payload_can_be_moved() {
    let shop = Shop::new();
    let large = format!("\"{}\"\n", "x".repeat(1 << 20));
    let publish = |size: &str| {
        let arguments = ["--max-payload", size, "publish", "a.b", "-"];
        shop.run_with_input(&arguments, &large)
    };
    publish("2m").ok();
    publish("1m").failed(2, "PayloadTooLarge");
    publish("100").failed(2, "PayloadTooLarge");
    publish("1024m").failed(2, "InvalidSetting");
    let mut small = shop.command(&["publish", "a.b", "12345"]);
    small.env("EVERBUS_MAX_PAYLOAD", "4");
    assert_eq!(small.output().unwrap().status.code(), Some(2));
}

#[test]
fn a_bad_line_is_named_once() {
    let shop = Shop::new();
    let said = shop
        .run_with_input(&["publish", "a.b", "-"], "1\nnope\n")
        .failed(2, "InvalidPayloadError");
    assert_eq!(said.matches("line ").count(), 1, "{said}");
    assert!(
        said.contains("line 2: ") && said.contains("hint: "),
        "{said}"
    );
}

#[test]
fn a_negative_number_is_a_payload() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b", "-5"]).ok();
    shop.run(&["publish", "a.b", "-2.5"]).ok();
    let stored = shop.run(&["-o", "json", "tail", "--no-follow"]).lines();
    let payloads: Vec<f64> = stored
        .iter()
        .map(|line| line["payload"].as_f64().unwrap())
        .collect();
    assert_eq!(payloads, [-5.0, -2.5]);
    for (option, value) in [("--count", "-1"), ("--rate", "-1"), ("--version", "-1")] {
        let ran = shop.run(&["publish", "a.b", "1", option, value]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains("invalid value '-1'"), "{ran:?}");
    }
}

#[test]
fn no_lines_are_no_events() {
    let shop = Shop::new();
    let ran = shop.run_with_input(&["publish", "a.b", "-"], "\n  \n");
    assert!(ran.ok().contains("published 0 events"));
}

// conformance: bus/cli-publish-count: --count publishes that many, --rate spreads them
#[test]
fn a_count_publishes_that_many_events_with_ids_of_their_own() {
    let shop = Shop::new();
    let lines = shop
        .run(&["-o", "json", "publish", "a.b", "1", "--count", "2500"])
        .lines();
    let ids: std::collections::HashSet<&str> =
        lines.iter().map(|l| l["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 2500);
    let paced = shop.run(&["publish", "a.b", "1", "--count", "20", "--rate", "200"]);
    assert!(paced.ok().contains("published 20 events"));
}

#[test]
fn waiting_for_events_that_no_group_wants_ends_at_once() {
    let shop = Shop::new();
    let line = shop
        .run(&["-o", "json", "publish", "a.b", "1", "--wait"])
        .json();
    assert_eq!(line["settled"], true);
}

#[test]
fn waiting_for_a_group_without_consumers_times_out_and_says_so() {
    let shop = Shop::new();
    shop.dead_letters(1);
    let ran = shop.run(&["publish", "order.placed", "1", "--wait=0.2"]);
    let out = ran.out.clone();
    ran.failed(1, "Timeout");
    assert!(out.contains("not settled"), "{out}");
}

#[test]
fn an_interrupt_ends_it_cleanly_and_keeps_what_was_printed() {
    let shop = Shop::new();
    let mut child = shop
        .command(&["-o", "json", "publish", "a.b", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut to = child.stdin.take().unwrap();
    let mut from = BufReader::new(child.stdout.take().unwrap());
    writeln!(to, "1").unwrap();
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    signal(&child, "-INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let stored = shop.run(&["-o", "json", "tail", "--no-follow"]).lines();
    assert_eq!(stored.len(), 1);
}

// conformance: bus/cli-publish-count: an interrupt lets what is under way commit; what was printed is what is stored
#[test]
fn an_interrupt_lets_what_is_under_way_commit_and_prints_it() {
    let shop = Shop::new();
    let printed = std::fs::File::create(shop.path("printed")).unwrap();
    let mut child = shop
        .command(&["-o", "json", "publish", "a.b", "1", "--count", "100000000"])
        .stdout(printed)
        .spawn()
        .unwrap();
    let lines = || std::fs::read_to_string(shop.path("printed")).unwrap();
    wait_until("something is published", || !lines().is_empty());
    signal(&child, "-INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let printed = lines().lines().count();
    let last: Value = serde_json::from_str(lines().lines().last().unwrap()).unwrap();
    assert_eq!(last["seq"], printed as u64);
    let stored = shop.run(&["-o", "json", "tail", "--no-follow", "--from", "last"]);
    assert_eq!(
        stored.json()["seq"],
        printed as u64,
        "neither more nor less"
    );
}

#[test]
fn an_interrupt_ends_the_wait_for_handlers() {
    let shop = Shop::new();
    shop.dead_letters(1);
    let mut child = shop
        .command(&["publish", "order.placed", "1", "--count", "2", "--wait=600"])
        .spawn()
        .unwrap();
    wait_until("both are stored", || {
        shop.run(&["-o", "json", "groups"]).json()[0]["behind"] == 2
    });
    signal(&child, "-INT");
    let out = child.stdout.take().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let out = std::io::read_to_string(out).unwrap();
    // After the event that failed and the one that tells of it.
    assert!(
        out.contains(" at 3 not settled\n") && out.contains(" at 4\n"),
        "{out}"
    );
}

// conformance: operations/publish-payload-file: publish --payload @FILE publishes what is in a file
#[test]
fn a_payload_may_be_in_a_file() {
    let shop = Shop::new();
    std::fs::write(shop.path("order.json"), "{\"order\": 7}").unwrap();
    let id = shop.run(&[
        "-o",
        "json",
        "publish",
        "order.placed",
        "--payload",
        "@order.json",
    ]);
    let id = id.json()["id"].as_str().unwrap().to_owned();
    let event = shop.run(&["-o", "json", "get", &id]).json();
    assert_eq!(event["event"]["payload"]["order"], 7);
    let missing = shop.run(&["publish", "order.placed", "--payload", "@nope.json"]);
    assert_eq!(missing.code, 3, "{missing:?}");
    assert!(missing.err.contains("nope.json"), "{missing:?}");
    std::fs::write(shop.path("bad.json"), "{").unwrap();
    let bad = shop.run(&["publish", "order.placed", "--payload", "@bad.json"]);
    assert_eq!(bad.code, 2, "{bad:?}");
}

// conformance: operations/publish-later: publish --at and --after store the event at once and say for when it is
#[test]
fn an_event_may_be_published_for_later() {
    let shop = Shop::new();
    let at = [
        "-o",
        "json",
        "publish",
        "a.b",
        "--at",
        "2126-01-01T00:00:00Z",
    ];
    let id = shop.run(&at).json()["id"].as_str().unwrap().to_owned();
    let event = shop.run(&["-o", "json", "get", &id]).json();
    assert_eq!(event["event"]["not_before"], "2126-01-01T00:00:00.000000Z");
    let text = shop.run(&["get", &id]).ok();
    assert!(text.contains("not before   2126-01-01"), "{text}");
    shop.run(&["publish", "a.b", "--after", "2h"]).ok();
    let wrong = shop.run(&["publish", "a.b", "--at", "2h"]);
    assert_eq!(wrong.code, 2, "{wrong:?}");
    assert!(wrong.err.contains("--after"), "{wrong:?}");
}
