//! How much retention removes at a time: as much as fits into a slice of the writer's time. After each step the
//! writer rests ([`Patience`](crate::writer::Patience)), so that other commands and other processes can write.

use std::time::{Duration, Instant};

/// How long one transaction of retention works: about as long as a commit takes, so that a waiting publish
/// hardly notices. The piece of work that is under way when the time is over is finished.
pub(crate) const SLICE: Duration = Duration::from_micros(300);
/// The largest step, counted in bare events.
pub(crate) const STEP: u64 = 1024;

/// The time that one transaction may work. It is checked between two pieces of work, never before the first,
/// so every transaction makes progress.
#[derive(Clone, Copy)]
pub(crate) struct Slice {
    began: Instant,
    length: Duration,
}

impl Slice {
    pub(crate) fn begin(length: Duration) -> Self {
        let began = Instant::now();
        Self { began, length }
    }

    pub(crate) fn took(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.took() >= self.length
    }
}

/// How many of these, in order, go into the next step: at least one.
pub(crate) fn take(weights: impl Iterator<Item = u64>) -> usize {
    let (mut count, mut sum) = (0, 0_u64);
    for weight in weights {
        sum = sum.saturating_add(weight);
        if count > 0 && sum > STEP {
            break;
        }
        count += 1;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: memory/retention-small-steps: one thing of any weight makes no step larger than itself
    #[test]
    fn at_least_one_goes_and_no_more_than_fit() {
        let third = STEP / 3 + 1;
        for (weights, count) in [
            (vec![10 * STEP, 1], 1),
            (vec![1, 10 * STEP], 1),
            (vec![third, third, third], 2),
            (vec![third], 1),
            (vec![], 0),
        ] {
            assert_eq!(take(weights.iter().copied()), count, "{weights:?}");
        }
    }
}
