//! Who is called, in which order, how many at once, and what does not hold back what.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::{FailureKind, HandlerError, Message, RetryPolicy, StartFrom};
use tokio::sync::{Semaphore, mpsc};

use crate::support::{
    Kind, Lab, PATIENCE, broken, eventually, fine, is_done, on_every_engine, recorder,
    wait_for_retry,
};

// conformance: embedded/sequential: handlers that match the same event run one after another, in subscription order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handlers_of_a_group_run_one_after_another_in_subscription_order() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (log, mut lines) = mpsc::unbounded_channel();
        for (pattern, name) in [("a.b", "first"), ("a.*", "second"), ("*", "third")] {
            let log = log.clone();
            bus.subscribe(pattern)
                .handler(move || {
                    let log = log.clone();
                    async move {
                        log.send(format!("{name} begins"))?;
                        tokio::task::yield_now().await;
                        log.send(format!("{name} ends"))?;
                        everbus::handled()
                    }
                })
                .await
                .unwrap();
        }
        bus.start().await.unwrap();
        bus.publish(("a.b", 1))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
        let mut seen = Vec::new();
        while let Ok(line) = lines.try_recv() {
            seen.push(line);
        }
        let expected = ["first", "second", "third"]
            .iter()
            .flat_map(|name| [format!("{name} begins"), format!("{name} ends")]);
        assert_eq!(seen, expected.collect::<Vec<_>>());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: embedded/fail-together: failures are counted per event; if any handler fails, all run again.
#[tokio::test]
async fn handlers_of_a_group_fail_together_with_one_count() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (first, mut first_seen) = recorder(fine);
        let (second, mut second_seen) =
            recorder(|m| if m.attempt() == 1 { broken(m) } else { fine(m) });
        let (third, mut third_seen) = recorder(fine);
        bus.subscribe("a").handler(first).await.unwrap();
        bus.subscribe("a").handler(second).await.unwrap();
        bus.subscribe("a").handler(third).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        let state = wait_for_retry(&bus, receipt.seq(), "", 1).await;
        assert_eq!(state.failures[0].handler.as_deref(), Some("a#2"));
        assert!(third_seen.is_empty(), "the first failure ends the attempt");
        lab.clock.set(state.due_at.unwrap());
        receipt.settled().await.unwrap();
        for seen in [&mut first_seen, &mut second_seen] {
            assert_eq!(seen.next().await.attempt(), 1);
            assert_eq!(seen.next().await.attempt(), 2);
        }
        assert_eq!(third_seen.next().await.attempt(), 2);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: embedded/timeout: a handler that does not finish in time has failed, and is retried.
#[tokio::test]
async fn a_handler_that_takes_too_long_has_failed() {
    on_every_engine(|lab| async move {
        let bus = lab
            .open_with(lab.builder().timeout(Duration::from_millis(10)))
            .await;
        bus.subscribe("a")
            .handler(|m: Message| async move {
                if m.attempt() == 1 {
                    std::future::pending::<()>().await;
                }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        let state = wait_for_retry(&bus, receipt.seq(), "", 1).await;
        assert_eq!(state.failures[0].kind, FailureKind::Timeout);
        assert!(state.failures[0].error.contains("10ms"), "{state:?}");
        lab.clock.set(state.due_at.unwrap());
        assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: embedded/timeout-override: a subscription may have a timeout of its own.
#[tokio::test]
async fn the_timeout_of_a_subscription_wins_over_that_of_the_bus() {
    on_every_engine(|lab| async move {
        let bus = lab
            .open_with(lab.builder().timeout(Duration::from_millis(10)))
            .await;
        let gate = Arc::new(Semaphore::new(0));
        for (pattern, timeout) in [("impatient", None), ("patient", Some(PATIENCE))] {
            let gate = gate.clone();
            let mut subscribe = bus
                .subscribe(pattern)
                .group(pattern)
                .retry(RetryPolicy::never());
            if let Some(timeout) = timeout {
                subscribe = subscribe.timeout(timeout);
            }
            subscribe
                .handler(move || {
                    let gate = gate.clone();
                    async move {
                        gate.acquire().await?.forget();
                        everbus::handled()
                    }
                })
                .await
                .unwrap();
        }
        bus.start().await.unwrap();
        let patient = bus.publish(("patient", 1)).await.unwrap();
        let impatient = bus.publish(("impatient", 1)).await.unwrap();
        assert_eq!(impatient.settled().await.unwrap().dead_lettered.len(), 1);
        gate.add_permits(1);
        assert!(patient.settled().await.unwrap().dead_lettered.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: embedded/subscribe-timeout: without a setting a handler has 30 s.
// conformance: rule-8/timeout: without a setting a handler has 30 s.
#[tokio::test(start_paused = true)]
async fn a_handler_has_thirty_seconds_unless_told_otherwise() {
    // An engine without threads of its own: the time of tokio moves only while everything waits.
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open_impatient().await;
    bus.subscribe("a")
        .handler(std::future::pending::<()>)
        .await
        .unwrap();
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", 1)).await.unwrap();
    let letters = async || bus.dead_letters().get(receipt.id()).await.unwrap();
    eventually("the handler is cut off", || async {
        !letters().await.is_empty()
    })
    .await;
    let failure = &letters().await[0].failures[0];
    assert_eq!(failure.kind, FailureKind::Timeout);
    let took = failure.took.unwrap();
    assert!((30_000..30_010).contains(&took.as_millis()), "{took:?}");
    bus.shutdown().await.unwrap();
}

// conformance: rule-5/no-blocking: a failing event does not block others.
#[tokio::test]
async fn an_event_that_waits_for_a_retry_does_not_hold_back_others() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, _seen) = recorder(|m| match m.json::<i32>()? {
            0 => broken(m),
            _ => Ok(()),
        });
        bus.subscribe("a")
            .concurrency(1)
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let failing = bus.publish(("a", 0)).await.unwrap();
        wait_for_retry(&bus, failing.seq(), "", 1).await;
        for receipt in bus.publish_batch((1..200).map(|n| ("a", n))).await.unwrap() {
            assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
        }
        assert!(!is_done(&bus, failing.seq(), "").await);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: rule-2/independent-groups: a group that fails or hangs does not hold back another.
// conformance: embedded/non-goal-groups: a group that fails or hangs does not hold back another.
#[tokio::test]
async fn a_group_that_fails_or_hangs_does_not_hold_back_another() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (failing, _seen) = recorder(broken);
        bus.subscribe("a")
            .group("failing")
            .handler(failing)
            .await
            .unwrap();
        bus.subscribe("a")
            .group("hanging")
            .handler(std::future::pending::<()>)
            .await
            .unwrap();
        let (good, mut seen) = recorder(fine);
        bus.subscribe("a")
            .group("good")
            .handler(good)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipts = bus
            .publish_batch((0..3000).map(|n| ("a", n)))
            .await
            .unwrap();
        for _ in 0..3000 {
            assert_eq!(seen.next().await.group().as_str(), "good");
        }
        let last = receipts.last().unwrap().seq();
        eventually("the good group is done", || is_done(&bus, last, "good")).await;
        bus.shutdown_within(Duration::ZERO).await.unwrap();
    })
    .await;
}

// conformance: bus/prefetch: memory is bounded whatever the backlog; at most the prefetch is held.
#[tokio::test]
async fn no_more_than_the_prefetch_is_in_flight() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().prefetch(8)).await;
        let gate = Arc::new(Semaphore::new(0));
        let inside = gate.clone();
        let running = Arc::new(AtomicUsize::new(0));
        let count = running.clone();
        bus.subscribe("a")
            .concurrency(4)
            .handler(move || {
                let (gate, running) = (inside.clone(), count.clone());
                async move {
                    running.fetch_add(1, Ordering::SeqCst);
                    gate.acquire().await?.forget();
                    everbus::handled()
                }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipts = bus.publish_batch((0..100).map(|n| ("a", n))).await.unwrap();
        eventually("four handlers run", || async {
            running.load(Ordering::SeqCst) == 4
        })
        .await;
        let groups = bus.groups().await.unwrap();
        assert!(groups[0].in_flight <= 8, "{groups:?}");
        for done in 1..=96 {
            gate.add_permits(1);
            eventually("the next handler runs", || async {
                running.load(Ordering::SeqCst) == 4 + done
            })
            .await;
            let groups = bus.groups().await.unwrap();
            assert!(groups[0].in_flight <= 8, "{groups:?}");
        }
        gate.add_permits(4);
        for receipt in receipts {
            receipt.settled().await.unwrap();
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: bus/concurrency: no more handlers of a group run at once than its concurrency, and a slow one holds back nothing but itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_handler_holds_back_nothing_but_itself() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let gate = Arc::new(Semaphore::new(0));
        let inside = gate.clone();
        let running = Arc::new(AtomicUsize::new(0));
        bus.subscribe("a")
            .concurrency(2)
            .handler(move |m: Message| {
                let (gate, running) = (inside.clone(), running.clone());
                async move {
                    if running.fetch_add(1, Ordering::SeqCst) >= 2 {
                        return Err(HandlerError::permanent("more than two at once"));
                    }
                    if m.json::<i32>()? == 0 {
                        gate.acquire().await?.forget();
                    } else {
                        tokio::task::yield_now().await;
                    }
                    running.fetch_sub(1, Ordering::SeqCst);
                    Ok(())
                }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipts = bus.publish_batch((0..500).map(|n| ("a", n))).await.unwrap();
        for receipt in &receipts[1..] {
            assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
        }
        gate.add_permits(1);
        assert!(
            receipts[0]
                .settled()
                .await
                .unwrap()
                .dead_lettered
                .is_empty()
        );
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lowering_the_concurrency_of_a_running_group_takes_effect() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let running = Arc::new(AtomicUsize::new(0));
        let most = Arc::new(AtomicUsize::new(0));
        let (count, peak) = (running.clone(), most.clone());
        bus.subscribe("a")
            .handler(move || {
                let (running, most) = (count.clone(), peak.clone());
                async move {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    running.fetch_sub(1, Ordering::SeqCst);
                }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        for receipt in bus.publish_batch((0..100).map(|n| ("a", n))).await.unwrap() {
            receipt.settled().await.unwrap();
        }
        bus.subscribe("b")
            .concurrency(1)
            .handler(|| async {})
            .await
            .unwrap();
        most.store(0, Ordering::SeqCst);
        for receipt in bus.publish_batch((0..100).map(|n| ("a", n))).await.unwrap() {
            receipt.settled().await.unwrap();
        }
        assert_eq!(most.load(Ordering::SeqCst), 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: bus/ordered: in an ordered group, events with the same key are handled one after another, also over a retry.
#[tokio::test]
async fn in_an_ordered_group_a_failed_event_holds_back_its_key_only() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(|m| match (m.json::<i32>()?, m.attempt()) {
            (1, 1) => broken(m),
            _ => Ok(()),
        });
        bus.subscribe("a")
            .group("g")
            .ordered()
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let event = |key: &str, n: i32| everbus::Event::builder("a").key(key).json(&n);
        let first = bus.publish(event("k", 1)).await.unwrap();
        let state = wait_for_retry(&bus, first.seq(), "g", 1).await;
        let second = bus.publish(event("k", 2)).await.unwrap();
        bus.publish(event("other", 3))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
        assert_eq!(seen.next().await.json::<i32>().unwrap(), 1);
        assert_eq!(seen.next().await.json::<i32>().unwrap(), 3);
        lab.clock.set(state.due_at.unwrap());
        second.settled().await.unwrap();
        assert_eq!(seen.next().await.json::<i32>().unwrap(), 1);
        assert_eq!(seen.next().await.json::<i32>().unwrap(), 2);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: bus/start-from: the unnamed group sees everything from the start of the log, a named group starts where it says.
// conformance: omni/subscribe-start: startFrom is new, first, last or a time.
#[tokio::test]
async fn groups_begin_where_they_say() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let old = bus.publish_batch([("a", 1), ("a", 2)]).await.unwrap();
        lab.clock.advance(Duration::from_secs(60));
        let from = StartFrom::Time(everbus::Clock::now(&lab.clock));
        bus.publish(("a", 3)).await.unwrap();
        let (unnamed, mut in_unnamed) = recorder(fine);
        bus.subscribe("a").handler(unnamed).await.unwrap();
        let mut groups = Vec::new();
        for (name, start, first) in [
            ("new", None, 4),
            ("first", Some(StartFrom::First), 1),
            ("last", Some(StartFrom::Last), 3),
            ("time", Some(from), 3),
        ] {
            let (handler, seen) = recorder(fine);
            let mut subscribe = bus.subscribe("a").group(name).concurrency(1);
            if let Some(start) = start {
                subscribe = subscribe.start_from(start);
            }
            subscribe.handler(handler).await.unwrap();
            groups.push((name, seen, first));
        }
        bus.start().await.unwrap();
        bus.publish(("a", 4)).await.unwrap();
        assert_eq!(in_unnamed.next().await.id(), old[0].id());
        for (name, mut seen, first) in groups {
            assert_eq!(seen.next().await.json::<i32>().unwrap(), first, "{name}");
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}
