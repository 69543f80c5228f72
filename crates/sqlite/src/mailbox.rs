//! The mailbox of a consumer: deliveries that wait to be fetched.
//!
//! Open deliveries may be fetched; the file records that they may have begun. The other claimed deliveries are
//! reserved: a later transaction opens them, once others are settled.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use everbus_core::{Delivery, Error, Lease, Result};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::rows::Seq as _;

/// Shared by the writer and the consumer.
#[derive(Default)]
pub(crate) struct Mailbox {
    inner: Mutex<Inner>,
    arrived: Notify,
}

#[derive(Default)]
struct Inner {
    open: VecDeque<Waiting>,
    reserved: VecDeque<Waiting>,
    ended: Option<Error>,
}

/// A delivery that was not fetched yet.
pub(crate) struct Waiting {
    /// The end of its lease.
    until: i64,
    /// Reserved, and open once the running transaction is durable.
    opening: bool,
    pub(crate) delivery: Delivery,
}

/// Deliveries taken out of a mailbox: the open ones and the reserved ones.
#[derive(Default)]
pub(crate) struct Recalled {
    open: Vec<Waiting>,
    reserved: Vec<Waiting>,
}

impl Recalled {
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.reserved.is_empty()
    }

    pub(crate) fn deliveries(&self) -> impl Iterator<Item = &Delivery> {
        let all = self.open.iter().chain(&self.reserved);
        all.map(|waiting| &waiting.delivery)
    }
}

impl Inner {
    fn all(&self) -> impl Iterator<Item = &Waiting> {
        self.open.iter().chain(&self.reserved)
    }
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there may be a delivery to fetch. Call it before looking, so that no arrival is missed.
    pub(crate) fn arrived(&self) -> Notified<'_> {
        self.arrived.notified()
    }

    /// Adds deliveries whose leases end at `until`. The first `open` of them may be fetched.
    pub(crate) fn put(&self, until: i64, deliveries: Vec<Delivery>, open: usize) {
        let mut inner = self.lock();
        let mut deliveries = deliveries.into_iter().map(|delivery| Waiting {
            until,
            opening: false,
            delivery,
        });
        inner.open.extend(deliveries.by_ref().take(open));
        inner.reserved.extend(deliveries);
        drop(inner);
        self.arrived.notify_one();
    }

    /// How many are reserved and not about to be opened.
    pub(crate) fn reserved(&self) -> usize {
        let inner = self.lock();
        // Those that are about to be opened come first.
        let opening = inner.reserved.iter().take_while(|w| w.opening).count();
        inner.reserved.len() - opening
    }

    /// Marks up to `count` reserved deliveries as about to be opened, and passes their leases to `lease`.
    pub(crate) fn begin_opening(&self, count: usize, mut lease: impl FnMut(&Lease)) -> usize {
        let mut inner = self.lock();
        let closed = inner.reserved.iter_mut().filter(|w| !w.opening);
        let mut opening = 0;
        for waiting in closed.take(count) {
            waiting.opening = true;
            lease(&waiting.delivery.lease);
            opening += 1;
        }
        opening
    }

    /// The transaction is durable: opens the marked deliveries.
    pub(crate) fn finish_opening(&self) {
        let mut inner = self.lock();
        let opening = inner.reserved.iter().take_while(|w| w.opening).count();
        if opening > 0 {
            let Inner { open, reserved, .. } = &mut *inner;
            open.extend(reserved.drain(..opening));
            drop(inner);
            self.arrived.notify_one();
        }
    }

    /// The transaction was rolled back: the marked deliveries stay reserved.
    pub(crate) fn cancel_opening(&self) {
        let mut inner = self.lock();
        inner.reserved.iter_mut().for_each(|w| w.opening = false);
    }

    /// Notes that leases were extended.
    pub(crate) fn renew(&self, until: i64, mut which: impl FnMut(&Delivery) -> bool) {
        let mut inner = self.lock();
        let Inner { open, reserved, .. } = &mut *inner;
        for waiting in open.iter_mut().chain(reserved) {
            if which(&waiting.delivery) {
                waiting.until = until;
            }
        }
        drop(inner);
        self.arrived.notify_one();
    }

    /// Takes back deliveries that were not fetched.
    pub(crate) fn recall(&self, mut which: impl FnMut(&Delivery) -> bool) -> Recalled {
        let mut inner = self.lock();
        let mut take = |queue: &mut VecDeque<Waiting>| {
            let (back, stay): (VecDeque<_>, VecDeque<_>) =
                queue.drain(..).partition(|w| which(&w.delivery));
            *queue = stay;
            Vec::from(back)
        };
        let recalled = Recalled {
            open: take(&mut inner.open),
            reserved: take(&mut inner.reserved),
        };
        drop(inner);
        // A delivery behind an expired lease may be fetched now.
        self.arrived.notify_one();
        recalled
    }

    /// Puts recalled deliveries back.
    pub(crate) fn put_back(&self, recalled: Recalled) {
        let mut inner = self.lock();
        for waiting in recalled.open.into_iter().rev() {
            inner.open.push_front(waiting);
        }
        for mut waiting in recalled.reserved.into_iter().rev() {
            waiting.opening = false;
            inner.reserved.push_front(waiting);
        }
        drop(inner);
        self.arrived.notify_one();
    }

    /// Whether a delivery of this claim or row still waits to be fetched.
    pub(crate) fn holds(&self, mut which: impl FnMut(&Delivery) -> bool) -> bool {
        self.lock().all().any(|w| which(&w.delivery))
    }

    /// The positions of deliveries that still wait to be fetched.
    pub(crate) fn positions(&self, mut which: impl FnMut(&Delivery) -> bool) -> Vec<u64> {
        let inner = self.lock();
        let waiting = inner.all().filter(|w| which(&w.delivery));
        waiting.map(|w| w.delivery.lease.seq()).collect()
    }

    /// Ends the mailbox: fetches fail from now on.
    pub(crate) fn end(&self, error: Error) {
        self.lock().ended.get_or_insert(error);
        self.arrived.notify_one();
    }

    /// Takes up to `max` deliveries. A delivery whose lease has expired stays until the writer has ended it,
    /// because the consumer could not settle it.
    pub(crate) fn take(&self, max: usize, now: i64) -> Option<Result<Vec<Delivery>>> {
        let mut inner = self.lock();
        if let Some(error) = &inner.ended {
            return Some(Err(error.clone()));
        }
        let held = inner.open.iter().take(max.max(1));
        let count = held.take_while(|w| w.until > now).count();
        (count > 0).then(|| Ok(inner.open.drain(..count).map(|w| w.delivery).collect()))
    }
}
