//! How much goes at a time: as much as holds the writer for about a millisecond, with pauses in which
//! others get their turns.

use std::time::Duration;

/// How long one transaction of ours may hold the writer.
const HOLD: Duration = Duration::from_micros(1000);
/// Between two of them at least this long.
const PAUSE: Duration = Duration::from_millis(1);
const LEAST: u64 = 16;
const MOST: u64 = 4096;

/// Measures out the work.
pub(crate) struct Pace {
    budget: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { budget: 4 * LEAST }
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
        // Grows by doubling, shrinks at once: one slow transaction is enough.
        self.budget = fits.min(self.budget.saturating_mul(2)).clamp(LEAST, MOST);
    }

    /// How many of these, in their order, go at once: at least one.
    pub(crate) fn take(&self, weights: impl Iterator<Item = u64>) -> (usize, u64) {
        let (mut count, mut sum) = (0, 0);
        for weight in weights {
            if count > 0 && sum + weight > self.budget {
                break;
            }
            sum += weight;
            count += 1;
        }
        (count, sum)
    }

    /// Lets others through.
    pub(crate) async fn pause(&self) {
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: issue-4/retention-small-steps: a step is sized by what the last one took, towards a millisecond
    #[test]
    fn a_slow_step_makes_the_next_one_smaller() {
        let mut pace = Pace::default();
        for _ in 0..20 {
            pace.learn(pace.budget(), Duration::from_micros(pace.budget()));
        }
        assert_eq!(pace.budget(), 1000, "a microsecond each");
        pace.learn(1000, Duration::from_millis(10));
        assert_eq!(pace.budget(), 100);
        pace.learn(100, Duration::from_secs(1));
        assert_eq!(pace.budget(), LEAST);
        pace.learn(16, Duration::ZERO);
        assert_eq!(pace.budget(), 2 * LEAST);
    }

    #[test]
    fn at_least_one_goes_and_no_more_than_fit() {
        let pace = Pace { budget: 10 };
        assert_eq!(pace.take([100, 1].into_iter()), (1, 100));
        assert_eq!(pace.take([4, 4, 4].into_iter()), (2, 8));
        assert_eq!(pace.take([4].into_iter()), (1, 4));
        assert_eq!(pace.take(std::iter::empty()), (0, 0));
    }
}
