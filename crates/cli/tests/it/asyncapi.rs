//! `everbus asyncapi`.

use serde_json::Value;

use crate::support::Shop;

const CONFIG: &str = "\
streams:
  overrides:
    'signals:price-update': {maxlen: 10}
consumers:
  mail:
    stream: orders:order-placed
    criticality: standard
    retry: {max_attempts: 3}
";

fn document(shop: &Shop, args: &[&str]) -> Value {
    let ran = shop.run(args);
    assert_eq!(ran.code, 0, "{ran:?}");
    serde_json::from_str(&ran.out).unwrap()
}

// conformance: handlers/asyncapi-command: `everbus asyncapi` describes the streams, consumers, groups and types of a configuration and its file.
#[test]
fn a_configuration_and_its_file_are_described_together() {
    let shop = Shop::new();
    std::fs::write(shop.path("everbus.yaml"), CONFIG).unwrap();
    let alone = document(
        &shop,
        &["asyncapi", "--config", "everbus.yaml", "--title", "Shop"],
    );
    assert_eq!(alone["asyncapi"], "3.0.0");
    assert_eq!(alone["info"]["title"], "Shop");
    for (address, there) in [
        ("signals.price.update", true),
        ("orders.order.placed", true),
        ("users.user.created", false),
    ] {
        assert_eq!(alone["channels"].get(address).is_some(), there, "{alone}");
    }
    let operations = alone["operations"].as_object().unwrap();
    let mail = operations
        .values()
        .find(|o| o["action"] == "receive")
        .unwrap();
    assert_eq!(mail["x-everbus-criticality"], "standard", "{mail}");

    assert_eq!(shop.run(&["publish", "users.user.created", "{}"]).code, 0);
    let db = shop.db();
    let db = db.to_str().unwrap();
    let both = document(&shop, &["asyncapi", "--config", "everbus.yaml", "--db", db]);
    let channel = &both["channels"]["users.user.created"];
    assert_eq!(channel["address"], "users.user.created", "{both}");
    assert!(both["channels"].get("orders.order.placed").is_some());
}

#[test]
fn without_a_configuration_and_a_file_there_is_nothing_to_describe() {
    let shop = Shop::new();
    let ran = shop.run(&["asyncapi"]);
    assert_ne!(ran.code, 0);
    assert!(ran.err.contains("NoSuchFile"), "{ran:?}");
    let ran = shop.run(&["asyncapi", "--config", "missing.yaml"]);
    assert!(ran.err.contains("InvalidConfig"), "{ran:?}");
}
