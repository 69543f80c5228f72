//! What a long-running handler can read about its delivery (whether its lease was extended or lost), and what it
//! reports (its progress).
//!
//! A delivery is watched from the first call of its handler. Handlers that never ask cost nothing.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use everbus_core::{EventId, GroupName, Lease, Timestamp};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::guard;

/// An extension of a lease: see [`Context::extensions`](crate::Context::extensions).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LeaseExtension {
    /// Counted from 1, since the handler first asked.
    pub number: u64,
    /// The end of the lease, by the clock of the bus.
    pub until: Timestamp,
    /// The last progress report of the handler.
    pub activity: Option<Activity>,
}

/// The last report of a handler with [`Context::progress`](crate::Context::progress).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Activity {
    /// The reported value.
    pub value: Value,
    /// When it was reported, by the clock of the bus.
    pub at: Timestamp,
}

/// A running handler that has reported progress: [`Bus::activities`](crate::Bus::activities).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RunningActivity {
    /// The event.
    pub event_id: EventId,
    /// The group.
    pub group: GroupName,
    /// The handler.
    pub handler: String,
    /// Which attempt it is.
    pub attempt: u32,
    /// How often the lease was extended since the handler first asked.
    pub extensions: u64,
    /// Its last progress report.
    pub activity: Activity,
}

/// The extensions of one lease: see [`Context::extensions`](crate::Context::extensions).
#[derive(Debug)]
pub struct LeaseExtensions {
    watch: Arc<DeliveryWatch>,
    lease: watch::Receiver<LeaseState>,
}

impl LeaseExtensions {
    pub(crate) fn of(watch: Arc<DeliveryWatch>) -> Self {
        let lease = watch.lease.subscribe();
        Self { watch, lease }
    }

    /// Waits for the next extension; `None` once the lease is lost. If several came since the last call,
    /// returns the newest.
    pub async fn next(&mut self) -> Option<LeaseExtension> {
        loop {
            if self.lease.borrow().lost {
                return None;
            }
            // The sender lives as long as `self`.
            self.lease.changed().await.ok()?;
            let state = self.lease.borrow_and_update().clone();
            if let Some(until) = state.until.filter(|_| !state.lost) {
                return Some(LeaseExtension {
                    number: state.extensions,
                    until,
                    activity: self.watch.activity(),
                });
            }
        }
    }
}

#[derive(Clone, Debug, Default)]
struct LeaseState {
    lost: bool,
    extensions: u64,
    until: Option<Timestamp>,
}

/// One watched delivery.
#[derive(Debug)]
pub(crate) struct DeliveryWatch {
    event_id: EventId,
    group: GroupName,
    handler: String,
    attempt: u32,
    delivery: Lease,
    /// The lease was held at this time.
    since: Instant,
    lease: watch::Sender<LeaseState>,
    activity: Mutex<Option<Activity>>,
}

impl DeliveryWatch {
    pub(crate) fn new(
        event_id: EventId,
        group: GroupName,
        handler: String,
        attempt: u32,
        delivery: Lease,
    ) -> Self {
        Self {
            event_id,
            group,
            handler,
            attempt,
            delivery,
            since: Instant::now(),
            lease: watch::Sender::default(),
            activity: Mutex::default(),
        }
    }

    pub(crate) async fn lost(&self) {
        // The sender is in `self`, so the wait ends only when the lease is lost.
        let _ = self.lease.subscribe().wait_for(|state| state.lost).await;
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lease.borrow().lost
    }

    pub(crate) fn report(&self, value: Value, at: Timestamp) {
        *self.activity.lock() = Some(Activity { value, at });
    }

    pub(crate) fn activity(&self) -> Option<Activity> {
        self.activity.lock().clone()
    }

    fn extended(&self, until: Timestamp) {
        self.lease.send_modify(|state| {
            state.extensions += 1;
            state.until = Some(until);
        });
        let activity = self.activity();
        guard::log(|| {
            tracing::debug!(
                target: "everbus::dispatch",
                event_id = %self.event_id,
                group = %self.group,
                handler = self.handler,
                attempt = self.attempt,
                extensions = self.lease.borrow().extensions,
                activity = activity.map(|activity| activity.value.to_string()),
                "the lease of a handler that works long was extended"
            );
        });
    }

    fn lose(&self) {
        let first = self
            .lease
            .send_if_modified(|state| !std::mem::replace(&mut state.lost, true));
        if first {
            guard::log(|| {
                tracing::warn!(
                    target: "everbus::dispatch",
                    event_id = %self.event_id,
                    group = %self.group,
                    handler = self.handler,
                    attempt = self.attempt,
                    "the lease was lost while the handler runs; the event is delivered again"
                );
            });
        }
    }
}

/// The watched deliveries of a bus.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    /// An upper bound of their number, so that the lock is not taken when there are none.
    count: AtomicUsize,
    watched: Mutex<Vec<Weak<DeliveryWatch>>>,
}

impl Watches {
    pub(crate) fn add(&self, watch: &Arc<DeliveryWatch>) {
        let mut watched = self.watched.lock();
        watched.retain(|watch| watch.strong_count() > 0);
        watched.push(Arc::downgrade(watch));
        self.count.store(watched.len(), Ordering::Release);
    }

    /// The attempt has ended.
    pub(crate) fn remove(&self, ended: &Arc<DeliveryWatch>) {
        let mut watched = self.watched.lock();
        let ended = Arc::downgrade(ended);
        watched.retain(|watch| watch.strong_count() > 0 && !watch.ptr_eq(&ended));
        self.count.store(watched.len(), Ordering::Release);
    }

    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// The watches whose handlers may still run.
    fn alive(&self) -> Vec<Arc<DeliveryWatch>> {
        if !self.any() {
            return Vec::new();
        }
        let mut watched = self.watched.lock();
        watched.retain(|watch| watch.strong_count() > 0);
        self.count.store(watched.len(), Ordering::Release);
        watched.iter().filter_map(Weak::upgrade).collect()
    }

    fn of_group<'a>(&self, group: &'a GroupName) -> impl Iterator<Item = Arc<DeliveryWatch>> + 'a {
        let alive = self.alive().into_iter();
        alive.filter(move |watch| watch.group == *group && !watch.is_lost())
    }

    /// Reports extended and lost leases.
    pub(crate) fn tell(
        &self,
        group: &GroupName,
        until: Timestamp,
        became: impl Fn(&Lease) -> Option<Extended>,
    ) {
        for watch in self.of_group(group) {
            match became(&watch.delivery) {
                Some(Extended::Yes) => watch.extended(until),
                Some(Extended::Lost) => watch.lose(),
                None => {}
            }
        }
    }

    /// Reports leases that ended during an outage.
    pub(crate) fn lose_those(&self, group: &GroupName, over: impl Fn(Instant) -> bool) {
        let of_group = self.of_group(group);
        of_group
            .filter(|watch| over(watch.since))
            .for_each(|watch| watch.lose());
    }

    pub(crate) fn activities(&self) -> Vec<RunningActivity> {
        let alive = self.alive().into_iter();
        let reported = alive.filter_map(|watch| {
            let activity = watch.activity()?;
            Some(RunningActivity {
                event_id: watch.event_id,
                group: watch.group.clone(),
                handler: watch.handler.clone(),
                attempt: watch.attempt,
                extensions: watch.lease.borrow().extensions,
                activity,
            })
        });
        reported.collect()
    }
}

/// The result of extending a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extended {
    Yes,
    Lost,
}
