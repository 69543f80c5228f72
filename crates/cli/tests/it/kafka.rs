//! The commands on Kafka, alone and with a file beside it.

use everbus_testkit::servers::Kafka;
use serde_json::json;

use crate::support::Shop;

// conformance: engines/kafka-cli: the commands work on Kafka: publish, tail, groups and check, with a file beside it also events
// needs: Kafka
#[test]
fn the_commands_work_on_kafka() {
    let Some(server) = Kafka::shared() else {
        return;
    };
    let shop = Shop::new();
    let url = server.fresh_space();
    let run = |words: &[&str]| shop.run(&[&["--broker", &url][..], words].concat());
    run(&["publish", "order.placed", "{\"n\":1}", "--count", "3"]).ok();
    let tail = ["-o", "json", "tail", "--no-follow"];
    assert_eq!(run(&tail).lines().len(), 3);
    let group = [&tail[..], &["--group", "g", "--from", "first"]].concat();
    let taken = run(&[&group[..], &["--limit", "2"]].concat()).lines();
    assert_eq!((taken.len(), &taken[0]["payload"]), (2, &json!({"n": 1})));
    let groups = run(&["-o", "json", "groups"]).json();
    assert_eq!(
        (&groups[0]["name"], &groups[0]["behind"]),
        (&json!("g"), &json!(1))
    );
    // One broker acknowledges from the page cache.
    let checked = run(&["check"]);
    assert_eq!(checked.code, 0, "{checked:?}");
    assert!(checked.out.contains("replication.factor"), "{checked:?}");
    // What Kafka cannot be asked for is said, with what to add.
    let asked = run(&["events"]);
    assert!(asked.failed(1, "Unsupported").contains("--store"));
    let store = ["--store", "sqlite:store.db"];
    run(&[&store[..], &["publish", "order.placed"]].concat()).ok();
    run(&[&store[..], &["events"]].concat()).ok();
}

// conformance: engines/kafka-cli-bad-input: a Kafka server that is not there and a URL that is none are refused with hints
#[test]
fn servers_that_are_not_there_are_said() {
    let shop = Shop::new();
    let away = shop.run(&["check", "--broker", "kafka://127.0.0.1:1"]);
    let said = away.failed(4, "Unavailable");
    assert!(said.contains("is the server running"), "{said}");
    for url in ["kafka://", "kafka://host:port", "kafka://h:9092/a/b"] {
        let said = shop
            .run(&["check", "--broker", url])
            .failed(2, "InvalidUrl");
        assert!(said.contains("hint"), "{url}: {said}");
    }
}
