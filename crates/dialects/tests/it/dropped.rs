//! The table of the book: what a document of a dialect cannot carry.

use std::collections::BTreeMap;

use everbus_core::{Code, Event, EventBuilder, Timestamp, TraceContext};
use everbus_dialects::{Dialect, dropped, encode};
use serde_json::json;

/// An event that every dialect can write.
fn base() -> EventBuilder {
    Event::builder("order.placed")
        .tenant("acme")
        .occurred_at(Timestamp::from_micros(1_700_000_000_000_000))
        .json(&json!({}))
}

/// An event with what a row of the table is about, and the names by which it would be dropped.
fn row(name: &str) -> Option<(EventBuilder, &'static [&'static str])> {
    let trace = || {
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        TraceContext::parse(parent, None).unwrap()
    };
    let binary = || base().payload(vec![0xff]).content_type("a/b");
    Some(match name {
        "`id`, a UUID" => (base(), &["id"]),
        "`id` made of source and foreign id" => (base().source("s").foreign_id("x-1"), &["id"]),
        "`type`" => (base(), &["type"]),
        "`version` 1" => (base(), &["version"]),
        "`version` 2 and more" => (base().version(2), &["version"]),
        "`occurred_at`" => (base(), &["occurred_at"]),
        "… its microseconds" => (
            base().occurred_at(Timestamp::from_micros(1)),
            &["occurred_at"],
        ),
        "… before 1970" => (
            base().occurred_at(Timestamp::from_micros(-1000)),
            &["occurred_at"],
        ),
        "`source`" => (base().source("s"), &["source"]),
        "`app`" => (base().app("a"), &["app"]),
        "`tenant`" => (base(), &["tenant"]),
        "no `tenant`" => (Event::builder("t").json(&json!({})), &[]),
        "`entity`" => (base().entity("ORDER", "7"), &["entity"]),
        "… with `#` in it" => (base().entity("ORDER", "7#8"), &["entity"]),
        "`key`" => (base().key("k"), &["key"]),
        "`correlation_id`" => (base().correlation_id("c"), &["correlation_id"]),
        "`causation_id`" => (base().causation_id("c"), &["causation_id"]),
        "`expires_at`, in whole seconds" => (
            base().expires_at(Timestamp::from_micros(1_800_000_000_000_000)),
            &["expires_at"],
        ),
        "… its fraction" => (
            base().expires_at(Timestamp::from_micros(1_800_000_000_000_001)),
            &["expires_at"],
        ),
        "`address`" => (base().addressed_to(&"g".parse().unwrap()), &["address"]),
        "`trace`: the trace id" => (base().trace(trace()), &["trace"]),
        "`trace`: the span, the state" => (base().trace(trace()), &["trace", "span"]),
        "`content_type` of JSON" => (base().content_type("a/b+json"), &["content_type"]),
        "a payload that is no object" => (base().json(&[1]), &[]),
        "a payload that is not JSON" => (binary(), &[]),
        "metadata `station_id`" => (base().meta("station_id", "s"), &["metadata.station_id"]),
        "metadata `context`, an object" => (base().meta("context", "{}"), &["metadata.context"]),
        "metadata `replay_of`" => (base().meta("replay_of", "x"), &["metadata.replay_of"]),
        "metadata `trace_id`" => (base().meta("trace_id", "x"), &["metadata.trace_id"]),
        "metadata `subject`, `dataschema`" => (base().meta("subject", "x"), &["metadata.subject"]),
        "metadata named by `a-z0-9`" => (base().meta("channel", "w"), &["metadata.channel"]),
        "other metadata" => (base().meta("Channel-Id", "w"), &["metadata.Channel-Id"]),
        _ => return None,
    })
}

fn found(name: &str, dialect: Dialect) -> &'static str {
    let (event, names) = row(name).unwrap_or_else(|| panic!("no such row: {name}"));
    let event = event.build().unwrap();
    match (encode(&event, dialect), dropped(&event, dialect)) {
        (Err(e), Err(_)) => {
            let codes = [Code::Unsupported, Code::InvalidAttribute];
            assert!(
                codes.contains(&e.code()) && e.hint_text().is_some(),
                "{e:?}"
            );
            "refused"
        }
        (Ok(_), Ok(dropped)) if dropped.iter().any(|d| names.contains(&d.as_str())) => "dropped",
        (Ok(_), Ok(_)) => "carried",
        (encoded, dropped) => panic!("{encoded:?} but {dropped:?}"),
    }
}

// conformance: memory/dialect-dropped: what native → dialect cannot carry is tabled, and the table is true
#[test]
fn the_table_of_the_book_is_true() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/dialects.md");
    let page = std::fs::read_to_string(page).unwrap();
    let mut lines = page
        .lines()
        .skip_while(|line| !line.starts_with("| of the event |"));
    let cells = |line: &str| -> Vec<String> {
        let line = line.trim_matches('|').replace("\\|", "/");
        line.split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let header = cells(lines.next().expect("the table is in the book"));
    let dialects: Vec<Dialect> = header[1..]
        .iter()
        .map(|name| name.parse().unwrap())
        .collect();
    assert_eq!(dialects, Dialect::ALL);
    let mut rows = 0;
    let mut words: BTreeMap<&str, usize> = BTreeMap::new();
    for line in lines.skip(1).take_while(|line| line.starts_with('|')) {
        let cells = cells(line);
        for (dialect, cell) in dialects.iter().zip(&cells[1..]) {
            let word = found(&cells[0], *dialect);
            let said = match cell.as_str() {
                "dropped" | "refused" => cell.as_str(),
                _ => "carried",
            };
            assert_eq!(said, word, "{}, {dialect}: {cell}", cells[0]);
            *words.entry(word).or_default() += 1;
        }
        rows += 1;
    }
    assert_eq!(rows, 32, "a row is missing from the table or from the test");
    assert!(words.len() == 3, "{words:?}");
}

#[test]
fn an_event_without_anything_special_loses_nothing() {
    for dialect in Dialect::ALL {
        let names = dropped(&base().build().unwrap(), *dialect).unwrap();
        let expected: &[&str] = match dialect {
            Dialect::Omni | Dialect::Framework => &["tenant"],
            Dialect::Outbox => &["type"],
            _ => &[],
        };
        assert_eq!(names, expected, "{dialect}");
    }
}
