//! Waiting until an event is settled in every group.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{BoxFuture, Code, Error, EventState, Position, Result, Settled, SettledOutcome};
use tokio::sync::Notify;

use crate::broker::Memory;
use crate::log::no_event;
use crate::state::State;

impl State {
    /// The outcome of an event in the groups that existed when it was appended; `None` if a group has not settled
    /// it yet.
    pub(crate) fn outcome(&self, position: u64) -> Result<Option<SettledOutcome>> {
        let Some(record) = self.records.get(position) else {
            return Err(no_event(position));
        };
        let mut outcome = SettledOutcome::default();
        for number in self.names.values() {
            let group = &self.groups[number];
            if group.declared_at >= position {
                continue;
            }
            match self.state_in(group, record) {
                EventState::Done => {}
                EventState::Dlq => outcome.dead_lettered.push(group.name.clone()),
                EventState::Pending | EventState::Processing => return Ok(None),
            }
        }
        Ok(Some(outcome))
    }

    pub(crate) fn wake_waiters(&self, position: u64) {
        if let Some((waiter, _)) = self.waiters.get(&position) {
            waiter.notify_waiters();
        }
    }

    pub(crate) fn wake_all_waiters(&self) {
        self.waiters
            .values()
            .for_each(|(waiter, _)| waiter.notify_waiters());
    }
}

impl Memory {
    async fn wait_settled(&self, position: u64) -> Result<SettledOutcome> {
        let waiting = Waiting::new(self, position)?;
        loop {
            let mut changed = std::pin::pin!(waiting.notify.notified());
            changed.as_mut().enable();
            if let Some(outcome) = self.open_state()?.outcome(position)? {
                return Ok(outcome);
            }
            changed.await;
        }
    }
}

impl Settled for Memory {
    fn settled(
        &self,
        position: Position,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<SettledOutcome>> {
        Box::pin(async move {
            let settled = self.wait_settled(position.place());
            let waited = tokio::time::timeout(timeout, settled).await;
            waited.unwrap_or_else(|_| {
                let what = format!("event {position} was not settled within {timeout:?}");
                Err(Error::new(Code::Timeout, what))
            })
        })
    }
}

/// A waiting call, as an entry in [`State::waiters`](crate::state::State). Dropping it removes the entry.
struct Waiting<'a> {
    memory: &'a Memory,
    position: u64,
    notify: Arc<Notify>,
}

impl<'a> Waiting<'a> {
    fn new(memory: &'a Memory, position: u64) -> Result<Self> {
        let mut state = memory.open_state()?;
        let (notify, waiters) = state.waiters.entry(position).or_default();
        *waiters += 1;
        let notify = notify.clone();
        Ok(Self {
            memory,
            position,
            notify,
        })
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.memory.lock();
        if let Some((_, waiters)) = state.waiters.get_mut(&self.position) {
            *waiters -= 1;
            if *waiters == 0 {
                state.waiters.remove(&self.position);
            }
        }
    }
}
