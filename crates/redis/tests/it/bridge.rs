//! Bridges from and to Redis.

use std::collections::BTreeMap;
use std::time::Duration;

use everbus::Bus;
use everbus::bridge::Bridge;
use everbus_core::{Cursor, Event};
use everbus_testkit::servers::Flavour;

use crate::plain::pattern;
use crate::server;

const KEYS: u64 = 5;

/// The numbers of a key's events go over three types.
fn event(n: u64) -> Event {
    let event_type = ["order.placed", "order.paid", "order.shipped"][(n / KEYS % 3) as usize];
    let event = Event::builder(event_type).json(&n);
    event.key(format!("k{}", n % KEYS)).build().unwrap()
}

async fn publish(bus: &Bus, numbers: std::ops::Range<u64>) {
    for start in numbers.clone().step_by(100) {
        let end = numbers.end.min(start + 100);
        bus.publish_batch((start..end).map(event)).await.unwrap();
    }
}

async fn all(bus: &Bus) -> Vec<u64> {
    let log = bus.log().unwrap();
    let (head, mut cursor) = (log.head().await.unwrap(), Cursor::START);
    let mut numbers = Vec::new();
    while !cursor.reaches(&head) {
        let read = log.read(cursor.clone(), vec![pattern("*")], 1000).await;
        let (records, searched) = read.unwrap();
        numbers.extend(records.iter().map(|r| r.event.json::<u64>().unwrap()));
        cursor.advance_to(&searched);
    }
    numbers
}

// conformance: engines/bridge-redis: a bridge from Redis keeps the order of each key over several types, with a backlog and while publishers run, and back to Redis stores each event once
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_order_of_a_key_holds_over_its_types() {
    let (Some(from), Some(to)) = (
        server::database(Flavour::Redis),
        server::database(Flavour::Redis),
    ) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("middle.db").display().to_string();
    let source = Bus::open(&from).await.unwrap();
    let middle = Bus::open(&file).await.unwrap();
    publish(&source, 0..6000).await;
    let publishing = tokio::spawn({
        let source = source.clone();
        async move {
            for start in (6000..9000).step_by(50) {
                publish(&source, start..start + 50).await;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    });
    let carried = Bridge::new(&source, &middle).run_until_caught_up().await;
    carried.unwrap();
    publishing.await.unwrap();
    let rest = Bridge::new(&source, &middle).run_until_caught_up().await;
    assert_eq!(rest.unwrap().refused, 0);
    let arrived = all(&middle).await;
    let mut by_key: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for n in &arrived {
        by_key.entry(n % KEYS).or_default().push(*n);
    }
    for (key, numbers) in by_key {
        assert!(numbers.is_sorted(), "key {key}");
    }
    let complete = |mut numbers: Vec<u64>| {
        numbers.sort_unstable();
        assert_eq!(numbers, (0..9000).collect::<Vec<u64>>(), "lost or doubled");
    };
    complete(arrived);
    let target = Bus::open(&to).await.unwrap();
    let stats = Bridge::new(&middle, &target).run_until_caught_up().await;
    assert_eq!(stats.unwrap().moved, 9000);
    complete(all(&target).await);
}
