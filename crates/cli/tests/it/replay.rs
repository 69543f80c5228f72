//! `everbus replay`.

use everbus::Bus;
use serde_json::{Value, json};

use crate::support::{Shop, on_runtime, signal, wait_until};

/// A shop in which two groups have handled some orders, and one of them a user; the ids.
fn busy(orders: u32) -> (Shop, Vec<String>) {
    let shop = Shop::new();
    let url = format!("sqlite:{}", shop.db().display());
    let ids = on_runtime(async {
        let bus = Bus::open(&url).await.unwrap();
        for (group, pattern, name) in [("billing", "orders.>", "charge"), ("mail", "*", "greet")] {
            let subscribe = bus.subscribe(pattern).group(group).name(name);
            let handled = subscribe.handler(|| std::future::ready(()));
            handled.await.unwrap();
        }
        bus.start().await.unwrap();
        let mut ids = Vec::new();
        for n in 0..orders {
            let receipt = bus.publish(("orders.order.placed", n)).await.unwrap();
            ids.push((receipt.id().to_string(), receipt));
        }
        let user = bus.publish(("users.user.created", 1)).await.unwrap();
        ids.push((user.id().to_string(), user));
        for (_, receipt) in &ids {
            receipt.settled().await.unwrap();
        }
        bus.shutdown().await.unwrap();
        ids.into_iter().map(|(id, _)| id).collect()
    });
    (shop, ids)
}

fn group<'a>(groups: &'a Value, name: &str) -> &'a Value {
    let mut all = groups.as_array().unwrap().iter();
    all.find(|g| g["name"] == name || g["group"] == name)
        .unwrap()
}

fn stored(shop: &Shop) -> Vec<Value> {
    shop.run(&["-o", "json", "tail", "--no-follow"]).lines()
}

// conformance: memory/cli-replay-id: replay ID publishes a copy and prints its id; with --group only that group gets it again.
// conformance: operations/replay-asks: a replay of one event for everybody asks as that of a range does
#[test]
fn one_event_is_replayed_for_everybody_or_for_a_group() {
    let (shop, ids) = busy(2);
    let asked = shop.run(&["replay", &ids[0]]).failed(2, "Usage");
    assert!(
        asked.contains("a copy of 1 event would be published"),
        "{asked}"
    );
    assert!(
        asked.contains(&format!("replay {} --yes", ids[0])),
        "{asked}"
    );
    let id = shop.run(&["replay", &ids[0], "--yes"]).ok();
    let copy = shop.run(&["-o", "json", "get", id.trim()]).json();
    assert_eq!(copy["event"]["metadata"]["replay_of"], *ids[0]);
    assert_eq!(copy["event"]["payload"], 0);
    let again = ["-o", "json", "replay", &ids[0], "--yes"];
    let printed = shop.run(&again).json();
    assert_eq!(printed["replay_of"], *ids[0]);
    assert_eq!(printed["seq"], 5);

    let before = shop.run(&["-o", "json", "groups"]).json();
    let report = shop
        .run(&["-o", "json", "replay", &ids[1], "--group", "billing"])
        .json();
    assert_eq!(report["processed"], 1);
    assert_eq!(report["next"], Value::Null);
    let after = shop.run(&["-o", "json", "groups"]).json();
    assert_eq!(group(&after, "billing")["waiting"], 1);
    let position = |groups: &Value| group(groups, "billing")["position"].clone();
    assert_eq!(position(&after), position(&before));
    assert_eq!(group(&after, "mail")["waiting"], 0);
    // Asked for again, it waits already.
    let text = shop.run(&["replay", &ids[1], "--group", "billing"]).ok();
    assert!(text.contains("0  handed to billing"), "{text}");
    assert!(text.contains("1  skipped: still owed"), "{text}");
    assert_eq!(stored(&shop).len(), 5);
}

// conformance: memory/cli-replay-range: a range is replayed for a group, or with --yes for everybody; without it the command says what would happen.
// conformance: memory/cli-replay-dry-run: --dry-run shows how many events of which types would reach which groups, and changes nothing.
#[test]
fn a_range_for_everybody_needs_a_yes() {
    let (shop, _) = busy(3);
    let err = shop.run(&["replay", "--since", "1h"]).failed(2, "Usage");
    assert!(err.contains("copies of 4 events"), "{err}");
    assert!(
        err.contains("billing, mail") && err.contains("--yes"),
        "{err}"
    );

    let range = ["--since", "1h", "--stream", "orders:order-placed"];
    let dry = [&["-o", "json", "replay", "--dry-run"], &range[..]].concat();
    let preview = shop.run(&dry).json();
    assert_eq!(preview["events"], 3);
    assert_eq!(preview["types"], json!({ "orders.order.placed": 3 }));
    assert_eq!(group(&preview["groups"], "billing")["events"], 3);
    let handlers = &group(&preview["groups"], "billing")["handlers"];
    assert_eq!(*handlers, json!(["charge"]), "those of another process");
    let dry = [&["replay", "--dry-run"], &range[..]].concat();
    let text = shop.run(&dry).ok();
    assert!(text.contains("would publish copies of 3 events"), "{text}");
    assert!(text.contains("billing") && text.contains("mail"), "{text}");
    assert!(text.contains("charge") && text.contains("greet"), "{text}");
    let users = [
        "replay",
        "--dry-run",
        "--type",
        "users.>",
        "--group",
        "billing",
    ];
    let text = shop.run(&users).ok();
    assert!(
        text.contains("would replay 0 events into billing"),
        "{text}"
    );
    assert!(
        text.contains("1  no pattern of the group matches"),
        "{text}"
    );
    let nothing = ["replay", "--dry-run", "--type", "nothing.*"];
    let text = shop.run(&nothing).ok();
    assert_eq!(text, "nothing to replay: no event matches\n");
    assert_eq!(stored(&shop).len(), 4, "nothing happened");

    let for_group = [&["-o", "json", "replay", "--group", "billing"], &range[..]].concat();
    let report = shop.run(&for_group).json();
    assert_eq!(
        (&report["processed"], &report["skipped"]),
        (&json!(3), &json!(0))
    );
    let for_all = [&["replay", "--yes"], &range[..]].concat();
    let text = shop.run(&for_all).ok();
    assert!(text.contains("published as copies"), "{text}");
    let events = stored(&shop);
    assert_eq!(events.len(), 7);
    assert!(events[4]["metadata"]["replay_of"].is_string());
}

// conformance: memory/cli-replay-bad-input: a range that ends before it starts, an unknown group or stream, both an id and a range, nothing selected: clear errors.
#[test]
fn what_makes_no_sense_is_refused_with_a_hint() {
    let (shop, ids) = busy(1);
    let err = shop.run(&["replay"]).failed(2, "Usage");
    assert!(err.contains("what is to be replayed?"), "{err}");
    let backwards = [
        "replay", "--since", "1h", "--until", "2h", "--group", "mail",
    ];
    let err = shop.run(&backwards).failed(2, "Usage");
    assert!(err.contains("is after --until"), "{err}");
    let err = shop
        .run(&["replay", "--since", "1h", "--group", "biling"])
        .failed(3, "GroupNotFound");
    assert!(err.contains("biling"), "{err}");
    shop.run(&["replay", "--stream", "invoices", "--group", "mail"])
        .failed(3, "NotFound");
    shop.run(&["replay", "--stream", "a\nb", "--group", "mail"])
        .failed(2, "InvalidPattern");
    let both = shop.run(&["replay", &ids[0], "--since", "1h"]);
    assert_eq!(both.code, 2, "{both:?}");
    assert!(both.err.contains("cannot be used with"), "{both:?}");
    let missing = "0190163d-8694-739b-aea5-966c26f8ad91";
    shop.run(&["replay", missing]).failed(3, "NotFound");
    for bad in [
        &["replay", "--since", "yesterday"][..],
        &["replay", "--since", "1h", "--rate", "0"],
        &["replay", "--entity", "x"],
        &["replay", "--type", "a.>.b"],
    ] {
        let ran = shop.run(bad);
        assert_eq!(ran.code, 2, "{ran:?}");
    }
    let name = "x".repeat(200);
    shop.run(&[
        "replay", "--since", "1h", "--group", "mail", "--name", &name,
    ])
    .failed(2, "InvalidSetting");
    let elsewhere = Shop::new();
    elsewhere
        .run(&["replay", "--since", "1h", "--yes"])
        .failed(3, "NoSuchFile");
    assert_eq!(stored(&shop).len(), 2);
}

// conformance: memory/cli-replay-resume: Ctrl-C ends a replay in good order and prints the command that goes on with it.
#[test]
fn an_interrupted_replay_says_how_to_go_on() {
    let (shop, _) = busy(60);
    // So slowly that it is still at it whenever this process gets to look.
    let slow = ["replay", "--since", "1h", "--yes", "--rate", "1"];
    let child = shop.command(&slow).spawn().unwrap();
    wait_until("some are copied", || stored(&shop).len() > 62);
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let last = text.lines().last().unwrap();
    let command = last.split_once("to go on: everbus ").unwrap().1;
    assert!(
        command.contains("--name ") && command.contains("--yes"),
        "{command}"
    );
    assert!(stored(&shop).len() < 122, "it was stopped in the middle");
    let words: Vec<&str> = command
        .split(' ')
        .map(|word| word.trim_matches('\''))
        .collect();
    // As it was printed, and with another range under the same name.
    let others: Vec<&str> = words
        .iter()
        .map(|word| if *word == "--since" { "--until" } else { word })
        .collect();
    shop.run(&others).failed(2, "InvalidSetting");
    let mut fast = words;
    let rate = fast.iter().position(|word| *word == "--rate").unwrap();
    fast.drain(rate..rate + 2);
    let text = shop.run(&fast).ok();
    assert!(text.lines().nth(1).unwrap().contains("61"), "{text}");
    assert_eq!(stored(&shop).len(), 122, "each copied once");
}

// conformance: memory/cli-replay-list: a replay says its name at the start; one that was killed is listed with the command that goes on with it, and can be forgotten.
#[test]
fn a_replay_that_was_killed_is_found_again() {
    let (shop, _) = busy(60);
    let text = shop.run(&["replay", "--list"]).ok();
    assert!(text.starts_with("no replay"), "{text}");
    // So slowly that it is still at it whenever this process gets to look.
    let slow = ["replay", "--since", "1h", "--yes", "--rate", "1"];
    let child = shop.command(&slow).spawn().unwrap();
    wait_until("some are copied", || stored(&shop).len() > 62);
    signal(&child, "-KILL");
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    let name = err.split_once("this is the replay ").unwrap().1;
    let name = name.split_once(';').unwrap().0;

    let text = shop.run(&["replay", "--list"]).ok();
    assert!(text.contains(name) && text.contains("copies"), "{text}");
    let runs = shop.run(&["-o", "json", "replay", "--list"]).json();
    assert_eq!(runs[0]["name"], name);
    assert_eq!(runs[0]["idle"], false);
    assert!(runs[0]["selection"]["since"].is_string(), "{runs}");
    assert!(runs[0]["processed"].as_u64().unwrap() < 61, "{runs}");
    let command = runs[0]["resume"].as_str().unwrap();
    let words = command.strip_prefix("everbus ").unwrap().split(' ');
    let words: Vec<&str> = words.map(|word| word.trim_matches('\'')).collect();
    let text = shop.run(&words).ok();
    assert!(text.lines().nth(1).unwrap().contains("61"), "{text}");
    assert_eq!(stored(&shop).len(), 122, "each copied once");
    let runs = shop.run(&["-o", "json", "replay", "--list"]).json();
    assert_eq!(runs, json!([]));

    let child = shop.command(&slow).spawn().unwrap();
    wait_until("some are copied", || stored(&shop).len() > 122);
    signal(&child, "-KILL");
    child.wait_with_output().unwrap();
    let runs = shop.run(&["-o", "json", "replay", "--list"]).json();
    let name = runs[0]["name"].as_str().unwrap();
    let text = shop.run(&["replay", "--forget", name]).ok();
    assert_eq!(text, format!("forgotten: {name}\n"));
    shop.run(&["replay", "--forget", name])
        .failed(3, "NotFound");
    let both = shop.run(&["replay", "--list", "--since", "1h"]);
    assert_eq!(both.code, 2, "{both:?}");
}
