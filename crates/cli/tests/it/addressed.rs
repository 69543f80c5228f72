//! `everbus publish --to`.

use crate::support::Shop;

// conformance: contract/address-cli: an event is published for one group, and the address is shown
#[test]
fn an_event_is_published_for_one_group() {
    let shop = Shop::new();
    for (to, address) in [("billing", "billing"), ("(unnamed)", "")] {
        let args = ["-o", "json", "publish", "a.b", "{}", "--to", to];
        let published = shop.run(&args).json();
        let id = published["id"].as_str().unwrap();
        let got = shop.run(&["-o", "json", "get", id]).json();
        assert_eq!(got["event"]["address"], address);
    }
    let plain = shop.run(&["-o", "json", "publish", "a.b", "{}"]).json();
    let id = plain["id"].as_str().unwrap();
    let got = shop.run(&["-o", "json", "get", id]).json();
    assert!(got["event"].get("address").is_none());
}
