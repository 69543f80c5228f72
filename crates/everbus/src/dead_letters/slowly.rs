//! A bulk retry that goes slowly.

use std::time::Duration;

use everbus_core::{Code, DeadLetterFilter, DeadLetters, Error, Result, Timestamp};
use tokio::time::Instant;

/// How a bulk retry is getting on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RetryProgress {
    /// How many were sent back so far.
    pub retried: u64,
    /// How many are to go: those that were there at the start, or the limit.
    pub total: u64,
}

/// How fast dead letters are sent back, and how many of them.
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
    /// At most so many in a second.
    pub fn per_second(per_second: u32) -> Self {
        let limit = u64::MAX;
        Self { per_second, limit }
    }

    pub(super) fn rate(self) -> u32 {
        self.per_second
    }

    /// At most so many in all, the oldest first.
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

/// So many steps in a second, where the rate allows: smooth enough for whoever is behind the handler,
/// and few transactions.
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
                .hint("send back at least 1 per second, or all at once with retry_all"),
        );
    }
    filter.died_until = Some(filter.died_until.map_or(now, |until| until.min(now)));
    // However the clock goes, no more than there were.
    let total = letters.count(filter.clone()).await?.min(limit);
    let step = per_second.div_ceil(STEPS);
    let pause = Duration::from_secs(1) * step / per_second;
    let mut next = Instant::now();
    let mut retried = 0;
    while retried < total {
        tokio::time::sleep_until(next).await;
        // After a step that took long the next one does not hurry.
        next = next.max(Instant::now()) + pause;
        let limit = u64::from(step).min(total - retried);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let sent = letters.retry_some(filter.clone(), limit).await?;
        if sent == 0 {
            // Somebody else has retried or purged the rest.
            break;
        }
        retried += sent;
        progress(RetryProgress { retried, total });
    }
    Ok(retried)
}
