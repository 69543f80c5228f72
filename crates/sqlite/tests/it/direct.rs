//! Rules that only a long random run would notice otherwise, each shown by itself.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, FailureKind, Recorded, Settlement, Verdict};
use everbus_sqlite::Options;

use crate::{clock, consume, declare, fetch, open, publish, retry_at_once, settle, try_settle};

// conformance: contract/inbox-groups: what one group has handled is not handled for another, also when the inbox is asked event by event
#[tokio::test]
async fn two_groups_never_share_an_inbox() {
    const EVENTS: usize = 60;
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&dir.path().join("a.db"));
    for group in ["a", "b"] {
        declare(&engine, group, "*").await;
    }
    for _ in 0..EVENTS {
        publish(&engine, "a.b").await;
    }
    let mut records: Vec<Arc<Recorded>> = Vec::new();
    for group in ["a", "b"] {
        let mut consumer = consume(&engine, group).await;
        let deliveries = fetch(&mut consumer, EVENTS).await;
        records = deliveries.iter().map(|d| d.record.clone()).collect();
        // The group `a` leaves one in the middle.
        let handled = deliveries
            .iter()
            .enumerate()
            .filter(|(n, _)| group == "b" || *n != 30)
            .map(|(_, d)| {
                let mut settlement = Settlement::new(d.lease.clone(), Verdict::Ack);
                settlement.inbox = true;
                settlement
            });
        for result in engine.broker.settle(handled.collect()).await.unwrap() {
            result.unwrap();
        }
    }
    let inbox = engine.inbox().unwrap();
    // These lie so far apart that they are looked for one by one; all of them are found in one search.
    let few = [0, 30, 59].map(|n| records[n].clone()).to_vec();
    for (group, expected) in [("a", [true, false, true]), ("b", [true; 3])] {
        let group = group.parse().unwrap();
        assert_eq!(inbox.handled(group, few.clone()).await.unwrap(), expected);
    }
    let all = inbox.handled("a".parse().unwrap(), records).await.unwrap();
    assert_eq!(all.iter().filter(|handled| !**handled).count(), 1);
    assert!(!all[30]);
}

// conformance: contract/close-gives-back: what is in flight when an engine closes is delivered again, whether it was claimed in a range or in a row of its own
#[tokio::test]
async fn closing_gives_back_what_is_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    for _ in 0..4 {
        publish(&engine, "a.b").await;
    }
    let mut consumer = consume(&engine, "").await;
    let first = fetch(&mut consumer, 4).await;
    settle(&engine, &first[0], Verdict::Ack).await;
    // One of them fails and is held again, in a row; two stay in their range.
    settle(&engine, &first[1], retry_at_once("no")).await;
    let again = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(
        (again.record.position, again.attempt),
        (first[1].record.position, 2)
    );
    engine.broker.close().await.unwrap();

    let engine = open(&path);
    let mut consumer = consume(&engine, "").await;
    let mut back = Vec::new();
    while back.len() < 3 {
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        let last = delivery.failures.last().expect("an attempt on record");
        assert_eq!(last.kind, FailureKind::Crash);
        settle(&engine, &delivery, Verdict::Ack).await;
        back.push((delivery.record.position.place(), delivery.attempt));
    }
    back.sort_unstable();
    assert_eq!(back, [(2, 3), (3, 2), (4, 2)]);
}

// conformance: fault-7/row: a lease on a row that was handed out anew is refused, although the row is held by the same consumer
#[tokio::test]
async fn the_token_of_a_row_is_compared() {
    let dir = tempfile::tempdir().unwrap();
    let (clock, shared) = clock();
    let options = Options {
        clock: shared,
        ..Options::default()
    };
    let engine = everbus_sqlite::open(&dir.path().join("a.db"), options).unwrap();
    declare(&engine, "", "*").await;
    publish(&engine, "a.b").await;
    let mut consumer = consume(&engine, "").await;
    let first = fetch(&mut consumer, 1).await.remove(0);
    settle(&engine, &first, retry_at_once("no")).await;
    let slow = fetch(&mut consumer, 1).await.remove(0);
    // Its lease ends, and it is handed out once more.
    clock.advance(Duration::from_secs(3600));
    let anew = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(anew.record.position, slow.record.position);
    let refused = try_settle(&engine, &slow, Verdict::Ack).await.unwrap_err();
    assert_eq!(refused.code(), Code::LeaseLost);
    settle(&engine, &anew, Verdict::Ack).await;
}
