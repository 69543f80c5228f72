//! Subscribing and unsubscribing: patterns, names, conflicts, bad settings.

use std::sync::Arc;
use std::time::Duration;

use everbus::{Bus, Code, EventId, HandlerResult, Message, RetryPolicy, StartFrom, Timestamp};
use tokio::sync::{Notify, Semaphore};

use crate::support::{
    eventually, fine, is_done, on_every_durable_engine, on_every_engine, recorder,
};

async fn ok(_: Message) -> HandlerResult {
    Ok(())
}

// conformance: embedded/subscribe-filter: subscribe() registers a handler for the types its pattern matches and returns a subscription id.
// conformance: omni/subscribe-pattern: subscribe() registers a handler for the types its pattern matches and returns a subscription id.
#[tokio::test]
async fn a_handler_gets_what_its_pattern_matches_and_nothing_else() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let types = [
            "user.created",
            "user.updated",
            "order.created",
            "order.1.shipped",
            "order.shipped",
        ];
        let mut subscribed = Vec::new();
        for (pattern, expected) in [
            ("user.created", &types[0..1]),
            ("user.*", &types[0..2]),
            ("*", &types[..]),
            ("order.*.shipped", &types[3..4]),
        ] {
            let (handler, seen) = recorder(fine);
            let id = bus.subscribe(pattern).handler(handler).await.unwrap();
            subscribed.push((id, seen, expected));
        }
        let mut ids: Vec<_> = subscribed.iter().map(|(id, ..)| *id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 4, "ids differ");
        bus.start().await.unwrap();
        for name in types {
            bus.publish((name, 1))
                .await
                .unwrap()
                .settled()
                .await
                .unwrap();
        }
        for (_, mut seen, expected) in subscribed {
            for name in expected {
                assert_eq!(seen.next().await.event_type(), *name);
            }
            assert!(seen.is_empty());
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

/// Unlike `unsubscribe`, which gives up what comes after it.
#[tokio::test]
async fn events_wait_for_a_handler_that_was_detached() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let subscribe = async || {
            let (handler, seen) = recorder(fine);
            let subscribing = bus.subscribe("a").group("g").name("h").handler(handler);
            (subscribing.await.unwrap(), seen)
        };
        let (id, mut seen) = subscribe().await;
        bus.start().await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        seen.next().await;
        bus.detach(id).await.unwrap();
        let waits = bus.publish(("a", 2)).await.unwrap();
        let error = bus.detach(id).await.unwrap_err();
        assert_eq!(error.code(), Code::SubscriptionNotFound);
        let (again, mut seen) = subscribe().await;
        assert_eq!(again, id);
        waits.settled().await.unwrap();
        assert_eq!(seen.next().await.json::<u32>().unwrap(), 2);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: embedded/unsubscribe: unsubscribe() removes the handler by its subscription id.
// conformance: omni/subscribe-handle: unsubscribe() removes the handler by its subscription id.
#[tokio::test]
async fn an_unsubscribed_handler_is_not_called_any_more() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (first, mut first_seen) = recorder(fine);
        let (second, mut second_seen) = recorder(fine);
        let id = bus.subscribe("a").handler(first).await.unwrap();
        bus.subscribe("*").handler(second).await.unwrap();
        bus.start().await.unwrap();
        bus.publish(("a", 1))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
        first_seen.next().await;
        bus.unsubscribe(id).await.unwrap();
        bus.publish(("a", 2))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
        assert!(first_seen.is_empty());
        second_seen.next().await;
        second_seen.next().await;
        let error = bus.unsubscribe(id).await.unwrap_err();
        assert_eq!(error.code(), Code::SubscriptionNotFound);
        let error = bus.unsubscribe(EventId::new().into()).await.unwrap_err();
        assert_eq!(error.code(), Code::SubscriptionNotFound);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: bus/unsubscribe-mid-flight: a handler run that has begun finishes although its subscription is removed; what was queued behind it is given back.
#[tokio::test]
async fn unsubscribing_lets_a_running_handler_finish_and_starts_no_other() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (begun, gate) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
        let (begin, inside) = (begun.clone(), gate.clone());
        let (note, mut seen) = recorder(fine);
        let note = Arc::new(note);
        let id = bus
            .subscribe("a")
            .concurrency(1)
            .handler(move |m: Message| {
                let (begun, gate, note) = (begin.clone(), inside.clone(), note.clone());
                async move {
                    begun.notify_one();
                    gate.acquire().await?.forget();
                    note(m).await
                }
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let first = bus.publish(("a", 1)).await.unwrap();
        begun.notified().await;
        let queued = bus.publish_batch((2..10).map(|n| ("a", n))).await.unwrap();
        bus.unsubscribe(id).await.unwrap();
        gate.add_permits(100);
        eventually("the running handler finished", || {
            is_done(&bus, first.seq(), "")
        })
        .await;
        assert_eq!(seen.next().await.id(), first.id());
        // A new handler of the group gets the rest, as first attempts.
        let (handler, mut rest) = recorder(fine);
        bus.subscribe("a").handler(handler).await.unwrap();
        for _ in &queued {
            assert_eq!(rest.next().await.attempt(), 1);
        }
        assert!(seen.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn handlers_run_only_after_start_and_may_be_added_later() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (early, mut early_seen) = recorder(fine);
        bus.subscribe("a").handler(early).await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        assert!(!is_done(&bus, receipt.seq(), "").await);
        assert!(early_seen.is_empty());
        bus.start().await.unwrap();
        bus.start().await.unwrap();
        early_seen.next().await;
        receipt.settled().await.unwrap();

        let (late, mut late_seen) = recorder(fine);
        bus.subscribe("b").handler(late).await.unwrap();
        let (other, mut other_seen) = recorder(fine);
        bus.subscribe("b")
            .group("other")
            .handler(other)
            .await
            .unwrap();
        bus.publish(("b", 2))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
        late_seen.next().await;
        other_seen.next().await;
        assert!(early_seen.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn conflicting_settings_within_a_group_name_both_sides() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let base = || bus.subscribe("a").group("g");
        base()
            .name("one")
            .start_from(StartFrom::Last)
            .concurrency(4)
            .handler(ok)
            .await
            .unwrap();
        let conflicts = [
            base()
                .name("two")
                .start_from(StartFrom::First)
                .handler(ok)
                .await,
            base().name("two").concurrency(5).handler(ok).await,
            base().name("two").ordered().handler(ok).await,
        ];
        for conflict in conflicts {
            let error = conflict.unwrap_err();
            assert_eq!(error.code(), Code::GroupConflict);
            let text = error.message();
            assert!(
                text.contains("\"one\"") && text.contains("\"two\""),
                "{text}"
            );
            assert!(error.hint_text().is_some());
        }
        let error = base().name("one").handler(ok).await.unwrap_err();
        assert_eq!(error.code(), Code::GroupConflict);
        // Saying the same, or nothing, is no conflict.
        base()
            .name("two")
            .start_from(StartFrom::Last)
            .concurrency(4)
            .handler(ok)
            .await
            .unwrap();
        base().handler(ok).await.unwrap();
        base().handler(ok).await.unwrap();
    })
    .await;
}

// conformance: bus/bad-settings: absurd durations and settings give a specific error with a hint.
#[tokio::test]
async fn settings_that_make_no_sense_are_refused_with_a_hint() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let sub = || bus.subscribe("a");
        let year = Duration::from_secs(3600 * 24 * 400);
        let refused = [
            (
                sub().timeout(Duration::ZERO).handler(ok).await,
                Code::InvalidSetting,
            ),
            (sub().timeout(year).handler(ok).await, Code::InvalidSetting),
            (sub().concurrency(0).handler(ok).await, Code::InvalidSetting),
            (
                sub().concurrency(65_537).handler(ok).await,
                Code::InvalidSetting,
            ),
            (sub().group("").handler(ok).await, Code::InvalidSetting),
            (sub().name("").handler(ok).await, Code::InvalidSetting),
            (
                sub().start_from(StartFrom::New).handler(ok).await,
                Code::InvalidSetting,
            ),
            (
                sub()
                    .start_from(StartFrom::Time(Timestamp::EPOCH))
                    .handler(ok)
                    .await,
                Code::InvalidSetting,
            ),
            (
                sub()
                    .retry(RetryPolicy::default().multiplier(0.1))
                    .handler(ok)
                    .await,
                Code::InvalidSetting,
            ),
            (bus.subscribe("").handler(ok).await, Code::InvalidPattern),
            (bus.subscribe("a*").handler(ok).await, Code::InvalidPattern),
        ];
        for (answer, code) in refused {
            let error = answer.unwrap_err();
            assert_eq!(error.code(), code, "{error}");
            assert!(error.hint_text().is_some(), "{error}");
        }
        assert!(bus.groups().await.unwrap().is_empty());
        sub()
            .start_from(StartFrom::First)
            .handler(ok)
            .await
            .unwrap();
    })
    .await;
    for builder in [
        Bus::builder().timeout(Duration::ZERO),
        Bus::builder().shutdown_timeout(Duration::MAX),
        Bus::builder().max_payload(0),
        Bus::builder().prefetch(0),
        Bus::builder().no_handler_after(Duration::ZERO),
        Bus::builder().retry(RetryPolicy::default().max_delay(Duration::MAX)),
    ] {
        let error = builder.open("memory:").await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting);
    }
}

// conformance: embedded/subscription-row: a subscription is stored without its handler and is the same one after a restart.
#[tokio::test]
async fn a_subscription_keeps_its_id_over_a_restart() {
    on_every_durable_engine(|lab| async move {
        let bus = lab.open().await;
        let before = bus.subscribe("a").handler(ok).await.unwrap();
        let second = bus.subscribe("a").handler(ok).await.unwrap();
        bus.shutdown().await.unwrap();
        let bus = lab.open().await;
        assert_eq!(bus.subscribe("a").handler(ok).await.unwrap(), before);
        assert_eq!(bus.subscribe("a").handler(ok).await.unwrap(), second);
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_group_can_be_removed_once_it_has_no_handlers_here() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.start().await.unwrap();
        let id = bus.subscribe("a").group("g").handler(ok).await.unwrap();
        let name = || "g".parse().unwrap();
        let error = bus.remove_group(name()).await.unwrap_err();
        assert_eq!(error.code(), Code::GroupConflict);
        bus.unsubscribe(id).await.unwrap();
        bus.remove_group(name()).await.unwrap();
        assert!(bus.groups().await.unwrap().is_empty());
        // It may be founded again.
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("a")
            .group("g")
            .handler(handler)
            .await
            .unwrap();
        bus.publish(("a", 1)).await.unwrap();
        seen.next().await;
        bus.shutdown().await.unwrap();
    })
    .await;
}
