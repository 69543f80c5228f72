//! Time as a dependency, so that tests can move it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::time::Timestamp;
use parking_lot::Mutex;

/// The source of the current time.
///
/// Due times, leases and ages use it; the timeout of a running handler does not, because it measures real
/// work.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The current time.
    fn now(&self) -> Timestamp;

    /// Calls `wake` whenever the time jumps, so that sleeping tasks check again. A clock that never jumps
    /// never calls it.
    fn on_jump(&self, wake: Box<dyn Fn() + Send + Sync>) {
        drop(wake);
    }
}

/// The clock of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let micros = match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
            Err(before) => {
                i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |micros| -micros)
            }
        };
        Timestamp::from_micros(micros)
    }
}

type Wakers = Mutex<Vec<Box<dyn Fn() + Send + Sync>>>;

/// A clock that stands still until it is moved. Clones share the same time.
#[derive(Clone)]
pub struct ManualClock {
    micros: Arc<AtomicI64>,
    wakers: Arc<Wakers>,
}

impl ManualClock {
    /// A clock that stands at `now`.
    pub fn new(now: Timestamp) -> Self {
        Self {
            micros: Arc::new(AtomicI64::new(now.as_micros())),
            wakers: Arc::default(),
        }
    }

    /// Moves the time forward.
    pub fn advance(&self, by: Duration) {
        self.set(self.now().plus(by));
    }

    /// Sets the time, backwards too.
    pub fn set(&self, now: Timestamp) {
        self.micros.store(now.as_micros(), Ordering::SeqCst);
        let wakers = self.wakers.lock();
        wakers.iter().for_each(|wake| wake());
    }
}

impl Default for ManualClock {
    /// Stands at the current time of the system.
    fn default() -> Self {
        Self::new(SystemClock.now())
    }
}

impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ManualClock({})", self.now())
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.micros.load(Ordering::SeqCst))
    }

    fn on_jump(&self, wake: Box<dyn Fn() + Send + Sync>) {
        self.wakers.lock().push(wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_moves_only_when_told_and_wakes_sleepers() {
        let clock = ManualClock::new(Timestamp::EPOCH);
        let woken = Arc::new(AtomicI64::new(0));
        let count = woken.clone();
        clock.on_jump(Box::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
        }));
        let other = clock.clone();
        other.advance(Duration::from_secs(5));
        assert_eq!(clock.now().as_micros(), 5_000_000);
        clock.set(Timestamp::EPOCH);
        assert_eq!(other.now(), Timestamp::EPOCH);
        assert_eq!(woken.load(Ordering::SeqCst), 2);
    }
}
