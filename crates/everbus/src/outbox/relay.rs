//! The relay: takes the lease of an outbox, passes over it, waits for more.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use everbus_core::{
    Code, Error, EventId, LONGEST_RELAY_LEASE, OutboxKeep, OutboxSource, RelayLease, Result,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::pass::Passed;
use super::publish::LastSent;
use super::stats::{Counters, RelayStats};
use super::sweep::Sweeper;
use crate::runtime::bus::Bus;

/// So many rows at a time when there is no hurry.
const BATCH: usize = 100;
/// So many at most when there is.
const MAX_BATCH: usize = 5000;
/// How long the lease lasts, which is how long the others wait after a relay was killed.
const LEASE: Duration = Duration::from_secs(10);
/// Waits for what cannot be reached begin and end here.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How often a relay that stands by looks whether it is its turn.
const STAND_BY: Duration = Duration::from_millis(500);

/// Publishes what is in an outbox, for as long as it runs.
///
/// Several relays of one outbox may run, in one process or in many: one of them works, the others stand by
/// and take over when its lease ends. Rows go out in their order; those with a key never overtake each
/// other. A row that the bus or the broker rejects (a payload that does not parse, a schema it does
/// not meet, an id that was used for another event) waits 1, 2, 4 and 8 seconds between five attempts,
/// and is then `failed`, with a dead letter and an event `system.dead_letter`. A broker that cannot be
/// reached is waited for, however long, and counts for no attempt. If an error does not say which of the
/// two it is, other rows tell: one that goes through after it shows that the row is to blame.
pub struct Relay {
    pub(super) bus: Bus,
    pub(super) source: Arc<dyn OutboxSource>,
    pub(super) counters: Arc<Counters>,
    pub(super) batch: usize,
    pub(super) max_batch: usize,
    /// Rows up to this one were given to the broker by this relay, marked or not.
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

    /// A relay of the outbox in the bus's own file; `Unsupported` where there is none.
    pub fn own(bus: &Bus) -> Result<Self> {
        Ok(Self::new(bus, bus.engine().outbox()?))
    }

    /// How many rows are taken at a time: 100 unless said otherwise, more (up to 5,000) while it is behind.
    #[must_use]
    pub fn batch(mut self, rows: usize) -> Self {
        self.batch = rows.max(1);
        self.max_batch = self.max_batch.max(self.batch);
        self
    }

    /// How many rows are taken at a time at most.
    #[must_use]
    pub fn max_batch(mut self, rows: usize) -> Self {
        self.max_batch = rows.max(1);
        self
    }

    /// How long the lease lasts that keeps other relays away: 10 s unless said otherwise, between 100 ms and
    /// a minute. It is renewed while the relay runs.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease.clamp(Duration::from_millis(100), LONGEST_RELAY_LEASE);
        self
    }

    /// How long the outbox keeps what is over: rows 7 days after they were sent, and those that were given
    /// up 30 days, with their dead letters, unless said otherwise. An outbox in the file of an engine goes by
    /// the retention of that, whatever is said here.
    #[must_use]
    pub fn keep(mut self, keep: OutboxKeep) -> Self {
        self.sweeper.keep = keep;
        self
    }

    /// What it has done.
    pub fn stats(&self) -> RelayStats {
        self.counters.snapshot()
    }

    /// Relays until it is stopped, or the bus is shut down or has failed: then it returns that error.
    /// Dropping the future loses nothing.
    pub async fn run(&self) -> Result<RelayStats> {
        self.relay(Until::Stopped).await
    }

    /// Relays until no row waits any more: every one was sent, or failed after its five attempts. It
    /// waits for retries, for a broker that cannot be reached and for another relay that is at work.
    pub async fn run_until_empty(&self) -> Result<RelayStats> {
        self.relay(Until::Empty).await
    }

    /// Relays what is ready now, and returns. Rows that wait for another attempt stay; what cannot be
    /// reached is an error; if another relay is at work there is nothing to do.
    pub async fn run_once(&self) -> Result<RelayStats> {
        self.relay(Until::Idle).await
    }

    /// Runs it in the background.
    pub fn spawn(self) -> RelayHandle {
        let (counters, stopping) = (self.counters.clone(), self.stopping.clone());
        let task = tokio::spawn(async move { self.run().await });
        RelayHandle {
            counters,
            stopping,
            task: Some(task),
        }
    }

    /// Makes every run end after what is under way.
    pub fn stop(&self) {
        self.stopping.send_replace(true);
    }

    pub(super) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    async fn relay(&self, until: Until) -> Result<RelayStats> {
        let mut held = None;
        let outcome = self.rounds(until, &mut held).await;
        self.counters.relaying.store(false, Ordering::Relaxed);
        self.counters.waiting.store(false, Ordering::Relaxed);
        if let Some((lease, _)) = held {
            // If it cannot be given back, it ends by itself.
            let released = self.source.release(lease);
            let _ = tokio::time::timeout(Duration::from_secs(1), released).await;
        }
        outcome.map(|()| self.stats())
    }

    async fn rounds(&self, until: Until, held: &mut Option<(RelayLease, Instant)>) -> Result<()> {
        let mut batch = self.batch.min(self.max_batch);
        let mut pause = FIRST_PAUSE;
        while !self.is_stopping() {
            let sent = self.counters.sent.load(Ordering::Relaxed);
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
                    // A broker that has taken something is not one that is gone.
                    if self.counters.sent.load(Ordering::Relaxed) > sent {
                        pause = FIRST_PAUSE;
                    }
                    self.endure(until, error, &mut pause).await?;
                    continue;
                }
                Passed::Lost => {
                    *held = None;
                    self.counters.relaying.store(false, Ordering::Relaxed);
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
            self.counters.waiting.store(false, Ordering::Relaxed);
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
        self.counters.relaying.store(relaying, Ordering::Relaxed);
        if first {
            tracing::info!(target: "everbus::outbox", outbox = self.source.name(), holder = self.holder, "relaying");
        }
        Ok(acquired)
    }

    /// Renews the lease while something runs that may take long.
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
            // If it cannot be renewed now, settling will tell.
            if let Ok(Some(renewed)) = renewed.await
                && renewed == *lease
            {
                *held = Some((renewed, since));
            }
        }
    }

    async fn stand_by(&self, until: Until) -> Result<()> {
        // A bus that is no more will not be needed when the turn comes.
        self.bus.accepts()?;
        if until != Until::Idle {
            self.sleep(STAND_BY.min(self.lease / 2)).await;
        }
        Ok(())
    }

    async fn is_empty(&self) -> Result<bool> {
        Ok(self.source.status().await?.pending == 0)
    }

    /// Waits for what cannot be reached, a little longer each time.
    async fn endure(&self, until: Until, error: Error, pause: &mut Duration) -> Result<()> {
        Counters::add(&self.counters.outages, 1);
        self.counters.went_wrong(&error);
        let over = error.code() == Code::EventBusShutdownError || self.bus.failure().is_some();
        if over || until == Until::Idle {
            return Err(error);
        }
        if !self.counters.waiting.swap(true, Ordering::Relaxed) {
            tracing::warn!(target: "everbus::outbox", outbox = self.source.name(), %error, "the relay waits; nothing is lost");
        }
        self.sleep(*pause).await;
        *pause = (*pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }

    /// Waits for something new, or until a row is due.
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

/// When a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    Stopped,
    Empty,
    Idle,
}

/// The program, its process, and something that no other relay has.
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

/// A relay in the background. Dropping it stops the relay after what is under way.
#[derive(Debug)]
pub struct RelayHandle {
    counters: Arc<Counters>,
    stopping: watch::Sender<bool>,
    task: Option<JoinHandle<Result<RelayStats>>>,
}

impl RelayHandle {
    /// What it has done.
    pub fn stats(&self) -> RelayStats {
        self.counters.snapshot()
    }

    /// Stops it after what is under way, and returns what it has done. If it had ended by itself, the
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
