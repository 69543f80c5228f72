//! An engine that is busy, full, failing or slow: outcomes are kept, leases are kept, nothing is
//! acked by falling through.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use everbus::{Bus, Code, GroupName, Message};
use tokio::sync::Semaphore;

use crate::faulty::faulty;
use crate::support::{Kind, Lab, PATIENCE, eventually, fine, is_done, recorder};

// conformance: embedded/sqlite-lock: an engine that is busy or full is asked again with backoff until the outcome is durable.
#[tokio::test]
async fn outcomes_are_settled_again_until_the_engine_has_time() {
    let (bus, faults, _) = faulty().await;
    let (handler, mut seen) = recorder(fine);
    bus.subscribe("a").handler(handler).await.unwrap();
    faults.settle.add(2, Code::Busy);
    faults.settle.add(1, Code::DiskFull);
    faults.settle_one.add(2, Code::Busy);
    bus.start().await.unwrap();
    for receipt in bus.publish_batch((0..20).map(|n| ("a", n))).await.unwrap() {
        receipt.settled().await.unwrap();
        assert_eq!(seen.next().await.attempt(), 1);
    }
    assert!(seen.is_empty(), "each event is handled once");
    assert!(bus.failure().is_none());
    bus.shutdown().await.unwrap();
}

// conformance: fault-10/pending-ack: a shutdown waits for outcomes that the engine has not taken yet.
#[tokio::test]
async fn a_shutdown_waits_for_outcomes_the_engine_is_too_busy_for() {
    let (bus, faults, _) = faulty().await;
    let (handler, mut seen) = recorder(fine);
    bus.subscribe("a").handler(handler).await.unwrap();
    faults.settle.add(4, Code::Busy);
    bus.start().await.unwrap();
    bus.publish(("a", 1)).await.unwrap();
    seen.next().await;
    bus.shutdown().await.unwrap();
    assert_eq!(faults.taken.load(Ordering::SeqCst), 1);
}

// conformance: bus/busy-fetch: an engine that is busy is asked again, and dispatch goes on.
#[tokio::test]
async fn fetching_goes_on_after_the_engine_was_busy() {
    let (bus, faults, _) = faulty().await;
    let (handler, mut seen) = recorder(fine);
    bus.subscribe("a").handler(handler).await.unwrap();
    faults.fetch.add(3, Code::Busy);
    bus.start().await.unwrap();
    bus.publish(("a", 1))
        .await
        .unwrap()
        .settled()
        .await
        .unwrap();
    seen.next().await;
    assert!(bus.failure().is_none());
    bus.shutdown().await.unwrap();
}

// conformance: bus/storage-failed: once storage has failed, the bus says so and takes no more publishes.
#[tokio::test]
async fn after_storage_failed_publishes_are_refused_with_the_reason() {
    let (bus, faults, _) = faulty().await;
    let (handler, mut seen) = recorder(fine);
    bus.subscribe("a").handler(handler).await.unwrap();
    faults.fetch.add(1, Code::StorageFailed);
    bus.start().await.unwrap();
    eventually("the failure is seen", || async { bus.failure().is_some() }).await;
    assert_eq!(bus.failure().unwrap().code(), Code::StorageFailed);
    let error = bus.publish(("a", 1)).await.unwrap_err();
    assert_eq!(error.code(), Code::StorageFailed);
    assert!(seen.is_empty());
    bus.shutdown().await.unwrap();
}

// conformance: bus/storage-failed: a publish that meets a failure the engine does not recover from ends the bus with that reason.
#[tokio::test]
async fn a_publish_that_meets_a_fatal_failure_ends_the_bus() {
    for code in [Code::StorageFailed, Code::NewerSchema, Code::Corrupt] {
        let (bus, faults, _) = faulty().await;
        faults.append.add(1, code);
        for _ in 0..2 {
            assert_eq!(bus.publish(("a", 1)).await.unwrap_err().code(), code);
        }
        assert_eq!(bus.failure().unwrap().code(), code);
        bus.shutdown().await.unwrap();
    }
    let (bus, faults, _) = faulty().await;
    faults.append.add(1, Code::Busy);
    bus.publish(("a", 1)).await.unwrap_err();
    assert!(bus.failure().is_none(), "a passing failure");
    bus.publish(("a", 1)).await.unwrap();
    bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn an_outcome_that_meets_a_fatal_failure_ends_the_bus() {
    for code in [Code::StorageFailed, Code::NewerSchema, Code::Corrupt] {
        let (bus, faults, _) = faulty().await;
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("a").handler(handler).await.unwrap();
        faults.settle.add(1, code);
        bus.start().await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        seen.next().await;
        eventually("the failure is seen", || async { bus.failure().is_some() }).await;
        assert_eq!(bus.failure().unwrap().code(), code);
        bus.shutdown().await.unwrap();
    }
}

#[tokio::test]
async fn a_group_that_another_process_removed_is_reported() {
    let (bus, _, _) = faulty().await;
    let (handler, mut in_other) = recorder(fine);
    bus.subscribe("a").handler(handler).await.unwrap();
    let subscribe = async || {
        let (handler, seen) = recorder(fine);
        let id = bus.subscribe("a").group("g").handler(handler).await;
        (id.unwrap(), seen)
    };
    let (id, _) = subscribe().await;
    bus.start().await.unwrap();
    let group: GroupName = "g".parse().unwrap();
    assert!(bus.stopped_groups().is_empty());
    let engine = bus.engine().broker.clone();
    engine.remove_group(group.clone()).await.unwrap();
    // Wakes the consumer, and the other group goes on.
    bus.publish(("a", 1)).await.unwrap();
    in_other.next().await;
    eventually("the stop is visible", || async {
        !bus.stopped_groups().is_empty()
    })
    .await;
    let stopped = bus.stopped_groups();
    assert_eq!(stopped[0].0, group);
    assert_eq!(stopped[0].1.code(), Code::GroupNotFound);
    assert!(bus.failure().is_none(), "the bus itself works");

    bus.unsubscribe(id).await.unwrap();
    assert!(bus.stopped_groups().is_empty());
    let (_, mut seen) = subscribe().await;
    bus.publish(("a", 2)).await.unwrap();
    seen.next().await;
    assert!(bus.stopped_groups().is_empty());
    bus.shutdown().await.unwrap();
}

// conformance: embedded/sqlite-lock: a publish waits for another program that holds the file as long as it was told, and then says so.
#[tokio::test]
async fn a_file_that_is_locked_for_longer_than_the_busy_timeout_is_busy() {
    let lab = Lab::new(Kind::Sqlite);
    let busy_timeout = Duration::from_millis(50);
    let bus = lab
        .open_with(lab.builder().busy_timeout(busy_timeout))
        .await;
    bus.publish(("a", 1)).await.unwrap();
    let other = rusqlite::Connection::open(lab.file()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    // Well before the ten seconds it waits unless told otherwise; unless the machine stood still, and
    // not every time.
    let mut waited = Duration::MAX;
    for _ in 0..5 {
        let begun = std::time::Instant::now();
        let error = bus.publish(("a", 2)).await.unwrap_err();
        assert_eq!(error.code(), Code::Busy);
        waited = waited.min(begun.elapsed());
        if waited < Duration::from_secs(8) {
            break;
        }
    }
    assert!(waited < Duration::from_secs(8), "{waited:?}");
    other.execute_batch("ROLLBACK").unwrap();
    bus.publish(("a", 2)).await.unwrap();
    bus.shutdown().await.unwrap();

    let absurd = Bus::builder().busy_timeout(Duration::MAX).open("memory:");
    assert_eq!(absurd.await.unwrap_err().code(), Code::InvalidSetting);
}

// conformance: embedded/shutdown-timeout: a locked file does not hold up a shutdown beyond its time, and what could not be made durable is counted.
#[tokio::test]
async fn a_shutdown_under_a_locked_file_says_what_is_not_durable() {
    let lab = Lab::new(Kind::Sqlite);
    // Longer than the test would wait.
    let busy_timeout = Duration::from_secs(3600);
    let bus = lab
        .open_with(lab.builder().busy_timeout(busy_timeout))
        .await;
    let (gate, mut seen) = gated(&bus).await;
    bus.start().await.unwrap();
    bus.publish(("a", 1)).await.unwrap();
    seen.next().await;
    let other = rusqlite::Connection::open(lab.file()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    gate.add_permits(1);
    let report = bus.shutdown_within(Duration::from_millis(100));
    let report = tokio::time::timeout(PATIENCE, report).await;
    let report = report.expect("the shutdown ends by itself").unwrap();
    assert_eq!((report.abandoned, report.unsettled), (0, 1));
    assert!(!report.closed);
    other.execute_batch("ROLLBACK").unwrap();
}

// conformance: embedded/shutdown-timeout: handlers get the timeout, outcomes and the engine five seconds more, and then the shutdown returns.
#[tokio::test(start_paused = true)]
async fn a_shutdown_has_one_end_whatever_the_engine_does() {
    let (bus, faults, _) = faulty().await;
    let (gate, mut seen) = gated(&bus).await;
    bus.start().await.unwrap();
    for n in 0..3 {
        bus.publish(("a", n)).await.unwrap();
        seen.next().await;
    }
    faults.stuck.store(true, Ordering::SeqCst);
    gate.add_permits(2);
    let subscribing = tokio::spawn({
        let bus = bus.clone();
        async move { bus.subscribe("b").handler(|| async {}).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let begun = tokio::time::Instant::now();
    let report = bus.shutdown_within(Duration::from_secs(3)).await.unwrap();
    // In the time of tokio, which only moves here when everybody waits.
    assert!(
        begun.elapsed() <= Duration::from_millis(8_001),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!((report.abandoned, report.unsettled), (1, 2));
    assert!(!report.closed);
    let refused = subscribing.await.unwrap().unwrap_err();
    assert_eq!(refused.code(), Code::EventBusShutdownError);
}

#[tokio::test(start_paused = true)]
async fn outcomes_that_an_engine_refuses_until_the_end_are_counted() {
    let (bus, faults, _) = faulty().await;
    let (gate, mut seen) = gated(&bus).await;
    bus.start().await.unwrap();
    for n in 0..3 {
        bus.publish(("a", n)).await.unwrap();
        seen.next().await;
    }
    // One of three is refused again and again.
    faults.settle_one.add(10_000, Code::Busy);
    gate.add_permits(3);
    let report = bus.shutdown_within(Duration::ZERO).await.unwrap();
    assert_eq!((report.abandoned, report.unsettled), (0, 1));
    assert!(report.closed);
}

/// Subscribes a handler that notes its message and waits at the gate.
async fn gated(bus: &Bus) -> (Arc<Semaphore>, crate::support::Seen) {
    gated_for(bus, Duration::from_secs(30)).await
}

async fn gated_for(bus: &Bus, timeout: Duration) -> (Arc<Semaphore>, crate::support::Seen) {
    let gate = Arc::new(Semaphore::new(0));
    let inside = gate.clone();
    let (note, seen) = recorder(fine);
    let note = Arc::new(note);
    bus.subscribe("a")
        .timeout(timeout)
        .handler(move |m: Message| {
            let (gate, note) = (inside.clone(), note.clone());
            async move {
                note(m).await?;
                gate.acquire().await?.forget();
                everbus::handled()
            }
        })
        .await
        .unwrap();
    (gate, seen)
}

// conformance: rule-4/fencing: an outcome that comes after the lease was lost is refused; it neither acks nor fails the new delivery.
#[tokio::test]
async fn an_outcome_that_comes_after_its_lease_is_refused() {
    let (bus, _, clock) = faulty().await;
    let (gate, mut seen) = gated(&bus).await;
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", 1)).await.unwrap();
    assert_eq!(seen.next().await.attempt(), 1);
    // As if this process had been stopped for an hour.
    clock.advance(Duration::from_secs(3600));
    assert_eq!(seen.next().await.attempt(), 2);
    gate.add_permits(1);
    eventually("the late outcome is refused", || async {
        bus.lost_leases() == 1
    })
    .await;
    assert!(!is_done(&bus, receipt.seq(), "").await);
    gate.add_permits(1);
    receipt.settled().await.unwrap();
    assert_eq!(bus.lost_leases(), 1);
    bus.shutdown().await.unwrap();
}

// conformance: rule-4/extend: leases are extended while the handler runs, so a long handler keeps its event.
// conformance: omni/subscribe-ack-wait: a handler that runs for long keeps its event
#[tokio::test(start_paused = true)]
async fn a_long_handler_keeps_its_event() {
    let (bus, faults, clock) = faulty().await;
    let (gate, mut seen) = gated(&bus).await;
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", 1)).await.unwrap();
    seen.next().await;
    // The lease is 40 s and is extended every 13⅓ s of real time. The engine's clock moves 70 s;
    // tokio's stays below 30 s, where the handler would time out.
    for _ in 0..2 {
        let before = faults.extended.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(13_400)).await;
        assert!(faults.extended.load(Ordering::SeqCst) > before);
        clock.advance(Duration::from_secs(35));
    }
    gate.add_permits(1);
    receipt.settled().await.unwrap();
    assert!(seen.is_empty(), "delivered once");
    assert_eq!(bus.lost_leases(), 0);
    bus.shutdown().await.unwrap();
}

// conformance: rule-4/extend: leases are extended in time also after the timeouts of the group's handlers became shorter.
#[tokio::test(start_paused = true)]
async fn leases_are_kept_after_they_became_shorter() {
    let (bus, faults, _) = faulty().await;
    let long = bus.subscribe("a").timeout(Duration::from_secs(3600));
    let id = long.handler(|| async {}).await.unwrap();
    bus.start().await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    bus.unsubscribe(id).await.unwrap();
    let (_gate, mut seen) = gated_for(&bus, Duration::from_secs(20)).await;
    bus.publish(("a", 1)).await.unwrap();
    seen.next().await;
    // The lease is 30 s now.
    let before = faults.extended.load(Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert!(faults.extended.load(Ordering::SeqCst) > before);
    bus.shutdown_within(Duration::ZERO).await.unwrap();
}

// conformance: rule-4/extend: what is held when the timeouts of the group's handlers become longer keeps its lease too.
#[tokio::test(start_paused = true)]
async fn leases_are_kept_when_they_become_longer() {
    let (bus, faults, clock) = faulty().await;
    let (gate, mut seen) = gated_for(&bus, Duration::from_secs(20)).await;
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", 1)).await.unwrap();
    seen.next().await;
    let before = faults.extended.load(Ordering::SeqCst);
    let long = bus.subscribe("b").timeout(Duration::from_secs(3600));
    long.handler(|| async {}).await.unwrap();
    eventually("the lease is extended", || async {
        faults.extended.load(Ordering::SeqCst) > before
    })
    .await;
    // Longer than the first lease, shorter than a third of the new one.
    clock.advance(Duration::from_secs(600));
    gate.add_permits(1);
    receipt.settled().await.unwrap();
    assert_eq!(bus.lost_leases(), 0);
    assert!(seen.is_empty(), "delivered once");
    bus.shutdown().await.unwrap();
}
