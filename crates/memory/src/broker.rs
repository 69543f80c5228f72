//! The broker operations, on the state behind its lock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, Clock, Code, ConsumeOptions, Consumer, Cursor,
    Depth, Durability, Error, Event, EventId, GroupInfo, GroupName, GroupSpec, Lag, Lease, Pattern,
    Position, Redeliver, Redelivery, Result, Settled, SettledOutcome, Settlement, SubscriptionInfo,
    Timestamp,
};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::consumer::MemoryConsumer;
use crate::group::{Group, RowState};
use crate::member::Member;
use crate::records::Records;
use crate::state::State;

/// The engine. This one type implements everything it offers.
#[derive(Debug)]
pub(crate) struct Memory {
    state: Mutex<State>,
    clock: Arc<dyn Clock>,
    /// Wakes tasks that wait for events or for the log to grow.
    pub(crate) work: Notify,
}

impl Memory {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            state: Mutex::new(State::new()),
            clock,
            work: Notify::new(),
        }
    }

    /// Checks due times again whenever the clock jumps.
    pub(crate) fn wake_on_jumps(self: &Arc<Self>) {
        let memory = Arc::downgrade(self);
        self.clock.on_jump(Box::new(move || {
            if let Some(memory) = memory.upgrade() {
                memory.work.notify_waiters();
            }
        }));
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The state, unless the engine is closed.
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

    fn inspect_groups(&self) -> Result<Vec<GroupInfo>> {
        let mut state = self.open_state()?;
        let now = self.now();
        state.end_leases(now);
        let groups = state
            .names
            .values()
            .filter_map(|number| state.groups.get(number));
        let infos = groups.map(|group| {
            let dead_letters = state.dead.open_by_type(&group.name);
            describe(group, &state.records, dead_letters, now)
        });
        Ok(infos.collect())
    }
}

fn describe(
    group: &Group,
    records: &Records,
    dead_letters: BTreeMap<Arc<str>, u64>,
    now: Timestamp,
) -> GroupInfo {
    let mut types: BTreeMap<Arc<str>, Lag> = BTreeMap::new();
    for row in group.rows.values() {
        let lag = types
            .entry(row.record.event.type_arc().clone())
            .or_default();
        match row.state {
            RowState::InFlight { .. } => lag.in_flight += 1,
            _ => lag.waiting += 1,
        }
        lag.unhandled += u64::from(group.is_unhandled(row));
        lag.note_oldest(row.record.received_at);
    }
    let beyond = records.after(group.position);
    for record in beyond.filter(|record| group.awaits(record)) {
        let lag = types.entry(record.event.type_arc().clone()).or_default();
        lag.behind += 1;
        lag.note_oldest(record.received_at);
    }
    for (event_type, count) in dead_letters {
        types.entry(event_type).or_default().dead_letters = count;
    }
    let mut subscriptions = group.subscriptions.clone();
    subscriptions.sort_by(|a, b| a.name.cmp(&b.name));
    let mut info = GroupInfo::new(group.name.clone(), group.active_at);
    info.ordered = group.ordered;
    info.ephemeral = group.ephemeral;
    let patterns = group.subscriptions.iter().map(|s| s.pattern.as_str());
    info.patterns = patterns.map(str::to_owned).collect();
    info.subscriptions = subscriptions;
    info.position = Cursor::seq(group.position);
    info.with_types(types, now)
}

/// An entry among the waiters of a position; removed when the future is dropped.
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

/// The broker is shared with its consumers through an `Arc`.
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
            Ok(())
        })
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

impl Depth for Memory {
    fn depth(&self, stream: Pattern, limit: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { self.depth_of(&stream, limit) })
    }

    fn drop_oldest(&self, stream: Pattern, keep: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { self.drop_from(&stream, keep) })
    }
}

impl Redeliver for Memory {
    fn redeliver(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        Box::pin(async move {
            let mut state = self.open_state()?;
            let (group, now) = (state.group_number(&group)?, self.now());
            let each = positions.into_iter();
            let answers = each.map(|position| state.redeliver(group, position.place(), now));
            let answers = answers.collect();
            drop(state);
            self.work.notify_waiters();
            Ok(answers)
        })
    }

    fn redeliverable(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let group = state.group_number(&group)?;
            let each = positions.into_iter();
            Ok(each
                .map(|at| state.redeliverable(group, at.place()))
                .collect())
        })
    }
}
