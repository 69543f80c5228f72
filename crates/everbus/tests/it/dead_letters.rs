//! Dead letters through the bus: listing, retrying, purging.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus::{
    Bus, Code, DeadLetterFilter, EventId, HandlerError, HandlerResult, Message, PageRequest,
    Receipt,
};

use crate::support::{fine, on_every_durable_engine, on_every_engine, recorder};

async fn refuse(_: Message) -> HandlerResult {
    Err(HandlerError::permanent("refused"))
}

/// Publishes events that all become dead letters of the unnamed group.
async fn bury(bus: &Bus, count: usize) -> Vec<Receipt> {
    let receipts = bus
        .publish_batch((0..count).map(|n| ("a", n)))
        .await
        .unwrap();
    for receipt in &receipts {
        assert_eq!(receipt.settled().await.unwrap().dead_lettered.len(), 1);
    }
    receipts
}

// conformance: embedded/dlq-list: list() returns dead events newest first, with offset and limit, 100 by default.
#[tokio::test]
async fn dead_letters_are_listed_newest_first_in_pages() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("a").handler(refuse).await.unwrap();
        bus.start().await.unwrap();
        let receipts = bus_ids(&bury(&bus, 120).await);
        let queue = bus.dead_letters();
        let first: Vec<EventId> = ids(&queue.list().await.unwrap());
        assert_eq!(
            first,
            receipts.iter().rev().take(100).copied().collect::<Vec<_>>()
        );
        assert_eq!(queue.count(DeadLetterFilter::default()).await.unwrap(), 120);

        let page = |limit, offset, after| PageRequest {
            limit,
            offset,
            after,
        };
        let by_offset = queue
            .list_page(DeadLetterFilter::default(), page(50, 100, None))
            .await
            .unwrap();
        assert_eq!(
            ids(&by_offset.items),
            receipts.iter().rev().skip(100).copied().collect::<Vec<_>>()
        );
        let start = queue
            .list_page(DeadLetterFilter::default(), page(7, 0, None))
            .await
            .unwrap();
        let next = queue
            .list_page(DeadLetterFilter::default(), page(7, 0, start.next))
            .await
            .unwrap();
        assert_eq!(
            ids(&next.items),
            receipts
                .iter()
                .rev()
                .skip(7)
                .take(7)
                .copied()
                .collect::<Vec<_>>()
        );
        let error = queue
            .list_page(DeadLetterFilter::default(), page(0, 0, None))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting);
        bus.shutdown().await.unwrap();
    })
    .await;
}

fn ids(letters: &[everbus::DeadLetter]) -> Vec<EventId> {
    letters.iter().map(|letter| letter.event().id()).collect()
}

fn bus_ids(receipts: &[Receipt]) -> Vec<EventId> {
    receipts.iter().map(Receipt::id).collect()
}

// conformance: embedded/dlq-retry: retry() sends a single dead event back with a full reset, to the group that failed only.
// conformance: bus/dlq-retry-own-group: retry() sends a single dead event back with a full reset, to the group that failed only.
// conformance: omni/dlq-retry: retry() sends a single dead event back with a full reset, to the group that failed only.
#[tokio::test]
async fn a_retried_dead_letter_begins_anew_in_the_group_that_failed() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let mended = Arc::new(AtomicBool::new(false));
        let is_mended = mended.clone();
        let (handler, mut seen) = recorder(move |_| match is_mended.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err(HandlerError::permanent("broken")),
        });
        bus.subscribe("a")
            .group("failing")
            .handler(handler)
            .await
            .unwrap();
        let (other, mut other_seen) = recorder(fine);
        bus.subscribe("a")
            .group("good")
            .handler(other)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        receipt.settled().await.unwrap();
        seen.next().await;
        other_seen.next().await;

        mended.store(true, Ordering::SeqCst);
        assert_eq!(bus.dead_letters().retry(receipt.id()).await.unwrap(), 1);
        let again = seen.next().await;
        assert_eq!((again.attempt(), again.failures().len()), (1, 0));
        assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
        assert!(other_seen.is_empty());
        assert!(bus.dead_letters().list().await.unwrap().is_empty());
        let error = bus.dead_letters().retry(receipt.id()).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
        assert!(error.hint_text().is_some());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: embedded/dlq-purge: purge() deletes dead events older than N days, the cutoff included.
#[tokio::test]
async fn a_purge_removes_what_is_as_old_as_the_cutoff() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("a").handler(refuse).await.unwrap();
        bus.start().await.unwrap();
        bury(&bus, 3).await;
        let day = Duration::from_secs(24 * 3600);
        lab.clock.advance(day - Duration::from_micros(1));
        let queue = bus.dead_letters();
        assert_eq!(queue.purge_older_than_days(1).await.unwrap(), 0);
        lab.clock.advance(Duration::from_micros(1));
        bury(&bus, 2).await;
        assert_eq!(queue.purge_older_than_days(1).await.unwrap(), 3);
        assert_eq!(queue.list().await.unwrap().len(), 2);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: embedded/dlq-independent: the dead letters need the store only, not the dispatcher.
#[tokio::test]
async fn dead_letters_can_be_seen_and_retried_without_a_started_bus() {
    on_every_durable_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("a").handler(refuse).await.unwrap();
        bus.start().await.unwrap();
        let receipts = bury(&bus, 3).await;
        bus.shutdown().await.unwrap();

        let bus = lab.open().await;
        let queue = bus.dead_letters();
        assert_eq!(queue.get(receipts[0].id()).await.unwrap().len(), 1);
        assert_eq!(
            queue.retry_all(DeadLetterFilter::default()).await.unwrap(),
            3
        );
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        for _ in &receipts {
            seen.next().await;
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}
