//! Named places where a test may kill the process.
//!
//! Without the feature `failpoints` this does nothing. With it, `EVERBUS_FAILPOINT=name:n` aborts the process
//! when the place `name` is reached for the n-th time.

/// Marks a place.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub(crate) fn hit(_name: &str) {}

/// Marks a place.
#[cfg(feature = "failpoints")]
pub(crate) fn hit(name: &str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static ARMED: OnceLock<Option<(String, u64)>> = OnceLock::new();
    static HITS: AtomicU64 = AtomicU64::new(0);
    let armed = ARMED.get_or_init(|| {
        let text = std::env::var("EVERBUS_FAILPOINT").ok()?;
        let (name, count) = text.split_once(':')?;
        Some((name.to_owned(), count.parse().ok()?))
    });
    if let Some((armed, count)) = armed
        && armed == name
        && HITS.fetch_add(1, Ordering::SeqCst) + 1 == *count
    {
        std::process::abort();
    }
}
