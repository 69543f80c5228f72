//! A histogram of durations in fixed memory: sixteen buckets per power of two, so that any quantile is
//! within 3.2 % of the true one. Recording is one atomic addition.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Powers of two are split into `1 << SPLIT` buckets of the same width.
const SPLIT: u32 = 4;
const PER_OCTAVE: usize = 1 << SPLIT;
/// Durations are distinguished below `1 << OCTAVES` nanoseconds, 1.6 days.
const OCTAVES: u32 = 47;
const BUCKETS: usize = (OCTAVES - SPLIT + 1) as usize * PER_OCTAVE;

/// Counts durations, in 5.5 KiB. Below 32 ns it is exact. Durations over 1.6 days count as 1.6 days; only
/// [`Distribution::max`] is exact.
pub(super) struct Histogram {
    buckets: Box<[AtomicU64]>,
    /// Nanoseconds.
    max: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            max: AtomicU64::new(0),
        }
    }
}

impl Histogram {
    /// Neither locks nor allocates.
    pub(super) fn record(&self, duration: Duration) {
        let nanos = nanos(duration);
        // New maxima are rare; a plain load does not invalidate the cache line of other threads.
        if nanos > self.max.load(Ordering::Relaxed) {
            self.max.fetch_max(nanos, Ordering::Relaxed);
        }
        if let Some(bucket) = self.buckets.get(bucket_of(nanos)) {
            // After the maximum: a reader that sees the count also sees a maximum that covers it.
            bucket.fetch_add(1, Ordering::Release);
        }
    }
}

/// A snapshot of one or more histograms.
#[derive(Clone, Default)]
pub(super) struct Distribution {
    /// Empty until the first `absorb`.
    counts: Vec<u64>,
    count: u64,
    max: u64,
}

impl Distribution {
    /// Adds the counts of the histogram.
    pub(super) fn absorb(&mut self, histogram: &Histogram) {
        self.counts.resize(BUCKETS, 0);
        for (count, bucket) in self.counts.iter_mut().zip(&histogram.buckets) {
            let recorded = bucket.load(Ordering::Acquire);
            *count += recorded;
            self.count += recorded;
        }
        self.max = self.max.max(histogram.max.load(Ordering::Relaxed));
    }

    /// How many durations were recorded.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The longest one, exactly.
    pub(super) fn max(&self) -> Duration {
        Duration::from_nanos(self.max)
    }

    /// The mean, as exact as the quantiles; zero if nothing was recorded.
    pub(super) fn mean(&self) -> Duration {
        if self.count == 0 {
            return Duration::ZERO;
        }
        let counted = self.counts.iter().enumerate();
        let sum: u128 = counted
            .map(|(bucket, &count)| u128::from(middle_of(bucket)) * u128::from(count))
            .sum();
        let mean = u64::try_from(sum / u128::from(self.count)).unwrap_or(u64::MAX);
        Duration::from_nanos(mean.min(self.max))
    }

    /// The duration that a fraction `q` (0 to 1) of all durations does not exceed; zero if nothing was
    /// recorded.
    pub(super) fn quantile(&self, q: f64) -> Duration {
        let rank = ((q * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Duration::from_nanos(middle_of(bucket).min(self.max));
            }
        }
        Duration::ZERO
    }
}

fn nanos(duration: Duration) -> u64 {
    let whole = duration.as_secs().saturating_mul(1_000_000_000);
    whole.saturating_add(u64::from(duration.subsec_nanos()))
}

fn bucket_of(nanos: u64) -> usize {
    if nanos < PER_OCTAVE as u64 {
        return nanos as usize;
    }
    let shift = nanos.ilog2() - SPLIT;
    let within = (nanos >> shift) as usize % PER_OCTAVE;
    ((shift as usize + 1) * PER_OCTAVE + within).min(BUCKETS - 1)
}

/// The middle of a bucket differs from any value in it by at most half a bucket: 1/32 of the value.
fn middle_of(bucket: usize) -> u64 {
    if bucket < PER_OCTAVE {
        return bucket as u64;
    }
    let shift = bucket / PER_OCTAVE - 1;
    let lowest = ((PER_OCTAVE + bucket % PER_OCTAVE) as u64) << shift;
    lowest + (1 << shift) / 2
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    const PROMISED: f64 = 0.04;

    fn distribution<'a>(histograms: impl IntoIterator<Item = &'a Histogram>) -> Distribution {
        let mut distribution = Distribution::default();
        for histogram in histograms {
            distribution.absorb(histogram);
        }
        distribution
    }

    /// Pseudo-random numbers, the same in every run.
    struct Numbers(u64);

    impl Numbers {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
        }

        /// Every order of magnitude from 1 µs to a day is equally likely.
        fn duration(&mut self) -> Duration {
            let octave = self.next() % 37;
            let micros = (1 << octave) + self.next() % (1 << octave);
            Duration::from_nanos((micros * 1000 + self.next() % 1000).min(86_400 * 1_000_000_000))
        }
    }

    fn assert_near(measured: Duration, exact: Duration, what: &str) {
        let error = (measured.as_secs_f64() - exact.as_secs_f64()).abs() / exact.as_secs_f64();
        assert!(
            error <= PROMISED,
            "{what}: {measured:?} for {exact:?}, {error} off"
        );
    }

    // conformance: handlers/stats-quantiles: within 4 % of the sorted list, from 1 µs to a day
    #[test]
    fn a_quantile_is_within_four_per_cent_of_the_sorted_list() {
        for seed in 1..=200 {
            let mut numbers = Numbers(seed);
            let histogram = Histogram::default();
            let many = 1 + numbers.next() % 2000;
            let mut sorted: Vec<Duration> = (0..many).map(|_| numbers.duration()).collect();
            sorted
                .iter()
                .for_each(|&duration| histogram.record(duration));
            sorted.sort();
            let recorded = distribution([&histogram]);
            assert_eq!(recorded.count(), many, "seed {seed}");
            assert_eq!(Some(&recorded.max()), sorted.last(), "seed {seed}");
            for q in [0.5, 0.95, 0.99, 1.0] {
                let rank = (q * sorted.len() as f64).ceil() as usize;
                let exact = sorted[rank - 1];
                assert_near(recorded.quantile(q), exact, &format!("seed {seed}, q {q}"));
            }
            let mean = sorted.iter().sum::<Duration>() / sorted.len() as u32;
            assert_near(recorded.mean(), mean, &format!("seed {seed}, mean"));
        }
    }

    #[test]
    fn every_duration_is_near_the_middle_of_its_bucket() {
        let mut nanos: u64 = 1;
        while nanos < 1 << OCTAVES {
            for nanos in [nanos - 1, nanos, nanos + 1] {
                let middle = middle_of(bucket_of(nanos));
                let off = middle.abs_diff(nanos);
                assert!(
                    off as f64 <= nanos as f64 / 32.0,
                    "{nanos} is counted as {middle}"
                );
            }
            nanos += nanos.div_ceil(100);
        }
    }

    #[test]
    fn what_is_longer_than_the_range_is_counted_as_its_end_and_the_maximum_stays_exact() {
        let histogram = Histogram::default();
        let day = Duration::from_secs(86_400);
        for duration in [2 * day, 3650 * day, Duration::MAX] {
            histogram.record(duration);
        }
        let recorded = distribution([&histogram]);
        assert_eq!(recorded.count(), 3);
        assert!(recorded.quantile(0.5) > day);
        assert_eq!(recorded.max(), Duration::from_nanos(u64::MAX));
    }

    #[test]
    fn nothing_recorded_is_zero() {
        for recorded in [
            Distribution::default(),
            distribution([&Histogram::default()]),
        ] {
            assert_eq!(recorded.count(), 0);
            assert_eq!(recorded.quantile(0.99), Duration::ZERO);
            assert_eq!(recorded.mean(), Duration::ZERO);
            assert_eq!(recorded.max(), Duration::ZERO);
        }
    }

    #[test]
    fn merged_histograms_are_as_one() {
        let (left, right, both) = <(Histogram, Histogram, Histogram)>::default();
        let mut numbers = Numbers(7);
        for n in 0..1000 {
            let duration = numbers.duration();
            both.record(duration);
            if n % 3 == 0 { &left } else { &right }.record(duration);
        }
        let longest = Duration::from_secs(100_000);
        both.record(longest);
        left.record(longest);
        let both = distribution([&both]);
        for merged in [distribution([&left, &right]), distribution([&right, &left])] {
            assert_eq!(merged.counts, both.counts);
            assert_eq!(merged.count(), both.count());
            assert_eq!((merged.max(), both.max()), (longest, longest));
        }
    }

    // conformance: handlers/stats-lose-nothing: what threads record at the same time is all counted
    #[test]
    fn threads_that_record_at_once_lose_nothing() {
        const EACH: u64 = 200_000;
        let histogram = Histogram::default();
        let all = Barrier::new(4);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (histogram, all) = (&histogram, &all);
                scope.spawn(move || {
                    all.wait();
                    // All in the same bucket, with a growing maximum.
                    for n in 0..EACH {
                        histogram.record(Duration::from_nanos((1 << 40) + 4 * n + thread));
                    }
                });
            }
        });
        let recorded = distribution([&histogram]);
        assert_eq!(recorded.count(), 4 * EACH);
        let longest = Duration::from_nanos((1 << 40) + 4 * EACH - 1);
        assert_eq!(recorded.max(), longest);
    }
}
