//! A store beside the broker, named on the command line or in the configuration.

use crate::support::Shop;

fn write(shop: &Shop, name: &str, text: &str) {
    std::fs::write(shop.path(name), text).unwrap();
}

/// The types that a history has.
fn types(shop: &Shop, arguments: &[&str]) -> Vec<String> {
    let all = [arguments, &["events", "-o", "json"]].concat();
    let ran = shop.run(&all);
    assert_eq!(ran.code, 0, "{ran:?}");
    let page = ran.json();
    let events = page["events"].as_array().unwrap().iter();
    events
        .map(|e| e["type"].as_str().unwrap().to_owned())
        .collect()
}

// conformance: contract/beside-configured: `store:` in the configuration and `--store` put a store beside the broker; that of the configuration belongs to its broker
#[test]
fn events_reach_the_store_that_is_named() {
    let shop = Shop::new();
    let beside = ["--db", "bus.db", "--store", "sqlite:history.db"];
    let published = shop.run(&[&beside[..], &["publish", "a.b"]].concat());
    assert_eq!(published.code, 0, "{published:?}");
    // A command that reads brings the store up to date first.
    assert_eq!(types(&shop, &beside), ["a.b"]);
    assert_eq!(types(&shop, &["--db", "history.db"]), ["a.b"]);
    let mut command = shop.command(&["--db", "bus.db", "groups"]);
    let groups = command.output().unwrap();
    assert!(String::from_utf8_lossy(&groups.stdout).contains("everbus.archive"));
}

// conformance: contract/beside-configured: `store:` in the configuration and `--store` put a store beside the broker; that of the configuration belongs to its broker
#[test]
fn the_store_of_a_configuration_belongs_to_its_broker() {
    let shop = Shop::new();
    let text = "broker: {url: 'sqlite:bus.db'}\nstore: {url: 'sqlite:history.db'}\n";
    write(&shop, "everbus.yaml", text);
    let configured = ["--config", "everbus.yaml"];
    let published = shop.run(&[&configured[..], &["publish", "a.b"]].concat());
    assert_eq!(published.code, 0, "{published:?}");
    assert_eq!(types(&shop, &configured), ["a.b"]);
    let checked = shop.run(&[&["check"], &configured[..]].concat());
    assert!(
        checked.out.contains("store sqlite:history.db"),
        "{checked:?}"
    );
    // Another broker is not archived into it.
    let other = ["--config", "everbus.yaml", "--db", "other.db"];
    let published = shop.run(&[&other[..], &["publish", "c.d"]].concat());
    assert_eq!(published.code, 0, "{published:?}");
    assert_eq!(types(&shop, &other), ["c.d"]);
    assert_eq!(types(&shop, &["--db", "history.db"]), ["a.b"]);
}

// conformance: contract/beside-configured: `store:` in the configuration and `--store` put a store beside the broker; that of the configuration belongs to its broker
#[test]
fn a_store_that_cannot_be_one_is_refused() {
    let shop = Shop::new();
    let same = ["--db", "bus.db", "--store", "bus.db", "publish", "a.b"];
    let ran = shop.run(&same);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.err.contains("is the broker and the store"), "{ran:?}");
    for command in ["backup", "restore"] {
        let ran = shop.run(&["--db", "bus.db", "--store", "history.db", command, "x.db"]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains("leave the store out"), "{ran:?}");
    }
    write(&shop, "kafka.yaml", "store: {url: 'kafka://host:9092'}\n");
    let ran = shop.run(&["check", "--config", "kafka.yaml"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("cannot keep them"), "{ran:?}");
}
