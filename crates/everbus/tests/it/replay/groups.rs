//! Replay into groups: one that is there, and one of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use everbus::testing::TestBus;
use everbus::{
    Bus, Code, EventId, GroupInfo, HandlerError, Json, Message, RetryPolicy, Router, to,
};

use super::{Given, SECOND, each_second, of_type};
use crate::support::{counted, eventually, fine, handled, on_every_engine, published, recorder};

async fn info(bus: &Bus, group: &str) -> Option<GroupInfo> {
    let groups = bus.groups().await.unwrap();
    groups
        .into_iter()
        .find(|info| info.name.to_string() == group)
}

// conformance: memory/replay-group: into a given group, which handles the events again; other groups do not notice and its position does not move.
// conformance: memory/replay-group-stale: replays into a group are exempt from staleness.
#[tokio::test]
async fn a_group_handles_events_again_and_stays_where_it_is() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (billing, mut billed) = recorder(fine);
        let (mail, mut mailed) = recorder(fine);
        let subscribe = bus.subscribe("order.*").group("billing");
        subscribe
            .max_staleness(60 * SECOND)
            .handler(billing)
            .await
            .unwrap();
        bus.subscribe("*")
            .group("mail")
            .handler(mail)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let events = ["order.placed", "user.created", "order.shipped"].map(of_type);
        for original in each_second(&lab, &bus, events).await {
            original.settled().await.unwrap();
        }
        let first = [billed.next().await, billed.next().await];
        for _ in 0..3 {
            mailed.next().await;
        }
        lab.clock.advance(3600 * SECOND);
        let before = info(&bus, "billing").await.unwrap().position;
        let report = bus.replay().into_group("billing").await.unwrap();
        assert_eq!((report.processed, report.skipped, report.errors), (2, 1, 0));
        assert_eq!(report.skips.unwanted, 1);
        for before in &first {
            let again = billed.next().await;
            assert_eq!(again.event().id(), before.event().id());
            assert_eq!(again.attempt(), 1);
        }
        eventually("everything is settled", || async {
            let info = info(&bus, "billing").await.unwrap();
            info.waiting + info.in_flight == 0
        })
        .await;
        assert_eq!(info(&bus, "billing").await.unwrap().position, before);
        assert!(mailed.is_empty(), "nobody else noticed");
        assert_eq!(published(&bus, "*").await.len(), 3, "nothing was published");

        let error = bus.replay().into_group("biling").await.unwrap_err();
        assert_eq!(error.code(), Code::GroupNotFound);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/replay-owed: what the group still owes, and what its inbox absorbs, is counted as skipped.
#[tokio::test]
async fn what_is_owed_or_absorbed_is_skipped() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(fine);
        let subscribe = bus.subscribe("a").group("g").idempotent();
        let id = subscribe.handler(handler).await.unwrap();
        bus.start().await.unwrap();
        for n in 0..3 {
            handled(&bus, ("a", n)).await;
            seen.next().await;
        }
        let report = bus.replay().into_group("g").await.unwrap();
        assert_eq!((report.processed, report.skipped), (0, 3));
        assert_eq!(report.skips.absorbed, 3);
        eventually("the inbox has absorbed them", || async {
            let info = info(&bus, "g").await.unwrap();
            info.waiting + info.in_flight == 0
        })
        .await;
        assert!(seen.is_empty());
        assert_eq!(
            counted(&bus).await.groups[&"g".parse().unwrap()].inbox_hits,
            3
        );

        // Without a handler, a replay waits; asked for again, it is owed.
        bus.unsubscribe(id).await.unwrap();
        let (handler, _seen) = recorder(fine);
        bus.subscribe("b")
            .group("g")
            .handler(handler)
            .await
            .unwrap();
        bus.publish(("b", 1))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
        let b = bus.replay().types("b");
        let report = b.into_group("g").await.unwrap();
        assert_eq!((report.processed, report.skips.owed), (1, 0));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/replay-fresh: into a fresh isolated group with handlers of its own, through the pipeline with its retries; it gets no live events and is removed when everything is settled.
#[tokio::test]
async fn handlers_of_its_own_see_the_past_and_nothing_else() {
    on_every_engine(|lab| async move {
        // Time passes by itself here, and the retry comes soon.
        let retry = RetryPolicy::default().base_delay(SECOND / 1000);
        let bus = lab.open_with(Bus::builder().retry(retry)).await;
        let (live, mut lived) = recorder(fine);
        bus.subscribe("*")
            .group("live")
            .handler(live)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let long_ago = everbus::Timestamp::EPOCH;
        let events = (0..5).map(|_| of_type("order.placed").occurred_at(long_ago));
        for receipt in each_second(&lab, &bus, events).await {
            receipt.settled().await.unwrap();
            lived.next().await;
        }
        handled(&bus, ("user.created", 1)).await;
        lived.next().await;

        let (runs, failed) = (
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (counted, once, publisher) = (runs.clone(), failed.clone(), bus.clone());
        let router = Router::new().group("elsewhere").on(
            "order.*",
            to(move |m: Message| {
                let (counted, once, bus) = (counted.clone(), once.clone(), publisher.clone());
                async move {
                    assert!(
                        m.group().to_string().starts_with("replay-"),
                        "{}",
                        m.group()
                    );
                    // A live event, in the middle of it.
                    bus.publish(("order.placed", 2)).await?;
                    if !once.swap(true, Ordering::SeqCst) {
                        return Err(HandlerError::new("the first time fails"));
                    }
                    counted.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                }
            })
            .max_staleness(SECOND / 2),
        );
        let report = bus.replay().into_fresh_group(router).await.unwrap();
        assert_eq!((report.processed, report.skipped, report.errors), (5, 1, 0));
        assert_eq!(report.skips.unwanted, 1);
        assert_eq!((report.next, &report.kept_group), (None, &None));
        assert_eq!(runs.load(Ordering::SeqCst), 5);
        let groups = bus.groups().await.unwrap();
        assert_eq!(groups.len(), 1, "only the live group is left: {groups:?}");
        for _ in 0..6 {
            // Those that were published meanwhile, and nothing of the replay.
            assert_eq!(lived.next().await.json::<u32>().unwrap(), 2);
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/replay-fresh-dead: dead letters of a fresh group are kept, and the report names them and the group.
#[tokio::test]
async fn dead_letters_of_a_fresh_group_are_kept() {
    on_every_engine(|lab| async move {
        // Not started: the replay runs its handlers all the same.
        let bus = lab.open_impatient().await;
        for n in 0..4 {
            bus.publish(("a", n)).await.unwrap();
        }
        let picky = |Json(n): Json<u32>| async move {
            if n == 2 {
                return Err(HandlerError::permanent("two is one too many"));
            }
            Ok(())
        };
        let router = || Router::new().on("a", picky);
        let replay = || bus.replay().name("rebuild");
        let report = replay().into_fresh_group(router()).await.unwrap();
        assert_eq!((report.processed, report.skipped, report.errors), (3, 0, 1));
        assert!(report.is_complete());
        let group = report.kept_group.unwrap();
        assert_eq!(group.to_string(), "replay-rebuild");
        assert!(
            report.failures[0].error.contains("two is one"),
            "{:?}",
            report.failures
        );
        let letters = bus.dead_letters().list().await.unwrap();
        assert_eq!(letters.len(), 1);
        assert_eq!(letters[0].group, group);
        assert_eq!(report.failures[0].id, letters[0].record.event.id());

        // A second run of the name would mix with it.
        let error = replay().into_fresh_group(router()).await.unwrap_err();
        assert_eq!(error.code(), Code::GroupConflict);
        bus.remove_group(group).await.unwrap();
        let report = replay().into_fresh_group(router()).await.unwrap();
        assert_eq!((report.processed, report.errors), (3, 1));
    })
    .await;
}

// conformance: memory/replay-fresh-dropped: a replay that is dropped leaves no handlers and no group behind.
#[tokio::test]
async fn a_dropped_replay_takes_its_group_along() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.publish(("a", 1)).await.unwrap();
        let (entered, mut inside) = tokio::sync::mpsc::unbounded_channel();
        let router = Router::new().on("a", move |_: Message| {
            let entered = entered.clone();
            async move {
                entered.send(()).unwrap();
                std::future::pending::<()>().await;
                Ok::<(), HandlerError>(())
            }
        });
        let router = router.timeout(SECOND / 10);
        let run = tokio::spawn(bus.replay().into_fresh_group(router).into_future());
        inside.recv().await.unwrap();
        assert_eq!(bus.groups().await.unwrap().len(), 1);
        run.abort();
        eventually("the group is gone", || async {
            bus.groups().await.unwrap().is_empty()
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn a_test_bus_replays_too() {
    let router = Router::new().on("a", to(|Json(_): Json<u32>| async {}).group("g"));
    let bus = TestBus::new(router).await.unwrap();
    bus.publish(("a", 1)).await.unwrap().assert_handled();
    let report = bus.bus().replay().into_group("g").await.unwrap();
    assert_eq!(report.processed, 1);
    let given = Given::default();
    let report = bus
        .bus()
        .replay()
        .into_function(given.function())
        .await
        .unwrap();
    assert_eq!(report.processed, 1);
    assert!(bus.bus().replay_event(EventId::new()).await.is_err());
}
