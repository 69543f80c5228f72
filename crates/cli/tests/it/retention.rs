//! `everbus retention`, and events that expire.

use everbus::Clock as _;
use serde_json::{Value, json};

use crate::support::{Shop, on_runtime};

fn held<'v>(shown: &'v Value, kind: &str) -> &'v Value {
    let all = shown["held"].as_array().unwrap();
    all.iter().find(|line| line["kind"] == kind).unwrap()
}

// conformance: memory/cli-retention: retention run --dry-run says what would go, run removes it, in text and JSON
#[test]
fn a_dry_run_says_what_a_run_then_does() {
    let shop = Shop::new();
    for kind in ["media.seen", "order.placed"] {
        shop.run(&["publish", kind, "1", "--count", "3"]).ok();
    }
    let run = |more: &[&str]| {
        let mut all = vec!["-o", "json", "retention", "run"];
        all.extend(more);
        shop.run(&all).json()
    };
    let foretold = run(&["--dry-run", "--stream", "media.>=1h", "--max-len", "5"]);
    assert_eq!(foretold["dry_run"], true);
    assert_eq!(foretold["policy"]["streams"][0]["types"], "media.>");
    assert_eq!(foretold["policy"]["dead_letters_s"], 30 * 24 * 3600);
    assert_eq!(foretold["result"]["removed"], 1, "one is too many");
    let text = shop
        .run(&["retention", "run", "--dry-run", "--max-len", "2"])
        .ok();
    assert!(text.contains("WOULD GO") && text.contains("nothing was changed"));
    let line = text.lines().find(|l| l.starts_with("events")).unwrap();
    assert!(line.split_whitespace().any(|word| word == "4"), "{text}");
    let done = run(&["--max-len", "2"]);
    assert_eq!(done["dry_run"], false);
    assert_eq!(done["result"]["removed"], 4);
    assert_eq!(done["result"]["kept"], 0);
    let none = run(&["--max-len", "2"]);
    assert_eq!(none["result"]["removed"], 0);
    let text = shop.run(&["retention", "run"]).ok();
    assert!(text.contains("REMOVED") && text.contains("bytes given back"));
}

// conformance: memory/retention-letter-reason: `get` shows why a group is done with an event whose dead letter is gone
#[test]
fn an_event_whose_dead_letter_is_gone_tells_why() {
    let shop = Shop::new();
    let ids = shop.dead_letters(1);
    let run = ["-o", "json", "retention", "run", "--dead-letters", "1s"];
    while shop.run(&run).json()["result"]["dead_letters"] == 0 {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let got = shop.run(&["-o", "json", "get", &ids[0]]).json();
    let reason = "its dead letter was kept for 1 second";
    assert_eq!(got["groups"][0]["skipped"], reason);
    let text = shop.run(&["get", &ids[0]]).ok();
    let line = format!("done, skipped: {reason}");
    assert!(text.contains(&line), "{text}");
}

// conformance: memory/cli-retention: what a group still owes is not removed by hand either
#[test]
fn a_run_by_hand_spares_what_is_owed() {
    let shop = Shop::new();
    shop.dead_letters(3);
    let run = |more: &[&str]| {
        let mut all = vec!["-o", "json", "retention", "run", "--max-len", "0"];
        all.extend(more);
        shop.run(&all).json()["result"].clone()
    };
    // The events that tell of the dead letters are owed to no group.
    let done = run(&[]);
    // What goes are the three events that tell of the dead letters.
    assert_eq!((&done["removed"], &done["kept"]), (&json!(3), &json!(3)));
    let again = run(&[]);
    assert_eq!((&again["removed"], &again["kept"]), (&json!(0), &json!(3)));
    let listed = shop.run(&["-o", "json", "dlq", "list"]).json();
    assert_eq!(listed["dead_letters"].as_array().unwrap().len(), 3);
}

// conformance: memory/cli-retention: retention show tells the ages in force, what there is and what goes next
#[test]
fn show_tells_the_ages_and_what_there_is() {
    let shop = Shop::new();
    shop.run(&["publish", "message.sent", "--count", "2"]).ok();
    shop.run(&["publish", "other", "--ttl", "7d"]).ok();
    let shown = shop.run(&["-o", "json", "retention", "show"]).json();
    assert_eq!(shown["policy_from"], "the standard");
    assert_eq!(shown["last_run"], Value::Null);
    let events = held(&shown, "events");
    assert_eq!(events["count"], 3);
    assert_eq!(events["kept_for_s"], Value::Null);
    assert_eq!(held(&shown, "expiring events")["count"], 1);
    assert_eq!(held(&shown, "payload stages")["kept_for_s"], 14 * 24 * 3600);
    std::fs::write(
        shop.path("everbus.yaml"),
        "retention: {preset: omni, dead_letters: never}\n",
    )
    .unwrap();
    shop.run(&["retention", "run", "--config", "everbus.yaml"])
        .ok();
    let shown = shop
        .run(&[
            "-o",
            "json",
            "--config",
            "everbus.yaml",
            "retention",
            "show",
        ])
        .json();
    assert_eq!(shown["policy_from"], "everbus.yaml");
    let events = held(&shown, "events");
    assert_eq!(events["stream"], "message.>");
    assert_eq!(
        (&events["count"], &events["kept_for_s"]),
        (&json!(2), &json!(2_592_000))
    );
    assert!(events["next"].as_str().unwrap() > events["oldest"].as_str().unwrap());
    assert_eq!(held(&shown, "dead letters")["kept_for_s"], Value::Null);
    let owner = shown["last_run"]["owner"].as_str().unwrap();
    assert!(owner.starts_with("everbus retention run"), "{owner}");
    let text = shop.run(&["retention", "show", "--preset", "omni"]).ok();
    for part in [
        "message.>",
        "30 d 0 h",
        "everything else",
        "the preset omni",
        "last run",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

// conformance: memory/retention-clock-trust: a run by hand refuses a clock that leapt, until somebody vouches for it
#[test]
fn a_run_by_hand_asks_whether_the_clock_is_right() {
    let shop = Shop::new();
    // The last that was heard of the store is ten days old.
    let then = everbus::SystemClock
        .now()
        .minus(std::time::Duration::from_secs(10 * 24 * 3600));
    on_runtime(async {
        let url = format!("sqlite:{}", shop.db().display());
        let clock = everbus::ManualClock::new(then);
        let bus = everbus::Bus::builder()
            .clock(clock)
            .open(&url)
            .await
            .unwrap();
        bus.publish(("a", 1)).await.unwrap();
        bus.shutdown().await.unwrap();
    });
    let run = ["retention", "run", "--max-age", "7d"];
    let said = shop.run(&run).failed(1, "ClockInDoubt");
    assert!(
        said.contains(&then.to_string()) && said.contains("--trust-clock"),
        "{said}"
    );
    let shown = shop.run(&["-o", "json", "retention", "show"]).json();
    let doubt = &shown["clock_in_doubt"];
    assert_eq!(doubt["before"], then.to_string());
    assert!(doubt["left_s"].as_u64().unwrap() > 23 * 3600, "{doubt}");
    let text = shop.run(&["retention", "show"]).ok();
    assert!(text.contains("retention waits until"), "{text}");
    let checked = shop.run(&["check"]).ok();
    assert!(checked.contains("in doubt"), "{checked}");
    let mut dry = vec!["-o", "json"];
    dry.extend(run);
    dry.push("--dry-run");
    assert_eq!(
        shop.run(&dry).json()["result"]["removed"],
        1,
        "a look is free"
    );
    dry.pop();
    dry.push("--trust-clock");
    assert_eq!(shop.run(&dry).json()["result"]["removed"], 1);
    let trail = shop.run(&["-o", "json", "audit", "list"]).ok();
    assert!(trail.contains("trust_clock"), "{trail}");
    let shown = shop.run(&["-o", "json", "retention", "show"]).json();
    assert_eq!(shown["clock_in_doubt"], Value::Null);
    shop.run(&run).ok();
}

// conformance: memory/cli-ttl: publish --ttl says for how long an event is wanted
#[test]
fn an_event_with_a_ttl_goes_when_it_expires() {
    let shop = Shop::new();
    let stored = shop
        .run(&["-o", "json", "publish", "a", "--ttl", "1s"])
        .json();
    shop.run(&["publish", "a"]).ok();
    let event = shop
        .run(&["-o", "json", "get", stored["id"].as_str().unwrap()])
        .json();
    assert!(event.to_string().contains("expires_at"), "{event}");
    // It really has to expire: the command line has no other clock.
    let removed = || {
        let run = shop.run(&["-o", "json", "retention", "run", "--preset", "none"]);
        run.json()["result"]["removed"].as_u64().unwrap()
    };
    let give_up = std::time::Instant::now() + std::time::Duration::from_secs(180);
    while removed() == 0 {
        assert!(std::time::Instant::now() < give_up, "it never expired");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert_eq!(removed(), 0, "the other one has no end");
}

// conformance: memory/cli-retention: wrong ages are refused before anything is opened
#[test]
fn wrong_ages_are_refused() {
    let shop = Shop::new();
    for wrong in [
        &["retention", "run", "--max-age", "soon"][..],
        &["retention", "run", "--max-age", "0s"],
        &["retention", "run", "--max-age", "-1d"],
        &["retention", "run", "--payloads", "30"],
        &["retention", "run", "--stream", "media"],
        &["retention", "run", "--stream", "a.>.b=1d"],
        &["retention", "show", "--preset", "omnni"],
        &["publish", "a", "--ttl", "0s"],
        &["publish", "a", "--ttl", "forever"],
    ] {
        let ran = shop.run(wrong);
        assert_eq!(ran.code, 2, "{wrong:?}: {ran:?}");
    }
    assert!(!shop.db().exists(), "nothing was created");
    let ran = shop.run(&["retention", "run"]);
    assert_eq!(ran.code, 3, "there is no file: {ran:?}");
}
