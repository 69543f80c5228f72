//! A bulk retry at a limited rate.

use std::time::Duration;

use everbus_core::{Code, DeadLetterFilter, DeadLetters, Error, Result, Timestamp};
use tokio::time::Instant;

/// The progress of a bulk retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RetryProgress {
    /// How many were retried so far.
    pub retried: u64,
    /// How many will be retried: those that existed at the start, or the limit.
    pub total: u64,
}

/// The rate of a bulk retry, and its limit.
///
/// ```
/// let pace = everbus::RetryPace::per_second(50).at_most(1000);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPace {
    per_second: u32,
    limit: u64,
}

impl RetryPace {
    /// At most this many per second.
    pub fn per_second(per_second: u32) -> Self {
        let limit = u64::MAX;
        Self { per_second, limit }
    }

    pub(super) fn rate(self) -> u32 {
        self.per_second
    }

    /// At most this many in total, the oldest first.
    #[must_use]
    pub fn at_most(mut self, limit: u64) -> Self {
        self.limit = limit;
        self
    }
}

impl From<u32> for RetryPace {
    fn from(per_second: u32) -> Self {
        Self::per_second(per_second)
    }
}

/// Steps per second, if the rate allows: smooth enough for the dependency of the handler, with few
/// transactions.
const STEPS: u32 = 10;

pub(super) async fn retry_slowly(
    letters: &dyn DeadLetters,
    mut filter: DeadLetterFilter,
    RetryPace { per_second, limit }: RetryPace,
    now: Timestamp,
    mut progress: impl FnMut(RetryProgress),
) -> Result<u64> {
    if per_second == 0 {
        return Err(
            Error::new(Code::InvalidSetting, "a rate of 0 dead letters per second")
                .hint("retry at least 1 per second, or all at once with retry_all"),
        );
    }
    filter.died_until = Some(filter.died_until.map_or(now, |until| until.min(now)));
    // Never more than existed at the start, even if the clock is changed.
    let total = letters.count(filter.clone()).await?.min(limit);
    let step = per_second.div_ceil(STEPS);
    let pause = Duration::from_secs(1) * step / per_second;
    let mut next = Instant::now();
    let mut retried = 0;
    while retried < total {
        tokio::time::sleep_until(next).await;
        // After a slow step the next one does not catch up.
        next = next.max(Instant::now()) + pause;
        let limit = u64::from(step).min(total - retried);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let sent = letters.retry_some(filter.clone(), limit).await?;
        if sent == 0 {
            // Another caller has retried or purged the rest.
            break;
        }
        retried += sent;
        progress(RetryProgress { retried, total });
    }
    Ok(retried)
}
