//! The consumer: it takes messages from the desk, where its reader puts them.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{BoxFuture, Code, ConsumeOptions, Consumer, Delivery, Pattern, Result};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::broker::Shared;
use crate::groups::Group;
use crate::reader::{Desk, DeskState, Item, Reader};

pub(crate) struct NatsConsumer {
    shared: Arc<Shared>,
    group: Arc<Group>,
    desk: Arc<Desk>,
    number: u64,
}

impl NatsConsumer {
    pub(crate) fn start(shared: Arc<Shared>, group: Arc<Group>, options: ConsumeOptions) -> Self {
        let desk = Arc::new(Desk {
            state: Mutex::new(DeskState {
                ready: Default::default(),
                want: 0,
                prefetch: options.prefetch,
                paused: options.prefetch == 0,
                handled: options.handled.into(),
                error: None,
                ended: false,
                is_done: false,
            }),
            to_reader: Notify::new(),
            to_consumer: Notify::new(),
            done: Notify::new(),
        });
        let number = shared.number();
        let reader = Reader {
            shared: shared.clone(),
            group: group.clone(),
            desk: desk.clone(),
            number,
            lease: options.lease,
            no_handler_after: options.no_handler_after,
            hand_out_unhandled: options.hand_out_unhandled,
            sources: Vec::new(),
            next: 0,
            extra: Instant::now(),
        };
        shared.link.join();
        tokio::spawn(reader.run());
        Self {
            shared,
            group,
            desk,
            number,
        }
    }

    fn take(&self, max: usize) -> Result<Vec<Item>> {
        let mut state = self.desk.state.lock();
        if let Some(error) = &state.error {
            let error = error.clone();
            // The error stays if the group was removed or the reader has ended. Other errors are returned once.
            if error.code() != Code::GroupNotFound && !state.is_done {
                state.error = None;
            }
            return Err(error);
        }
        if state.paused {
            return Ok(Vec::new());
        }
        let count = state.ready.len().min(max.max(1));
        if count > 0 {
            state.want = 0;
            return Ok(state.ready.drain(..count).collect());
        }
        state.want = max.max(1);
        Ok(Vec::new())
    }

    fn change(&self, change: impl FnOnce(&mut DeskState)) {
        change(&mut self.desk.state.lock());
        self.desk.to_reader.notify_one();
    }
}

impl Consumer for NatsConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            loop {
                let mut woken = pin!(self.desk.to_consumer.notified());
                woken.as_mut().enable();
                let mut closing = pin!(self.shared.link.closing.notified());
                closing.as_mut().enable();
                self.shared.link.check_open()?;
                let items = self.take(max)?;
                if !items.is_empty() {
                    let deliveries = self.shared.hand_out(&self.group, items, self.number);
                    if !deliveries.is_empty() {
                        return Ok(deliveries);
                    }
                    continue;
                }
                self.desk.to_reader.notify_one();
                tokio::select! {
                    () = woken => {}
                    () = closing => {}
                }
            }
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.change(|state| state.handled = handled.into());
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        self.resume(0)
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        self.change(|state| {
            state.paused = prefetch == 0;
            state.prefetch = prefetch;
        });
        Box::pin(std::future::ready(Ok(())))
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        let desk = self.desk.clone();
        drop(self);
        Box::pin(async move {
            let ended = async {
                loop {
                    let mut done = pin!(desk.done.notified());
                    done.as_mut().enable();
                    if desk.state.lock().is_done {
                        return;
                    }
                    done.await;
                }
            };
            // A message that is not given back in time is delivered again when its lease ends.
            let _ = tokio::time::timeout(Duration::from_secs(5), ended).await;
            Ok(())
        })
    }
}

impl Drop for NatsConsumer {
    fn drop(&mut self) {
        self.change(|state| state.ended = true);
    }
}
