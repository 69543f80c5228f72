//! How much retention removes at a time: so much that the writer is held for a fraction of a millisecond,
//! with pauses in which other processes can write.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long one transaction of retention may hold the writer: about as long as a commit takes, so that a
/// waiting publish hardly notices.
const HOLD: Duration = Duration::from_micros(300);
/// A transaction stops after this time, once its current piece of work is done; the rest goes into the next
/// one. Retention may hold the writer for at most two milliseconds, so this leaves one for that piece and the
/// commit.
const SLICE: Duration = Duration::from_millis(1);
/// After this much work comes a pause. In this process, publishes go first in any case; another process has
/// to find the file unlocked.
const BURST: Duration = Duration::from_millis(5);
const PAUSE: Duration = Duration::from_millis(1);
const LEAST: u64 = 16;
const MOST: u64 = 4096;

/// The time since some moment, by a monotonic clock.
pub(crate) type Ticks = Arc<dyn Fn() -> Duration + Send + Sync>;

pub(crate) fn real_time() -> Ticks {
    let start = Instant::now();
    Arc::new(move || start.elapsed())
}

/// The time that one transaction may work. It is checked between two pieces of work, never before the first,
/// so every transaction makes progress.
pub(crate) struct Slice {
    ticks: Ticks,
    began: Duration,
}

impl Slice {
    pub(crate) fn begin(ticks: Ticks) -> Self {
        let began = ticks();
        Self { ticks, began }
    }

    pub(crate) fn took(&self) -> Duration {
        (self.ticks)().saturating_sub(self.began)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.took() >= SLICE
    }
}

/// Sizes the steps of retention.
pub(crate) struct Pace {
    budget: u64,
    since: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            budget: 2 * LEAST,
            since: Instant::now(),
        }
    }
}

impl Pace {
    /// How much the next transaction may remove, counted in bare events.
    pub(crate) fn budget(&self) -> u64 {
        self.budget
    }

    /// Adapts the size of the next step to the duration of the last one.
    pub(crate) fn learn(&mut self, weight: u64, took: Duration) {
        if weight < self.budget / 2 && took < HOLD {
            // A small step says little about the cost of a full one.
            return;
        }
        let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        let hold = u64::try_from(HOLD.as_micros()).unwrap_or(1);
        let fits = weight.saturating_mul(hold) / took;
        // At most half or double: a single step may have been interrupted by the machine.
        let (less, more) = (self.budget / 2, self.budget.saturating_mul(2));
        self.budget = fits.clamp(less, more).clamp(LEAST, MOST);
    }

    /// How many of these, in order, go into the next step: at least one.
    pub(crate) fn take(&self, weights: impl Iterator<Item = u64>) -> usize {
        let (mut count, mut sum) = (0, 0_u64);
        for weight in weights {
            sum = sum.saturating_add(weight);
            if count > 0 && sum > self.budget {
                break;
            }
            count += 1;
        }
        count
    }

    /// Lets other processes write.
    pub(crate) async fn pause(&mut self) {
        if self.since.elapsed() < BURST {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(PAUSE).await;
            self.since = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: memory/retention-small-steps: a step is sized by what the last one took, towards a fraction of a millisecond
    #[test]
    fn a_slow_step_makes_the_next_one_smaller() {
        let mut pace = Pace::default();
        for _ in 0..20 {
            pace.learn(pace.budget(), Duration::from_micros(pace.budget()));
        }
        assert_eq!(pace.budget(), 300, "a microsecond each");
        pace.learn(300, Duration::from_micros(600));
        assert_eq!(pace.budget(), 150);
        pace.learn(150, Duration::from_secs(1));
        assert_eq!(pace.budget(), 75, "not all at once");
        for _ in 0..10 {
            pace.learn(pace.budget(), Duration::from_secs(1));
        }
        assert_eq!(pace.budget(), LEAST);
        pace.learn(LEAST, Duration::ZERO);
        assert_eq!(pace.budget(), 2 * LEAST);
        pace.learn(1, Duration::ZERO);
        assert_eq!(pace.budget(), 2 * LEAST, "a rest says nothing");
    }

    // conformance: memory/retention-small-steps: one thing of any weight makes no step larger than itself
    #[test]
    fn at_least_one_goes_and_no_more_than_fit() {
        let pace = Pace {
            budget: 10,
            ..Pace::default()
        };
        assert_eq!(pace.take([100, 1].into_iter()), 1);
        assert_eq!(
            pace.take([1, 100].into_iter()),
            1,
            "what is heavy goes alone"
        );
        assert_eq!(pace.take([4, 4, 4].into_iter()), 2);
        assert_eq!(pace.take([4].into_iter()), 1);
        assert_eq!(pace.take(std::iter::empty()), 0);
    }
}
