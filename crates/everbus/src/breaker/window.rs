//! The rolling window of a breaker: recent attempts and failures, in time buckets.
//!
//! It takes a few hundred bytes under any load. A success costs one increment.

use std::time::Duration;

use everbus_core::Timestamp;

/// The number of time buckets in the window.
pub(super) const BUCKETS: usize = 30;

/// The attempts of one time bucket.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    successes: u64,
    failures: u64,
    /// Failures after the last success of this bucket.
    tail: u64,
}

/// The counts inside the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// All attempts.
    pub(super) attempts: u64,
    /// Those that failed.
    pub(super) failures: u64,
    /// The last consecutive failures.
    pub(super) in_a_row: u64,
}

/// A rolling window of attempts.
#[derive(Clone, Debug)]
pub(super) struct Window {
    step: i64,
    /// The time slot of the newest bucket.
    newest: i64,
    /// The index of the newest bucket in the ring.
    head: usize,
    ring: [Bucket; BUCKETS],
}

impl Window {
    /// An empty window of this length.
    pub(super) fn new(length: Duration) -> Self {
        let micros = i64::try_from(length.as_micros()).unwrap_or(i64::MAX);
        Self {
            step: (micros / BUCKETS as i64).max(1),
            newest: 0,
            head: 0,
            ring: [Bucket::default(); BUCKETS],
        }
    }

    /// Empties the window.
    pub(super) fn clear(&mut self) {
        self.ring = [Bucket::default(); BUCKETS];
    }

    /// An attempt succeeded.
    pub(super) fn success(&mut self, now: Timestamp) {
        let bucket = self.bucket(now);
        bucket.successes += 1;
        bucket.tail = 0;
    }

    /// An attempt failed.
    pub(super) fn failure(&mut self, now: Timestamp) {
        let bucket = self.bucket(now);
        bucket.failures += 1;
        bucket.tail += 1;
    }

    /// The counts inside the window now.
    pub(super) fn counts(&mut self, now: Timestamp) -> Counts {
        self.roll(now);
        let mut counts = Counts::default();
        let mut unbroken = true;
        // From the newest bucket back.
        for age in 0..BUCKETS {
            let bucket = &self.ring[(self.head + BUCKETS - age) % BUCKETS];
            counts.attempts += bucket.successes + bucket.failures;
            counts.failures += bucket.failures;
            if unbroken {
                counts.in_a_row += bucket.tail;
                unbroken = bucket.successes == 0;
            }
        }
        counts
    }

    fn bucket(&mut self, now: Timestamp) -> &mut Bucket {
        self.roll(now);
        &mut self.ring[self.head]
    }

    /// Moves the newest bucket to `now` and empties the expired buckets.
    fn roll(&mut self, now: Timestamp) {
        let slot = now.as_micros().div_euclid(self.step);
        let ahead = slot.saturating_sub(self.newest);
        match usize::try_from(ahead) {
            Ok(0) => {}
            Ok(ahead) if ahead < BUCKETS => {
                for _ in 0..ahead {
                    self.head = (self.head + 1) % BUCKETS;
                    self.ring[self.head] = Bucket::default();
                }
                self.newest = slot;
            }
            // One slot back: another thread read the clock a moment earlier.
            Err(_) if ahead == -1 => {}
            // The clock was set back: the buckets keep their age; otherwise they would stay until the clock
            // catches up.
            Err(_) if ahead < 0 => self.newest = slot,
            _ => {
                self.clear();
                self.newest = slot;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_micros(seconds * 1_000_000)
    }

    fn window() -> Window {
        Window::new(Duration::from_secs(60))
    }

    fn counts(attempts: u64, failures: u64, in_a_row: u64) -> Counts {
        Counts {
            attempts,
            failures,
            in_a_row,
        }
    }

    #[test]
    fn a_row_of_failures_reaches_back_over_quiet_time_and_ends_at_a_success() {
        let mut w = window();
        w.failure(at(100));
        w.success(at(101));
        w.failure(at(101));
        w.failure(at(120));
        w.failure(at(140));
        assert_eq!(w.counts(at(140)), counts(5, 4, 3));
        w.success(at(141));
        assert_eq!(w.counts(at(141)), counts(6, 4, 0));
    }

    #[test]
    fn attempts_leave_when_they_are_as_old_as_the_window() {
        let mut w = window();
        w.failure(at(100));
        w.success(at(110));
        w.failure(at(130));
        assert_eq!(w.counts(at(158)), counts(3, 2, 1));
        assert_eq!(w.counts(at(160)), counts(2, 1, 1), "the first is gone");
        assert_eq!(w.counts(at(188)), counts(1, 1, 1));
        assert_eq!(w.counts(at(190)), counts(0, 0, 0));
        w.failure(at(190));
        assert_eq!(w.counts(at(1_000_000)), counts(0, 0, 0));
    }

    #[test]
    fn a_clock_set_back_keeps_what_is_known_at_its_age() {
        let mut w = window();
        w.failure(at(100_000));
        w.failure(at(100_030));
        assert_eq!(w.counts(at(500)), counts(2, 2, 2), "an old clock");
        assert_eq!(w.counts(at(528)), counts(2, 2, 2));
        assert_eq!(w.counts(at(530)), counts(1, 1, 1));
        assert_eq!(w.counts(at(560)), counts(0, 0, 0));
        // And far forward again.
        w.failure(at(560));
        assert_eq!(w.counts(at(100_000)), counts(0, 0, 0));
    }

    #[test]
    fn threads_that_read_the_clock_out_of_order_do_not_age_the_window() {
        let mut w = window();
        for n in 0..100 {
            w.failure(at(if n % 2 == 0 { 202 } else { 200 }));
        }
        assert_eq!(w.counts(at(202)), counts(100, 100, 100));
    }

    #[test]
    fn the_ends_of_time_are_no_trouble() {
        let mut w = Window::new(Duration::from_nanos(1));
        for t in [i64::MIN, i64::MAX, i64::MIN, 0, 1, -1] {
            w.failure(Timestamp::from_micros(t));
            assert!(w.counts(Timestamp::from_micros(t)).failures >= 1);
        }
        let mut w = Window::new(Duration::MAX);
        w.success(Timestamp::from_micros(i64::MAX));
        w.failure(Timestamp::from_micros(i64::MIN));
        assert_eq!(w.counts(Timestamp::EPOCH), counts(2, 1, 1));
    }
}
