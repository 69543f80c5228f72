//! Streams whose events the server removes by their age.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use everbus::Bus;
use everbus_core::{Clock as _, Cursor, ManualClock, Pattern, Stream, Streams, SystemClock};
use everbus_nats::Options;
use serde_json::Value;

use crate::server;
use crate::streams::group;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn table() -> Streams {
    let of = |name: &str, pattern: &str| Stream::new(name, [pattern]).unwrap();
    Streams::new([
        of("LONG", "long.>").max_age(30 * DAY),
        of("SHORT", "short.>").max_age(Duration::from_secs(1)),
        of("SYSTEM", "system.>"),
    ])
    .unwrap()
}

// conformance: omni/nats-drops: the capabilities say that the server drops by age; an event that has reached 80 % of the age of its stream raises an alert, and events that were dropped before a group got them are counted
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_that_get_too_old_are_reported() {
    let Some(url) = server::account() else { return };
    let clock = Arc::new(ManualClock::new(SystemClock.now()));
    let mut options = Options::default();
    options.clock = clock.clone();
    let engine = everbus_nats::open(&url, options).await.unwrap();
    assert!(!engine.broker.capabilities().drops_by_age);
    engine.broker.declare_streams(table()).await.unwrap();
    assert!(engine.broker.capabilities().drops_by_age);
    let slow = group("slow", &["long.*", "short.*"]);
    engine.broker.declare(slow).await.unwrap();
    let bus = Bus::builder().streams(table()).with_engine(engine).unwrap();
    bus.publish(("long.one", 1)).await.unwrap();
    for n in 0..4 {
        bus.publish(("short.one", n)).await.unwrap();
    }
    clock.advance(23 * DAY);
    bus.groups().await.unwrap();
    clock.advance(DAY);
    let reported = async {
        let system = vec![Pattern::new("system.>").unwrap()];
        loop {
            let groups = bus.groups().await.unwrap();
            let log = bus.engine().log().unwrap();
            let (found, _) = log.read(Cursor::START, system.clone(), 100).await.unwrap();
            let mut counts: BTreeMap<String, u64> = BTreeMap::new();
            for record in found {
                let body: Value = record.event.json().unwrap();
                assert_eq!(body["group"], "slow");
                let stream = body["stream"].as_str().unwrap();
                let what = format!("{} {stream}", record.event.event_type());
                *counts.entry(what).or_default() += body["dropped"].as_u64().unwrap_or(1);
            }
            let is_there = |what: &str| counts.contains_key(what);
            if is_there("system.events_at_risk LONG") && is_there("system.events_dropped SHORT") {
                let gone = counts["system.events_dropped SHORT"];
                if gone == 4 {
                    return (groups, counts);
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let reported = tokio::time::timeout(Duration::from_secs(60), reported).await;
    let (groups, counts) = reported.expect("it is reported");
    assert_eq!(counts["system.events_at_risk LONG"], 1, "once: {counts:?}");
    let slow = groups.iter().find(|g| g.name.as_str() == "slow").unwrap();
    assert_eq!(slow.lag().dropped, 4);
    let long = slow.streams.iter().find(|s| &*s.stream == "LONG").unwrap();
    assert_eq!((long.lag.behind, long.lag.dropped), (1, 0));
    assert_eq!(long.max_age, Some(30 * DAY));
    bus.shutdown().await.unwrap();
}
