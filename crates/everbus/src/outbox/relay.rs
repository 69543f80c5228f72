//! The relay: takes the lease of an outbox, publishes its rows, and waits for more.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use everbus_core::{
    Code, Error, EventId, LONGEST_RELAY_LEASE, OutboxKeep, OutboxSource, RelayLease, Result,
};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::pass::Passed;
use super::publish::LastSent;
use super::stats::RelayStats;
use super::sweep::Sweeper;
use crate::runtime::bus::Bus;

/// The batch size when the relay is not behind.
const BATCH: usize = 100;
/// The largest batch size when it is behind.
const MAX_BATCH: usize = 5000;
/// How long the lease lasts. After a relay was killed, the others wait this long.
const LEASE: Duration = Duration::from_secs(10);
/// The first and the longest pause between attempts during an outage.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How often a standby relay checks whether the lease is free.
const STAND_BY: Duration = Duration::from_millis(500);

/// Publishes the rows of an outbox while it runs.
///
/// Several relays of one outbox may run, in one process or in many: one of them works, the others stand by
/// and take over when its lease ends. Rows are published in order; rows with the same key never overtake
/// each other. A row that the bus or the broker rejects (a payload that does not parse or does not match
/// its schema, an id that was used for another event) waits 1, 2, 4 and 8 seconds between five attempts,
/// and is then `failed`, with a dead letter and an event `system.dead_letter`. During an outage of the
/// broker the relay waits, however long, and counts no attempt. If the cause of an error is unclear, the
/// relay tries other rows: if one is accepted, the first row is the cause.
pub struct Relay {
    pub(super) bus: Bus,
    pub(super) source: Arc<dyn OutboxSource>,
    pub(super) counters: Arc<Mutex<RelayStats>>,
    pub(super) batch: usize,
    pub(super) max_batch: usize,
    /// Rows up to this one were sent to the broker by this relay, marked or not.
    pub(super) tried: AtomicI64,
    pub(super) last_sent: LastSent,
    pub(super) sweeper: Sweeper,
    lease: Duration,
    holder: String,
    stopping: watch::Sender<bool>,
}

impl Relay {
    /// A relay from an outbox into a bus. The bus need not be started.
    pub fn new(bus: &Bus, source: Arc<dyn OutboxSource>) -> Self {
        Self {
            bus: bus.clone(),
            source,
            counters: Arc::default(),
            batch: BATCH,
            max_batch: MAX_BATCH,
            tried: AtomicI64::new(0),
            last_sent: LastSent::default(),
            sweeper: Sweeper::default(),
            lease: LEASE,
            holder: holder(),
            stopping: watch::Sender::new(false),
        }
    }

    /// A relay for the outbox in the bus's own file; `Unsupported` where there is none.
    pub fn own(bus: &Bus) -> Result<Self> {
        Ok(Self::new(bus, bus.engine().outbox()?))
    }

    /// How many rows are read at a time: 100 by default, more (up to 5,000) while it is behind.
    #[must_use]
    pub fn batch(mut self, rows: usize) -> Self {
        self.batch = rows.max(1);
        self.max_batch = self.max_batch.max(self.batch);
        self
    }

    /// How many rows are read at a time at most.
    #[must_use]
    pub fn max_batch(mut self, rows: usize) -> Self {
        self.max_batch = rows.max(1);
        self
    }

    /// How long the lease lasts that keeps other relays away: 10 s by default, between 100 ms and a minute.
    /// It is renewed while the relay runs.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease.clamp(Duration::from_millis(100), LONGEST_RELAY_LEASE);
        self
    }

    /// How long the outbox keeps finished rows: by default 7 days after they were sent, and 30 days after
    /// they failed, with their dead letters. An outbox in the file of an engine uses the retention of the
    /// engine instead.
    #[must_use]
    pub fn keep(mut self, keep: OutboxKeep) -> Self {
        self.sweeper.keep = keep;
        self
    }

    /// The counts of this relay.
    pub fn stats(&self) -> RelayStats {
        self.counters.lock().clone()
    }

    /// Relays until it is stopped, or the bus is shut down or has failed: then it returns that error.
    /// Dropping the future loses nothing.
    pub async fn run(&self) -> Result<RelayStats> {
        self.relay(Until::Stopped).await
    }

    /// Relays until no row waits any more: every row was sent, or failed after its five attempts. It waits
    /// for retries, for the end of an outage, and for another relay that holds the lease.
    pub async fn run_until_empty(&self) -> Result<RelayStats> {
        self.relay(Until::Empty).await
    }

    /// Relays the rows that are ready now, and returns. Rows that wait for another attempt stay. An outage
    /// is an error. If another relay holds the lease there is nothing to do.
    pub async fn run_once(&self) -> Result<RelayStats> {
        self.relay(Until::Idle).await
    }

    /// Runs the relay in the background.
    pub fn spawn(self) -> RelayHandle {
        let (counters, stopping) = (self.counters.clone(), self.stopping.clone());
        let task = tokio::spawn(async move { self.run().await });
        RelayHandle {
            counters,
            stopping,
            task: Some(task),
        }
    }

    /// Ends every run after its current work.
    pub fn stop(&self) {
        self.stopping.send_replace(true);
    }

    pub(super) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    async fn relay(&self, until: Until) -> Result<RelayStats> {
        let mut held = None;
        let outcome = self.rounds(until, &mut held).await;
        self.counters.lock().relaying = false;
        self.counters.lock().waiting = false;
        if let Some((lease, _)) = held {
            // If the lease cannot be released, it expires.
            let released = self.source.release(lease);
            let _ = tokio::time::timeout(Duration::from_secs(1), released).await;
        }
        outcome.map(|()| self.stats())
    }

    async fn rounds(&self, until: Until, held: &mut Option<(RelayLease, Instant)>) -> Result<()> {
        let mut batch = self.batch.min(self.max_batch);
        let mut pause = FIRST_PAUSE;
        while !self.is_stopping() {
            let sent = self.counters.lock().sent;
            let passed = match self.keep_lease(held).await {
                Ok(Some(lease)) => {
                    let pass = self.pass(&lease, &mut batch);
                    let passed = self.while_keeping(&lease, held, pass).await;
                    if !matches!(passed, Passed::Outage(_) | Passed::Lost) {
                        self.sweep(&lease).await;
                    }
                    passed
                }
                Ok(None) => {
                    self.stand_by(until).await?;
                    match until {
                        Until::Idle => return Ok(()),
                        Until::Empty if self.is_empty().await? => return Ok(()),
                        _ => continue,
                    }
                }
                Err(error) => Passed::Outage(error),
            };
            match passed {
                Passed::Outage(error) => {
                    // A broker that has accepted events in this pass is reachable.
                    if self.counters.lock().sent > sent {
                        pause = FIRST_PAUSE;
                    }
                    self.endure(until, error, &mut pause).await?;
                    continue;
                }
                Passed::Lost => {
                    *held = None;
                    self.counters.lock().relaying = false;
                }
                Passed::More => {}
                Passed::Full if until == Until::Idle => return Ok(()),
                Passed::Full => self.sleep(FIRST_PAUSE).await,
                Passed::Empty { next_due } => match (until, next_due) {
                    (Until::Idle, _) | (Until::Empty, None) => return Ok(()),
                    (_, next_due) => {
                        let due = next_due.map(|due| due.since(self.bus.clock().now()));
                        self.wait(due).await;
                    }
                },
            }
            pause = FIRST_PAUSE;
            self.counters.lock().waiting = false;
        }
        Ok(())
    }

    /// Takes the lease, or renews it when a third of it is over.
    async fn keep_lease(
        &self,
        held: &mut Option<(RelayLease, Instant)>,
    ) -> Result<Option<RelayLease>> {
        if let Some((lease, since)) = held
            && since.elapsed() < self.lease / 3
        {
            return Ok(Some(lease.clone()));
        }
        let since = Instant::now();
        let acquired = self.source.acquire(self.holder.clone(), self.lease).await?;
        let first = held.is_none() && acquired.is_some();
        *held = acquired.clone().map(|lease| (lease, since));
        let relaying = acquired.is_some();
        self.counters.lock().relaying = relaying;
        if first {
            tracing::info!(target: "everbus::outbox", outbox = self.source.name(), holder = self.holder, "relaying");
        }
        Ok(acquired)
    }

    /// Renews the lease while a long operation runs.
    async fn while_keeping(
        &self,
        lease: &RelayLease,
        held: &mut Option<(RelayLease, Instant)>,
        work: impl Future<Output = Passed>,
    ) -> Passed {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                passed = &mut work => return passed,
                () = tokio::time::sleep(self.lease / 3) => {}
            }
            let since = Instant::now();
            let renewed = self.source.acquire(self.holder.clone(), self.lease);
            // If the lease cannot be renewed now, settling reports it.
            if let Ok(Some(renewed)) = renewed.await
                && renewed == *lease
            {
                *held = Some((renewed, since));
            }
        }
    }

    async fn stand_by(&self, until: Until) -> Result<()> {
        // If the bus has shut down, waiting for the lease is useless.
        self.bus.accepts()?;
        if until != Until::Idle {
            self.sleep(STAND_BY.min(self.lease / 2)).await;
        }
        Ok(())
    }

    async fn is_empty(&self) -> Result<bool> {
        Ok(self.source.status().await?.pending == 0)
    }

    /// Waits during an outage, a little longer each time.
    async fn endure(&self, until: Until, error: Error, pause: &mut Duration) -> Result<()> {
        self.counters.lock().outages += 1;
        self.counters.lock().went_wrong(&error);
        let over = error.code() == Code::EventBusShutdownError || self.bus.failure().is_some();
        if over || until == Until::Idle {
            return Err(error);
        }
        if !std::mem::replace(&mut self.counters.lock().waiting, true) {
            tracing::warn!(target: "everbus::outbox", outbox = self.source.name(), %error, "the relay waits; nothing is lost");
        }
        self.sleep(*pause).await;
        *pause = (*pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }

    /// Waits for new rows, or until a row is due.
    async fn wait(&self, due: Option<Duration>) {
        let most = self.lease / 3;
        let wait = due.map_or(most, |due| due.min(most));
        self.unless_stopping(self.source.wait(wait.max(Duration::from_millis(1))))
            .await;
    }

    async fn sleep(&self, pause: Duration) {
        self.unless_stopping(tokio::time::sleep(pause)).await;
    }

    async fn unless_stopping(&self, wait: impl Future<Output = ()>) {
        let mut stopping = self.stopping.subscribe();
        tokio::select! {
            () = wait => {}
            _ = stopping.wait_for(|stopping| *stopping) => {}
        }
    }
}

impl std::fmt::Debug for Relay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Relay")
            .field("outbox", &self.source.name())
            .field("holder", &self.holder)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// The condition that ends a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    Stopped,
    Empty,
    Idle,
}

/// The program, its process id, and a suffix that no other relay has.
fn holder() -> String {
    let program = std::env::current_exe().ok();
    let program = program.as_deref().and_then(std::path::Path::file_stem);
    let program = program.map_or_else(|| "relay".into(), |name| name.to_string_lossy());
    let unique = EventId::new().as_uuid().simple().to_string();
    format!(
        "{program} (process {}, {})",
        std::process::id(),
        &unique[20..]
    )
}

/// A relay in the background. Dropping it stops the relay after its current work.
#[derive(Debug)]
pub struct RelayHandle {
    counters: Arc<Mutex<RelayStats>>,
    stopping: watch::Sender<bool>,
    task: Option<JoinHandle<Result<RelayStats>>>,
}

impl RelayHandle {
    /// The counts of this relay.
    pub fn stats(&self) -> RelayStats {
        self.counters.lock().clone()
    }

    /// Stops the relay after its current work, and returns its counts. If the relay had ended before, the
    /// error says why.
    pub async fn stop(mut self) -> Result<RelayStats> {
        self.stopping.send_replace(true);
        match self.task.take() {
            Some(task) => task
                .await
                .map_err(|e| Error::new(Code::Internal, "the relay ended early").caused_by(e))?,
            None => Ok(self.stats()),
        }
    }
}

impl Drop for RelayHandle {
    fn drop(&mut self) {
        self.stopping.send_replace(true);
    }
}
