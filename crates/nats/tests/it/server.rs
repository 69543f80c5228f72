//! The server of the tests.

use std::sync::atomic::{AtomicU64, Ordering};

/// A URL of a space of its own on the server that all tests share.
pub(crate) fn space() -> Option<String> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let url = std::env::var("EVERBUS_NATS_URL").ok()?;
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let process = std::process::id();
    let time = std::time::UNIX_EPOCH.elapsed().unwrap().as_millis();
    Some(format!("{url}/t{time:x}-{process}-{number}"))
}
