//! The test bus: a complete bus in the test's process, on virtual time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{
    Clock, Code, Cursor, Error, EventState, IntoEvent, ManualClock, Result, Timestamp,
};

use super::builder::TestBusBuilder;
use super::control::Control;
use super::idle::{Gates, Look};
use super::journal::Journal;
use super::report::{Fate, Report};
use crate::runtime::bus::Bus;
use crate::runtime::receipt::Receipt;
use crate::runtime::router::Router;
use crate::runtime::shutdown::Shutdown;

/// More moves of the clock than this without a finished event mean an endless retry.
const MOST_MOVES: usize = 1000;
/// More moves than this in one `advance` mean that the waits are too short.
const MOST_MOVES_AHEAD: usize = 100_000;
/// Most changes send a notification; this is how often the others are polled.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(16);
/// The longest poll interval when the test has paused tokio's time: waiting costs nothing then, polling
/// does.
const LONGEST_STOPPED_WAIT: Duration = Duration::from_secs(4);

/// A bus for tests: in process, on the memory engine, with a clock that stands still until it is moved.
///
/// Events go through the whole pipeline. [`publish`](Self::publish) returns when all due events have been
/// handled, including events that handlers published; retries wait until [`advance`](Self::advance) moves
/// the clock. Only the timeout of a handler uses real time.
///
/// ```
/// use std::time::Duration;
/// use everbus::testing::{Fate, TestBus};
/// use everbus::{Json, Router, to};
///
/// async fn greet(Json(name): Json<String>) {
///     println!("hello {name}");
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let bus = TestBus::new(Router::new().on("user.created", to(greet).name("greet"))).await?;
/// bus.fail_next(1);
/// let report = bus.publish(("user.created", "Ada")).await?;
/// assert!(matches!(report.fate("(unnamed)"), Some(Fate::Retrying { .. })));
///
/// bus.advance(Duration::from_secs(1)).await?; // no test waits a second for this
/// bus.assert_handled(report.id());
/// assert_eq!(bus.calls("greet"), 2);
/// bus.assert_no_dead_letters().await;
/// # Ok(())
/// # }
/// ```
pub struct TestBus {
    parts: Parts,
}

pub(super) struct Parts {
    pub(super) bus: Bus,
    pub(super) clock: ManualClock,
    pub(super) journal: Arc<Journal>,
    pub(super) control: Control,
    pub(super) gates: Gates,
    /// Events up to here existed before the test.
    pub(super) began_after: Cursor,
    pub(super) patience: Duration,
}

impl TestBus {
    /// A started bus with the default settings and this router.
    pub async fn new(router: Router) -> Result<Self> {
        Self::builder().open(router).await
    }

    /// Begins a test bus with custom settings, or on a real engine.
    pub fn builder() -> TestBusBuilder {
        TestBusBuilder::default()
    }

    pub(super) fn of(parts: Parts) -> Self {
        Self { parts }
    }

    /// The bus itself.
    pub fn bus(&self) -> &Bus {
        &self.parts.bus
    }

    /// The clock. Moving it by hand while an event is in flight ends leases, as in a process that was
    /// stopped; [`advance`](Self::advance) does not.
    pub fn clock(&self) -> &ManualClock {
        &self.parts.clock
    }

    /// The virtual time.
    pub fn now(&self) -> Timestamp {
        self.parts.clock.now()
    }

    pub(super) fn journal(&self) -> &Journal {
        &self.parts.journal
    }

    pub(super) fn gates(&self) -> &Gates {
        &self.parts.gates
    }

    pub(super) fn began_after(&self) -> &Cursor {
        &self.parts.began_after
    }

    /// Publishes an event, waits until all due events have been handled, in all groups and with all events
    /// that handlers published, and reports what happened to the event.
    pub async fn publish(&self, event: impl IntoEvent) -> Result<Report> {
        let receipt = self.publish_only(event).await?;
        self.settle().await?;
        self.report(&receipt).await
    }

    /// Publishes an event and does not wait.
    pub async fn publish_only(&self, event: impl IntoEvent) -> Result<Receipt> {
        self.bus().publish(event).await
    }

    /// The current state of an event.
    pub async fn report(&self, receipt: &Receipt) -> Result<Report> {
        let mut report = self.journal().report(receipt.id(), receipt.position())?;
        let is_open = |fate: &Fate| matches!(fate, Fate::Waiting | Fate::Retrying { .. });
        if !report.groups.iter().any(|happened| is_open(&happened.fate)) {
            return Ok(report);
        }
        // Events that the engine settled by itself: dropped to make room, or without a handler.
        let states = self
            .bus()
            .engine()
            .lookup()?
            .states(receipt.position())
            .await?;
        for happened in report.groups.iter_mut().filter(|h| is_open(&h.fate)) {
            let state = states.iter().find(|state| state.group == happened.group);
            match state.map(|state| state.state) {
                Some(EventState::Done) => {
                    happened.fate = Fate::Skipped {
                        reason: "by the engine".to_owned(),
                    };
                }
                Some(EventState::Dlq) => happened.fate = Fate::DeadLettered,
                _ => {}
            }
        }
        Ok(report)
    }

    /// Waits until nothing is left to do now: no handler runs, and all waiting events are due later.
    /// Background tasks of handlers are unknown to the bus and are not waited for.
    ///
    /// Ends with `Timeout` if this takes longer than the patience of the test bus; the error says what was
    /// still to be done.
    pub async fn settle(&self) -> Result<()> {
        self.when_idle().await.map(drop)
    }

    /// Moves the virtual clock forward, from one due retry to the next, and at each stop waits until all
    /// due events have been handled. In the end the clock has moved by this much.
    pub async fn advance(&self, by: Duration) -> Result<()> {
        let end = self.now().plus(by);
        for _ in 0..MOST_MOVES_AHEAD {
            let next = self.when_idle().await?;
            if self.now() >= end {
                return Ok(());
            }
            self.clock().set(next.map_or(end, |next| next.min(end)));
        }
        Err(never_ends(MOST_MOVES_AHEAD))
    }

    /// Moves the virtual clock until nothing waits any more: every event is handled, skipped or
    /// dead-lettered.
    pub async fn run_to_end(&self) -> Result<()> {
        let (mut moves, mut ended) = (0, 0);
        while let Some(next) = self.when_idle().await? {
            let now_ended = self.journal().ended();
            moves = if now_ended > ended { 0 } else { moves + 1 };
            ended = now_ended;
            if moves > MOST_MOVES {
                return Err(never_ends(MOST_MOVES));
            }
            self.clock().set(next);
        }
        Ok(())
    }

    /// Makes the next calls of any handler fail, this many of them, without running the handler. The
    /// failure is retried.
    pub fn fail_next(&self, calls: usize) {
        self.parts.control.fail_next(calls);
    }

    /// Makes the next calls of one handler fail, in all groups that have a handler of this name.
    ///
    /// # Panics
    ///
    /// If there is no such handler.
    #[track_caller]
    pub fn fail_next_in(&self, handler: &str, calls: usize) {
        self.check_name(handler);
        self.parts.control.fail_next_in(handler, calls);
    }

    /// How often a handler was called, including retries and calls that were made to fail. Its name is the
    /// given one, else its pattern; handlers with the same name in several groups count together.
    ///
    /// # Panics
    ///
    /// If there is no such handler.
    #[track_caller]
    pub fn calls(&self, handler: &str) -> usize {
        self.check_name(handler);
        self.parts.control.calls(handler)
    }

    #[track_caller]
    fn check_name(&self, handler: &str) {
        let known = self.journal().handlers();
        assert!(
            known.contains(handler),
            "there is no handler {handler:?}; there are {known:?}"
        );
    }

    /// Shuts the bus down, for tests that open its data afterwards.
    pub async fn shutdown(self) -> Result<Shutdown> {
        self.bus().shutdown().await
    }

    /// Waits until nothing is left to do. Returns when the next event is due.
    async fn when_idle(&self) -> Result<Option<Timestamp>> {
        // In real time, also if the test has paused tokio's time.
        let began = Instant::now();
        let mut wait = SHORTEST_WAIT;
        loop {
            let mut changed = std::pin::pin!(self.journal().changed.notified());
            changed.as_mut().enable();
            let busy = match self.look().await? {
                Look::Idle { next } => {
                    self.journal().catch_up().await?;
                    return Ok(next);
                }
                Look::Busy(busy) => busy,
            };
            if began.elapsed() > self.parts.patience {
                let what = format!(
                    "the bus was not idle within {:?}: {busy}",
                    self.parts.patience
                );
                return Err(Error::new(Code::Timeout, what).hint(
                    "a handler that waits for something, or events that cause each other for ever",
                ));
            }
            // Some changes send no notification, for example counting.
            let waiting = Instant::now();
            if tokio::time::timeout(wait, changed).await.is_err() {
                let stopped = waiting.elapsed() < wait / 2;
                wait = (wait * 2).min(if stopped {
                    LONGEST_STOPPED_WAIT
                } else {
                    LONGEST_WAIT
                });
            }
        }
    }
}

fn never_ends(moves: usize) -> Error {
    let what = format!("after {moves} moves of the clock something is still due later");
    Error::new(Code::Timeout, what)
        .hint("a handler that fails for ever, or a critical one whose dependency stays down")
}

impl std::fmt::Debug for TestBus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TestBus")
            .field("bus", &self.parts.bus)
            .field("now", &self.now())
            .finish_non_exhaustive()
    }
}
