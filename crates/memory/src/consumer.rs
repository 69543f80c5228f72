//! A consumer of a group. It claims events only when a fetch returns them, so `fetch` is cancel safe.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{
    BoxFuture, Code, ConsumeOptions, Consumer, Delivery, Error, Lease, Pattern, Position, Result,
    Timestamp, Window,
};

use crate::broker::Memory;
use crate::groups::RowState;
use crate::records::any_matches;

pub(crate) struct MemoryConsumer {
    memory: Arc<Memory>,
    group: u64,
    id: u64,
    options: ConsumeOptions,
}

/// The result of one search for events.
enum Look {
    Got(Vec<Delivery>),
    /// No event can be delivered now. `until` is the time of the next search, unless a wake-up comes earlier.
    Nothing {
        until: Option<Timestamp>,
    },
}

impl MemoryConsumer {
    pub(crate) fn new(memory: Arc<Memory>, group: u64, id: u64, options: ConsumeOptions) -> Self {
        Self {
            memory,
            group,
            id,
            options,
        }
    }

    fn look(&self, max: usize) -> Result<Look> {
        let mut guard = self.memory.open_state()?;
        let state = &mut *guard;
        let now = self.memory.now();
        let Some(group) = state.groups.get_mut(&self.group) else {
            return Err(Error::new(Code::GroupNotFound, "the group was removed"));
        };
        let claim = group.claim(
            self.id,
            &self.options,
            max,
            &state.records,
            now,
            &mut state.next_token,
        );
        let mut deliveries = Vec::with_capacity(claim.taken.len());
        for position in &claim.taken {
            let Some(row) = group.rows.get(position) else {
                continue;
            };
            let RowState::InFlight { token, .. } = row.state else {
                continue;
            };
            let lease = Lease::new(Position::seq(*position), [self.group, token]);
            let delivery = Delivery::new(row.record.clone(), lease)
                .after(row.attempts, row.failures.clone())
                .retried(row.retried);
            deliveries.push(delivery);
        }
        if !claim.orphans.is_empty() {
            let name = group.name.clone();
            state.bury_orphans(&name, claim.orphans, now);
            self.memory.work.notify_waiters();
        }
        Ok(if deliveries.is_empty() {
            Look::Nothing { until: claim.next }
        } else {
            Look::Got(deliveries)
        })
    }
}

impl Consumer for MemoryConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            loop {
                // Registered before the check, so that no notification between the two is lost.
                let mut woken = std::pin::pin!(self.memory.work.notified());
                woken.as_mut().enable();
                match self.look(max.max(1))? {
                    Look::Got(deliveries) => return Ok(deliveries),
                    Look::Nothing { until: None } => woken.await,
                    Look::Nothing { until: Some(until) } => {
                        let wait = until.since(self.memory.now());
                        // Check again in both cases.
                        let _ = tokio::time::timeout(wait, woken).await;
                    }
                }
            }
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        let mut state = self.memory.lock();
        if let Some(group) = state.groups.get_mut(&self.group) {
            if let Some(consumer) = group.consumers.get_mut(&self.id) {
                consumer.set_patterns(handled);
            }
            group.handlers_changed();
        }
        drop(state);
        self.memory.work.notify_waiters();
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        self.resume(0)
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        // Events are claimed only when they are fetched, so there is nothing to release.
        self.options.prefetch = prefetch;
        self.memory.work.notify_waiters();
        Box::pin(std::future::ready(Ok(())))
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        drop(self);
        Box::pin(std::future::ready(Ok(())))
    }
}

impl Drop for MemoryConsumer {
    fn drop(&mut self) {
        let mut state = self.memory.lock();
        if let Some(group) = state.groups.get_mut(&self.group) {
            group.consumers.remove(&self.id);
        }
        drop(state);
        // The other consumers must check again which events have no handler.
        self.memory.work.notify_waiters();
    }
}

/// The time from an outcome to the next delivery: two tasks have to run.
const STEP: Duration = Duration::from_micros(100);

/// A consumer in its group: what it handles, and how many events it may get.
#[derive(Debug)]
pub(crate) struct Member {
    patterns: Vec<Pattern>,
    in_flight: usize,
    /// How many deliveries may be in flight. Every delivered event counts, because it may have begun.
    window: Window,
    /// How many events were settled since the last update of the window.
    settled: usize,
}

impl Member {
    pub(crate) fn new(options: &ConsumeOptions) -> Self {
        Self {
            patterns: options.handled.clone(),
            in_flight: 0,
            window: Window::new(options.concurrency),
            settled: 0,
        }
    }

    pub(crate) fn set_patterns(&mut self, patterns: Vec<Pattern>) {
        self.patterns = patterns;
    }

    pub(crate) fn handles(&self, event_type: &str) -> bool {
        any_matches(&self.patterns, event_type)
    }

    pub(crate) fn took(&mut self) {
        self.in_flight += 1;
    }

    /// Records that an event is no longer in flight.
    pub(crate) fn gave(&mut self) {
        self.in_flight -= 1;
        self.settled += 1;
    }

    /// How many more events the consumer may get.
    pub(crate) fn free(&mut self, prefetch: usize) -> usize {
        if self.settled > 0 {
            self.window.settled(self.settled, Instant::now(), STEP);
            self.settled = 0;
        }
        let most = self.window.size().min(prefetch);
        most.saturating_sub(self.in_flight)
    }
}
