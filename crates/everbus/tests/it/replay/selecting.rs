//! Which events are replayed, and what a function may do with them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use everbus::{Code, Event, EventId, Position, Recorded};
use tokio::sync::Barrier;

use super::{Given, SECOND, each_second, micros_after, of_type};
use crate::support::{Kind, Lab, on_every_engine};

// conformance: omni/replay-range: replay takes startTime and an optional endTime; both are inclusive.
// conformance: memory/replay-time: by time range, by the time of receipt, both bounds inclusive.
// conformance: memory/replay-closure: into a function, in the order of the log.
#[tokio::test]
async fn a_range_has_both_its_ends() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        // What the sender says about the time does not matter.
        let events = (0..5).map(|n| {
            let at = everbus::Timestamp::from_micros(5_000_000 - n);
            of_type("a").occurred_at(at)
        });
        let receipts = each_second(&lab, &bus, events).await;
        let at = |n: usize| receipts[n].received_at();
        let seq = |n: usize| receipts[n].seq();
        let some = |since, until| {
            let (given, bus) = (Given::default(), bus.clone());
            async move {
                let mut replay = bus.replay();
                if let Some(since) = since {
                    replay = replay.since(since);
                }
                if let Some(until) = until {
                    replay = replay.until(until);
                }
                let report = replay.into_function(given.function()).await.unwrap();
                assert_eq!(report.processed, given.positions().len() as u64);
                assert!(report.is_complete());
                given.positions()
            }
        };
        assert_eq!(
            some(Some(at(1)), Some(at(3))).await,
            [seq(1), seq(2), seq(3)]
        );
        let (later, earlier) = (micros_after(at(1), 1), micros_after(at(3), -1));
        assert_eq!(some(Some(later), Some(earlier)).await, [seq(2)]);
        assert_eq!(some(Some(at(3)), None).await, [seq(3), seq(4)]);
        assert_eq!(some(None, Some(at(0))).await, [seq(0)]);
        assert_eq!(some(Some(at(2)), Some(at(2))).await, [seq(2)]);
        assert_eq!(some(None, None).await.len(), 5);
        assert_eq!(
            some(Some(everbus::Clock::now(&lab.clock)), None).await,
            Vec::<u64>::new()
        );
        let before = micros_after(at(0), -1);
        assert_eq!(some(None, Some(before)).await, Vec::<u64>::new());
    })
    .await;
}

// conformance: omni/replay-stream: replay takes a stream.
// conformance: memory/replay-select: by stream, pattern, tenant, app and entity.
#[tokio::test]
async fn a_selection_is_what_all_its_words_say() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let events = [
            of_type("orders.order.placed").tenant("acme").app("shop"),
            of_type("orders.order.placed")
                .tenant("acme")
                .entity("ORDER", "1"),
            of_type("orders.order.shipped").tenant("other").app("shop"),
            of_type("users.user.created").tenant("acme"),
            of_type("orders.order-placed"),
        ];
        each_second(&lab, &bus, events).await;
        // Only the bus itself publishes these.
        let note = of_type("system.note").build().unwrap();
        bus.engine().broker.append(vec![note]).await.unwrap();
        let last = [of_type("TelemetryWindowClosed").app("shop")];
        each_second(&lab, &bus, last).await;
        let took = |replay: everbus::Replay| async move {
            let given = Given::default();
            replay.into_function(given.function()).await.unwrap();
            given.positions()
        };
        let replay = || bus.replay();
        assert_eq!(took(replay()).await, [1, 2, 3, 4, 5, 7], "not the system's");
        assert_eq!(
            took(replay().stream("orders:order-placed")).await,
            [1, 2, 5]
        );
        assert_eq!(
            took(replay().stream("orders.order.placed")).await,
            [1, 2, 5]
        );
        assert_eq!(took(replay().stream("orders")).await, [1, 2, 3, 5]);
        assert_eq!(took(replay().stream("ORDERS")).await, [1, 2, 3, 5]);
        assert_eq!(took(replay().stream("system")).await, [6]);
        assert_eq!(took(replay().types("system.*")).await, [6]);
        assert_eq!(took(replay().types("*.*.created")).await, [4]);
        let both = replay().stream("orders").types("*.*.shipped");
        assert_eq!(took(both).await, [3]);
        assert_eq!(took(replay().tenant("acme")).await, [1, 2, 4]);
        assert_eq!(took(replay().app("shop")).await, [1, 3, 7]);
        assert_eq!(took(replay().tenant("acme").app("shop")).await, [1]);
        assert_eq!(took(replay().entity("ORDER", "1")).await, [2]);
        assert_eq!(took(replay().entity("ORDER", "2")).await, Vec::<u64>::new());
        let all = replay().tenant("acme").stream("orders").types("orders.>");
        assert_eq!(took(all).await, [1, 2]);
    })
    .await;
}

// conformance: omni/replay-filter: what the filter says no to is counted as skipped and not handled.
// conformance: omni/replay-result: the result is processed, skipped and errors.
// conformance: omni/replay-errors: an error of the handler is counted and does not stop the replay.
// conformance: omni/replay-handler: the handler gets the events one after another.
// conformance: memory/replay-report: it returns how many were processed, skipped and failed.
#[tokio::test]
async fn errors_and_panics_are_counted_and_stop_nothing() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        for n in 0..20 {
            bus.publish(("a", n)).await.unwrap();
        }
        let number = |record: &Recorded| record.event.json::<u64>().unwrap();
        let report = bus
            .replay()
            .filter(move |record| number(record).is_multiple_of(2))
            .keep_failures(2)
            .into_function(move |record: Arc<Recorded>| async move {
                match number(&record) {
                    4 => panic!("no four"),
                    n if n > 13 => Err(format!("{n} is too much")),
                    _ => Ok(()),
                }
            })
            .await
            .unwrap();
        assert_eq!(
            (report.processed, report.skipped, report.errors),
            (6, 10, 4)
        );
        assert_eq!(report.skips.filtered, 10);
        let texts: Vec<&str> = report.failures.iter().map(|f| f.error.as_str()).collect();
        assert_eq!(texts, ["panicked: no four", "14 is too much"]);
        assert_eq!(report.failures[0].position, Position::seq(5));
        assert_eq!(report.next, None);
    })
    .await;
}

#[tokio::test]
async fn so_many_calls_run_at_once_and_no_more() {
    let bus = Lab::new(Kind::Memory).open().await;
    for n in 0..400 {
        bus.publish(("a", n)).await.unwrap();
    }
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let highest = most.clone();
    let meet = Arc::new(Barrier::new(4));
    let report = bus
        .replay()
        .concurrency(4)
        .into_function(move |record: Arc<Recorded>| {
            let (running, most, meet) = (running.clone(), most.clone(), meet.clone());
            async move {
                let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                most.fetch_max(now, Ordering::SeqCst);
                // The portions grow: 1, 2, 4, …; once they hold four, four can meet.
                if (10..=13).contains(&record.position.place()) {
                    meet.wait().await;
                }
                tokio::task::yield_now().await;
                running.fetch_sub(1, Ordering::SeqCst);
                if record.position == Position::seq(100) {
                    return Err("one fails");
                }
                Ok(())
            }
        })
        .await
        .unwrap();
    assert_eq!((report.processed, report.errors), (399, 1));
    assert_eq!(highest.load(Ordering::SeqCst), 4);
}

// conformance: memory/replay-rate: a rate limits the events per second.
#[tokio::test(start_paused = true)]
async fn a_rate_spreads_the_events_over_time() {
    let bus = Lab::new(Kind::Memory).open().await;
    for n in 0..60 {
        bus.publish(("a", n)).await.unwrap();
    }
    let began = tokio::time::Instant::now();
    let given = Given::default();
    let report = bus
        .replay()
        .rate(20)
        .into_function(given.function())
        .await
        .unwrap();
    assert_eq!(report.processed, 60);
    let took = began.elapsed();
    // The first go at once, and then two every tenth of a second.
    assert!(took >= 2 * SECOND && took <= 3 * SECOND, "{took:?}");
}

// conformance: memory/replay-bad-input: a range that ends before it starts, a bad pattern, a rate of nothing, both an event and a range: clear errors, and nothing happens.
#[tokio::test]
async fn what_makes_no_sense_is_refused() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let receipt = bus.publish(("a", 1)).await.unwrap();
        let at = receipt.received_at();
        let refused = async |replay: everbus::Replay| {
            let given = Given::default();
            let error = replay.into_function(given.function()).await.unwrap_err();
            assert!(given.positions().is_empty());
            assert!(error.hint_text().is_some(), "{error}");
            error.code()
        };
        let replay = || bus.replay();
        let backwards = replay().since(micros_after(at, 1)).until(at);
        assert_eq!(refused(backwards).await, Code::InvalidSetting);
        assert_eq!(refused(replay().types("")).await, Code::InvalidPattern);
        assert_eq!(refused(replay().types("a.>.b")).await, Code::InvalidPattern);
        assert_eq!(refused(replay().stream("")).await, Code::InvalidPattern);
        assert_eq!(refused(replay().rate(0)).await, Code::InvalidSetting);
        assert_eq!(refused(replay().concurrency(0)).await, Code::InvalidSetting);
        assert_eq!(refused(replay().name("")).await, Code::InvalidSetting);
        assert_eq!(refused(replay().name("a\nb")).await, Code::InvalidSetting);
        let long = "x".repeat(101);
        assert_eq!(refused(replay().name(long)).await, Code::InvalidSetting);
        let both = replay().event(receipt.id()).since(at);
        assert_eq!(refused(both).await, Code::InvalidSetting);
        let missing = replay().event(EventId::new());
        assert_eq!(refused(missing).await, Code::NotFound);
        let group = bus.replay().into_group("a\u{7}b").await.unwrap_err();
        assert_eq!(group.code(), Code::InvalidSetting);
        let empty = everbus::Router::new();
        let empty = bus.replay().into_fresh_group(empty).await.unwrap_err();
        assert_eq!(empty.code(), Code::InvalidSetting);
    })
    .await;
}

#[tokio::test]
async fn more_events_than_a_batch_come_once_each_and_in_order() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        for _ in 0..10 {
            let batch = (0..1000).map(|n| Event::builder("a").json(&n));
            bus.publish_batch(batch).await.unwrap();
        }
        let given = Given::default();
        let told = Given::default();
        let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
        let progress = seen.clone();
        let report = bus
            .replay()
            .progress(move |p| progress.lock().unwrap().push(*p))
            .into_function(given.function())
            .await
            .unwrap();
        assert_eq!(report.processed, 10_000);
        assert_eq!(given.positions(), (1..=10_000).collect::<Vec<u64>>());
        let seen = seen.lock().unwrap();
        assert!(seen.windows(2).all(|w| w[0].position < w[1].position));
        let last = seen.last().unwrap();
        assert_eq!((last.from, last.position, last.upto), (0, 10_000, 10_000));
        assert_eq!(last.processed, 10_000);
        drop(told);
    })
    .await;
}
