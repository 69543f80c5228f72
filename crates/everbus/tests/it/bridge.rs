//! A bridge between two buses: what arrives, what is refused, and what happens when an end is away.

use std::sync::Arc;
use std::time::Duration;

use everbus::bridge::{BRIDGE, Bridge, BridgeStats};
use everbus::{
    Bus, Clock as _, Code, DeadLetter, Event, GroupInfo, GroupName, Lag, Pattern, Recorded,
};

use crate::faulty::faulty;
use crate::support::{Kind, Lab, eventually, on_every_engine, published};

/// A bus in memory on the clock of the system.
async fn memory() -> Bus {
    Bus::open("memory:").await.unwrap()
}

async fn caught_up(from: &Bus, to: &Bus) -> BridgeStats {
    Bridge::new(from, to).run_until_caught_up().await.unwrap()
}

fn event(n: u64) -> Event {
    let builder = Event::builder("order.placed").json(&n);
    builder.key(format!("k{}", n % 3)).build().unwrap()
}

async fn publish(bus: &Bus, numbers: std::ops::Range<u64>) {
    bus.publish_batch(numbers.map(event)).await.unwrap();
}

fn numbers(records: &[Arc<Recorded>]) -> Vec<u64> {
    let numbers = records.iter().map(|record| record.event.json());
    numbers.collect::<Result<_, _>>().unwrap()
}

async fn lag(bus: &Bus, group: &str) -> Lag {
    let groups = bus.groups().await.unwrap();
    let group = groups.iter().find(|g| g.name.as_str() == group);
    group.map(GroupInfo::lag).unwrap()
}

async fn letters(bus: &Bus) -> Vec<DeadLetter> {
    bus.dead_letters().list().await.unwrap()
}

fn group(name: &str) -> GroupName {
    GroupName::new(name).unwrap()
}

// conformance: engines/bridge-whole: a bridge carries every event once, in the order of each key, with its id, its times and its attributes
#[tokio::test]
async fn everything_arrives_once_and_in_order() {
    on_every_engine(|lab| async move {
        let (from, to) = (lab.open().await, memory().await);
        publish(&from, 0..700).await;
        let rich = Event::builder("order.placed")
            .json(&700)
            .tenant("acme")
            .app("shop")
            .entity("ORDER", "7")
            .key("k1")
            .version(3)
            .correlation_id("c-1")
            .source("checkout")
            .meta("channel", "web")
            .build()
            .unwrap();
        from.publish(rich).await.unwrap();
        let stats = caught_up(&from, &to).await;
        assert_eq!((stats.moved, stats.duplicates), (701, 0), "{stats:?}");
        assert_eq!((stats.refused, stats.lag), (0, Some(0)), "{stats:?}");
        let (sent, got) = (published(&from, "*").await, published(&to, "*").await);
        assert_eq!(numbers(&got), (0..=700).collect::<Vec<_>>());
        for (sent, got) in sent.iter().zip(&got) {
            let (sent, got) = (&sent.event, &got.event);
            assert_eq!(
                (sent.id(), sent.occurred_at()),
                (got.id(), got.occurred_at())
            );
            let mut attributes = got.attributes().unwrap().clone();
            assert_eq!(attributes.bridged.len(), 1);
            attributes.bridged.clear();
            assert_eq!(sent.attributes(), Some(&attributes));
            assert!(sent.same_body(got), "a repeated publish is recognised");
        }
        // It continues where it was.
        publish(&from, 701..710).await;
        let stats = caught_up(&from, &to).await;
        assert_eq!((stats.moved, stats.duplicates), (9, 0), "{stats:?}");
        // A publisher that does not know whether its publish worked repeats it at the target.
        let last = published(&from, "*").await.pop().unwrap().event.clone();
        assert!(to.publish(last).await.unwrap().is_duplicate());
    })
    .await;
}

// conformance: engines/bridge-follows: a bridge that runs carries what is published meanwhile, and stops when it is asked to
#[tokio::test]
async fn a_running_bridge_carries_what_comes() {
    let lab = Lab::new(Kind::Sqlite);
    let (from, to) = (lab.open().await, memory().await);
    let bridge = Arc::new(Bridge::new(&from, &to));
    let running = tokio::spawn({
        let bridge = bridge.clone();
        async move { bridge.run().await }
    });
    for n in 0..50 {
        from.publish(event(n)).await.unwrap();
    }
    eventually("all arrived", || async {
        published(&to, "*").await.len() == 50
    })
    .await;
    eventually("all are settled", || async {
        lag(&from, BRIDGE).await.unsettled() == 0
    })
    .await;
    bridge.stop();
    assert_eq!(running.await.unwrap().unwrap().moved, 50);
}

// conformance: engines/bridge-outage: while an end is away a bridge waits, repeats with the same ids, and blames no event
#[tokio::test]
async fn outages_and_lost_answers_lose_and_double_nothing() {
    for atomic in [true, false] {
        let (from, source, _) = faulty().await;
        let (to, target, _) = faulty().await;
        target
            .atomic
            .store(atomic, std::sync::atomic::Ordering::SeqCst);
        publish(&from, 0..100).await;
        source.fetch.add(2, Code::Unavailable);
        for errors in [&source.settle, &target.append] {
            errors.add(2, Code::Unavailable);
            errors.add_after(2, Code::Unavailable);
            errors.spare(1);
            errors.add_after(1, Code::Busy);
        }
        let stats = caught_up(&from, &to).await;
        assert_eq!(stats.moved + stats.duplicates, 100, "{stats:?}");
        assert_eq!(stats.refused, 0, "{stats:?}");
        assert_eq!(
            numbers(&published(&to, "*").await),
            (0..100).collect::<Vec<_>>()
        );
        assert_eq!(letters(&from).await, []);
        assert!(!stats.waiting);
    }
}

// conformance: engines/bridge-keys: two appends are under way at a time, but never with events of the same key
#[tokio::test]
async fn a_batch_overtakes_another_only_without_a_common_key() {
    for keyed in [true, false] {
        let (from, _, _) = faulty().await;
        let (to, target, _) = faulty().await;
        for first in [0, 600] {
            let events = (first..first + 600).map(|n| {
                let event = Event::builder("order.placed").json(&n);
                let key = keyed.then(|| "k".to_owned());
                event.key(key.unwrap_or_else(|| format!("k{n}"))).build()
            });
            let events: Result<Vec<Event>, _> = events.collect();
            from.publish_batch(events.unwrap()).await.unwrap();
        }
        // The first append is repeated after a pause.
        target.append.add(1, Code::Unavailable);
        let stats = caught_up(&from, &to).await;
        assert_eq!((stats.moved, stats.refused), (1200, 0), "{stats:?}");
        let mut arrived = numbers(&published(&to, "*").await);
        assert_eq!(arrived.is_sorted(), keyed);
        arrived.sort_unstable();
        assert_eq!(arrived, (0..1200).collect::<Vec<_>>());
    }
}

// conformance: engines/bridge-refused: an event that the target refuses is a dead letter of the bridge's group, with the reason; the others arrive
#[tokio::test]
async fn a_refused_event_is_a_dead_letter_and_stops_nothing() {
    for atomic in [true, false] {
        let (from, _, _) = faulty().await;
        let (to, target, _) = faulty().await;
        target
            .atomic
            .store(atomic, std::sync::atomic::Ordering::SeqCst);
        publish(&from, 0..50).await;
        let sent = published(&from, "*").await;
        // The target has another event under this id.
        let other = Event::builder("order.placed")
            .id(sent[7].event.id())
            .json(&"other");
        to.publish(other).await.unwrap();
        let large = sent[20].event.id();
        target.judge(move |events| {
            let too_large = |event: &Event| event.id() == large;
            let judged = events
                .iter()
                .map(|e| too_large(e).then_some(Code::PayloadTooLarge));
            judged.collect()
        });
        let stats = caught_up(&from, &to).await;
        assert_eq!((stats.moved, stats.refused), (48, 2), "{stats:?}");
        let mut letters = letters(&from).await;
        letters.sort_by_key(|letter| letter.record.position.place());
        let ids: Vec<_> = letters.iter().map(|letter| letter.event().id()).collect();
        assert_eq!(ids, [sent[7].event.id(), large]);
        assert!(letters.iter().all(|letter| letter.group.as_str() == BRIDGE));
        let errors = letters
            .iter()
            .map(|letter| &letter.failures.last().unwrap().error);
        let errors: Vec<&String> = errors.collect();
        assert!(errors[0].contains("IdReused"), "{errors:?}");
        assert!(errors[1].contains("PayloadTooLarge"), "{errors:?}");
        // Once the target takes it, the retry of the dead letter carries it.
        *target.judge.lock().unwrap() = None;
        from.dead_letters().retry(large).await.unwrap();
        assert_eq!(caught_up(&from, &to).await.moved, 1);
    }
}

// conformance: engines/bridge-refused-all: a target that refuses every event ends the bridge, and the events stay where they are
#[tokio::test]
async fn a_target_that_refuses_everything_ends_the_bridge() {
    let (from, _, _) = faulty().await;
    let (to, target, _) = faulty().await;
    publish(&from, 0..100).await;
    target.judge(|events| vec![Some(Code::NoStream); events.len()]);
    let bridge = Bridge::new(&from, &to).target("the archive");
    let error = bridge.run_until_caught_up().await.unwrap_err();
    assert_eq!(error.code(), Code::NoStream);
    assert!(
        error.message().contains("the archive refuses every event"),
        "{error}"
    );
    assert!(letters(&from).await.len() <= 20);
    *target.judge.lock().unwrap() = None;
    let filter = everbus::DeadLetterFilter::default();
    from.dead_letters().retry_all(filter).await.unwrap();
    drop(bridge);
    let bridge = Bridge::new(&from, &to).target("the archive");
    bridge.run_until_caught_up().await.unwrap();
    assert_eq!(published(&to, "*").await.len(), 100);
}

// conformance: engines/bridge-same: a bridge whose ends are one log is refused and leaves no group behind
#[tokio::test]
async fn a_bridge_into_its_own_log_is_refused() {
    let lab = Lab::new(Kind::Sqlite);
    let (one, two) = (lab.open().await, lab.open().await);
    publish(&one, 0..3).await;
    for (from, to) in [(&one, &one), (&one, &two)] {
        let error = Bridge::new(from, to)
            .run_until_caught_up()
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting);
        assert!(error.message().contains("the same log"), "{error}");
        assert!(error.hint_text().is_some());
        assert!(one.groups().await.unwrap().is_empty());
    }
    assert_eq!(published(&one, "*").await.len(), 3);
}

// conformance: engines/bridge-loops: two opposite bridges and a ring of bridges carry no event back to a log it came from; a chain carries on
#[tokio::test]
async fn nothing_goes_round() {
    let (a, b, c) = (memory().await, memory().await, memory().await);
    publish(&a, 0..5).await;
    publish(&b, 5..8).await;
    assert_eq!(caught_up(&a, &b).await.moved, 5);
    let back = caught_up(&b, &a).await;
    assert_eq!((back.moved, back.returned, back.duplicates), (3, 5, 0));
    let again = caught_up(&a, &b).await;
    assert_eq!((again.moved, again.returned, again.duplicates), (0, 3, 0));
    // A chain: what was carried once is carried on, and not back to where it began.
    let on = Bridge::new(&b, &c)
        .group(group("to c"))
        .run_until_caught_up()
        .await;
    assert_eq!(on.unwrap().moved, 8);
    let ring = caught_up(&c, &a).await;
    // Those that began at b came to a on another way: a knows their ids.
    assert_eq!((ring.moved, ring.returned, ring.duplicates), (0, 5, 3));
    for bus in [&a, &b, &c] {
        let mut all = numbers(&published(bus, "*").await);
        all.sort_unstable();
        assert_eq!(all, (0..8).collect::<Vec<_>>());
    }
}

// conformance: engines/bridge-group: a bridge continues only a group of its own target and patterns
#[tokio::test]
async fn the_group_of_another_bridge_is_refused() {
    let (from, to, other) = (memory().await, memory().await, memory().await);
    publish(&from, 0..4).await;
    let orders = || vec![Pattern::new("order.*").unwrap()];
    let bridge = Bridge::new(&from, &to).target("shop").patterns(orders());
    assert_eq!(bridge.run_until_caught_up().await.unwrap().moved, 4);
    for (bridge, why) in [
        (
            Bridge::new(&from, &other)
                .target("elsewhere")
                .patterns(orders()),
            "another target",
        ),
        (Bridge::new(&from, &to).target("shop"), "other patterns"),
    ] {
        let error = bridge.run_until_caught_up().await.unwrap_err();
        assert_eq!(error.code(), Code::GroupConflict, "{why}");
        assert!(error.message().contains("to shop"), "{why}: {error}");
    }
}

// conformance: engines/bridge-hand-over: an existing group of consumers hands over what it has not handled, and nothing else
#[tokio::test]
async fn a_group_hands_over_what_it_has_not_handled() {
    let lab = Lab::new(Kind::Sqlite);
    let (from, to) = (lab.open().await, memory().await);
    from.subscribe("order.*")
        .group("billing")
        .name("charge")
        .handler(|| async {})
        .await
        .unwrap();
    from.start().await.unwrap();
    publish(&from, 0..5).await;
    eventually("five are handled", || async {
        lag(&from, "billing").await.unsettled() == 0
    })
    .await;
    from.shutdown().await.unwrap();
    let from = lab.open().await;
    publish(&from, 5..9).await;
    from.publish(("user.created", 99)).await.unwrap();
    let patterned = Bridge::new(&from, &to).group(group("billing"));
    let patterned = patterned.patterns(vec![Pattern::new("user.*").unwrap()]);
    let error = patterned.run_until_caught_up().await.unwrap_err();
    assert_eq!(
        error.code(),
        Code::InvalidSetting,
        "it has patterns of its own"
    );
    let bridge = Bridge::new(&from, &to).group(group("billing"));
    assert_eq!(bridge.run_until_caught_up().await.unwrap().moved, 4);
    assert_eq!(numbers(&published(&to, "*").await), [5, 6, 7, 8]);
    assert_eq!(lag(&from, "billing").await.unsettled(), 0);
}

// conformance: engines/bridge-scheduled: events that are published for later are carried at once, and keep their time
#[tokio::test]
async fn events_for_later_are_carried_too() {
    on_every_engine(|lab| async move {
        let (from, to) = (lab.open().await, memory().await);
        let at = lab.clock.now().plus(Duration::from_secs(3600));
        let later = |n: u64| {
            Event::builder("order.placed")
                .json(&n)
                .at(at)
                .build()
                .unwrap()
        };
        from.publish(later(1)).await.unwrap();
        publish(&from, 2..5).await;
        from.publish(later(5)).await.unwrap();
        let stats = caught_up(&from, &to).await;
        assert_eq!(stats.moved, 5, "{stats:?}");
        let got = published(&to, "*").await;
        let waits = |record: &&Arc<Recorded>| {
            let attributes = record.event.attributes();
            attributes.and_then(|a| a.not_before) == Some(at)
        };
        let waiting: Vec<_> = got.iter().filter(waits).cloned().collect();
        assert_eq!(numbers(&waiting), [1, 5]);
        assert_eq!(lag(&from, BRIDGE).await.unsettled(), 0);
    })
    .await;
}

// conformance: engines/bridge-left: events of the system and events addressed to one group stay; a pattern that names system. carries the former
#[tokio::test]
async fn what_belongs_to_the_source_stays_there() {
    let (from, to) = (memory().await, memory().await);
    publish(&from, 0..2).await;
    let addressed = event(7).addressed_to(&group("billing"));
    from.publish(addressed).await.unwrap();
    // A dead letter, of which the source tells.
    let refuse = || std::future::ready(Err::<(), _>(everbus::permanent("no")));
    let subscribe = from.subscribe("card.*").group("payment");
    subscribe.handler(refuse).await.unwrap();
    from.start().await.unwrap();
    let receipt = from.publish(("card.used", 9)).await.unwrap();
    receipt.settled().await.unwrap();
    assert_eq!(published(&from, "system.>").await.len(), 1);
    caught_up(&from, &to).await;
    assert_eq!(numbers(&published(&to, "*").await), [0, 1, 9]);
    assert!(published(&to, "system.>").await.is_empty());
    let system = Bridge::new(&from, &to).group(group("system"));
    let system = system.patterns(vec![Pattern::new("system.>").unwrap()]);
    assert_eq!(system.run_until_caught_up().await.unwrap().moved, 1);
    assert_eq!(published(&to, "system.dead_letter").await.len(), 1);
}

// conformance: engines/bridge-lookup: a target that does not recognise ids is asked for events that may have been sent before
#[tokio::test]
async fn what_may_have_been_sent_is_looked_for_first() {
    let (from, source, clock) = faulty().await;
    let (to, target, _) = faulty().await;
    target
        .forgetful
        .store(true, std::sync::atomic::Ordering::SeqCst);
    publish(&from, 0..5).await;
    // Dies after the append and before the ack.
    source.settle.add(1_000_000, Code::Unavailable);
    let bridge = Bridge::new(&from, &to);
    let died = tokio::select! {
        _ = bridge.run() => false,
        () = eventually("they are there", || async {
            published(&to, "*").await.len() == 5
        }) => true,
    };
    assert!(died);
    source.settle.clear();
    clock.advance(Duration::from_secs(3600));
    let appends = target.batches.lock().unwrap().len();
    let stats = caught_up(&from, &to).await;
    assert_eq!((stats.moved, stats.duplicates), (0, 5), "{stats:?}");
    assert_eq!(
        target.batches.lock().unwrap().len(),
        appends,
        "not sent again"
    );
}

// conformance: engines/bridge-stop: a bridge that is stopped while the target is away ends, and gives back what it has
#[tokio::test]
async fn a_bridge_stops_while_the_target_is_away() {
    let (from, _, _) = faulty().await;
    let (to, target, _) = faulty().await;
    publish(&from, 0..10).await;
    target.append.add(1_000_000, Code::Unavailable);
    let bridge = Arc::new(Bridge::new(&from, &to));
    let running = tokio::spawn({
        let bridge = bridge.clone();
        async move { bridge.run_until_caught_up().await }
    });
    eventually("it waits", || async { bridge.stats().waiting }).await;
    bridge.stop();
    let stats = running.await.unwrap().unwrap();
    assert_eq!(stats.moved, 0);
    let lag = lag(&from, BRIDGE).await;
    assert_eq!((lag.in_flight, lag.unsettled()), (0, 10), "given back");
    target.append.clear();
    assert_eq!(caught_up(&from, &to).await.moved, 10);
}

// conformance: engines/bridge-refused: after many refusals in a row the next run goes on behind them
#[tokio::test]
async fn refused_events_do_not_stop_the_next_run() {
    for atomic in [true, false] {
        let (from, _, _) = faulty().await;
        let (to, target, _) = faulty().await;
        target
            .atomic
            .store(atomic, std::sync::atomic::Ordering::SeqCst);
        publish(&from, 0..60).await;
        // 25 in a row are too large.
        target.judge(|events| {
            let too_large = |event: &Event| (10..35).contains(&event.json::<u64>().unwrap());
            let judged = events.iter();
            let judged = judged.map(|e| too_large(e).then_some(Code::PayloadTooLarge));
            judged.collect()
        });
        let error = Bridge::new(&from, &to).run_until_caught_up().await;
        assert_eq!(error.unwrap_err().code(), Code::PayloadTooLarge);
        assert_eq!(letters(&from).await.len(), 20, "the first ones are settled");
        let stats = caught_up(&from, &to).await;
        assert_eq!(stats.refused, 5, "{stats:?}");
        assert_eq!(letters(&from).await.len(), 25);
        let arrived = published(&to, "*").await;
        assert_eq!(arrived.len(), 35);
    }
}

// conformance: engines/bridge-lookup: also after a bridge was stopped before the target answered
#[tokio::test]
async fn a_stopped_bridge_remembers_what_may_have_been_sent() {
    let (from, _, _) = faulty().await;
    let (to, target, _) = faulty().await;
    target
        .forgetful
        .store(true, std::sync::atomic::Ordering::SeqCst);
    publish(&from, 0..5).await;
    // They are stored, and the answers are lost.
    target.append.add_after(1_000_000, Code::Unavailable);
    let bridge = Arc::new(Bridge::new(&from, &to));
    let running = tokio::spawn({
        let bridge = bridge.clone();
        async move { bridge.run().await }
    });
    eventually("it waits", || async { bridge.stats().waiting }).await;
    bridge.stop();
    running.await.unwrap().unwrap();
    target.append.clear();
    let appends = target.batches.lock().unwrap().len();
    let stats = caught_up(&from, &to).await;
    assert_eq!((stats.moved, stats.duplicates), (0, 5), "{stats:?}");
    let after = target.batches.lock().unwrap().len();
    assert_eq!(after, appends, "not sent again");
}
