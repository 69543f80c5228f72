//! Every way in which a publish is admitted, delayed or refused.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use everbus_core::{Broker, Code, Error, OnFull};
use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::fake::Engine;
use super::streams::MOST_TRACKED;
use super::*;

const S: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// The publishing side of a bus.
#[derive(Clone)]
struct Publisher {
    engine: Arc<Engine>,
    admission: Arc<Admission>,
}

fn publisher(limits: Limits, rate: Option<PublishRate>) -> Publisher {
    Publisher {
        engine: Arc::default(),
        admission: Arc::new(Admission::new(limits, rate, Table::default()).unwrap()),
    }
}

/// One stream `a` with this limit.
fn limited(limit: StreamLimit) -> Publisher {
    publisher(Limits::new().stream("a", limit), None)
}

fn events(stream: &str, count: usize) -> Vec<Event> {
    let event = || Event::builder(stream).build().unwrap();
    std::iter::repeat_with(event).take(count).collect()
}

impl Publisher {
    async fn publish_all(&self, batch: Vec<Event>) -> Result<u64> {
        let admission = self.admission.admit(Some(&*self.engine), &batch);
        let admitted = tokio::time::timeout(3600 * S, admission).await;
        let admitted = admitted.expect("no publish waits an hour")?;
        self.engine.append(batch).await?;
        Ok(admitted.dropped().iter().map(|(_, dropped)| dropped).sum())
    }

    async fn publish(&self, stream: &str, count: usize) -> Result<u64> {
        self.publish_all(events(stream, count)).await
    }

    fn owed(&self) -> u64 {
        self.engine.owed("a")
    }
}

fn assert_full(answer: Result<u64>) -> Error {
    let e = answer.unwrap_err();
    assert_eq!(e.code(), Code::Backpressure, "{e}");
    e
}

#[tokio::test(start_paused = true)]
async fn without_limits_nothing_is_asked_and_nothing_waits() {
    let p = publisher(Limits::new(), None);
    p.engine.cannot_count.store(true, Ordering::SeqCst);
    let start = Instant::now();
    p.publish("a", 1_000).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(p.engine.counts(), 0);
}

#[test]
fn settings_that_make_no_sense_are_refused_at_the_start() {
    let zero = Limits::new().default_limit(StreamLimit::new(0));
    let e = Admission::new(zero, None, Table::default()).unwrap_err();
    assert_eq!(e.code(), Code::InvalidSetting);
    let e =
        Admission::new(Limits::new(), Some(PublishRate::new(0.0)), Table::default()).unwrap_err();
    assert_eq!(e.code(), Code::InvalidSetting);
}

// conformance: handlers/backpressure-wait: a publish into a full stream waits 5 s, then fails with Backpressure
#[tokio::test(start_paused = true)]
async fn a_publish_into_a_full_stream_waits_five_seconds_and_then_fails() {
    let p = limited(StreamLimit::new(10));
    p.publish("a", 10).await.unwrap();
    let start = Instant::now();
    let e = assert_full(p.publish("a", 1).await);
    assert_eq!(start.elapsed(), 5 * S);
    assert!(e.message().contains("the stream a is full"), "{e}");
    assert!(e.message().contains("max_len 10"), "{e}");
    assert!(e.message().contains("5s"), "{e}");
    assert!(e.hint_text().unwrap().contains("everbus groups"));
    assert_eq!(p.owed(), 10, "nothing was stored");
}

// conformance: handlers/backpressure-wait: the wait ends when there is room
#[tokio::test(start_paused = true)]
async fn the_wait_ends_soon_after_a_group_made_room() {
    let p = limited(StreamLimit::new(10).wait(60 * S));
    p.publish("a", 10).await.unwrap();
    let start = Instant::now();
    let waiting = tokio::spawn({
        let p = p.clone();
        async move { p.publish("a", 3).await }
    });
    tokio::time::sleep(20 * S).await;
    p.engine.handle("a", 2);
    tokio::time::sleep(S).await;
    assert!(!waiting.is_finished(), "there is room for two");
    p.engine.handle("a", 1);
    waiting.await.unwrap().unwrap();
    assert!(start.elapsed() <= 21 * S + 50 * MS);
    assert_eq!(p.owed(), 10);
    let asked = p.engine.counts();
    assert!(asked <= 21 * 20 + 10, "asked {asked} times in 21 s");
}

// conformance: handlers/backpressure-reject: on_full reject fails at once
// conformance: framework/backpressure-acceptable: on_full reject fails at once
#[tokio::test(start_paused = true)]
async fn a_full_stream_that_rejects_does_so_at_once_and_only_while_it_is_full() {
    let p = limited(StreamLimit::new(3).on_full(OnFull::Reject));
    p.publish("a", 3).await.unwrap();
    let start = Instant::now();
    for _ in 0..5 {
        let e = assert_full(p.publish("a", 1).await);
        assert!(!e.message().contains("within"), "{e}");
    }
    p.engine.handle("a", 1);
    p.publish("a", 1).await.unwrap();
    assert_full(p.publish("a", 1).await);
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(p.owed(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_rejects_waits_for_the_count_of_another_but_not_for_ever() {
    let p = limited(
        StreamLimit::new(3)
            .on_full(OnFull::Reject)
            .wait(Duration::ZERO),
    );
    for (slow, answers) in [(S, true), (10 * S, false)] {
        // Later than the validity of any count.
        tokio::time::advance(60 * S).await;
        p.engine.add("a", 3);
        *p.engine.slow.lock() = Duration::ZERO;
        assert_full(p.publish("a", 1).await);
        p.engine.handle("a", 3);
        *p.engine.slow.lock() = slow;
        let first = tokio::spawn({
            let p = p.clone();
            async move { p.publish("a", 1).await }
        });
        tokio::task::yield_now().await;
        let second = p.publish("a", 1).await;
        assert_eq!(second.is_ok(), answers);
        if let Err(e) = second {
            assert_eq!(e.code(), Code::Backpressure);
            assert!(
                e.message().contains("could not be counted within 5s"),
                "{e}"
            );
        }
        first.await.unwrap().unwrap();
        p.engine.handle("a", 1 + u64::from(answers));
    }
}

// conformance: handlers/backpressure-drop-oldest: on_full drop_oldest makes room and admits
// conformance: framework/backpressure-drop: on_full drop_oldest makes room and admits
// conformance: framework/backpressure-acceptable: on_full drop_oldest makes room and admits
#[tokio::test(start_paused = true)]
async fn a_full_stream_that_drops_its_oldest_keeps_what_fits_beside_the_new() {
    let p = limited(StreamLimit::new(10).on_full(OnFull::DropOldest));
    assert_eq!(p.publish("a", 8).await.unwrap(), 0);
    assert_eq!(p.publish("a", 5).await.unwrap(), 3);
    assert_eq!(p.owed(), 10);
    assert_eq!(p.publish("a", 10).await.unwrap(), 10);
    assert_eq!(*p.engine.kept.lock(), [5, 0]);
    p.engine.handle("a", 4);
    assert_eq!(p.publish("a", 4).await.unwrap(), 0, "there was room");
    assert_eq!(p.owed(), 10);
}

#[tokio::test(start_paused = true)]
async fn a_long_stream_is_not_trimmed_at_every_publish() {
    let p = limited(StreamLimit::new(12_800).on_full(OnFull::DropOldest));
    p.engine.add("a", 12_800);
    for _ in 0..1_000 {
        p.publish("a", 1).await.unwrap();
        assert!((12_700..=12_800).contains(&p.owed()));
    }
    assert_eq!(p.engine.kept.lock().len(), 10);
    assert!(p.engine.counts() <= 11);
}

#[tokio::test(start_paused = true)]
async fn publishers_that_come_while_room_is_made_share_it() {
    let p = limited(StreamLimit::new(100).on_full(OnFull::DropOldest));
    p.engine.add("a", 100);
    *p.engine.slow.lock() = 10 * MS;
    let mut tasks = JoinSet::new();
    for _ in 0..64 {
        let p = p.clone();
        tasks.spawn(async move { p.publish("a", 1).await.unwrap() });
    }
    let dropped: u64 = tasks.join_all().await.iter().sum();
    assert_eq!((dropped, p.owed()), (64, 100));
    assert_eq!(*p.engine.kept.lock(), [36]);
}

// conformance: handlers/backpressure-batch: a batch larger than the limit is refused at once
#[tokio::test(start_paused = true)]
async fn a_batch_that_can_never_fit_is_refused_at_once() {
    for on_full in [OnFull::Wait, OnFull::Reject, OnFull::DropOldest] {
        let p = limited(StreamLimit::new(10).on_full(on_full));
        let start = Instant::now();
        let e = assert_full(p.publish("a", 11).await);
        assert!(e.message().contains("a batch of 11 events can never fit"));
        assert!(e.hint_text().unwrap().contains("at most 10"));
        assert_eq!((start.elapsed(), p.owed()), (Duration::ZERO, 0));
        p.publish("a", 10).await.unwrap();
    }
}

// conformance: handlers/backpressure-system: alerts get out of a bus whose streams are full
#[tokio::test(start_paused = true)]
async fn the_systems_own_events_are_never_held_back() {
    let limits = Limits::new().default_limit(StreamLimit::new(1));
    let rate = PublishRate::new(1.0).wait(S);
    let p = publisher(limits, Some(rate));
    p.publish("a", 1).await.unwrap();
    let start = Instant::now();
    p.publish("system.circuit_opened", 50).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(p.engine.owed("system.circuit_opened"), 50);
    assert_full(p.publish("a", 1).await);
}

#[tokio::test(start_paused = true)]
async fn while_there_is_room_the_engine_is_asked_once_a_second() {
    let p = limited(StreamLimit::new(1_000_000));
    for _ in 0..100 {
        p.publish("a", 1).await.unwrap();
    }
    assert_eq!(p.engine.counts(), 1, "only the first");
    for _ in 0..100 {
        tokio::time::advance(100 * MS).await;
        p.publish("a", 1).await.unwrap();
    }
    assert_eq!(p.engine.counts(), 10, "in ten seconds");
    tokio::time::advance(3600 * S).await;
    p.publish("a", 1).await.unwrap();
    assert_eq!(p.engine.counts(), 1, "not while nothing is published");
}

#[tokio::test(start_paused = true)]
async fn the_bound_is_corrected_by_a_count_when_it_leaves_no_room() {
    let p = limited(StreamLimit::new(10).on_full(OnFull::Reject));
    for _ in 0..50 {
        p.publish("a", 1).await.unwrap();
        p.engine.handle("a", 1);
    }
    // The first, and then after every ten publishes.
    assert_eq!(p.engine.counts(), 5);
}

#[tokio::test(start_paused = true)]
async fn what_other_processes_publish_is_seen_within_a_second() {
    let p = limited(StreamLimit::new(10).on_full(OnFull::Reject));
    p.publish("a", 1).await.unwrap();
    p.engine.add("a", 9);
    tokio::time::advance(S).await;
    assert_full(p.publish("a", 1).await);
}

#[tokio::test(start_paused = true)]
async fn a_slow_count_holds_up_one_publisher_and_is_not_repeated_soon() {
    let p = limited(StreamLimit::new(100));
    p.publish("a", 1).await.unwrap();
    tokio::time::advance(2 * S).await;
    *p.engine.slow.lock() = 500 * MS;
    let start = Instant::now();
    let slow = tokio::spawn({
        let p = p.clone();
        async move { p.publish("a", 1).await }
    });
    tokio::task::yield_now().await;
    for _ in 0..10 {
        p.publish("a", 1).await.unwrap();
    }
    assert_eq!(start.elapsed(), Duration::ZERO, "the others go on");
    slow.await.unwrap().unwrap();
    assert_eq!((start.elapsed(), p.engine.counts()), (500 * MS, 2));
    tokio::time::advance(9 * S).await;
    p.publish("a", 1).await.unwrap();
    assert_eq!(p.engine.counts(), 0, "20 times as long as it took");
    tokio::time::advance(S).await;
    p.publish("a", 1).await.unwrap();
    assert_eq!(p.engine.counts(), 1);
}

// conformance: handlers/backpressure-concurrent: concurrent publishers do not exceed the limit together
#[tokio::test(start_paused = true)]
async fn concurrent_publishers_do_not_exceed_the_limit_together() {
    let p = limited(StreamLimit::new(100).on_full(OnFull::Reject));
    *p.engine.slow.lock() = 3 * MS;
    let mut tasks = JoinSet::new();
    for n in 0..300 {
        let p = p.clone();
        tasks.spawn(async move {
            tokio::time::sleep(n % 7 * MS).await;
            let batch = events("a", 1);
            let admitted = p.admission.admit(Some(&*p.engine), &batch).await?;
            // The append takes longer than a count.
            tokio::time::sleep(20 * MS).await;
            p.engine.append(batch).await?;
            Ok(admitted.dropped().iter().map(|(_, dropped)| dropped).sum())
        });
    }
    let answers: Vec<Result<u64>> = tasks.join_all().await;
    let admitted = answers.iter().filter(|a| a.is_ok()).count();
    assert_eq!((admitted, p.owed()), (100, 100));
    assert!(p.engine.counts() < 20, "those who are refused share counts");
}

#[tokio::test(start_paused = true)]
async fn what_is_appended_during_a_count_is_added_to_it() {
    let p = limited(StreamLimit::new(10).on_full(OnFull::Reject));
    p.publish("a", 1).await.unwrap();
    tokio::time::advance(2 * S).await;
    *p.engine.slow.lock() = 100 * MS;
    let counting = tokio::spawn({
        let p = p.clone();
        async move { p.publish("a", 1).await }
    });
    tokio::task::yield_now().await;
    // The count includes one event; these use the bound that was known before.
    p.publish("a", 8).await.unwrap();
    counting.await.unwrap().unwrap();
    assert_full(p.publish("a", 1).await);
    assert_eq!(p.owed(), 10);
}

#[tokio::test(start_paused = true)]
async fn a_publisher_that_waits_for_room_is_not_overtaken() {
    let p = limited(StreamLimit::new(10));
    p.engine.add("a", 10);
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    for (name, count) in [(0, 5), (1, 1), (2, 1)] {
        let (publisher, order) = (p.clone(), order.clone());
        tasks.spawn(async move {
            publisher.publish("a", count).await.unwrap();
            order.lock().push(name);
        });
        // The later publishes would fit, but not the one before them.
        p.engine.handle("a", 1);
        tokio::time::sleep(100 * MS).await;
    }
    assert!(order.lock().is_empty());
    for _ in 0..4 {
        p.engine.handle("a", 1);
        tokio::time::sleep(100 * MS).await;
    }
    tasks.join_all().await;
    assert_eq!(*order.lock(), [0, 1, 2]);
    assert_eq!(p.owed(), 10);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_publish_leaves_nothing_behind() {
    let limits = Limits::new()
        .stream("a", StreamLimit::new(10))
        .stream("b", StreamLimit::new(10));
    let p = publisher(limits, None);
    p.engine.add("b", 10);
    // It has its room in `a` and waits for `b`.
    let mut both = events("a", 10);
    both.extend(events("b", 1));
    let waiting = tokio::spawn({
        let p = p.clone();
        async move { p.publish_all(both).await }
    });
    tokio::time::sleep(100 * MS).await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    let start = Instant::now();
    p.engine.counts();
    p.publish("a", 10).await.unwrap();
    assert_eq!(p.engine.counts(), 0, "its room is known to be free");
    p.engine.handle("b", 10);
    p.publish("b", 10).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    // A publish that fails for `b` gives back its room in `a`.
    p.engine.handle("a", 10);
    let mut both = events("a", 10);
    both.extend(events("b", 1));
    assert_full(p.publish_all(both).await);
    p.publish("a", 10).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_failed_append_holds_its_room_only_until_the_next_count() {
    let p = limited(StreamLimit::new(10).on_full(OnFull::Reject));
    for _ in 0..5 {
        let batch = events("a", 10);
        drop(p.admission.admit(Some(&*p.engine), &batch).await.unwrap());
    }
    p.publish("a", 10).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn each_type_under_the_default_limit_has_its_own_room() {
    let p = publisher(Limits::new().default_limit(StreamLimit::new(2)), None);
    let mut batch = events("a", 2);
    batch.extend(events("b", 2));
    p.publish_all(batch).await.unwrap();
    p.publish("c", 2).await.unwrap();
    assert_full(p.publish("b", 1).await);
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_a_turn_and_for_room_is_one_wait() {
    let limits = Limits::new().stream("a", StreamLimit::new(1));
    let p = publisher(limits, Some(PublishRate::new(0.5)));
    p.publish("a", 1).await.unwrap();
    let start = Instant::now();
    assert_full(p.publish("a", 1).await);
    assert_eq!(start.elapsed(), 5 * S, "2 s for the turn, 3 s for room");
}

// conformance: handlers/backpressure-bounded: the memory for streams is bounded
// conformance: framework/backpressure-acceptable: the memory for streams is bounded
#[tokio::test(start_paused = true)]
async fn however_many_types_there_are_few_are_remembered() {
    let limit = StreamLimit::new(2).on_full(OnFull::Reject);
    let p = publisher(Limits::new().default_limit(limit), None);
    let tracked = || p.admission.streams.tracked();
    let types = MOST_TRACKED + 500;
    for n in 0..types {
        p.publish(&format!("order.{n}.shipped"), 2).await.unwrap();
    }
    assert_eq!(tracked(), MOST_TRACKED);
    // Streams without a place are limited all the same, at the cost of a count for each publish.
    p.engine.counts();
    for n in [0, types - 1, types - 1] {
        assert_full(p.publish(&format!("order.{n}.shipped"), 1).await);
    }
    assert_eq!(p.engine.counts(), 3);
    // When the others are no longer used, they are forgotten.
    tokio::time::advance(S).await;
    p.publish("another", 1).await.unwrap();
    assert_eq!(tracked(), 1);
}

// conformance: handlers/backpressure-unsupported: a limit the engine cannot keep is reported, not ignored
#[tokio::test(start_paused = true)]
async fn an_engine_that_cannot_count_or_drop_says_so_at_the_first_publish() {
    let p = limited(StreamLimit::new(1).on_full(OnFull::DropOldest));
    p.engine.cannot_count.store(true, Ordering::SeqCst);
    let e = p.publish("a", 1).await.unwrap_err();
    assert_eq!(e.code(), Code::Unsupported);
    assert!(e.message().contains("the stream a has max_len 1"), "{e}");
    assert!(e.message().contains("no counting here"), "{e}");
    assert!(e.hint_text().unwrap().contains("remove the limit"));
    p.engine.cannot_count.store(false, Ordering::SeqCst);
    p.engine.cannot_drop.store(true, Ordering::SeqCst);
    p.publish("a", 1).await.unwrap();
    let e = p.publish("a", 1).await.unwrap_err();
    assert_eq!(e.code(), Code::Unsupported);
    assert!(e.message().contains("on_full drop_oldest"), "{e}");
    assert_eq!(p.owed(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_several_threads_the_limit_holds_and_no_publisher_is_stuck() {
    let limit = StreamLimit::new(50).wait(60 * S);
    let p = limited(limit);
    let most = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for publisher in 0..16 {
        let (p, most) = (p.clone(), most.clone());
        tasks.spawn(async move {
            for n in 0..100 {
                p.publish("a", 1 + (publisher + n) % 3).await.unwrap();
                most.fetch_max(p.owed(), Ordering::SeqCst);
            }
        });
    }
    let handling = tokio::spawn({
        let p = p.clone();
        async move {
            loop {
                let owed = p.owed();
                if owed > 0 {
                    p.engine.handle("a", owed);
                }
                tokio::time::sleep(MS).await;
            }
        }
    });
    tasks.join_all().await;
    handling.abort();
    let most = most.load(Ordering::SeqCst);
    assert!((1..=50).contains(&most), "{most} were owed");
}
