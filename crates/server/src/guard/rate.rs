//! The rate limit: a token bucket for each caller.

use std::collections::HashMap;
use std::time::Instant;

use http::StatusCode;
use parking_lot::Mutex;

use crate::problem::Problem;

/// With more callers all buckets are dropped, which fills them again. This bounds the memory.
const MOST_CALLERS: usize = 10_000;

/// Limits the requests per second of each caller. A burst may have the requests of one second.
pub(crate) struct RateLimits {
    per_second: Option<f64>,
    buckets: Mutex<HashMap<String, Bucket>>,
}

struct Bucket {
    left: f64,
    at: Instant,
}

impl RateLimits {
    pub(crate) fn new(per_second: Option<u32>) -> Self {
        Self {
            per_second: per_second.map(f64::from),
            buckets: Mutex::default(),
        }
    }

    /// Counts a request of a caller, or refuses it. `caller` is only called if there is a limit.
    pub(crate) fn take(&self, caller: impl FnOnce() -> String) -> Result<(), Problem> {
        let Some(rate) = self.per_second else {
            return Ok(());
        };
        let caller = caller();
        let now = Instant::now();
        let mut buckets = self.buckets.lock();
        if buckets.len() >= MOST_CALLERS && !buckets.contains_key(&caller) {
            buckets.clear();
        }
        let bucket = buckets.entry(caller).or_insert(Bucket {
            left: rate,
            at: now,
        });
        let passed = now.duration_since(bucket.at).as_secs_f64();
        bucket.left = (bucket.left + passed * rate).min(rate);
        bucket.at = now;
        if bucket.left < 1.0 {
            let what = format!("more than {rate} requests per second");
            return Err(
                Problem::new(StatusCode::TOO_MANY_REQUESTS, "RateLimited", what).retry_after(1),
            );
        }
        bucket.left -= 1.0;
        Ok(())
    }
}
