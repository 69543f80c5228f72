//! The publish rate of a bus: a token bucket that serves waiting publishers in order.

use std::time::Duration;

use everbus_core::{Code, Error, Result};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until, timeout_at};

use everbus_core::stream::{DEFAULT_WAIT, check_wait};

/// The rate limit for publishing, in events per second.
///
/// The rate is an average. After a quiet time `burst` events may go at once. A batch larger than the burst
/// goes when the bucket is full; later publishes wait until the average is reached again.
///
/// ```
/// use everbus::PublishRate;
/// let rate = PublishRate::new(100.0).burst(20);
/// assert!(rate.validate().is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct PublishRate {
    /// Events per second, on average.
    pub per_second: f64,
    /// How many events may go at once after a quiet time; by default the events of one second. Timers have
    /// a resolution of one millisecond, so the burst is at least the events of two milliseconds.
    pub burst: u32,
    /// How long a publish waits for tokens at most (5 s).
    pub wait: Duration,
}

impl PublishRate {
    /// This many events per second, with a burst of the same size.
    pub fn new(per_second: f64) -> Self {
        Self {
            per_second,
            // The cast is safe for NaN and infinity; `validate` refuses them.
            burst: (per_second.ceil() as u32).max(1),
            wait: DEFAULT_WAIT,
        }
    }

    /// Sets how many events may go at once after a quiet time.
    #[must_use]
    pub fn burst(mut self, events: u32) -> Self {
        self.burst = events;
        self
    }

    /// Sets how long a publish waits for tokens at most.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Refuses invalid rates.
    pub fn validate(&self) -> Result<()> {
        let bad = |what: String, hint: &str| {
            Err(Error::new(Code::InvalidSetting, format!("publish rate: {what}")).hint(hint))
        };
        if !(self.per_second >= SLOWEST && self.per_second <= FASTEST) {
            return bad(
                format!("{} events in a second", self.per_second),
                "the rate is between one event per day and 1,000,000,000 events per second",
            );
        }
        if self.burst == 0 {
            return bad("a burst of 0".into(), "1 lets events go one by one");
        }
        check_wait("publish rate: the wait", self.wait)
    }
}

/// Timers have a resolution of one millisecond. The tokens of two milliseconds may always be used at once;
/// otherwise a high rate with a small burst would never be reached.
const TIMER: f64 = 0.002;
/// One event a day.
const SLOWEST: f64 = 1.0 / 86_400.0;
const FASTEST: f64 = 1e9;

/// The token bucket. The publisher that waits for tokens holds the lock; the others queue for it in order
/// of arrival. So small publishes cannot overtake a large batch for ever.
#[derive(Debug)]
pub(super) struct TokenBucket {
    rate: PublishRate,
    /// The capacity of the bucket.
    full: f64,
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    /// Negative after a batch larger than the burst.
    tokens: f64,
    at: Instant,
}

impl TokenBucket {
    pub(super) fn new(rate: PublishRate) -> Self {
        let full = f64::from(rate.burst).max(rate.per_second * TIMER);
        Self {
            rate,
            full,
            bucket: Mutex::new(Bucket {
                tokens: full,
                at: Instant::now(),
            }),
        }
    }

    /// Waits for this many tokens. A publisher that gives up or is cancelled takes none.
    pub(super) async fn take(&self, events: u64, start: Instant) -> Result<()> {
        let deadline = start + self.rate.wait;
        let Ok(mut bucket) = timeout_at(deadline, self.bucket.lock()).await else {
            return Err(self.too_fast());
        };
        let needed = (events as f64).min(self.full);
        loop {
            let now = Instant::now();
            let earned = now.duration_since(bucket.at).as_secs_f64() * self.rate.per_second;
            bucket.tokens = (bucket.tokens + earned).min(self.full);
            bucket.at = now;
            // The tokens are a sum of fractions: a millionth of an event is a rounding error.
            let short = needed - bucket.tokens;
            if short <= 1e-6 {
                bucket.tokens -= events as f64;
                return Ok(());
            }
            let wait = Duration::try_from_secs_f64(short / self.rate.per_second);
            match wait.ok().and_then(|wait| now.checked_add(wait)) {
                Some(turn) if turn <= deadline => sleep_until(turn).await,
                _ => {
                    // The tokens will not come in time. Publishers behind this one may need fewer.
                    drop(bucket);
                    sleep_until(deadline).await;
                    return Err(self.too_fast());
                }
            }
        }
    }

    fn too_fast(&self) -> Error {
        let PublishRate {
            per_second,
            burst,
            wait,
        } = self.rate;
        Error::new(
            Code::Backpressure,
            format!(
                "this publisher is over its rate of {per_second} events in a second (burst {burst}), \
                 and its turn did not come within {wait:?}"
            ),
        )
        .hint("publish more slowly, in smaller batches, or raise the rate")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const S: Duration = Duration::from_secs(1);

    fn bucket(per_second: f64, burst: u32) -> Arc<TokenBucket> {
        let rate = PublishRate::new(per_second).burst(burst);
        rate.validate().unwrap();
        Arc::new(TokenBucket::new(rate))
    }

    /// The milliseconds until the publish was admitted, or the error.
    async fn took(bucket: &TokenBucket, events: u64) -> Result<u128> {
        let start = Instant::now();
        bucket.take(events, start).await?;
        Ok(start.elapsed().as_millis())
    }

    #[test]
    fn nonsense_is_refused_with_a_hint() {
        let rate = PublishRate::new(10.0);
        assert_eq!((rate.burst, rate.wait), (10, DEFAULT_WAIT));
        assert_eq!(PublishRate::new(0.5).burst, 1);
        for bad in [
            PublishRate::new(0.0),
            PublishRate::new(-1.0),
            PublishRate::new(f64::NAN),
            PublishRate::new(f64::INFINITY),
            PublishRate::new(1e-9),
            rate.burst(0),
            rate.wait(Duration::MAX),
        ] {
            let e = bad.validate().unwrap_err();
            assert_eq!(e.code(), Code::InvalidSetting, "{bad:?}");
            assert!(e.hint_text().is_some());
        }
        assert!(rate.wait(Duration::ZERO).validate().is_ok());
    }

    // conformance: framework/backpressure-rate: a producer can be limited to a rate
    #[tokio::test(start_paused = true)]
    async fn a_burst_goes_at_once_and_the_rest_at_the_rate() {
        let bucket = bucket(10.0, 5);
        for _ in 0..5 {
            assert_eq!(took(&bucket, 1).await.unwrap(), 0);
        }
        for _ in 0..20 {
            assert_eq!(took(&bucket, 1).await.unwrap(), 100);
        }
        tokio::time::advance(60 * S).await;
        let start = Instant::now();
        for _ in 0..5 {
            bucket.take(1, Instant::now()).await.unwrap();
        }
        assert_eq!(start.elapsed(), Duration::ZERO, "a quiet minute is a burst");
        assert_eq!(
            took(&bucket, 1).await.unwrap(),
            100,
            "and no more than that"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_high_rate_is_reached_although_timers_are_coarse() {
        let bucket = bucket(10_000.0, 1);
        let start = Instant::now();
        for _ in 0..10_000 {
            bucket.take(1, Instant::now()).await.unwrap();
        }
        let took = start.elapsed().as_millis();
        assert!(
            (990..=1010).contains(&took),
            "a second's worth took {took} ms"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_larger_than_the_burst_goes_and_is_paid_for_by_those_after_it() {
        let bucket = bucket(10.0, 5);
        assert_eq!(took(&bucket, 25).await.unwrap(), 0);
        assert_eq!(took(&bucket, 1).await.unwrap(), 2100);
        assert_eq!(
            took(&bucket, 8).await.unwrap(),
            500,
            "when the burst is full"
        );
    }

    // conformance: handlers/backpressure-rate-fair: publishers over the rate take turns in the order they came
    #[tokio::test(start_paused = true)]
    async fn publishers_take_turns_and_none_is_overtaken() {
        let bucket = bucket(10.0, 10);
        bucket.take(10, Instant::now()).await.unwrap();
        let order = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let mut tasks = tokio::task::JoinSet::new();
        // A large batch first, then small ones that would fit much earlier.
        for (name, events) in [(0, 10), (1, 1), (2, 1), (3, 5), (4, 1)] {
            let (bucket, order) = (bucket.clone(), order.clone());
            tasks.spawn(async move {
                let waited = took(&bucket, events).await.unwrap();
                order.lock().push((name, waited));
            });
            tokio::task::yield_now().await;
        }
        tasks.join_all().await;
        let expected = [(0, 1000), (1, 1100), (2, 1200), (3, 1700), (4, 1800)];
        assert_eq!(*order.lock(), expected);
    }

    // conformance: handlers/backpressure-rate-wait: over the rate for longer than 5 s is Backpressure
    #[tokio::test(start_paused = true)]
    async fn a_turn_that_does_not_come_within_the_wait_is_backpressure() {
        let bucket = bucket(1.0, 1);
        let start = Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..10 {
            let bucket = bucket.clone();
            tasks.spawn(async move { bucket.take(1, Instant::now()).await });
        }
        let answers = tasks.join_all().await;
        assert_eq!(start.elapsed(), 5 * S);
        let errors: Vec<_> = answers.into_iter().filter_map(Result::err).collect();
        assert_eq!(errors.len(), 4, "one at once, five by the rate");
        assert!(errors.iter().all(|e| e.code() == Code::Backpressure));
        assert!(errors[0].message().contains("1 events in a second"));
        assert!(errors[0].hint_text().is_some());
        assert_eq!(took(&bucket, 1).await.unwrap(), 1000, "they took nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_whose_turn_cannot_come_does_not_hold_up_the_others() {
        let bucket = bucket(1.0, 100);
        bucket.take(100, Instant::now()).await.unwrap();
        let large = tokio::spawn({
            let bucket = bucket.clone();
            async move { took(&bucket, 50).await }
        });
        tokio::task::yield_now().await;
        assert_eq!(took(&bucket, 2).await.unwrap(), 2000);
        assert_eq!(took(&bucket, 2).await.unwrap(), 2000);
        let e = large.await.unwrap().unwrap_err();
        assert_eq!(e.code(), Code::Backpressure);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_publisher_gives_its_turn_to_the_next() {
        let bucket = bucket(1.0, 1);
        bucket.take(1, Instant::now()).await.unwrap();
        let first = tokio::spawn({
            let bucket = bucket.clone();
            async move { bucket.take(1, Instant::now()).await }
        });
        tokio::time::sleep(S / 2).await;
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        assert_eq!(took(&bucket, 1).await.unwrap(), 500);
    }
}
