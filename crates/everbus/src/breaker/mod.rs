//! The circuit breaker: stops calls to a dependency that fails, and probes with one call at a time whether
//! it works again.
//!
//! ```text
//!            failures (see BreakerPolicy)              open_for is over
//!  Closed ───────────────────────────────▶  Open  ───────────────────────▶  HalfOpen
//!    ▲                                        ▲                              │    │
//!    │                                        └──────── the probe fails ─────┘    │
//!    └───────────────────────────── the probe succeeds ───────────────────────────┘
//! ```
//!
//! It knows nothing of events: the caller takes a [`Ticket`] for each attempt and reports its outcome.

mod policy;
mod window;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use everbus_core::{Clock, Timestamp};
use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use tokio::sync::Notify;

pub use policy::{BreakerPolicy, Criticality};
use window::{Counts, Window};

/// A caller that asks while the probe runs is told to ask again after this time. The duration of the probe is unknown;
/// callers of [`Breaker::ready`] are woken by its end.
const WHILE_PROBING: Duration = Duration::from_secs(1);

/// The state of a circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
#[non_exhaustive]
pub enum BreakerState {
    /// Attempts are made.
    Closed,
    /// No attempts are made.
    Open {
        /// When a probe may be made.
        until: Timestamp,
    },
    /// One attempt is made as a probe, and its outcome decides.
    HalfOpen,
}

impl fmt::Display for BreakerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "closed",
            Self::Open { .. } => "open",
            Self::HalfOpen => "half_open",
        })
    }
}

/// The state and the figures of a circuit breaker.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BreakerInfo {
    /// The group or the dependency it stands for.
    pub name: String,
    /// The state: `state`, and `until` while it is open.
    #[serde(flatten)]
    pub state: BreakerState,
    /// Attempts inside the window; while the breaker is not closed, the attempts before it opened.
    pub attempts: u64,
    /// Failed attempts inside the window; while the breaker is not closed, the failures before it opened
    /// plus the failed probes since.
    pub failures: u64,
    /// When it opened; `None` while it is closed.
    pub opened_at: Option<Timestamp>,
    /// How often it opened since the process started, failed probes not counted.
    pub times_opened: u64,
}

/// A change of state. Exactly one caller gets it, and notifies the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It opened.
    Opened {
        /// When a probe may be made.
        until: Timestamp,
        /// The failures that opened it, failed probes included.
        failures: u64,
        /// A probe failed: the breaker was open before.
        again: bool,
    },
    /// The probe succeeded.
    Closed,
}

/// No attempt may be made now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rejected {
    /// When to ask again; more than zero.
    pub(crate) retry_in: Duration,
}

/// One circuit breaker. Clones are the same breaker.
#[derive(Clone)]
pub(crate) struct Breaker(Arc<Shared>);

struct Shared {
    name: Box<str>,
    policy: BreakerPolicy,
    clock: Arc<dyn Clock>,
    /// Twice the generation, plus one while closed. An attempt reads it without the lock. Written under the
    /// lock.
    gate: AtomicU64,
    inner: Mutex<Inner>,
    /// Wakes the callers of [`Breaker::ready`].
    changed: Notify,
}

#[derive(Debug)]
struct Inner {
    phase: Phase,
    /// Grows with every opening and closing, so that late outcomes are recognised.
    generation: u64,
    window: Window,
    /// When it opened, while it is not closed.
    opened_at: Option<Timestamp>,
    attempts: u64,
    failures: u64,
    times_opened: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Closed,
    Open { until: Timestamp },
    HalfOpen { probing: bool },
}

impl Breaker {
    /// A closed breaker. The policy has been validated.
    pub(crate) fn new(name: &str, policy: BreakerPolicy, clock: Arc<dyn Clock>) -> Self {
        let inner = Inner {
            phase: Phase::Closed,
            generation: 0,
            window: Window::new(policy.window),
            opened_at: None,
            attempts: 0,
            failures: 0,
            times_opened: 0,
        };
        let shared = Arc::new(Shared {
            name: name.into(),
            policy,
            clock,
            gate: AtomicU64::new(let_pass(0)),
            inner: Mutex::new(inner),
            changed: Notify::new(),
        });
        let woken = Arc::downgrade(&shared);
        shared.clock.on_jump(Box::new(move || {
            if let Some(shared) = woken.upgrade() {
                shared.changed.notify_waiters();
            }
        }));
        Self(shared)
    }

    /// The group or the dependency it stands for.
    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    /// Whether both are the same breaker.
    pub(crate) fn is(&self, other: &Breaker) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// How long it stays open.
    pub(crate) fn open_for(&self) -> Duration {
        self.0.policy.open_for
    }

    /// Begins an attempt, if one is allowed now. While the breaker is half-open there is exactly one
    /// ticket: the probe.
    pub(crate) fn try_begin(&self) -> Result<Ticket, Rejected> {
        let gate = self.0.gate.load(Ordering::Acquire);
        if gate == let_pass(gate / 2) {
            return Ok(self.ticket(gate / 2, false));
        }
        let now = self.0.clock.now();
        let mut inner = self.0.lock();
        inner.look_at(now, &self.0.policy);
        match inner.phase {
            Phase::Closed => Ok(self.ticket(inner.generation, false)),
            Phase::Open { until } => Err(Rejected {
                retry_in: until.since(now),
            }),
            Phase::HalfOpen { probing: true } => Err(Rejected {
                retry_in: self.0.policy.open_for.min(WHILE_PROBING),
            }),
            Phase::HalfOpen { probing: false } => {
                inner.phase = Phase::HalfOpen { probing: true };
                Ok(self.ticket(inner.generation, true))
            }
        }
    }

    /// Waits until an attempt is allowed: closed, or half-open without a running probe.
    ///
    /// Several waiters may return for the one probe; [`try_begin`](Self::try_begin) decides which of them
    /// runs it. Dropping the future is harmless.
    pub(crate) async fn ready(&self) {
        loop {
            // Registered before the check, so that no notification between the two is lost.
            let mut changed = pin!(self.0.changed.notified());
            changed.as_mut().enable();
            match self.0.phase_now() {
                (Phase::Closed | Phase::HalfOpen { probing: false }, _) => return,
                (Phase::HalfOpen { probing: true }, _) => changed.await,
                (Phase::Open { until }, now) => {
                    // Check again in both cases.
                    let _ = tokio::time::timeout(until.since(now), changed).await;
                }
            }
        }
    }

    /// Whether it is half-open and its probe is running.
    pub(crate) fn is_probing(&self) -> bool {
        matches!(self.0.phase_now().0, Phase::HalfOpen { probing: true })
    }

    /// The current state.
    pub(crate) fn state(&self) -> BreakerState {
        self.0.phase_now().0.into()
    }

    /// The current state, with its figures.
    pub(crate) fn info(&self) -> BreakerInfo {
        let now = self.0.clock.now();
        let mut inner = self.0.lock();
        inner.look_at(now, &self.0.policy);
        let (attempts, failures) = if inner.phase == Phase::Closed {
            let counts = inner.window.counts(now);
            (counts.attempts, counts.failures)
        } else {
            (inner.attempts, inner.failures)
        };
        BreakerInfo {
            name: self.name().to_owned(),
            state: inner.phase.into(),
            attempts,
            failures,
            opened_at: inner.opened_at,
            times_opened: inner.times_opened,
        }
    }

    fn ticket(&self, generation: u64, probe: bool) -> Ticket {
        Ticket {
            shared: self.0.clone(),
            generation,
            probe,
            told: false,
        }
    }
}

impl fmt::Debug for Breaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Breaker({} {})", self.name(), self.state())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    fn phase_now(&self) -> (Phase, Timestamp) {
        let now = self.clock.now();
        let mut inner = self.lock();
        inner.look_at(now, &self.policy);
        (inner.phase, now)
    }

    /// Records an outcome.
    fn outcome(&self, generation: u64, success: bool) -> Option<Change> {
        // The clock is user code: it is not called under the lock.
        let now = self.clock.now();
        let mut inner = self.lock();
        if inner.generation != generation {
            return None;
        }
        let change = match (inner.phase, success) {
            (Phase::Closed, true) => {
                inner.window.success(now);
                None
            }
            (Phase::Closed, false) => {
                inner.window.failure(now);
                let counts = inner.window.counts(now);
                is_too_much(counts, &self.policy).then(|| {
                    inner.opened_at = Some(now);
                    inner.attempts = counts.attempts;
                    inner.failures = counts.failures;
                    inner.times_opened += 1;
                    self.open(&mut inner, now, false)
                })
            }
            // The generation is current, so this is the probe.
            (_, true) => Some(self.close(&mut inner)),
            (_, false) => {
                inner.attempts += 1;
                inner.failures += 1;
                Some(self.open(&mut inner, now, true))
            }
        };
        drop(inner);
        if change.is_some() {
            self.changed.notify_waiters();
        }
        change
    }

    fn open(&self, inner: &mut Inner, now: Timestamp, again: bool) -> Change {
        let until = now.plus(self.policy.open_for);
        inner.phase = Phase::Open { until };
        inner.generation += 1;
        self.gate
            .store(hold_back(inner.generation), Ordering::Release);
        Change::Opened {
            until,
            failures: inner.failures,
            again,
        }
    }

    fn close(&self, inner: &mut Inner) -> Change {
        inner.phase = Phase::Closed;
        inner.generation += 1;
        inner.opened_at = None;
        inner.window.clear();
        self.gate
            .store(let_pass(inner.generation), Ordering::Release);
        Change::Closed
    }

    /// The probe ended without an outcome: the next caller may probe.
    fn free(&self, generation: u64) {
        let mut inner = self.lock();
        if inner.generation == generation {
            inner.phase = Phase::HalfOpen { probing: false };
        }
        drop(inner);
        self.changed.notify_waiters();
    }
}

impl Inner {
    /// Changes an open breaker to half-open when its time is over.
    fn look_at(&mut self, now: Timestamp, policy: &BreakerPolicy) {
        let Phase::Open { until } = self.phase else {
            return;
        };
        if now >= until {
            self.phase = Phase::HalfOpen { probing: false };
        } else if until.since(now) > policy.open_for {
            // The clock was set back: do not wait longer than the policy says.
            self.phase = Phase::Open {
                until: now.plus(policy.open_for),
            };
        }
    }
}

/// Whether the last failure opens the breaker.
fn is_too_much(counts: Counts, policy: &BreakerPolicy) -> bool {
    let enough = u64::from(policy.fail_max);
    // The quotient is rounded like the parsed setting: 3 of 30 are 0.1.
    let rate = counts.failures as f64 / counts.attempts as f64;
    counts.in_a_row >= enough || (counts.failures >= enough && rate >= policy.failure_rate)
}

/// One attempt. Dropping it, as a cancelled or panicking task does, is the same as
/// [`abandon`](Self::abandon).
#[must_use = "an attempt without an outcome counts for nothing"]
pub(crate) struct Ticket {
    shared: Arc<Shared>,
    generation: u64,
    probe: bool,
    /// The outcome was reported.
    told: bool,
}

impl Ticket {
    /// Whether this is the probe of a half-open breaker.
    pub(crate) fn is_probe(&self) -> bool {
        self.probe
    }

    /// The attempt succeeded. If it is the probe, the breaker closes.
    pub(crate) fn succeeded(self) -> Option<Change> {
        self.tell(true)
    }

    /// The attempt failed. It counts only if the breaker has not opened or closed since it began.
    pub(crate) fn failed(self) -> Option<Change> {
        self.tell(false)
    }

    /// The attempt was not made, or its result says nothing. Always returns `None`; the return type matches
    /// the other two ways to end an attempt.
    pub(crate) fn abandon(self) -> Option<Change> {
        None
    }

    fn tell(mut self, success: bool) -> Option<Change> {
        let change = self.shared.outcome(self.generation, success);
        // Set only now: if the clock panicked, the drop must free the probe.
        self.told = true;
        change
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.probe && !self.told {
            self.shared.free(self.generation);
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_probe() { "probe" } else { "attempt" };
        write!(f, "Ticket({kind} of {})", self.shared.name)
    }
}

impl From<Phase> for BreakerState {
    fn from(phase: Phase) -> Self {
        match phase {
            Phase::Closed => Self::Closed,
            Phase::Open { until } => Self::Open { until },
            Phase::HalfOpen { .. } => Self::HalfOpen,
        }
    }
}

/// The gate of a closed breaker.
const fn let_pass(generation: u64) -> u64 {
    generation * 2 + 1
}

/// The gate of a breaker that is not closed.
const fn hold_back(generation: u64) -> u64 {
    generation * 2
}
