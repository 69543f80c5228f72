//! How much goes at a time: as much as holds the writer for a fraction of a millisecond, with pauses in
//! which other processes get their turns.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long one transaction of ours may hold the writer: about as long as a commit takes, so that a
/// publish which has to wait for it hardly notices.
const HOLD: Duration = Duration::from_micros(300);
/// Whatever was planned for a transaction, it ends with the piece of work it is at when so much time has
/// passed: the rest goes in the next. Of the two milliseconds that nobody may hold the writer for, this
/// leaves one for that piece and the commit.
const SLICE: Duration = Duration::from_millis(1);
/// After so much work comes a pause of so long. Whoever publishes in this process goes before us in any
/// case; another process has to find the file free.
const BURST: Duration = Duration::from_millis(5);
const PAUSE: Duration = Duration::from_millis(1);
const LEAST: u64 = 16;
const MOST: u64 = 4096;

/// The time since some moment, by a clock that never goes back.
pub(crate) type Ticks = Arc<dyn Fn() -> Duration + Send + Sync>;

pub(crate) fn real_time() -> Ticks {
    let start = Instant::now();
    Arc::new(move || start.elapsed())
}

/// The time that one transaction may work. It is asked between two pieces of work, never before the
/// first, so that every transaction gets something done.
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

/// Measures out the work.
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
    /// How much the next transaction may do, in the weight of bare events.
    pub(crate) fn budget(&self) -> u64 {
        self.budget
    }

    /// So much work took so long: the next one is sized after it.
    pub(crate) fn learn(&mut self, weight: u64, took: Duration) {
        if weight < self.budget / 2 && took < HOLD {
            // A small rest says little about a whole step.
            return;
        }
        let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        let hold = u64::try_from(HOLD.as_micros()).unwrap_or(1);
        let fits = weight.saturating_mul(hold) / took;
        // Up and down by halves at most: one step that the machine interrupted says little either.
        let (less, more) = (self.budget / 2, self.budget.saturating_mul(2));
        self.budget = fits.clamp(less, more).clamp(LEAST, MOST);
    }

    /// How many of these, in their order, go at once: at least one.
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

    /// Lets others through.
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
