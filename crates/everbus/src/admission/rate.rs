//! How fast a bus may publish: a token bucket whose publishers take turns.

use std::time::Duration;

use everbus_core::{Code, Error, Result};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until, timeout_at};

use everbus_core::stream::{DEFAULT_WAIT, check_wait};

/// How many events a bus may publish in a second.
///
/// The rate holds on average. After a quiet time `burst` events may go at once. A batch larger than
/// that goes when the burst is full, and what comes after it waits until the rate is kept again.
///
/// ```
/// use everbus::PublishRate;
/// let rate = PublishRate::new(100.0).burst(20);
/// assert!(rate.validate().is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct PublishRate {
    /// Events in a second, on average.
    pub per_second: f64,
    /// Events at once after a quiet time; unless set, as many as a second brings. Timers are no finer
    /// than a millisecond, so it is at least what two of them bring.
    pub burst: u32,
    /// How long a publish waits for its turn at most (5 s).
    pub wait: Duration,
}

impl PublishRate {
    /// So many events in a second, and as many at once after a quiet second.
    pub fn new(per_second: f64) -> Self {
        Self {
            per_second,
            // The cast keeps what is no number at all out of trouble; validate() refuses it.
            burst: (per_second.ceil() as u32).max(1),
            wait: DEFAULT_WAIT,
        }
    }

    /// How many events may go at once after a quiet time.
    #[must_use]
    pub fn burst(mut self, events: u32) -> Self {
        self.burst = events;
        self
    }

    /// How long a publish waits for its turn at most.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Refuses rates that make no sense.
    pub fn validate(&self) -> Result<()> {
        let bad = |what: String, hint: &str| {
            Err(Error::new(Code::InvalidSetting, format!("publish rate: {what}")).hint(hint))
        };
        if !(self.per_second >= SLOWEST && self.per_second <= FASTEST) {
            return bad(
                format!("{} events in a second", self.per_second),
                "it is between one a day and a thousand million a second",
            );
        }
        if self.burst == 0 {
            return bad("a burst of 0".into(), "1 lets events go one by one");
        }
        check_wait("publish rate: the wait", self.wait)
    }
}

/// Timers are no finer than a millisecond. Whatever was earned in twice that time may go at once, or a
/// high rate with a small burst would never be reached.
const TIMER: f64 = 0.002;
/// One event a day.
const SLOWEST: f64 = 1.0 / 86_400.0;
const FASTEST: f64 = 1e9;

/// The bucket. Who waits for tokens holds it, and the others queue behind in the order they came; so
/// a large batch is not overtaken for ever by small ones.
#[derive(Debug)]
pub(super) struct Turns {
    rate: PublishRate,
    /// What the bucket holds at most.
    full: f64,
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    /// Below zero after a batch larger than the burst.
    tokens: f64,
    at: Instant,
}

impl Turns {
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

    /// Waits until so many events may go. A publisher that gives up or is cancelled has taken nothing.
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
            // Sums of fractions: a millionth of an event short is not short.
            let short = needed - bucket.tokens;
            if short <= 1e-6 {
                bucket.tokens -= events as f64;
                return Ok(());
            }
            let wait = Duration::try_from_secs_f64(short / self.rate.per_second);
            match wait.ok().and_then(|wait| now.checked_add(wait)) {
                Some(turn) if turn <= deadline => sleep_until(turn).await,
                _ => {
                    // Its turn does not come in time. Those behind may need less.
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

    fn turns(per_second: f64, burst: u32) -> Arc<Turns> {
        let rate = PublishRate::new(per_second).burst(burst);
        rate.validate().unwrap();
        Arc::new(Turns::new(rate))
    }

    /// The milliseconds until the publish may go, or the error.
    async fn took(turns: &Turns, events: u64) -> Result<u128> {
        let start = Instant::now();
        turns.take(events, start).await?;
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
        let turns = turns(10.0, 5);
        for _ in 0..5 {
            assert_eq!(took(&turns, 1).await.unwrap(), 0);
        }
        for _ in 0..20 {
            assert_eq!(took(&turns, 1).await.unwrap(), 100);
        }
        tokio::time::advance(60 * S).await;
        let start = Instant::now();
        for _ in 0..5 {
            turns.take(1, Instant::now()).await.unwrap();
        }
        assert_eq!(start.elapsed(), Duration::ZERO, "a quiet minute is a burst");
        assert_eq!(took(&turns, 1).await.unwrap(), 100, "and no more than that");
    }

    #[tokio::test(start_paused = true)]
    async fn a_high_rate_is_reached_although_timers_are_coarse() {
        let turns = turns(10_000.0, 1);
        let start = Instant::now();
        for _ in 0..10_000 {
            turns.take(1, Instant::now()).await.unwrap();
        }
        let took = start.elapsed().as_millis();
        assert!(
            (990..=1010).contains(&took),
            "a second's worth took {took} ms"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_larger_than_the_burst_goes_and_is_paid_for_by_those_after_it() {
        let turns = turns(10.0, 5);
        assert_eq!(took(&turns, 25).await.unwrap(), 0);
        assert_eq!(took(&turns, 1).await.unwrap(), 2100);
        assert_eq!(
            took(&turns, 8).await.unwrap(),
            500,
            "when the burst is full"
        );
    }

    // conformance: handlers/backpressure-rate-fair: publishers over the rate take turns in the order they came
    #[tokio::test(start_paused = true)]
    async fn publishers_take_turns_and_none_is_overtaken() {
        let turns = turns(10.0, 10);
        turns.take(10, Instant::now()).await.unwrap();
        let order = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let mut tasks = tokio::task::JoinSet::new();
        // A large batch first, then small ones that would fit much earlier.
        for (name, events) in [(0, 10), (1, 1), (2, 1), (3, 5), (4, 1)] {
            let (turns, order) = (turns.clone(), order.clone());
            tasks.spawn(async move {
                let waited = took(&turns, events).await.unwrap();
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
        let turns = turns(1.0, 1);
        let start = Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..10 {
            let turns = turns.clone();
            tasks.spawn(async move { turns.take(1, Instant::now()).await });
        }
        let answers = tasks.join_all().await;
        assert_eq!(start.elapsed(), 5 * S);
        let errors: Vec<_> = answers.into_iter().filter_map(Result::err).collect();
        assert_eq!(errors.len(), 4, "one at once, five by the rate");
        assert!(errors.iter().all(|e| e.code() == Code::Backpressure));
        assert!(errors[0].message().contains("1 events in a second"));
        assert!(errors[0].hint_text().is_some());
        assert_eq!(took(&turns, 1).await.unwrap(), 1000, "they took nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_whose_turn_cannot_come_does_not_hold_up_the_others() {
        let turns = turns(1.0, 100);
        turns.take(100, Instant::now()).await.unwrap();
        let large = tokio::spawn({
            let turns = turns.clone();
            async move { took(&turns, 50).await }
        });
        tokio::task::yield_now().await;
        assert_eq!(took(&turns, 2).await.unwrap(), 2000);
        assert_eq!(took(&turns, 2).await.unwrap(), 2000);
        let e = large.await.unwrap().unwrap_err();
        assert_eq!(e.code(), Code::Backpressure);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_publisher_gives_its_turn_to_the_next() {
        let turns = turns(1.0, 1);
        turns.take(1, Instant::now()).await.unwrap();
        let first = tokio::spawn({
            let turns = turns.clone();
            async move { turns.take(1, Instant::now()).await }
        });
        tokio::time::sleep(S / 2).await;
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        assert_eq!(took(&turns, 1).await.unwrap(), 500);
    }
}
