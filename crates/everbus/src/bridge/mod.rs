//! A bridge: carries the events of one bus to another, whatever their engines are.
//!
//! It consumes a group at the source and acks an event only after the target has acknowledged it, so a bridge
//! that is killed continues where it was. Ids, types, payloads, attributes and the order of each key are kept.
//!
//! ```
//! use everbus::bridge::Bridge;
//! use everbus::Bus;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> everbus::Result<()> {
//! # let dir = tempfile::tempdir().unwrap();
//! # let file = dir.path().join("shop.db").display().to_string();
//! let (from, to) = (Bus::open(file).await?, Bus::open("memory:").await?);
//! from.publish(("order.placed", 1)).await?;
//! let stats = Bridge::new(&from, &to).run_until_caught_up().await?;
//! assert_eq!(stats.moved, 1);
//! # Ok(())
//! # }
//! ```
//!
//! # What is carried
//!
//! - Every event of the patterns that is for all groups. `*`, the default, leaves out `system.…`: the target publishes
//!   notices about its own dead letters. An event that is addressed to one group stays where that group is.
//! - `occurred_at` and all attributes stay as they are; `received_at` is the time at which the target received it.
//! - An event that is published for later (`not_before`) is carried at once and waits at the target.
//! - A payload in an object store stays there: the event refers to the same object, which the target must be able
//!   to read (`overflow.also_read`).
//!
//! # What can go wrong
//!
//! - *The target is away:* the bridge waits and repeats, with the same ids.
//! - *The target refuses an event* (its id has another body there, it is too large, no stream covers its type): the
//!   event becomes a dead letter of the bridge's group at the source. If the target refuses everything, the bridge ends
//!   with the error.
//! - *The bridge is killed:* events that it had not acked are delivered again. A target that recognises ids as long as
//!   it keeps the events stores nothing twice. A target that recognises ids for a limited time may store events twice
//!   that were in flight when the bridge was killed, if the bridge starts again after that time; with a store beside
//!   the target, the bridge asks the store first.
//! - *Two opposite bridges:* an event carries the marks of its bridges ([`Attributes::bridged`]) and is not carried
//!   back to a log that it came from. Source and target that are the same log are refused.
//!
//! [`Attributes::bridged`]: crate::Attributes::bridged

mod carry;
mod held;
mod route;
mod stats;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Class, Code, ConsumeOptions, Delivery, Error, GroupInfo, GroupName, Pattern, Result,
    Settlement, StartFrom, Verdict, no_group,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use self::held::Held;
use self::route::{Homes, Route};
pub use self::stats::BridgeStats;
use crate::guard;
use crate::runtime::bus::Bus;

/// The group of a bridge that names none.
pub const BRIDGE: &str = "everbus.bridge";

/// How many events are fetched, appended and settled at a time.
const BATCH: usize = 512;
/// How many batches wait for the stage behind them.
const AHEAD: usize = 2;
/// Enough for the batches that are fetched, appended and settled at the same time, and one that the engine prepares.
const PREFETCH: usize = BATCH * 6;
/// How long another bridge waits for the events of a bridge that died, on an engine that does not detect dead
/// processes.
const LEASE: Duration = Duration::from_secs(60);
/// How often the lag is read: usually, and while nothing is in flight.
const LOOK: Duration = Duration::from_millis(200);
const LOOK_IDLE: Duration = Duration::from_millis(10);
/// The first and the longest pause between attempts during an outage.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// After an error, the bridge settles the events that it has carried, for at most this time.
const LAST: Duration = Duration::from_secs(5);

/// Carries events from one bus to another. Neither bus need be started.
///
/// Run one bridge for each pair of source and target. Several bridges of one group share its events, and events
/// of one key may overtake each other between them unless the group is [ordered](Self::ordered).
pub struct Bridge {
    from: Bus,
    to: Bus,
    group: GroupName,
    /// `None`: everything, or for an existing group of consumers its own patterns.
    patterns: Option<Vec<Pattern>>,
    start_from: StartFrom,
    ordered: bool,
    target: String,
    counters: Arc<Mutex<BridgeStats>>,
    homes: Homes,
    phase: watch::Sender<Phase>,
    /// Notified when everything in flight is settled, because the run may have caught up.
    idle: Notify,
}

/// The phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Run,
    /// Fetch no more, finish the rest.
    Drain,
    /// As `Drain`, and do not wait for a target that is away.
    Stop,
}

/// When a run ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    Stopped,
    CaughtUp,
}

impl Bridge {
    /// A bridge from the first bus to the second one, for every event from the beginning of the log.
    pub fn new(from: &Bus, to: &Bus) -> Self {
        Self {
            from: from.clone(),
            to: to.clone(),
            group: route::default_group(),
            patterns: None,
            start_from: StartFrom::First,
            ordered: false,
            target: to.capabilities().engine.to_owned(),
            counters: Arc::default(),
            homes: Homes::default(),
            phase: watch::Sender::new(Phase::Run),
            idle: Notify::new(),
        }
    }

    /// The group at the source, whose cursor is the progress of the bridge ([`BRIDGE`]). Bridges to different targets,
    /// or with different patterns, need groups of their own.
    ///
    /// An existing group of consumers may be named: the bridge takes over its patterns, and carries only the events
    /// that the group has not handled. The consumers of the group must have stopped.
    #[must_use]
    pub fn group(mut self, group: GroupName) -> Self {
        self.group = group;
        self
    }

    /// Which events are carried: those that match one of these patterns.
    #[must_use]
    pub fn patterns(mut self, patterns: Vec<Pattern>) -> Self {
        self.patterns = Some(patterns);
        self
    }

    /// Where a new bridge begins (the beginning of the log). One that has run before continues.
    #[must_use]
    pub fn start_from(mut self, from: StartFrom) -> Self {
        self.start_from = from;
        self
    }

    /// Keeps the order of each key also when the bridge is killed, or when several bridges share the group. Without
    /// this, events that were in flight when a bridge was killed may come after later ones of their key. It is slower,
    /// above all if a few keys have most of the events.
    #[must_use]
    pub fn ordered(mut self, ordered: bool) -> Self {
        self.ordered = ordered;
        self
    }

    /// The name of the target, for messages and for the group's subscription: a bridge refuses to continue the group of
    /// a bridge to another target. By default the name of the engine.
    #[must_use]
    pub fn target(mut self, name: impl Into<String>) -> Self {
        self.target = name.into();
        self
    }

    /// The counts of this bridge.
    pub fn stats(&self) -> BridgeStats {
        self.counters.lock().clone()
    }

    /// Carries events until it is [stopped](Self::stop). Dropping the future loses nothing.
    pub async fn run(&self) -> Result<BridgeStats> {
        self.carry(Until::Stopped).await
    }

    /// Carries events until the target has every event of the source.
    ///
    /// If programs publish to the source meanwhile, the run ends at a moment when no event is left. When these programs
    /// publish elsewhere, a second run carries the rest.
    pub async fn run_until_caught_up(&self) -> Result<BridgeStats> {
        self.carry(Until::CaughtUp).await
    }

    /// Ends the runs after the current work. Does not wait for a target that is not available: events that it has not
    /// stored are released.
    pub fn stop(&self) {
        self.phase.send_replace(Phase::Stop);
    }

    async fn carry(&self, until: Until) -> Result<BridgeStats> {
        self.phase
            .send_if_modified(|phase| match std::mem::replace(phase, Phase::Run) {
                Phase::Stop => {
                    *phase = Phase::Stop;
                    false
                }
                before => before != Phase::Run,
            });
        let route = self.route().await?;
        let held = Held::default();
        let (to_append, batches) = mpsc::channel(AHEAD);
        let (to_settle, verdicts) = mpsc::channel(AHEAD);
        let stages = async {
            let mut carrying = pin!(async {
                let fetching = self.fetch(&route, &held, to_append);
                let appending = self.append(&route, &held, batches, to_settle);
                tokio::try_join!(fetching, appending).map(drop)
            });
            let mut settling = pin!(self.settle(&held, verdicts));
            tokio::select! {
                carried = &mut carrying => {
                    // Events that the target has stored are settled, also after an error: they must not be sent again.
                    let settled = match carried.is_ok() {
                        true => settling.await,
                        false => tokio::time::timeout(LAST, settling).await.unwrap_or(Ok(())),
                    };
                    carried.and(settled)
                }
                settled = &mut settling => match settled {
                    Ok(()) => carrying.await,
                    error => error,
                },
            }
        };
        let ended = tokio::select! {
            ended = Box::pin(stages) => ended,
            error = self.keep(&held) => Err(error),
            error = self.watch(until) => Err(error),
        };
        self.counters.lock().waiting = false;
        if ended.is_err() {
            self.give_back(&held).await;
        }
        ended.map(|()| self.stats())
    }

    /// Fetches batches while there is room for them. Ends when the phase says so.
    async fn fetch(
        &self,
        route: &Route,
        held: &Held,
        batches: mpsc::Sender<Vec<Delivery>>,
    ) -> Result<()> {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.consume(route, held, &batches, &mut pause).await {
                Err(error) if error.class().may_repeat() => {
                    if !self.endure("the source", &error, &mut pause).await {
                        return Ok(());
                    }
                }
                ended => return ended,
            }
        }
    }

    async fn consume(
        &self,
        route: &Route,
        held: &Held,
        batches: &mpsc::Sender<Vec<Delivery>>,
        pause: &mut Duration,
    ) -> Result<()> {
        let options = ConsumeOptions::new(route.patterns.clone())
            .prefetch(PREFETCH)
            .lease(LEASE)
            .merged(true);
        let broker = &self.from.engine().broker;
        let mut consumer = broker.consume(self.group.clone(), options).await?;
        let outcome = loop {
            // Waits for room first: events that are not fetched cost no memory here.
            let room = tokio::select! {
                biased;
                () = self.ending() => break Ok(()),
                room = batches.reserve() => room,
            };
            let Ok(room) = room else {
                break Ok(());
            };
            let fetched = tokio::select! {
                biased;
                () = self.ending() => break Ok(()),
                fetched = consumer.fetch(BATCH) => fetched,
            };
            match fetched {
                Ok(batch) => {
                    *pause = FIRST_PAUSE;
                    held.add(&batch);
                    room.send(batch);
                }
                Err(error) => break Err(error),
            }
        };
        let closed = consumer.close().await;
        outcome.and(closed)
    }

    /// Settles the carried events. A verdict that the source cannot apply now is repeated.
    async fn settle(
        &self,
        held: &Held,
        mut verdicts: mpsc::Receiver<Vec<Settlement>>,
    ) -> Result<()> {
        let mut pause = FIRST_PAUSE;
        while let Some(mut batch) = verdicts.recv().await {
            while let Ok(more) = verdicts.try_recv() {
                batch.extend(more);
            }
            while !batch.is_empty() {
                let broker = &self.from.engine().broker;
                let error = match broker.settle(batch.clone()).await {
                    Ok(answers) => match self.settled(held, &mut batch, answers)? {
                        None => break,
                        Some(error) => error,
                    },
                    Err(error) if error.class().may_repeat() => error,
                    Err(error) => return Err(error),
                };
                if !self.endure("the source", &error, &mut pause).await {
                    // The events are delivered again; the target recognises those that were carried.
                    return Ok(());
                }
            }
            pause = FIRST_PAUSE;
            if held.is_empty() {
                self.idle.notify_one();
            }
        }
        Ok(())
    }

    /// Keeps in the batch only the verdicts that must be repeated, and returns the error.
    fn settled(
        &self,
        held: &Held,
        batch: &mut Vec<Settlement>,
        answers: Vec<Result<()>>,
    ) -> Result<Option<Error>> {
        let mut again = None;
        let mut open = Vec::new();
        for (settlement, answer) in batch.drain(..).zip(answers) {
            match answer {
                Err(error) if error.class().may_repeat() => {
                    again = Some(error);
                    open.push(settlement);
                    continue;
                }
                Err(error) if error.class() == Class::Final => return Err(error),
                // The lease was lost: the event is delivered again, and the target recognises it.
                Err(error) => {
                    self.counters.lock().late += 1;
                    guard::log(|| {
                        tracing::debug!(target: "everbus::bridge", %error, "a verdict came too late");
                    });
                }
                Ok(()) => {}
            }
            held.remove(&settlement.lease);
        }
        *batch = open;
        Ok(again)
    }

    /// Releases the events in flight after an error, so that the next run gets them at once. If this fails too, their
    /// leases end.
    async fn give_back(&self, held: &Held) {
        let given = |(lease, sent)| {
            let verdict = match sent {
                true => self.unanswered(1),
                false => Verdict::Release {
                    after: Duration::ZERO,
                },
            };
            Settlement::new(lease, verdict)
        };
        let settlements: Vec<Settlement> = held.all().into_iter().map(given).collect();
        let given = self.from.engine().broker.settle(settlements);
        let _ = tokio::time::timeout(Duration::from_secs(1), given).await;
    }

    /// Extends the leases of all events in flight. Returns only with an error.
    async fn keep(&self, held: &Held) -> Error {
        loop {
            tokio::time::sleep(LEASE / 3).await;
            let leases = held.leases();
            if leases.is_empty() {
                continue;
            }
            // A lease that cannot be extended ends, and its event is delivered again.
            if let Err(error) = self.from.engine().broker.extend(leases, LEASE).await
                && error.class() == Class::Final
            {
                return error;
            }
        }
    }

    /// Reads the lag, and ends the run when there is none, if `until` says so. Returns only with an error.
    async fn watch(&self, until: Until) -> Error {
        loop {
            let began = Instant::now();
            match self.look(until).await {
                Ok(true) => {
                    self.phase.send_if_modified(|phase| {
                        let running = *phase == Phase::Run;
                        if running {
                            *phase = Phase::Drain;
                        }
                        running
                    });
                    std::future::pending::<()>().await;
                }
                Ok(false) => {}
                Err(error) if error.class().may_repeat() => {}
                Err(error) => return error,
            }
            // Counting a large backlog is slow. A run that ends when there is none looks sooner after
            // nothing is in flight.
            let took = began.elapsed();
            let most = (took * 10).max(LOOK_IDLE);
            let soon = match until {
                Until::Stopped => most,
                Until::CaughtUp => (took * 2).max(LOOK_IDLE),
            };
            tokio::time::sleep(soon).await;
            let rest = most.max(LOOK).saturating_sub(soon);
            let _ = tokio::time::timeout(rest, self.idle.notified()).await;
        }
    }

    /// Returns whether the run must end, because the target has everything.
    async fn look(&self, until: Until) -> Result<bool> {
        let info = self.info().await?.ok_or_else(|| no_group(&self.group))?;
        let unsettled = info.lag().unsettled();
        self.counters.lock().lag = Some(unsettled);
        Ok(until == Until::CaughtUp && unsettled == 0)
    }

    async fn info(&self) -> Result<Option<GroupInfo>> {
        let groups = self.from.engine().broker.inspect().await?;
        Ok(groups.into_iter().find(|group| group.name == self.group))
    }

    /// Resolves once a run fetches no more.
    async fn ending(&self) {
        self.reached(|phase| phase != Phase::Run).await;
    }

    async fn reached(&self, is: impl Fn(Phase) -> bool) {
        let mut phase = self.phase.subscribe();
        let _ = phase.wait_for(|phase| is(*phase)).await;
    }

    /// Waits, longer each time. Returns `false` if the bridge stops.
    async fn endure(&self, which: &str, error: &Error, pause: &mut Duration) -> bool {
        self.counters.lock().went_wrong(error);
        if !std::mem::replace(&mut self.counters.lock().waiting, true) {
            guard::log(|| {
                tracing::warn!(target: "everbus::bridge", %error, "the bridge waits for {which}; nothing is lost");
            });
        }
        let stopped = tokio::select! {
            () = self.reached(|phase| phase == Phase::Stop) => true,
            () = tokio::time::sleep(*pause) => false,
        };
        *pause = (*pause * 2).min(LONGEST_PAUSE);
        !stopped
    }
}

impl std::fmt::Debug for Bridge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bridge")
            .field("group", &self.group)
            .field("target", &self.target)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// The error for a bridge whose two ends are one log.
fn same_log() -> Error {
    Error::new(
        Code::InvalidSetting,
        "source and target of the bridge are the same log",
    )
    .hint("name another file, database, schema or server as the target")
}
