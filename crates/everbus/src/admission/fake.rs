//! An engine that only counts, for the tests of admission.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, Code, ConsumeOptions, Consumer, Depth, Durability,
    Error, Event, EventId, GroupInfo, GroupName, GroupSpec, Lease, Pattern, Result, Settlement,
    SubscriptionInfo,
};
use parking_lot::Mutex;

/// One group that takes all events and handles as many as the test says.
#[derive(Default)]
pub(super) struct Engine {
    owed: Mutex<HashMap<String, u64>>,
    /// How long a count takes.
    pub(super) slow: Mutex<Duration>,
    pub(super) cannot_count: AtomicBool,
    pub(super) cannot_drop: AtomicBool,
    counts: AtomicU64,
    /// The lengths that `drop_oldest` was given, in order.
    pub(super) kept: Mutex<Vec<u64>>,
}

impl Engine {
    pub(super) fn owed(&self, stream: &str) -> u64 {
        self.owed.lock().get(stream).copied().unwrap_or(0)
    }

    /// Simulates another process that publishes this many events.
    pub(super) fn add(&self, stream: &str, events: u64) {
        *self.owed.lock().entry(stream.into()).or_default() += events;
    }

    /// Simulates the group handling this many events.
    pub(super) fn handle(&self, stream: &str, events: u64) {
        *self.owed.lock().get_mut(stream).unwrap() -= events;
    }

    /// How often the engine was asked since the last call.
    pub(super) fn counts(&self) -> u64 {
        self.counts.swap(0, Ordering::SeqCst)
    }
}

fn unsupported<'a, T: Send + 'a>(what: &str) -> BoxFuture<'a, Result<T>> {
    let e = Error::new(Code::Unsupported, format!("no {what} here"));
    Box::pin(std::future::ready(Err(e)))
}

impl Broker for Engine {
    fn capabilities(&self) -> Capabilities {
        Capabilities::full("counters", Durability::Memory)
    }
    fn declare(&self, _: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        unsupported("groups")
    }
    fn retract(&self, _: EventId) -> BoxFuture<'_, Result<()>> {
        unsupported("groups")
    }
    fn remove_group(&self, _: GroupName) -> BoxFuture<'_, Result<()>> {
        unsupported("groups")
    }
    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        batch.iter().for_each(|e| self.add(e.event_type(), 1));
        Box::pin(std::future::ready(Ok(Vec::new())))
    }
    fn consume(&self, _: GroupName, _: ConsumeOptions) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        unsupported("groups")
    }
    fn settle(&self, _: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        unsupported("groups")
    }
    fn extend(&self, _: Vec<Lease>, _: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        unsupported("groups")
    }
    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        unsupported("groups")
    }
    fn close(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

impl Depth for Engine {
    fn depth(&self, stream: Pattern, limit: u64) -> BoxFuture<'_, Result<u64>> {
        self.counts.fetch_add(1, Ordering::SeqCst);
        if self.cannot_count.load(Ordering::SeqCst) {
            return unsupported("counting");
        }
        let depth = self.owed(stream.exact().unwrap()).min(limit);
        let slow = *self.slow.lock();
        Box::pin(async move {
            if !slow.is_zero() {
                tokio::time::sleep(slow).await;
            }
            Ok(depth)
        })
    }
    fn drop_oldest(&self, stream: Pattern, keep: u64) -> BoxFuture<'_, Result<u64>> {
        if self.cannot_drop.load(Ordering::SeqCst) {
            return unsupported("dropping");
        }
        self.kept.lock().push(keep);
        let dropped = self.owed(stream.as_str()).saturating_sub(keep);
        self.handle(stream.as_str(), dropped);
        Box::pin(std::future::ready(Ok(dropped)))
    }
}
