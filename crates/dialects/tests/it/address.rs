//! Events for one group only.

use everbus_core::{Code, Event, GroupName};
use everbus_dialects::{Dialect, decode, encode};

use crate::support::value;

// conformance: contract/address-dialect: the native document carries the address; that of the unnamed group, too
#[test]
fn the_native_document_carries_the_address() {
    for (group, text) in [("billing", "billing"), ("(unnamed)", "")] {
        let group: GroupName = group.parse().unwrap();
        let event = Event::builder("a.b")
            .payload("{}")
            .addressed_to(&group)
            .build()
            .unwrap();
        let document = encode(&event, Dialect::Native).unwrap();
        assert_eq!(value(&document)["address"], text);
        let back = decode(&document, Dialect::Native).unwrap();
        assert_eq!(back, event);
        assert!(back.is_for(&group) && !back.is_for(&GroupName::new("other").unwrap()));
    }
    let plain = Event::builder("a.b").payload("{}").build().unwrap();
    let document = value(&encode(&plain, Dialect::Native).unwrap());
    assert!(document.get("address").is_none());
}

#[test]
fn what_is_no_group_is_refused() {
    let long = "x".repeat(129);
    for bad in ["a\\nb", &long] {
        let document = format!(
            r#"{{"id":"0198c5f0-0000-7000-8000-000000000001","type":"a.b","address":"{bad}","payload":{{}}}}"#
        );
        let error = decode(document.as_bytes(), Dialect::Native).unwrap_err();
        assert_eq!(error.code(), Code::InvalidAttribute, "{error}");
        assert!(error.message().contains("address"), "{error}");
    }
}
