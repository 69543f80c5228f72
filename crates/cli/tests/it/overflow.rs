//! Large events on the command line, and a publisher that is killed.
#![allow(clippy::print_stderr, reason = "a seed reproduces a failure")]

use std::io::Write as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

use everbus::overflow::{Collect, Objects, Overflow, whole};
use everbus::{Bus, Cursor};
use serde_json::Value;

use crate::support::{Shop, on_runtime};

fn large(n: usize) -> String {
    format!(r#"{{"n":{n},"output":"{}"}}"#, "x".repeat(300_000))
}

// conformance: memory/overflow-cli: get, tail, events and dlq show print events whole; one whose object is missing is shown with a warning
#[test]
fn large_events_are_shown_whole() {
    let shop = Shop::new();
    let published = shop.run_with_input(&["-o", "json", "publish", "order.placed", "-"], &large(7));
    let id = published.lines()[0]["id"].as_str().unwrap().to_owned();
    let objects = shop.path("everbus.db.objects/events/~");
    let object = std::fs::read_dir(&objects).unwrap().next().unwrap();
    let object = object.unwrap().path();
    let wanted: Value = serde_json::from_str(&large(7)).unwrap();
    let got = shop.run(&["-o", "json", "get", &id]).lines().remove(0);
    assert_eq!(got["event"]["payload"], wanted);
    assert_eq!(got["overflow"]["size"], object.metadata().unwrap().len());
    let tailed = shop.run(&["-o", "json", "tail", "--no-follow"]).lines();
    assert_eq!(tailed[0]["payload"], wanted);
    let grouped = shop.run(&[
        "-o",
        "json",
        "tail",
        "--no-follow",
        "--group",
        "g",
        "--from",
        "first",
    ]);
    assert_eq!(grouped.lines()[0]["payload"], wanted);
    let history = shop.run(&["-o", "json", "events"]).json();
    assert_eq!(history["events"][0]["payload"], wanted);
    let text = shop.run(&["get", &id]).ok();
    assert!(text.contains("overflow     "), "{text}");
    assert!(
        text.contains(&format!("events/~/{id}-")) && text.contains(" of everbus.db.objects"),
        "{text}"
    );

    std::fs::remove_file(&object).unwrap();
    let ran = shop.run(&["-o", "json", "get", &id]);
    assert_eq!(ran.code, 1, "what was asked for is not all there");
    assert!(ran.err.contains("it is missing"), "{ran:?}");
    let got: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(
        got["event"]["payload"],
        serde_json::json!({ "n": 7, "output": null })
    );
    let why = got["event"]["payload_error"].as_str().unwrap();
    assert!(why.contains("it is missing"), "{why}");
    let history = shop.run(&["-o", "json", "events"]).json();
    assert_eq!(history["events"][0]["payload"]["output"], Value::Null);
    assert!(
        history["events"][0]["overflow"]["key"].is_string(),
        "{history}"
    );
    assert!(history["events"][0]["payload_error"].is_string());
}

// conformance: memory/overflow-another-file: --db beside --config takes another file, and leaves what else the configuration says
#[test]
fn another_file_keeps_the_place_of_the_configuration() {
    let shop = Shop::new();
    let place = shop.path("place");
    let config = format!("overflow: {{url: '{}'}}\n", place.display());
    std::fs::write(shop.path("everbus.yaml"), config).unwrap();
    let with = ["-o", "json", "--config", "everbus.yaml", "--db", "other.db"];
    let publish = [&with[..], &["publish", "order.placed", "-"]].concat();
    for n in 0..2 {
        shop.run_with_input(&publish, &large(n)).ok();
    }
    assert!(place.join("events").exists(), "as the file says");
    assert!(!shop.path("other.db.objects").exists());
    let events = shop.run(&[&with[..], &["events"]].concat()).json();
    assert!(events["events"][0]["payload"]["output"].is_string());
    // By the environment it is the same, and the command for the next page names both.
    let mut command = shop.command(&["--db", "other.db", "events", "--limit", "1"]);
    let ran = command
        .env("EVERBUS_CONFIG", "everbus.yaml")
        .output()
        .unwrap();
    let text = String::from_utf8(ran.stdout).unwrap();
    let more = "more: everbus --config everbus.yaml --db other.db events";
    assert!(text.contains(more), "{text}");
}

// conformance: fault-11: kill -9 between object and commit leaves at most an object without an event, never an event without its object
#[test]
fn a_killed_publisher_leaves_no_event_without_its_object() {
    let shop = Shop::new();
    let mut seed = u64::from(std::process::id()) | 1;
    if let Some(given) = std::env::var("EVERBUS_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
    {
        seed = given;
    }
    eprintln!("EVERBUS_SEED={seed}");
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let mut acknowledged = Vec::new();
    for _ in 0..6 {
        let mut child = shop
            .command(&["-o", "json", "publish", "order.placed", "-"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let writer = std::thread::spawn(move || {
            // Until the reader is dead.
            for n in 0.. {
                if writeln!(stdin, "{}", large(n)).is_err() {
                    return;
                }
            }
        });
        // The kill comes at a random moment after the first object is there.
        let begin = Instant::now();
        while objects(&shop) == 0 && begin.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(random() % 150));
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        let lines = String::from_utf8_lossy(&output.stdout);
        // The last line may be cut.
        let receipts = lines
            .lines()
            .filter_map(|l| serde_json::from_str::<Value>(l).ok());
        acknowledged.extend(receipts.map(|r| r["id"].as_str().unwrap().to_owned()));
    }
    let url = format!("sqlite:{}", shop.db().display());
    on_runtime(async {
        let bus = Bus::open(&url).await.unwrap();
        let store = Objects::open(bus.engine(), &Overflow::default()).unwrap();
        let log = bus.log().unwrap();
        let (mut after, mut events) = (Cursor::START, 0);
        loop {
            let (records, searched) = log
                .read(after.clone(), vec!["*".parse().unwrap()], 50)
                .await
                .unwrap();
            for record in &records {
                assert!(record.event.overflow().is_some());
                let whole = whole(store.as_deref(), record).await.unwrap();
                assert_eq!(
                    whole.event.json::<Value>().unwrap()["output"]
                        .as_str()
                        .unwrap()
                        .len(),
                    300_000
                );
                events += 1;
            }
            if after.reaches(&searched) {
                break;
            }
            after = searched;
        }
        let lookup = bus.lookup().unwrap();
        for id in &acknowledged {
            assert_eq!(
                lookup.find(id.parse().unwrap()).await.unwrap().len(),
                1,
                "{id}"
            );
        }
        // What was left behind is found, and nothing else.
        let left = objects(&shop) - events;
        let collect = Collect {
            strays_after: Duration::ZERO,
            ..Collect::default()
        };
        let collected = bus.collect_objects(&collect).await.unwrap();
        // Files that were never finished go too, and are not counted.
        assert!(collected.strays as usize <= left, "{collected:?}, {left}");
        assert_eq!(objects(&shop), events);
        eprintln!(
            "{events} events, {} acknowledged, {left} objects left behind",
            acknowledged.len()
        );
        bus.shutdown().await.unwrap();
    });
}

/// How many files there are among the objects.
fn objects(shop: &Shop) -> usize {
    let folder = shop.path("everbus.db.objects/events/~");
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}
