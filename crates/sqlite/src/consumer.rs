//! A consumer of a group: the user's side and the writer's side.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{BoxFuture, ConsumeOptions, Consumer, Delivery, Pattern, Result, Window};
use tokio::sync::oneshot;

use crate::handle::Handle;
use crate::ids::IdMap;
use crate::mailbox::Mailbox;
use crate::queue::Command;
use crate::rows::{MAX_CACHED_TYPES, micros};

/// Limit for the payload bytes that a consumer has in flight, in total or per event it asked for, whichever
/// is more. One event is always allowed.
const BYTES_IN_FLIGHT: u64 = 16 << 20;
const BYTES_PER_EVENT: u64 = 4096;

/// A consumer that the writer does not know yet.
pub(crate) struct NewSession {
    pub(crate) id: u64,
    pub(crate) group: everbus_core::GroupName,
    pub(crate) options: ConsumeOptions,
    pub(crate) mailbox: Arc<Mailbox>,
}

/// The writer's side of a consumer.
pub(crate) struct Session {
    pub(crate) group: i64,
    pub(crate) prefetch: usize,
    pub(crate) lease: Duration,
    pub(crate) no_handler_after: Duration,
    pub(crate) mailbox: Arc<Mailbox>,
    handled: Vec<Pattern>,
    handles: IdMap<i64, bool>,
    /// Handed out and not settled.
    pub(crate) in_flight: usize,
    /// Payload bytes of the events in flight.
    bytes_in_flight: u64,
    /// How many of the events in flight may have begun.
    pub(crate) window: Window,
    /// Events settled since the window was last updated.
    settled: usize,
    /// If an odd number of places is free: whether the last place goes to reserved events or to waiting rows.
    pub(crate) reserved_next: bool,
    /// Whether the feeder is reading for this consumer.
    pub(crate) feeding: bool,
    /// When the feeder may be asked again after a failed read.
    pub(crate) feed_after: Option<Instant>,
    /// Whether rows without a handler must be searched again.
    pub(crate) look_for_unhandled: bool,
}

impl Session {
    pub(crate) fn new(new: &NewSession, group: i64) -> Self {
        Self {
            group,
            prefetch: new.options.prefetch,
            lease: new.options.lease,
            no_handler_after: new.options.no_handler_after,
            mailbox: new.mailbox.clone(),
            handled: new.options.handled.clone(),
            handles: IdMap::default(),
            in_flight: 0,
            bytes_in_flight: 0,
            window: Window::new(new.options.concurrency),
            settled: 0,
            reserved_next: true,
            feeding: false,
            feed_after: None,
            look_for_unhandled: true,
        }
    }

    /// How many more events it may have in flight.
    pub(crate) fn room(&self) -> usize {
        if self.room_in_bytes() == 0 {
            0
        } else {
            self.prefetch.saturating_sub(self.in_flight)
        }
    }

    /// How many more payload bytes it may have in flight, so that large events do not fill the memory.
    pub(crate) fn room_in_bytes(&self) -> u64 {
        let limit = (self.prefetch as u64)
            .saturating_mul(BYTES_PER_EVENT)
            .max(BYTES_IN_FLIGHT);
        limit.saturating_sub(self.bytes_in_flight)
    }

    /// Counts events that were handed out.
    pub(crate) fn took(&mut self, count: usize, bytes: u64) {
        self.in_flight += count;
        self.bytes_in_flight += bytes;
    }

    /// Counts a settled event.
    pub(crate) fn settled(&mut self, bytes: u64) {
        self.gave(1, bytes);
        self.settled += 1;
    }

    /// Reports the events settled in this transaction to the window.
    pub(crate) fn tell_window(&mut self, now: Instant, step: Duration) {
        if self.settled > 0 {
            self.window.settled(self.settled, now, step);
            self.settled = 0;
        }
    }

    /// Counts events that are no longer in flight.
    pub(crate) fn gave(&mut self, count: usize, bytes: u64) {
        self.in_flight = self.in_flight.saturating_sub(count);
        self.bytes_in_flight = self.bytes_in_flight.saturating_sub(bytes);
    }

    /// Resets the counts after a rollback. Clears the cache of types, too, because their numbers may be assigned again.
    pub(crate) fn recount(&mut self) {
        (self.in_flight, self.bytes_in_flight) = (0, 0);
        self.handles.clear();
    }

    pub(crate) fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.handled = handled;
        self.handles.clear();
        self.look_for_unhandled = true;
    }

    /// Whether this process has a handler for a type.
    pub(crate) fn handles(&mut self, type_id: i64, name: &str) -> bool {
        if let Some(known) = self.handles.get(&type_id) {
            return *known;
        }
        if self.handles.len() >= MAX_CACHED_TYPES {
            self.handles.clear();
        }
        let handled = self.handled.iter().any(|p| p.matches(name));
        self.handles.insert(type_id, handled);
        handled
    }
}

/// The user's side of a consumer.
pub(crate) struct SqliteConsumer {
    pub(crate) id: u64,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) handle: Arc<Handle>,
    pub(crate) closed: bool,
}

impl Consumer for SqliteConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            loop {
                // Registered before looking, so that no arrival is missed.
                let arrived = self.mailbox.arrived();
                if let Some(result) = self.mailbox.take(max, micros(self.handle.clock.now())) {
                    return result;
                }
                arrived.await;
            }
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.handle.queue.push(Command::SetHandled {
            session: self.id,
            handled,
        });
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        self.resume(0)
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        let id = self.id;
        self.handle
            .job(move |writer| writer.deliveries.set_prefetch(&mut writer.tx, id, prefetch))
    }

    fn close(mut self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        self.closed = true;
        let (reply, answer) = oneshot::channel();
        self.handle.queue.push(Command::Detach {
            session: self.id,
            reply: Some(reply),
        });
        Box::pin(async move {
            match answer.await {
                // A stopped engine holds no deliveries.
                Ok(Err(e)) if e.code() == everbus_core::Code::EventBusShutdownError => Ok(()),
                Ok(result) => result,
                Err(_) => Ok(()),
            }
        })
    }
}

impl Drop for SqliteConsumer {
    fn drop(&mut self) {
        if !self.closed {
            self.handle.queue.push(Command::Detach {
                session: self.id,
                reply: None,
            });
        }
    }
}
