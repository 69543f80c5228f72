//! Runs that have a name go on where they were stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use everbus::{Bus, Clock, Code, Cursor, Json, Recorded, Router, Shard};
use tokio::sync::Notify;

use super::{Given, SECOND, each_second, of_type};
use crate::support::{on_every_durable_engine, on_every_engine, published};

async fn names(bus: &Bus) -> Vec<String> {
    let checkpoints = bus.engine().checkpoints().unwrap();
    let found = checkpoints.load("replay/".into()).await.unwrap();
    found.into_iter().map(|c| c.name).collect()
}

async fn publish(bus: &Bus, count: u32) {
    for n in 0..count {
        bus.publish(("a", n)).await.unwrap();
    }
}

/// A function that asks for the end of the run at some event.
fn until(
    given: &Given,
    last: u64,
    stop: &Arc<Notify>,
) -> impl Fn(Arc<Recorded>) -> std::future::Ready<Result<(), String>> + Send + Sync + 'static {
    let (take, stop) = (given.function(), stop.clone());
    move |record: Arc<Recorded>| {
        if record.position.place() == last {
            stop.notify_one();
        }
        take(record)
    }
}

// conformance: memory/replay-resume: a run that has a name goes on where it was stopped, with its counts, and forgets its checkpoint at the end.
#[tokio::test]
async fn a_run_goes_on_where_it_was_stopped() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        publish(&bus, 500).await;
        let stop = Arc::new(Notify::new());
        let first = Given::default();
        let signal = stop.clone();
        let wanted = |record: &Recorded| record.position.place().is_multiple_of(2);
        let run = bus.replay().name("monday").filter(wanted).rate(100_000);
        let report = run
            .stop_on(async move { signal.notified().await })
            .into_function({
                let handler = until(&first, 10, &stop);
                move |record| {
                    let done = handler(record);
                    // The one who stops the run needs a turn.
                    async move {
                        tokio::task::yield_now().await;
                        done.await
                    }
                }
            })
            .await
            .unwrap();
        assert!(!report.is_complete());
        let next = report.next.unwrap().place(Shard::ONLY);
        assert!((10..500).contains(&next), "{next}");
        assert_eq!(report.processed, next / 2);
        assert_eq!(report.skipped, next - report.processed);
        assert_eq!(names(&bus).await, ["replay/monday"]);

        // What comes later is not part of the run.
        publish(&bus, 5).await;
        let second = Given::default();
        let run = bus.replay().name("monday").filter(wanted);
        let report = run.into_function(second.function()).await.unwrap();
        assert!(report.is_complete());
        assert_eq!((report.processed, report.skipped), (250, 250));
        let mut all = first.positions();
        all.extend(second.positions());
        let expected: Vec<u64> = (1..=250).map(|n| n * 2).collect();
        assert_eq!(all, expected, "each once");
        assert!(names(&bus).await.is_empty());

        // Done is done: the next one of the name begins anew.
        let third = Given::default();
        let run = bus.replay().name("monday");
        let report = run.into_function(third.function()).await.unwrap();
        assert_eq!(report.processed, 505);
    })
    .await;
}

// conformance: memory/replay-resume-other: another selection or target under the name of a run that is under way is an error.
#[tokio::test]
async fn a_name_stands_for_one_selection() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        publish(&bus, 10).await;
        let stopped = || bus.replay().name("n").types("a").stop_on(async {});
        let given = Given::default();
        // Stopped at once, or after the first few.
        let report = stopped()
            .rate(1)
            .into_function(given.function())
            .await
            .unwrap();
        assert!(!report.is_complete());
        let others = [
            bus.replay().name("n"),
            bus.replay().name("n").types("b"),
            bus.replay().name("n").types("a").tenant("t"),
            bus.replay()
                .name("n")
                .types("a")
                .since(everbus::Clock::now(&lab.clock)),
        ];
        for other in others {
            let error = other.into_function(given.function()).await.unwrap_err();
            assert_eq!(error.code(), Code::InvalidSetting);
            assert!(error.to_string().contains("another selection"), "{error}");
        }
        let error = bus.replay().name("n").types("a").publish_copies().await;
        assert_eq!(error.unwrap_err().code(), Code::InvalidSetting);
        assert_eq!(published(&bus, "a").await.len(), 10);
        let same = bus
            .replay()
            .name("n")
            .types("a")
            .into_function(given.function());
        assert!(same.await.unwrap().is_complete());
        assert_eq!(given.positions(), (1..=10).collect::<Vec<u64>>());
    })
    .await;
}

// conformance: memory/replay-copies-once: copies of a run that goes on after a crash are not published twice.
// conformance: memory/replay-cancelled: a run that is dropped leaves its checkpoint and can be resumed, also by another process.
#[tokio::test]
async fn a_run_that_was_cut_off_publishes_nothing_twice() {
    on_every_durable_engine(|lab| async move {
        let bus = lab.open().await;
        publish(&bus, 100).await;
        let told = Arc::new(Notify::new());
        let tell = told.clone();
        let run = bus.replay().name("copies").rate(100);
        let run = run.progress(move |p| {
            if p.processed >= 3 {
                tell.notify_one();
            }
        });
        let run = tokio::spawn(run.publish_copies().into_future());
        told.notified().await;
        run.abort();
        assert!(run.await.unwrap_err().is_cancelled());
        bus.shutdown().await.unwrap();
        drop(bus);

        // As after a crash: the checkpoint is older than what was done.
        let bus = lab.open().await;
        let checkpoints = bus.engine().checkpoints().unwrap();
        let mut saved = checkpoints.load("replay/copies".into()).await.unwrap();
        let mut state = saved.remove(0).state;
        assert!(state["done"].as_u64().unwrap() >= 1, "{state}");
        state["done"] = 0.into();
        state["processed"] = 0.into();
        checkpoints
            .save("replay/copies".into(), state)
            .await
            .unwrap();
        let run = bus.replay().name("copies").publish_copies();
        let report = run.await.unwrap();
        assert_eq!(report.processed, 100);
        let all = published(&bus, "a").await;
        assert_eq!(all.len(), 200, "each copied once");
        assert!(names(&bus).await.is_empty());

        // A new run of the name copies anew.
        let run = bus.replay().name("copies").publish_copies();
        assert_eq!(run.await.unwrap().processed, 100);
        assert_eq!(published(&bus, "a").await.len(), 300);
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_fresh_group_goes_on_too() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        publish(&bus, 40).await;
        let handled = Arc::new(AtomicU64::new(0));
        let (stop, signal) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let router = |stops: bool| {
            let (handled, stop, signal) = (handled.clone(), stop.clone(), signal.clone());
            Router::new().on("a", move |Json(n): Json<u32>| {
                let (handled, stop, signal) = (handled.clone(), stop.clone(), signal.clone());
                async move {
                    if stops && n == 20 {
                        stop.notify_one();
                        signal.notified().await;
                    }
                    handled.fetch_add(1, Ordering::SeqCst);
                }
            })
        };
        let waited = stop.clone();
        let free = signal.clone();
        let run = bus.replay().name("slow").stop_on(async move {
            waited.notified().await;
            free.notify_one();
        });
        let routes = router(true).concurrency(1);
        let report = run.into_fresh_group(routes).await.unwrap();
        let first = handled.load(Ordering::SeqCst);
        if report.is_complete() {
            // It was done before it noticed.
            assert_eq!(first, 40);
            return;
        }
        assert_eq!(report.kept_group.unwrap().to_string(), "replay-slow");
        assert_eq!(names(&bus).await, ["replay/slow"]);
        let run = bus.replay().name("slow");
        let report = run.into_fresh_group(router(false)).await.unwrap();
        assert!(report.is_complete());
        assert_eq!(report.processed, 40);
        assert_eq!(handled.load(Ordering::SeqCst), 40, "each once");
        assert!(bus.groups().await.unwrap().is_empty());
        assert!(names(&bus).await.is_empty());
    })
    .await;
}

// conformance: memory/replay-list: replays that are not complete are listed with what, where to and how far, as idle after an hour, and can be forgotten.
#[tokio::test]
async fn a_run_that_is_not_complete_is_listed_until_it_is_forgotten() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let receipts = each_second(&lab, &bus, (0..3).map(|_| of_type("order.placed"))).await;
        let began = lab.clock.now();
        let given = Given::default();
        let run = || bus.replay().types("order.*").name("monday");
        // So slowly that it is stopped before its second event, however that goes.
        let stopped = run().rate(0.01).stop_on(std::future::ready(()));
        assert!(!stopped.publish_copies().await.unwrap().is_complete());
        let runs = bus.replays().await.unwrap();
        assert_eq!(runs.len(), 1, "{runs:?}");
        let listed = &runs[0];
        assert_eq!(
            (listed.name.as_str(), listed.target.as_str()),
            ("monday", "copies")
        );
        assert_eq!(listed.selection, serde_json::json!({ "types": "order.*" }));
        assert_eq!((listed.started_at, listed.saved_at), (began, began));
        assert_eq!(listed.from, Cursor::START);
        assert_eq!(listed.upto, receipts[2].position().into());
        assert!(!listed.position.reaches(&listed.upto) && listed.processed <= 1);
        assert!(!listed.idle);
        lab.clock.advance(2 * 3600 * SECOND);
        assert!(bus.replays().await.unwrap()[0].idle);

        // Its name is taken, until it is forgotten.
        assert!(run().into_function(given.function()).await.is_err());
        assert!(bus.forget_replay("monday").await.unwrap());
        assert!(!bus.forget_replay("monday").await.unwrap());
        assert!(bus.replays().await.unwrap().is_empty());
        assert!(
            run()
                .into_function(given.function())
                .await
                .unwrap()
                .is_complete()
        );
        assert!(bus.replays().await.unwrap().is_empty(), "it is complete");
    })
    .await;
}
