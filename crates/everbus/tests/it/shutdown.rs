//! Graceful shutdown, abandonment, drop, and what is there afterwards.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::{Bus, Code, EventId, Message, Receipt};
use tokio::sync::{Notify, Semaphore};

use crate::support::{
    Kind, Lab, PATIENCE, eventually, fine, on_every_durable_engine, on_every_engine, recorder,
};

/// Subscribes a handler that says when it has begun and then waits at the gate.
async fn gated(bus: &Bus, concurrency: usize) -> (Arc<Notify>, Arc<Semaphore>) {
    let (begun, gate) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
    let (begin, inside) = (begun.clone(), gate.clone());
    bus.subscribe("a")
        .concurrency(concurrency)
        .handler(move || {
            let (begun, gate) = (begin.clone(), inside.clone());
            async move {
                begun.notify_one();
                gate.acquire().await?.forget();
                everbus::handled()
            }
        })
        .await
        .unwrap();
    (begun, gate)
}

// conformance: embedded/publish-after-shutdown: publish and subscribe after shutdown give EventBusShutdownError.
#[tokio::test]
async fn after_shutdown_publishes_and_subscriptions_are_refused() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let id = bus.subscribe("a").handler(|| async {}).await.unwrap();
        bus.start().await.unwrap();
        let late = bus.publish(("a", 0));
        bus.shutdown().await.unwrap();
        let errors = [
            late.await.unwrap_err(),
            bus.publish(("a", 1)).await.unwrap_err(),
            bus.publish_batch([("a", 1)]).await.unwrap_err(),
            bus.subscribe("a").handler(|| async {}).await.unwrap_err(),
            bus.unsubscribe(id).await.unwrap_err(),
            bus.start().await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.code(), Code::EventBusShutdownError);
            assert!(
                error.to_string().starts_with("EventBusShutdownError"),
                "{error}"
            );
        }
    })
    .await;
}

// conformance: embedded/shutdown-waits: shutdown waits for in-flight handlers and refuses new publishes meanwhile.
#[tokio::test]
async fn shutdown_waits_for_running_handlers() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (begun, gate) = gated(&bus, 1).await;
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        begun.notified().await;
        let ended = Arc::new(AtomicBool::new(false));
        let shutdown = tokio::spawn({
            let (bus, ended) = (bus.clone(), ended.clone());
            async move {
                let report = bus.shutdown_within(PATIENCE).await;
                ended.store(true, Ordering::SeqCst);
                report
            }
        });
        eventually("publishes are refused", || async {
            bus.publish(("b", 1)).await.is_err()
        })
        .await;
        assert!(!ended.load(Ordering::SeqCst));
        let settled = tokio::spawn(async move { receipt.settled().await });
        gate.add_permits(1);
        let report = shutdown.await.unwrap().unwrap();
        assert_eq!(report.abandoned, 0);
        // A waiting caller saw it settled, or the end of the bus if that came first.
        if let Err(error) = settled.await.unwrap() {
            assert_eq!(error.code(), Code::EventBusShutdownError);
        }
    })
    .await;
}

// conformance: embedded/shutdown-timeout: handlers that do not finish within the timeout are abandoned, and shutdown returns.
#[tokio::test]
async fn handlers_that_do_not_finish_in_time_are_abandoned() {
    on_every_engine(|lab| async move {
        let bus = lab
            .open_with(lab.builder().shutdown_timeout(Duration::from_millis(20)))
            .await;
        let (begun, _gate) = gated(&bus, 2).await;
        bus.start().await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        begun.notified().await;
        bus.publish(("a", 2)).await.unwrap();
        begun.notified().await;
        assert_eq!(bus.shutdown().await.unwrap().abandoned, 2);
    })
    .await;
}

// conformance: embedded/shutdown-timeout: without a setting the wait ends after 30 s.
#[tokio::test(start_paused = true)]
async fn shutdown_waits_thirty_seconds_unless_told_otherwise() {
    // An engine without threads of its own: the time of tokio moves only while everything waits.
    let lab = Lab::new(Kind::Memory);
    let patient = lab.builder().timeout(Duration::from_secs(3600));
    let bus = lab.open_with(patient).await;
    let (begun, _gate) = gated(&bus, 1).await;
    bus.start().await.unwrap();
    bus.publish(("a", 1)).await.unwrap();
    begun.notified().await;
    let asked = tokio::time::Instant::now();
    assert_eq!(bus.shutdown().await.unwrap().abandoned, 1);
    let waited = asked.elapsed();
    assert!((30_000..30_010).contains(&waited.as_millis()), "{waited:?}");
}

// conformance: bus/abandoned-redelivered: an abandoned event is delivered again with its attempt counted; one that had not begun is not counted.
// conformance: embedded/shutdown-abandoned: an abandoned event is delivered again with its attempt counted; one that had not begun is not counted.
#[tokio::test]
async fn what_shutdown_left_is_delivered_after_a_restart() {
    on_every_durable_engine(|lab| async move {
        let bus = lab.open().await;
        let (begun, _gate) = gated(&bus, 1).await;
        bus.start().await.unwrap();
        let receipts = bus.publish_batch((0..5).map(|n| ("a", n))).await.unwrap();
        begun.notified().await;
        assert_eq!(
            bus.shutdown_within(Duration::ZERO).await.unwrap().abandoned,
            1
        );
        drop(bus);

        let bus = lab.open().await;
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let mut attempts = Vec::new();
        for _ in &receipts {
            let message = seen.next().await;
            attempts.push((message.seq(), message.attempt()));
        }
        attempts.sort_unstable();
        let expected: Vec<_> = receipts
            .iter()
            .map(Receipt::seq)
            .zip([2, 1, 1, 1, 1])
            .collect();
        assert_eq!(attempts, expected);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: bus/double-shutdown: shutting down twice, also at the same time, is harmless.
// conformance: embedded/shutdown-closes: a second shutdown is harmless.
#[tokio::test]
async fn shutting_down_twice_gives_the_same_report() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (begun, _gate) = gated(&bus, 1).await;
        bus.start().await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        begun.notified().await;
        let short = Duration::from_millis(20);
        let (first, second) = tokio::join!(bus.shutdown_within(short), bus.shutdown());
        assert_eq!(first.unwrap().abandoned, 1);
        assert_eq!(second.unwrap().abandoned, 1);
        assert_eq!(bus.shutdown().await.unwrap().abandoned, 1);
    })
    .await;
}

// conformance: fault-10/cancelled: a shutdown whose caller stopped waiting still completes.
#[tokio::test]
async fn a_shutdown_goes_on_when_its_caller_stops_waiting() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (begun, gate) = gated(&bus, 1).await;
        bus.start().await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        begun.notified().await;
        let waiting = bus.shutdown_within(PATIENCE);
        assert!(
            tokio::time::timeout(Duration::from_millis(5), waiting)
                .await
                .is_err()
        );
        gate.add_permits(1);
        assert_eq!(bus.shutdown().await.unwrap().abandoned, 0);
    })
    .await;
}

#[tokio::test]
async fn shutdown_without_start_and_with_the_longest_timeout_returns() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.publish(("a", 1)).await.unwrap();
        let report = bus.shutdown_within(Duration::MAX).await.unwrap();
        assert_eq!(report.abandoned, 0);
    })
    .await;
}

#[tokio::test]
async fn waiting_for_an_event_to_settle_ends_with_the_bus() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (begun, _gate) = gated(&bus, 1).await;
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        begun.notified().await;
        let waiting = tokio::spawn(async move { receipt.settled_within(PATIENCE).await });
        tokio::task::yield_now().await;
        bus.shutdown_within(Duration::ZERO).await.unwrap();
        let error = waiting.await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::EventBusShutdownError);
    })
    .await;
}

// conformance: bus/shutdown-acks: nothing acked is forgotten by a shutdown; what was handled is not delivered again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_under_load_loses_nothing_and_repeats_nothing_that_finished() {
    on_every_durable_engine(|lab| async move {
        let handled = Arc::new(Mutex::new(HashSet::new()));
        let repeated = Arc::new(AtomicUsize::new(0));
        let handler = |handled: Arc<Mutex<HashSet<EventId>>>, repeated: Arc<AtomicUsize>| {
            move |m: Message| {
                let (handled, repeated) = (handled.clone(), repeated.clone());
                async move {
                    tokio::task::yield_now().await;
                    if !handled.lock().unwrap().insert(m.id()) {
                        repeated.fetch_add(1, Ordering::SeqCst);
                    }
                }
            }
        };
        let mut published = HashSet::new();
        for round in 0..3 {
            let bus = lab.open().await;
            bus.subscribe("*")
                .handler(handler(handled.clone(), repeated.clone()))
                .await
                .unwrap();
            bus.start().await.unwrap();
            let publishers: Vec<_> = (0..8)
                .map(|publisher| {
                    let bus = bus.clone();
                    tokio::spawn(async move {
                        let mut acknowledged = Vec::new();
                        loop {
                            match bus.publish(("load", publisher)).await {
                                Ok(receipt) => acknowledged.push(receipt.id()),
                                Err(error) => {
                                    assert_eq!(error.code(), Code::EventBusShutdownError);
                                    return acknowledged;
                                }
                            }
                        }
                    })
                })
                .collect();
            eventually("some are handled", || async {
                handled.lock().unwrap().len() > (round + 1) * 500
            })
            .await;
            assert_eq!(bus.shutdown().await.unwrap().abandoned, 0);
            for publisher in publishers {
                published.extend(publisher.await.unwrap());
            }
        }
        let bus = lab.open().await;
        bus.subscribe("*")
            .handler(handler(handled.clone(), repeated.clone()))
            .await
            .unwrap();
        bus.start().await.unwrap();
        eventually("everything acknowledged is handled", || async {
            published.is_subset(&handled.lock().unwrap())
        })
        .await;
        bus.shutdown().await.unwrap();
        assert_eq!(repeated.load(Ordering::SeqCst), 0);
    })
    .await;
}

// conformance: bus/drop: dropping the bus without shutdown blocks nothing and forgets nothing acked.
#[tokio::test]
async fn dropping_the_bus_is_harmless() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let alive = Arc::new(());
        let held = alive.clone();
        bus.subscribe("a")
            .handler(move || {
                let _held = held.clone();
                async {}
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        receipt.settled().await.unwrap();
        drop((bus, receipt));
        eventually("the handlers are gone", || async {
            Arc::strong_count(&alive) == 1
        })
        .await;
    })
    .await;
    on_every_durable_engine(|lab| async move {
        let bus = lab.open().await;
        let (begun, gate) = gated(&bus, 1).await;
        bus.start().await.unwrap();
        let receipts = bus.publish_batch((0..3).map(|n| ("a", n))).await.unwrap();
        begun.notified().await;
        gate.add_permits(1);
        begun.notified().await;
        drop((bus, gate));
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        // The second one runs on until its timeout, which is the time of another test now.
        loop {
            if seen.next().await.seq() == receipts[2].seq() {
                break;
            }
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_handler_that_holds_the_bus_is_released_by_shutdown() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let alive = Arc::new(());
        let (held, inside) = (alive.clone(), bus.clone());
        bus.subscribe("a")
            .handler(move || {
                let (bus, _held) = (inside.clone(), held.clone());
                async move {
                    bus.publish(("b", 1)).await?;
                    everbus::handled()
                }
            })
            .await
            .unwrap();
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("b").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        assert_eq!(seen.next().await.event_type(), "b");
        bus.shutdown().await.unwrap();
        eventually("the handler is dropped", || async {
            Arc::strong_count(&alive) == 1
        })
        .await;
    })
    .await;
}
