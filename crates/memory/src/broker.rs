//! The engine, and the trait `Broker`.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, Clock, ConsumeOptions, Consumer, Durability, Error,
    Event, EventId, GroupInfo, GroupName, GroupSpec, Lease, Result, Settlement, SubscriptionInfo,
    Timestamp,
};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::consumer::{Member, MemoryConsumer};
use crate::state::State;

/// The engine: its state behind one lock. It implements every trait of the engine except `Broker` and `KeyValue`,
/// which [`MemoryBroker`] implements.
#[derive(Debug)]
pub(crate) struct Memory {
    state: Mutex<State>,
    clock: Arc<dyn Clock>,
    /// Wakes tasks that wait for events or for the log to grow.
    pub(crate) work: Notify,
    /// Wakes tasks that watch values.
    pub(crate) values: Notify,
}

impl Memory {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            state: Mutex::new(State::new()),
            clock,
            work: Notify::new(),
            values: Notify::new(),
        }
    }

    /// Wakes all waiting tasks whenever the clock jumps, so that they check due times again.
    pub(crate) fn wake_on_jumps(self: &Arc<Self>) {
        let memory = Arc::downgrade(self);
        self.clock.on_jump(Box::new(move || {
            if let Some(memory) = memory.upgrade() {
                memory.work.notify_waiters();
                memory.values.notify_waiters();
            }
        }));
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Locks the state. Fails if the engine is closed.
    pub(crate) fn open_state(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.lock();
        if state.closed {
            return Err(Error::shutdown());
        }
        Ok(state)
    }

    fn append_batch(&self, batch: Vec<Event>) -> Result<Vec<Result<Appended>>> {
        let answers = self.open_state()?.append(batch, self.now())?;
        self.work.notify_waiters();
        Ok(answers.into_iter().map(Ok).collect())
    }

    fn settle_batch(&self, settlements: Vec<Settlement>) -> Result<Vec<Result<()>>> {
        let mut state = self.open_state()?;
        let now = self.now();
        let settled = settlements.into_iter();
        let answers = settled
            .map(|settlement| state.settle(settlement, now))
            .collect();
        drop(state);
        self.work.notify_waiters();
        Ok(answers)
    }

    fn begin(
        self: &Arc<Self>,
        name: &GroupName,
        options: ConsumeOptions,
    ) -> Result<MemoryConsumer> {
        let mut state = self.open_state()?;
        let group = state.group_number(name)?;
        let id = state.number();
        if let Some(group) = state.groups.get_mut(&group) {
            group.consumers.insert(id, Member::new(&options));
            group.handlers_changed();
        }
        drop(state);
        self.work.notify_waiters();
        Ok(MemoryConsumer::new(self.clone(), group, id, options))
    }
}

/// The engine as a broker. The `Arc` lets consumers and watchers share the engine.
#[derive(Debug)]
pub(crate) struct MemoryBroker(pub(crate) Arc<Memory>);

impl Broker for MemoryBroker {
    fn capabilities(&self) -> Capabilities {
        Capabilities::full("memory", Durability::Memory)
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        Box::pin(async move {
            let declared = self.0.open_state()?.declare(group, self.0.now())?;
            self.0.work.notify_waiters();
            Ok(declared)
        })
    }

    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut state = self.0.open_state()?;
            state.retract(subscription, self.0.now())?;
            state.wake_all_waiters();
            Ok(())
        })
    }

    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut state = self.0.open_state()?;
            state.remove_group(&group)?;
            state.wake_all_waiters();
            self.0.work.notify_waiters();
            Ok(())
        })
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        Box::pin(async move { self.0.append_batch(batch) })
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            let consumer = self.0.begin(&group, options)?;
            Ok(Box::new(consumer) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move { self.0.settle_batch(settlements) })
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            let mut state = self.0.open_state()?;
            let now = self.0.now();
            let until = now.plus(by);
            let extended = leases.iter().map(|lease| state.extend(lease, until, now));
            Ok(extended.collect())
        })
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        Box::pin(async move { self.0.inspect_groups() })
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut state = self.0.lock();
            state.closed = true;
            state.wake_all_waiters();
            self.0.work.notify_waiters();
            self.0.values.notify_waiters();
            Ok(())
        })
    }
}
