//! Each transition of the breaker, its waiters, and many threads at once.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::thread;

use everbus_core::ManualClock;
use tokio::task::JoinSet;

use super::*;

const S: Duration = Duration::from_secs(1);

struct Rig {
    clock: ManualClock,
    breaker: Breaker,
}

fn rig(policy: BreakerPolicy) -> Rig {
    policy.validate().unwrap();
    let clock = ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000));
    let breaker = Breaker::new("mailer", policy, Arc::new(clock.clone()));
    Rig { clock, breaker }
}

fn standard() -> Rig {
    rig(BreakerPolicy::default())
}

impl Rig {
    fn succeed(&self) -> Option<Change> {
        self.breaker.try_begin().unwrap().succeeded()
    }

    fn fail(&self) -> Option<Change> {
        self.breaker.try_begin().unwrap().failed()
    }

    /// Opens it with the default policy.
    fn open(&self) {
        let changes: Vec<_> = (0..5).filter_map(|_| self.fail()).collect();
        assert!(matches!(changes[..], [Change::Opened { again: false, .. }]));
    }

    /// Opens it and waits until a probe is allowed.
    fn half_open(&self) {
        self.open();
        self.clock.advance(30 * S);
        assert_eq!(self.breaker.state(), BreakerState::HalfOpen);
    }

    fn until(&self, after: Duration) -> Timestamp {
        self.clock.now().plus(after)
    }
}

// conformance: framework/breaker-opens: fail_max failures in a row open it
#[test]
fn five_failures_in_a_row_open_it_for_thirty_seconds() {
    let r = standard();
    for _ in 0..4 {
        assert_eq!(r.fail(), None);
        assert_eq!(r.breaker.state(), BreakerState::Closed);
    }
    let until = r.until(30 * S);
    let opened = Change::Opened {
        until,
        failures: 5,
        again: false,
    };
    assert_eq!(r.fail(), Some(opened));
    assert_eq!(r.breaker.state(), BreakerState::Open { until });
}

// conformance: framework/breaker-rejects: while it is open nothing is attempted
#[test]
fn while_open_every_attempt_is_rejected_with_the_time_that_is_left() {
    let r = standard();
    r.open();
    let rejected = |retry_in| Rejected { retry_in };
    assert_eq!(r.breaker.try_begin().unwrap_err(), rejected(30 * S));
    r.clock.advance(29 * S);
    assert_eq!(r.breaker.try_begin().unwrap_err(), rejected(S));
    r.clock.advance(Duration::from_micros(999_999));
    let last = Duration::from_micros(1);
    assert_eq!(r.breaker.try_begin().unwrap_err(), rejected(last));
    r.clock.advance(last);
    assert!(r.breaker.try_begin().unwrap().is_probe());
}

#[test]
fn a_success_between_failures_starts_the_row_again() {
    let r = rig(BreakerPolicy::new().failure_rate(1.0));
    for _ in 0..10 {
        assert!((0..4).all(|_| r.fail().is_none()));
        assert_eq!(r.succeed(), None);
    }
    assert!((0..4).all(|_| r.fail().is_none()));
    assert!(r.fail().is_some(), "the fifth in a row");
}

// conformance: handlers/breaker-rate: a group with few errors among many attempts stays closed
#[test]
fn one_failure_in_a_thousand_never_opens_it() {
    let r = standard();
    for n in 0..100_000 {
        let change = if n % 1000 == 0 { r.fail() } else { r.succeed() };
        assert_eq!(change, None);
    }
    let info = r.breaker.info();
    assert_eq!((info.attempts, info.failures), (100_000, 100));
}

// conformance: handlers/breaker-rate: a dependency that fails half of the time opens it
#[test]
fn a_dependency_that_fails_half_of_the_time_opens_it() {
    let r = standard();
    for _ in 0..4 {
        assert_eq!((r.succeed(), r.fail()), (None, None));
    }
    assert_eq!(r.succeed(), None);
    assert!(matches!(r.fail(), Some(Change::Opened { failures: 5, .. })));
}

#[test]
fn the_rate_is_met_exactly_at_its_boundary() {
    // No two failures are consecutive until the last, so only the rate counts.
    for (successes, opens) in [(27, true), (28, false)] {
        let r = rig(BreakerPolicy::new().fail_max(3).failure_rate(0.1));
        (0..14).for_each(|_| assert_eq!(r.succeed(), None));
        assert_eq!(r.fail(), None);
        (14..successes).for_each(|_| assert_eq!(r.succeed(), None));
        assert_eq!(r.fail(), None);
        assert_eq!(r.fail().is_some(), opens, "3 of {}", successes + 3);
    }
}

// conformance: handlers/breaker-window: failures older than the rolling window do not count
#[test]
fn failures_spread_wider_than_the_window_never_open_it() {
    let r = standard();
    for _ in 0..100 {
        assert_eq!(r.fail(), None);
        r.clock.advance(15 * S);
    }
    let info = r.breaker.info();
    assert_eq!(info.failures, 3, "those of the last 60 s");
    r.clock.advance(60 * S);
    assert_eq!(r.breaker.info().failures, 0);
}

#[test]
fn old_successes_leave_the_rate_too() {
    let r = standard();
    (0..1000).for_each(|_| assert_eq!(r.succeed(), None));
    r.clock.advance(61 * S);
    for _ in 0..4 {
        assert_eq!((r.fail(), r.succeed()), (None, None));
    }
    assert!(r.fail().is_some(), "5 of 9");
}

// conformance: framework/breaker-half-open: after open_for one probe; its success closes it
// conformance: embedded/half-open-probe: after open_for one probe; its success closes it
#[test]
fn a_probe_that_succeeds_closes_it_and_clears_the_window() {
    let r = standard();
    r.half_open();
    let probe = r.breaker.try_begin().unwrap();
    assert!(probe.is_probe());
    assert_eq!(probe.succeeded(), Some(Change::Closed));
    assert_eq!(r.breaker.state(), BreakerState::Closed);
    let info = r.breaker.info();
    assert_eq!((info.attempts, info.failures, info.opened_at), (0, 0, None));
    assert!((0..4).all(|_| r.fail().is_none()), "a fresh start");
    assert!(r.fail().is_some());
    assert_eq!(r.breaker.info().times_opened, 2);
}

// conformance: framework/breaker-half-open: the probe's failure opens it again
// conformance: embedded/half-open-probe: the probe's failure opens it again
#[test]
fn a_probe_that_fails_opens_it_again_for_as_long() {
    let r = standard();
    r.half_open();
    for failures in 6..9 {
        let change = r.fail();
        let until = r.until(30 * S);
        let opened = Change::Opened {
            until,
            failures,
            again: true,
        };
        assert_eq!(change, Some(opened));
        assert_eq!(r.breaker.state(), BreakerState::Open { until });
        assert_eq!(r.breaker.try_begin().unwrap_err().retry_in, 30 * S);
        r.clock.advance(30 * S);
    }
    assert_eq!(r.breaker.info().times_opened, 1);
}

#[test]
fn while_the_probe_runs_others_are_rejected_and_told_to_come_back() {
    let r = standard();
    r.half_open();
    let probe = r.breaker.try_begin().unwrap();
    r.clock.advance(3600 * S);
    assert_eq!(r.breaker.try_begin().unwrap_err().retry_in, S);
    assert_eq!(r.breaker.state(), BreakerState::HalfOpen);
    assert_eq!(probe.succeeded(), Some(Change::Closed));
    let short = rig(BreakerPolicy::new().fail_max(1).open_for(S / 100));
    short.fail();
    short.clock.advance(S / 100);
    let _probe = short.breaker.try_begin().unwrap();
    assert_eq!(short.breaker.try_begin().unwrap_err().retry_in, S / 100);
}

// conformance: handlers/breaker-late: an attempt that began before the opening changes nothing after it
#[test]
fn outcomes_of_attempts_that_began_before_the_opening_change_nothing() {
    let r = standard();
    let mut early: Vec<_> = (0..8).map(|_| r.breaker.try_begin().unwrap()).collect();
    let mut late = || early.pop().unwrap();
    r.open();
    let open = r.breaker.state();
    assert_eq!((late().failed(), late().succeeded()), (None, None));
    assert_eq!(r.breaker.state(), open);
    r.clock.advance(30 * S);
    assert_eq!(late().succeeded(), None, "not the probe");
    assert_eq!(r.breaker.state(), BreakerState::HalfOpen);
    let probe = r.breaker.try_begin().unwrap();
    assert_eq!((late().succeeded(), late().failed()), (None, None));
    drop(late());
    assert!(r.breaker.try_begin().is_err(), "the probe is still out");
    assert_eq!(probe.succeeded(), Some(Change::Closed));
    assert_eq!((late().failed(), late().failed()), (None, None));
    let info = r.breaker.info();
    assert_eq!((info.attempts, info.failures), (0, 0), "nor after closing");
}

// conformance: handlers/breaker-probe-dropped: a probe that is cancelled or panics makes room for the next
#[test]
fn a_probe_that_is_dropped_makes_room_for_the_next() {
    let r = standard();
    r.half_open();
    drop(r.breaker.try_begin().unwrap());
    assert_eq!(r.breaker.state(), BreakerState::HalfOpen);
    assert_eq!(r.breaker.try_begin().unwrap().abandon(), None);
    let breaker = r.breaker.clone();
    let panicked = thread::spawn(move || {
        let _probe = breaker.try_begin().unwrap();
        std::panic::resume_unwind(Box::new("the handler panicked"));
    });
    assert!(panicked.join().is_err());
    let probe = r.breaker.try_begin().unwrap();
    assert!(probe.is_probe());
    assert_eq!(probe.succeeded(), Some(Change::Closed));
}

#[test]
fn an_abandoned_attempt_counts_for_nothing() {
    let r = standard();
    (0..4).for_each(|_| assert_eq!(r.fail(), None));
    assert_eq!(r.breaker.try_begin().unwrap().abandon(), None);
    drop(r.breaker.try_begin().unwrap());
    assert_eq!(r.breaker.info().attempts, 4);
    assert!(r.fail().is_some(), "it did not break the row either");
}

#[test]
fn a_clock_that_panics_does_not_keep_the_probe() {
    #[derive(Debug)]
    struct Fragile(ManualClock, AtomicBool);
    impl Clock for Fragile {
        fn now(&self) -> Timestamp {
            assert!(!self.1.load(Ordering::SeqCst), "out of order");
            self.0.now()
        }
    }
    let manual = ManualClock::default();
    let clock = Arc::new(Fragile(manual.clone(), AtomicBool::new(false)));
    let breaker = Breaker::new("mailer", BreakerPolicy::new().fail_max(1), clock.clone());
    assert!(breaker.try_begin().unwrap().failed().is_some());
    manual.advance(30 * S);
    let probe = breaker.try_begin().unwrap();
    clock.1.store(true, Ordering::SeqCst);
    assert!(crate::guard::contain(|| probe.succeeded()).is_err());
    clock.1.store(false, Ordering::SeqCst);
    assert!(breaker.try_begin().unwrap().is_probe());
}

#[test]
fn a_clock_that_is_set_back_never_makes_the_wait_longer_than_open_for() {
    let r = standard();
    r.open();
    r.clock.set(r.clock.now().minus(3600 * S));
    assert_eq!(r.breaker.try_begin().unwrap_err().retry_in, 30 * S);
    r.clock.advance(30 * S);
    let probe = r.breaker.try_begin().unwrap();
    r.clock.set(Timestamp::EPOCH);
    assert_eq!(r.breaker.state(), BreakerState::HalfOpen, "it stays so");
    assert_eq!(probe.succeeded(), Some(Change::Closed));
    // Failures at the new time are counted as usual.
    assert!((0..4).all(|_| r.fail().is_none()));
    assert!(r.fail().is_some());
}

#[test]
fn a_breaker_is_shown_with_what_a_dashboard_needs() {
    let r = standard();
    assert_eq!(r.succeed(), None);
    let shown = |r: &Rig| serde_json::to_value(r.breaker.info()).unwrap();
    let closed = serde_json::json!({
        "name": "mailer", "state": "closed", "attempts": 1, "failures": 0,
        "opened_at": null, "times_opened": 0,
    });
    assert_eq!(shown(&r), closed);
    r.open();
    let open = serde_json::json!({
        "name": "mailer", "state": "open", "until": r.until(30 * S), "attempts": 6, "failures": 5,
        "opened_at": r.clock.now(), "times_opened": 1,
    });
    assert_eq!(shown(&r), open);
    r.clock.advance(30 * S);
    assert_eq!(shown(&r)["state"], "half_open");
    assert_eq!(format!("{:?}", r.breaker), "Breaker(mailer half_open)");
}

// conformance: handlers/breaker-one-probe: of several callers, exactly one gets the half-open probe
// conformance: embedded/half-open-probe: of several callers, exactly one gets the half-open probe
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_64_concurrent_tasks_exactly_one_is_the_probe() {
    for _ in 0..50 {
        let r = standard();
        r.half_open();
        let mut tasks = JoinSet::new();
        for _ in 0..64 {
            let breaker = r.breaker.clone();
            tasks.spawn(async move { breaker.try_begin() });
        }
        let answers = tasks.join_all().await;
        let probes: Vec<_> = answers.into_iter().filter_map(Result::ok).collect();
        assert_eq!(probes.len(), 1);
        assert!(probes[0].is_probe());
    }
}

/// Awaits a future that must complete soon; the time is virtual.
async fn soon<T>(future: impl Future<Output = T>) -> T {
    let limit = tokio::time::timeout(S, future).await;
    limit.expect("it was not woken")
}

/// Polls a future once.
macro_rules! is_pending {
    ($future:expr) => {
        std::future::poll_fn(|cx| std::task::Poll::Ready($future.as_mut().poll(cx).is_pending()))
            .await
    };
}

#[tokio::test(start_paused = true)]
async fn waiting_callers_are_woken_by_the_clock_and_by_the_end_of_the_probe() {
    let r = standard();
    r.breaker.ready().await;
    r.open();
    let mut first = Box::pin(r.breaker.ready());
    let mut second = Box::pin(r.breaker.ready());
    assert!(is_pending!(first) && is_pending!(second));
    r.clock.advance(29 * S);
    assert!(is_pending!(first), "not before its time");
    let both = tokio::spawn({
        let (one, two) = (r.breaker.clone(), r.breaker.clone());
        async move { tokio::join!(one.ready(), two.ready()) }
    });
    tokio::task::yield_now().await;
    r.clock.advance(S);
    soon(both).await.unwrap();
    assert!(!is_pending!(first) && !is_pending!(second));
    // The probe is running; each way in which it ends wakes the waiters.
    let probe = r.breaker.try_begin().unwrap();
    let mut third = Box::pin(r.breaker.ready());
    assert!(is_pending!(third));
    drop(probe);
    soon(third).await;
    let probe = r.breaker.try_begin().unwrap();
    let mut fourth = Box::pin(r.breaker.ready());
    assert!(is_pending!(fourth));
    assert!(matches!(probe.failed(), Some(Change::Opened { .. })));
    assert!(is_pending!(fourth), "open again");
    r.clock.advance(30 * S);
    soon(fourth).await;
    let probe = r.breaker.try_begin().unwrap();
    let mut fifth = Box::pin(r.breaker.ready());
    assert!(is_pending!(fifth));
    assert_eq!(probe.succeeded(), Some(Change::Closed));
    soon(fifth).await;
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_flows_wakes_waiters_without_jumps() {
    /// The time of the tokio timer, which never reports a jump.
    #[derive(Debug)]
    struct Flowing(tokio::time::Instant);
    impl Clock for Flowing {
        fn now(&self) -> Timestamp {
            Timestamp::EPOCH.plus(self.0.elapsed())
        }
    }
    let start = tokio::time::Instant::now();
    let policy = BreakerPolicy::new().fail_max(1);
    let breaker = Breaker::new("mailer", policy, Arc::new(Flowing(start)));
    assert!(breaker.try_begin().unwrap().failed().is_some());
    // Dropping a wait is harmless.
    assert!(tokio::time::timeout(S, breaker.ready()).await.is_err());
    tokio::time::timeout(60 * S, breaker.ready()).await.unwrap();
    assert_eq!(start.elapsed(), 30 * S);
    assert!(breaker.try_begin().unwrap().is_probe());
}

#[tokio::test(start_paused = true)]
async fn waiting_does_not_spin() {
    /// Counts how often it is called.
    #[derive(Debug)]
    struct Counting(ManualClock, AtomicUsize);
    impl Clock for Counting {
        fn now(&self) -> Timestamp {
            self.1.fetch_add(1, Ordering::SeqCst);
            self.0.now()
        }
        fn on_jump(&self, wake: Box<dyn Fn() + Send + Sync>) {
            self.0.on_jump(wake);
        }
    }
    let clock = Arc::new(Counting(ManualClock::default(), AtomicUsize::new(0)));
    let policy = BreakerPolicy::new().fail_max(1);
    let breaker = Breaker::new("mailer", policy, clock.clone());
    assert!(breaker.try_begin().unwrap().failed().is_some());
    clock.1.store(0, Ordering::SeqCst);
    let minutes = tokio::time::timeout(600 * S, breaker.ready()).await;
    assert!(minutes.is_err(), "the clock stood still");
    let asked = clock.1.load(Ordering::SeqCst);
    assert!(asked <= 22, "once per open_for, not {asked} times");
}

// conformance: handlers/breaker-changes-once: each opening and closing is told to exactly one caller
#[test]
fn under_many_threads_there_is_one_probe_and_each_change_is_told_once() {
    let r = rig(BreakerPolicy::new().fail_max(3).open_for(S / 1000));
    let probes = AtomicUsize::new(0);
    // Each change with the generation that its ticket had.
    let changes = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for seed in 1..=4u64 {
            let (r, probes, changes) = (&r, &probes, &changes);
            scope.spawn(move || {
                let mut random = seed;
                for _ in 0..30_000 {
                    // A linear congruential generator; the high bits are the random ones.
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let Ok(ticket) = r.breaker.try_begin() else {
                        r.clock.advance(S / 10_000);
                        thread::yield_now();
                        continue;
                    };
                    let (probe, generation) = (ticket.is_probe(), ticket.generation);
                    if probe {
                        assert_eq!(probes.fetch_add(1, Ordering::SeqCst), 0, "a second probe");
                        thread::yield_now();
                        probes.fetch_sub(1, Ordering::SeqCst);
                    }
                    let change = match (random >> 60) % 4 {
                        0 => ticket.abandon(),
                        1 => ticket.succeeded(),
                        _ => ticket.failed(),
                    };
                    changes.lock().extend(change.map(|c| (generation, c)));
                }
            });
        }
    });
    let mut changes = changes.into_inner();
    assert!(changes.len() > 100, "only {} changes", changes.len());
    changes.sort_unstable_by_key(|(generation, _)| *generation);
    let mut closed = true;
    for (expected, (generation, change)) in (0..).zip(changes) {
        assert_eq!(generation, expected, "each change once, none missing");
        match change {
            Change::Closed => assert!(!closed),
            Change::Opened { again, .. } => assert_eq!(again, !closed),
        }
        closed = change == Change::Closed;
    }
}
