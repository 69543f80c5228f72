//! A server that is away: before a call took effect, or after, with the answer lost. What handlers have
//! done is kept, and no event is blamed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::{Bus, Class, Code, Event, EventId, Json, Message};
use tokio::sync::Semaphore;
use tracing::Level;

use crate::faulty::{Errors, faulty};
use crate::support::{counted, eventually, fine, is_done, published, recorder};

/// How the server fails.
#[derive(Clone, Copy, Debug)]
enum Away {
    Before,
    After,
}

impl Away {
    const ALL: [Self; 2] = [Self::Before, Self::After];

    fn plant(self, errors: &Errors, times: usize) {
        match self {
            Self::Before => errors.add(times, Code::Unavailable),
            Self::After => errors.add_after(times, Code::Unavailable),
        }
    }
}

// conformance: contract/publish-unknown: a publisher learns whether the outcome is unknown, and may repeat the same id
#[tokio::test]
async fn a_publish_says_whether_its_outcome_is_known_and_can_be_repeated() {
    for (away, class) in [
        (Away::Before, Class::Passing),
        (Away::After, Class::Unknown),
    ] {
        let (bus, faults, _) = faulty().await;
        let event = Event::builder("a").id(EventId::new()).build().unwrap();
        away.plant(&faults.append, 2);
        for _ in 0..2 {
            let error = bus.publish(event.clone()).await.unwrap_err();
            assert_eq!((error.code(), error.class()), (Code::Unavailable, class));
            assert_eq!(error.outcome_unknown(), class == Class::Unknown);
        }
        assert!(
            bus.failure().is_none(),
            "an outage is no failure of the bus"
        );
        let receipt = bus.publish(event.clone()).await.unwrap();
        assert_eq!(receipt.is_duplicate(), class == Class::Unknown);
        assert_eq!(published(&bus, "a").await.len(), 1);
        bus.shutdown().await.unwrap();
    }
}

/// Runs a handler for ten events, with the errors planted by `plant`, and checks that each was handled
/// once, that nothing was failed, and that what was emitted is there once.
async fn outcomes_survive(emits: bool, plant: impl Fn(&crate::faulty::Faulty)) {
    const EVENTS: usize = 10;
    let (bus, faults, _) = faulty().await;
    let runs = Arc::new(AtomicUsize::new(0));
    let count = runs.clone();
    let handler = move |Json(n): Json<usize>| {
        count.fetch_add(1, Ordering::SeqCst);
        async move { emits.then_some(("b", n)) }
    };
    bus.subscribe("a").handler(handler).await.unwrap();
    plant(&faults);
    bus.start().await.unwrap();
    let events = (0..EVENTS).map(|n| ("a", n));
    for receipt in bus.publish_batch(events).await.unwrap() {
        let settled = receipt.settled().await.unwrap();
        assert!(settled.dead_lettered.is_empty());
    }
    let stats = counted(&bus).await;
    assert_eq!(runs.load(Ordering::SeqCst), EVENTS, "each is handled once");
    assert_eq!(bus.dead_letters().list().await.unwrap(), []);
    assert_eq!(bus.lost_leases(), 0);
    let follow_ups = if emits { EVENTS } else { 0 };
    assert_eq!(published(&bus, "b").await.len(), follow_ups);
    let of_type = &stats.types["a"];
    assert_eq!((of_type.handled, of_type.failed), (EVENTS as u64, 0));
    assert!(bus.failure().is_none());
    bus.shutdown().await.unwrap();
}

// conformance: contract/settle-outage: an outage while settling is waited for, whole batch or one outcome, before or after the effect; nothing is failed, run again or published twice
#[tokio::test]
async fn outcomes_are_sent_again_when_the_server_was_away() {
    for away in Away::ALL {
        for emits in [false, true] {
            outcomes_survive(emits, |faults| away.plant(&faults.settle, 3)).await;
            outcomes_survive(emits, |faults| away.plant(&faults.settle_one, 3)).await;
            outcomes_survive(emits, |faults| {
                away.plant(&faults.settle, 1);
                faults.settle.spare(1);
                away.plant(&faults.settle, 2);
                away.plant(&faults.settle_one, 2);
            })
            .await;
        }
    }
}

// conformance: contract/settle-outage: an outage that ended says nothing about later outcomes: a lease that is lost then counts as lost
#[tokio::test]
async fn a_lost_lease_after_an_outage_is_not_taken_for_a_repetition() {
    let (bus, faults, _) = faulty().await;
    let handler = || async {};
    bus.subscribe("a").handler(handler).await.unwrap();
    // The answer to the first outcome is lost, and the repetition is refused: the settler gives up on it.
    faults.settle.add_after(1, Code::Unavailable);
    faults.settle.add(1, Code::InvalidSetting);
    bus.start().await.unwrap();
    let first = bus.publish(("a", 1)).await.unwrap();
    first.settled().await.unwrap();
    eventually("the settler gives up", || async {
        faults.settle.is_empty()
    })
    .await;
    faults.settle_one.add(1, Code::LeaseLost);
    bus.publish(("a", 2)).await.unwrap();
    eventually("the lease counts as lost", || async {
        bus.lost_leases() == 1
    })
    .await;
    bus.shutdown().await.unwrap();
}

// conformance: contract/settle-blame: what a handler emits is its failure only if the engine refuses it; each other answer about one outcome is nobody's fault
#[tokio::test]
async fn only_a_refusal_is_the_handlers_failure() {
    for (code, blamed) in [
        (Code::Unavailable, false),
        (Code::Timeout, false),
        (Code::ReadOnly, false),
        (Code::IdReused, true),
        (Code::InvalidAttribute, true),
    ] {
        let (bus, faults, _) = faulty().await;
        bus.subscribe("a")
            .handler(|| async { ("b", 1) })
            .await
            .unwrap();
        faults.settle_one.add(1, code);
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        let settled = receipt.settled().await.unwrap();
        assert_eq!(!settled.dead_lettered.is_empty(), blamed, "{code}");
        bus.shutdown().await.unwrap();
    }
}

/// Subscribes a handler that notes its message and waits at the gate.
async fn gated(bus: &Bus) -> (Arc<Semaphore>, crate::support::Seen) {
    let gate = Arc::new(Semaphore::new(0));
    let inside = gate.clone();
    let (note, seen) = recorder(fine);
    let note = Arc::new(note);
    let handler = move |m: Message| {
        let (gate, note) = (inside.clone(), note.clone());
        async move {
            note(m).await?;
            gate.acquire().await?.forget();
            everbus::handled()
        }
    };
    bus.subscribe("a").handler(handler).await.unwrap();
    (gate, seen)
}

// conformance: contract/settle-until-lease-ends: outcomes are sent again as long as their leases are kept, however long the outage lasts
#[tokio::test(start_paused = true)]
async fn outcomes_wait_as_long_as_their_leases_are_kept() {
    let (bus, faults, clock) = faulty().await;
    let (gate, mut seen) = gated(&bus).await;
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", 1)).await.unwrap();
    seen.next().await;
    faults.settle.add(10_000, Code::Unavailable);
    gate.add_permits(1);
    // Ten times as long as the lease, which is 40 s; it is extended every 13⅓ s.
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        clock.advance(Duration::from_secs(10));
    }
    assert_eq!(bus.lost_leases(), 0);
    faults.settle.clear();
    receipt.settled().await.unwrap();
    assert!(seen.is_empty(), "handled once");
    bus.shutdown().await.unwrap();
}

// conformance: contract/settle-until-lease-ends: an outcome whose lease has ended without an extension is given up, and the event comes again
#[tokio::test(start_paused = true)]
async fn an_outcome_is_given_up_when_its_lease_is_over() {
    let (bus, faults, clock) = faulty().await;
    let (gate, mut seen) = gated(&bus).await;
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", 1)).await.unwrap();
    seen.next().await;
    faults.settle.add(10_000, Code::Unavailable);
    faults.extend.add(10_000, Code::Unavailable);
    gate.add_permits(2);
    tokio::time::sleep(Duration::from_secs(35)).await;
    assert_eq!(bus.lost_leases(), 0, "the lease lasts 40 s");
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(bus.lost_leases(), 1);
    assert!(!is_done(&bus, receipt.seq(), "").await);
    faults.settle.clear();
    faults.extend.clear();
    clock.advance(Duration::from_secs(41));
    assert_eq!(seen.next().await.attempt(), 2);
    receipt.settled().await.unwrap();
    bus.shutdown().await.unwrap();
}

// conformance: contract/settle-shutdown: a shutdown waits for outcomes during an outage until its grace is over, and counts what is left
#[tokio::test(start_paused = true)]
async fn a_shutdown_during_an_outage_ends_with_its_grace() {
    for (outage, unsettled) in [(8, 0), (10_000, 1)] {
        let (bus, faults, _) = faulty().await;
        let (gate, mut seen) = gated(&bus).await;
        bus.start().await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        seen.next().await;
        faults.settle.add(outage, Code::Unavailable);
        gate.add_permits(1);
        let report = bus.shutdown_within(Duration::from_secs(1)).await.unwrap();
        assert_eq!((report.abandoned, report.unsettled), (0, unsettled));
    }
}

// conformance: contract/extend-outage: leases that could not be extended are extended again before they end, not only at the next third
#[tokio::test(start_paused = true)]
async fn leases_are_extended_again_after_a_short_outage() {
    for away in Away::ALL {
        let (bus, faults, clock) = faulty().await;
        let (gate, mut seen) = gated(&bus).await;
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        seen.next().await;
        // The lease is 40 s and is extended after 13⅓ s of real time; by then 30 s of the engine's.
        clock.advance(Duration::from_secs(30));
        away.plant(&faults.extend, 3);
        tokio::time::sleep(Duration::from_secs(15)).await;
        assert_eq!(faults.extended.load(Ordering::SeqCst), 4);
        clock.advance(Duration::from_secs(35));
        gate.add_permits(1);
        receipt.settled().await.unwrap();
        assert_eq!(bus.lost_leases(), 0);
        assert!(seen.is_empty(), "delivered once");
        bus.shutdown().await.unwrap();
    }
}

// conformance: contract/fetch-outage: fetching goes on when the server is back; the log has one line when the outage begins and one when it is over
#[tokio::test(start_paused = true)]
async fn fetching_goes_on_and_an_outage_is_told_once() {
    const GROUP: &str = "told-of-an-outage";
    let (bus, faults, _) = faulty().await;
    let (handler, mut seen) = recorder(fine);
    let subscribe = bus.subscribe("a").group(GROUP);
    subscribe.handler(handler).await.unwrap();
    faults.fetch.add(20, Code::Unavailable);
    bus.start().await.unwrap();
    bus.publish(("a", 1)).await.unwrap();
    assert_eq!(seen.next().await.attempt(), 1);
    let told = || {
        let of_group = crate::logs::lines(|line| line.field("group") == Some(GROUP));
        let of_fetch = of_group
            .into_iter()
            .filter(|line| line.field("doing") == Some("fetching"));
        of_fetch.collect::<Vec<_>>()
    };
    eventually("both lines are there", || async { told().len() == 2 }).await;
    let told = told();
    assert_eq!((told[0].level, told[1].level), (Level::WARN, Level::INFO));
    assert!(told[0].field("error").unwrap().contains("Unavailable"));
    assert_eq!(told[1].field("tries"), Some("20"));
    let took: u64 = told[1].field("took_ms").unwrap().parse().unwrap();
    // 10 ms, doubled up to 1 s; in the time of tokio, which moves only when all wait.
    assert!((13_000..15_000).contains(&took), "{took}");
    assert!(bus.failure().is_none() && bus.stopped_groups().is_empty());
    bus.shutdown().await.unwrap();
}

// conformance: contract/fetch-outage: events that were handed out in an answer that was lost come again when their leases end
#[tokio::test(start_paused = true)]
async fn events_of_an_answer_that_was_lost_come_again() {
    let (bus, faults, clock) = faulty().await;
    let (handler, mut seen) = recorder(fine);
    bus.subscribe("a").handler(handler).await.unwrap();
    faults.fetch.add_after(1, Code::Unavailable);
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", 1)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(seen.is_empty());
    clock.advance(Duration::from_secs(41));
    assert_eq!(seen.next().await.attempt(), 2);
    receipt.settled().await.unwrap();
    bus.shutdown().await.unwrap();
}
